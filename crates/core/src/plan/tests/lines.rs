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
        .filter_map(|action| match &action.what {
            Action::Submit(run) => Some(format!("{} {}", run.nodes.first(), names(&run.tests))),
            _ => None,
        })
        .collect()
}

fn names(tests: &[TestId]) -> String {
    tests.iter().map(TestId::as_str).collect::<Vec<_>>().join("+")
}

pub(super) fn line(action: &WithReason<Action>) -> String {
    let what = match &action.what {
        Action::Submit(run) => {
            let nodes: Vec<&str> = run.nodes.iter().map(NodeName::as_str).collect();
            format!("submit {} {}", nodes.join("+"), names(&run.tests))
        }
        Action::Resubmit { .. } => "resubmit".to_owned(),
        Action::Cancel { .. } => "cancel".to_owned(),
        Action::Conclude { end: Conclusion::Incomplete(_), .. } => "conclude incomplete".to_owned(),
        Action::Conclude { end: Conclusion::NotStarted(_), .. } => "conclude not-started".to_owned(),
        Action::OpenCase(case) => format!("open {} {}", case.node, case.rung),
        Action::Escalate { to, .. } => format!("escalate {to}"),
        Action::Worsen { node, .. } => format!("worsen {node}"),
        Action::Advise { node, advice, .. } => format!("advise {node} {advice}"),
        Action::Step { node, step, tries: 1, .. } => format!("step {node} {step}"),
        Action::Step { node, step, tries, .. } => format!("step {node} {step} try {tries}"),
        Action::Propose { node, step, .. } => format!("propose {node} {step}"),
        Action::Settle { done, .. } => format!("settle {}", if *done { "done" } else { "failed" }),
        Action::Move { node, to: NodeState::Held { by }, .. } => format!("move {node} held by {by}"),
        Action::Move { node, to, .. } => format!("move {node} {}", to.as_str()),
        Action::CloseCase { node, how, .. } => format!("close {node} {how}"),
        Action::Follow { node, .. } => format!("follow {node}"),
        Action::OpenBreaker => "open breaker".to_owned(),
        Action::Notice(Notice::AgentsSilent { silent, of }) => format!("notice {silent} of {of} silent"),
        Action::Notice(Notice::AgentsBack) => "notice agents back".to_owned(),
        Action::Answer { request } => format!("answer {request}"),
        Action::Identify { node, hardware } => format!("identify {node} {hardware}"),
        Action::Try { request, .. } => format!("try {request}"),
        Action::Name { node, peer: None, .. } => format!("name {node}"),
        Action::Name { node, peer: Some(peer), .. } => format!("name {node} with {peer}"),
        Action::Tidy { node, .. } => format!("tidy {node}"),
        Action::Rename { node, hardware } => format!("rename {node} {hardware}"),
    };
    format!("{what}: {}", action.code)
}
