//! The relay from a node to the API server, which listens only on loopback: it accepts connections at the host's end of
//! the node's link and forwards them.

use std::{
    io,
    net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use super::super::KubernetesTestbedError;

/// Accepts connections until it is dropped. Existing connections end with either of their ends.
#[derive(Debug)]
pub(super) struct TcpProxy {
    address: SocketAddr,
    closed: Arc<AtomicBool>,
}

impl TcpProxy {
    /// Opens a relay from this address of the host to a port on loopback.
    pub(super) fn open(host: Ipv4Addr, port: u16) -> Result<Self, KubernetesTestbedError> {
        let listener = TcpListener::bind((host, 0)).map_err(KubernetesTestbedError::Ports)?;
        let address = listener.local_addr().map_err(KubernetesTestbedError::Ports)?;
        let closed = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&closed);
        thread::spawn(move || {
            for from in listener.incoming() {
                if seen.load(Ordering::Relaxed) {
                    return;
                }
                // While the API server is down, a connection is closed immediately, as it would be without the relay.
                if let (Ok(from), Ok(to)) = (from, TcpStream::connect((Ipv4Addr::LOCALHOST, port))) {
                    relay(&from, &to).unwrap_or_default();
                }
            }
        });
        Ok(Self { address, closed })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for TcpProxy {
    fn drop(&mut self) {
        self.closed.store(true, Ordering::Relaxed);
        // Wakes the accepting thread. If the link is gone already, this fails and the thread has no client left.
        drop(TcpStream::connect(self.address));
    }
}

/// Forwards both directions until one side ends.
fn relay(one: &TcpStream, other: &TcpStream) -> io::Result<()> {
    for (from, to) in [(one, other), (other, one)] {
        let (mut from, mut to) = (from.try_clone()?, to.try_clone()?);
        thread::spawn(move || {
            // The endpoints report errors themselves.
            drop(io::copy(&mut from, &mut to));
            drop(to.shutdown(Shutdown::Both));
            drop(from.shutdown(Shutdown::Both));
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use super::*;

    #[test]
    fn bytes_are_forwarded_in_both_directions_until_the_connection_ends() {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let proxy = TcpProxy::open(Ipv4Addr::LOCALHOST, server.local_addr().unwrap().port()).unwrap();
        let mut client = TcpStream::connect(proxy.address()).unwrap();
        let (mut served, _) = server.accept().unwrap();
        client.write_all(b"asked").unwrap();
        let mut received = [0; 5];
        served.read_exact(&mut received).unwrap();
        assert_eq!(&received, b"asked");
        served.write_all(b"said").unwrap();
        drop(served);
        let mut received = String::new();
        client.read_to_string(&mut received).unwrap();
        assert_eq!(received, "said");
    }

    #[test]
    fn without_a_listener_behind_the_proxy_the_connection_is_closed() {
        let unused = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let proxy = TcpProxy::open(Ipv4Addr::LOCALHOST, unused).unwrap();
        let mut client = TcpStream::connect(proxy.address()).unwrap();
        let mut received = Vec::new();
        assert_eq!(client.read_to_end(&mut received).unwrap_or(0), 0);
    }
}
