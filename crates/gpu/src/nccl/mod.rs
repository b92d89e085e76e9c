//! NCCL, loaded at run time behind a safe interface: joining a communicator, reducing, and leaving it again.
//!
//! All communicators are non-blocking (`ncclConfig_t.blocking = 0`): NCCL returns "in progress", and the caller can
//! stop waiting. That is the only way out of a collective that hangs because a rank never arrives. The configuration is
//! that of 2.14, the first version with it; newer versions accept it by the size and version that it contains.

mod error;
mod symbols;

use std::{
    cell::Cell,
    ffi::{CStr, OsStr, c_char, c_int, c_uint},
    fmt, ptr, thread,
    time::Duration,
};

pub use error::NcclError;

use crate::cuda::{Buffer, Gpu};
use symbols::{CommHandle, Symbols};

/// The soname of the library.
pub const LIBRARY: &str = "libnccl.so.2";

/// The size of `ncclUniqueId`, which encodes where the first rank waits for the others.
pub const ID_BYTES: usize = 128;

#[derive(Clone, Copy)]
#[repr(C)]
pub struct UniqueId([u8; ID_BYTES]);

impl UniqueId {
    pub const fn new(bytes: [u8; ID_BYTES]) -> Self {
        Self(bytes)
    }

    pub const fn bytes(&self) -> &[u8; ID_BYTES] {
        &self.0
    }
}

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UniqueId(…)")
    }
}

/// `ncclConfig_v21400`: the prefix that every later version reads.
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    /// Padding in 2.14; newer versions have a field at this offset and read it as not set.
    not_set: c_int,
}

const MAGIC: c_uint = 0xcafe_beef;
const VERSION_2_14: c_uint = 21_400;
const NOT_SET: c_int = c_int::MIN;

/// `ncclFloat32` and `ncclSum`.
const FLOAT: c_int = 7;
const SUM: c_int = 0;

const INIT: &str = "ncclCommInitRankConfig";

/// The polling interval. A step of a test takes milliseconds.
const POLL_INTERVAL: Duration = Duration::from_micros(200);

/// The loaded library.
#[derive(Debug)]
pub struct Nccl {
    symbols: Symbols,
}

impl Nccl {
    /// Loads the library.
    ///
    /// # Errors
    /// Fails without the library, or with one older than 2.14.
    pub fn open(library: &OsStr) -> Result<Self, NcclError> {
        Ok(Self { symbols: Symbols::load(library)? })
    }

    /// Returns the version, such as 22809 for 2.28.9.
    pub fn version(&self) -> Result<u32, NcclError> {
        let mut version = 0;
        // SAFETY: the pointer points to a live variable.
        let code = unsafe { (self.symbols.version)(&raw mut version) };
        self.check("ncclGetVersion", code)?;
        Ok(version.unsigned_abs())
    }

    /// Creates the id of a communicator. The ranks meet in this process, which must live until they have.
    pub fn unique_id(&self) -> Result<UniqueId, NcclError> {
        let mut id = UniqueId([0; ID_BYTES]);
        // SAFETY: the pointer points to as many bytes as the header requires.
        let code = unsafe { (self.symbols.unique_id)(&raw mut id) };
        self.check("ncclGetUniqueId", code)?;
        Ok(id)
    }

    /// Starts to join as this rank, with the GPU whose context is current. [`Communicator::ready`] waits for the others.
    pub fn join<'n>(
        &'n self,
        gpu: &'n Gpu<'n>,
        id: UniqueId,
        rank: u32,
        ranks: u32,
    ) -> Result<Communicator<'n>, NcclError> {
        let mut config =
            Config { size: size_of::<Config>(), magic: MAGIC, version: VERSION_2_14, blocking: 0, not_set: NOT_SET };
        let number = |value: u32| c_int::try_from(value).unwrap_or(c_int::MAX);
        let mut handle = ptr::null_mut();
        // SAFETY: the pointers point to live variables, the configuration has the size that it contains; the GPU's
        // context is current on this thread, to which the `Gpu` is bound.
        let code =
            unsafe { (self.symbols.init)(&raw mut handle, number(ranks), id, number(rank), (&raw mut config).cast()) };
        if code != symbols::IN_PROGRESS {
            self.check(INIT, code)?;
        }
        Ok(Communicator { nccl: self, _gpu: gpu, handle, ended: Cell::new(handle.is_null()) })
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<(), NcclError> {
        match code {
            0 => Ok(()),
            code => Err(NcclError::Failed { call, code, text: self.error_text(code) }),
        }
    }

    fn error_text(&self, code: c_int) -> String {
        // SAFETY: NCCL returns a constant text for any number.
        let text = text_of(unsafe { (self.symbols.error_string)(code) });
        // SAFETY: the last error of this process; the argument is not used.
        let last = text_of(unsafe { (self.symbols.last_error)(ptr::null_mut()) });
        if last.is_empty() { text } else { format!("{text}: {last}") }
    }
}

fn text_of(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: a zero-terminated text of NCCL.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned()
}

/// One rank.
pub struct Communicator<'n> {
    nccl: &'n Nccl,
    /// The GPU that runs its work.
    _gpu: &'n Gpu<'n>,
    handle: CommHandle,
    ended: Cell<bool>,
}

