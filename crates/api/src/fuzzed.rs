//! A way in for the fuzzer to the door for agents: bytes as they come over a connection, and what is answered; and to the API: what
//! is asked, and what is answered.

use std::{
    io::{self, Read, Write},
    net::Shutdown,
    os::unix::net::UnixStream,
    sync::Arc,
};

use doctor_backend::clock::{Clock, SystemClock};
use doctor_checks::document::RunKey;
use doctor_core::ids::NodeName;
use doctor_engine::wake::Wake;
use doctor_store::Store;
use hyper_util::service::TowerToHyperService;
use tokio::{
    runtime::{Builder, Runtime},
    sync::Semaphore,
};

use super::{BODIES, converse, http, ingest::Desk, mail::Mail, router};

/// A door that one node is enrolled at, and whose controller leads.
#[derive(Debug)]
pub struct DoorOfOne {
    runtime: Runtime,
    service: TowerToHyperService<axum::Router>,
}

impl DoorOfOne {
    /// # Errors
    /// If the store or the server cannot be set up.
    pub fn new(node: &NodeName, key: &RunKey) -> io::Result<Self> {
        let store = Store::open_in_memory().map_err(io::Error::other)?;
        let clock = Arc::new(SystemClock);
        store.enroll_agent(node, key, "fuzzer", "to be heard", clock.now()).map_err(io::Error::other)?;
        let mail = Arc::new(Mail::new(Arc::new(Wake::default())));
        mail.set_leading(true);
        let room = Arc::new(Semaphore::new(BODIES));
        let runtime = Builder::new_current_thread().enable_io().enable_time().max_blocking_threads(1).build()?;
        let service = TowerToHyperService::new(router(Desk { store, clock, mail, room, tokens: None }));
        Ok(Self { runtime, service })
    }

    /// Says this, hangs up, and returns what was answered. No more than fits into a socket: 64 KiB.
    ///
    /// # Errors
    /// If there is no connection to be had.
    pub fn hear(&self, said: &[u8]) -> io::Result<Vec<u8>> {
        let (mut near, far) = UnixStream::pair()?;
        near.write_all(said)?;
        near.shutdown(Shutdown::Write)?;
        far.set_nonblocking(true)?;
        self.runtime.block_on(async {
            let far = tokio::net::UnixStream::from_std(far)?;
            // Whoever has hung up is served all the same: else every question would be dropped before its answer.
            converse(http().half_close(true), far, self.service.clone()).await;
            io::Result::Ok(())
        })?;
        let mut answer = Vec::new();
        near.read_to_end(&mut answer)?;
        Ok(answer)
    }
}

pub use super::api::fuzzed::ApiOfFew;
