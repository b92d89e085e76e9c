//! The agent endpoint: a small HTTP server on its own thread, beside an engine that knows nothing of HTTP.
//!
//! Messages are checked before they cost anything. A sender that is neither enrolled nor authenticated by the cluster is
//! rejected before its body is read; a body that is not signed with that node's key is rejected before it is parsed;
//! everything has a limit and a deadline, the TLS handshake included. A report is answered with 200 only when the engine has stored it; a heartbeat
//! is answered immediately and stored with others.

mod agent_queue;
mod agent_reports;
mod dashboard;
#[doc(hidden)]
pub mod fuzz_targets;
mod health;
mod liveness;
pub mod metrics;
mod metrics_listener;
pub mod operator_api;
mod response;
pub mod self_made_certificate;
mod tls;
mod token_review_cache;

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
use doctor_checks::site_profiles::SiteProfiles;
use doctor_core::plan::TakeOutPermit;
use doctor_engine::trigger::Trigger;
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

use agent_queue::AgentQueue;
use agent_reports::IngestState;
use tls::Tls;

pub use agent_queue::AgentInbox;
pub use metrics_listener::{MetricsListener, ProcessMetrics};
pub use tls::TlsFiles;
pub use token_review_cache::TokenReviewCache;

/// Concurrent connections. An agent connects for each message, and ten thousand of them report once a minute.
const MAX_CONNECTIONS: usize = 512;
const HEADER_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum age of a connection.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(60);
/// Bodies of unverified messages held in memory at a time, in KiB.
const MAX_BODIES_KIB: usize = 128 << 10;

#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error("cannot listen on {at} for agents")]
    Agents { at: SocketAddr, source: io::Error },
    #[error("cannot use {} and {} for the TLS of agents: {text}", .files.certificate.display(), .files.key.display())]
    AgentTls { files: TlsFiles, text: String },
    #[error("cannot listen on {at} for Prometheus")]
    Metrics { at: SocketAddr, source: io::Error },
    #[error("cannot read the enrolled agents")]
    Store(#[from] doctor_store::StoreError),
}

/// Binds the agents' address as [`AgentListener::open_with`] does. It is free again when the result is dropped.
///
/// # Errors
/// If the address cannot be bound.
pub fn try_agent_address(at: SocketAddr) -> Result<TcpListener, ListenError> {
    TcpListener::bind(at).map_err(|source| ListenError::Agents { at, source })
}

/// Loads the certificate and key of the agent endpoint as [`AgentListener::open_with_tls`] does.
///
/// # Errors
/// If they cannot be read, or do not belong together.
pub fn try_agent_tls(files: &TlsFiles) -> Result<(), ListenError> {
    open_agent_tls(files).map(drop)
}

fn open_agent_tls(files: &TlsFiles) -> Result<Tls, ListenError> {
    Tls::open(files).map_err(|text| ListenError::AgentTls { files: files.clone(), text })
}

/// Binds the address for Prometheus as [`MetricsListener::open`] does. It is free again when the result is dropped.
///
/// # Errors
/// If the address cannot be bound.
pub fn try_metrics_address(at: SocketAddr) -> Result<TcpListener, ListenError> {
    TcpListener::bind(at).map_err(|source| ListenError::Metrics { at, source })
}

/// The agent endpoint. Dropping it closes the listener.
#[derive(Debug)]
pub struct AgentListener {
    server: HttpServer,
    queue: Arc<AgentQueue>,
}

/// Agent messages that the engine has not taken yet.
#[derive(Debug, Clone)]
pub struct Spool(Arc<AgentQueue>);

/// A server on its own thread. Dropping it closes the listener.
#[derive(Debug)]
struct HttpServer {
    addr: SocketAddr,
    close: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl HttpServer {
    fn start(name: &'static str, listener: TcpListener, router: Router, tls: Option<Tls>) -> io::Result<Self> {
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
                let serving = tokio::spawn(serve(listener, router, tls));
                // An error means that the sender was dropped, which also closes the server.
                let _closed = closed.await;
                serving.abort();
            });
            runtime.shutdown_timeout(Duration::from_secs(1));
        };
        let thread = thread::Builder::new().name(name.to_owned()).spawn(body)?;
        Ok(Self { addr: at, close: Some(close), thread: Some(thread) })
    }

    const fn address(&self) -> SocketAddr {
        self.addr
    }
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        drop(self.close.take());
        if let Some(thread) = self.thread.take() {
            // The thread returns nothing.
            let _result = thread.join();
        }
    }
}

impl AgentListener {
    /// Listens for enrolled agents, and rejects every message until [`AgentListener::cycle_ended`] reports that this controller
    /// leads.
    ///
    /// # Errors
    /// If the address cannot be bound, or the store fails.
    pub fn open(
        at: SocketAddr,
        store: &Store,
        clock: Arc<dyn Clock>,
        cycle_trigger: Arc<Trigger>,
    ) -> Result<(Self, AgentInbox), ListenError> {
        Self::open_with(at, store, clock, cycle_trigger, None)
    }

