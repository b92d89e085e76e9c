//! Nodes with the same trouble are one item.

use std::collections::BTreeMap;

use super::{AttentionItem, AttentionKind, Urgency};
use crate::{
    hostlist,
    ids::{CaseId, NodeName},
    time::Timestamp,
    view::{Facts, formatting::short_duration, plural},
};

/// Longer host lists are not in the sentence.
const MAX_LIST: usize = 80;
/// Longer reasons are cut: a sentence is read on a phone.
const MAX_WHY: usize = 200;

/// The trouble of one node.
#[derive(Debug)]
pub(super) struct NodeTrouble {
    pub kind: AttentionKind,
    pub urgency: Urgency,
    pub node: NodeName,
    pub since: Option<Timestamp>,
    pub case: Option<CaseId>,
    /// What is said of the node: `waits for an operator`.
    pub what: String,
    /// Why, in words. Of several nodes, that of the oldest trouble is shown.
    pub why: String,
    /// Nodes with the same kind of reason are grouped.
    pub why_code: String,
    pub next: NextCommand,
}

/// The command of an item.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum NextCommand {
    /// A command on all the nodes, such as `doctor release NODES --why …`: the words before and after them.
    OnNodes(&'static str, String),
    /// `doctor why` with the first node.
    Why,
}

impl NextCommand {
    /// A command on all the nodes that needs a reason.
    pub(super) fn with_reason(command: &'static str) -> Self {
        Self::OnNodes(command, " --why …".to_owned())
    }

    fn text(&self, nodes: &[NodeName]) -> String {
        match self {
            Self::OnNodes(before, after) => format!("{before} {}{after}", hostlist::fold(nodes)),
            Self::Why => format!("doctor why {}", nodes.first().map_or("NODE", NodeName::as_str)),
        }
    }
}

/// Returns one item for all nodes with the same kind, urgency, reason and command.
pub(super) fn grouped(facts: &Facts, troubles: Vec<NodeTrouble>) -> Vec<AttentionItem> {
    let mut groups: BTreeMap<_, Vec<NodeTrouble>> = BTreeMap::new();
    for trouble in troubles {
        let key = (trouble.kind, trouble.urgency, trouble.what.clone(), trouble.why_code.clone(), trouble.next.clone());
        groups.entry(key).or_default().push(trouble);
    }
    groups.into_values().filter_map(|group| item(facts, &group)).collect()
}

fn item(facts: &Facts, group: &[NodeTrouble]) -> Option<AttentionItem> {
    let oldest = group.iter().min_by_key(|trouble| (trouble.since.unwrap_or(Timestamp::MAX), trouble.node.clone()))?;
    let mut nodes: Vec<NodeName> = group.iter().map(|trouble| trouble.node.clone()).collect();
    nodes.sort_unstable();
    nodes.dedup();
    let age = oldest.since.map_or_else(String::new, |since| format!(" for {}", short_duration(facts.now.since(since))));
    let (what, why) = (&oldest.what, shortened(&oldest.why));
    let why = match (why.is_empty(), group.iter().any(|other| other.why != oldest.why)) {
        (true, _) => String::new(),
        (false, true) => format!(": {why}; others likewise"),
        (false, false) => format!(": {why}"),
    };
    let text = format!("{}: {what}{age}{why}", subject(&nodes));
    let case = oldest.case.filter(|_| nodes.len() == 1);
    let next = Some(oldest.next.text(&nodes));
    Some(AttentionItem { kind: oldest.kind, urgency: oldest.urgency, since: oldest.since, nodes, text, next, case })
}

/// Names one node, or counts several and names them if the list is short.
pub(super) fn subject(nodes: &[NodeName]) -> String {
    match (nodes, folded(nodes)) {
        ([node], _) => node.to_string(),
        (_, Some(folded)) => format!("{} ({folded})", plural(nodes.len(), "node")),
        (_, None) => plural(nodes.len(), "node"),
    }
}

/// Returns the names as a host list; `None`: it is too long for a sentence.
pub(super) fn folded(nodes: &[NodeName]) -> Option<String> {
    Some(hostlist::fold(nodes)).filter(|folded| folded.len() <= MAX_LIST)
}

fn shortened(why: &str) -> String {
    let mut short: String = why.chars().take(MAX_WHY).collect();
    if why.chars().count() > MAX_WHY {
        short.push('…');
    }
    short
}
