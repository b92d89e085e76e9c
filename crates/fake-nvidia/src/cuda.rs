//! The functions of the CUDA driver, under their real names, for GPUs that are memory of this process.
//!
//! Each GPU has a thread that executes work in order, as a stream does: calls return immediately, and events record
//! when work was done. A context is the number of its GPU, counted from one.

use std::{
    alloc::{Layout, alloc, dealloc},
    cell::Cell,
    collections::HashMap,
    env,
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    ptr,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicI32, Ordering},
        mpsc::{self, Sender},
    },
    thread,
    time::Instant,
};

use crate::cuda_kernels::{Launch, NAMES};

const OK: i32 = 0;
const INVALID_VALUE: i32 = 1;
const OUT_OF_MEMORY: i32 = 2;
const INVALID_DEVICE: i32 = 101;
const NOT_FOUND: i32 = 500;
const NOT_READY: i32 = 600;
const NOT_SUPPORTED: i32 = 801;

const MEMORY: usize = 64 << 20;

type QueuedWork = Box<dyn FnOnce() + Send>;

pub(crate) struct Device {
    queue: Mutex<Sender<QueuedWork>>,
    /// The result of every call once the GPU has failed.
    pub(crate) failed: AtomicI32,
}

impl Device {
    fn new() -> Self {
        let (queue, work) = mpsc::channel::<QueuedWork>();
        thread::spawn(move || work.iter().for_each(|work| work()));
        Self { queue: Mutex::new(queue), failed: AtomicI32::new(OK) }
    }

    pub(crate) fn enqueue(&self, work: impl FnOnce() + Send + 'static) {
        let _sent = self.queue.lock().unwrap_or_else(PoisonError::into_inner).send(Box::new(work));
    }

    fn wait(&self) {
        let (done, finished) = mpsc::channel();
        self.enqueue(move || {
            let _sent = done.send(());
        });
        let _done = finished.recv();
    }
}

pub(crate) fn devices() -> &'static [Device] {
    static DEVICES: OnceLock<Vec<Device>> = OnceLock::new();
    DEVICES.get_or_init(|| {
        let count = env::var("DOCTOR_FAKE_NVIDIA_GPUS").ok().and_then(|count| count.parse().ok()).unwrap_or(2);
        (0..count).map(|_| Device::new()).collect()
    })
}

thread_local! {
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

/// Returns the current GPU of this thread, counted from zero.
pub(crate) fn current() -> usize {
    CURRENT.get().saturating_sub(1)
}

fn device() -> &'static Device {
    &devices()[current()]
}

/// The sizes of allocations, by address.
fn allocations() -> &'static Mutex<HashMap<usize, usize>> {
    static GIVEN: OnceLock<Mutex<HashMap<usize, usize>>> = OnceLock::new();
    GIVEN.get_or_init(Mutex::default)
}

fn allocate(bytes: usize) -> Option<usize> {
    let layout = Layout::from_size_align(bytes.max(1), 256).ok()?;
    // SAFETY: the size is not zero.
    let address = unsafe { alloc(layout) } as usize;
    allocations().lock().unwrap_or_else(PoisonError::into_inner).insert(address, bytes.max(1));
    Some(address)
}

fn deallocate(address: usize) -> i32 {
    let bytes = allocations().lock().unwrap_or_else(PoisonError::into_inner).remove(&address);
    let Some(layout) = bytes.and_then(|bytes| Layout::from_size_align(bytes, 256).ok()) else { return INVALID_VALUE };
    // SAFETY: allocated by `give` with this layout, and freed once.
    unsafe { dealloc(address as *mut u8, layout) };
    OK
}

struct Event {
    done: AtomicBool,
    at: Mutex<Option<Instant>>,
}

/// Returns the event of a handle.
///
/// # Safety
/// The handle was created by `cuEventCreate` and is not destroyed.
unsafe fn event(handle: *mut c_void) -> Arc<Event> {
    let handle = handle.cast_const().cast::<Event>();
    // SAFETY: the handle holds its own reference count.
    unsafe {
        Arc::increment_strong_count(handle);
        Arc::from_raw(handle)
    }
}

