//! Tests over several nodes, and fault localisation when they fail.
//!
//! A measurement shared by all nodes of a run attributes the fault to none of them. So each node is tested again in a
//! pair with a known-good node: a node that passes is cleared, a node that fails with two different partners is at
//! fault. If all are cleared, neighbours are tested with each other, and a failing pair is reported as a pair.
//!
//! The next trial depends only on the results so far ([`crate::trials`]), never on state kept in this process.

use std::{cmp::Reverse, collections::BTreeSet};

use super::{
    Action,
    builder::{PlanBuilder, purpose_with_reason},
};
use crate::{
    fault_localization::{FaultLocation, NextStep, TrialRequest, next_trials},
    finding::Verdict,
    ids::{NodeName, RunId, TestId},
    lifecycle::NodeState,
    run::{NonEmpty, Purpose},
    snapshot::{NodeRecord, PendingCommand, Trial, TrialResult},
};

/// Largest number of nodes in one request.
pub const MAX_TEST_NODES: usize = 1024;

/// Takes the next step of a request. Returns the conclusion once there is one.
pub(super) fn plan(
    draft: &mut PlanBuilder<'_>,
    request: &PendingCommand,
    (nodes, test, trials): (&NonEmpty<NodeName>, &TestId, &[RunId]),
) -> Option<String> {
    if nodes.len() > MAX_TEST_NODES {
        return Some(format!("{} nodes requested, {MAX_TEST_NODES} is the limit", nodes.len()));
    }
    if let Some(gone) = nodes.iter().find(|node| draft.find(node).is_none()) {
        return Some(format!("{gone} is not in the cluster"));
    }
    let Some(place) = draft.snapshot.tests.iter().position(|policy| policy.id == *test && policy.together) else {
        return Some(format!("{test} is not a multi-node test"));
    };
    let known = |run: &RunId| draft.snapshot.trials.iter().find(|trial| trial.run == *run).cloned();
    let known: Vec<Trial> = trials.iter().filter_map(known).collect();
    match next_trials(nodes, &known) {
        NextStep::Wait => None,
        NextStep::Done(found) => Some(report_fault(draft, test, &known, &found)),
        NextStep::Try(wanted, otherwise) => {
            let good = known_good_nodes(draft, place, nodes, &wanted);
            // Whether a trial may still run, now or when its nodes are free.
            let mut hope = known.iter().any(|trial| trial.result == TrialResult::Pending);
            let mut hopeless = None;
            for wanted in wanted {
                let over = match wanted {
                    TrialRequest::Nodes(nodes) => Ok(Some(nodes)),
                    TrialRequest::WithKnownGood { node, not } => partner(draft, &good, &node, &not),
                };
                hope |= over.is_ok();
                match over {
                    Ok(Some(over)) => submit(draft, request, test, &over),
                    Ok(None) => {}
                    Err(none) => hopeless = Some(none),
                }
            }
            if hope {
                return None;
            }
            let otherwise = match (otherwise, hopeless) {
                (FaultLocation::Undetermined(_), Some(why)) => FaultLocation::Undetermined(why),
                (found, _) => found,
            };
            Some(report_fault(draft, test, &known, &otherwise))
        }
    }
}

/// Returns the known-good nodes that are not part of the request, best first.
fn known_good_nodes(draft: &PlanBuilder<'_>, place: usize, nodes: &[NodeName], wanted: &[TrialRequest]) -> Vec<u32> {
    if wanted.iter().all(|wanted| matches!(wanted, TrialRequest::Nodes(_))) {
        return Vec::new();
    }
    let asked: BTreeSet<&NodeName> = nodes.iter().collect();
    let others = (0_u32..).zip(&draft.snapshot.nodes).filter(|(_, record)| !asked.contains(&record.node.name));
    let mut good: Vec<_> =
        others.filter_map(|(node, record)| Some((known_good_rank(draft, place, record)?, node))).collect();
    // Equally good nodes stay in the order of the cluster, by name.
    good.sort();
    good.into_iter().map(|(_, node)| node).collect()
}

