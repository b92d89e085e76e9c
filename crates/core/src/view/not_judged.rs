//! Measurements without an expected value, over the fleet: one line of attention, never a verdict on a node.

use std::collections::BTreeSet;

use super::{Facts, plural};

/// Returns how many nodes have measurements that nothing gives an expected value for, and the command that adds the
/// values; `None` if there are no such nodes.
pub(super) fn notice(facts: &Facts) -> Option<String> {
    let (mut nodes, mut tests) = (0_usize, BTreeSet::new());
    for record in &facts.snapshot.nodes {
        let open = facts.tests_of(record).filter(|(_, known)| known.has_not_judged());
        let open: Vec<_> = open.map(|(test, _)| &test.id).collect();
        nodes += usize::from(!open.is_empty());
        tests.extend(open);
    }
    (nodes > 0).then(|| {
        let (nodes, tests) = (plural(nodes, "node"), plural(tests.len(), "test"));
        format!("{nodes}: {tests} with values not judged, because no profile has them; `doctor-node profile learn` on a healthy node writes one")
    })
}
