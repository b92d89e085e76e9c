//! The functions of NCCL, under their real names: ranks that meet at a local socket and really add up.
//!
//! A thread of the first rank's process receives each rank's share, adds them, and sends the sum to all. The log has
//! NCCL's format and variables, which also determine the transport that it names. A message takes the time that the
//! scene's rate gives; without a scene, the time that it takes here.

mod comm;
mod message;

use std::{
    cell::Cell,
    env,
    ffi::{CStr, c_char, c_int, c_void},
    net::{Shutdown, TcpListener},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering},
    },
    thread,
};

use crate::{
    cuda::{current, devices},
    faults,
};
use comm::{Comm, REMOTE_ERROR, log, serve_ranks};

const SUCCESS: i32 = 0;
const SYSTEM_ERROR: i32 = 2;
const INVALID_USAGE: i32 = 5;
const IN_PROGRESS: i32 = 7;

const MAGIC: u32 = 0xcafe_beef;

/// The port, followed by zeroes.
#[repr(C)]
pub struct UniqueId([u8; 128]);

#[repr(C)]
pub struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: i32,
}

/// Returns the communicator of a handle.
///
/// # Safety
/// The handle was created by `ncclCommInitRankConfig` and is not aborted.
unsafe fn comm(handle: *mut c_void) -> Arc<Comm> {
    let handle = handle.cast_const().cast::<Comm>();
    // SAFETY: the handle holds its own reference count.
    unsafe {
        Arc::increment_strong_count(handle);
        Arc::from_raw(handle)
    }
}

// SAFETY of all below: called with pointers as described in NVIDIA's header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(to: *mut c_int) -> i32 {
    // SAFETY: see above.
    unsafe { to.write(22_809) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(code: c_int) -> *const c_char {
    let text: &CStr = match code {
        SYSTEM_ERROR => c"unhandled system error",
        INVALID_USAGE => c"invalid usage",
        REMOTE_ERROR => c"remote process exited or there was a network error",
        _ => c"unknown result code",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(_comm: *mut c_void) -> *const c_char {
    c"".as_ptr()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(to: *mut UniqueId) -> i32 {
    let Ok(listener) = TcpListener::bind(("127.0.0.1", 0)) else { return SYSTEM_ERROR };
    let Ok(address) = listener.local_addr() else { return SYSTEM_ERROR };
    let mut id = UniqueId([0; 128]);
    id.0[..2].copy_from_slice(&address.port().to_le_bytes());
    // A rank that leaves ends the sums of all.
    thread::spawn(move || drop(serve_ranks(&listener)));
    // SAFETY: see above.
    unsafe { to.write(id) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankConfig(
    to: *mut *const c_void,
    ranks: c_int,
    id: UniqueId,
    rank: c_int,
    config: *const Config,
) -> i32 {
    // SAFETY: see above.
    let config = unsafe { &*config };
    let understood = config.magic == MAGIC && config.size >= size_of::<Config>() && config.version >= 21_400;
    if !understood || config.blocking != 0 {
        return INVALID_USAGE;
    }
    let Ok(ring_listener) = TcpListener::bind(("127.0.0.1", 0)) else { return SYSTEM_ERROR };
    let comm = Arc::new(Comm {
        rank,
        ranks,
        device: current(),
        state: AtomicI32::new(IN_PROGRESS),
        aborted: AtomicBool::new(false),
        is_inside: AtomicBool::new(false),
        stream: Mutex::new(None),
        ring_listener,
        next: AtomicU32::new(0),
        ring: Mutex::new(None),
    });
    // SAFETY: see above.
    unsafe { to.write(Arc::into_raw(Arc::clone(&comm)).cast()) };
    let port = u16::from_le_bytes([id.0[0], id.0[1]]);
    thread::spawn(move || {
        let state = if faults::is_injected("no-net") {
            let net = env::var("NCCL_NET").unwrap_or_default();
            log(comm.device, "WARN", &format!("Error: network {net} not found."));
            INVALID_USAGE
        } else if comm.join(port).is_err() {
            REMOTE_ERROR
        } else {
            SUCCESS
        };
        comm.state.store(state, Ordering::SeqCst);
    });
    IN_PROGRESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(handle: *mut c_void, to: *mut c_int) -> i32 {
    // SAFETY: see above.
    unsafe { to.write(comm(handle).state.load(Ordering::SeqCst)) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommAbort(handle: *mut c_void) -> i32 {
    // SAFETY: the reference that `ncclCommInitRankConfig` left in the handle.
    let comm = unsafe { Arc::from_raw(handle.cast_const().cast::<Comm>()) };
    comm.aborted.store(true, Ordering::SeqCst);
    if let Some(stream) = comm.stream.lock().unwrap_or_else(PoisonError::into_inner).as_ref() {
        let _closed = stream.shutdown(Shutdown::Both);
    }
    if let Some((next, before)) = comm.ring.lock().unwrap_or_else(PoisonError::into_inner).as_ref() {
        let _closed = (next.shutdown(Shutdown::Both), before.shutdown(Shutdown::Both));
    }
    SUCCESS
}

thread_local! {
    /// The address and count of a group's send.
    static SENT: Cell<Option<(u64, usize)>> = const { Cell::new(None) };
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupStart() -> i32 {
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupEnd() -> i32 {
    SUCCESS
}

/// Accepts only sends to the next rank; a receive from the previous one must follow.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclSend(
    from: u64,
    count: usize,
    _kind: c_int,
    to: c_int,
    handle: *mut c_void,
    _stream: *mut c_void,
) -> i32 {
    // SAFETY: see above.
    let comm = unsafe { comm(handle) };
    if to != (comm.rank + 1) % comm.ranks {
        return INVALID_USAGE;
    }
    SENT.set(Some((from, count)));
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRecv(
    to: u64,
    count: usize,
    _kind: c_int,
    from: c_int,
    handle: *mut c_void,
    _stream: *mut c_void,
) -> i32 {
    // SAFETY: see above.
    let comm = unsafe { comm(handle) };
    let Some((sent, _)) = SENT.take().filter(|(_, sent)| *sent == count) else { return INVALID_USAGE };
    if from != (comm.rank + comm.ranks - 1) % comm.ranks {
        return INVALID_USAGE;
    }
    devices()[comm.device].enqueue(move || comm.send_receive(sent, to, count));
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllReduce(
    from: u64,
    to: u64,
    count: usize,
    _kind: c_int,
    _operation: c_int,
    handle: *mut c_void,
    _stream: *mut c_void,
) -> i32 {
    // SAFETY: see above.
    let comm = unsafe { comm(handle) };
    devices()[comm.device].enqueue(move || comm.all_reduce(from, to, count));
    SUCCESS
}
