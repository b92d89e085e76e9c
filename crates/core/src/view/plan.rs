//! A plan as rows: the actions and their reasons, and for every other node why it was passed over.

use serde::Serialize;

use super::{skip_code, skip_text};
use crate::{
    hostlist,
    ids::NodeName,
    plan::{Action, Conclusion, Notice, Plan},
    reason::{ReasonCode, WithReason},
};

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PlanView {
    pub actions: Vec<ActionRow>,
    pub skipped: Vec<SkippedRow>,
}

/// One action.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ActionRow {
    pub action: &'static str,
    /// As a host list. `None`: the action is not about nodes.
    pub nodes: Option<String>,
    pub what: String,
    pub code: ReasonCode,
    pub why: String,
}

/// A node that was passed over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SkippedRow {
    pub node: NodeName,
    pub code: &'static str,
    pub why: String,
}

/// Returns the whole plan, with the passed-over nodes that `selects` accepts.
pub fn plan_view(plan: &Plan, selects: impl Fn(&NodeName) -> bool) -> PlanView {
    let passed_over = plan.skipped.iter().filter(|(name, _)| selects(name)).map(|(name, reason)| SkippedRow {
        node: name.clone(),
        code: skip_code(reason),
        why: skip_text(reason),
    });
    PlanView { actions: plan.actions.iter().map(action_row).collect(), skipped: passed_over.collect() }
}

/// Returns one action as a row.
pub fn action_row(action: &WithReason<Action>) -> ActionRow {
    let (name, nodes, what) = describe(&action.value);
    ActionRow { action: name, nodes, what, code: action.code.clone(), why: action.text.clone() }
}

fn list<T: ToString>(items: &[T]) -> String {
    items.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn describe(action: &Action) -> (&'static str, Option<String>, String) {
    match action {
        Action::Submit(run) => ("test", Some(hostlist::fold(&run.nodes)), list(&run.tests)),
        Action::Resubmit { run } => ("test again", None, format!("run {run} never reached the cluster")),
        Action::Cancel { run, why } => ("cancel", None, format!("run {run}: {why}")),
        Action::Conclude { run, end } => ("conclude", None, format!("run {run}: {}", conclusion(*end))),
        Action::OpenCase(case) => {
            ("open case", Some(case.node.to_string()), format!("{} ({})", case.id, case.severity))
        }
        Action::Escalate { case, to } => ("escalate", None, format!("{case} to {to}")),
        Action::RaiseSeverity { case, node } => ("worsen", Some(node.to_string()), case.to_string()),
        Action::Advise { node, advice, .. } => ("advise", Some(node.to_string()), advice.to_string()),
        Action::Step { node, step, attempts: tries, .. } => {
            ("do", Some(node.to_string()), format!("{step}, try {tries}"))
        }
        Action::RequestRepair { node, request, .. } => ("repair", Some(node.to_string()), request.text()),
        Action::Propose { node, step, .. } => ("propose", Some(node.to_string()), step.to_string()),
        Action::CompleteStep { case, done, .. } => {
            ("settle", None, format!("a step of {case} {}", if *done { "is done" } else { "failed" }))
        }
        Action::WithdrawStep { case, node, .. } => {
            ("withdraw", Some(node.to_string()), format!("a step of {case} that was not sent"))
        }
        Action::SetState { node, to, .. } => ("move", Some(node.to_string()), to.as_str().to_owned()),
        Action::CloseCase { case, node, how } => ("close case", Some(node.to_string()), format!("{case}: {how}")),
        Action::RebindCase { case, node } => ("follow", Some(node.to_string()), format!("{case} follows its machine")),
        Action::OpenBreaker => ("open breaker", None, "no further node is marked".to_owned()),
        Action::Notice(Notice::AgentsSilent { silent, total: of }) => {
            ("notice", None, format!("{silent} of {of} agents are silent"))
        }
        Action::Notice(Notice::AgentsBack) => ("notice", None, "agents report again".to_owned()),
        Action::CompleteCommand { command: request } => ("answer", None, format!("request {request}")),
        Action::WithdrawCommand { command, node } => ("withdraw", Some(node.to_string()), format!("request {command}")),
        Action::HardwareIdentified { node, hardware } => ("identify", Some(node.to_string()), hardware.to_string()),
        Action::StartTrial { command: request, run } => ("try", None, format!("run {run} for request {request}")),
        Action::AttributeFault { node, peer: None, test, .. } => {
            ("name", Some(node.to_string()), format!("{test}: the node is at fault"))
        }
        Action::AttributeFault { node, peer: Some(peer), test, .. } => {
            ("name", Some(node.to_string()), format!("{test}: the path between the node and {peer} is at fault"))
        }
        Action::RemoveMaintenanceMark { node, .. } => ("unmark", Some(node.to_string()), "maintenance".to_owned()),
        Action::HardwareReplaced { node, hardware } => ("rename", Some(node.to_string()), format!("{hardware} now")),
    }
}

const fn conclusion(end: Conclusion) -> &'static str {
    match end {
        Conclusion::Incomplete(why) => why.code(),
        Conclusion::NotStarted(why) => why.code(),
    }
}
