//! The GPUs: each has a thread that executes work in order, as a stream does, a memory, and a clock.
//!
//! The clock counts the seconds that work takes by the scene's rates, and events read it: idle time does not count.
//! Real time passes only with products, so that a load that lasts until a temperature is stable lasts as long as on a
//! GPU; everything else is over when it is computed.

use std::{
    collections::HashMap,
    env,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicI32, Ordering},
        mpsc::{self, Sender},
    },
    thread,
    time::{Duration, Instant},
};

use super::{gpu_model::GpuModel, memory::Memory};
use crate::fixture::Fixture;

pub(crate) const OK: i32 = 0;
const INVALID_VALUE: i32 = 1;
const SYSTEM_DRIVER_MISMATCH: i32 = 803;
const NO_DEVICE: i32 = 100;

/// NVML's codes for a driver that is not loaded, and for one of another version than its library.
const DRIVER_NOT_LOADED: u32 = 9;
const LIB_RM_VERSION_MISMATCH: u32 = 18;

/// Products that follow each other this closely are one load.
const LOAD_GAP: Duration = Duration::from_secs(1);
/// The seconds of products after which a GPU is warm.
const WARM_AFTER_S: f64 = 2.0;
/// A sleep is not more exact.
const LEAST_SLEEP_S: f64 = 0.001;

type QueuedWork = Box<dyn FnOnce() + Send>;

/// By grid, rows and columns of tiles: the multiprocessor and the ticks of each tile.
pub(crate) type TileRecords = HashMap<(u32, u32, u32), Arc<Vec<u32>>>;

pub(crate) struct Device {
    pub(crate) index: usize,
    pub(crate) model: GpuModel,
    queue: Mutex<Sender<QueuedWork>>,
    /// The result of every call once the GPU has failed.
    pub(crate) failed: AtomicI32,
    memory: Mutex<Memory>,
    clock: Mutex<Clock>,
    pub(crate) tile_records: Mutex<TileRecords>,
}

#[derive(Debug, Default)]
struct Clock {
    /// Seconds of work so far.
    seconds: f64,
    /// Seconds of products in the present load, and when the last of them ended.
    load_seconds: f64,
    load_ended: Option<Instant>,
    /// Seconds of products for which no real time has passed yet.
    owed: f64,
}

impl Device {
    fn new(index: usize, model: GpuModel) -> Self {
        let (queue, work) = mpsc::channel::<QueuedWork>();
        thread::spawn(move || work.iter().for_each(|work| work()));
        let memory = Memory::new(index, model.memory_bytes, model.memory_used, model.faults.memory);
        Self {
            index,
            model,
            queue: Mutex::new(queue),
            failed: AtomicI32::new(OK),
            memory: Mutex::new(memory),
            clock: Mutex::default(),
            tile_records: Mutex::default(),
        }
    }

    pub(crate) fn enqueue(&self, work: impl FnOnce() + Send + 'static) {
        let _sent = self.queue.lock().unwrap_or_else(PoisonError::into_inner).send(Box::new(work));
    }

    /// Waits for all enqueued work. Returns the GPU's error, if it has failed.
    pub(crate) fn wait(&self) -> i32 {
        let (done, finished) = mpsc::channel();
        self.enqueue(move || {
            let _sent = done.send(());
        });
        let _done = finished.recv();
        self.error()
    }

    pub(crate) fn error(&self) -> i32 {
        self.failed.load(Ordering::SeqCst)
    }

    /// Makes every further call return this error. The first one stays.
    pub(crate) fn fail(&self, code: i32) {
        let _had_failed = self.failed.compare_exchange(OK, code, Ordering::SeqCst, Ordering::SeqCst);
    }

    pub(crate) fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn clock(&self) -> MutexGuard<'_, Clock> {
        self.clock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the seconds of work so far.
    pub(crate) fn seconds(&self) -> f64 {
        self.clock().seconds
    }

    /// Adds the time of work. A GPU may fail in the middle of it.
    pub(crate) fn spend(&self, seconds: f64) {
        let mut clock = self.clock();
        clock.seconds += seconds;
        if let Some((_, code)) = self.model.faults.lost.filter(|(after, _)| clock.seconds >= *after) {
            self.fail(code);
        }
    }

