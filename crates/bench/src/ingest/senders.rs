//! Concurrent TLS connections that post messages, each waiting for its answer.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    sync::{Arc, Barrier},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    crypto::ring,
    pki_types::{CertificateDer, ServerName, pem::PemObject},
};

use super::messages::Message;
use crate::stopwatch::{Sample, millis, time};

/// The limit for an answer, and for the queue to become empty.
const PATIENCE: Duration = Duration::from_secs(120);
const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// Posts of one message while the controller answers that it is busy.
const ATTEMPTS: u32 = 100;

/// Where messages are sent, and what vouches for it.
#[derive(Debug, Clone)]
pub(super) struct Endpoint {
    address: SocketAddr,
    tls: Arc<ClientConfig>,
}

impl Endpoint {
    /// `authority`: its certificate in PEM.
    pub(super) fn new(address: SocketAddr, authority: &str) -> Result<Self> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(authority.as_bytes()).context("reading the authority")?)?;
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let tls = builder.with_safe_default_protocol_versions()?.with_root_certificates(roots).with_no_client_auth();
        Ok(Self { address, tls: Arc::new(tls) })
    }
}

/// One round.
#[derive(Debug)]
pub(super) struct Round {
    pub(super) sample: Sample,
    /// Time to the last answer.
    pub(super) answered: Duration,
    pub(super) controller: Duration,
    pub(super) server: Duration,
    /// The latency of every message, in ascending order.
    pub(super) latencies: Vec<Duration>,
}

impl Round {
    pub(super) fn p99_ms(&self) -> f64 {
        self.latencies.get(self.latencies.len() * 99 / 100).copied().map_or(f64::NAN, millis)
    }
}

/// Distributes the messages and runs all connections. The time ends when `readable` holds, after the last answer.
pub(super) fn run(
    to: &Endpoint,
    connections: usize,
    messages: Vec<Message>,
    readable: impl Fn() -> Result<bool>,
) -> Result<Round> {
    let mut shares: Vec<Vec<Message>> = (0..connections).map(|_| Vec::new()).collect();
    for (index, message) in messages.into_iter().enumerate() {
        shares[index % connections].push(message);
    }
    let ready = Barrier::new(connections + 1);
    let ((done, answered, end), sample) = thread::scope(|scope| {
        let ready = &ready;
        let threads: Vec<_> =
            shares.into_iter().map(|share| scope.spawn(move || send_all(to, &share, ready))).collect();
        // The clock starts when every connection is open.
        ready.wait();
        time(|| {
            let began = Instant::now();
            let done: Vec<_> = threads.into_iter().map(thread::ScopedJoinHandle::join).collect();
            let answered = began.elapsed();
            (done, answered, wait_until(&readable))
        })
    });
    end?;
    let mut latencies = Vec::new();
    for of_connection in done {
        latencies.extend(of_connection.ok().context("a sender panicked")??);
    }
    latencies.sort_unstable();
    let (controller, server) = (Duration::ZERO, Duration::ZERO);
    Ok(Round { sample, answered, controller, server, latencies })
}

pub(super) fn wait_until(condition: impl Fn() -> Result<bool>) -> Result<()> {
    let began = Instant::now();
    while !condition()? {
        ensure!(began.elapsed() < PATIENCE, "the results do not become readable");
        thread::sleep(POLL_INTERVAL);
    }
    Ok(())
}

fn send_all(to: &Endpoint, messages: &[Message], ready: &Barrier) -> Result<Vec<Duration>> {
    let connection = Connection::open(to);
    ready.wait();
    let mut connection = connection?;
    messages.iter().map(|message| connection.send(message)).collect()
}

/// A connection that stays open, as that of a proxy in front of agents.
struct Connection<'a> {
    to: &'a Endpoint,
    stream: BufReader<StreamOwned<ClientConnection, TcpStream>>,
}

impl<'a> Connection<'a> {
    fn open(to: &'a Endpoint) -> Result<Self> {
        let mut stream = TcpStream::connect(to.address).context("connecting")?;
        stream.set_nodelay(true).and_then(|()| stream.set_read_timeout(Some(PATIENCE))).context("setting up")?;
        let mut tls = ClientConnection::new(Arc::clone(&to.tls), ServerName::from(to.address.ip()))?;
        // The round begins when each connection is ready, its keys included.
        while tls.is_handshaking() {
            tls.complete_io(&mut stream).context("shaking hands")?;
        }
        Ok(Self { to, stream: BufReader::new(StreamOwned::new(tls, stream)) })
    }

    /// Sends a message until it is accepted. Returns the time from the first attempt.
    fn send(&mut self, message: &Message) -> Result<Duration> {
        let began = Instant::now();
        for _ in 0..ATTEMPTS {
            match self.exchange(message) {
                Ok((200 | 202, _)) => return Ok(began.elapsed()),
                Ok((503, _)) => thread::sleep(POLL_INTERVAL * 10),
                Ok((status, text)) => bail!("{} answers {status}: {text}", message.path),
                // The endpoint closes a connection after a minute.
                Err(_) => *self = Self::open(self.to)?,
            }
        }
        bail!("{} was not accepted", message.path)
    }

    fn exchange(&mut self, message: &Message) -> Result<(u16, String)> {
        let stream = self.stream.get_mut();
        let Message { path, headers, bytes } = message;
        let head = format!("POST {path} HTTP/1.1\r\nhost: bench\r\n{headers}content-length: {}\r\n\r\n", bytes.len());
        let sent = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(bytes));
        sent.and_then(|()| stream.flush()).context("sending")?;
        let mut line = String::new();
        self.stream.read_line(&mut line).context("reading the answer")?;
        let status =
            line.split(' ').nth(1).and_then(|status| status.parse().ok()).context("an answer without status")?;
        let mut length = 0;
        loop {
            line.clear();
            self.stream.read_line(&mut line).context("reading the answer")?;
            match line.trim().split_once(':') {
                Some((name, value)) if name.eq_ignore_ascii_case("content-length") => {
                    length = value.trim().parse().context("reading the answer's length")?;
                }
                Some(_) => {}
                None => break,
            }
        }
        let mut body = vec![0; length];
        self.stream.read_exact(&mut body).context("reading the answer")?;
        Ok((status, String::from_utf8_lossy(&body).trim().to_owned()))
    }
}
