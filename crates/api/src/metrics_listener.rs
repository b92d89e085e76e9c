//! `GET /metrics`: the Prometheus endpoint, on its own address.
//!
//! It is separate from the agent endpoint because other clients use it, and it exposes node names. A scrape reads the
//! store; one that arrives during or shortly after another gets the same text, so that many clients cost no more than
//! one.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use doctor_backend::clock::Clock;
use doctor_engine::{
    cluster_state,
    settings::Settings,
    snapshot::{self, ObservedCluster},
    spans::ExportCounts,
};
use doctor_store::{Store, StoreError};

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};

use super::{HttpServer, ListenError, Spool, few_clients_limits, try_metrics_address};
use crate::metrics::{self, MetricsSettings};

/// A scrape is reused for this long.
const CACHE_TTL: Duration = Duration::from_secs(5);

/// Sources of metrics about this process.
#[derive(Debug, Default)]
pub struct ProcessMetrics {
    /// The agent endpoint's queue, if it has one.
    pub spool: Option<Spool>,
    /// Span counters, where tracing is enabled.
    pub traces: Option<Arc<ExportCounts>>,
}

/// The metrics listener. Dropping it closes it.
#[derive(Debug)]
pub struct MetricsListener {
    server: HttpServer,
}

struct MetricsState {
    store: Store,
    clock: Arc<dyn Clock>,
    settings: MetricsSettings,
    process: ProcessMetrics,
    /// Settings that apply until a first cycle has seen the cluster.
    initial_settings: Settings,
    /// Locked while a scrape is made: concurrent requests wait for it.
    last: Mutex<Option<(Instant, Arc<str>)>>,
}

impl MetricsListener {
    /// Starts listening.
    ///
    /// # Errors
    /// If the address cannot be bound.
    pub fn open(
        at: SocketAddr,
        settings: MetricsSettings,
        store: Store,
        clock: Arc<dyn Clock>,
        initial_settings: Settings,
        process: ProcessMetrics,
    ) -> Result<Self, ListenError> {
        let failed = |source| ListenError::Metrics { at, source };
        let listener = try_metrics_address(at)?;
        let state =
            Arc::new(MetricsState { store, clock, settings, process, initial_settings, last: Mutex::default() });
        let router = Router::new().route("/metrics", get(scrape)).with_state(state);
        let server =
            HttpServer::start("doctor-metrics", listener, router, None, few_clients_limits()).map_err(failed)?;
        Ok(Self { server })
    }

    pub const fn address(&self) -> SocketAddr {
        self.server.address()
    }
}

impl MetricsState {
    fn text(&self) -> Result<Arc<str>, StoreError> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, text)) = last.as_ref().filter(|(at, _)| at.elapsed() < CACHE_TTL) {
            return Ok(Arc::clone(text));
        }
        let mut waiting = vec![("history", self.store.queued_count()?)];
        if let Some(Spool(queue)) = &self.process.spool {
            let (on_nodes, queued) = queue.waiting_counts();
            waiting.extend([("nodes", on_nodes), ("endpoint", queued as u64)]);
        }
        let (observed_at, cluster) = match snapshot::last_observed(&self.store)? {
            Some((at, cluster)) => (Some(at), cluster),
            None => (None, ObservedCluster::unobserved(&self.initial_settings)),
        };
        let facts = cluster_state::facts(&self.store, observed_at, cluster, self.clock.now())?;
        let mut scrape = metrics::gather(&self.store, &facts, &self.settings)?;
        metrics::add_process_metrics(&mut scrape, &waiting, self.process.traces.as_deref());
        let text: Arc<str> = scrape.text().into();
        *last = Some((Instant::now(), Arc::clone(&text)));
        Ok(text)
    }
}

async fn scrape(State(state): State<Arc<MetricsState>>) -> Response {
    let failed = |why: &str| (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")).into_response();
    match tokio::task::spawn_blocking(move || state.text()).await {
        Ok(Ok(text)) => {
            ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text.to_string()).into_response()
        }
        Ok(Err(error)) => {
            tracing::debug!(%error, "scrape failed");
            failed("the store returns errors")
        }
        Err(_) => failed("the scrape failed"),
    }
}
