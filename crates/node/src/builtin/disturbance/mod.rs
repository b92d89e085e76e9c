//! Watches who else uses what a deep test measures: its GPUs, the processors, and a mount ([`MountWatch`]).
//!
//! GPUs are sampled before the test and every second during it, on a thread that queries the driver through the
//! helper process of the runner: a driver that hangs blocks neither the test nor its end. Processor time is read before
//! the test, at its start and at its end.

mod gpu_log;
mod host;
mod mount;
mod process_view;

use std::{
    collections::BTreeSet,
    env,
    ffi::OsString,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{self, RecvTimeoutError, Sender},
    },
    thread,
    time::Duration,
};

use doctor_checks::{
    disturbance::{self, Disturbance, Phase, RatesOf},
    document::Measurements,
    gpu::Gpu,
    probe::{Probe, ProbeOutput},
};
use doctor_core::observation::{Entity, EntityKind, Metric, ProbeFailure};

use crate::{
    runner::{DriverHelper, LocalRunner, ProbeRunner as _, STATE_VARIABLE},
    stop::Stop,
};
use gpu_log::GpuLog;
use host::HostWatch;

pub(super) use gpu_log::{FIELDS as GPU_FIELDS, LIST as GPU_LIST};
pub(super) use mount::MountWatch;
pub(super) use process_view::ProcessView;

/// The interval of samples of the GPUs.
const INTERVAL: Duration = Duration::from_secs(1);
/// Without persistence mode the driver initialises each GPU first. After this time the test starts without a sample.
const FIRST_SAMPLE: Duration = Duration::from_secs(35);
const DRIVER_LIMIT: Duration = Duration::from_secs(30);

/// Whether the driver lists the processes of GPUs: 0 or 1.
const WATCHED_METRIC: &str = "gpu_processes_watched";

/// Watches GPUs and processors until it is dropped.
#[derive(Debug)]
pub(super) struct Watch {
    view: ProcessView,
    host: HostWatch,
    gpus: Option<GpuWatch>,
}

#[derive(Debug)]
struct GpuWatch {
    log: Arc<Mutex<GpuLog>>,
    /// How many processes of the test use GPUs.
    own_processes: usize,
    /// The thread ends when this is dropped.
    _ends: Sender<()>,
}

impl Watch {
    /// Looks once, and then watches the processors.
    pub(super) fn processors(stop: &Stop) -> Self {
        Self::start(None, stop)
    }

    /// Looks once, and then watches the processors and all GPUs. `own_processes` is how many processes of the test use
    /// GPUs. None of them may use one before this returns.
    pub(super) fn gpus(own_processes: usize, stop: &Stop) -> Self {
        Self::start(Some(own_processes), stop)
    }

    fn start(own_processes: Option<usize>, stop: &Stop) -> Self {
        let root = env::var_os("DOCTOR_ROOT").map_or_else(|| PathBuf::from("/"), PathBuf::from);
        let view = ProcessView::open(&root);
        let host = HostWatch::begin(&view);
        let gpus = own_processes.map(|own_processes| GpuWatch::start(&root, &view, own_processes));
        let mut watch = Self { view, host, gpus };
        watch.host.start_test(&watch.view, stop);
        watch
    }

    pub(super) const fn view(&self) -> &ProcessView {
        &self.view
    }

    /// Returns what disturbed the test so far.
    pub(super) fn disturbances(&self) -> Vec<Disturbance> {
        let mut found = self.gpus.as_ref().map_or_else(Vec::new, GpuWatch::disturbances);
        found.extend(self.host.disturbance(&self.view));
        found
    }

    /// Like [`Self::disturbances`], without those of GPUs that take no part, by their bus ids.
    pub(super) fn disturbances_of(&self, takes_part: impl Fn(&str) -> bool) -> Vec<Disturbance> {
        let mut found = self.disturbances();
        found.retain(|found| found.entity.kind != EntityKind::Gpu || takes_part(&found.entity.id));
        found
    }

    /// Returns whether the processes of GPUs are known, as a metric.
    pub(super) fn watched_metric(&self) -> Option<Metric> {
        let gpus = self.gpus.as_ref()?;
        let is_watched = f64::from(u8::from(gpus.log().is_watched()));
        Some(Metric::count(WATCHED_METRIC, Entity::node(), is_watched))
    }

