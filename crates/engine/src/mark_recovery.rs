//! Mark recovery: restores the marks of nodes that did not report them, from the last snapshot and the case log.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use doctor_backend::{Backend, ObservedNode};
use doctor_core::{
    ids::NodeName,
    node::Marks,
    snapshot::Snapshot,
    time::{Span, Timestamp},
};
use doctor_store::{Store, StoreError};

use crate::snapshot;

/// A mark that was set up to this long before the last observation may be missing from it.
const MARK_DELAY: Span = Span::minutes(2);

/// Restores the marks of nodes that did not report them: as last observed, plus the controller's own steps since
/// then. Without marks, such a node would look as if another party had removed them.
pub(crate) fn restore_marks(
    store: &Store,
    backend: &dyn Backend,
    known: Option<&Snapshot>,
    observed: &mut [ObservedNode],
) -> Result<(), StoreError> {
    let unread: BTreeSet<NodeName> = backend.nodes_with_unread_marks().into_iter().collect();
    if unread.is_empty() {
        return Ok(());
    }
    let mut stored = BTreeMap::new();
    if !known.is_some_and(|known| unread.iter().all(|name| node_index(known, name).is_some())) {
        stored = stored_marks(store)?;
    }
    for observed in observed.iter_mut().filter(|observed| unread.contains(&observed.node.name)) {
        let name = &observed.node.name;
        let known = known.and_then(|known| Some(known.nodes[node_index(known, name)?].node.marks.clone()));
        if let Some(marks) = known.or_else(|| stored.remove(name)) {
            Arc::make_mut(&mut observed.node).marks = marks;
        }
    }
    Ok(())
}

fn node_index(snapshot: &Snapshot, name: &NodeName) -> Option<usize> {
    snapshot.nodes.binary_search_by(|record| record.node.name.cmp(name)).ok()
}

/// Returns the marks of all nodes according to the store.
fn stored_marks(store: &Store) -> Result<BTreeMap<NodeName, Marks>, StoreError> {
    // State from another version that this one cannot parse counts as missing.
    let (at, rows) = match snapshot::last_observed(store) {
        Ok(Some((at, cluster))) => (at, cluster.nodes),
        Ok(None) | Err(_) => (Timestamp::MIN, Vec::new()),
    };
    let mut all: BTreeMap<NodeName, Marks> = rows.into_iter().map(|row| (row.node, row.marks)).collect();
    let since = if at == Timestamp::MIN { at } else { at.minus(MARK_DELAY) };
    for case in store.cases(Timestamp::MAX)? {
        let marks = all.entry(case.node.clone()).or_default();
        for (mark, set) in case.mark_changes_since(since) {
            marks.ours.retain(|known| known.kind != mark.kind);
            marks.ours.extend(set.then_some(mark));
        }
    }
    Ok(all)
}
