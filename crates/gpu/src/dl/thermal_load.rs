//! Load until the GPU reaches its final temperature, with every product checked: some errors occur only at heat, and a
//! cooling fault shows only then.

use std::{
    ffi::OsStr,
    time::{Duration, Instant},
};

use super::gemm::Gemm;
use crate::{
    cuda::{CudaError, Gpu},
    nvml::Nvml,
};

/// The driver's readings at one moment under load.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Sample {
    /// Seconds since the load began.
    pub seconds: f64,
    pub celsius: Option<f64>,
    pub watts: Option<f64>,
    pub megahertz: Option<f64>,
    /// NVML's clock event reasons, as a bit mask.
    pub reasons: Option<u64>,
}

/// The behaviour of the GPU under load.
#[derive(Debug, Clone, Default)]
pub struct LoadReport {
    pub samples: Vec<Sample>,
    pub seconds: f64,
    /// Products and checks together, over the last third, when the GPU is warm.
    pub flop_per_s: f64,
    /// The number of products, each checked. Wrong rows are kept on the device.
    pub products: u64,
    /// Whether the temperature had stopped rising.
    pub plateau: bool,
}

/// Clock event reasons that are faults: hardware slowdown (8), thermal slowdown (64, in software 32), power brake
/// (128). The power cap (4) is normal for a GPU under full load.
pub const FAULTY_REASONS: u64 = 8 | 32 | 64 | 128;

/// The GPU is warm when it has risen by no more than this over the window.
const PLATEAU_CELSIUS: f64 = 1.0;
const PLATEAU_SECONDS: f64 = 5.0;
const MIN_SECONDS: f64 = 8.0;

/// Runs products back to back, each with its check, until the temperature stops rising or the time is over.
pub fn run(
    gpu: &Gpu<'_>,
    product: &Gemm<'_>,
    nvml: &OsStr,
    bus: &str,
    max_duration: Duration,
) -> Result<LoadReport, CudaError> {
    let driver = Nvml::open(nvml).ok();
    let once = gpu.timed(|| multiply_and_check(product))?;
    let batch = (0.1 / once).clamp(1.0, 10_000.0) as u32;
    let started = Instant::now();
    let mut report = LoadReport::default();
    let mut rates = Vec::new();
    while started.elapsed() < max_duration {
        let seconds = gpu.timed(|| (0..batch).try_for_each(|_| multiply_and_check(product)))?;
        rates.push(product.shape.flop() * f64::from(batch) / seconds);
        report.products += u64::from(batch);
        let seconds = started.elapsed().as_secs_f64();
        report.samples.push(sample(driver.as_ref(), bus, seconds));
        if is_plateau(&report.samples) {
            report.plateau = true;
            break;
        }
    }
    report.seconds = started.elapsed().as_secs_f64();
    let warm = &rates[rates.len() - rates.len().div_ceil(3)..];
    report.flop_per_s = if warm.is_empty() { 0.0 } else { warm.iter().sum::<f64>() / warm.len() as f64 };
    Ok(report)
}

fn multiply_and_check(product: &Gemm<'_>) -> Result<(), CudaError> {
    product.multiply()?;
    product.check()
}

fn sample(driver: Option<&Nvml>, bus: &str, seconds: f64) -> Sample {
    let fields = ["temperature.gpu", "power.draw", "clocks.sm", "clocks_event_reasons.active"].map(str::to_owned);
    let result = driver.map(|driver| driver.query(&fields, Vec::new(), &mut |_, _| {}));
    let gpu = result.as_ref().and_then(|result| result.gpus.iter().find(|gpu| gpu.bus == bus));
    let number = |name: &str| gpu.and_then(|gpu| gpu.number(name));
    Sample {
        seconds,
        celsius: number("temperature.gpu"),
        watts: number("power.draw"),
        megahertz: number("clocks.sm"),
        reasons: number("clocks_event_reasons.active").map(|mask| mask as u64),
    }
}

fn is_plateau(samples: &[Sample]) -> bool {
    let Some(last) = samples.last() else { return false };
    if last.seconds < MIN_SECONDS {
        return false;
    }
    let window = samples.iter().filter(|sample| sample.seconds >= last.seconds - PLATEAU_SECONDS);
    let (low, high) = window
        .filter_map(|sample| sample.celsius)
        .fold((f64::MAX, f64::MIN), |(low, high), celsius| (low.min(celsius), high.max(celsius)));
    low <= high && high - low <= PLATEAU_CELSIUS
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(celsius: impl Fn(f64) -> Option<f64>) -> Vec<Sample> {
        let at = |tenth: u32| f64::from(tenth) / 10.0;
        (0..150).map(|tenth| Sample { seconds: at(tenth), celsius: celsius(at(tenth)), ..Sample::default() }).collect()
    }

    #[test]
    fn a_constant_temperature_is_a_plateau_and_a_rising_one_is_not() {
        assert!(is_plateau(&samples(|_| Some(60.0))));
        assert!(is_plateau(&samples(|seconds| Some(if seconds < 9.0 { 40.0 + seconds } else { 50.0 }))));
        assert!(!is_plateau(&samples(|seconds| Some(40.0 + seconds))));
    }

    #[test]
    fn an_unknown_temperature_is_no_plateau() {
        assert!(!is_plateau(&samples(|_| None)));
        assert!(!is_plateau(&[]));
    }
}
