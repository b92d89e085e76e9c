//! The functions of the CUDA driver, under their real names, for the GPUs of a scene.
//!
//! Each GPU has a thread that executes work in order, as a stream does: calls return immediately, and events record
//! when work was done ([`device`]). Its memory holds what kernels wrote as functions of the position ([`memory`],
//! [`contents`]), so that 80 GB need none here. A context is the number of its GPU, counted from one.

pub(crate) mod contents;
mod copies;
pub(crate) mod device;
mod gpu_model;
mod kernels;
mod launch;
pub(crate) mod memory;
mod ptx_module;

use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    cell::Cell,
    collections::HashMap,
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    ptr,
    sync::{Arc, Mutex, PoisonError, atomic::Ordering},
    thread,
    time::Duration,
};

use contents::Content;
use device::{Device, Event, OK, UNKNOWN};
pub(crate) use device::{devices, is_under_load};
use launch::{Launch, TENSOR_MAP_WORDS};
use memory::BadAddress;

const INVALID_VALUE: i32 = 1;
const OUT_OF_MEMORY: i32 = 2;
const INVALID_DEVICE: i32 = 101;
const NOT_FOUND: i32 = 500;
const NOT_READY: i32 = 600;
const PEER_ACCESS_ALREADY_ENABLED: i32 = 704;

/// The shared memory that a block may ask for.
const SHARED_BYTES_PER_BLOCK: i32 = 232_448;

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

fn by_number(device: c_int) -> Option<&'static Device> {
    devices().get(usize::try_from(device).ok()?)
}

fn code_of(result: Result<(), BadAddress>) -> i32 {
    match result {
        Ok(()) => OK,
        Err(BadAddress) => INVALID_VALUE,
    }
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

/// The layouts of pinned host memory, by address.
static PINNED: Mutex<Option<HashMap<usize, Layout>>> = Mutex::new(None);

macro_rules! driver {
    ($($name:ident ( $($arg:ident : $type:ty),* ) $body:block)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> i32 { $body }
    )* };
}

