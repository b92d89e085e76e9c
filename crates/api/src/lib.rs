//! Where agents knock: a small HTTP server on a thread of its own, beside an engine that knows nothing of HTTP.
//!
//! Whatever comes in is judged before it costs anything: who is neither enrolled nor vouched for by the cluster is sent away
//! before the body is read, what is not signed with that node's key before it is parsed, and everything has a limit and a deadline. A report is answered
//! with 200 only when the engine has kept it; a sign of life is answered at once and written down with others.

pub mod api;
#[doc(hidden)]
pub mod fuzzed;
mod health;
mod ingest;
mod liveness;
mod mail;
pub mod metrics;
mod pages;
mod response;
mod scrape;
mod tokens;

use std::{
    io,
    net::{SocketAddr, TcpListener},
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use axum::{
    Router,
    extract::DefaultBodyLimit,
    routing::{get, post},
};
use doctor_backend::clock::Clock;
use doctor_core::plan::TakeOut;
use doctor_engine::wake::Wake;
use doctor_store::Store;
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::{Semaphore, oneshot},
    time::timeout,
};

use ingest::Desk;
use mail::Mail;

pub use mail::DoorInbox;
pub use scrape::{OfProcess, Scraped};
pub use tokens::Tokens;

/// At a time. An agent connects for each message, and ten thousand of them speak once a minute.
const CONNECTIONS: usize = 512;
const HEADERS: Duration = Duration::from_secs(5);
/// A connection that is older has had time enough for everything.
const CONNECTION: Duration = Duration::from_secs(60);
/// Bodies of unverified messages that may be in memory at a time, in KiB.
const BODIES: usize = 128 << 10;

#[derive(Debug, thiserror::Error)]
pub enum DoorError {
    #[error("cannot listen on {at} for agents")]
    Listen { at: SocketAddr, source: io::Error },
    #[error("cannot listen on {at} for Prometheus")]
    Scrape { at: SocketAddr, source: io::Error },
    #[error("cannot read which agents are enrolled")]
    Store(#[from] doctor_store::StoreError),
}

/// The open door. Dropped, it closes.
#[derive(Debug)]
pub struct Door {
    listening: Listening,
    mail: Arc<Mail>,
}

/// What agents have to say and has not been taken in.
#[derive(Debug, Clone)]
pub struct Spool(Arc<Mail>);

/// A server on a thread of its own. Dropped, it closes.
#[derive(Debug)]
struct Listening {
    at: SocketAddr,
    close: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Listening {
    fn start(name: &'static str, listener: TcpListener, router: Router) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let at = listener.local_addr()?;
        let (close, closed) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .max_blocking_threads(4)
            .thread_name(name)
            .build()?;
        let body = move || {
            runtime.block_on(async {
                let serving = tokio::spawn(serve(listener, router));
                // An error is the other end being dropped, which says the same.
                let _closed = closed.await;
                serving.abort();
            });
            runtime.shutdown_timeout(Duration::from_secs(1));
        };
        let thread = thread::Builder::new().name(name.to_owned()).spawn(body)?;
        Ok(Self { at, close: Some(close), thread: Some(thread) })
    }

    const fn address(&self) -> SocketAddr {
        self.at
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        drop(self.close.take());
        if let Some(thread) = self.thread.take() {
            // It has nothing to say but that it is over.
            let _over = thread.join();
        }
    }
}

impl Door {
    /// Listens from now on for agents that were enrolled, and sends everybody away until [`Door::cycle_ended`] says otherwise.
    ///
    /// # Errors
    /// If the address cannot be listened on, or the store fails.
    pub fn open(
        at: SocketAddr,
        store: &Store,
        clock: Arc<dyn Clock>,
        wake: Arc<Wake>,
    ) -> Result<(Self, DoorInbox), DoorError> {
        Self::open_with(at, store, clock, wake, None)
    }

    /// As [`Door::open`], and also for agents that their cluster vouches for.
    ///
    /// # Errors
    /// If the address cannot be listened on, or the store fails.
    pub fn open_with(
        at: SocketAddr,
        store: &Store,
        clock: Arc<dyn Clock>,
        wake: Arc<Wake>,
        tokens: Option<Tokens>,
    ) -> Result<(Self, DoorInbox), DoorError> {
        let failed = |source| DoorError::Listen { at, source };
        let listener = TcpListener::bind(at).map_err(failed)?;
        let mail = Arc::new(Mail::new(wake));
        let inbox = DoorInbox::new(Arc::clone(&mail), store.clone(), clock.now())?;
        let room = Arc::new(Semaphore::new(BODIES));
        let desk = Desk { store: store.clone(), clock, mail: Arc::clone(&mail), room, tokens };
        let listening = Listening::start("doctor-door", listener, router(desk)).map_err(failed)?;
        Ok((Self { listening, mail }, inbox))
    }

    pub const fn address(&self) -> SocketAddr {
        self.listening.address()
    }

    /// What waits on the other side of it and before it, for who tells numbers.
    pub fn spool(&self) -> Spool {
        Spool(Arc::clone(&self.mail))
    }

    /// Before and after each cycle; they begin as long as `every` apart. A door that hears nothing for much longer says that the
    /// controller is stuck.
    pub fn turned(&self, every: Duration) {
        self.mail.pulse.beat(Instant::now(), every);
    }

    /// After each cycle. Only a controller that leads can keep anything; the others send agents on.
    pub fn cycle_ended(&self, leading: bool) {
        self.mail.set_leading(leading);
        if leading {
            self.mail.ring_again();
        }
    }
}

impl Door {
    /// Who may be taken out by hooks on the nodes, by the breaker of the cycle that is over; the next one begins `every` later.
    /// `None`: nobody knows.
    pub fn may_take_out(&self, may_go: Option<TakeOut>, every: Duration) {
        self.mail.set_may_go(may_go, every);
    }
}

fn router(desk: Desk) -> Router {
    Router::new()
        .route("/api/v1/ingest", post(ingest::ingest))
        .route("/healthz", get(health::health))
        .route("/readyz", get(health::ready))
        // The limit that counts is applied where the body is read.
        .layer(DefaultBodyLimit::disable())
        .with_state(Arc::new(desk))
}

async fn serve(listener: TcpListener, router: Router) {
    let listener = match tokio::net::TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => {
            tracing::error!(%error, "a door cannot be opened");
            return;
        }
    };
    let service = TowerToHyperService::new(router);
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of descriptors, usually: those that are served give theirs back.
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let service = service.clone();
        tokio::spawn(async move {
            converse(&http(), stream, service).await;
            drop(place);
        });
    }
}

fn http() -> http1::Builder {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEADERS).max_buf_size(64 << 10);
    http
}

async fn converse(
    http: &http1::Builder,
    stream: impl AsyncRead + AsyncWrite + Unpin,
    service: TowerToHyperService<Router>,
) {
    // How a connection ends is its agent's business: what was not answered comes again.
    let _over = timeout(CONNECTION, http.serve_connection(TokioIo::new(stream), service)).await;
}
