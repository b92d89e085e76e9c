//! `GET /healthz` and `GET /readyz`: whether this controller should be restarted, and whether it can serve requests.
//!
//! Liveness covers the loop alone: it fails when the loop makes no progress for two cycles (at least a minute). The process
//! then ends itself; the probe covers a process that cannot. A cycle that cannot reach its cluster or store ends with an
//! error, which is progress, and which a restart would not cure.
//!
//! Readiness covers the store, which must be writable: nothing can be stored on a full disk or in a database that is
//! read-only, whatever can be read. Neither depends on leadership: a controller that waits for the lease is live and
//! ready, otherwise a rolling update of two would wait for the second for ever.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use axum::{
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use doctor_store::Store;
use tokio::time::timeout;

use super::{liveness::LoopWatchdog, write_probe::WriteProbe};

/// Deadline for the store's reply.
const STORE_TIMEOUT: Duration = Duration::from_secs(3);

/// What the probes report.
#[derive(Debug)]
pub(super) struct ProbesState {
    store: Store,
    write_probe: WriteProbe,
    pub(super) watchdog: LoopWatchdog,
    leading: AtomicBool,
}

impl ProbesState {
    pub(super) fn new(store: Store) -> Self {
        let (write_probe, watchdog) = (WriteProbe::default(), LoopWatchdog::default());
        Self { store, write_probe, watchdog, leading: AtomicBool::new(false) }
    }

    pub(super) fn set_leading(&self, leading: bool) {
        self.leading.store(leading, Ordering::Relaxed);
    }

    fn is_leading(&self) -> bool {
        self.leading.load(Ordering::Relaxed)
    }
}

pub(super) async fn health(State(state): State<Arc<ProbesState>>) -> Response {
    match state.watchdog.stall() {
        // A migration of a large store takes minutes and is one step of one cycle: a restart would begin it again.
        Some(_) if state.store.is_migrating() => "migrating the store\n".into_response(),
        Some(stall) => {
            (StatusCode::SERVICE_UNAVAILABLE, format!("the control loop is stuck: {stall}\n")).into_response()
        }
        None => (if state.is_leading() { "leading\n" } else { "waiting\n" }).into_response(),
    }
}

pub(super) async fn ready(State(state): State<Arc<ProbesState>>) -> Response {
    let reason = match timeout(STORE_TIMEOUT, state.write_probe.run(&state.store)).await {
        Ok(Ok(())) => return "ready\n".into_response(),
        Ok(Err(reason)) => reason,
        Err(_) => "the store does not respond".to_owned(),
    };
    (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")).into_response()
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        net::TcpStream,
        time::Instant,
    };

    use super::*;
    use crate::ProbesListener;
    use doctor_backend::progress::Progress;
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
            listener.cycle_ended(leading);
            assert_eq!(get(&listener, "/healthz"), status_and_text("200", expected));
            assert_eq!(get(&listener, "/readyz"), status_and_text("200", "ready"));
        }
    }

    #[test]
    fn a_stuck_loop_is_unhealthy_but_ready() {
        let listener = open(&Store::open_in_memory().unwrap());
        let progress = Progress::new(Duration::ZERO);
        progress.enter("act");
        listener.set_progress(&progress);
        let (status, text) = get(&listener, "/healthz");
        assert_eq!(status, "503", "{text}");
        assert!(text.starts_with("the control loop is stuck: no progress for") && text.ends_with("`act`"), "{text}");
        assert_eq!(get(&listener, "/readyz"), status_and_text("200", "ready"));
        progress.set_limit(Duration::from_secs(3600));
        assert_eq!(get(&listener, "/healthz"), status_and_text("200", "waiting"));
    }

    /// Asks until the answer is not that of an earlier probe.
    fn wait_until_ready(listener: &ProbesListener, expected: &(String, String)) {
        let began = Instant::now();
        while get(listener, "/readyz") != *expected {
            assert!(began.elapsed() < Duration::from_secs(120), "{:?}", get(listener, "/readyz"));
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    #[test]
    fn a_controller_that_cannot_write_is_not_ready_but_healthy() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("doctor.db");
        let listener = open(&Store::open(&StoreUrl::Sqlite(file.clone())).unwrap());
        assert_eq!(get(&listener, "/readyz"), status_and_text("200", "ready"));
        let rename = |from: &str, to: &str| {
            let database = rusqlite::Connection::open(&file).unwrap();
            database.execute_batch(&format!("ALTER TABLE {from} RENAME TO {to}")).unwrap();
        };
        rename("meta", "mislaid");
        wait_until_ready(&listener, &status_and_text("503", "the store cannot be written: writing failed"));
        assert_eq!(
            get(&listener, "/healthz"),
            status_and_text("200", "waiting"),
            "a restart would not repair the store"
        );
        rename("mislaid", "meta");
        // Ready again without a restart.
        wait_until_ready(&listener, &status_and_text("200", "ready"));
    }

    #[test]
    fn a_store_that_another_program_has_locked_does_not_respond_and_one_probe_waits_for_it() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("doctor.db");
        let listener = open(&Store::open(&StoreUrl::Sqlite(file.clone())).unwrap());
        let database = rusqlite::Connection::open(&file).unwrap();
        database.execute_batch("BEGIN IMMEDIATE").unwrap();
        wait_until_ready(&listener, &status_and_text("503", "the store does not respond"));
        database.execute_batch("ROLLBACK").unwrap();
        wait_until_ready(&listener, &status_and_text("200", "ready"));
    }
}
