//! Keeps the status that is published on the nodes up to date.
//!
//! Level-triggered: the published status of a node is compared with the desired one, so that nothing is lost with a
//! controller and nothing is written while nothing changes. A node is compared when its data changed, and all nodes
//! periodically, because results also become stale with time.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use doctor_backend::{Backend, RenderedStatus, StatusWriter, clock::Clock, progress::Progress};
use doctor_core::{
    ids::NodeName,
    node_status::NodeStatus,
    policy::Mode,
    snapshot::Snapshot,
    time::{Span, Timestamp},
    view::plural,
};
use doctor_store::{Lease, Store, StoreError};

use crate::fence;

/// How often every node is compared.
const FULL_SYNC_EVERY: Span = Span::minutes(10);
/// Nodes written per cycle; the next cycle continues.
const MAX_WRITES: usize = 500;
/// Nodes written between two checks of the lease: each worker writes a few, and a client that sends several nodes in one
/// request still does.
const WRITES_PER_CHECK: usize = 64;

#[derive(Debug, Default)]
pub(crate) struct StatusSync {
    changed: BTreeSet<NodeName>,
    last_full_sync: Option<Timestamp>,
}

/// The dependencies of [`StatusSync`].
pub(crate) struct SyncDeps<'a> {
    pub(crate) backend: &'a dyn Backend,
    pub(crate) store: &'a Store,
    pub(crate) clock: &'a dyn Clock,
    pub(crate) lease: &'a Lease,
    pub(crate) progress: &'a Progress,
    pub(crate) workers: usize,
}

impl StatusSync {
    /// Marks a node as changed.
    pub(crate) fn mark_changed(&mut self, node: &NodeName) {
        self.changed.insert(node.clone());
    }

    /// Marks all nodes as changed.
    pub(crate) fn mark_all_changed(&mut self) {
        self.last_full_sync = None;
    }

    /// Whether all nodes are compared. A last time later than now is from before the clock was set back.
    fn is_full_sync_due(&self, now: Timestamp) -> bool {
        self.last_full_sync.is_none_or(|last| now < last || now.since(last) >= FULL_SYNC_EVERY)
    }

    /// Updates the published status. Failed writes are returned, and retried in the next cycle.
    ///
    /// # Errors
    /// Only if the store fails or the lease is lost.
    pub(crate) fn sync(&mut self, snapshot: &Snapshot, deps: &SyncDeps<'_>) -> Result<Vec<String>, StoreError> {
        // In mode `observe`, nothing is written to nodes.
        let writer = deps.backend.status_writer().filter(|_| snapshot.policy.mode != Mode::Observe);
        let Some(writer) = writer else { return Ok(Vec::new()) };
        let all = self.is_full_sync_due(snapshot.at);
        // A status is built only if it is written in this cycle, and equal ones are shared: all of a large cluster
        // together would use more memory than everything else.
        let (mut work, mut remaining, mut shared) = (Vec::new(), BTreeSet::new(), HashMap::new());
        for record in &snapshot.nodes {
            let name = &record.node.name;
            if all || self.changed.contains(name) {
                let status = RenderedStatus::new(NodeStatus::of(snapshot, record));
                match writer.status_hash(name) == Some(status.hash) {
                    true => {}
                    false if work.len() < MAX_WRITES => work.push((name.clone(), deduplicated(&mut shared, status))),
                    false => drop(remaining.insert(name.clone())),
                }
            }
        }
        drop(shared);
        self.changed = remaining;
        if all {
            self.last_full_sync = Some(snapshot.at);
        }
        let result = write_all(writer, &work, deps);
        match result {
            Ok((problems, failed)) => {
                self.changed.extend(failed);
                Ok(problems)
            }
            Err(error) => {
                self.changed.extend(work.into_iter().map(|(node, _)| node));
                Err(error)
            }
        }
    }
}

/// Returns the shared copy of an equal status, or stores this one.
fn deduplicated(shared: &mut HashMap<u64, Arc<RenderedStatus>>, status: RenderedStatus) -> Arc<RenderedStatus> {
    match shared.get(&status.hash) {
        Some(known) if **known == status => Arc::clone(known),
        _ => {
            let status = Arc::new(status);
            shared.insert(status.hash, Arc::clone(&status));
            status
        }
    }
}

/// Writes several nodes concurrently. Returns the first error with the number of other failures, and the failed nodes.
fn write_all(
    writer: &dyn StatusWriter,
    work: &[(NodeName, Arc<RenderedStatus>)],
    deps: &SyncDeps<'_>,
) -> Result<(Vec<String>, Vec<NodeName>), StoreError> {
    let mut failed = Vec::new();
    for work in work.chunks(WRITES_PER_CHECK) {
        fence::check(deps.store, deps.clock, deps.lease, deps.progress)?;
        failed.extend(writer.write_all(work, deps.workers));
        deps.progress.tick();
    }
    let problems = failed.first().map(|(node, error)| match failed.len() {
        1 => format!("{node}: {error}"),
        more => format!("{node} and {}: {error}", plural(more - 1, "other")),
    });
    Ok((problems.into_iter().collect(), failed.into_iter().map(|(node, _)| node).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_nodes_are_compared_after_the_interval_and_when_the_clock_was_set_back() {
        let at = Timestamp::from_secs(1_794_800_000);
        let mut sync = StatusSync::default();
        assert!(sync.is_full_sync_due(at));
        sync.last_full_sync = Some(at);
        assert!(!sync.is_full_sync_due(at.plus(Span::minutes(9))));
        assert!(sync.is_full_sync_due(at.plus(FULL_SYNC_EVERY)));
        assert!(sync.is_full_sync_due(at.minus(Span::from_secs(1))));
    }
}
