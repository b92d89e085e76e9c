//! The deep-learning test: memory, products, layers, copies and heat of every GPU, checked value by value.
//!
//! It needs only NVIDIA's driver. The right answers are known beforehand, so each GPU is classified by itself and not
//! by comparison with others, which may be wrong in the same way. Each run starts with injected errors that must be detected.

pub mod copies;
pub mod expected_sums;
pub mod gemm;
mod kernels;
pub mod layers;
pub mod memory;
pub mod negative_control;
mod one_gpu;
pub mod thermal_load;

use std::{
    collections::HashMap,
    error::Error,
    ffi::OsString,
    sync::{Arc, Mutex, OnceLock, PoisonError},
    thread,
    time::Duration,
};

use doctor_checks::document::Measurements;
use doctor_core::{
    observation::{Entity, EntityKind, Event, FailureKind, Metric, ProbeFailure, Unit},
    view::plural,
};

use crate::{
    cublas::Cublas,
    cuda::{self, Cuda, CudaError, Gpu},
};
use gemm::{NumberFormat, Shape};
use memory::MemoryTester;
use negative_control::InjectedErrorKind;

/// The CUDA version of the first driver that accepts the kernels.
const CUDA_12_0: i32 = 12_000;

/// Options of the test.
#[derive(Debug, Clone)]
pub struct Options {
    /// libcuda, by name or path.
    pub cuda: OsString,
    /// NVML, for temperatures and clocks.
    pub nvml: OsString,
    /// How long to apply load at most. Zero: only the cold test.
    pub load_time: Duration,
    /// Injects one such error into each measured product, as an end-to-end trial.
    pub inject: Option<InjectedErrorKind>,
    /// Injects this many errors of each kind after the test, and counts those detected.
    pub trials: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            cuda: cuda::LIBRARY.into(),
            nvml: crate::nvml::LIBRARY.into(),
            load_time: Duration::from_secs(20),
            inject: None,
            trials: 0,
        }
    }
}

/// Receives progress messages while the test runs.
pub type ProgressSink<'a> = dyn Fn(&str) + Sync + 'a;

/// Tests all GPUs of the machine in parallel.
///
/// # Errors
/// Fails if there is no GPU, or no driver for it.
pub fn run(options: &Options, progress: &ProgressSink<'_>) -> Result<Measurements, ProbeFailure> {
    let cuda = Cuda::open(&options.cuda).map_err(|error| error.failure())?;
    let version = cuda.version().map_err(|error| error.failure())?;
    if version < CUDA_12_0 {
        let text = format!(
            "the driver supports CUDA {}.{}; driver 525 or newer is required",
            version / 1000,
            version % 1000 / 10
        );
        return Err(ProbeFailure::new(FailureKind::Missing, text));
    }
    let count = cuda.count().map_err(|error| error.failure())?;
    if count == 0 {
        return Err(ProbeFailure::new(FailureKind::Missing, "the CUDA driver sees no GPU on this machine"));
    }
    let known = ExpectedSums::default();
    let mut all = Measurements::default();
    let parts = thread::scope(|scope| {
        // Runs while the driver compiles.
        scope.spawn(|| NumberFormat::ALL.iter().for_each(|&number| drop(known.get(number, one_gpu::shape_of(number)))));
        let threads: Vec<_> = (0..count)
            .map(|index| {
                let (cuda, known) = (&cuda, &known);
                scope.spawn(move || one_gpu::test(cuda, index, options, known, progress))
            })
            .collect();
        threads.into_iter().map(thread::ScopedJoinHandle::join).collect::<Vec<_>>()
    });
    for (index, part) in parts.into_iter().enumerate() {
        match part {
            Ok(part) => {
                all.metrics.extend(part.metrics);
                all.events.extend(part.events);
                all.failures.extend(part.failures);
            }
            Err(_) => {
                all.failures.push(ProbeFailure::new(FailureKind::Failed, format!("GPU {index}: the test panicked")))
            }
        }
    }
    if count > 1 && all.events.is_empty() {
        peer_copies(&cuda, count, &mut all, progress);
    }
    Ok(all)
}

