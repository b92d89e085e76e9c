//! The whole test on one GPU, in order: negative control, memory, products, layers, copies, heat.

use std::time::Instant;

use doctor_checks::{document::Measurements, gpu::normalize_bus_id};
use doctor_core::{
    observation::{Entity, EntityKind, Event, FailureKind, Metric, ProbeFailure, Unit},
    view::plural,
};

use super::{
    ExpectedSums, Options, ProgressSink,
    copies::{self, CopyReport},
    gemm::{Gemm, GemmKernels, NumberFormat, Shape},
    kernels,
    layers::{Layers, LayersReport},
    memory::{MemoryReport, MemoryTester, PATTERNS},
    negative_control,
    negative_control::{ControlResult, InjectedErrorKind},
    thermal_load::{self, FAULTY_REASONS, LoadReport},
};
use crate::cuda::{Cuda, CudaError, Gpu};

/// A multiple of the tiles of every kernel, which gives each multiprocessor of an H100 or H200 13 tiles.
const ROWS: u32 = 8448;
const COLUMNS: u32 = 8320;

/// Returns the shape of a product, deep enough that checking a number costs little compared with computing it.
pub(super) const fn shape_of(number: NumberFormat) -> Shape {
    let k = match number {
        NumberFormat::Bf16 => 16384,
        _ => 8192,
    };
    Shape { m: ROWS, n: COLUMNS, k }
}

/// The number of errors of each kind injected at the start.
const CONTROL_ERRORS: u64 = 256;

/// Keeps the list of errors readable.
const MAX_EVENTS: usize = 16;

/// The oldest compute capability that the kernels support: Ampere.
const MIN_COMPUTE_CAPABILITY: i32 = 80;

/// Returns the PCI address of a GPU in the form that all checks use.
pub(super) fn gpu_bus_id(gpu: &Gpu<'_>) -> String {
    gpu.bus_id().ok().and_then(|text| normalize_bus_id(&text)).unwrap_or_else(|| "unknown".to_owned())
}

/// Formats a number of wrong words with its noun.
pub(super) fn wrong_words(count: u64) -> String {
    plural(usize::try_from(count).unwrap_or(usize::MAX), "wrong word")
}

/// Tests one GPU. Parts that could not be tested are reported as unread.
pub(super) fn test(
    cuda: &Cuda,
    index: usize,
    options: &Options,
    known: &ExpectedSums,
    progress: &ProgressSink<'_>,
) -> Measurements {
    let started = Instant::now();
    let gpu = match cuda.gpu(index) {
        Ok(gpu) => gpu,
        Err(error) => {
            let unread = vec![ProbeFailure::new(FailureKind::Failed, format!("GPU {index}: {error}"))];
            return Measurements { failures: unread, ..Measurements::default() };
        }
    };
    let entity = Entity::new(EntityKind::Gpu, gpu_bus_id(&gpu));
    let mut reporter = GpuReporter { entity, began: started, progress, measurements: Measurements::default() };
    if let Err(error) = run_tests(&gpu, options, known, &mut reporter) {
        reporter.report_error(&error);
    }
    reporter.measurements
}

