//! The functions of libcuda that the tests use, with the types of NVIDIA's header, resolved at run time.

use std::{
    ffi::{OsStr, c_char, c_int, c_uint, c_void},
    fmt,
};

use libloading::Library;

use super::error::CudaError;

pub(super) type Result = c_int;
pub(super) type DevicePtr = u64;
pub(super) type Handle = *mut c_void;

macro_rules! symbols {
    ($($field:ident = $symbol:literal : fn($($argument:ty),* $(,)?);)*) => {
        /// The driver's functions. They are valid while the library is loaded, which is as long as this value lives.
        pub(super) struct Symbols {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> Result,)*
            _library: Library,
        }

        impl Symbols {
            pub(super) fn load(name: &OsStr) -> std::result::Result<Self, CudaError> {
                // SAFETY: loading runs the initialisers of NVIDIA's driver library, as in any CUDA program.
                let library = unsafe { Library::new(name) }.map_err(|error| CudaError::NoLibrary {
                    library: name.to_string_lossy().into_owned(),
                    text: error.to_string(),
                })?;
                $(
                    // SAFETY: the symbol has the type of NVIDIA's header.
                    let $field = *unsafe {
                        library.get::<unsafe extern "C" fn($($argument),*) -> Result>(concat!($symbol, "\0").as_bytes())
                    }
                    .map_err(|_| CudaError::NoSymbol { symbol: $symbol })?;
                )*
                Ok(Self { $($field,)* _library: library })
            }
        }
    };
}

symbols! {
    init = "cuInit": fn(c_uint);
    error_name = "cuGetErrorName": fn(Result, *mut *const c_char);
    driver_version = "cuDriverGetVersion": fn(*mut c_int);
    device_count = "cuDeviceGetCount": fn(*mut c_int);
    device_get = "cuDeviceGet": fn(*mut c_int, c_int);
    device_name = "cuDeviceGetName": fn(*mut c_char, c_int, c_int);
    device_bus_id = "cuDeviceGetPCIBusId": fn(*mut c_char, c_int, c_int);
    device_attribute = "cuDeviceGetAttribute": fn(*mut c_int, c_int, c_int);
    context_retain = "cuDevicePrimaryCtxRetain": fn(*mut Handle, c_int);
    context_release = "cuDevicePrimaryCtxRelease_v2": fn(c_int);
    context_set = "cuCtxSetCurrent": fn(Handle);
    context_synchronize = "cuCtxSynchronize": fn();
    can_access_peer = "cuDeviceCanAccessPeer": fn(*mut c_int, c_int, c_int);
    enable_peer = "cuCtxEnablePeerAccess": fn(Handle, c_uint);
    memory_info = "cuMemGetInfo_v2": fn(*mut usize, *mut usize);
    allocate = "cuMemAlloc_v2": fn(*mut DevicePtr, usize);
    free = "cuMemFree_v2": fn(DevicePtr);
    allocate_host = "cuMemHostAlloc": fn(*mut *mut c_void, usize, c_uint);
    free_host = "cuMemFreeHost": fn(*mut c_void);
    set_words = "cuMemsetD32Async": fn(DevicePtr, c_uint, usize, Handle);
    to_device = "cuMemcpyHtoDAsync_v2": fn(DevicePtr, *const c_void, usize, Handle);
    to_host = "cuMemcpyDtoHAsync_v2": fn(*mut c_void, DevicePtr, usize, Handle);
    on_device = "cuMemcpyDtoDAsync_v2": fn(DevicePtr, DevicePtr, usize, Handle);
    to_peer = "cuMemcpyPeerAsync": fn(DevicePtr, Handle, DevicePtr, Handle, usize, Handle);
    module_load = "cuModuleLoadDataEx": fn(*mut Handle, *const c_void, c_uint, *mut c_int, *mut *mut c_void);
    module_unload = "cuModuleUnload": fn(Handle);
    module_function = "cuModuleGetFunction": fn(*mut Handle, Handle, *const c_char);
    function_attribute = "cuFuncSetAttribute": fn(Handle, c_int, c_int);
    blocks_per_multiprocessor = "cuOccupancyMaxActiveBlocksPerMultiprocessor": fn(*mut c_int, Handle, c_int, usize);
    launch = "cuLaunchKernel": fn(
        Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void,
    );
    event_create = "cuEventCreate": fn(*mut Handle, c_uint);
    event_destroy = "cuEventDestroy_v2": fn(Handle);
    event_record = "cuEventRecord": fn(Handle, Handle);
    event_query = "cuEventQuery": fn(Handle);
    event_synchronize = "cuEventSynchronize": fn(Handle);
    event_elapsed = "cuEventElapsedTime": fn(*mut f32, Handle, Handle);
    tensor_map = "cuTensorMapEncodeTiled": fn(
        *mut c_void, c_int, c_uint, *mut c_void, *const u64, *const u64, *const c_uint, *const c_uint, c_int, c_int,
        c_int, c_int,
    );
}

impl fmt::Debug for Symbols {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Symbols")
    }
}
