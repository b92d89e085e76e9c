//! Cases that wait for an operator, steps that the policy leaves to an operator, other nodes out of service, and requested
//! repairs that wait.

use std::collections::BTreeSet;

use super::{
    AttentionItem, AttentionKind, Urgency,
    grouping::{NextCommand, NodeTrouble, grouped},
};
use crate::{
    case::{Advice, Case, Step, StepKind},
    finding::Severity,
    ids::NodeName,
    lifecycle::NodeState,
    plan::{self, WaitCause},
    snapshot::{CommandKind, NodeRecord},
    time::{Span, Timestamp},
    view::{Facts, explain_node, service_state::StoredStatus},
};

/// A node that has been out of service or has waited for this long needs more than patience.
const LONG: Span = Span::days(1);

pub(super) fn items(facts: &Facts, stored: &StoredStatus) -> Vec<AttentionItem> {
    let mut troubles = Vec::new();
    for case in facts.snapshot.cases.iter().filter(|case| case.is_open()) {
        // A node that an operator holds is in an operator's hands.
        let record = facts.node(&case.node).map(|(record, _)| record);
        if record.is_some_and(|record| record.hold_at(facts.now).is_some()) {
            continue;
        }
        let why = case_reason(case, record);
        troubles.extend(waiting(facts, stored, case, &why).or_else(|| proposal(facts, stored, case, &why)));
    }
    let listed: BTreeSet<NodeName> = troubles.iter().map(|trouble| trouble.node.clone()).collect();
    let records = facts.snapshot.nodes.iter().filter(|record| record.state.is_out_of_service());
    let others = records.filter(|record| !listed.contains(&record.node.name) && record.hold_at(facts.now).is_none());
    troubles.extend(others.map(|record| out_of_service(facts, record)));
    troubles.extend(waiting_repairs(facts));
    grouped(facts, troubles)
}

/// Why a case exists: a code to group by, and words.
struct CaseReason {
    code: String,
    text: String,
}

/// Returns the worst finding; without one, the reason of the first step, such as an operator's.
fn case_reason(case: &Case, record: Option<&NodeRecord>) -> CaseReason {
    let open = record.into_iter().flat_map(|record| &record.findings).map(|open| &open.finding);
    let worst = case.findings.iter().chain(open).max_by_key(|finding| finding.severity);
    let step = case.steps.first().filter(|step| !step.text.is_empty());
    match (worst, step) {
        (Some(finding), _) if finding.severity > Severity::Monitor => {
            CaseReason { code: finding.reason.to_string(), text: finding.text.clone() }
        }
        (_, Some(step)) => CaseReason { code: step.text.clone(), text: step.text.clone() },
        (Some(finding), None) => CaseReason { code: finding.reason.to_string(), text: finding.text.clone() },
        (None, None) => CaseReason { code: String::new(), text: String::new() },
    }
}

/// Returns the trouble of a case that was handed over. It becomes critical after a day, unless an operator has
/// acknowledged it.
fn waiting(facts: &Facts, stored: &StoredStatus, case: &Case, why: &CaseReason) -> Option<NodeTrouble> {
    let since = case.waits_since()?;
    let acknowledged = stored.acknowledged.get(&case.id);
    let urgency = match acknowledged {
        Some(_) => Urgency::Notice,
        None if facts.now.since(since) > LONG => Urgency::Critical,
        None => Urgency::Warning,
    };
    let advice = case.advice.map_or_else(String::new, |advice| format!(" (recommendation: {advice})"));
    Some(NodeTrouble {
        kind: AttentionKind::CaseWaiting,
        urgency,
        node: case.node.clone(),
        since: Some(since),
        case: Some(case.id),
        what: with_acknowledgement(&format!("waiting for an operator{advice}"), acknowledged),
        why: why.text.clone(),
        why_code: why.code.clone(),
        next: resolution(case),
    })
}

fn with_acknowledgement(what: &str, by: Option<&String>) -> String {
    by.map_or_else(|| what.to_owned(), |by| format!("acknowledged by {by}, {what}"))
}

/// Returns the command that resolves a case that was handed over.
fn resolution(case: &Case) -> NextCommand {
    let proposed = case.open_proposals().find_map(|step| repair_word(step.what));
    let advised = match case.advice {
        Some(Advice::Reboot) => Some("reboot"),
        Some(Advice::Replace) => Some("replace"),
        Some(Advice::Return | Advice::ReturnFlagged | Advice::ExamineAgain) | None => None,
    };
    proposed.or(advised).map_or_else(|| NextCommand::with_reason("doctor release"), repair)
}

