//! The command `repair`: one reset, reboot or replacement of each node, by an operator's decision.
//!
//! It needs no permission in the policy. It is rejected where the cluster cannot do it, and, unlike every other command, in
//! mode `observe`, while the pool of a node is paused, and while another party keeps a node out of service: what is promised
//! there is that nothing is restarted.

use doctor_core::{
    case::Repair,
    hostlist::Selector,
    lifecycle::NodeState,
    plan,
    snapshot::{Capabilities, CommandKind, NodeRecord},
    view::{Facts, plural},
};

use super::{
    CommandError, OverLimit, PreparedCommand, StoreWrite,
    nodes::{NodeOutcome, SelectedNodes, UNLISTED_TEXT},
    pause_precondition,
};

pub(super) fn prepare(
    facts: &Facts,
    selectors: &[Selector],
    what: Repair,
    evict: bool,
) -> Result<PreparedCommand, CommandError> {
    let selected = SelectedNodes::select(facts, selectors)?;
    check_capability(facts, what)?;
    for (record, listed) in &selected.nodes {
        if *listed {
            check_node(facts, record, what)?;
        }
    }
    let work = match (evict, facts.snapshot.capabilities.evict) {
        (true, true) => "user work evicted",
        (true, false) => "user work may finish (this cluster cannot evict it)",
        (false, _) => "after its user work has ended",
    };
    let (changes, writes) = selected.describe_each(|record, listed| {
        if !listed {
            return NodeOutcome::unchanged(format!("{UNLISTED_TEXT}; nothing changes"));
        }
        let then = match what {
            Repair::Replace => format!("{what}, {work}; the machine that takes its name is tested"),
            Repair::Reset | Repair::Reboot => format!("{what}, {work}, then requalified"),
        };
        let state = record.state.as_str();
        let text = match (selected.hold_text(record), &record.state) {
            (Some(held), _) => format!("{held}; after the hold: {then}"),
            (None, NodeState::Held { .. }) => format!("{state}; after the hold: {then}"),
            (None, NodeState::InService | NodeState::Suspect) => format!("{state} -> out of service, {then}"),
            (None, NodeState::Repairing { step, .. }) => format!("{state}: after its {step}: {then}"),
            (None, NodeState::Quarantined | NodeState::Requalifying { .. } | NodeState::Out) => {
                format!("{state} -> {then}")
            }
        };
        let command = CommandKind::Repair { node: record.node.name.clone(), step: what, evict };
        NodeOutcome { text, writes: vec![StoreWrite::Request(command)] }
    })?;
    let mut pools: Vec<_> = selected.nodes.iter().map(|(record, _)| Some(&record.node.pool)).collect();
    pools.sort();
    pools.dedup();
    let pauses = std::iter::once(None).chain(pools).map(|pool| pause_precondition(facts, pool));
    let names = selected.node_names();
    let is_held = selected.nodes.iter().any(|(record, _)| selected.hold_text(record).is_some());
    let release = if is_held { "ends the hold, and a second one withdraws it" } else { "withdraws it" };
    Ok(PreparedCommand {
        plan: format!("Would {what} {} ({}).", selected.count_text(), selected.folded_names()),
        changes,
        done: format!("Requested {what} of {}.", plural(writes.len(), "node")),
        next: format!(
            "`doctor why {0}` shows its progress; `doctor release {0} --why …` {release} before it has begun",
            selected.example_name()
        ),
        writes,
        preconditions: selected.preconditions().into_iter().chain(pauses).collect(),
        over_limit: OverLimit::of(facts, &names),
        nodes: names,
    })
}

/// Fails if the cluster cannot do it.
fn check_capability(facts: &Facts, what: Repair) -> Result<(), CommandError> {
    let caps = &facts.snapshot.capabilities;
    if facts.observed_at.is_none() {
        let why = "the controller has not observed the cluster yet, so it is unknown what can be repaired".to_owned();
        let instead = "start `doctor serve`, or `doctor run` once, and repeat the command".to_owned();
        return Err(CommandError::Refused { why, instead });
    }
    if plan::can_repair(caps, what) {
        return Ok(());
    }
    let why = format!("this cluster cannot {what} a node, or its configuration does not enable it");
    Err(CommandError::Refused { why, instead: accepted_steps(caps) })
}

fn accepted_steps(caps: &Capabilities) -> String {
    let can: Vec<String> = Repair::ALL
        .iter()
        .filter(|repair| plan::can_repair(caps, **repair))
        .map(|repair| format!("--step {repair}"))
        .collect();
    match can.is_empty() {
        true => "no repair step; `doctor quarantine NODE --why …` takes the node out of service".to_owned(),
        false => can.join(" or "),
    }
}

/// Fails if the mode, a pause, another party or the node itself prevents the repair.
fn check_node(facts: &Facts, record: &NodeRecord, what: Repair) -> Result<(), CommandError> {
    if let Some(block) = plan::repair_block(&facts.snapshot, &record.node.pool) {
        return Err(CommandError::Refused { why: block.text(), instead: block.ended_by() });
    }
    if let Some(mark) = record.node.marks.blocking_foreign_mark() {
        return Err(CommandError::Refused {
            why: format!("{} keeps {} out of service ({})", mark.by, record.node.name, mark.text),
            instead: format!("the command again once {} has removed that mark", mark.by),
        });
    }
    match record.node.manual_replacement().filter(|_| what == Repair::Replace) {
        Some(how) => Err(CommandError::Refused {
            why: format!("{} is replaced by hand: {how}", record.node.name),
            instead: "--step reset or --step reboot, where the cluster can do it".to_owned(),
        }),
        None => Ok(()),
    }
}
