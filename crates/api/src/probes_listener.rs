//! The listener of the health probes, `/healthz` and `/readyz`.
//!
//! It has its own thread, address and limits. A probe is what decides whether the controller is restarted: it is answered while agents or
//! clients of the API take all connections of their listeners.

use std::{net::SocketAddr, sync::Arc};

use axum::{Router, routing::get};
use doctor_backend::progress::Progress;
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
    state: Arc<ProbesState>,
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

    /// Sets the progress of the loop, without which `/healthz` reports that the controller is stuck.
    pub fn set_progress(&self, progress: &Progress) {
        self.state.watchdog.set(progress);
    }

    /// Call this after each cycle.
    pub fn cycle_ended(&self, leading: bool) {
        self.state.set_leading(leading);
    }
}
