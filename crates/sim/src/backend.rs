//! The in-process simulated cluster: a backend and a clock that jumps. Both are handles on one shared world.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use doctor_backend::{
    Backend, BackendError, JobRequest, NodeOp, ObservedJobFailure, ObservedNode, PolledJob, clock::Clock,
};
use doctor_checks::document::RunKey;
use doctor_core::{
    ids::{JobId, NodeName, RunId},
    last_output::LastOutput,
    run::Run,
    snapshot::Capabilities,
    time::Timestamp,
};

use crate::{
    config::{BadWorld, WorldConfig},
    world::{Changes, OperatorRequest, QueuedReport, World},
};

/// A simulated cluster in this process. Clones share the cluster.
#[derive(Debug, Clone)]
pub struct SimBackend {
    world: Arc<Mutex<World>>,
    caps: Capabilities,
}

impl SimBackend {
    /// Creates the cluster.
    ///
    /// # Errors If the configuration is invalid.
    pub fn new(config: WorldConfig) -> Result<Self, BadWorld> {
        Ok(Self { caps: config.caps, world: Arc::new(Mutex::new(World::new(config)?)) })
    }

    /// Returns the world itself, for scripts and scoring.
    pub fn world(&self) -> MutexGuard<'_, World> {
        // A panic elsewhere leaves the world as it was after the last complete step, which is still consistent.
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the controller's clock in this world.
    pub fn clock(&self) -> VirtualClock {
        VirtualClock { world: self.world.clone() }
    }

    /// Returns the changes since a version, for callers that keep their own copy of the cluster state.
    ///
    /// # Errors While the cluster does not answer.
    pub fn changed_since(&self, version: u64) -> Result<Changes, BackendError> {
        self.world().changed_since(version)
    }

    /// See [`World::agent_reports`].
    pub fn agent_reports(&self) -> Vec<QueuedReport> {
        self.world().agent_reports()
    }

    /// See [`World::acknowledge_reports`].
    pub fn acknowledge_reports(&self, numbers: &[u64]) {
        self.world().acknowledge_reports(numbers);
    }

    /// See [`World::drain_agent_reports`].
    pub fn drain_agent_reports(&self) -> Vec<QueuedReport> {
        self.world().drain_agent_reports()
    }

    /// Returns the key that this node's agent was enrolled with.
    pub fn agent_key(&self, node: &NodeName) -> RunKey {
        self.world().agent_key(node)
    }

    /// See [`World::take_operator_requests`].
    pub fn take_operator_requests(&self) -> Vec<OperatorRequest> {
        self.world().take_operator_requests()
    }
}

impl Backend for SimBackend {
    fn name(&self) -> &str {
        "sim"
    }

    fn caps(&self) -> Capabilities {
        self.caps
    }

    fn snapshot(&self) -> Result<Vec<ObservedNode>, BackendError> {
        self.world().snapshot()
    }

    fn submit(&self, job: &JobRequest) -> Result<JobId, BackendError> {
        self.world().submit(job)
    }

    fn poll(&self, runs: &[RunId]) -> Result<Vec<PolledJob>, BackendError> {
        self.world().poll(runs)
    }

    fn remaining_output(&self, run: &Run) -> Result<Vec<LastOutput>, BackendError> {
        self.world().remaining_output(run.id)
    }

    fn cancel(&self, run: RunId) -> Result<(), BackendError> {
        self.world().cancel(run)
    }

    fn apply(&self, node: &NodeName, change: &NodeOp) -> Result<(), BackendError> {
        self.world().apply(node, change)
    }

    fn job_failures(&self, since: Timestamp) -> Result<Vec<ObservedJobFailure>, BackendError> {
        self.world().failed_work(since)
    }
}

/// A clock that does not tick: time passes only when a caller sleeps, and then in one step.
#[derive(Debug, Clone)]
pub struct VirtualClock {
    world: Arc<Mutex<World>>,
}

impl Clock for VirtualClock {
    fn now(&self) -> Timestamp {
        self.world.lock().unwrap_or_else(PoisonError::into_inner).controller_now()
    }

    fn sleep_until(&self, moment: Timestamp) {
        let mut world = self.world.lock().unwrap_or_else(PoisonError::into_inner);
        let moment = world.world_time(moment);
        world.advance_to(moment);
    }

    fn virtual_now(&self) -> Option<Timestamp> {
        Some(self.now())
    }
}
