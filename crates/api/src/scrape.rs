//! `GET /metrics`: the Prometheus endpoint, on its own address.
//!
//! It is separate from the agent endpoint because other clients use it, and it exposes node names. A scrape reads the
//! store; one that arrives during or shortly after another gets the same text, so that many clients cost no more than
//! one.

use std::{
    net::{SocketAddr, TcpListener},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use doctor_backend::clock::Clock;
use doctor_engine::{
    picture,
    settings::Settings,
    snapshot::{self, Cluster},
    spans::Counts,
};
use doctor_store::{Store, StoreError};

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};

use super::{DoorError, Listening, Spool};
use crate::metrics::{self, MetricsSettings};

/// A scrape is reused for this long.
const YOUNG: Duration = Duration::from_secs(5);

/// Sources of metrics about this process.
#[derive(Debug, Default)]
pub struct OfProcess {
    /// The agent endpoint's queue, if it has one.
    pub spool: Option<Spool>,
    /// Span counters, where tracing is enabled.
    pub traces: Option<Arc<Counts>>,
}

/// The metrics listener. Dropping it closes it.
#[derive(Debug)]
pub struct Scraped {
    listening: Listening,
}

struct Desk {
    store: Store,
    clock: Arc<dyn Clock>,
    settings: MetricsSettings,
    own: OfProcess,
    /// Settings that apply until a first cycle has seen the cluster.
    judged_by: Settings,
    /// Locked while a scrape is made: concurrent requests wait for it.
    last: Mutex<Option<(Instant, Arc<str>)>>,
}

impl Scraped {
    /// Starts listening.
    ///
    /// # Errors
    /// If the address cannot be bound.
    pub fn open(
        at: SocketAddr,
        settings: MetricsSettings,
        store: Store,
        clock: Arc<dyn Clock>,
        judged_by: Settings,
        own: OfProcess,
    ) -> Result<Self, DoorError> {
        let failed = |source| DoorError::Scrape { at, source };
        let listener = TcpListener::bind(at).map_err(failed)?;
        let desk = Arc::new(Desk { store, clock, settings, own, judged_by, last: Mutex::default() });
        let router = Router::new().route("/metrics", get(scrape)).with_state(desk);
        let listening = Listening::start("doctor-metrics", listener, router).map_err(failed)?;
        Ok(Self { listening })
    }

    pub const fn address(&self) -> SocketAddr {
        self.listening.address()
    }
}

impl Desk {
    fn text(&self) -> Result<Arc<str>, StoreError> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, text)) = last.as_ref().filter(|(at, _)| at.elapsed() < YOUNG) {
            return Ok(Arc::clone(text));
        }
        // Before reading the store, because a read enters waiting results.
        let mut spooled = vec![("history", self.store.results_waiting() as u64)];
        if let Some(Spool(mail)) = &self.own.spool {
            let (on_nodes, here) = mail.spooled();
            spooled.extend([("nodes", on_nodes), ("door", here as u64)]);
        }
        let (seen, cluster) = match snapshot::last_seen(&self.store)? {
            Some((at, cluster)) => (Some(at), cluster),
            None => (None, Cluster::unseen(&self.judged_by)),
        };
        let facts = picture::facts(&self.store, seen, cluster, self.clock.now())?;
        let mut scrape = metrics::gather(&self.store, &facts, &self.settings)?;
        metrics::of_process(&mut scrape, &spooled, self.own.traces.as_deref());
        let text: Arc<str> = scrape.text().into();
        *last = Some((Instant::now(), Arc::clone(&text)));
        Ok(text)
    }
}

async fn scrape(State(desk): State<Arc<Desk>>) -> Response {
    let failed = |why: &str| (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")).into_response();
    match tokio::task::spawn_blocking(move || desk.text()).await {
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
