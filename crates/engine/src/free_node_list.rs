//! The free-node list: the nodes that users may have now, one name on each line, as a file of the shared directory.

use doctor_core::snapshot::{NodeRecord, Snapshot};

/// Its name below `metadata/`.
pub(crate) const FILE: &str = "free_nodes.txt";

/// Returns the list. Not every cluster keeps users off nodes that are out of service; the list does.
pub(crate) fn text(snapshot: &Snapshot) -> String {
    let is_offered = |record: &&NodeRecord| record.node.occupancy.is_free() && !record.state.is_out_of_service();
    let mut list = String::new();
    for record in snapshot.nodes.iter().filter(is_offered) {
        list.push_str(record.node.name.as_str());
        list.push('\n');
    }
    list
}
