//! The line of attention about programs that disturb the tests of nodes again and again.

use super::{Facts, plural};
use crate::{classify::DISTURBED_REPEATEDLY, finding::OpenFinding, snapshot::NodeRecord};

/// Findings that the line names; the others are counted.
const MAX_NAMED: usize = 3;

/// Returns one line for all nodes whose tests the same program disturbed repeatedly; `None` if there are none.
pub(super) fn attention(facts: &Facts) -> Option<String> {
    let is_repeated = |open: &&OpenFinding| open.finding.reason.as_str() == DISTURBED_REPEATEDLY;
    let of_node = |record: &NodeRecord| {
        let named = |open: &OpenFinding| format!("{}: {}", record.node.name, open.finding.text);
        record.findings.iter().filter(is_repeated).map(named).collect::<Vec<_>>()
    };
    let by_node: Vec<Vec<String>> =
        facts.snapshot.nodes.iter().map(of_node).filter(|named| !named.is_empty()).collect();
    let nodes = by_node.len();
    let all: Vec<String> = by_node.into_iter().flatten().collect();
    let more = match all.len().saturating_sub(MAX_NAMED) {
        0 => String::new(),
        more => format!("; {more} more"),
    };
    let named = all.iter().take(MAX_NAMED).cloned().collect::<Vec<_>>().join("; ");
    (nodes > 0).then(|| {
        format!(
            "{}: the same program disturbs tests repeatedly ({named}{more}): keep it off nodes that are tested, or \
             hold the nodes",
            plural(nodes, "node")
        )
    })
}
