//! The functions of libnccl that the test uses, with the types of NVIDIA's header, resolved at run time.

use std::{
    ffi::{OsStr, c_char, c_int, c_void},
    fmt,
};

use libloading::Library;

use super::{UniqueId, error::NcclError};

/// `ncclComm_t`.
pub(super) type CommHandle = *mut c_void;

/// `ncclInProgress`.
pub(super) const IN_PROGRESS: c_int = 7;

macro_rules! symbols {
    ($($field:ident = $symbol:literal : fn($($argument:ty),* $(,)?) -> $answer:ty;)*) => {
        /// The library's functions. They are valid while it is loaded, which is as long as this value lives.
        pub(super) struct Symbols {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> $answer,)*
            _library: Library,
        }

        impl Symbols {
            pub(super) fn load(name: &OsStr) -> Result<Self, NcclError> {
                // SAFETY: loading runs the initialisers of NVIDIA's library, as in any program that uses it.
                let library = unsafe { Library::new(name) }.map_err(|error| NcclError::NoLibrary {
                    library: name.to_string_lossy().into_owned(),
                    text: error.to_string(),
                })?;
                $(
                    // SAFETY: the symbol has the type of NVIDIA's header.
                    let $field = *unsafe {
                        library.get::<unsafe extern "C" fn($($argument),*) -> $answer>(concat!($symbol, "\0").as_bytes())
                    }
                    .map_err(|_| NcclError::NoSymbol { symbol: $symbol })?;
                )*
                Ok(Self { $($field,)* _library: library })
            }
        }
    };
}

symbols! {
    version = "ncclGetVersion": fn(*mut c_int) -> c_int;
    error_string = "ncclGetErrorString": fn(c_int) -> *const c_char;
    last_error = "ncclGetLastError": fn(CommHandle) -> *const c_char;
    unique_id = "ncclGetUniqueId": fn(*mut UniqueId) -> c_int;
    init = "ncclCommInitRankConfig": fn(*mut CommHandle, c_int, UniqueId, c_int, *mut c_void) -> c_int;
    async_error = "ncclCommGetAsyncError": fn(CommHandle, *mut c_int) -> c_int;
    abort = "ncclCommAbort": fn(CommHandle) -> c_int;
    group_start = "ncclGroupStart": fn() -> c_int;
    group_end = "ncclGroupEnd": fn() -> c_int;
    send = "ncclSend": fn(u64, usize, c_int, c_int, CommHandle, *mut c_void) -> c_int;
    receive = "ncclRecv": fn(u64, usize, c_int, c_int, CommHandle, *mut c_void) -> c_int;
    all_reduce = "ncclAllReduce": fn(u64, u64, usize, c_int, c_int, CommHandle, *mut c_void) -> c_int;
}

impl fmt::Debug for Symbols {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Symbols")
    }
}