    /// As [`AgentListener::open`], and also accepts agents that their cluster vouches for.
    ///
    /// # Errors
    /// If the address cannot be bound, or the store fails.
    pub fn open_with(
        at: SocketAddr,
        store: &Store,
        clock: Arc<dyn Clock>,
        cycle_trigger: Arc<Trigger>,
        token_reviews: Option<TokenReviewCache>,
    ) -> Result<(Self, AgentInbox), ListenError> {
        Self::open_with_tls(at, None, store, clock, cycle_trigger, token_reviews)
    }

    /// As [`AgentListener::open_with`], over TLS with this certificate and key. They are loaded again when they change.
    ///
    /// # Errors
    /// If the address cannot be bound, the certificate cannot be used, or the store fails.
    pub fn open_with_tls(
        at: SocketAddr,
        tls: Option<&TlsFiles>,
        store: &Store,
        clock: Arc<dyn Clock>,
        cycle_trigger: Arc<Trigger>,
        token_reviews: Option<TokenReviewCache>,
    ) -> Result<(Self, AgentInbox), ListenError> {
        let failed = |source| ListenError::Agents { at, source };
        let tls = tls.map(open_agent_tls).transpose()?;
        let listener = try_agent_address(at)?;
        let queue = Arc::new(AgentQueue::new(cycle_trigger));
        let inbox = AgentInbox::new(Arc::clone(&queue), store.clone(), clock.now())?;
        let body_memory = Arc::new(Semaphore::new(MAX_BODIES_KIB));
        let state = IngestState { store: store.clone(), clock, queue: Arc::clone(&queue), body_memory, token_reviews };
        let server = HttpServer::start("doctor-agents", listener, router(state), tls).map_err(failed)?;
        Ok((Self { server, queue }, inbox))
    }

    pub const fn address(&self) -> SocketAddr {
        self.server.address()
    }

    /// Returns a handle to the number of waiting messages, on nodes and here, for metrics.
    pub fn spool(&self) -> Spool {
        Spool(Arc::clone(&self.queue))
    }

    /// Records that the loop is alive. Call this before and after each cycle; cycles start `every` apart. Without it
    /// for much longer, `/healthz` reports that the controller is stuck.
    pub fn record_progress(&self, every: Duration) {
        self.queue.watchdog.record(Instant::now(), every);
    }

    /// Call this after each cycle. Only the leader can store reports; the others answer agents with 503.
    pub fn cycle_ended(&self, leading: bool) {
        self.queue.set_leading(leading);
        if leading {
            self.queue.trigger_if_pending();
        }
    }
}

impl AgentListener {
    /// Sets which nodes their hooks may drain, by the breaker of the finished cycle; the next one starts `every` later.
    /// `None`: unknown.
    pub fn set_drain_permits(&self, permits: Option<TakeOutPermit>, every: Duration) {
        self.queue.set_drain_permits(permits, every);
    }

    /// Sets the site's profiles, which agents get with the response to their next message.
    pub fn set_site_profiles(&self, profiles: SiteProfiles) {
        self.queue.set_site_profiles(profiles);
    }
}

fn router(state: IngestState) -> Router {
    Router::new()
        .route("/api/v1/ingest", post(agent_reports::ingest))
        .route("/healthz", get(health::health))
        .route("/readyz", get(health::ready))
        // `ingest` applies its own limit when it reads the body.
        .layer(DefaultBodyLimit::disable())
        .with_state(Arc::new(state))
}

async fn serve(listener: TcpListener, router: Router, tls: Option<Tls>) {
    let listener = match tokio::net::TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => {
            tracing::error!(%error, "listener failed to start");
            return;
        }
    };
    let service = TowerToHyperService::new(router);
    let (permits, tls) = (Arc::new(Semaphore::new(MAX_CONNECTIONS)), tls.map(Arc::new));
    loop {
        let Ok(permit) = Arc::clone(&permits).acquire_owned().await else { return };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Usually out of file descriptors: active connections will free some.
                tracing::warn!(%error, "accept failed");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let (service, tls) = (service.clone(), tls.clone());
        tokio::spawn(async move {
            match tls {
                None => serve_connection(&http_builder(), stream, service).await,
                // A client that does not finish the handshake gets no response.
                Some(tls) => match timeout(HEADER_TIMEOUT, tls.acceptor().accept(stream)).await {
                    Ok(Ok(stream)) => serve_connection(&http_builder(), stream, service).await,
                    // Debug only: any client can connect, and a line for each would let it fill the disk.
                    Ok(Err(error)) => tracing::debug!(%error, "TLS handshake failed"),
                    Err(_) => tracing::debug!("TLS handshake timed out"),
                },
            }
            drop(permit);
        });
    }
}

fn http_builder() -> http1::Builder {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT).max_buf_size(64 << 10);
    http
}

async fn serve_connection(
    http: &http1::Builder,
    stream: impl AsyncRead + AsyncWrite + Unpin,
    service: TowerToHyperService<Router>,
) {
    // Ignored: an agent resends what was not acknowledged.
    let _result = timeout(CONNECTION_TIMEOUT, http.serve_connection(TokioIo::new(stream), service)).await;
}
