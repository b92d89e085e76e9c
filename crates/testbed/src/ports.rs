//! TCP ports for servers that a test starts, stops and starts again.
//!
//! A port that the kernel chose is in the range of outgoing connections: while the server is down, any connection of
//! another test may use it, and the server cannot listen again. These ports are below that range and belong to one
//! process at a time.

use std::{
    fs, io,
    net::{Ipv4Addr, TcpListener},
    os::{
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr, UnixListener},
    },
    sync::{Mutex, PoisonError},
};

const COUNT: u16 = 10_000;
/// The first port of outgoing connections, if the kernel does not tell.
const DEFAULT_EPHEMERAL: u16 = 32_768;

/// An abstract Unix socket for each port of this process. The kernel removes them with the process.
static HELD: Mutex<Vec<UnixListener>> = Mutex::new(Vec::new());

/// Returns ports on which nothing listens, and which no other test is given until this process exits.
///
/// # Errors
/// Fails if too few ports are free.
pub fn reserve(count: usize) -> io::Result<Vec<u16>> {
    let mut held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
    let first = first_ephemeral().saturating_sub(COUNT).max(1_024);
    // Each process starts at another port, so that they seldom try the same.
    let offset = (std::process::id().wrapping_mul(37) % u32::from(COUNT)) as u16;
    let mut found = Vec::with_capacity(count);
    for port in (0..COUNT).map(|at| first + (at + offset) % COUNT) {
        if found.len() == count {
            break;
        }
        if let Some(socket) = take(port)? {
            held.push(socket);
            found.push(port);
        }
    }
    if found.len() < count {
        return Err(io::Error::other(format!("fewer than {count} of the ports from {first} on are free")));
    }
    Ok(found)
}

/// Returns one port as [`reserve`] does.
///
/// # Errors
/// Fails if no port is free.
pub fn reserve_one() -> io::Result<u16> {
    reserve(1).map(|ports| ports[0])
}

/// Returns `None` if another test has the port, or something listens on it.
fn take(port: u16) -> io::Result<Option<UnixListener>> {
    let address = SocketAddr::from_abstract_name(format!("cluster-doctor-test-port-{port}"))?;
    match UnixListener::bind_addr(&address) {
        Ok(socket) => Ok(TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).is_ok().then_some(socket)),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => Ok(None),
        Err(error) => Err(error),
    }
}

fn first_ephemeral() -> u16 {
    let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    range.split_ascii_whitespace().next().and_then(|first| first.parse().ok()).unwrap_or(DEFAULT_EPHEMERAL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_distinct_free_and_never_those_of_outgoing_connections() {
        let mut ports = reserve(20).unwrap();
        let listening = TcpListener::bind((Ipv4Addr::LOCALHOST, ports[0])).unwrap();
        let connection = std::net::TcpStream::connect(listening.local_addr().unwrap()).unwrap();
        assert!(ports.iter().all(|port| *port < connection.local_addr().unwrap().port()), "{ports:?}");
        ports.extend(reserve(20).unwrap());
        ports.sort_unstable();
        ports.dedup();
        assert_eq!(ports.len(), 40);
    }

    #[test]
    fn a_port_that_is_taken_or_listened_on_is_not_given() {
        let port = reserve_one().unwrap();
        assert!(take(port).unwrap().is_none(), "taken");
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        assert!(take(listener.local_addr().unwrap().port()).unwrap().is_none(), "listened on");
    }
}
