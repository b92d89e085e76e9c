//! Publishes the results of a cycle: the free-node list, the seed's database, and the cluster state in the store. Each
//! is replaced as a whole.

use std::time::{Duration, Instant};

use doctor_core::{
    snapshot::NodeRecord,
    time::{Span, Timestamp},
};
use doctor_store::{Lease, StoreError};

use crate::{observe::Memory, parts::Parts, snapshot};

/// Measured in real time, because readers live in real time: a simulated month that takes seconds stores few copies.
const PICTURE_EVERY: Duration = Duration::from_secs(15);

#[derive(Debug)]
pub(crate) struct Publisher {
    every: Span,
    last: Option<Timestamp>,
    list: String,
    pictured: Option<Instant>,
}

impl Publisher {
    pub(crate) const fn new(every: Span) -> Self {
        Self { every, last: None, list: String::new(), pictured: None }
    }

    /// Failures here are reported and never stop a cycle: an outdated list harms no node.
    pub(crate) fn publish(&mut self, parts: &Parts, memory: &Memory, now: Timestamp, troubles: &mut Vec<String>) {
        if self.last.is_none_or(|last| now.since(last) >= self.every) {
            self.publish_now(parts, memory, now, troubles);
        }
    }

    pub(crate) fn publish_now(&mut self, parts: &Parts, memory: &Memory, now: Timestamp, troubles: &mut Vec<String>) {
        let (Some(share), Some(snapshot)) = (&parts.share, memory.snapshot()) else { return };
        self.list.clear();
        // Not every cluster keeps users off nodes that are out of service; the list does.
        let offered = |record: &&NodeRecord| record.node.occupancy.is_free() && !record.life.is_out();
        for record in snapshot.nodes.iter().filter(offered) {
            self.list.push_str(record.node.name.as_str());
            self.list.push('\n');
        }
        if let Err(error) = share.publish("free_nodes.txt", self.list.as_bytes()) {
            troubles.push(error.to_string());
        }
        let copied = share
            .metadata_path("validation.db")
            .map_err(|error| error.to_string())
            .and_then(|path| parts.store.publish(&path).map(|_| ()).map_err(|error| error.to_string()));
        if let Err(error) = copied {
            troubles.push(error);
        }
        self.last = Some(now);
    }

    /// Stores the cluster state for processes that do not lead, if the last copy is too old.
    pub(crate) fn picture_if_due(
        &mut self,
        parts: &Parts,
        lease: &Lease,
        memory: &Memory,
        now: Timestamp,
    ) -> Result<(), StoreError> {
        if self.pictured.is_some_and(|pictured| pictured.elapsed() < PICTURE_EVERY) {
            return Ok(());
        }
        self.picture(parts, lease, memory, now)
    }

    pub(crate) fn picture(
        &mut self,
        parts: &Parts,
        lease: &Lease,
        memory: &Memory,
        now: Timestamp,
    ) -> Result<(), StoreError> {
        let Some(snapshot) = memory.snapshot() else { return Ok(()) };
        parts.store.save_cluster(lease, now, &snapshot::written(parts.backend.name(), snapshot))?;
        self.pictured = Some(Instant::now());
        Ok(())
    }
}