impl fmt::Debug for Communicator<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Communicator")
    }
}

impl Communicator<'_> {
    /// Waits until all ranks have joined, or until `keep_waiting` returns false.
    pub fn ready(&self, keep_waiting: &dyn Fn() -> bool) -> Result<(), NcclError> {
        self.wait_for_call(INIT, symbols::IN_PROGRESS, keep_waiting)
    }

    /// Enqueues the sum over all ranks of the first `count` floats.
    ///
    /// # Panics
    /// Panics if a buffer is shorter.
    pub fn all_reduce(
        &self,
        from: &Buffer<'_>,
        to: &Buffer<'_>,
        count: usize,
        keep_waiting: &dyn Fn() -> bool,
    ) -> Result<(), NcclError> {
        assert!(count <= from.len::<f32>() && count <= to.len::<f32>(), "the message exceeds a buffer");
        // SAFETY: both buffers have this many numbers on the communicator's own GPU and are freed only after the driver
        // has waited for the work that uses them; the stream is the context's default one.
        let code = unsafe {
            (self.nccl.symbols.all_reduce)(
                from.address(),
                to.address(),
                count,
                FLOAT,
                SUM,
                self.handle,
                ptr::null_mut(),
            )
        };
        self.wait_for_call("ncclAllReduce", code, keep_waiting)
    }

    /// Enqueues a send of `count` floats to one rank and a receive of as many from another.
    ///
    /// # Panics
    /// Panics if a buffer is shorter.
    pub fn exchange(
        &self,
        (from, next): (&Buffer<'_>, u32),
        (to, before): (&Buffer<'_>, u32),
        count: usize,
        keep_waiting: &dyn Fn() -> bool,
    ) -> Result<(), NcclError> {
        assert!(count <= from.len::<f32>() && count <= to.len::<f32>(), "the message exceeds a buffer");
        let symbols = &self.nccl.symbols;
        let number = |rank: u32| c_int::try_from(rank).unwrap_or(c_int::MAX);
        let grouped = |code| if code == symbols::IN_PROGRESS { Ok(()) } else { self.nccl.check("ncclSend", code) };
        // SAFETY: takes no argument; the group is ended below in all cases.
        self.nccl.check("ncclGroupStart", unsafe { (symbols.group_start)() })?;
        // SAFETY: as for `all_reduce`; NCCL rejects an invalid rank.
        let sent = unsafe { (symbols.send)(from.address(), count, FLOAT, number(next), self.handle, ptr::null_mut()) };
        // SAFETY: as above.
        let received =
            unsafe { (symbols.receive)(to.address(), count, FLOAT, number(before), self.handle, ptr::null_mut()) };
        // SAFETY: ends the group that was started above on this thread.
        let end_code = unsafe { (symbols.group_end)() };
        grouped(sent)?;
        grouped(received)?;
        self.wait_for_call("ncclGroupEnd", end_code, keep_waiting)
    }

    /// Returns an asynchronous error, if there was one.
    pub fn async_error(&self) -> Result<(), NcclError> {
        match self.state()? {
            symbols::IN_PROGRESS => Ok(()),
            code => self.nccl.check("ncclCommGetAsyncError", code),
        }
    }

    fn state(&self) -> Result<c_int, NcclError> {
        let mut state = 0;
        // SAFETY: a communicator that was not ended, and a live variable.
        let code = unsafe { (self.nccl.symbols.async_error)(self.handle, &raw mut state) };
        self.nccl.check("ncclCommGetAsyncError", code)?;
        Ok(state)
    }

    /// Waits until a call is no longer in progress.
    fn wait_for_call(&self, call: &'static str, code: c_int, keep_waiting: &dyn Fn() -> bool) -> Result<(), NcclError> {
        if code != symbols::IN_PROGRESS {
            return self.nccl.check(call, code);
        }
        loop {
            match self.state()? {
                symbols::IN_PROGRESS if !keep_waiting() => return Err(NcclError::Aborted { call }),
                symbols::IN_PROGRESS => thread::sleep(POLL_INTERVAL),
                code => return self.nccl.check(call, code),
            }
        }
    }

    /// Aborts the communicator in any state. Ranks that still wait for this one will never be served.
    pub fn abort(&self) {
        if !self.ended.replace(true) {
            // SAFETY: a communicator that is ended once. There is nothing to do about an error.
            let _ended = unsafe { (self.nccl.symbols.abort)(self.handle) };
        }
    }
}

impl Drop for Communicator<'_> {
    fn drop(&mut self) {
        self.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{align_of, offset_of, size_of};

    /// The layout of 2.14's `nccl.h`, which every later version starts with.
    #[test]
    fn the_configuration_has_the_layout_of_ncclconfig() {
        assert_eq!((size_of::<Config>(), align_of::<Config>()), (24, 8));
        assert_eq!((offset_of!(Config, magic), offset_of!(Config, version), offset_of!(Config, blocking)), (8, 12, 16));
        assert_eq!(size_of::<UniqueId>(), ID_BYTES);
    }

    #[test]
    fn without_the_library_the_error_says_what_to_install() {
        let error = Nccl::open(OsStr::new("libnccl-that-is-not-there.so")).unwrap_err().to_string();
        assert!(error.contains("libnccl-that-is-not-there.so") && error.contains("`library`"), "{error}");
    }
}
