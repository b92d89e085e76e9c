//! Programs that disturb the tests of nodes again and again.

use super::{AttentionItem, AttentionKind, Urgency};
use crate::{
    classify::DISTURBED_REPEATEDLY,
    finding::OpenFinding,
    view::{Facts, plural},
};

/// Findings that the sentence names; the others are counted.
const MAX_NAMED: usize = 3;

/// Returns one item for all nodes whose tests the same program disturbed repeatedly; `None` if there are none.
pub(super) fn item(facts: &Facts) -> Option<AttentionItem> {
    let is_repeated = |open: &&OpenFinding| open.finding.reason.as_str() == DISTURBED_REPEATEDLY;
    let (mut nodes, mut named, mut since) = (Vec::new(), Vec::new(), None);
    for record in &facts.snapshot.nodes {
        let before = named.len();
        for open in record.findings.iter().filter(is_repeated) {
            named.push(format!("{}: {}", record.node.name, open.finding.text));
            since = Some(since.map_or(open.first_seen, |since| open.first_seen.min(since)));
        }
        nodes.extend((named.len() > before).then(|| record.name()));
    }
    let first = nodes.first().cloned()?;
    let more = match named.len().saturating_sub(MAX_NAMED) {
        0 => String::new(),
        more => format!("; {more} more"),
    };
    named.truncate(MAX_NAMED);
    let text = format!(
        "{}: the same program disturbs tests repeatedly ({}{more}): keep it off nodes that are tested, or hold the nodes",
        plural(nodes.len(), "node"),
        named.join("; ")
    );
    let item = AttentionItem::new(AttentionKind::Disturbed, Urgency::Warning, text).about(nodes).since(since);
    Some(item.next(format!("doctor why {first}")))
}
