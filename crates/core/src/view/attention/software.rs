//! Software that tests need and nodes do not have: one notice for each program.

use super::{AttentionItem, AttentionKind, Urgency};
use crate::{
    hostlist,
    ids::NodeName,
    software::Software,
    view::{Facts, plural, service_state::StoredStatus},
};

/// Longer lists of nodes are not in the sentence.
const MAX_LIST: usize = 80;

/// Returns one notice for each software that tests need and that nodes do not have.
pub(super) fn items(facts: &Facts, stored: &StoredStatus) -> Vec<AttentionItem> {
    Software::ALL.iter().filter_map(|software| item(facts, stored, *software)).collect()
}

fn item(facts: &Facts, stored: &StoredStatus, software: Software) -> Option<AttentionItem> {
    let of_software = stored.missing_software.iter().filter(|(missing, ..)| *missing == software);
    let mut nodes: Vec<NodeName> = of_software.clone().flat_map(|(.., nodes)| nodes).cloned().collect();
    nodes.retain(|name| facts.node(name).is_some_and(|(_, is_listed)| is_listed));
    nodes.sort_unstable();
    nodes.dedup();
    if nodes.is_empty() {
        return None;
    }
    let tests: Vec<&str> = of_software.map(|(_, test, _)| test.as_str()).collect();
    let is_everywhere = nodes.len() == facts.snapshot.nodes.len();
    let (count, list) = (plural(nodes.len(), "node"), hostlist::fold(&nodes));
    let location = match (is_everywhere, list.len() <= MAX_LIST) {
        (true, _) => format!("on any of the {count}"),
        (false, true) => format!("on {count} ({list})"),
        (false, false) => format!("on {count}"),
    };
    let (name, tests, remedy) = (software.name(), tests.join(", "), software.remedy());
    let text = format!("{name} is not installed {location}: {tests} not applicable; {remedy}");
    Some(AttentionItem::new(AttentionKind::MissingSoftware, Urgency::Notice, text).about(nodes))
}
