//! The open connections of a listener: how many there may be, how many of one address, and which one ends for a new one.
//!
//! A connection is idle while it has no request: before its first one, and between two. At a limit, the oldest idle connection ends for
//! a new one. A client that only opens connections therefore displaces its own, and the others keep theirs. A connection with a request
//! is never ended here; its deadlines end it.

use std::{
    collections::{HashMap, VecDeque},
    net::IpAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use tokio::sync::Notify;

/// Returns the /64 network of an IPv6 address. The hosts of a data centre share one, and one host may have all of its addresses.
pub(crate) fn ipv6_network(address: IpAddr) -> Option<[u8; 8]> {
    match address.to_canonical() {
        IpAddr::V4(_) => None,
        IpAddr::V6(address) => {
            let [a, b, c, d, e, f, g, h, ..] = address.octets();
            Some([a, b, c, d, e, f, g, h])
        }
    }
}

/// How many connections there may be.
#[derive(Debug, Clone)]
pub(crate) struct ConnectionLimits {
    pub(crate) total: usize,
    /// One /64 network of IPv6 has half of all, or this number if it is higher.
    pub(crate) per_address: usize,
    /// Addresses with the limit of all connections alone: reverse proxies, which connect for many clients.
    pub(crate) shared_addresses: Vec<IpAddr>,
}

#[derive(Debug)]
pub(super) struct Registry {
    limits: ConnectionLimits,
    state: Mutex<RegistryState>,
    /// Notified when a connection ends.
    ended: Notify,
}

#[derive(Debug, Default)]
struct RegistryState {
    /// Oldest first.
    by_peer: HashMap<IpAddr, VecDeque<Arc<Connection>>>,
    count: usize,
}

/// An open connection.
#[derive(Debug)]
pub(super) struct Connection {
    peer: IpAddr,
    requests: AtomicUsize,
    /// Notified when the connection has to end for a new one.
    displaced: Notify,
}

/// A connection's entry in the registry, which ends with it.
#[derive(Debug)]
pub(super) struct Admitted {
    pub(super) connection: Arc<Connection>,
    registry: Arc<Registry>,
}

/// A request in progress, from its head to the end of its response.
#[derive(Debug)]
pub(super) struct RequestInProgress(Arc<Connection>);

/// What happens to a new connection.
#[derive(Debug)]
pub(super) enum Admission {
    Admitted(Admitted),
    /// Its address has as many connections with a request as it may have.
    AddressFull,
    /// There are as many connections with a request as there may be.
    Full,
}

impl Connection {
    pub(super) fn begin_request(self: &Arc<Self>) -> RequestInProgress {
        self.requests.fetch_add(1, Ordering::AcqRel);
        RequestInProgress(Arc::clone(self))
    }

    fn is_idle(&self) -> bool {
        self.requests.load(Ordering::Acquire) == 0
    }

    /// Returns when the connection has to end for a new one.
    pub(super) async fn displaced(&self) {
        self.displaced.notified().await;
    }
}

impl Drop for RequestInProgress {
    fn drop(&mut self) {
        self.0.requests.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Registry {
    pub(super) fn new(limits: ConnectionLimits) -> Self {
        Self { limits, state: Mutex::default(), ended: Notify::new() }
    }

    fn lock(&self) -> MutexGuard<'_, RegistryState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Admits a new connection, for which an idle one may end.
    pub(super) fn admit(self: &Arc<Self>, address: IpAddr) -> Admission {
        let peer = address.to_canonical();
        let ConnectionLimits { total, per_address, ref shared_addresses } = self.limits;
        let mut state = self.lock();
        if !shared_addresses.contains(&peer) {
            if state.count_of(peer) >= per_address && !state.displace_idle(peer) {
                return Admission::AddressFull;
            }
            if let Some(network) = ipv6_network(peer) {
                let is_in = |peer: IpAddr| ipv6_network(peer) == Some(network);
                let limit = per_address.max(total / 2);
                if state.count_among(is_in) >= limit && !state.displace_idle_of_largest(is_in) {
                    return Admission::AddressFull;
                }
            }
        }
        if state.count >= total && !state.displace_idle_of_largest(|_| true) {
            return Admission::Full;
        }
        let connection = Arc::new(Connection { peer, requests: AtomicUsize::new(0), displaced: Notify::new() });
        state.by_peer.entry(peer).or_default().push_back(Arc::clone(&connection));
        state.count += 1;
        Admission::Admitted(Admitted { connection, registry: Arc::clone(self) })
    }

    /// Returns after a connection has ended.
    pub(super) async fn one_ended(&self) {
        self.ended.notified().await;
    }
}

impl RegistryState {
    fn count_of(&self, peer: IpAddr) -> usize {
        self.by_peer.get(&peer).map_or(0, VecDeque::len)
    }

    fn count_among(&self, is_among: impl Fn(IpAddr) -> bool) -> usize {
        self.by_peer.iter().filter(|(peer, _)| is_among(**peer)).map(|(_, connections)| connections.len()).sum()
    }

    /// Ends the oldest idle connection of a peer. Returns whether there was one.
    fn displace_idle(&mut self, peer: IpAddr) -> bool {
        let Some(connections) = self.by_peer.get(&peer) else { return false };
        let Some(connection) = connections.iter().find(|connection| connection.is_idle()).cloned() else {
            return false;
        };
        self.remove(&connection);
        connection.displaced.notify_one();
        true
    }

    /// Ends the oldest idle connection of the peer that has the most idle ones among these.
    fn displace_idle_of_largest(&mut self, is_among: impl Fn(IpAddr) -> bool) -> bool {
        let idle = |connections: &VecDeque<Arc<Connection>>| connections.iter().filter(|one| one.is_idle()).count();
        let among = self.by_peer.iter().filter(|(peer, _)| is_among(**peer));
        let largest = among.map(|(peer, connections)| (idle(connections), *peer)).max_by_key(|(idle, _)| *idle);
        largest.is_some_and(|(_, peer)| self.displace_idle(peer))
    }

    fn remove(&mut self, connection: &Arc<Connection>) {
        let Some(connections) = self.by_peer.get_mut(&connection.peer) else { return };
        let before = connections.len();
        connections.retain(|other| !Arc::ptr_eq(other, connection));
        self.count -= before - connections.len();
        if connections.is_empty() {
            self.by_peer.remove(&connection.peer);
        }
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        self.registry.lock().remove(&self.connection);
        self.registry.ended.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registry(total: usize, per_address: usize) -> Arc<Registry> {
        let shared_addresses = vec!["10.0.0.99".parse().unwrap()];
        Arc::new(Registry::new(ConnectionLimits { total, per_address, shared_addresses }))
    }

    #[track_caller]
    fn admitted(registry: &Arc<Registry>, address: &str) -> Admitted {
        match registry.admit(address.parse().unwrap()) {
            Admission::Admitted(admitted) => admitted,
            other => panic!("{other:?}"),
        }
    }

    /// Whether the connection was told to end.
    fn is_displaced(admitted: &Admitted) -> bool {
        let mut told = Box::pin(admitted.connection.displaced());
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        told.as_mut().poll(&mut context).is_ready()
    }

    #[test]
    fn an_address_displaces_its_own_oldest_idle_connection_and_never_one_with_a_request() {
        let registry = registry(100, 3);
        let other = admitted(&registry, "10.0.0.1");
        let [busy, idle, newer] = std::array::from_fn(|_| admitted(&registry, "10.0.0.2"));
        let request = busy.connection.begin_request();
        let newest = admitted(&registry, "10.0.0.2");
        assert!(is_displaced(&idle));
        assert!(![&other, &busy, &newer, &newest].into_iter().any(is_displaced));
        let requests = [newer.connection.begin_request(), newest.connection.begin_request()];
        assert!(matches!(registry.admit("10.0.0.2".parse().unwrap()), Admission::AddressFull));
        drop((request, requests));
        admitted(&registry, "10.0.0.2");
        assert!(is_displaced(&busy), "its request has ended");
    }

    #[test]
    fn at_the_limit_of_all_connections_the_address_with_the_most_idle_ones_gives_way() {
        let registry = registry(4, 3);
        let few = admitted(&registry, "10.0.0.1");
        let many: [Admitted; 3] = std::array::from_fn(|_| admitted(&registry, "10.0.0.2"));
        let new = admitted(&registry, "10.0.0.3");
        assert!(is_displaced(&many[0]) && !is_displaced(&few) && !is_displaced(&new));
        let _requests = [&few, &many[1], &many[2], &new].map(|admitted| admitted.connection.begin_request());
        assert!(matches!(registry.admit("10.0.0.4".parse().unwrap()), Admission::Full));
        drop(new);
        admitted(&registry, "10.0.0.4");
    }

    #[test]
    fn a_connection_that_was_displaced_is_counted_once_when_it_ends() {
        let registry = registry(2, 2);
        let [first, second] = std::array::from_fn(|_| admitted(&registry, "10.0.0.1"));
        let third = admitted(&registry, "10.0.0.1");
        assert_eq!(registry.lock().count, 2);
        drop(first);
        assert_eq!(registry.lock().count, 2);
        drop((second, third));
        assert!(registry.lock().count == 0 && registry.lock().by_peer.is_empty());
    }

    #[test]
    fn hosts_of_one_ipv6_network_have_a_limit_each_and_together_half_of_all() {
        let registry = registry(8, 2);
        let hosts: [Admitted; 4] = std::array::from_fn(|host| admitted(&registry, &format!("2001:db8::{host}:1")));
        assert!(!hosts.iter().any(is_displaced), "each is a client of its own");
        let elsewhere = admitted(&registry, "2001:db8:0:1::1");
        let fifth = admitted(&registry, "2001:db8::ffff:2");
        assert_eq!(hosts.iter().filter(|one| is_displaced(one)).count(), 1, "the network has half of all");
        assert!(!is_displaced(&elsewhere) && !is_displaced(&fifth));
        let left: Vec<&Admitted> = hosts.iter().collect();
        let _requests: Vec<_> = left.iter().chain([&&fifth]).map(|one| one.connection.begin_request()).collect();
        assert!(matches!(registry.admit("2001:db8::9".parse().unwrap()), Admission::AddressFull));
        let own: [Admitted; 3] = std::array::from_fn(|_| admitted(&registry, "2001:db8:0:2::1"));
        assert!(is_displaced(&own[0]) && !is_displaced(&own[1]));
    }

    #[test]
    fn a_proxy_has_the_limit_of_all() {
        let registry = registry(4, 1);
        let proxied: [Admitted; 2] = [admitted(&registry, "10.0.0.99"), admitted(&registry, "::ffff:10.0.0.99")];
        assert!(!proxied.iter().any(is_displaced));
    }
}
