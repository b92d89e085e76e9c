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
    events::News,
    launcher::{PORT, Place},
    seal::{self, End, NONCE_BYTES, Nonce, Reading, SealError, Writing},
    told::{Hello, Welcome},
};
use crate::stop::Stop;

/// Time for a new connection to authenticate.
const TO_SAY_WHO: Duration = Duration::from_secs(10);
/// Time for a node to accept a message.
const TO_WRITE: Duration = Duration::from_secs(20);
const TRY_AGAIN: Duration = Duration::from_millis(200);
const TO_CONNECT: Duration = Duration::from_secs(5);
/// Most unauthenticated connections at a time.
const STRANGERS: usize = 256;

/// Errors that mean that the peer closed the connection.
const HUNG_UP: [io::ErrorKind; 3] =
    [io::ErrorKind::UnexpectedEof, io::ErrorKind::ConnectionReset, io::ErrorKind::BrokenPipe];

#[derive(Debug, thiserror::Error)]
pub(super) enum NoRendezvous {
    #[error("cannot listen at {address}: {source}")]
    Listen { address: String, source: io::Error },
    #[error("the first node at {address} was not reached within {within}: {last}")]
    NotReached { address: String, within: Span, last: String },
    #[error("the first node at {address} rejected this node: {text}")]
    Refused { address: String, text: String },
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
pub(super) fn listen(place: &Place, news: &Sender<News>) -> Result<(), NoRendezvous> {
    let listener =
        bind(&place.address).map_err(|source| NoRendezvous::Listen { address: place.address.clone(), source })?;
    let (place, news) = (place.clone(), news.clone());
    let strangers = Arc::new(AtomicUsize::new(0));
    // Listens for the lifetime of this process, which is that of the test.
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            if strangers.fetch_add(1, Ordering::SeqCst) >= STRANGERS {
                strangers.fetch_sub(1, Ordering::SeqCst);
                continue;
            }
            let (place, news, strangers) = (place.clone(), news.clone(), Arc::clone(&strangers));
            thread::spawn(move || {
                let from = stream.peer_addr();
                match greet(stream, &place) {
                    Ok((hello, reading, writing)) => drop(news.send(News::Came { hello, reading, writing })),
                    Err(error) => {
                        let from = from.map_or_else(|_| "somewhere".to_owned(), |from| from.to_string());
                        eprintln!("rejected a connection from {from}: {error}");
                    }
                }
                strangers.fetch_sub(1, Ordering::SeqCst);
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

fn greet(mut stream: TcpStream, place: &Place) -> Result<(Hello, Reading, Writing), SealError> {
    set_limits(&stream)?;
    let ours = nonce()?;
    stream.write_all(&ours)?;
    let mut theirs = [0; NONCE_BYTES];
    stream.read_exact(&mut theirs)?;
    let both = (stream.try_clone()?, stream);
    let (mut reading, writing) = seal::channels(both, &place.secret, &ours, &theirs, End::Listens);
    let hello = reading.read::<Hello>()?;
    Ok((hello, reading, writing))
}

fn set_limits(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(TO_SAY_WHO))?;
    stream.set_write_timeout(Some(TO_WRITE))
}

/// Removes the read timeout after authentication: messages may be far apart, and the waiting side has its own limits.
pub(super) fn unhurried(reading: &Reading) -> io::Result<()> {
    reading.stream().set_read_timeout(None)
}

/// Connects to the first node, and retries until that accepts this node.
pub(super) fn join(place: &Place, name: &str, within: Span, stop: &Stop) -> Result<(Reading, Writing), NoRendezvous> {
    let deadline = Instant::now() + within.to_std();
    let hello = Hello { rank: place.rank, nodes: place.nodes, name: name.to_owned() };
    // A closed connection is a better diagnosis than the last failure to connect.
    let mut hung_up = None;
    loop {
        let last = match knock(place, &hello) {
            Ok((reading, writing, Welcome::In)) => return Ok((reading, writing)),
            Ok((_, _, Welcome::Refused(text))) => {
                return Err(NoRendezvous::Refused { address: place.address.clone(), text });
            }
            Err(SealError::Io(error)) if HUNG_UP.contains(&error.kind()) => {
                hung_up = Some("it closed the connection; is the secret the same on both nodes?".to_owned());
                error.to_string()
            }
            Err(error) => error.to_string(),
        };
        if stop.told().is_some() {
            return Err(NoRendezvous::Stopped);
        }
        if Instant::now() >= deadline {
            let last = hung_up.unwrap_or(last);
            return Err(NoRendezvous::NotReached { address: place.address.clone(), within, last });
        }
        thread::sleep(TRY_AGAIN);
    }
}

fn knock(place: &Place, hello: &Hello) -> Result<(Reading, Writing, Welcome), SealError> {
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    let mut connected = None;
    for address in place.address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, TO_CONNECT) {
            Ok(stream) => {
                connected = Some(stream);
                break;
            }
            Err(error) => last = error,
        }
    }
    let mut stream = connected.ok_or(last)?;
    set_limits(&stream)?;
    let mut theirs = [0; NONCE_BYTES];
    stream.read_exact(&mut theirs)?;
    let ours = nonce()?;
    stream.write_all(&ours)?;
    let both = (stream.try_clone()?, stream);
    let (mut reading, mut writing) = seal::channels(both, &place.secret, &theirs, &ours, End::Comes);
    writing.write(hello)?;
    let welcome = reading.read::<Welcome>()?;
    unhurried(&reading)?;
    Ok((reading, writing, welcome))
}
