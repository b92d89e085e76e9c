//! Tests over several nodes, and fault localisation when they fail.
//!
//! A measurement shared by all nodes of a run attributes the fault to none of them. So each node is tested again in a
//! pair with a known-good node: a node that passes is cleared, a node that fails with two different partners is at
//! fault. If all are cleared, neighbours are tested with each other, and a failing pair is reported as a pair.
//!
//! The next trial depends only on the results so far ([`crate::fault_localization`]), never on state kept in this process.

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
    builder: &mut PlanBuilder<'_>,
    request: &PendingCommand,
    (nodes, test, trials): (&NonEmpty<NodeName>, &TestId, &[RunId]),
) -> Option<String> {
    if nodes.len() > MAX_TEST_NODES {
        return Some(format!("{} nodes requested, {MAX_TEST_NODES} is the limit", nodes.len()));
    }
    if let Some(unknown) = nodes.iter().find(|node| builder.find(node).is_none()) {
        return Some(format!("{unknown} is not in the cluster"));
    }
    let Some(test_index) = builder.snapshot.tests.iter().position(|policy| policy.id == *test && policy.multi_node)
    else {
        return Some(format!("{test} is not a multi-node test"));
    };
    let known = |run: &RunId| builder.snapshot.trials.iter().find(|trial| trial.run == *run).cloned();
    let known: Vec<Trial> = trials.iter().filter_map(known).collect();
    match next_trials(nodes, &known) {
        NextStep::Wait => None,
        NextStep::Done(found) => Some(report_fault(builder, test, &known, &found)),
        NextStep::Try(requests, otherwise) => {
            let good = known_good_nodes(builder, test_index, nodes, &requests);
            // Whether a trial may still run, now or when its nodes are free.
            let mut is_possible = known.iter().any(|trial| trial.result == TrialResult::Pending);
            let mut impossible_because = None;
            for trial in requests {
                let trial_nodes = match trial {
                    TrialRequest::Nodes(nodes) => Ok(Some(nodes)),
                    TrialRequest::WithKnownGood { node, not } => partner(builder, &good, &node, &not),
                };
                is_possible |= trial_nodes.is_ok();
                match trial_nodes {
                    Ok(Some(trial_nodes)) => submit(builder, request, test, &trial_nodes),
                    Ok(None) => {}
                    Err(none) => impossible_because = Some(none),
                }
            }
            if is_possible {
                return None;
            }
            let otherwise = match (otherwise, impossible_because) {
                (FaultLocation::Undetermined(_), Some(why)) => FaultLocation::Undetermined(why),
                (found, _) => found,
            };
            Some(report_fault(builder, test, &known, &otherwise))
        }
    }
}

/// Returns the known-good nodes that are not part of the request, best first.
fn known_good_nodes(
    builder: &PlanBuilder<'_>,
    test_index: usize,
    nodes: &[NodeName],
    requests: &[TrialRequest],
) -> Vec<u32> {
    if requests.iter().all(|request| matches!(request, TrialRequest::Nodes(_))) {
        return Vec::new();
    }
    let requested: BTreeSet<&NodeName> = nodes.iter().collect();
    let others = (0_u32..).zip(&builder.snapshot.nodes).filter(|(_, record)| !requested.contains(&record.node.name));
    let mut good: Vec<_> =
        others.filter_map(|(node, record)| Some((known_good_rank(builder, test_index, record)?, node))).collect();
    // Equally good nodes stay in the order of the cluster, by name.
    good.sort();
    good.into_iter().map(|(_, node)| node).collect()
}

/// Returns the node and a free partner, or `None` if no partner is free. An error if the whole cluster has none.
fn partner(
    builder: &PlanBuilder<'_>,
    good: &[u32],
    node: &NodeName,
    not: &BTreeSet<NodeName>,
) -> Result<Option<Vec<NodeName>>, String> {
    let Some(own) = builder.record(node) else { return Ok(None) };
    let other_node = |other: u32| &builder.snapshot.nodes[other as usize].node;
    let fits = |other: &u32| {
        let other = other_node(*other);
        (&other.pool, &other.sku) == (&own.node.pool, &own.node.sku) && !not.contains(&other.name)
    };
    let mut fitting = good.iter().copied().filter(fits).peekable();
    if fitting.peek().is_none() {
        let other = if not.is_empty() { "" } else { "other " };
        return Err(format!("there is no {other}known-good node to test {node} with"));
    }
    let free = fitting.find(|other| builder.accepts_run(*other));
    Ok(free.map(|other| vec![node.clone(), other_node(other).name.clone()]))
}

/// Returns how good a node is known to be, as a sort key: nodes that passed this test come first, then the latest
/// results.
fn known_good_rank(
    builder: &PlanBuilder<'_>,
    test_index: usize,
    record: &NodeRecord,
) -> Option<(bool, Reverse<Option<crate::time::Timestamp>>)> {
    if record.state != NodeState::InService || !record.findings.is_empty() {
        return None;
    }
    let this = &record.test_records[test_index];
    if this.verdict() == Some(Verdict::Pass) {
        return Some((false, Reverse(this.settled())));
    }
    let routine = || builder.snapshot.tests.iter().zip(&record.test_records).filter(|(test, _)| test.routine);
    let all_passed =
        routine().all(|(_, known)| matches!(known.verdict(), Some(Verdict::Pass | Verdict::NotApplicable)));
    let newest =
        routine().filter(|(_, known)| known.verdict() == Some(Verdict::Pass)).filter_map(|(_, known)| known.settled());
    newest.max().filter(|_| all_passed).map(|newest| (true, Reverse(Some(newest))))
}

/// Starts a trial if all its nodes are available now.
fn submit(builder: &mut PlanBuilder<'_>, request: &PendingCommand, test: &TestId, trial_nodes: &[NodeName]) {
    let Some(indices) = NonEmpty::new(trial_nodes.iter().filter_map(|node| builder.find(node)).collect()) else {
        return;
    };
    let tests = NonEmpty::one(test.clone());
    let open = |node: &u32| {
        let repairing = matches!(builder.snapshot.nodes[*node as usize].state, NodeState::Repairing { .. });
        !repairing && builder.accepts_run(*node) && builder.usage.allows_run(builder, *node, &tests)
    };
    if !indices.iter().all(open) {
        return;
    }
    let purpose =
        purpose_with_reason(Purpose::Requested, "operator", format!("requested by {}: {}", request.by, request.why));
    let run = builder.submit_multi_node(&indices, tests, purpose, None);
    let text = format!("trial requested by {}", request.by);
    builder.push_action(Action::StartTrial { command: request.id, run }, "operator", text);
}

/// Reports the nodes or pairs at fault.
fn report_fault(builder: &mut PlanBuilder<'_>, test: &TestId, trials: &[Trial], found: &FaultLocation) -> String {
    let Some(run) = trials.last().map(|trial| trial.run) else { return "no trial ran".to_owned() };
    let mut name = |node: &NodeName, peer: Option<&NodeName>, text: String| {
        builder.touch(node);
        let what = Action::AttributeFault { node: node.clone(), test: test.clone(), peer: peer.cloned(), run };
        builder.push_action(what, if peer.is_some() { "pair" } else { "named" }, text);
    };
    match found {
        FaultLocation::NoFault | FaultLocation::OnlyTogether | FaultLocation::Undetermined(_) => {}
        FaultLocation::Nodes(nodes) => {
            for node in nodes {
                let with = |result: &TrialResult| {
                    let over = trials.iter().filter(|trial| trial.nodes.contains(node) && trial.result == *result);
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
