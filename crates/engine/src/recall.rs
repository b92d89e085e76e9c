//! What nodes that are silent bear, by what is known of them.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use doctor_backend::{Backend, SeenNode};
use doctor_core::{
    ids::NodeName,
    node::Marks,
    snapshot::Snapshot,
    time::{Span, Timestamp},
};
use doctor_store::{Store, StoreError};

use crate::snapshot;

/// A mark that was set this long before the cluster was last seen may not show in what was seen.
const SHOWS_WITHIN: Span = Span::minutes(2);

/// Marks of nodes that have not told them, as they were last seen, and what our own steps did to them since. None at all would say that
/// somebody has taken ours away, or theirs.
pub(crate) fn recall(
    store: &Store,
    backend: &dyn Backend,
    known: Option<&Snapshot>,
    seen: &mut [SeenNode],
) -> Result<(), StoreError> {
    let unread: BTreeSet<NodeName> = backend.unread().into_iter().collect();
    if unread.is_empty() {
        return Ok(());
    }
    let mut left = BTreeMap::new();
    if !known.is_some_and(|known| unread.iter().all(|name| place(known, name).is_some())) {
        left = remembered(store)?;
    }
    for seen in seen.iter_mut().filter(|seen| unread.contains(&seen.node.name)) {
        let name = &seen.node.name;
        let known = known.and_then(|known| Some(known.nodes[place(known, name)?].node.marks.clone()));
        if let Some(marks) = known.or_else(|| left.remove(name)) {
            Arc::make_mut(&mut seen.node).marks = marks;
        }
    }
    Ok(())
}

fn place(snapshot: &Snapshot, name: &NodeName) -> Option<usize> {
    snapshot.nodes.binary_search_by(|record| record.node.name.cmp(name)).ok()
}

/// The marks of all nodes, by what the store has of them.
fn remembered(store: &Store) -> Result<BTreeMap<NodeName, Marks>, StoreError> {
    // What another version left and this one does not understand is as good as nothing.
    let (at, rows) = match snapshot::last_seen(store) {
        Ok(Some((at, cluster))) => (at, cluster.nodes),
        Ok(None) | Err(_) => (Timestamp::MIN, Vec::new()),
    };
    let mut all: BTreeMap<NodeName, Marks> = rows.into_iter().map(|row| (row.node, row.marks)).collect();
    let since = if at == Timestamp::MIN { at } else { at.minus(SHOWS_WITHIN) };
    for case in store.cases(Timestamp::MAX)? {
        let marks = all.entry(case.node.clone()).or_default();
        for (mark, set) in case.marked_since(since) {
            marks.ours.retain(|known| known.kind != mark.kind);
            marks.ours.extend(set.then_some(mark));
        }
    }
    Ok(all)
}