/// Returns the node and a free partner, or `None` if no partner is free. An error if the whole cluster has none.
fn partner(
    draft: &PlanBuilder<'_>,
    good: &[u32],
    node: &NodeName,
    not: &BTreeSet<NodeName>,
) -> Result<Option<Vec<NodeName>>, String> {
    let Some(own) = draft.record(node) else { return Ok(None) };
    let other_node = |other: u32| &draft.snapshot.nodes[other as usize].node;
    let fits = |other: &u32| {
        let other = other_node(*other);
        (&other.pool, &other.sku) == (&own.node.pool, &own.node.sku) && !not.contains(&other.name)
    };
    let mut fitting = good.iter().copied().filter(fits).peekable();
    if fitting.peek().is_none() {
        let other = if not.is_empty() { "" } else { "other " };
        return Err(format!("there is no {other}known-good node to test {node} with"));
    }
    let free = fitting.find(|other| draft.accepts_run(*other));
    Ok(free.map(|other| vec![node.clone(), other_node(other).name.clone()]))
}

/// Returns how good a node is known to be, as a sort key: nodes that passed this test come first, then the latest
/// results.
fn known_good_rank(
    draft: &PlanBuilder<'_>,
    place: usize,
    record: &NodeRecord,
) -> Option<(bool, Reverse<Option<crate::time::Timestamp>>)> {
    if record.state != NodeState::InService || !record.findings.is_empty() {
        return None;
    }
    let this = &record.test_records[place];
    if this.verdict() == Some(Verdict::Pass) {
        return Some((false, Reverse(this.settled())));
    }
    let routine = || draft.snapshot.tests.iter().zip(&record.test_records).filter(|(test, _)| test.routine);
    let well = routine().all(|(_, known)| matches!(known.verdict(), Some(Verdict::Pass | Verdict::NotApplicable)));
    let newest =
        routine().filter(|(_, known)| known.verdict() == Some(Verdict::Pass)).filter_map(|(_, known)| known.settled());
    newest.max().filter(|_| well).map(|newest| (true, Reverse(Some(newest))))
}

/// Starts a trial if all its nodes are available now.
fn submit(draft: &mut PlanBuilder<'_>, request: &PendingCommand, test: &TestId, over: &[NodeName]) {
    let Some(places) = NonEmpty::new(over.iter().filter_map(|node| draft.find(node)).collect()) else { return };
    let tests = NonEmpty::one(test.clone());
    let open = |node: &u32| {
        let repairing = matches!(draft.snapshot.nodes[*node as usize].state, NodeState::Repairing { .. });
        !repairing && draft.accepts_run(*node) && draft.usage.allows_run(draft, *node, &tests)
    };
    if !places.iter().all(open) {
        return;
    }
    let asked =
        purpose_with_reason(Purpose::Requested, "operator", format!("requested by {}: {}", request.by, request.why));
    let run = draft.submit_multi_node(&places, tests, asked, None);
    let text = format!("trial requested by {}", request.by);
    draft.push_action(Action::Try { request: request.id, run }, "operator", text);
}

/// Reports the nodes or pairs at fault.
fn report_fault(draft: &mut PlanBuilder<'_>, test: &TestId, trials: &[Trial], found: &FaultLocation) -> String {
    let Some(run) = trials.last().map(|trial| trial.run) else { return "no trial ran".to_owned() };
    let mut name = |node: &NodeName, peer: Option<&NodeName>, text: String| {
        draft.touch(node);
        let what = Action::Name { node: node.clone(), test: test.clone(), peer: peer.cloned(), run };
        draft.push_action(what, if peer.is_some() { "pair" } else { "named" }, text);
    };
    match found {
        FaultLocation::NoFault | FaultLocation::OnlyTogether | FaultLocation::Undetermined(_) => {}
        FaultLocation::Nodes(nodes) => {
            for node in nodes {
                let with = |said: &TrialResult| {
                    let over = trials.iter().filter(|trial| trial.nodes.contains(node) && trial.result == *said);
                    over.flat_map(|trial| trial.nodes.iter())
                        .filter(|other| *other != node)
                        .cloned()
                        .collect::<BTreeSet<_>>()
                };
                // A node that failed by its own measurement has a finding already.
                if !trials
                    .iter()
                    .any(|trial| matches!(&trial.result, TrialResult::AtFault(named) if named.contains(node)))
                {
                    name(
                        node,
                        None,
                        format!("fails together with each of {}", listed(with(&TrialResult::Failed).iter())),
                    );
                }
            }
        }
        FaultLocation::Pairs(pairs) => {
            for (one, other) in pairs {
                let text = |peer| format!("fails together with {peer}, and passes with others");
                name(one, Some(other), text(other));
                name(other, Some(one), text(one));
            }
        }
    }
    found.to_string()
}

fn listed<'a>(names: impl Iterator<Item = &'a NodeName>) -> String {
    names.map(NodeName::as_str).collect::<Vec<_>>().join(", ")
}
