//! M8 to M10: the deep-learning test on a real GPU, run by the shipped program. Skipped on machines without a GPU.
//!
//! M8 is the time to a verdict, M9 how close the kernels come to the chip's peak, M10 whether errors are detected. The
//! correctness checks are part of the test: every number is verified, and each run starts with injected errors.

use std::{
    ffi::OsString,
    path::PathBuf,
    process::{Command, Stdio},
    time::Instant,
};

use anyhow::{Context, Result, bail, ensure};
use doctor_checks::{document::Measurements, probe::ProbeOutput};
use doctor_gpu::{
    cublas::Cublas,
    cuda::{Cuda, LIBRARY},
    dl::{compare_with_cublas, negative_control::InjectedErrorKind},
};
use serde_json::{Value, json};

use crate::{
    Measured,
    figure::Figure,
    stopwatch::{median, spread},
};

/// Few, because each cold verdict takes seconds.
const REPEATS: usize = 9;

/// The number of errors of each kind in each part of the test.
const TRIALS: u64 = 10_000;

fn figure(name: &str, value: f64, unit: &'static str, inputs: &Value, note: String) -> Figure {
    Figure { name: name.to_owned(), value, unit, inputs: inputs.clone(), note }
}

/// Opens the GPU driver, or returns why there is no GPU to measure.
fn gpu_or_not() -> Result<Cuda, String> {
    Cuda::open(LIBRARY.as_ref()).map_err(|error| error.failure().text)
}

/// Returns the `doctor-node` beside this program, where it was built or copied to.
fn program() -> Result<PathBuf> {
    let here = std::env::current_exe().context("finding this program")?;
    let program = here.with_file_name("doctor-node");
    ensure!(program.exists(), "there is no {}: build it (`make build`)", program.display());
    Ok(program)
}

/// Runs the test in its own process, with the driver's compilation cache disabled.
fn test(args: &[&str]) -> Result<(f64, Measurements)> {
    let began = Instant::now();
    let ran = Command::new(program()?)
        .arg("__test")
        .arg("dl")
        .args(args)
        .env("CUDA_CACHE_DISABLE", "1")
        .stderr(Stdio::null())
        .output()
        .context("starting doctor-node")?;
    let seconds = began.elapsed().as_secs_f64();
    let answer: ProbeOutput = serde_json::from_slice(&ran.stdout).context("reading the output of the test")?;
    let ProbeOutput::Text(text) = answer else { bail!("the test returned no measurements: {answer:?}") };
    let seen: Measurements = serde_json::from_str(&text).context("reading the measurements of the test")?;
    ensure!(seen.failures.is_empty(), "the test could not read everything: {:?}", seen.failures);
    ensure!(seen.events.is_empty(), "the test reports faults of this GPU: {:?}", seen.events);
    Ok((seconds, seen))
}

fn value(seen: &Measurements, name: &str) -> Result<f64> {
    let metric = seen.metrics.iter().find(|metric| metric.name == name);
    metric.map(|metric| metric.value).with_context(|| format!("the test did not report `{name}`"))
}

pub(crate) fn run_verdict() -> Result<Measured> {
    let name = match gpu_or_not() {
        Ok(cuda) => cuda.gpu(0)?.name()?,
        Err(why) => return Ok(Measured::NotAvailable(why)),
    };
    let inputs = json!({ "gpu": name });
    let mut cold = Vec::new();
    for _ in 0..REPEATS {
        cold.push(test(&["--heat=0s"])?.0);
    }
    let (warm, seen) = test(&["--heat=20s"])?;
    let note = format!("until the temperature was stable, {:.1} s of load", value(&seen, "load_seconds")?);
    Ok(Measured::Figures(vec![
        figure("verdict_s", warm, "s", &inputs, note),
        figure("cold_verdict_s", median(&cold), "s", &inputs, format!("without cached kernels; {}", spread(&cold))),
    ]))
}

pub(crate) fn run_rates() -> Result<Measured> {
    let cuda = match gpu_or_not() {
        Ok(cuda) => cuda,
        Err(why) => return Ok(Measured::NotAvailable(why)),
    };
    let gpu = cuda.gpu(0)?;
    let inputs = json!({ "gpu": gpu.name()? });
    let (_, seen) = test(&["--heat=0s"])?;
    let (ours, copy) = (value(&seen, "memory_bytes_per_s")?, value(&seen, "memory_copy_bytes_per_s")?);
    let note = format!("{:.0} GB/s written and read; the driver's copy: {:.0} GB/s", ours / 1e9, copy / 1e9);
    let mut figures = vec![
        figure("hbm_ratio_copy", ours / copy, "ratio", &inputs, note),
        figure("hbm_covered_percent", value(&seen, "memory_tested_percent")?, "percent", &inputs, String::new()),
    ];
    let library: OsString = std::env::var_os("DOCTOR_CUBLAS").unwrap_or_else(|| "libcublas.so.13".into());
    match Cublas::open(&library) {
        Ok(cublas) => {
            let pairs = compare_with_cublas(&gpu, &cublas, REPEATS).map_err(|error| anyhow::anyhow!(error))?;
            let ratios: Vec<f64> = pairs.iter().map(|(ours, theirs)| ours / theirs).collect();
            let of = |pick: fn(&(f64, f64)) -> f64| median(&pairs.iter().map(pick).collect::<Vec<_>>()) / 1e12;
            let note = format!(
                "bf16 with every number checked {:.0} Tflop/s, cuBLAS without checks {:.0} Tflop/s, interleaved; {}",
                of(|pair| pair.0),
                of(|pair| pair.1),
                spread(&ratios)
            );
            figures.push(figure("gemm_ratio_cublas", median(&ratios), "ratio", &inputs, note));
        }
        Err(why) => eprintln!("NOT RUN: M9: gemm_ratio_cublas: {why}; set DOCTOR_CUBLAS to the library"),
    }
    Ok(Measured::Figures(figures))
}

pub(crate) fn run_detection() -> Result<Measured> {
    let name = match gpu_or_not() {
        Ok(cuda) => cuda.gpu(0)?.name()?,
        Err(why) => return Ok(Measured::NotAvailable(why)),
    };
    let inputs = json!({ "gpu": name, "errors_of_each_kind_and_part": TRIALS });
    let (_, seen) = test(&["--heat=0s", &format!("--trials={TRIALS}")])?;
    let (mut planted, mut caught, mut false_alarms) = (0.0, 0.0, 0.0);
    for kind in InjectedErrorKind::ALL {
        for part in ["products", "memory", "layers"] {
            let of = |what: &str| value(&seen, &format!("trial_{part}_{}_{what}", kind.name().replace('-', "_")));
            planted += of("planted")?;
            caught += of("caught")?;
            false_alarms += of("false_alarms")?;
        }
    }
    let note = format!("{caught} of {planted} planted errors found, in products, memory and layers");
    Ok(Measured::Figures(vec![
        figure("caught_percent", 100.0 * caught / planted, "percent", &inputs, note),
        figure("false_alarms", false_alarms, "count", &inputs, String::new()),
    ]))
}