    /// Adds what disturbed the test to its result. A test that could not run because of it is disturbed, too.
    pub(super) fn report(
        self,
        result: Result<Measurements, ProbeFailure>,
        rates: RatesOf,
    ) -> Result<Measurements, ProbeFailure> {
        let disturbances = self.disturbances();
        // Those of GPUs are printed when they are seen.
        disturbances.iter().filter(|found| found.entity.kind != EntityKind::Gpu).for_each(print);
        let mut measurements = match result {
            Ok(measurements) => measurements,
            Err(failure) => {
                let mut measurements = Measurements { failures: vec![failure.clone()], ..Measurements::default() };
                disturbance::apply(&mut measurements, &disturbances, rates);
                // Load on the processors keeps no test from running.
                return if measurements.failures.len() > 1 { Ok(measurements) } else { Err(failure) };
            }
        };
        disturbance::apply(&mut measurements, &disturbances, rates);
        measurements.metrics.extend(self.watched_metric());
        Ok(measurements)
    }
}

/// Returns who uses these GPUs now, by the fields [`GPU_FIELDS`] of each.
pub(super) fn users_of(gpus: &[Gpu], view: &ProcessView) -> Vec<Disturbance> {
    let mut log = GpuLog::default();
    log.add(gpus, Phase::Before, view);
    log.disturbances(0)
}

fn print(disturbance: &Disturbance) {
    eprintln!("disturbed: {}: {}", disturbance.entity, disturbance.text);
}

impl GpuWatch {
    /// Takes the first sample, and starts the thread that takes the others.
    fn start(root: &Path, view: &ProcessView, own_processes: usize) -> Self {
        let log = Arc::new(Mutex::new(GpuLog::default()));
        let (ends, ended) = mpsc::channel::<()>();
        let (first, first_done) = mpsc::channel::<()>();
        let mut sampler = Sampler {
            root: root.to_owned(),
            view: view.clone(),
            log: Arc::clone(&log),
            own_processes,
            printed: BTreeSet::new(),
        };
        thread::spawn(move || {
            let helper = Arc::<DriverHelper>::default();
            let mut phase = Phase::Before;
            // Without a driver there is nothing to watch.
            while sampler.sample(&helper, phase) {
                phase = Phase::During;
                let _waits = first.send(());
                if ended.recv_timeout(INTERVAL) != Err(RecvTimeoutError::Timeout) {
                    break;
                }
            }
        });
        // Ends at once if the thread ended without a sample.
        let _sampled = first_done.recv_timeout(FIRST_SAMPLE);
        Self { log, own_processes, _ends: ends }
    }

    fn log(&self) -> MutexGuard<'_, GpuLog> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn disturbances(&self) -> Vec<Disturbance> {
        self.log().disturbances(self.own_processes)
    }
}

struct Sampler {
    root: PathBuf,
    view: ProcessView,
    log: Arc<Mutex<GpuLog>>,
    own_processes: usize,
    /// Disturbances that are in the log of the run, by part and disturber.
    printed: BTreeSet<(Entity, String)>,
}

impl Sampler {
    /// Adds one sample, and prints what is new. Returns false if the driver cannot be queried.
    fn sample(&mut self, helper: &Arc<DriverHelper>, phase: Phase) -> bool {
        let stop = Stop::never();
        let state = env::var_os(STATE_VARIABLE).map(PathBuf::from);
        let library = env::var_os("DOCTOR_NVML").unwrap_or_else(|| OsString::from(doctor_gpu::nvml::LIBRARY));
        let runner = LocalRunner::new(&self.root, &stop).state(state.as_deref()).library(library);
        let runner = runner.driver_helper(helper).driver_limit(DRIVER_LIMIT);
        match runner.run(&Probe::gpu(&GPU_FIELDS)) {
            ProbeOutput::Gpus(result) if result.driver.is_ok() => {
                let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
                log.add(&result.gpus, phase, &self.view);
                for disturbance in log.disturbances(self.own_processes) {
                    if self.printed.insert((disturbance.entity.clone(), disturbance.disturber.clone())) {
                        print(&disturbance);
                    }
                }
                true
            }
            _ => false,
        }
    }
}
