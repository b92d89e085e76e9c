//! The functions of NCCL, under their real names: ranks that meet at a local socket and really add up.
//!
//! A thread of the first rank's process receives each rank's share, adds them, and sends the sum to all. The log has
//! NCCL's format and variables, which also determine the transport that it names.

use std::{
    cell::Cell,
    env,
    ffi::{CStr, c_char, c_int, c_void},
    fs::OpenOptions,
    io::{self, Read as _, Write as _},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering},
    },
    thread,
    time::Duration,
};

use crate::{
    cuda::{current, devices},
    faults,
};

const SUCCESS: i32 = 0;
const SYSTEM_ERROR: i32 = 2;
const INVALID_USAGE: i32 = 5;
const REMOTE_ERROR: i32 = 6;
const IN_PROGRESS: i32 = 7;

const MAGIC: u32 = 0xcafe_beef;
const ECC_UNCORRECTABLE: i32 = 214;
const CHANNELS: usize = 2;

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

struct Comm {
    rank: i32,
    ranks: i32,
    device: usize,
    state: AtomicI32,
    aborted: AtomicBool,
    stream: Mutex<Option<TcpStream>>,
    /// The ring: a listener for the previous rank, and the port of the next one.
    ring_listener: TcpListener,
    next: AtomicU32,
    ring: Mutex<Option<(TcpStream, TcpStream)>>,
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

fn node() -> u32 {
    env::var("DOCTOR_FAKE_NVIDIA_NODE").ok().and_then(|node| node.parse().ok()).unwrap_or(0)
}

fn log(device: usize, level: &str, text: &str) {
    if env::var("NCCL_DEBUG").as_deref() != Ok("INFO") {
        return;
    }
    let line = format!("standin:{}:1 [{device}] NCCL {level} {text}\n", std::process::id());
    let file = env::var_os("NCCL_DEBUG_FILE").and_then(|path| OpenOptions::new().append(true).open(path).ok());
    let _written = match file {
        Some(mut file) => file.write_all(line.as_bytes()),
        None => io::stdout().lock().write_all(line.as_bytes()),
    };
}

/// Serves as the meeting point of the ranks.
fn serve_ranks(listener: &TcpListener) -> io::Result<()> {
    let mut ranks: Vec<Option<(TcpStream, [u32; 2])>> = Vec::new();
    loop {
        let (mut stream, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        let [rank, all] = [read_u32(&mut stream)?, read_u32(&mut stream)?];
        let node_and_port = [read_u32(&mut stream)?, read_u32(&mut stream)?];
        ranks.resize_with(all as usize, || None);
        ranks[rank as usize] = Some((stream, node_and_port));
        if ranks.iter().all(Option::is_some) {
            break;
        }
    }
    let mut ranks: Vec<_> = ranks.into_iter().flatten().collect();
    let encoded: Vec<u8> =
        ranks.iter().flat_map(|(_, node_and_port)| node_and_port.map(u32::to_le_bytes).concat()).collect();
    for (stream, _) in &mut ranks {
        stream.write_all(&encoded)?;
    }
    loop {
        let mut sum: Vec<f32> = Vec::new();
        for (stream, _) in &mut ranks {
            let count = read_u32(stream)? as usize;
            let mut bytes = vec![0; count * 4];
            stream.read_exact(&mut bytes)?;
            sum.resize(count, 0.0);
            for (sum, bytes) in sum.iter_mut().zip(bytes.chunks_exact(4)) {
                *sum += f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            }
        }
        let bytes: Vec<u8> = sum.iter().flat_map(|number| number.to_le_bytes()).collect();
        for (stream, _) in &mut ranks {
            stream.write_all(&bytes)?;
        }
    }
}

fn read_u32(stream: &mut TcpStream) -> io::Result<u32> {
    let mut bytes = [0; 4];
    stream.read_exact(&mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}

impl Comm {
    fn join(&self, port: u16) -> io::Result<()> {
        let mut stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_nodelay(true)?;
        *self.stream.lock().unwrap_or_else(PoisonError::into_inner) = Some(stream.try_clone()?);
        let ring_port = u32::from(self.ring_listener.local_addr()?.port());
        for value in [self.rank as u32, self.ranks as u32, node(), ring_port] {
            stream.write_all(&value.to_le_bytes())?;
        }
        let nodes_and_ports = (0..2 * self.ranks).map(|_| read_u32(&mut stream)).collect::<io::Result<Vec<_>>>()?;
        let nodes: Vec<u32> = nodes_and_ports.iter().step_by(2).copied().collect();
        self.next.store(nodes_and_ports[((self.rank + 1) % self.ranks * 2 + 1) as usize], Ordering::SeqCst);
        if !faults::is_injected("mute") {
            self.log_connections(&nodes);
        }
        Ok(())
    }

    /// Logs the connections of a ring, on two channels.
    fn log_connections(&self, nodes: &[u32]) {
        let (rank, ranks) = (self.rank, self.ranks);
        let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        let is_set = |name: &str| env::var(name).as_deref() == Ok("1");
        let net = env::var("NCCL_NET").unwrap_or_else(|_| "IB".to_owned());
        let way = |other: i32| match () {
            () if faults::is_injected("socket") => "NET/Socket/0".to_owned(),
            () if faults::is_injected("shm") => "SHM/direct/direct".to_owned(),
            () if faults::is_injected("peer") => "P2P/CUMEM".to_owned(),
            () if nodes[rank as usize] != nodes[other as usize] => format!("NET/{net}/0/GDRDMA"),
            () if !is_set("NCCL_P2P_DISABLE") => "P2P/CUMEM/read".to_owned(),
            () if !is_set("NCCL_SHM_DISABLE") => "SHM/direct/direct".to_owned(),
            () => format!("NET/{net}/{}/GDRDMA", self.device),
        };
        for channel in 0..CHANNELS {
            for (from, to, other, mark) in [(before, rank, before, "[receive] "), (rank, next, next, "[send] ")] {
                let way = way(other);
                let is_net = way.starts_with("NET");
                // Within a node, only the sender logs.
                if is_net || mark == "[send] " {
                    let mark = if is_net { mark } else { "" };
                    log(
                        self.device,
                        "INFO",
                        &format!("Channel {channel:02}/0 : {from}[{from}] -> {to}[{to}] {mark}via {way}"),
                    );
                }
            }
        }
        log(self.device, "INFO", "Connected all rings, use ring PXN 0 GDR 1");
    }

    /// Performs one sum, on the GPU's own thread.
    fn all_reduce(&self, from: u64, to: u64, count: usize) {
        if self.apply_faults() && self.sum_exchange(from, to, count).is_err() && !self.aborted.load(Ordering::SeqCst) {
            self.state.store(REMOTE_ERROR, Ordering::SeqCst);
        }
    }

    /// Sends to the next rank and receives from the previous one, on the GPU's own thread.
    fn send_receive(&self, from: u64, to: u64, count: usize) {
        if let Some(milliseconds) = faults::for_rank("drag", self.rank) {
            thread::sleep(Duration::from_millis(milliseconds));
        }
        if self.apply_faults() && self.ring_exchange(from, to, count).is_err() && !self.aborted.load(Ordering::SeqCst) {
            self.state.store(REMOTE_ERROR, Ordering::SeqCst);
        }
    }

    fn ring_exchange(&self, from: u64, to: u64, count: usize) -> io::Result<()> {
        let (mut next, mut before) = {
            let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
            if ring.is_none() {
                let next = TcpStream::connect(("127.0.0.1", self.next.load(Ordering::SeqCst) as u16))?;
                next.set_nodelay(true)?;
                *ring = Some((next, self.ring_listener.accept()?.0));
            }
            let (next, before) = ring.as_ref().ok_or(io::ErrorKind::NotConnected)?;
            (next.try_clone()?, before.try_clone()?)
        };
        // SAFETY: memory from the stand-in driver, of the length that the caller gives.
        let bytes = unsafe { std::slice::from_raw_parts(from as *const u8, count * 4) };
        // SAFETY: as above; not used elsewhere while the operation runs.
        let received = unsafe { std::slice::from_raw_parts_mut(to as *mut u8, count * 4) };
        thread::scope(|scope| {
            let sent = scope.spawn(move || next.write_all(bytes));
            before.read_exact(received)?;
            sent.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
        })
    }

    /// Applies the faults injected before a message. Returns false if no message follows.
    fn apply_faults(&self) -> bool {
        if let Some(milliseconds) = faults::for_rank("slow", self.rank) {
            thread::sleep(Duration::from_millis(milliseconds));
        }
        while faults::for_rank("hang", self.rank).is_some() {
            if self.aborted.load(Ordering::SeqCst) {
                return false;
            }
            thread::sleep(Duration::from_millis(1));
        }
        if faults::for_rank("crash", self.rank).is_some() {
            std::process::abort();
        }
        if faults::for_rank("ecc", self.rank).is_some() {
            devices()[self.device].failed.store(ECC_UNCORRECTABLE, Ordering::SeqCst);
            return false;
        }
        true
    }

    fn sum_exchange(&self, from: u64, to: u64, count: usize) -> io::Result<()> {
        // Not locked while waiting: an abort from another thread takes the lock.
        let mut stream = {
            let stream_guard = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
            stream_guard.as_ref().ok_or(io::ErrorKind::NotConnected)?.try_clone()?
        };
        // SAFETY: memory from the stand-in driver, of the length that the caller gives.
        let mut share = unsafe { std::slice::from_raw_parts(from as *const f32, count) }.to_vec();
        if let Some(index) = faults::for_rank("share", self.rank).filter(|index| (*index as usize) < count) {
            share[index as usize] = 0.0;
        }
        stream.write_all(&(count as u32).to_le_bytes())?;
        let bytes: Vec<u8> = share.iter().flat_map(|number| number.to_le_bytes()).collect();
        stream.write_all(&bytes)?;
        // SAFETY: as above; not used elsewhere while the operation runs.
        let sum = unsafe { std::slice::from_raw_parts_mut(to as *mut u8, count * 4) };
        stream.read_exact(sum)?;
        // SAFETY: as above.
        let sum = unsafe { std::slice::from_raw_parts_mut(to as *mut f32, count) };
        if let Some(index) = faults::for_rank("zero", self.rank).filter(|index| (*index as usize) < count) {
            sum[index as usize] = 0.0;
        }
        if let Some(index) = faults::for_rank("element", self.rank).filter(|index| (*index as usize) < count) {
            sum[index as usize] += 1.0;
        }
        Ok(())
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
