//! The agent endpoint: a small HTTP server on its own thread, beside an engine that knows nothing of HTTP. Agents send
//! their reports to it, and validation jobs their results.
//!
//! The API, the metrics and the health probes have listeners of their own, with the same limits of connections ([`connections`]).
//!
//! Messages are checked before they cost anything. A sender that is neither enrolled nor authenticated by the cluster is
//! rejected before its body is read, and so is a result of a run that is not active; a body that is not signed with that
//! node's or run's key is rejected before it is parsed; everything has a limit and a deadline, the TLS handshake included. A
//! message is answered when it is durable in the store's ingest queue, whatever the control loop does; a heartbeat is
//! answered immediately and stored with others.

mod agent_queue;
mod agent_reports;
mod body_memory;
mod connections;
mod dashboard;
#[doc(hidden)]
pub mod fuzz_targets;
mod health;
mod job_results;
mod liveness;
pub mod metrics;
mod metrics_listener;
pub mod operator_api;
mod probes_listener;
mod response;
pub mod self_made_certificate;
mod tls;
mod token_review_cache;
mod write_probe;

use std::{
    io,
    net::{SocketAddr, TcpListener},
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};

use axum::{Router, extract::DefaultBodyLimit, routing::post};
use doctor_backend::clock::Clock;
use doctor_checks::site_profiles::SiteProfiles;
use doctor_core::plan::TakeOutPermit;
use doctor_engine::trigger::Trigger;
use doctor_store::Store;
use tokio::sync::oneshot;

use agent_queue::AgentQueue;
use agent_reports::IngestState;
use body_memory::BodyMemory;
use connections::{AcceptorSource, BodyDeadlines, ConnectionLimits, ListenerLimits};
use tls::Tls;

pub use agent_queue::AgentInbox;
pub use metrics_listener::{MetricsListener, ProcessMetrics};
pub use probes_listener::ProbesListener;
pub use tls::TlsFiles;
pub use token_review_cache::TokenReviewCache;

/// Concurrent connections. An agent connects for each message, and ten thousand of them report once a minute.
const MAX_CONNECTIONS: usize = 512;
/// Connections of one address, unless the configuration names another number: many agents may share that of a NAT gateway.
pub const CONNECTIONS_PER_ADDRESS: usize = 128;

#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error("cannot listen on {at} for agents")]
    Agents { at: SocketAddr, source: io::Error },
    #[error("cannot use {} and {} for the TLS of agents: {text}", .files.certificate.display(), .files.key.display())]
    AgentTls { files: TlsFiles, text: String },
    #[error("cannot listen on {at} for Prometheus")]
    Metrics { at: SocketAddr, source: io::Error },
    #[error("cannot listen on {at} for health probes")]
    Probes { at: SocketAddr, source: io::Error },
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

/// Binds the address for health probes as [`ProbesListener::open`] does. It is free again when the result is dropped.
///
/// # Errors
/// If the address cannot be bound.
pub fn try_probes_address(at: SocketAddr) -> Result<TcpListener, ListenError> {
    TcpListener::bind(at).map_err(|source| ListenError::Probes { at, source })
}

/// Returns the limits of the agents' listener.
fn agent_limits(per_address: usize) -> ListenerLimits {
    ListenerLimits {
        connections: ConnectionLimits { total: MAX_CONNECTIONS, per_address, shared_addresses: Vec::new() },
        head: Duration::from_secs(5),
        body: BodyDeadlines { piece: Duration::from_secs(5), whole: Duration::from_secs(20) },
        age: Duration::from_secs(60),
    }
}

/// Returns the limits of a listener with few clients: Prometheus and the kubelet.
fn few_clients_limits() -> ListenerLimits {
    ListenerLimits {
        connections: ConnectionLimits { total: 64, per_address: 16, shared_addresses: Vec::new() },
        age: Duration::from_secs(30),
        ..agent_limits(CONNECTIONS_PER_ADDRESS)
    }
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
    fn start(
        name: &'static str,
        listener: TcpListener,
        router: Router,
        tls: Option<AcceptorSource>,
        limits: ListenerLimits,
    ) -> io::Result<Self> {
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
                let serving = tokio::spawn(connections::serve(name, listener, router, tls, limits));
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
        Self::open_with(at, CONNECTIONS_PER_ADDRESS, store, clock, cycle_trigger, None)
    }

    /// As [`AgentListener::open`], with another limit of connections of one address, and also accepts agents that their cluster
    /// vouches for.
    ///
    /// # Errors
    /// If the address cannot be bound, or the store fails.
    pub fn open_with(
        at: SocketAddr,
        per_address: usize,
        store: &Store,
        clock: Arc<dyn Clock>,
        cycle_trigger: Arc<Trigger>,
        token_reviews: Option<TokenReviewCache>,
    ) -> Result<(Self, AgentInbox), ListenError> {
        Self::open_with_tls(at, per_address, None, store, clock, cycle_trigger, token_reviews)
    }

    /// As [`AgentListener::open_with`], over TLS with this certificate and key. They are loaded again when they change.
    ///
    /// # Errors
    /// If the address cannot be bound, the certificate cannot be used, or the store fails.
    pub fn open_with_tls(
        at: SocketAddr,
        per_address: usize,
        tls: Option<&TlsFiles>,
        store: &Store,
        clock: Arc<dyn Clock>,
        cycle_trigger: Arc<Trigger>,
        token_reviews: Option<TokenReviewCache>,
    ) -> Result<(Self, AgentInbox), ListenError> {
        let failed = |source| ListenError::Agents { at, source };
        let tls = tls.map(open_agent_tls).transpose()?;
        let tls = tls.map(|tls| -> AcceptorSource { Arc::new(move || tls.acceptor()) });
        let listener = try_agent_address(at)?;
        let queue = Arc::new(AgentQueue::new(store, cycle_trigger)?);
        let inbox = AgentInbox::new(Arc::clone(&queue), store.clone(), clock.now())?;
        let body_memory = BodyMemory::default();
        let state = IngestState { store: store.clone(), clock, queue: Arc::clone(&queue), body_memory, token_reviews };
        let limits = agent_limits(per_address);
        let server = HttpServer::start("doctor-agents", listener, router(state), tls, limits).map_err(failed)?;
        Ok((Self { server, queue }, inbox))
    }

    pub const fn address(&self) -> SocketAddr {
        self.server.address()
    }

    /// Returns a handle to the number of waiting messages, on nodes and here, for metrics.
    pub fn spool(&self) -> Spool {
        Spool(Arc::clone(&self.queue))
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
        // The handlers apply their own limit when they read a body.
        .layer(DefaultBodyLimit::disable())
        .with_state(Arc::new(state))
}
