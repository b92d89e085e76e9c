//! Publishes the results of a cycle: the free-node list, the seed's database, and the cluster state in the store. Each
//! is replaced as a whole.

use std::time::{Duration, Instant};

use doctor_core::time::{Span, Timestamp};
use doctor_store::{Lease, StoreError};

use crate::{deps::EngineDeps, free_node_list, observe::PlannerState, snapshot};

/// Measured in real time, because readers live in real time: a simulated month that takes seconds stores few copies.
const SAVE_STATE_EVERY: Duration = Duration::from_secs(15);

#[derive(Debug)]
pub(crate) struct Publisher {
    every: Span,
    last: Option<Timestamp>,
    state_saved: Option<Instant>,
}

impl Publisher {
    pub(crate) const fn new(every: Span) -> Self {
        Self { every, last: None, state_saved: None }
    }

    /// Failures here are reported and never stop a cycle: an outdated list harms no node.
    pub(crate) fn publish(
        &mut self,
        deps: &EngineDeps,
        planner_state: &PlannerState,
        now: Timestamp,
        problems: &mut Vec<String>,
    ) {
        if self.last.is_none_or(|last| now.since(last) >= self.every) {
            self.publish_now(deps, planner_state, now, problems);
        }
    }

    pub(crate) fn publish_now(
        &mut self,
        deps: &EngineDeps,
        planner_state: &PlannerState,
        now: Timestamp,
        problems: &mut Vec<String>,
    ) {
        let (Some(share), Some(snapshot)) = (&deps.share, planner_state.snapshot()) else { return };
        if let Err(error) = free_node_list::publish(share, snapshot) {
            problems.push(error.to_string());
        }
        let copied = share
            .metadata_path("validation.db")
            .map_err(|error| error.to_string())
            .and_then(|path| deps.store.publish(&path).map(|_| ()).map_err(|error| error.to_string()));
        if let Err(error) = copied {
            problems.push(error);
        }
        self.last = Some(now);
    }

    /// Stores the cluster state for processes that do not lead, if the last copy is too old.
    pub(crate) fn save_state_if_due(
        &mut self,
        deps: &EngineDeps,
        lease: &Lease,
        planner_state: &PlannerState,
    ) -> Result<(), StoreError> {
        if self.state_saved.is_some_and(|saved| saved.elapsed() < SAVE_STATE_EVERY) {
            return Ok(());
        }
        self.save_state(deps, lease, planner_state)
    }

    /// Stores the cluster state under the time at which the cluster last answered: neither a failed observation nor the stop
    /// of the controller makes it younger.
    pub(crate) fn save_state(
        &mut self,
        deps: &EngineDeps,
        lease: &Lease,
        planner_state: &PlannerState,
    ) -> Result<(), StoreError> {
        let observed = planner_state.snapshot().zip(planner_state.observed_at());
        let Some((snapshot, observed_at)) = observed else { return Ok(()) };
        deps.store.save_cluster_state(lease, observed_at, &snapshot::serializable(deps.backend.name(), snapshot))?;
        self.state_saved = Some(Instant::now());
        Ok(())
    }
}