fn run_tests(
    gpu: &Gpu<'_>,
    options: &Options,
    known: &ExpectedSums,
    reporter: &mut GpuReporter<'_>,
) -> Result<(), CudaError> {
    let capability = gpu.capability()?;
    reporter.progress_line(&format!("{}, compute capability {}.{}", gpu.name()?, capability / 10, capability % 10));
    if capability < MIN_COMPUTE_CAPABILITY {
        let text = format!("{}: compute capability {}.{}", reporter.entity, capability / 10, capability % 10);
        reporter
            .measurements
            .failures
            .push(ProbeFailure::new(FailureKind::Unsupported, format!("{text}; 8.0 or newer is required")));
        return Ok(());
    }
    let small = kernels::CommonModules::load(gpu)?;
    let tester = MemoryTester::with_module(gpu, small.memory)?;
    let layers = Layers::with_module(gpu, small.layers)?;
    reporter.progress_line("the first kernels are ready");
    let (multiplying, (mut trial, memory)) = kernels::load_gemm_modules(gpu, || {
        let trial = negative_control::layers(&layers, InjectedErrorKind::ALL, 1)?.combine(memory_trials(gpu, &tester)?);
        Ok((trial, tester.run(PATTERNS)?))
    })?;
    let multipliers = GemmKernels::new(gpu, small.checks, multiplying)?;
    reporter.progress_line("all kernels are ready");
    {
        let product =
            multipliers.product(NumberFormat::Bf16, CONTROL_SHAPE, &known.get(NumberFormat::Bf16, CONTROL_SHAPE))?;
        for &kind in InjectedErrorKind::ALL {
            trial = trial.combine(negative_control::products(&product, kind, CONTROL_ERRORS, SEED)?);
        }
        reporter.control(trial);
        // A GPU that is wrong where no error was planted is tested all the same: the tests name what is wrong.
        if !trial.finds_errors() {
            return Ok(());
        }
    }
    reporter.memory(&memory);
    for number in multipliers.formats() {
        let shape = shape_of(number);
        let product = multipliers.product(number, shape, &known.get(number, shape))?;
        products(gpu, &product, options, reporter)?;
    }
    reporter.layers(&layers.run(LAYER_REPEATS, &[])?);
    reporter.copies(copies::run(gpu, &tester)?);
    if !options.load_time.is_zero() {
        let shape = shape_of(NumberFormat::Bf16);
        let product = multipliers.product(NumberFormat::Bf16, shape, &known.get(NumberFormat::Bf16, shape))?;
        reporter.heat(&thermal_load::run(
            gpu,
            &product,
            &options.nvml,
            &reporter.entity.id.clone(),
            options.load_time,
        )?);
        reporter.wrong_rows(&product)?;
    }
    if options.trials > 0 {
        let shape = shape_of(NumberFormat::Bf16);
        let product = multipliers.product(NumberFormat::Bf16, shape, &known.get(NumberFormat::Bf16, shape))?;
        for &kind in InjectedErrorKind::ALL {
            reporter.trials(kind, "products", negative_control::products(&product, kind, options.trials, 7)?);
            reporter.trials(kind, "memory", negative_control::memory(gpu, &tester, kind, options.trials, 11)?);
            reporter.trials(kind, "layers", negative_control::layers(&layers, &[kind], options.trials)?);
        }
    }
    reporter.progress_line("done");
    Ok(())
}

/// Small, because it is only checked and not measured.
const CONTROL_SHAPE: Shape = Shape { m: 1280, n: 1280, k: 2048 };

const LAYER_REPEATS: u32 = 3;

const SEED: u64 = 1;

fn memory_trials(gpu: &Gpu<'_>, tester: &MemoryTester<'_>) -> Result<ControlResult, CudaError> {
    let mut all = ControlResult::default();
    for &kind in InjectedErrorKind::ALL {
        all = all.combine(negative_control::memory(gpu, tester, kind, CONTROL_ERRORS, SEED)?);
    }
    Ok(all)
}

/// Measures one type of number with every product checked, and finds slow multiprocessors.
fn products(
    gpu: &Gpu<'_>,
    product: &Gemm<'_>,
    options: &Options,
    reporter: &mut GpuReporter<'_>,
) -> Result<(), CudaError> {
    let checked = || {
        product.multiply()?;
        product.check()
    };
    // A warm-up, which also gives the duration.
    let once = gpu.timed(checked)?;
    let repeats = (0.1 / once).clamp(2.0, 64.0) as u32;
    let seconds = gpu.timed(|| (0..repeats).try_for_each(|_| checked()))?;
    if let Some(kind) = options.inject {
        product.multiply()?;
        product.inject(&[(product.shape.n * 77 + 123, kind.code(), 12)])?;
        product.check()?;
    }
    let rate = product.shape.flop() * f64::from(repeats) / seconds;
    let name = product.number.name();
    reporter.metric(&format!("gemm_{name}_flop_per_s"), rate, Unit::FlopPerSecond);
    let slowest = slowest_multiprocessor(product)?;
    reporter.progress_line(&format!(
        "{name}: {:.1} Tflop/s, checked; slowest multiprocessor {} takes {:.3} of the median",
        rate / 1e12,
        slowest.0,
        slowest.1
    ));
    if product.number == NumberFormat::Bf16 {
        reporter.metric("multiprocessor_slowest_ratio", slowest.1, Unit::Ratio);
        if slowest.1 > SLOW_RATIO {
            let text = format!("multiprocessor (SM) {} takes {:.2} times as long as the median", slowest.0, slowest.1);
            reporter.event("multiprocessor-slow", text);
        }
    }
    reporter.wrong_rows(product)
}

/// On a healthy H200 the slowest of 132 multiprocessors takes at most 1.05 of the median.
const SLOW_RATIO: f64 = 1.15;

/// Returns the slowest multiprocessor and its time relative to the median.
fn slowest_multiprocessor(product: &Gemm<'_>) -> Result<(u32, f64), CudaError> {
    let paces = product.tile_times()?;
    Ok(match (paces.first(), paces.get(paces.len() / 2)) {
        (Some(slowest), Some(median)) if median.ticks > 0.0 => (slowest.multiprocessor, slowest.ticks / median.ticks),
        _ => (0, 1.0),
    })
}

