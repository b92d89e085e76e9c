//! cuBLAS, if installed: a reference for the speed of our own matrix kernels. No test needs it.

use std::{
    ffi::{OsStr, c_int, c_void},
    fmt, ptr,
};

use libloading::Library;

type GemmEx = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    c_int,
    c_int,
    c_int,
    c_int,
    *const c_void,
    *const c_void,
    c_int,
    c_int,
    *const c_void,
    c_int,
    c_int,
    *const c_void,
    *mut c_void,
    c_int,
    c_int,
    c_int,
    c_int,
) -> c_int;

/// The library with a handle for the current context.
pub struct Cublas {
    handle: *mut c_void,
    gemm: GemmEx,
    destroy: unsafe extern "C" fn(*mut c_void) -> c_int,
    _library: Library,
}

impl fmt::Debug for Cublas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Cublas")
    }
}

#[derive(Debug, thiserror::Error)]
pub enum CublasError {
    #[error("cuBLAS cannot be loaded: {0}")]
    NoLibrary(#[from] libloading::Error),
    #[error("{call} returned {code}")]
    Failed { call: &'static str, code: i32 },
}

/// Values of `cublasOperation_t`, `cudaDataType` and `cublasComputeType_t`.
const OP_N: c_int = 0;
const OP_T: c_int = 1;
const BF16: c_int = 14;
const COMPUTE_32F: c_int = 68;
const GEMM_DEFAULT: c_int = -1;

impl Cublas {
    /// Opens the library for the GPU whose context is current on this thread.
    pub fn open(library: &OsStr) -> Result<Self, CublasError> {
        // SAFETY: NVIDIA's library, loaded as by every program that uses cuBLAS.
        let library = unsafe { Library::new(library) }?;
        // SAFETY: the symbols have the types of NVIDIA's header.
        let (create, destroy, gemm) = unsafe {
            (
                *library.get::<unsafe extern "C" fn(*mut *mut c_void) -> c_int>(b"cublasCreate_v2\0")?,
                *library.get::<unsafe extern "C" fn(*mut c_void) -> c_int>(b"cublasDestroy_v2\0")?,
                *library.get::<GemmEx>(b"cublasGemmEx\0")?,
            )
        };
        let mut handle = ptr::null_mut();
        // SAFETY: the pointer points to a live variable.
        check_status("cublasCreate", unsafe { create(&raw mut handle) })?;
        Ok(Self { handle, gemm, destroy, _library: library })
    }

    /// Enqueues C = A Bᵀ in bf16: A has m rows, B has n rows, of k numbers each, at these device addresses.
    ///
    /// The matrices must exist: a wrong address can only harm the device's memory.
    pub(crate) fn multiply(&self, shape: [u32; 3], a: u64, b: u64, c: u64) -> Result<(), CublasError> {
        let [m, n, k] = shape.map(|size| c_int::try_from(size).unwrap_or(c_int::MAX));
        let (one, zero) = (1.0f32, 0.0f32);
        // SAFETY: cuBLAS stores matrices by columns: our rows are its columns, and the transposed product is requested.
        // The two scale factors live until the call returns; the addresses are the device's.
        let code = unsafe {
            (self.gemm)(
                self.handle,
                OP_T,
                OP_N,
                n,
                m,
                k,
                ptr::from_ref(&one).cast(),
                b as *const c_void,
                BF16,
                k,
                a as *const c_void,
                BF16,
                k,
                ptr::from_ref(&zero).cast(),
                c as *mut c_void,
                BF16,
                n,
                COMPUTE_32F,
                GEMM_DEFAULT,
            )
        };
        check_status("cublasGemmEx", code)
    }
}

impl Drop for Cublas {
    fn drop(&mut self) {
        // SAFETY: created by `open` and not used elsewhere.
        let _given_back = unsafe { (self.destroy)(self.handle) };
    }
}

const fn check_status(call: &'static str, code: c_int) -> Result<(), CublasError> {
    if code == 0 { Ok(()) } else { Err(CublasError::Failed { call, code }) }
}