/// Returns the word of `doctor repair --step` for a step; `None`: it is none of its steps.
const fn repair_word(step: StepKind) -> Option<&'static str> {
    match step {
        StepKind::Reset | StepKind::Reboot | StepKind::Replace => Some(step.code()),
        _ => None,
    }
}

fn repair(step: &'static str) -> NextCommand {
    NextCommand::OnNodes("doctor repair", format!(" --step {step} --why …"))
}

fn proposal(facts: &Facts, stored: &StoredStatus, case: &Case, why: &CaseReason) -> Option<NodeTrouble> {
    let steps: Vec<&Step> = case.open_proposals().collect();
    let since: Timestamp = steps.iter().map(|step| step.at).min()?;
    let names: Vec<&str> = steps.iter().map(|step| step.what.code()).collect();
    let acknowledged = stored.acknowledged.get(&case.id);
    let long = facts.now.since(since) > LONG;
    let next = match steps.iter().find_map(|step| repair_word(step.what)) {
        Some(step) => repair(step),
        None if steps.iter().any(|step| step.what == StepKind::Mark) => NextCommand::with_reason("doctor quarantine"),
        None => NextCommand::Why,
    };
    Some(NodeTrouble {
        kind: AttentionKind::Proposal,
        urgency: match (acknowledged, long) {
            (Some(_), _) => Urgency::Notice,
            (None, true) => Urgency::Critical,
            (None, false) => Urgency::Warning,
        },
        node: case.node.clone(),
        since: Some(since),
        case: Some(case.id),
        what: with_acknowledgement(&format!("waiting for an operator to {}", names.join(", ")), acknowledged),
        why: why.text.clone(),
        why_code: why.code.clone(),
        next,
    })
}

/// Returns the trouble of a node that the controller works on, or that has no case any more.
fn out_of_service(facts: &Facts, record: &NodeRecord) -> NodeTrouble {
    let case = facts.snapshot.cases.iter().find(|case| Some(case.id) == record.case && case.is_open());
    let since = case.map_or(record.since, |case| case.opened);
    let blocked = explain_node::blocked_by(facts, record);
    let waits = plan::waiting_repair(&facts.snapshot, record, case).and_then(|waiting| {
        let cause = waiting.cause.as_ref()?;
        Some(CaseReason { code: cause.code.to_owned(), text: waiting.text() })
    });
    let why = match (case, waits, blocked) {
        (_, Some(waits), _) => waits,
        (_, None, Some(blocked)) => CaseReason { code: blocked.clone(), text: blocked },
        (Some(case), None, None) => case_reason(case, Some(record)),
        (None, None, None) => CaseReason { code: String::new(), text: String::new() },
    };
    let is_stuck = facts.now.since(since) > LONG || record.state == NodeState::Out;
    let (what, next) = match &record.state {
        NodeState::Repairing { step, tries } => {
            (format!("out of service, being repaired ({step}, try {tries})"), NextCommand::Why)
        }
        NodeState::Requalifying { .. } => ("out of service, being requalified".to_owned(), NextCommand::Why),
        NodeState::Out => ("out of service until released".to_owned(), NextCommand::with_reason("doctor release")),
        _ => ("out of service".to_owned(), NextCommand::Why),
    };
    NodeTrouble {
        kind: AttentionKind::OutOfService,
        urgency: if is_stuck { Urgency::Warning } else { Urgency::Notice },
        node: record.name(),
        since: (since != Timestamp::MIN).then_some(since),
        case: case.map(|case| case.id),
        what,
        why: why.text,
        why_code: why.code,
        next,
    }
}

/// Returns the repairs that operators requested and that cannot begin yet. The node may still be in service.
fn waiting_repairs(facts: &Facts) -> impl Iterator<Item = NodeTrouble> {
    let nodes: BTreeSet<&NodeName> = facts
        .snapshot
        .commands
        .iter()
        .filter_map(|command| match &command.kind {
            CommandKind::Repair { node, .. } => Some(node),
            _ => None,
        })
        .collect();
    nodes.into_iter().filter_map(move |node| {
        let (record, _) = facts.node(node)?;
        let waiting = plan::waiting_repair(&facts.snapshot, record, None)?;
        let WaitCause { code, text } = waiting.cause?;
        Some(NodeTrouble {
            kind: AttentionKind::RepairWaiting,
            urgency: Urgency::Notice,
            node: node.clone(),
            since: Some(waiting.since),
            case: None,
            what: format!("{} requested by {} waits", waiting.what, waiting.by),
            why: text,
            why_code: code.to_owned(),
            next: NextCommand::Why,
        })
    })
}