/// Measures our checked kernel and cuBLAS alternately, in flop/s. For benchmarks.
///
/// # Errors
/// Fails if the driver or cuBLAS returns an error.
pub fn compare_with_cublas(
    gpu: &Gpu<'_>,
    cublas: &Cublas,
    repeats: usize,
) -> Result<Vec<(f64, f64)>, Box<dyn Error + Send + Sync>> {
    const TIMES: u32 = 10;
    let (products, ()) = kernels::load_gemm_modules(gpu, || Ok(()))?;
    let multipliers = gemm::GemmKernels::new(gpu, kernels::CommonModules::load(gpu)?.checks, products)?;
    let shape = one_gpu::shape_of(NumberFormat::Bf16);
    let sums = expected_sums::row_sums(shape.m, shape.n, shape.k, NumberFormat::Bf16.range());
    let product = multipliers.product(NumberFormat::Bf16, shape, &sums)?;
    let rate = |seconds: f64| shape.flop() * f64::from(TIMES) / seconds;
    let mut pairs = Vec::new();
    // The first turn is a warm-up for both.
    for turn in 0..=repeats {
        let own_seconds = gpu.timed(|| {
            (0..TIMES).try_for_each(|_| {
                product.multiply()?;
                product.check()
            })
        })?;
        if !product.take_wrong_rows()?.is_empty() {
            return Err("a product is wrong".into());
        }
        let mut cublas_error = None;
        let cublas_seconds = gpu.timed(|| {
            cublas_error = (0..TIMES).try_for_each(|_| product.multiply_by(cublas)).err();
            Ok(())
        })?;
        if let Some(error) = cublas_error {
            return Err(error.into());
        }
        if turn > 0 {
            pairs.push((rate(own_seconds), rate(cublas_seconds)));
        }
    }
    Ok(pairs)
}

/// Copies from each GPU to the next in a ring: every GPU sends once and receives once.
fn peer_copies(cuda: &Cuda, count: usize, all: &mut Measurements, progress: &ProgressSink<'_>) {
    for index in 0..count {
        let pair = (index, (index + 1) % count);
        if let Err(error) = peer_copy(cuda, pair, all, progress) {
            let text = format!("copies from GPU {} to GPU {}: {error}", pair.0, pair.1);
            if error.is_hardware() {
                all.events.push(Event::seen("gpu-failed", Entity::new(EntityKind::Gpu, pair.0.to_string()), text));
            } else {
                all.failures.push(ProbeFailure::new(FailureKind::Failed, text));
            }
        }
    }
}

fn peer_copy(
    cuda: &Cuda,
    pair: (usize, usize),
    all: &mut Measurements,
    progress: &ProgressSink<'_>,
) -> Result<(), CudaError> {
    let far = cuda.gpu(pair.1)?;
    let far_tester = MemoryTester::new(&far)?;
    let near = cuda.gpu(pair.0)?;
    let near_tester = MemoryTester::new(&near)?;
    let copied = copies::between(&near_tester, &far_tester)?;
    let link = Entity::new(EntityKind::Link, format!("{}-{}", one_gpu::gpu_bus_id(&near), one_gpu::gpu_bus_id(&far)));
    progress(&format!("{link}: {:.1} GB/s, {}", copied.rate / 1e9, one_gpu::wrong_words(copied.wrong)));
    all.metrics.push(Metric::new("p2p_bytes_per_s", link.clone(), copied.rate, Unit::BytesPerSecond));
    all.metrics.push(Metric::count("copy_wrong_words", link.clone(), copied.wrong as f64));
    if copied.wrong > 0 {
        let count = plural(usize::try_from(copied.wrong).unwrap_or(usize::MAX), "copied 64-bit word");
        all.events.push(Event::seen("copy-wrong", link, format!("{count} arrived wrong")));
    }
    Ok(())
}

/// The checksums of the products, by shape and range of numbers, computed once for all GPUs.
#[derive(Debug, Default)]
struct ExpectedSums(Mutex<HashMap<(Shape, u32), SumsOnce>>);

type Sums = Arc<Vec<u32>>;
type SumsOnce = Arc<OnceLock<Sums>>;

impl ExpectedSums {
    fn get(&self, number: NumberFormat, shape: Shape) -> Sums {
        let entry = {
            let mut sums = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(sums.entry((shape, number.range())).or_default())
        };
        // A second caller waits only for these sums, not for others.
        Arc::clone(entry.get_or_init(|| Arc::new(expected_sums::row_sums(shape.m, shape.n, shape.k, number.range()))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_the_driver_there_is_no_measurement_and_the_reason_says_so() {
        let options = Options { cuda: "libcuda-that-is-not-there.so".into(), ..Options::default() };
        let failure = run(&options, &|_| {}).unwrap_err();
        assert_eq!(failure.kind, FailureKind::Missing);
        assert!(failure.text.contains("libcuda-that-is-not-there.so cannot be loaded"), "{}", failure.text);
    }
}