// SAFETY of all below: called with pointers as described in NVIDIA's header.
driver! {
    cuInit(_flags: c_uint) {
        device::open().err().unwrap_or(OK)
    }
    cuGetErrorName(code: c_int, to: *mut *const c_char) {
        let name: &CStr = match code {
            INVALID_VALUE => c"CUDA_ERROR_INVALID_VALUE",
            OUT_OF_MEMORY => c"CUDA_ERROR_OUT_OF_MEMORY",
            100 => c"CUDA_ERROR_NO_DEVICE",
            209 => c"CUDA_ERROR_NO_BINARY_FOR_GPU",
            214 => c"CUDA_ERROR_ECC_UNCORRECTABLE",
            700 => c"CUDA_ERROR_ILLEGAL_ADDRESS",
            719 => c"CUDA_ERROR_LAUNCH_FAILED",
            803 => c"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
            UNKNOWN => c"CUDA_ERROR_UNKNOWN",
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
        if by_number(index).is_none() {
            return INVALID_DEVICE;
        }
        // SAFETY: see above.
        unsafe { to.write(index) };
        OK
    }
    cuDeviceGetName(to: *mut c_char, length: c_int, device: c_int) {
        let Some(device) = by_number(device) else { return INVALID_DEVICE };
        // SAFETY: see above.
        unsafe { put_text(&device.model.name, to, length) }
    }
    cuDeviceGetPCIBusId(to: *mut c_char, length: c_int, device: c_int) {
        let Some(device) = by_number(device) else { return INVALID_DEVICE };
        // SAFETY: see above.
        unsafe { put_text(&device.model.bus.to_uppercase(), to, length) }
    }
    cuDeviceGetAttribute(to: *mut c_int, attribute: c_int, device: c_int) {
        let Some(device) = by_number(device) else { return INVALID_DEVICE };
        let value = match attribute {
            13 => 1_980_000,
            16 => device.model.multiprocessors as c_int,
            38 => 50 << 20,
            75 => device.model.capability.0,
            76 => device.model.capability.1,
            97 => SHARED_BYTES_PER_BLOCK,
            _ => return INVALID_VALUE,
        };
        // SAFETY: see above.
        unsafe { to.write(value) };
        OK
    }
    cuDevicePrimaryCtxRetain(to: *mut usize, device: c_int) {
        let Some(found) = by_number(device) else { return INVALID_DEVICE };
        if found.model.hangs {
            loop {
                thread::sleep(Duration::from_secs(3600));
            }
        }
        if found.model.is_lost {
            return UNKNOWN;
        }
        // SAFETY: see above.
        unsafe { to.write(found.index + 1) };
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
        device().wait()
    }
    cuDeviceCanAccessPeer(to: *mut c_int, _device: c_int, _other: c_int) {
        // SAFETY: see above.
        unsafe { to.write(1) };
        OK
    }
    cuCtxEnablePeerAccess(_context: usize, _flags: c_uint) {
        PEER_ACCESS_ALREADY_ENABLED
    }
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let memory = device().memory();
        // SAFETY: see above.
        unsafe {
            free.write(memory.free_bytes() as usize);
            total.write(memory.total() as usize);
        }
        device().error()
    }
    cuMemAlloc_v2(to: *mut u64, bytes: usize) {
        let Some(address) = device().memory().allocate(bytes as u64) else { return OUT_OF_MEMORY };
        // SAFETY: see above.
        unsafe { to.write(address) };
        device().error()
    }
    cuMemFree_v2(address: u64) {
        let Some(owner) = devices().get(memory::gpu_of(address)) else { return INVALID_VALUE };
        owner.wait();
        code_of(owner.memory().free(address))
    }
    cuMemHostAlloc(to: *mut *mut c_void, bytes: usize, _flags: c_uint) {
        let Ok(layout) = Layout::from_size_align(bytes.max(1), 4096) else { return INVALID_VALUE };
        // SAFETY: the size is not zero.
        let address = unsafe { alloc_zeroed(layout) };
        if address.is_null() {
            return OUT_OF_MEMORY;
        }
        let mut pinned = PINNED.lock().unwrap_or_else(PoisonError::into_inner);
        pinned.get_or_insert_default().insert(address as usize, layout);
        // SAFETY: see above.
        unsafe { to.write(address.cast()) };
        device().error()
    }
    cuMemFreeHost(address: *mut c_void) {
        let mut pinned = PINNED.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(layout) = pinned.get_or_insert_default().remove(&(address as usize)) else { return INVALID_VALUE };
        // SAFETY: allocated by `cuMemHostAlloc` with this layout, and freed once.
        unsafe { dealloc(address.cast(), layout) };
        OK
    }
    cuMemsetD32Async(to: u64, word: c_uint, count: usize, _stream: *mut c_void) {
        let device = device();
        device.enqueue(move || {
            if device.memory().put(to, count as u64 * 4, Content::Same(word), to).is_err() {
                device.fail(INVALID_VALUE);
            }
        });
        device.error()
    }
    cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, _stream: *mut c_void) {
        match device().wait() {
            // SAFETY: see above. Like the real driver with memory that is not pinned, it copies before it returns.
            OK => code_of(unsafe { copies::to_device(device(), to, from.cast(), bytes) }),
            failed => failed,
        }
    }
    cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, _stream: *mut c_void) {
        match device().wait() {
            // SAFETY: as above.
            OK => code_of(unsafe { copies::to_host(device(), to.cast(), from, bytes) }),
            failed => failed,
        }
    }
    cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, _stream: *mut c_void) {
        match device().wait() {
            OK => code_of(copies::on_device(device(), to, from, bytes as u64)),
            failed => failed,
        }
    }
    cuMemcpyPeerAsync(to: u64, to_context: usize, from: u64, from_context: usize, bytes: usize, _stream: *mut c_void) {
        let at = |context: usize| context.checked_sub(1).and_then(|index| devices().get(index));
        let (Some(far), Some(near)) = (at(to_context), at(from_context)) else { return INVALID_VALUE };
        match (far.wait(), near.wait()) {
            (OK, OK) => code_of(copies::to_peer(device(), (far, to), (near, from), bytes as u64)),
            (OK, failed) | (failed, _) => failed,
        }
    }
    cuModuleLoadDataEx(
        to: *mut usize, image: *const c_void, _count: c_uint, _options: *mut c_int, _values: *mut *mut c_void
    ) {
        // SAFETY: see above; the image is PTX, which ends with a zero byte.
        let text = unsafe { CStr::from_ptr(image.cast()) }.to_string_lossy();
        match ptx_module::load(&text, device().model.capability) {
            Ok(module) => {
                // SAFETY: see above.
                unsafe { to.write(module) };
                device().error()
            }
            Err(code) => code,
        }
    }
    cuModuleUnload(_module: usize) {
        OK
    }
    cuModuleGetFunction(to: *mut usize, module: usize, name: *const c_char) {
        // SAFETY: see above.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        let Some(function) = ptx_module::function(module, &name) else { return NOT_FOUND };
        // SAFETY: see above.
        unsafe { to.write(function) };
        OK
    }
    cuFuncSetAttribute(_function: usize, _attribute: c_int, value: c_int) {
        if value <= SHARED_BYTES_PER_BLOCK { OK } else { INVALID_VALUE }
    }
    cuOccupancyMaxActiveBlocksPerMultiprocessor(to: *mut c_int, _function: usize, _block: c_int, _shared: usize) {
        // SAFETY: see above.
        unsafe { to.write(2) };
        OK
    }
    cuLaunchKernel(
        function: usize, x: c_uint, _y: c_uint, _z: c_uint, _a: c_uint, _b: c_uint, _c: c_uint, _shared: c_uint,
        _stream: *mut c_void, arguments: *const *const c_void, _extra: *mut *mut c_void
    ) {
        let Some(function) = ptx_module::by_handle(function) else { return INVALID_VALUE };
        let device = device();
        // SAFETY: see above.
        let launch = unsafe { Launch::read(function, x, arguments) };
        device.enqueue(move || launch.run(device));
        device.error()
    }
    cuEventCreate(to: *mut *const c_void, _flags: c_uint) {
        // SAFETY: see above.
        unsafe { to.write(Arc::into_raw(Arc::new(Event::new())).cast()) };
        OK
    }
    cuEventDestroy_v2(handle: *mut c_void) {
        // SAFETY: the reference that `cuEventCreate` left in the handle.
        drop(unsafe { Arc::from_raw(handle.cast_const().cast::<Event>()) });
        OK
    }
    cuEventRecord(handle: *mut c_void, _stream: *mut c_void) {
        // SAFETY: see above.
        unsafe { event(handle) }.record(device());
        device().error()
    }
    cuEventQuery(handle: *mut c_void) {
        // SAFETY: see above.
        let is_done = unsafe { event(handle) }.is_done.load(Ordering::SeqCst);
        match device().error() {
            OK if is_done => OK,
            OK => NOT_READY,
            failed => failed,
        }
    }
    cuEventSynchronize(_event: *mut c_void) {
        device().wait()
    }
    cuEventElapsedTime(to: *mut f32, from: *mut c_void, till: *mut c_void) {
        // SAFETY: see above.
        let seconds = |handle| unsafe { event(handle) }.seconds();
        let (Some(from), Some(till)) = (seconds(from), seconds(till)) else { return INVALID_VALUE };
        // SAFETY: see above.
        unsafe { to.write(((till - from) * 1000.0) as f32) };
        OK
    }
    cuTensorMapEncodeTiled(
        map: *mut u64, _kind: c_int, _rank: c_uint, address: *mut c_void, _sizes: *const u64, _strides: *const u64,
        _tile: *const c_uint, _steps: *const c_uint, _interleave: c_int, _swizzle: c_int, _promotion: c_int, _fill: c_int
    ) {
        // SAFETY: see above; a map has this many words.
        let map = unsafe { std::slice::from_raw_parts_mut(map, TENSOR_MAP_WORDS) };
        map.fill(0);
        map[0] = address as u64;
        OK
    }
}
