//! Validation jobs that end in a row without a result, and the reason that they share.

use std::collections::{BTreeMap, BTreeSet};

use super::{AttentionItem, AttentionKind, Urgency, grouping::subject};
use crate::{
    ids::NodeName,
    last_output::without_names,
    view::service_state::{EndedRun, RunFailure, StoredStatus},
};

/// As many failures in a row are no coincidence.
const IN_A_ROW: usize = 3;
/// Nor are as many nodes, and this share of those that were tested, whose last jobs failed for the same reason: a large fleet does
/// not test one of them three times while its latest runs are considered.
const TOGETHER: usize = 3;
const ONE_IN: usize = 10;
/// From this share on the fault is that of most of a pool.
const CRITICAL_ONE_IN: usize = 4;

/// Returns the failure of all jobs, or else of those on some nodes.
pub(super) fn items(stored: &StoredStatus) -> Vec<AttentionItem> {
    let runs = &stored.recent_runs;
    let streak: Vec<&EndedRun> = runs.iter().take_while(|run| run.failure.is_some()).collect();
    let nodes = nodes_of(&streak);
    if streak.len() >= IN_A_ROW && nodes.len() > 1 {
        let what = format!("the last {} validation jobs gave no result, on {}", streak.len(), subject(&nodes));
        return item(Urgency::Critical, &what, nodes, &streak).into_iter().collect();
    }
    failing_nodes(runs)
}

fn nodes_of(runs: &[&EndedRun]) -> Vec<NodeName> {
    let nodes: BTreeSet<&NodeName> = runs.iter().flat_map(|run| &run.nodes).collect();
    nodes.into_iter().cloned().collect()
}

/// Returns nodes on which the last jobs gave no result while those on other nodes did, by what the jobs said.
fn failing_nodes(runs: &[EndedRun]) -> Vec<AttentionItem> {
    let mut by_node: BTreeMap<&NodeName, Vec<&EndedRun>> = BTreeMap::new();
    for run in runs {
        run.nodes.iter().for_each(|node| by_node.entry(node).or_default().push(run));
    }
    // All streaks by reason, and those that are too long for a coincidence by themselves.
    let mut by_reason: BTreeMap<Reason, (Vec<&EndedRun>, Vec<&EndedRun>)> = BTreeMap::new();
    for of_node in by_node.values() {
        let streak: Vec<&EndedRun> = of_node.iter().copied().take_while(|run| run.failure.is_some()).collect();
        if let Some((failure, _)) = most_frequent(&streak) {
            let (all, long) = by_reason.entry(reason_of(failure)).or_default();
            all.extend(&streak);
            long.extend(streak.iter().filter(|_| streak.len() >= IN_A_ROW));
        }
    }
    let of_reason = |(all, long): (Vec<&EndedRun>, Vec<&EndedRun>)| {
        let together = nodes_of(&all).len();
        let is_common = together >= TOGETHER && together * ONE_IN >= by_node.len();
        let is_critical = is_common && together * CRITICAL_ONE_IN >= by_node.len();
        let streak = if is_common { all } else { long };
        let nodes = nodes_of(&streak);
        let what = format!("{}: the last validation jobs gave no result", subject(&nodes));
        item(if is_critical { Urgency::Critical } else { Urgency::Warning }, &what, nodes, &streak)
    };
    by_reason.into_values().filter_map(of_reason).collect()
}

/// What jobs that failed for the same reason have in common.
type Reason = (&'static str, Option<String>);

fn reason_of(failure: &RunFailure) -> Reason {
    (failure.code, failure.text.as_deref().map(without_names))
}

/// Returns the failure that most of the runs share, and how many do.
fn most_frequent<'a>(runs: &[&'a EndedRun]) -> Option<(&'a RunFailure, usize)> {
    let mut counts: BTreeMap<Reason, (&RunFailure, usize)> = BTreeMap::new();
    for failure in runs.iter().filter_map(|run| run.failure.as_ref()) {
        counts.entry(reason_of(failure)).or_insert((failure, 0)).1 += 1;
    }
    // A failure with words tells more than one without.
    counts.into_values().max_by_key(|(failure, count)| (failure.text.is_some(), *count))
}

fn item(urgency: Urgency, what: &str, nodes: Vec<NodeName>, streak: &[&EndedRun]) -> Option<AttentionItem> {
    let (failure, count) = most_frequent(streak)?;
    let newest = streak.iter().max_by_key(|run| run.at)?;
    let share = if count == streak.len() { String::new() } else { format!(" ({count} of {})", streak.len()) };
    let said = failure.text.as_ref().map_or_else(String::new, |text| format!(": {text}"));
    let text = format!("{what}: {}{share}{said}", failure.code);
    let item = AttentionItem::new(AttentionKind::ValidationFailing, urgency, text).about(nodes);
    Some(item.since(streak.iter().map(|run| run.at).min()).next(format!("doctor log {}", newest.run)))
}
