//! The one-sentence summary of a node, and the next steps for an operator.

use super::{Due, OccupancyKind, TestStatus, WhyView};
use crate::{
    case::{Advice, StepKind, StepState},
    lifecycle::NodeState,
    snapshot::Breaker,
};

/// Returns the state of the node and its cause.
pub(super) fn headline(view: &WhyView) -> String {
    let node = &view.row.node;
    if view.row.occupancy == OccupancyKind::Gone {
        return format!("{node} is no longer listed by the cluster");
    }
    let worst = view.findings.first().map_or_else(String::new, |finding| format!(": {}", finding.text));
    match &view.state {
        NodeState::InService => match unverified_tests(view) {
            None => format!("{node} is in service and every test that applies has passed"),
            Some(problems) => format!("{node} is in service; {problems}"),
        },
        NodeState::Suspect => format!("{node} is suspect{worst}"),
        NodeState::Quarantined => format!("{node} is out of service{worst}"),
        NodeState::Repairing { step, tries } => format!("{node} is being repaired ({step}, try {tries}){worst}"),
        NodeState::Requalifying { run } => format!("{node} is being requalified by run {run}"),
        NodeState::Out => format!("{node} is out of service until an operator releases it{worst}"),
        NodeState::Held { by } => format!("{node} is held by {by}"),
    }
}

/// Returns the tests that keep a node without findings from being reported as healthy.
fn unverified_tests(view: &WhyView) -> Option<String> {
    let doubtful = [TestStatus::Fail, TestStatus::Inconclusive, TestStatus::Stale, TestStatus::NeverTested];
    let mut problems = Vec::new();
    for status in doubtful {
        let tests: Vec<&str> =
            view.tests.iter().filter(|line| line.status == status).map(|line| line.test.as_str()).collect();
        if !tests.is_empty() {
            problems.push(format!("{}: {}", status.label(), tests.join(", ")));
        }
    }
    if view.tests.is_empty() {
        problems.push("no test applies to the node".to_owned());
    }
    (!problems.is_empty()).then(|| problems.join("; "))
}

/// Returns the next steps, one line each.
pub(super) fn next(view: &WhyView, breaker: &Breaker) -> Vec<String> {
    let node = &view.row.node;
    let mut lines = Vec::new();
    if view.row.occupancy == OccupancyKind::Gone {
        return vec!["nothing to do; if it was renamed, its history follows the hardware".to_owned()];
    }
    if let Some(hold) = &view.hold {
        let until = hold.until.map_or_else(|| "until released".to_owned(), |until| format!("until {until}"));
        lines.push(format!(
            "held {until} by {} ({}): `doctor release {node} --why …` when it is ready",
            hold.by, hold.why
        ));
    }
    lines.extend(operator_lines(view));
    if let Breaker::Open { why, .. } = breaker
        && view.findings.iter().any(|finding| finding.confirmed)
    {
        lines.push(format!("the breaker is open ({why}): check the cause, then `doctor breaker close --why …`"));
    }
    let waiting = view.findings.iter().find(|finding| !finding.confirmed);
    if let Some(finding) = waiting {
        let (check, times, confirm) = (&finding.check, finding.sightings, finding.confirm);
        lines.push(format!("{check} failed {times} of {confirm} times needed to confirm it; retry scheduled"));
    }
    if let Some(active) = &view.row.run {
        lines.push(format!("`doctor log {} --follow` shows the current run", active.run));
    }
    if lines.is_empty() {
        lines.push(idle_line(view));
    }
    lines
}

/// Returns what waits for an operator.
fn operator_lines(view: &WhyView) -> Vec<String> {
    let Some(case) = view.case.as_ref().filter(|case| case.open) else { return Vec::new() };
    let node = &view.row.node;
    let mut lines: Vec<String> = Vec::new();
    for step in case.steps.iter().filter(|step| step.state == StepState::Proposed) {
        let what = step.what;
        lines.push(match what {
            StepKind::Mark
            | StepKind::Drain
            | StepKind::Evict
            | StepKind::Reset
            | StepKind::Reboot
            | StepKind::Replace => {
                format!("{what} the node, then `doctor release {node} --why …`; or set `allow.{what} = true`")
            }
            _ => format!("{what} the node: {}", step.text),
        });
    }
    if let Some(advice) = case.advice.filter(|_| case.waits_for_operator) {
        let meaning = match advice {
            Advice::Return => "all tests passed: release the node",
            Advice::ReturnFlagged => "release the node if its open findings are acceptable",
            Advice::Reboot => "reboot the node, then release it",
            Advice::Replace => "have the node replaced",
            Advice::ExamineAgain => "no recommendation: a test gave no result",
        };
        lines.push(format!("the examination recommends {advice}: {meaning}"));
    }
    if case.waits_for_operator || view.state == NodeState::Out {
        lines.push(format!(
            "waiting for an operator: repair the node, then `doctor release {node} --why …` tests and returns it"
        ));
    }
    lines
}

fn idle_line(view: &WhyView) -> String {
    let node = &view.row.node;
    let due = view.tests.iter().any(|line| line.due == Due::Now);
    match (&view.row.skipped, due) {
        (Some(passed), true) => {
            format!("due, but not chosen: {}; `doctor test {node}` tests it first", passed.text)
        }
        (None, true) => format!("due, will be chosen; `doctor test {node}` tests it first"),
        (_, false) => format!("nothing to do; `doctor test {node}` tests it anyway"),
    }
}
