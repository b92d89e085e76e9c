//! The one-sentence summary of a node, and the next steps for an operator.

use super::{Due, OccupancyKind, TestLine, TestStatus, WhyView, plural, text::clock};
use crate::{
    case::{Advice, StepKind},
    finding::Severity,
    lifecycle::NodeState,
    plan::{self, Blocked},
    snapshot::{Breaker, NodeRecord},
};

/// What keeps a node from passing its requalification, and what resolves it.
pub(super) struct Blocker {
    what: String,
    to_do: String,
}

impl Blocker {
    pub(super) fn new(record: &NodeRecord, blocked: &Blocked, agent_reports: bool) -> Self {
        let node = &record.node.name;
        match blocked {
            Blocked::Inconclusive(tests) if tests.is_empty() => Self {
                what: "no required test has passed since the repair".to_owned(),
                to_do: format!("the run is repeated; `doctor release {node} --why …` starts it over"),
            },
            Blocked::Inconclusive(tests) => Self {
                what: format!("no conclusive result of {}", plan::names(tests)),
                to_do: format!(
                    "the run is repeated; `doctor history {node}` has the reasons, `doctor explain REASON` what resolves \
                     them"
                ),
            },
            Blocked::WaitingForAgent { tests, repair } => {
                let repair = repair.map_or_else(String::new, |step| format!(" since the {step}"));
                let last_report = record.last_report.map_or_else(String::new, clock);
                let agent = match agent_reports {
                    true => format!("agent last reported at {last_report}"),
                    false => format!("agent silent since {last_report}"),
                };
                let to_do = match agent_reports {
                    true => format!("the agent repeats them; `doctor history {node}` has the last reasons"),
                    false => format!(
                        "restart the agent on {node} (`doctor agent list` shows when it reported), or `doctor agent \
                         revoke {node}`: the job then runs its checks"
                    ),
                };
                Self {
                    what: format!("waiting for the agent's checks{repair} ({}): {agent}", plan::names(tests)),
                    to_do,
                }
            }
        }
    }

    pub(super) fn into_what(self) -> String {
        self.what
    }
}

/// Returns the state of the node and its cause.
pub(super) fn headline(view: &WhyView, blocked: Option<&Blocker>) -> String {
    let node = &view.row.node;
    if view.row.occupancy == OccupancyKind::Gone {
        return format!("{node} is no longer listed by the cluster");
    }
    let worst = view.findings.first().map_or_else(String::new, |finding| format!(": {}", finding.text));
    let blocked = blocked.map(|blocked| &blocked.what);
    match &view.state {
        NodeState::InService => match health_blocker(view) {
            None => format!("{node} is in service and every test that applies has passed{}", not_judged(view)),
            Some(what) => format!("{node} is in service, but not known to be healthy: {what}"),
        },
        NodeState::Suspect => format!("{node} is suspect{worst}"),
        NodeState::Quarantined => match blocked {
            Some(what) => format!("{node} is out of service: requalification: {what}"),
            None => format!("{node} is out of service{}", cause(view)),
        },
        NodeState::Repairing { step, tries } => format!("{node} is being repaired ({step}, try {tries}){worst}"),
        NodeState::Requalifying { run } => match (blocked, run) {
            (Some(what), _) => format!("{node} is being requalified: {what}"),
            (None, Some(run)) => format!("{node} is being requalified by run {run}"),
            (None, None) => format!("{node} is being requalified"),
        },
        NodeState::Out => format!("{node} is out of service until an operator releases it{}", cause(view)),
        NodeState::Held { by } => format!("{node} is held by {by}"),
    }
}

/// Returns why the node is out of service: its worst finding, if that is one that takes a node out; otherwise the
/// reason of the first step of its case, such as an operator's.
fn cause(view: &WhyView) -> String {
    let worst = view.findings.first();
    let step = view.case.as_ref().filter(|case| case.open).and_then(|case| case.steps.first());
    let text = match (worst, step) {
        (Some(finding), _) if finding.severity > Severity::Monitor => &finding.text,
        (_, Some(step)) if !step.text.is_empty() => &step.text,
        (Some(finding), _) => &finding.text,
        (None, _) => return String::new(),
    };
    format!(": {text}")
}

/// Tests named in one sentence.
const MAX_NAMED: usize = 5;

/// Returns what keeps the node from being healthy, most serious first, with the command that resolves or explains it.
fn health_blocker(view: &WhyView) -> Option<String> {
    let node = &view.row.node;
    if view.tests.is_empty() {
        return Some("no test applies to the node".to_owned());
    }
    let order = [TestStatus::Fail, TestStatus::Inconclusive, TestStatus::NeverTested, TestStatus::Stale];
    order.into_iter().find_map(|status| {
        let lines: Vec<&TestLine> = view.tests.iter().filter(|line| line.status == status).collect();
        let first = *lines.first()?;
        let run = first.last.as_ref().and_then(|last| last.run);
        let command = match (status, run) {
            (TestStatus::Fail, _) => format!("doctor explain {}", first.test),
            (TestStatus::Inconclusive, Some(run)) => format!("doctor log {run}"),
            _ => format!("doctor test {node} --yes"),
        };
        let names = lines.iter().take(MAX_NAMED).map(|line| match (status, &line.last) {
            (TestStatus::Inconclusive, Some(last)) => format!("{} ({})", line.test, last.reason),
            _ => line.test.to_string(),
        });
        let names = names.collect::<Vec<_>>().join(", ");
        let more = lines.len().saturating_sub(MAX_NAMED);
        let more = if more == 0 { String::new() } else { format!(" and {more} more") };
        Some(format!("{}: {names}{more}; `{command}`", status.label()))
    })
}

/// Returns an addition about measurements without an expected value, which say nothing about the node.
fn not_judged(view: &WhyView) -> String {
    let count = view.tests.iter().filter(|line| line.status == TestStatus::NotJudged).count();
    match count {
        0 => String::new(),
        count => format!("; {} not judged for want of a profile", plural(count, "test")),
    }
}

/// Returns the next steps, one line each.
pub(super) fn next(view: &WhyView, breaker: &Breaker, blocked: Option<&Blocker>) -> Vec<String> {
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
    lines.extend(blocked.map(|blocked| blocked.to_do.clone()));
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
    for step in &case.proposals {
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
