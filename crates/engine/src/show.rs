//! Keeps the status that is published on the nodes up to date.
//!
//! Level-triggered: the published status of a node is compared with the desired one, so that nothing is lost with a
//! controller and nothing is written while nothing changes. A node is compared when its data changed, and all nodes
//! periodically, because results also become stale with time.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use doctor_backend::{Backend, Board, ToShow, clock::Clock};
use doctor_core::{
    ids::NodeName,
    policy::Mode,
    shown::Shown,
    snapshot::Snapshot,
    time::{Span, Timestamp},
    view::plural,
};
use doctor_store::{Lease, Store, StoreError};

/// How often every node is compared.
const ALL_EVERY: Span = Span::minutes(10);
/// Nodes written per cycle; the next cycle continues.
const MOST: usize = 500;

#[derive(Debug, Default)]
pub(crate) struct Boards {
    changed: BTreeSet<NodeName>,
    all_at: Option<Timestamp>,
}

/// The dependencies of writing.
pub(crate) struct Writing<'a> {
    pub(crate) backend: &'a dyn Backend,
    pub(crate) store: &'a Store,
    pub(crate) clock: &'a dyn Clock,
    pub(crate) lease: &'a Lease,
    pub(crate) workers: usize,
}

impl Boards {
    /// Marks a node as changed.
    pub(crate) fn changed(&mut self, node: &NodeName) {
        self.changed.insert(node.clone());
    }

    /// Marks all nodes as changed.
    pub(crate) fn all_changed(&mut self) {
        self.all_at = None;
    }

    /// Updates the published status. Failed writes are returned, and retried in the next cycle.
    ///
    /// # Errors
    /// Only if the store fails or the lease is lost.
    pub(crate) fn write(&mut self, snapshot: &Snapshot, writing: &Writing<'_>) -> Result<Vec<String>, StoreError> {
        // In mode `observe`, nothing is written to nodes.
        let board = writing.backend.board().filter(|_| snapshot.policy.mode != Mode::Observe);
        let Some(board) = board else { return Ok(Vec::new()) };
        let all = self.all_at.is_none_or(|last| snapshot.at.since(last) >= ALL_EVERY);
        // A status is built only if it is written in this cycle, and equal ones are shared: all of a large cluster
        // together would use more memory than everything else.
        let (mut work, mut rest, mut texts) = (Vec::new(), BTreeSet::new(), HashMap::new());
        for record in &snapshot.nodes {
            let name = &record.node.name;
            if all || self.changed.contains(name) {
                let wanted = ToShow::of(Shown::of(snapshot, record));
                match board.number(name) == Some(wanted.number) {
                    true => {}
                    false if work.len() < MOST => work.push((name.clone(), once(&mut texts, wanted))),
                    false => drop(rest.insert(name.clone())),
                }
            }
        }
        drop(texts);
        self.changed = rest;
        if all {
            self.all_at = Some(snapshot.at);
        }
        let written = write_all(board, &work, writing);
        match written {
            Ok((troubles, failed)) => {
                self.changed.extend(failed);
                Ok(troubles)
            }
            Err(error) => {
                self.changed.extend(work.into_iter().map(|(node, _)| node));
                Err(error)
            }
        }
    }
}

/// Returns the shared copy of an equal status, or stores this one.
fn once(texts: &mut HashMap<u64, Arc<ToShow>>, wanted: ToShow) -> Arc<ToShow> {
    match texts.get(&wanted.number) {
        Some(known) if **known == wanted => Arc::clone(known),
        _ => {
            let wanted = Arc::new(wanted);
            texts.insert(wanted.number, Arc::clone(&wanted));
            wanted
        }
    }
}

/// Writes several nodes concurrently. Returns the first error with the number of other failures, and the failed nodes.
fn write_all(
    board: &dyn Board,
    work: &[(NodeName, Arc<ToShow>)],
    writing: &Writing<'_>,
) -> Result<(Vec<String>, Vec<NodeName>), StoreError> {
    // One lease check for all: a status reports facts and decides nothing.
    if !work.is_empty() {
        writing.store.still_ours(writing.lease, writing.clock.now())?;
    }
    let failed = board.write_all(work, writing.workers);
    let troubles = failed.first().map(|(node, error)| match failed.len() {
        1 => format!("{node}: {error}"),
        more => format!("{node} and {}: {error}", plural(more - 1, "other")),
    });
    Ok((troubles.into_iter().collect(), failed.into_iter().map(|(node, _)| node).collect()))
}
