//! Entry points for the fuzzer: the agent endpoint, from connection bytes to the response; and the API, from request to
//! response.

use std::{
    io::{self, Read, Write},
    net::Shutdown,
    os::unix::net::UnixStream,
    sync::Arc,
};

use doctor_backend::clock::{Clock, SystemClock};
use doctor_checks::document::RunKey;
use doctor_core::ids::NodeName;
use doctor_engine::trigger::Trigger;
use doctor_store::Store;
use hyper_util::service::TowerToHyperService;
use tokio::runtime::{Builder, Runtime};

use super::{
    CONNECTIONS_PER_ADDRESS, agent_limits, agent_queue::AgentQueue, agent_reports::IngestState,
    body_memory::BodyMemory, connections::serve_half_closed, router,
};

/// An agent endpoint with one enrolled node, of a controller that leads.
#[derive(Debug)]
pub struct FuzzAgentEndpoint {
    runtime: Runtime,
    service: TowerToHyperService<axum::Router>,
}

impl FuzzAgentEndpoint {
    /// # Errors
    /// If the store or the server cannot be set up.
    pub fn new(node: &NodeName, key: &RunKey) -> io::Result<Self> {
        let store = Store::open_in_memory().map_err(io::Error::other)?;
        let clock = Arc::new(SystemClock);
        store.enroll_agent(node, key, "fuzzer", "fuzzing", clock.now()).map_err(io::Error::other)?;
        let queue = AgentQueue::new(&store, Arc::new(Trigger::default())).map_err(io::Error::other)?;
        let queue = Arc::new(queue);
        queue.set_leading(true);
        let body_memory = BodyMemory::default();
        let runtime = Builder::new_current_thread().enable_io().enable_time().max_blocking_threads(1).build()?;
        let service =
            TowerToHyperService::new(router(IngestState { store, clock, queue, body_memory, token_reviews: None }));
        Ok(Self { runtime, service })
    }

    /// Sends these bytes, closes the writing half, and returns the response. At most what fits into a socket buffer: 64
    /// KiB.
    ///
    /// # Errors
    /// If the socket pair cannot be created.
    pub fn exchange(&self, input: &[u8]) -> io::Result<Vec<u8>> {
        let (mut near, far) = UnixStream::pair()?;
        near.write_all(input)?;
        near.shutdown(Shutdown::Write)?;
        far.set_nonblocking(true)?;
        self.runtime.block_on(async {
            let far = tokio::net::UnixStream::from_std(far)?;
            // Half-closed connections are served: otherwise every request would be dropped before its response.
            serve_half_closed(far, self.service.clone(), &agent_limits(CONNECTIONS_PER_ADDRESS)).await;
            io::Result::Ok(())
        })?;
        let mut response = Vec::new();
        near.read_to_end(&mut response)?;
        Ok(response)
    }
}

pub use super::operator_api::fuzz_targets::FuzzApi;
