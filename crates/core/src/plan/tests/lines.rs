//! Actions as lines of text, with the reason code at the end: `submit n1 dl: stale`.

use super::super::{Action, Conclusion, Notice, Plan};
use crate::{
    ids::{NodeName, TestId},
    lifecycle::NodeState,
    reason::WithReason,
};

pub(super) fn of(plan: &Plan) -> Vec<String> {
    plan.actions.iter().map(line).collect()
}

pub(super) fn submitted(plan: &Plan) -> Vec<String> {
    plan.actions
        .iter()
        .filter_map(|action| match &action.value {
            Action::Submit(run) => Some(format!("{} {}", run.nodes.first(), names(&run.tests))),
            _ => None,
        })
        .collect()
}

fn names(tests: &[TestId]) -> String {
    tests.iter().map(TestId::as_str).collect::<Vec<_>>().join("+")
}

pub(super) fn line(action: &WithReason<Action>) -> String {
    let what = match &action.value {
        Action::Submit(run) => {
            let nodes: Vec<&str> = run.nodes.iter().map(NodeName::as_str).collect();
            format!("submit {} {}", nodes.join("+"), names(&run.tests))
        }
        Action::Resubmit { .. } => "resubmit".to_owned(),
        Action::Cancel { .. } => "cancel".to_owned(),
        Action::Conclude { end: Conclusion::Incomplete(_), .. } => "conclude incomplete".to_owned(),
        Action::Conclude { end: Conclusion::NotStarted(_), .. } => "conclude not-started".to_owned(),
        Action::OpenCase(case) => format!("open {} {}", case.node, case.repair_step),
        Action::Escalate { to, .. } => format!("escalate {to}"),
        Action::RaiseSeverity { node, .. } => format!("worsen {node}"),
        Action::Advise { node, advice, .. } => format!("advise {node} {advice}"),
        Action::Step { node, step, attempts: 1, .. } => format!("step {node} {step}"),
        Action::Step { node, step, attempts: tries, .. } => format!("step {node} {step} try {tries}"),
        Action::RequestRepair { node, request, .. } => {
            format!("request {node} {}", request.repair.as_ref().unwrap().what)
        }
        Action::Propose { node, step, .. } => format!("propose {node} {step}"),
        Action::CompleteStep { done, .. } => format!("settle {}", if *done { "done" } else { "failed" }),
        Action::WithdrawStep { node, .. } => format!("withdraw step of {node}"),
        Action::WithdrawCommand { command, node } => format!("withdraw {command} on {node}"),
        Action::SetState { node, to: NodeState::Held { by }, .. } => format!("move {node} held by {by}"),
        Action::SetState { node, to, .. } => format!("move {node} {}", to.as_str()),
        Action::CloseCase { node, how, .. } => format!("close {node} {how}"),
        Action::RebindCase { node, .. } => format!("follow {node}"),
        Action::OpenBreaker => "open breaker".to_owned(),
        Action::Notice(Notice::AgentsSilent { silent, total: of }) => format!("notice {silent} of {of} silent"),
        Action::Notice(Notice::AgentsBack) => "notice agents back".to_owned(),
        Action::CompleteCommand { command: request } => format!("answer {request}"),
        Action::HardwareIdentified { node, hardware } => format!("identify {node} {hardware}"),
        Action::StartTrial { command: request, .. } => format!("try {request}"),
        Action::AttributeFault { node, peer: None, .. } => format!("name {node}"),
        Action::AttributeFault { node, peer: Some(peer), .. } => format!("name {node} with {peer}"),
        Action::RemoveMaintenanceMark { node, .. } => format!("tidy {node}"),
        Action::HardwareReplaced { node, hardware } => format!("rename {node} {hardware}"),
    };
    format!("{what}: {}", action.code)
}
