//! The decisions of a plan in a few words, for the output of scenarios.

use doctor_core::{
    hostlist,
    ids::TestId,
    plan::{Action, Conclusion},
};

/// Describes a decision in a few words. `None` for bookkeeping that only repeats another line.
pub(super) fn describe(action: &Action) -> Option<String> {
    Some(match action {
        Action::Submit(run) => {
            let tests: Vec<_> = run.tests.iter().map(TestId::as_str).collect();
            format!("submit {} on {}: {} ({})", run.id, hostlist::fold(&run.nodes), tests.join(" "), run.purpose.value)
        }
        Action::Resubmit { run } => format!("submit {run} again"),
        Action::Cancel { run, .. } => format!("cancel {run}"),
        Action::Conclude { run, end: Conclusion::Incomplete(_) } => format!("conclude {run}: incomplete"),
        Action::Conclude { run, end: Conclusion::NotStarted(_) } => format!("conclude {run}: not started, no row"),
        Action::OpenCase(case) => {
            format!("open {} on {}: {} at repair step {}", case.id, case.node, case.severity, case.repair_step)
        }
        Action::Escalate { case, to } => format!("{case} escalates to {to}"),
        Action::RaiseSeverity { case, .. } => format!("{case}: severity raised"),
        Action::Advise { advice, .. } => format!("advice: {advice}"),
        Action::Step { node, step, attempts: 1, .. } => format!("{step} {node}"),
        Action::Step { node, step, attempts: tries, .. } => format!("{step} {node}, try {tries}"),
        Action::RequestRepair { case, node, request, .. } => {
            let what = request.repair.as_ref().map_or("no repair", |repair| repair.what.code());
            format!("{case} on {node}: {what} is requested")
        }
        Action::Propose { node, step, .. } => format!("propose {step} of {node}"),
        Action::CompleteStep { done, .. } => format!("step {}", if *done { "done" } else { "failed" }),
        Action::WithdrawStep { node, .. } => format!("the step on {node} is withdrawn"),
        Action::SetState { node, to, .. } => format!("{node} is {}", to.as_str()),
        Action::CloseCase { case, how, .. } => format!("close {case}: {how}"),
        Action::RebindCase { case, node } => format!("{case} follows its machine to {node}"),
        Action::OpenBreaker => "the breaker opens".to_owned(),
        Action::Notice(_) => "notice".to_owned(),
        Action::CompleteCommand { .. } => "command completed".to_owned(),
        Action::WithdrawCommand { node, .. } => format!("command on {node} withdrawn"),
        Action::AttributeFault { node, peer: None, .. } => format!("fault attributed to {node}"),
        Action::AttributeFault { node, peer: Some(peer), .. } => format!("fault attributed to {node} and {peer}"),
        // Its run is printed separately.
        Action::StartTrial { .. } => return None,
        Action::RemoveMaintenanceMark { node, .. } => format!("maintenance of {node} is over"),
        Action::HardwareReplaced { node, hardware } => format!("{node} has other hardware now, {hardware}"),
        // Every node is identified once at the start.
        Action::HardwareIdentified { .. } => return None,
    })
}
