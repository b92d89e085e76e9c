//! A communicator: one rank, which meets the others at a local socket.

use std::{
    env,
    fs::OpenOptions,
    io::{self, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use super::message::Message;
use crate::{cuda::devices, faults};

pub(super) const REMOTE_ERROR: i32 = 6;

const ECC_UNCORRECTABLE: i32 = 214;
const CHANNELS: usize = 2;

pub(super) struct Comm {
    pub(super) rank: i32,
    pub(super) ranks: i32,
    pub(super) device: usize,
    pub(super) state: AtomicI32,
    pub(super) aborted: AtomicBool,
    /// Whether data stays inside the machine.
    pub(super) is_inside: AtomicBool,
    pub(super) stream: Mutex<Option<TcpStream>>,
    /// The ring: a listener for the previous rank, and the port of the next one.
    pub(super) ring_listener: TcpListener,
    pub(super) next: AtomicU32,
    pub(super) ring: Mutex<Option<(TcpStream, TcpStream)>>,
}

fn node() -> u32 {
    env::var("DOCTOR_FAKE_NVIDIA_NODE").ok().and_then(|node| node.parse().ok()).unwrap_or(0)
}

fn is_set(variable: &str) -> bool {
    env::var(variable).as_deref() == Ok("1")
}

pub(super) fn log(device: usize, level: &str, text: &str) {
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
pub(super) fn serve_ranks(listener: &TcpListener) -> io::Result<()> {
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
        let mut sum: Option<Message> = None;
        for (stream, _) in &mut ranks {
            let share = Message::receive(stream)?;
            sum = Some(match sum {
                Some(sum) => sum.plus(&share),
                None => share,
            });
        }
        for (stream, _) in &mut ranks {
            sum.iter().try_for_each(|sum| sum.send(stream))?;
        }
    }
}

fn read_u32(stream: &mut TcpStream) -> io::Result<u32> {
    let mut bytes = [0; 4];
    stream.read_exact(&mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}

impl Comm {
    pub(super) fn join(&self, port: u16) -> io::Result<()> {
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
        let is_alone = nodes.iter().all(|node| *node == nodes[0]);
        self.is_inside.store(is_alone && !is_set("NCCL_P2P_DISABLE"), Ordering::SeqCst);
        if !faults::is_injected("mute") {
            self.log_connections(&nodes);
        }
        Ok(())
    }

    /// Logs the connections of a ring, on two channels.
    fn log_connections(&self, nodes: &[u32]) {
        let (rank, ranks) = (self.rank, self.ranks);
        let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
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
    pub(super) fn all_reduce(&self, from: u64, to: u64, count: usize) {
        // The factor by which bus bandwidth is defined.
        let bus_bytes = 2.0 * f64::from(self.ranks - 1) / f64::from(self.ranks) * 4.0 * count as f64;
        self.timed(bus_bytes, self.delay("slow"), || self.sum_exchange(from, to, count as u64));
    }

    /// Sends to the next rank and receives from the previous one, on the GPU's own thread.
    pub(super) fn send_receive(&self, from: u64, to: u64, count: usize) {
        let delay = self.delay("slow") + self.delay("drag");
        self.timed(4.0 * count as f64, delay, || self.ring_exchange(from, to, count as u64));
    }

    /// Returns an injected delay before each message.
    fn delay(&self, fault: &str) -> Duration {
        Duration::from_millis(faults::for_rank(fault, self.rank).unwrap_or_default())
    }

    /// Performs an operation with its injected faults, and adds its time to the GPU's clock.
    fn timed(&self, bytes: f64, delay: Duration, exchange: impl FnOnce() -> io::Result<()>) {
        let (device, started) = (&devices()[self.device], Instant::now());
        thread::sleep(delay);
        if self.apply_faults() && exchange().is_err() && !self.aborted.load(Ordering::SeqCst) {
            self.state.store(REMOTE_ERROR, Ordering::SeqCst);
        }
        let rates = &device.model.rates;
        let rate = if self.is_inside.load(Ordering::SeqCst) { rates.nccl } else { rates.nccl_loopback };
        device.spend(match rate {
            Some(rate) => delay.as_secs_f64() + bytes / rate,
            None => started.elapsed().as_secs_f64(),
        });
    }

    fn ring_exchange(&self, from: u64, to: u64, count: u64) -> io::Result<()> {
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
        let message = self.message(from, count)?;
        thread::scope(|scope| {
            let sent = scope.spawn(move || message.send(&mut next));
            let received = Message::receive(&mut before)?;
            self.put(received, to)?;
            sent.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
        })
    }

    /// Reads a message from the GPU's memory.
    fn message(&self, from: u64, count: u64) -> io::Result<Message> {
        let memory = devices()[self.device].memory();
        Message::from_memory(&memory, from, count).map_err(|_| io::ErrorKind::InvalidInput.into())
    }

    /// Writes a message to the GPU's memory.
    fn put(&self, message: Message, to: u64) -> io::Result<()> {
        let mut memory = devices()[self.device].memory();
        message.into_memory(&mut memory, to).map_err(|_| io::ErrorKind::InvalidInput.into())
    }

    /// Applies the faults injected before a message. Returns false if no message follows.
    fn apply_faults(&self) -> bool {
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

    fn sum_exchange(&self, from: u64, to: u64, count: u64) -> io::Result<()> {
        // Not locked while waiting: an abort from another thread takes the lock.
        let mut stream = {
            let stream_guard = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
            stream_guard.as_ref().ok_or(io::ErrorKind::NotConnected)?.try_clone()?
        };
        let mut share = self.message(from, count)?;
        if let Some(index) = faults::for_rank("share", self.rank) {
            share.change(index, |_| 0.0);
        }
        share.send(&mut stream)?;
        let mut sum = Message::receive(&mut stream)?;
        if let Some(index) = faults::for_rank("zero", self.rank) {
            sum.change(index, |_| 0.0);
        }
        if let Some(index) = faults::for_rank("element", self.rank) {
            sum.change(index, |number| number + 1.0);
        }
        self.put(sum, to)
    }
}