/// The measurements of one GPU so far, and the progress callback.
struct GpuReporter<'a> {
    entity: Entity,
    began: Instant,
    progress: &'a ProgressSink<'a>,
    measurements: Measurements,
}

impl GpuReporter<'_> {
    fn progress_line(&self, text: &str) {
        (self.progress)(&format!("{} {:6.2} s  {text}", self.entity, self.began.elapsed().as_secs_f64()));
    }

    fn metric(&mut self, name: &str, value: f64, unit: Unit) {
        self.measurements.metrics.push(Metric::new(name, self.entity.clone(), value, unit));
    }

    fn count(&mut self, name: &str, value: u64) {
        self.metric(name, value as f64, Unit::Count);
    }

    fn event(&mut self, code: &'static str, text: String) {
        self.progress_line(&format!("{code}: {text}"));
        self.measurements.events.push(Event::seen(code, self.entity.clone(), text));
    }

    /// Records an error. A GPU that fails during a test is a finding; any other error is a missing measurement.
    fn report_error(&mut self, error: &CudaError) {
        if error.is_hardware() {
            self.event("gpu-failed", format!("GPU failed during the test: {error}"));
        } else {
            self.progress_line(&format!("aborted: {error}"));
            let failure = error.failure();
            self.measurements
                .failures
                .push(ProbeFailure::new(failure.kind, format!("{}: {}", self.entity, failure.text)));
        }
    }

    fn control(&mut self, trial: ControlResult) {
        self.progress_line(&format!("negative control: {} of {} planted errors found", trial.detected, trial.injected));
        if trial.all_detected() {
            self.count("control_errors_found", trial.detected);
            return;
        }
        let ControlResult { injected, detected: caught, false_alarms } = trial;
        let entity = &self.entity;
        let text = if trial.finds_errors() {
            format!("{entity}: {false_alarms} values were wrong during the negative control where no error was planted")
        } else {
            format!(
                "{entity}: the test does not detect planted errors: {caught} of {injected} found, {false_alarms} false alarms"
            )
        };
        self.measurements.failures.push(ProbeFailure::new(FailureKind::Failed, text));
    }

    fn memory(&mut self, report: &MemoryReport) {
        self.progress_line(&format!(
            "memory: {:.1} GB, {:.2} % of the free memory, {} patterns at {:.0} GB/s ({:.0} % of a copy), {}",
            report.tested as f64 / 1e9,
            report.percent_tested(),
            report.passes,
            report.rate() / 1e9,
            100.0 * report.rate() / report.copy_rate,
            wrong_words(report.errors)
        ));
        self.metric("memory_tested_percent", report.percent_tested(), Unit::Percent);
        self.metric("memory_bytes_per_s", report.rate(), Unit::BytesPerSecond);
        self.metric("memory_copy_bytes_per_s", report.copy_rate, Unit::BytesPerSecond);
        self.count("memory_wrong_words", report.errors);
        for wrong_word in report.wrong.iter().take(MAX_EVENTS) {
            let text = format!(
                "{}: byte offset {:#x} of the tested memory (address {:#x}): expected {:#018x}, got {:#018x}, \
                 differing bits {:#x}; {} in total",
                wrong_word.pattern,
                wrong_word.offset,
                wrong_word.address,
                wrong_word.expected,
                wrong_word.got,
                wrong_word.expected ^ wrong_word.got,
                wrong_words(report.errors)
            );
            self.event("memory-wrong", text);
        }
    }

    fn wrong_rows(&mut self, product: &Gemm<'_>) -> Result<(), CudaError> {
        let rows = product.take_wrong_rows()?;
        let name = product.number.name();
        self.count(&format!("gemm_{name}_wrong_rows"), rows.len() as u64);
        let mut named = 0;
        for &row in rows.iter().take(MAX_EVENTS) {
            for wrong_number in product.locate(row)?.iter().take(MAX_EVENTS - named) {
                named += 1;
                let got = if product.number == NumberFormat::Int8 {
                    (wrong_number.got as i32).to_string()
                } else {
                    f32::from_bits(wrong_number.got).to_string()
                };
                let text = format!(
                    "{name}: row {row}, column {}: got {got}, expected {} (bits {:#x}), computed by multiprocessor {}",
                    wrong_number.column, wrong_number.expected, wrong_number.got, wrong_number.multiprocessor
                );
                self.event("product-wrong", text);
            }
        }
        if named == 0 && !rows.is_empty() {
            self.event(
                "product-wrong",
                format!("{name}: {} rows had wrong checksums; the error did not recur", rows.len()),
            );
        }
        Ok(())
    }

    fn layers(&mut self, report: &LayersReport) {
        let worst = report.passes.iter().map(|pass| pass.deviation.of_tolerance).fold(0.0, f64::max);
        let wrong_replicas: usize = report.passes.iter().map(|pass| pass.wrong_replicas).sum();
        self.progress_line(&format!(
            "layers: {} passes on {} of {} multiprocessors, {wrong_replicas} wrong replicas, largest error {worst:.2} of the tolerance",
            report.passes.len(),
            report.covered(),
            report.multiprocessors
        ));
        self.count("layers_wrong_replicas", wrong_replicas as u64);
        self.metric("layers_error_ratio", worst.min(f64::MAX), Unit::Ratio);
        self.count("layers_multiprocessors_missed", (report.multiprocessors - report.covered()) as u64);
        for pass in report.passes.iter().filter(|pass| !pass.is_right()).take(MAX_EVENTS) {
            let who = match pass.wrong.first() {
                Some(first) => format!("first by multiprocessor {}", first.multiprocessor),
                None => format!("error {:.3} of the tolerance", pass.deviation.of_tolerance),
            };
            self.event("layer-wrong", format!("{}: {} wrong replicas, {who}", pass.pass.name(), pass.wrong_replicas));
        }
    }

    fn copies(&mut self, report: CopyReport) {
        let parts = [
            ("h2d_bytes_per_s", "to the device", report.to_device),
            ("d2h_bytes_per_s", "to the host", report.to_host),
            ("d2d_bytes_per_s", "within the device", report.on_device),
        ];
        let mut total_wrong = 0;
        for (name, words, copied) in parts {
            let wrong = wrong_words(copied.wrong);
            self.progress_line(&format!("copies {words}: {:.1} GB/s, {wrong}", copied.rate / 1e9));
            self.metric(name, copied.rate, Unit::BytesPerSecond);
            total_wrong += copied.wrong;
            if copied.wrong > 0 {
                let count = plural(usize::try_from(copied.wrong).unwrap_or(usize::MAX), "word");
                self.event("copy-wrong", format!("{count} copied {words} arrived wrong"));
            }
        }
        self.count("copy_wrong_words", total_wrong);
    }

    fn heat(&mut self, report: &LoadReport) {
        let over = |pick: fn(&thermal_load::Sample) -> Option<f64>| report.samples.iter().filter_map(pick);
        let celsius = over(|sample| sample.celsius).fold(f64::NAN, f64::max);
        let watts = over(|sample| sample.watts).fold(f64::NAN, f64::max);
        let clock = over(|sample| sample.megahertz).fold(f64::NAN, f64::min);
        self.progress_line(&format!(
            "load for {:.1} s: {} products at {:.1} Tflop/s when warm, up to {celsius} °C and {watts:.0} W, minimum clock {clock} MHz{}",
            report.seconds,
            report.products,
            report.flop_per_s / 1e12,
            if report.plateau { "" } else { "; temperature still rising" }
        ));
        self.metric("gemm_bf16_warm_flop_per_s", report.flop_per_s, Unit::FlopPerSecond);
        self.metric("load_seconds", report.seconds, Unit::Seconds);
        for (name, value, unit) in [
            ("load_temperature", celsius, Unit::Celsius),
            ("load_power", watts, Unit::Watts),
            ("load_clock_least", clock * 1e6, Unit::Hertz),
        ] {
            if value.is_finite() {
                self.metric(name, value, unit);
            }
        }
        let faulty =
            |sample: &&thermal_load::Sample| sample.reasons.is_some_and(|reasons| reasons & FAULTY_REASONS != 0);
        let slowed = report.samples.iter().filter(faulty).count();
        if !report.samples.is_empty() {
            self.metric("load_slowed_percent", 100.0 * slowed as f64 / report.samples.len() as f64, Unit::Percent);
        }
    }

    fn trials(&mut self, kind: InjectedErrorKind, part: &str, trial: ControlResult) {
        let ControlResult { injected, detected: caught, false_alarms } = trial;
        self.progress_line(&format!(
            "trial: {part}, {}: {caught} of {injected} found, {false_alarms} false alarms",
            kind.name()
        ));
        let name = kind.name().replace('-', "_");
        self.count(&format!("trial_{part}_{name}_planted"), injected);
        self.count(&format!("trial_{part}_{name}_caught"), caught);
        self.count(&format!("trial_{part}_{name}_false_alarms"), false_alarms);
    }
}