    /// Returns whether products have run for long enough that the GPU is warm.
    pub(crate) fn is_warm(&self) -> bool {
        self.clock().load_seconds > WARM_AFTER_S
    }

    pub(crate) fn is_under_load(&self) -> bool {
        self.clock().load_ended.is_some_and(|ended| ended.elapsed() < LOAD_GAP)
    }

    /// As [`Self::spend`], for products: the same real time passes.
    pub(crate) fn spend_under_load(&self, seconds: f64) {
        self.spend(seconds);
        let owed = {
            let mut clock = self.clock();
            if clock.load_ended.is_none_or(|ended| ended.elapsed() >= LOAD_GAP) {
                clock.load_seconds = 0.0;
            }
            clock.load_seconds += seconds;
            clock.owed += seconds;
            clock.owed
        };
        if owed >= LEAST_SLEEP_S {
            let started = Instant::now();
            thread::sleep(Duration::from_secs_f64(owed));
            self.clock().owed = owed - started.elapsed().as_secs_f64();
        }
        self.clock().load_ended = Some(Instant::now());
    }
}

/// The devices, or the result of initialising the driver.
type Opened = Result<Vec<Device>, i32>;

static DEVICES: OnceLock<Opened> = OnceLock::new();

/// Opens the GPUs of the scene, or as many as `DOCTOR_FAKE_NVIDIA_GPUS` says.
pub(crate) fn open() -> Result<&'static [Device], i32> {
    DEVICES.get_or_init(open_devices).as_deref().map_err(|code| *code)
}

pub(crate) fn devices() -> &'static [Device] {
    open().unwrap_or_default()
}

/// Returns whether the GPU at this PCI address multiplies in this process.
pub(crate) fn is_under_load(bus: &str) -> bool {
    let opened = DEVICES.get().and_then(|opened| opened.as_ref().ok());
    opened.into_iter().flatten().any(|device| device.model.bus == bus && device.is_under_load())
}

fn open_devices() -> Opened {
    let count = env::var("DOCTOR_FAKE_NVIDIA_GPUS").ok().and_then(|count| count.parse().ok());
    let models = match (count, env::var_os("DOCTOR_FAKE_NVIDIA")) {
        (None, Some(path)) => {
            let text = std::fs::read_to_string(path).map_err(|_| NO_DEVICE)?;
            models(&text)?
        }
        (count, _) => (0..count.unwrap_or(2)).map(GpuModel::without_scene).collect(),
    };
    if models.is_empty() {
        return Err(NO_DEVICE);
    }
    Ok(models.into_iter().enumerate().map(|(index, model)| Device::new(index, model)).collect())
}

/// Reads the GPUs of a scene. A scene that cannot be used is no healthy machine.
fn models(text: &str) -> Result<Vec<GpuModel>, i32> {
    let unusable = |error: String| {
        eprintln!("fake CUDA: {error}");
        INVALID_VALUE
    };
    let scene = Fixture::parse(text).map_err(unusable)?;
    match scene.init {
        0 => {}
        LIB_RM_VERSION_MISMATCH => return Err(SYSTEM_DRIVER_MISMATCH),
        DRIVER_NOT_LOADED => return Err(NO_DEVICE),
        _ => return Err(UNKNOWN),
    }
    let models = scene.gpus.iter().map(GpuModel::from_scene);
    models.collect::<Result<_, _>>().map_err(|error| unusable(error.to_string()))
}

/// `CUDA_ERROR_UNKNOWN`.
pub(crate) const UNKNOWN: i32 = 999;

/// A point in the work of a GPU.
pub(crate) struct Event {
    pub(crate) is_done: AtomicBool,
    /// In seconds of the GPU's clock.
    pub(crate) at: Mutex<Option<f64>>,
}

impl Event {
    pub(crate) const fn new() -> Self {
        Self { is_done: AtomicBool::new(false), at: Mutex::new(None) }
    }

    /// Enqueues the event.
    pub(crate) fn record(self: &Arc<Self>, device: &'static Device) {
        self.is_done.store(false, Ordering::SeqCst);
        let event = Arc::clone(self);
        device.enqueue(move || {
            *event.at.lock().unwrap_or_else(PoisonError::into_inner) = Some(device.seconds());
            event.is_done.store(true, Ordering::SeqCst);
        });
    }

    pub(crate) fn seconds(&self) -> Option<f64> {
        *self.at.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
