//! A forwarder between service and API server that counts bytes. TLS is end to end, so the count is what a network
//! would carry, encrypted and with all headers except those of TCP.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use anyhow::{Context, Result};

#[derive(Debug, Default)]
struct TrafficCounters {
    to_server: AtomicU64,
    to_service: AtomicU64,
    connections: AtomicU64,
}

pub(super) struct CountingProxy {
    port: u16,
    counted: Arc<TrafficCounters>,
}

/// The traffic so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Traffic {
    pub(super) to_server: u64,
    pub(super) to_service: u64,
    pub(super) connections: u64,
}

impl Traffic {
    pub(super) const fn bytes(self) -> u64 {
        self.to_server + self.to_service
    }

    pub(super) const fn since(self, before: Self) -> Self {
        Self {
            to_server: self.to_server - before.to_server,
            to_service: self.to_service - before.to_service,
            connections: self.connections - before.connections,
        }
    }
}

impl CountingProxy {
    /// Forwards to a port of this machine.
    pub(super) fn start(server: u16) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").context("listening on the loopback address")?;
        let port = listener.local_addr().context("reading the port")?.port();
        let counted = Arc::new(TrafficCounters::default());
        let counts = Arc::clone(&counted);
        // The thread ends with the process, so that the port stays taken.
        thread::spawn(move || {
            for service in listener.incoming().flatten() {
                // If the server is down, the service's connection is closed and the service handles it.
                if let Ok(server) = TcpStream::connect(("127.0.0.1", server)) {
                    counts.connections.fetch_add(1, Ordering::Relaxed);
                    forward(&service, &server, &counts, |counted| &counted.to_server);
                    forward(&server, &service, &counts, |counted| &counted.to_service);
                }
            }
        });
        Ok(Self { port, counted })
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }

    pub(super) fn traffic(&self) -> Traffic {
        Traffic {
            to_server: self.counted.to_server.load(Ordering::Relaxed),
            to_service: self.counted.to_service.load(Ordering::Relaxed),
            connections: self.counted.connections.load(Ordering::Relaxed),
        }
    }
}

/// Copies one direction until it ends, on its own thread.
fn forward(
    from: &TcpStream,
    to: &TcpStream,
    counted: &Arc<TrafficCounters>,
    count: fn(&TrafficCounters) -> &AtomicU64,
) {
    let (Ok(mut from), Ok(mut to)) = (from.try_clone(), to.try_clone()) else { return };
    let counted = Arc::clone(counted);
    // Small messages are sent without delay, as they are without the forwarder.
    let _slower = to.set_nodelay(true);
    thread::spawn(move || {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(read @ 1..) = from.read(&mut buffer) {
            count(&counted).fetch_add(read as u64, Ordering::Relaxed);
            if to.write_all(&buffer[..read]).is_err() {
                break;
            }
        }
        // An error means that the peer is gone already.
        let _gone = to.shutdown(Shutdown::Write);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forwarded_bytes_arrive_and_are_counted_in_each_direction() {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let wire = CountingProxy::start(server.local_addr().unwrap().port()).unwrap();
        let mut client = TcpStream::connect(("127.0.0.1", wire.port())).unwrap();
        client.write_all(b"question").unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        let (mut connection, _) = server.accept().unwrap();
        let mut question = String::new();
        connection.read_to_string(&mut question).unwrap();
        connection.write_all(b"an answer").unwrap();
        drop(connection);
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        assert_eq!((question.as_str(), answer.as_str()), ("question", "an answer"));
        assert_eq!(wire.traffic(), Traffic { to_server: 8, to_service: 9, connections: 1 });
    }
}
