//! The agent endpoint: a small HTTP server on its own thread, beside an engine that knows nothing of HTTP. Agents send
//! their reports to it, and validation jobs their results.
//!
//! Messages are checked before they cost anything. A sender that is neither enrolled nor authenticated by the cluster is
//! rejected before its body is read, and so is a result of a run that is not active; a body that is not signed with that
//! node's or run's key is rejected before it is parsed; everything has a limit and a deadline. A message is answered when
//! it is durable in the store's ingest queue, whatever the control loop does; a heartbeat is answered immediately and
//! stored with others.

mod agent_queue;
mod agent_reports;
mod dashboard;
#[doc(hidden)]
pub mod fuzz_targets;
mod health;
mod job_results;
mod liveness;
pub mod metrics;
mod metrics_listener;
pub mod operator_api;
mod response;
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

pub use agent_queue::AgentInbox;
pub use metrics_listener::{MetricsListener, ProcessMetrics};
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
    #[error("cannot listen on {at} for Prometheus")]
    Metrics { at: SocketAddr, source: io::Error },
    #[error("cannot open the agent endpoint on the store")]
    Store(#[from] doctor_store::StoreError),
}

/// Binds the agents' address as [`AgentListener::open_with`] does. It is free again when the result is dropped.
///
/// # Errors
/// If the address cannot be bound.
pub fn try_agent_address(at: SocketAddr) -> Result<TcpListener, ListenError> {
    TcpListener::bind(at).map_err(|source| ListenError::Agents { at, source })
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

/// Messages that are not durable yet.
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
        let failed = |source| ListenError::Agents { at, source };
        let listener = try_agent_address(at)?;
        let queue = Arc::new(AgentQueue::new(store, cycle_trigger)?);
        let inbox = AgentInbox::new(Arc::clone(&queue), store.clone(), clock.now())?;
        let body_memory = Arc::new(Semaphore::new(MAX_BODIES_KIB));
        let state = IngestState { store: store.clone(), clock, queue: Arc::clone(&queue), body_memory, token_reviews };
        let server = HttpServer::start("doctor-agents", listener, router(state)).map_err(failed)?;
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

    /// Call this after each cycle. Only the leader accepts agents' reports; the others answer them with 503. Results of
    /// runs are accepted in any case: the ingest queue is in the store, and the leader enters it.
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
        .route("/api/v1/results", post(job_results::post_result))
        .route("/healthz", get(health::health))
        .route("/readyz", get(health::ready))
        // The handlers apply their own limit when they read a body.
        .layer(DefaultBodyLimit::disable())
        .with_state(Arc::new(state))
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
    let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
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
        let service = service.clone();
        tokio::spawn(async move {
            serve_connection(&http_builder(), stream, service).await;
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
