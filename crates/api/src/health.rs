//! `GET /healthz` and `GET /readyz`: whether this controller should be restarted, and whether it can serve requests.
//!
//! Liveness covers the loop alone. A cycle that cannot reach its cluster or store ends with an error, which a restart
//! would not cure; a loop that no longer runs is what a restart cures. Readiness covers the store, without which
//! nothing can be stored. Neither depends on leadership: a controller that waits for the lease is live and ready,
//! otherwise a rolling update of two would wait for the second for ever.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use axum::{
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use doctor_store::Store;
use tokio::time::timeout;

use super::liveness::LoopWatchdog;

/// Deadline for the store's reply.
const STORE_TIMEOUT: Duration = Duration::from_secs(3);

/// What the probes report.
#[derive(Debug)]
pub(super) struct ProbesState {
    store: Store,
    pub(super) watchdog: LoopWatchdog,
    leading: AtomicBool,
}

impl ProbesState {
    pub(super) fn new(store: Store) -> Self {
        Self { store, watchdog: LoopWatchdog::new(Instant::now()), leading: AtomicBool::new(false) }
    }

    pub(super) fn set_leading(&self, leading: bool) {
        self.leading.store(leading, Ordering::Relaxed);
    }

    fn is_leading(&self) -> bool {
        self.leading.load(Ordering::Relaxed)
    }
}

pub(super) async fn health(State(state): State<Arc<ProbesState>>) -> Response {
    match state.watchdog.stuck_for(Instant::now()) {
        Some(stuck_for) => {
            let minutes = stuck_for.as_secs() / 60;
            let text = format!("no cycle has started or ended for {minutes} minutes: the control loop is stuck\n");
            (StatusCode::SERVICE_UNAVAILABLE, text).into_response()
        }
        None => (if state.is_leading() { "leading\n" } else { "waiting\n" }).into_response(),
    }
}

pub(super) async fn ready(State(state): State<Arc<ProbesState>>) -> Response {
    let shared = Arc::clone(&state);
    let result = timeout(STORE_TIMEOUT, tokio::task::spawn_blocking(move || shared.store.leader())).await;
    let reason = match result {
        Ok(Ok(Ok(_))) => return "ready\n".into_response(),
        Ok(Ok(Err(error))) => {
            tracing::debug!(%error, "not ready");
            "the store returns errors"
        }
        Ok(Err(_)) | Err(_) => "the store does not respond",
    };
    (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")).into_response()
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        net::TcpStream,
    };

    use super::*;
    use crate::ProbesListener;
    use doctor_store::StoreUrl;

    fn open(store: &Store) -> ProbesListener {
        ProbesListener::open("127.0.0.1:0".parse().unwrap(), store.clone()).unwrap()
    }

    /// Returns the status and the last line of the response.
    fn get(listener: &ProbesListener, path: &str) -> (String, String) {
        let mut stream = TcpStream::connect(listener.address()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        let status = response.split(' ').nth(1).unwrap_or_default().to_owned();
        (status, response.lines().last().unwrap_or_default().to_owned())
    }

    fn status_and_text(status: &str, text: &str) -> (String, String) {
        (status.to_owned(), text.to_owned())
    }

    #[test]
    fn a_controller_is_alive_and_ready_whether_it_leads_or_waits() {
        let listener = open(&Store::open_in_memory().unwrap());
        for (leading, expected) in [(false, "waiting"), (true, "leading"), (false, "waiting")] {
            listener.record_progress(Duration::from_secs(30));
            listener.cycle_ended(leading);
            assert_eq!(get(&listener, "/healthz"), status_and_text("200", expected));
            assert_eq!(get(&listener, "/readyz"), status_and_text("200", "ready"));
        }
    }

    #[test]
    fn a_stuck_loop_is_unhealthy_but_ready() {
        let listener = open(&Store::open_in_memory().unwrap());
        listener.state.watchdog.set_stuck();
        let expected = "no cycle has started or ended for 0 minutes: the control loop is stuck";
        assert_eq!(get(&listener, "/healthz"), status_and_text("503", expected));
        assert_eq!(get(&listener, "/readyz"), status_and_text("200", "ready"));
        listener.record_progress(Duration::from_secs(30));
        assert_eq!(get(&listener, "/healthz"), status_and_text("200", "waiting"));
    }

    #[test]
    fn a_controller_whose_store_fails_is_not_ready_but_healthy() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("doctor.db");
        let listener = open(&Store::open(&StoreUrl::Sqlite(file.clone())).unwrap());
        assert_eq!(get(&listener, "/readyz"), status_and_text("200", "ready"));
        let rename = |from: &str, to: &str| {
            let database = rusqlite::Connection::open(&file).unwrap();
            database.execute_batch(&format!("ALTER TABLE {from} RENAME TO {to}")).unwrap();
        };
        rename("lease", "mislaid");
        assert_eq!(get(&listener, "/readyz"), status_and_text("503", "the store returns errors"));
        assert_eq!(
            get(&listener, "/healthz"),
            status_and_text("200", "waiting"),
            "a restart would not repair the store"
        );
        rename("mislaid", "lease");
        assert_eq!(get(&listener, "/readyz"), status_and_text("200", "ready"), "it is ready again without a restart");
    }
}
