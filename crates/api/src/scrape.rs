//! `GET /metrics`: where Prometheus asks, on an address of its own.
//!
//! It is apart from the agents' door because others come here, and it shows names of nodes. A scrape reads the store; one that
//! comes while another is made, or shortly after, gets the same text, so that many who ask cost no more than one.

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

/// A text serves everybody who asks within this time.
const YOUNG: Duration = Duration::from_secs(5);

/// What only the process that is asked knows.
#[derive(Debug, Default)]
pub struct OfProcess {
    /// What waits at its door, if it has one.
    pub spool: Option<Spool>,
    /// What became of its spans, where traces are wanted.
    pub traces: Option<Arc<Counts>>,
}

/// The listening end. Dropped, it closes.
#[derive(Debug)]
pub struct Scraped {
    listening: Listening,
}

struct Desk {
    store: Store,
    clock: Arc<dyn Clock>,
    settings: MetricsSettings,
    own: OfProcess,
    /// By what a cluster would be judged that no cycle has seen yet.
    judged_by: Settings,
    /// Locked while one is made: who comes meanwhile waits for it.
    last: Mutex<Option<(Instant, Arc<str>)>>,
}

impl Scraped {
    /// Listens from now on.
    ///
    /// # Errors
    /// If the address cannot be listened on.
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
        // Before the store is read: who reads enters what waits.
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
            tracing::debug!(%error, "a scrape failed");
            failed("the store fails")
        }
        Err(_) => failed("this scrape could not be made"),
    }
}
