//! Keeps what is written on the nodes themselves up to what is known of them.
//!
//! Level, not edge: what a node bears is compared with what it should bear, so nothing is lost with a controller and nothing is
//! written while nothing changes. A node is looked at when something about it changed, and all of them now and then, because a
//! result also grows old by itself.

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
};
use doctor_store::{Lease, Store, StoreError};

/// So often every node is looked at.
const ALL_EVERY: Span = Span::minutes(10);
/// So many are written in one cycle: the next one goes on.
const MOST: usize = 500;

#[derive(Debug, Default)]
pub(crate) struct Boards {
    changed: BTreeSet<NodeName>,
    all_at: Option<Timestamp>,
}

/// What writing needs.
pub(crate) struct Writing<'a> {
    pub(crate) backend: &'a dyn Backend,
    pub(crate) store: &'a Store,
    pub(crate) clock: &'a dyn Clock,
    pub(crate) lease: &'a Lease,
    pub(crate) workers: usize,
}

impl Boards {
    /// Something about this node is not as it was.
    pub(crate) fn changed(&mut self, node: &NodeName) {
        self.changed.insert(node.clone());
    }

    /// Nothing is known of what changed.
    pub(crate) fn all_changed(&mut self) {
        self.all_at = None;
    }

    /// Brings the nodes up to date. What could not be written is said, and tried again.
    ///
    /// # Errors
    /// Only if the store fails or the lease is lost.
    pub(crate) fn write(&mut self, snapshot: &Snapshot, writing: &Writing<'_>) -> Result<Vec<String>, StoreError> {
        // Who only observes leaves nothing on nodes.
        let board = writing.backend.board().filter(|_| snapshot.policy.mode != Mode::Observe);
        let Some(board) = board else { return Ok(Vec::new()) };
        let all = self.all_at.is_none_or(|last| snapshot.at.since(last) >= ALL_EVERY);
        // What is written later is made later, and what many are to bear is there once: all of a large cluster at once would be more
        // than everything else in memory.
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

/// The same that another node is to bear, or this.
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

/// Writes them, several at a time. Back come what went wrong, once for each kind, and the nodes it happened to.
fn write_all(
    board: &dyn Board,
    work: &[(NodeName, Arc<ToShow>)],
    writing: &Writing<'_>,
) -> Result<(Vec<String>, Vec<NodeName>), StoreError> {
    // One look at the lease for all of them: they say what is, and decide nothing.
    if !work.is_empty() {
        writing.store.still_ours(writing.lease, writing.clock.now())?;
    }
    let failed = board.write_all(work, writing.workers);
    let troubles = failed.first().map(|(node, error)| match failed.len() {
        1 => format!("{node}: {error}"),
        more => format!("{node} and {} others: {error}", more - 1),
    });
    Ok((troubles.into_iter().collect(), failed.into_iter().map(|(node, _)| node).collect()))
}
