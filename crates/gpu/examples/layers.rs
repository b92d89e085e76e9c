//! The layers on the first GPU, as a table: a trial by hand of what `doctor-node test dl` runs.
//!
//! `layers [REPEATS [ROUNDS]]`: the layers so many times; then, so many times, errors of each kind planted in every
//! replica of every pass. Ends with 1 if an output is wrong where nothing was planted, or if a planted error is not found.

use std::{env, ffi::OsStr, process::ExitCode, time::Instant};

use doctor_gpu::{
    cuda::{Cuda, CudaError, LIBRARY},
    dl::layers::{Layers, LayersReport, Pass, Planted, PlantedError, Replicas},
};

fn main() -> ExitCode {
    let number = |place, otherwise| env::args().nth(place).and_then(|text| text.parse().ok()).unwrap_or(otherwise);
    match trial(number(1, 3), number(2, 1)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}

fn trial(repeats: u32, rounds: u32) -> Result<bool, CudaError> {
    let began = Instant::now();
    let cuda = Cuda::open(OsStr::new(LIBRARY))?;
    let gpu = cuda.gpu(0)?;
    let (name, capability) = (gpu.name()?, gpu.capability()?);
    println!("{name}, compute capability {capability}, opened in {:.3} s", began.elapsed().as_secs_f64());
    let began = Instant::now();
    let layers = Layers::load(&gpu)?;
    println!("compiled and made ready in {:.3} s", began.elapsed().as_secs_f64());
    let began = Instant::now();
    let report = layers.run(repeats, &[])?;
    println!("{repeats} repeats in {:.3} s", began.elapsed().as_secs_f64());
    print(&report);
    let found = negative_control(&layers, rounds)?;
    Ok(report.is_right() && found)
}

fn print(report: &LayersReport) {
    println!(
        "{:<22} {:>7} {:>9} {:>10} {:>18} {:>6} {:>7}",
        "pass", "numbers", "error", "of allowed", "fingerprint", "wrong", "us"
    );
    for pass in &report.passes {
        let (numbers, deviation) = (pass.pass.known().numbers, pass.deviation);
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

struct Kind {
    name: &'static str,
    error: fn(u32) -> PlantedError,
    /// One and the same error in all replicas; otherwise in another place of each.
    same: bool,
}

const KINDS: [Kind; 4] = [
    Kind { name: "lost", error: |_| PlantedError::Lost, same: false },
    Kind { name: "one bit turned", error: |seed| PlantedError::Flipped { bit: seed % 32 }, same: false },
    Kind { name: "not a number", error: |_| PlantedError::NotANumber, same: false },
    Kind { name: "the same bit everywhere", error: |seed| PlantedError::Flipped { bit: seed % 32 }, same: true },
];

fn negative_control(layers: &Layers<'_>, rounds: u32) -> Result<bool, CudaError> {
    let mut all_found = true;
    for Kind { name, error, same } in KINDS {
        let began = Instant::now();
        let (mut planted, mut found) = (0, 0);
        for round in 0..rounds {
            let errors = errors(layers.replicas(), round, error, same);
            let report = layers.run(1, &errors)?;
            for pass in &report.passes {
                let changed = errors
                    .iter()
                    .zip(&report.planted_changed)
                    .filter(|(one, changed)| one.pass == pass.pass && **changed);
                let expected = if same { layers.replicas() * changed.count() } else { changed.count() };
                planted += expected;
                found += pass.wrong_replicas;
                // The comparison with the reference sees the first replica, where a NaN is never allowed.
                all_found &=
                    pass.wrong_replicas == expected && (name != "not a number" || !pass.deviation.is_allowed());
            }
        }
        println!("{name}: {found} of {planted} found in {:.3} s", began.elapsed().as_secs_f64());
    }
    Ok(all_found)
}

fn errors(replicas: usize, round: u32, error: fn(u32) -> PlantedError, same: bool) -> Vec<Planted> {
    let mut state = round.wrapping_add(1);
    let mut next = move || {
        // Steps of a generator modulo 2³²; its upper bits are the good ones.
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 12
    };
    let mut all = Vec::new();
    for pass in Pass::ALL {
        let into: Vec<Replicas> = if same { vec![Replicas::All] } else { (0..replicas).map(Replicas::One).collect() };
        for replicas in into {
            let place = next() as usize % pass.known().numbers;
            all.push(Planted { pass, replicas, place, error: error(next()) });
        }
    }
    all
}
