//! Memory for the messages of nodes, from the first byte of a body until the message is durable.
//!
//! Anybody can send a body; its signature is checked when it is there. Therefore memory is taken for what has arrived
//! and not for what was announced, one address has a part of it, and so has one IPv6 network. Short bodies have memory
//! of their own, which long ones cannot fill. While more than half of that is used, an address has a smaller part: a
//! few addresses that hold unfinished bodies leave room for others, and agents behind one gateway may use the half.
//! Without memory a message is rejected at once: its sender repeats it.

use std::{
    collections::HashMap,
    hash::Hash,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::connections::ipv6_network;

/// The longest body that counts as short. Most reports and results are shorter.
const SHORT: usize = 256 << 10;
/// The least that is taken for a body, unless it is shorter.
const STEP: usize = 64 << 10;

/// The memory of all bodies.
#[derive(Debug)]
pub(super) struct BodyMemory {
    short: Arc<Pool>,
    long: Arc<Pool>,
}

#[derive(Debug)]
struct Pool {
    bytes: usize,
    per_address: usize,
    /// The limit of an address while more than half of the memory is used.
    per_address_when_scarce: usize,
    used: Mutex<Used>,
}

#[derive(Debug, Default)]
struct Used {
    bytes: usize,
    by_address: HashMap<IpAddr, usize>,
    by_network: HashMap<[u8; 8], usize>,
}

/// A body that arrives, or has arrived, with its memory.
#[derive(Debug)]
pub(super) struct ReceivedBody {
    bytes: Vec<u8>,
    announced: usize,
    memory: BodyPermit,
}

/// The memory of one body. It is free again when this is dropped.
#[derive(Debug)]
pub(super) struct BodyPermit {
    pool: Arc<Pool>,
    peer: IpAddr,
    bytes: usize,
}

/// There is no memory for a body now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NoMemory;

impl Default for BodyMemory {
    fn default() -> Self {
        let pool = |mib: usize, when_scarce: usize| {
            // One address may send one message of any length.
            let (per_address, per_address_when_scarce) = (16 << 20, when_scarce << 20);
            Arc::new(Pool { bytes: mib << 20, per_address, per_address_when_scarce, used: Mutex::default() })
        };
        Self { short: pool(32, 2), long: pool(96, 16) }
    }
}

impl BodyMemory {
    /// Begins a body of the announced length.
    pub(super) fn begin(&self, peer: IpAddr, announced: usize) -> ReceivedBody {
        let pool = Arc::clone(if announced <= SHORT { &self.short } else { &self.long });
        let memory = BodyPermit { pool, peer: peer.to_canonical(), bytes: 0 };
        ReceivedBody { bytes: Vec::new(), announced, memory }
    }
}

impl ReceivedBody {
    /// Adds a piece that has arrived, after taking memory for it. The server receives no more than was announced.
    pub(super) fn add(&mut self, piece: &[u8]) -> Result<(), NoMemory> {
        let needed = self.bytes.len() + piece.len();
        if needed > self.memory.bytes {
            // Twice as much as before, so that a long body is not copied for each piece.
            let capacity = (2 * self.memory.bytes).max(STEP).min(self.announced).max(needed);
            self.memory.grow_to(capacity)?;
            self.bytes.reserve_exact(capacity - self.bytes.len());
        }
        self.bytes.extend_from_slice(piece);
        Ok(())
    }

    pub(super) const fn is_complete(&self) -> bool {
        self.bytes.len() == self.announced
    }

    pub(super) fn into_parts(self) -> (Vec<u8>, BodyPermit) {
        (self.bytes, self.memory)
    }
}

impl BodyPermit {
    fn grow_to(&mut self, bytes: usize) -> Result<(), NoMemory> {
        self.pool.take(self.peer, bytes.saturating_sub(self.bytes))?;
        self.bytes = self.bytes.max(bytes);
        Ok(())
    }
}

impl Drop for BodyPermit {
    fn drop(&mut self) {
        self.pool.give_back(self.peer, self.bytes);
    }
}

impl Pool {
    fn lock(&self) -> MutexGuard<'_, Used> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, peer: IpAddr, bytes: usize) -> Result<(), NoMemory> {
        let mut used = self.lock();
        let network = ipv6_network(peer);
        let of_address = used.by_address.get(&peer).copied().unwrap_or_default();
        let of_network = network.and_then(|network| used.by_network.get(&network).copied()).unwrap_or_default();
        let limit_of_network = self.per_address.max(self.bytes / 2);
        let is_scarce = used.bytes + bytes > self.bytes / 2;
        let limit_of_address = if is_scarce { self.per_address_when_scarce } else { self.per_address };
        if used.bytes + bytes > self.bytes
            || of_address + bytes > limit_of_address
            || of_network + bytes > limit_of_network
        {
            return Err(NoMemory);
        }
        used.bytes += bytes;
        *used.by_address.entry(peer).or_default() += bytes;
        if let Some(network) = network {
            *used.by_network.entry(network).or_default() += bytes;
        }
        Ok(())
    }

    fn give_back(&self, peer: IpAddr, bytes: usize) {
        let mut used = self.lock();
        used.bytes = used.bytes.saturating_sub(bytes);
        subtract(&mut used.by_address, &peer, bytes);
        if let Some(network) = ipv6_network(peer) {
            subtract(&mut used.by_network, &network, bytes);
        }
    }
}

