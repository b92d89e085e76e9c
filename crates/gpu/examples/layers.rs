//! Runs the layers on the first GPU and prints a table: a manual trial of what `doctor-node test dl` runs.
//!
//! `layers [REPEATS [ERRORS]]`: runs the layers this many times, then injects at least this many errors of each kind
//! into their outputs. Exits 1 if an output is wrong without an injected error, or if an injected error is not detected.

use std::{env, ffi::OsStr, process::ExitCode, time::Instant};

use doctor_gpu::{
    cuda::{Cuda, CudaError, LIBRARY},
    dl::{
        layers::{Layers, LayersReport},
        negative_control::{self, ControlResult, InjectedErrorKind},
    },
};

fn main() -> ExitCode {
    let mut numbers = env::args().skip(1).map_while(|text| text.parse().ok());
    let (repeats, errors) = (numbers.next().unwrap_or(3), numbers.next().unwrap_or(1));
    match trial(repeats, errors.into()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}

fn trial(repeats: u32, errors: u64) -> Result<bool, CudaError> {
    let started = Instant::now();
    let cuda = Cuda::open(OsStr::new(LIBRARY))?;
    let gpu = cuda.gpu(0)?;
    let (name, capability) = (gpu.name()?, gpu.capability()?);
    println!("{name}, compute capability {capability}, opened in {:.3} s", started.elapsed().as_secs_f64());
    let started = Instant::now();
    let layers = Layers::load(&gpu)?;
    println!("compiled and made ready in {:.3} s", started.elapsed().as_secs_f64());
    let started = Instant::now();
    let report = layers.run(repeats, &[])?;
    println!("{repeats} repeats in {:.3} s", started.elapsed().as_secs_f64());
    print(&report);
    let result = negative_control(&layers, errors)?;
    Ok(report.is_right() && result)
}

fn print(report: &LayersReport) {
    println!(
        "{:<22} {:>7} {:>9} {:>10} {:>18} {:>6} {:>7}",
        "pass", "numbers", "error", "of allowed", "fingerprint", "wrong", "us"
    );
    for pass in &report.passes {
        let (numbers, deviation) = (pass.pass.spec().numbers, pass.deviation);
        println!(
            "{:<22} {numbers:>7} {:>9.2e} {:>10.3} {:#018x} {:>6} {:>7.1}",
            pass.pass.name(),
            deviation.error,
            deviation.of_tolerance,
            pass.fingerprint,
            pass.wrong_replicas,
            pass.seconds / f64::from(report.repeats) * 1e6,
        );
        for wrong in &pass.wrong {
            println!("    {wrong:x?}");
        }
    }
    let (covered, all) = (report.covered(), report.multiprocessors);
    println!(
        "{covered} of {all} multiprocessors, {} replicas, {:.3} s on the device",
        report.replicas,
        report.seconds()
    );
}

fn negative_control(layers: &Layers<'_>, errors: u64) -> Result<bool, CudaError> {
    let mut clear = true;
    for &kind in InjectedErrorKind::ALL {
        let started = Instant::now();
        let trial = negative_control::layers(layers, &[kind], errors)?;
        clear &= trial.all_detected();
        let ControlResult { injected, detected: caught, false_alarms } = trial;
        let (name, seconds) = (kind.name(), started.elapsed().as_secs_f64());
        println!("{name}: {caught} of {injected} found, {false_alarms} false alarms, {seconds:.3} s");
    }
    Ok(clear)
}
