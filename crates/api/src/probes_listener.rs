//! The listener of the health probes, `/healthz` and `/readyz`.
//!
//! It has its own thread, address and limits. A probe is what decides whether the controller is restarted: it is answered while agents or
//! clients of the API take all connections of their listeners.

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{Router, routing::get};
use doctor_store::Store;

use super::{
    HttpServer, ListenError, few_clients_limits,
    health::{self, ProbesState},
    try_probes_address,
};

/// The probes' listener. Dropping it closes it.
#[derive(Debug)]
pub struct ProbesListener {
    server: HttpServer,
    pub(super) state: Arc<ProbesState>,
}

impl ProbesListener {
    /// Starts listening.
    ///
    /// # Errors
    /// If the address cannot be bound.
    pub fn open(at: SocketAddr, store: Store) -> Result<Self, ListenError> {
        let listener = try_probes_address(at)?;
        let state = Arc::new(ProbesState::new(store));
        let router = Router::new()
            .route("/healthz", get(health::health))
            .route("/readyz", get(health::ready))
            .with_state(Arc::clone(&state));
        let started = HttpServer::start("doctor-probes", listener, router, None, few_clients_limits());
        let server = started.map_err(|source| ListenError::Probes { at, source })?;
        Ok(Self { server, state })
    }

    pub const fn address(&self) -> SocketAddr {
        self.server.address()
    }

    /// Records that the loop is alive. Call this before and after each cycle; cycles start `every` apart. Without it for much longer,
    /// `/healthz` reports that the controller is stuck.
    pub fn record_progress(&self, every: Duration) {
        self.state.watchdog.record(Instant::now(), every);
    }

    /// Call this after each cycle.
    pub fn cycle_ended(&self, leading: bool) {
        self.state.set_leading(leading);
    }
}