fn subtract<K: Eq + Hash>(used: &mut HashMap<K, usize>, of: &K, bytes: usize) {
    if let Some(known) = used.get_mut(of) {
        *known = known.saturating_sub(bytes);
        if *known == 0 {
            used.remove(of);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use doctor_backend::clock::{Clock, SystemClock};
    use doctor_checks::document::{AgentReport, RunKey, Versions};
    use doctor_core::ids::NodeName;
    use doctor_store::{
        Store, StoreUrl,
        messages::{MessageContent, VerifiedMessage},
    };

    use super::*;
    use crate::agent_queue::AgentQueue;

    fn peer(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// Receives this much of a long body.
    fn receive(memory: &BodyMemory, from: &str, mib: usize) -> Result<ReceivedBody, NoMemory> {
        let mut body = memory.begin(peer(from), 16 << 20);
        (0..mib * 64).try_for_each(|_| body.add(&[7; 16 << 10])).map(|()| body)
    }

    #[test]
    fn memory_is_taken_for_what_has_arrived_and_is_free_again_afterwards() {
        let memory = BodyMemory::default();
        let announced: Vec<ReceivedBody> = (0..1000).map(|_| memory.begin(peer("10.0.0.1"), 16 << 20)).collect();
        let whole = receive(&memory, "10.0.0.1", 16).unwrap();
        assert!(whole.is_complete());
        assert_eq!((memory.long.lock().bytes, whole.bytes.capacity()), (16 << 20, 16 << 20));
        let (bytes, permit) = whole.into_parts();
        drop(announced);
        assert_eq!((bytes.len(), memory.long.lock().bytes), (16 << 20, 16 << 20));
        drop(permit);
        let used = memory.long.lock();
        assert!(used.bytes == 0 && used.by_address.is_empty());
    }

    #[test]
    fn one_address_or_network_cannot_take_all_and_long_bodies_leave_the_short_ones_alone() {
        let memory = BodyMemory::default();
        let mut held = vec![receive(&memory, "10.0.0.1", 16).unwrap()];
        assert_eq!(receive(&memory, "10.0.0.1", 1).unwrap_err(), NoMemory);
        for host in 1..=3 {
            held.push(receive(&memory, &format!("2001:db8::{host}"), 16).unwrap());
        }
        assert_eq!(receive(&memory, "2001:db8::4", 1).unwrap_err(), NoMemory, "half of it is used by one network");
        held.push(receive(&memory, "10.0.0.2", 16).unwrap());
        held.push(receive(&memory, "::ffff:10.0.0.3", 16).unwrap());
        assert_eq!(receive(&memory, "10.0.0.4", 1).unwrap_err(), NoMemory);
        let mut short = memory.begin(peer("10.0.0.1"), 5);
        short.add(b"hello").unwrap();
        assert_eq!(short.into_parts().0, b"hello");
        held.clear();
        receive(&memory, "10.0.0.4", 16).unwrap();
        let used = memory.long.lock();
        assert!(used.by_address.is_empty() && used.by_network.is_empty());
    }

    #[test]
    fn addresses_that_hold_unfinished_short_bodies_leave_room_for_others() {
        let memory = BodyMemory::default();
        let all_but_one_byte = vec![7_u8; SHORT - 1];
        let hold = |from: &str| {
            let mut body = memory.begin(peer(from), SHORT);
            body.add(&all_but_one_byte).map(|()| body)
        };
        let mut held = Vec::new();
        // One host with both kinds of addresses, and another one.
        for from in ["10.0.0.1", "2001:db8::1", "10.0.0.2"] {
            held.extend(std::iter::from_fn(|| hold(from).ok()));
            assert_eq!(hold(from).unwrap_err(), NoMemory, "{from}");
        }
        assert_eq!(held.len(), 64 + 8 + 8, "16 MiB and twice 2 MiB");
        for agent in 10..15 {
            held.extend((0..8).map(|_| hold(&format!("10.0.0.{agent}")).unwrap()));
        }
    }

    #[test]
    fn a_message_that_waits_for_the_database_has_its_memory_also_when_nobody_waits_for_it() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("doctor.db");
        let store = Store::open(&StoreUrl::Sqlite(file.clone())).unwrap();
        let queue = AgentQueue::new(&store, Arc::default()).unwrap();
        let database = rusqlite::Connection::open(file).unwrap();
        database.execute_batch("BEGIN IMMEDIATE").unwrap();
        let (node, received) = (NodeName::new("n1").unwrap(), SystemClock.now());
        let report = AgentReport::heartbeat(node.clone(), 1, received, Versions::default());
        let signed = report.sign(&RunKey::new([1; 32])).unwrap();
        let memory = BodyMemory::default();
        let mut body = memory.begin(peer("10.0.0.1"), signed.len());
        body.add(&signed).unwrap();
        let (bytes, permit) = body.into_parts();
        let content = MessageContent::Report(Box::new(report));
        drop(queue.submit(VerifiedMessage { node, received, content, bytes }, permit));
        assert_eq!(memory.short.lock().bytes, signed.len());
        database.execute_batch("COMMIT").unwrap();
        let until = Instant::now() + Duration::from_secs(120);
        while memory.short.lock().bytes > 0 {
            assert!(Instant::now() < until, "its memory is not free again");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
