//! Measurements without an expected value, over the fleet: one notice, never a verdict on a node.

use std::collections::BTreeSet;

use super::{AttentionItem, AttentionKind, Urgency};
use crate::view::{Facts, plural};

/// Returns how many nodes have measurements that nothing gives an expected value for, and the command that adds the
/// values; `None` if there are no such nodes.
pub(super) fn item(facts: &Facts) -> Option<AttentionItem> {
    let (mut nodes, mut tests) = (Vec::new(), BTreeSet::new());
    for record in &facts.snapshot.nodes {
        let open = facts.tests_of(record).filter(|(_, known)| known.has_not_judged());
        let open: Vec<_> = open.map(|(test, _)| &test.id).collect();
        if !open.is_empty() {
            nodes.push(record.name());
        }
        tests.extend(open);
    }
    (!nodes.is_empty()).then(|| {
        let text = format!(
            "{}: {} with values not judged, because no profile has them; a healthy node can write one",
            plural(nodes.len(), "node"),
            plural(tests.len(), "test")
        );
        let item = AttentionItem::new(AttentionKind::NotJudged, Urgency::Notice, text).about(nodes);
        item.next("doctor-node profile learn")
    })
}