/// Writes a zero-terminated text.
///
/// # Safety
/// `to` has room for `length` bytes.
unsafe fn put_text(text: &str, to: *mut c_char, length: c_int) -> i32 {
    if text.len() >= length.unsigned_abs() as usize {
        return INVALID_VALUE;
    }
    // SAFETY: the text and its terminator fit.
    unsafe {
        ptr::copy_nonoverlapping(text.as_ptr().cast(), to, text.len());
        to.add(text.len()).write(0);
    }
    OK
}

macro_rules! driver {
    ($($name:ident ( $($arg:ident : $type:ty),* ) $body:block)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> i32 { $body }
    )* };
}

/// Functions that the collective test does not use.
macro_rules! not_here {
    ($($name:ident),* $(,)?) => { $(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> i32 {
            NOT_SUPPORTED
        }
    )* };
}

not_here![
    cuDeviceCanAccessPeer,
    cuCtxEnablePeerAccess,
    cuMemcpyPeerAsync,
    cuMemcpyDtoDAsync_v2,
    cuMemHostAlloc,
    cuMemFreeHost,
    cuFuncSetAttribute,
    cuOccupancyMaxActiveBlocksPerMultiprocessor,
    cuTensorMapEncodeTiled,
];

// SAFETY of all below: called with pointers as described in NVIDIA's header, and addresses from `cuMemAlloc`.
driver! {
    cuInit(_flags: c_uint) {
        if devices().is_empty() { 100 } else { OK }
    }
    cuGetErrorName(code: c_int, to: *mut *const c_char) {
        let name: &CStr = match code {
            OUT_OF_MEMORY => c"CUDA_ERROR_OUT_OF_MEMORY",
            100 => c"CUDA_ERROR_NO_DEVICE",
            214 => c"CUDA_ERROR_ECC_UNCORRECTABLE",
            NOT_SUPPORTED => c"CUDA_ERROR_NOT_SUPPORTED",
            _ => c"CUDA_ERROR_OF_THE_STAND_IN",
        };
        // SAFETY: see above.
        unsafe { to.write(name.as_ptr()) };
        OK
    }
    cuDriverGetVersion(to: *mut c_int) {
        // SAFETY: see above.
        unsafe { to.write(12_080) };
        OK
    }
    cuDeviceGetCount(to: *mut c_int) {
        // SAFETY: see above.
        unsafe { to.write(devices().len() as c_int) };
        OK
    }
    cuDeviceGet(to: *mut c_int, index: c_int) {
        if index.unsigned_abs() as usize >= devices().len() {
            return INVALID_DEVICE;
        }
        // SAFETY: see above.
        unsafe { to.write(index) };
        OK
    }
    cuDeviceGetName(to: *mut c_char, length: c_int, _device: c_int) {
        // SAFETY: see above.
        unsafe { put_text("NVIDIA Stand-in", to, length) }
    }
    cuDeviceGetPCIBusId(to: *mut c_char, length: c_int, device: c_int) {
        // SAFETY: see above.
        unsafe { put_text(&format!("0000:{:02X}:00.0", 0x18 + 0x10 * device), to, length) }
    }
    cuDeviceGetAttribute(to: *mut c_int, _attribute: c_int, _device: c_int) {
        // SAFETY: see above.
        unsafe { to.write(8) };
        OK
    }
    cuDevicePrimaryCtxRetain(to: *mut usize, device: c_int) {
        // SAFETY: see above.
        unsafe { to.write(device.unsigned_abs() as usize + 1) };
        OK
    }
    cuDevicePrimaryCtxRelease_v2(_device: c_int) {
        OK
    }
    cuCtxSetCurrent(context: usize) {
        CURRENT.set(context);
        OK
    }
    cuCtxSynchronize() {
        device().wait();
        device().failed.load(Ordering::SeqCst)
    }
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        // SAFETY: see above.
        unsafe {
            free.write(MEMORY);
            total.write(MEMORY);
        }
        OK
    }
    cuMemAlloc_v2(to: *mut u64, bytes: usize) {
        if bytes > MEMORY {
            return OUT_OF_MEMORY;
        }
        let Some(address) = allocate(bytes) else { return OUT_OF_MEMORY };
        // SAFETY: see above.
        unsafe { to.write(address as u64) };
        OK
    }
    cuMemFree_v2(address: u64) {
        device().wait();
        deallocate(address as usize)
    }
    cuMemsetD32Async(to: u64, word: c_uint, count: usize, _stream: *mut c_void) {
        device().enqueue(move || {
            // SAFETY: see above.
            unsafe { std::slice::from_raw_parts_mut(to as *mut u32, count) }.fill(word);
        });
        OK
    }
    cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, _stream: *mut c_void) {
        device().wait();
        // SAFETY: see above. Like the real driver with memory that is not pinned, it copies before it returns.
        unsafe { ptr::copy_nonoverlapping(from.cast::<u8>(), to as *mut u8, bytes) };
        OK
    }
    cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, _stream: *mut c_void) {
        device().wait();
        // SAFETY: as above.
        unsafe { ptr::copy_nonoverlapping(from as *const u8, to.cast::<u8>(), bytes) };
        OK
    }
    cuModuleLoadDataEx(to: *mut usize, _image: *const c_void, _count: c_uint, _options: *mut c_int, _values: *mut *mut c_void) {
        // SAFETY: see above.
        unsafe { to.write(1) };
        OK
    }
    cuModuleUnload(_module: usize) {
        OK
    }
    cuModuleGetFunction(to: *mut usize, _module: usize, name: *const c_char) {
        // SAFETY: see above.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        let Some(place) = NAMES.iter().position(|known| *known == name) else { return NOT_FOUND };
        // SAFETY: see above.
        unsafe { to.write(place + 1) };
        OK
    }
    cuLaunchKernel(
        kernel: usize, _x: c_uint, _y: c_uint, _z: c_uint, _a: c_uint, _b: c_uint, _c: c_uint, _shared: c_uint,
        _stream: *mut c_void, arguments: *const *const c_void, _extra: *mut *mut c_void
    ) {
        // SAFETY: see above.
        let Some(launch) = (unsafe { Launch::read(kernel, arguments) }) else { return INVALID_VALUE };
        // SAFETY: see above.
        device().enqueue(move || unsafe { launch.run() });
        OK
    }
    cuEventCreate(to: *mut *const c_void, _flags: c_uint) {
        let event = Arc::new(Event { done: AtomicBool::new(false), at: Mutex::new(None) });
        // SAFETY: see above.
        unsafe { to.write(Arc::into_raw(event).cast()) };
        OK
    }
    cuEventDestroy_v2(handle: *mut c_void) {
        // SAFETY: the reference that `cuEventCreate` left in the handle.
        drop(unsafe { Arc::from_raw(handle.cast_const().cast::<Event>()) });
        OK
    }
    cuEventRecord(handle: *mut c_void, _stream: *mut c_void) {
        // SAFETY: see above.
        let event = unsafe { event(handle) };
        event.done.store(false, Ordering::SeqCst);
        device().enqueue(move || {
            *event.at.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
            event.done.store(true, Ordering::SeqCst);
        });
        OK
    }
    cuEventQuery(handle: *mut c_void) {
        let failed = device().failed.load(Ordering::SeqCst);
        // SAFETY: see above.
        let done = unsafe { event(handle) }.done.load(Ordering::SeqCst);
        if failed != OK { failed } else if done { OK } else { NOT_READY }
    }
    cuEventSynchronize(_event: *mut c_void) {
        device().wait();
        device().failed.load(Ordering::SeqCst)
    }
    cuEventElapsedTime(to: *mut f32, from: *mut c_void, till: *mut c_void) {
        // SAFETY: see above.
        let at = |handle| *unsafe { event(handle) }.at.lock().unwrap_or_else(PoisonError::into_inner);
        let (Some(from), Some(till)) = (at(from), at(till)) else { return INVALID_VALUE };
        // SAFETY: see above.
        unsafe { to.write(till.duration_since(from).as_secs_f32() * 1000.0) };
        OK
    }
}
