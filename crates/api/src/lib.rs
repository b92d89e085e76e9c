//! The agent endpoint: a small HTTP server on its own thread, beside an engine that knows nothing of HTTP.
//!
//! Messages are checked before they cost anything. A sender that is neither enrolled nor vouched for by the cluster is
//! rejected before its body is read; a body that is not signed with that node's key is rejected before it is parsed;
//! everything has a limit and a deadline. A report is answered with 200 only when the engine has stored it; a heartbeat
//! is answered immediately and stored with others.

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

/// Concurrent connections. An agent connects for each message, and ten thousand of them report once a minute.
const CONNECTIONS: usize = 512;
const HEADERS: Duration = Duration::from_secs(5);
/// Maximum age of a connection.
const CONNECTION: Duration = Duration::from_secs(60);
/// Bodies of unverified messages held in memory at a time, in KiB.
const BODIES: usize = 128 << 10;

#[derive(Debug, thiserror::Error)]
pub enum DoorError {
    #[error("cannot listen on {at} for agents")]
    Listen { at: SocketAddr, source: io::Error },
    #[error("cannot listen on {at} for Prometheus")]
    Scrape { at: SocketAddr, source: io::Error },
    #[error("cannot read the enrolled agents")]
    Store(#[from] doctor_store::StoreError),
}

/// The agent endpoint. Dropping it closes the listener.
#[derive(Debug)]
pub struct Door {
    listening: Listening,
    mail: Arc<Mail>,
}

/// Agent messages that the engine has not taken yet.
#[derive(Debug, Clone)]
pub struct Spool(Arc<Mail>);

/// A server on its own thread. Dropping it closes the listener.
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
                // An error means that the sender was dropped, which also closes the server.
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
            // The thread returns nothing.
            let _over = thread.join();
        }
    }
}

impl Door {
    /// Listens for enrolled agents, and rejects every message until [`Door::cycle_ended`] reports that this controller
    /// leads.
    ///
    /// # Errors
    /// If the address cannot be bound, or the store fails.
    pub fn open(
        at: SocketAddr,
        store: &Store,
        clock: Arc<dyn Clock>,
        wake: Arc<Wake>,
    ) -> Result<(Self, DoorInbox), DoorError> {
        Self::open_with(at, store, clock, wake, None)
    }

    /// As [`Door::open`], and also accepts agents that their cluster vouches for.
    ///
    /// # Errors
    /// If the address cannot be bound, or the store fails.
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

    /// Returns a handle to the number of waiting messages, on nodes and here, for metrics.
    pub fn spool(&self) -> Spool {
        Spool(Arc::clone(&self.mail))
    }

    /// Records that the loop is alive. Call this before and after each cycle; cycles start `every` apart. Without it
    /// for much longer, `/healthz` reports that the controller is stuck.
    pub fn turned(&self, every: Duration) {
        self.mail.pulse.beat(Instant::now(), every);
    }

    /// Call this after each cycle. Only the leader can store reports; the others answer agents with 503.
    pub fn cycle_ended(&self, leading: bool) {
        self.mail.set_leading(leading);
        if leading {
            self.mail.ring_again();
        }
    }
}

impl Door {
    /// Sets which nodes their hooks may drain, by the breaker of the finished cycle; the next one starts `every` later.
    /// `None`: unknown.
    pub fn may_take_out(&self, may_go: Option<TakeOut>, every: Duration) {
        self.mail.set_may_go(may_go, every);
    }
}

fn router(desk: Desk) -> Router {
    Router::new()
        .route("/api/v1/ingest", post(ingest::ingest))
        .route("/healthz", get(health::health))
        .route("/readyz", get(health::ready))
        // `ingest` applies its own limit when it reads the body.
        .layer(DefaultBodyLimit::disable())
        .with_state(Arc::new(desk))
}

async fn serve(listener: TcpListener, router: Router) {
    let listener = match tokio::net::TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => {
            tracing::error!(%error, "listener failed to start");
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
                // Usually out of file descriptors: active connections will free some.
                tracing::warn!(%error, "accept failed");
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
    // Ignored: an agent resends what was not acknowledged.
    let _over = timeout(CONNECTION, http.serve_connection(TokioIo::new(stream), service)).await;
}
