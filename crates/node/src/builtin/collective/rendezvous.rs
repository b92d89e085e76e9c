//! Connects the nodes of a job: the first one listens, the others connect and prove that they know the secret.
//!
//! Nothing waits forever. A connecting node retries until the gathering time is over (a name may not resolve yet, the
//! first node may start last), and an unauthenticated connection that stays silent is closed.

use std::{
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs as _},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc::Sender,
    },
    thread,
    time::{Duration, Instant},
};

use doctor_core::time::Span;

use super::{
    events::CoordinatorEvent,
    frame_auth::{self, FrameError, NONCE_BYTES, Nonce, ReadChannel, Side, WriteChannel},
    launcher::{JobPosition, PORT},
    messages::{JoinReply, JoinRequest},
};
use crate::stop::Stop;

/// Time for a new connection to authenticate.
const AUTH_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for a node to accept a message.
const WRITE_TIMEOUT: Duration = Duration::from_secs(20);
const RETRY_INTERVAL: Duration = Duration::from_millis(200);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Most unauthenticated connections at a time.
const MAX_UNAUTHENTICATED: usize = 256;

/// Errors that mean that the peer closed the connection.
const CLOSED_BY_PEER: [io::ErrorKind; 3] =
    [io::ErrorKind::UnexpectedEof, io::ErrorKind::ConnectionReset, io::ErrorKind::BrokenPipe];

#[derive(Debug, thiserror::Error)]
pub(super) enum RendezvousError {
    #[error("cannot listen at {address}: {source}")]
    Listen { address: String, source: io::Error },
    #[error("the first node at {address} was not reached within {within}: {last}")]
    NotReached { address: String, within: Span, last: String },
    #[error("the first node at {address} rejected this node: {text}")]
    Rejected { address: String, text: String },
    #[error("stopped by a signal")]
    Stopped,
}

fn nonce() -> io::Result<Nonce> {
    let mut nonce = [0; NONCE_BYTES];
    let mut filled = 0;
    while filled < nonce.len() {
        filled += rustix::rand::getrandom(&mut nonce[filled..], rustix::rand::GetRandomFlags::empty())?;
    }
    Ok(nonce)
}

/// Listens at the rendezvous address, and reports each node that joins.
pub(super) fn listen(position: &JobPosition, events: &Sender<CoordinatorEvent>) -> Result<(), RendezvousError> {
    let listener = bind(&position.address)
        .map_err(|source| RendezvousError::Listen { address: position.address.clone(), source })?;
    let (position, events) = (position.clone(), events.clone());
    let unauthenticated = Arc::new(AtomicUsize::new(0));
    // Listens for the lifetime of this process, which is that of the test.
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            if unauthenticated.fetch_add(1, Ordering::SeqCst) >= MAX_UNAUTHENTICATED {
                unauthenticated.fetch_sub(1, Ordering::SeqCst);
                continue;
            }
            let (position, events, unauthenticated) = (position.clone(), events.clone(), Arc::clone(&unauthenticated));
            thread::spawn(move || {
                let from = stream.peer_addr();
                match accept_peer(stream, &position) {
                    Ok((hello, reading, writing)) => {
                        drop(events.send(CoordinatorEvent::Joined { hello, reading, writing }));
                    }
                    Err(error) => {
                        let from = from.map_or_else(|_| "somewhere".to_owned(), |from| from.to_string());
                        eprintln!("rejected a connection from {from}: {error}");
                    }
                }
                unauthenticated.fetch_sub(1, Ordering::SeqCst);
            });
        }
    });
    Ok(())
}

/// Binds the configured address if it is local, and otherwise any: a pod's name may resolve later.
fn bind(address: &str) -> io::Result<TcpListener> {
    let named: Vec<SocketAddr> = address.to_socket_addrs().map(Iterator::collect).unwrap_or_default();
    let port = address.rsplit_once(':').and_then(|(_, port)| port.parse().ok()).unwrap_or(PORT);
    let any = [SocketAddr::from(([0u16; 8], port)), SocketAddr::from(([0u8; 4], port))];
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for address in named.into_iter().chain(any) {
        match TcpListener::bind(address) {
            Ok(listener) => return Ok(listener),
            // The other nodes would not find it at another port.
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => return Err(error),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn accept_peer(
    mut stream: TcpStream,
    position: &JobPosition,
) -> Result<(JoinRequest, ReadChannel, WriteChannel), FrameError> {
    set_limits(&stream)?;
    let own_nonce = nonce()?;
    stream.write_all(&own_nonce)?;
    let mut peer_nonce = [0; NONCE_BYTES];
    stream.read_exact(&mut peer_nonce)?;
    let both = (stream.try_clone()?, stream);
    let (mut reading, writing) = frame_auth::channels(both, &position.secret, &own_nonce, &peer_nonce, Side::Listener);
    let hello = reading.read::<JoinRequest>()?;
    Ok((hello, reading, writing))
}

fn set_limits(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(AUTH_TIMEOUT))?;
    stream.set_write_timeout(Some(WRITE_TIMEOUT))
}

/// Removes the read timeout after authentication: messages may be far apart, and the waiting side has its own limits.
pub(super) fn remove_read_timeout(reading: &ReadChannel) -> io::Result<()> {
    reading.stream().set_read_timeout(None)
}

/// Connects to the first node, and retries until that accepts this node.
pub(super) fn join(
    position: &JobPosition,
    name: &str,
    within: Span,
    stop: &Stop,
) -> Result<(ReadChannel, WriteChannel), RendezvousError> {
    let deadline = Instant::now() + within.to_std();
    let hello = JoinRequest { rank: position.rank, nodes: position.nodes, name: name.to_owned() };
    // A closed connection is a better diagnosis than the last failure to connect.
    let mut hung_up = None;
    loop {
        let last = match connect_once(position, &hello) {
            Ok((reading, writing, JoinReply::Accepted)) => return Ok((reading, writing)),
            Ok((_, _, JoinReply::Rejected(text))) => {
                return Err(RendezvousError::Rejected { address: position.address.clone(), text });
            }
            Err(FrameError::Io(error)) if CLOSED_BY_PEER.contains(&error.kind()) => {
                hung_up = Some("it closed the connection; is the secret the same on both nodes?".to_owned());
                error.to_string()
            }
            Err(error) => error.to_string(),
        };
        if stop.requested().is_some() {
            return Err(RendezvousError::Stopped);
        }
        if Instant::now() >= deadline {
            let last = hung_up.unwrap_or(last);
            return Err(RendezvousError::NotReached { address: position.address.clone(), within, last });
        }
        thread::sleep(RETRY_INTERVAL);
    }
}

fn connect_once(
    position: &JobPosition,
    hello: &JoinRequest,
) -> Result<(ReadChannel, WriteChannel, JoinReply), FrameError> {
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    let mut connected = None;
    for address in position.address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, CONNECT_TIMEOUT) {
            Ok(stream) => {
                connected = Some(stream);
                break;
            }
            Err(error) => last = error,
        }
    }
    let mut stream = connected.ok_or(last)?;
    set_limits(&stream)?;
    let mut peer_nonce = [0; NONCE_BYTES];
    stream.read_exact(&mut peer_nonce)?;
    let own_nonce = nonce()?;
    stream.write_all(&own_nonce)?;
    let both = (stream.try_clone()?, stream);
    let (mut reading, mut writing) =
        frame_auth::channels(both, &position.secret, &peer_nonce, &own_nonce, Side::Connector);
    writing.write(hello)?;
    let welcome = reading.read::<JoinReply>()?;
    remove_read_timeout(&reading)?;
    Ok((reading, writing, welcome))
}
