//! Every reason code that is shown to people, with its meaning. The matches are exhaustive, so that the compiler
//! rejects a code without a description.

use doctor_core::{
    case::{CaseOutcome, StepKind, StepState},
    classify::{ClassificationReason, DISTURBED_REPEATEDLY},
    finding::Severity,
    lifecycle::NodeState,
    observation::FailureKind,
    run::{CancelReason, IncompleteReason, NotStartedReason, Purpose},
    software::Software,
    view::{SKIP_REASONS, TestStatus},
};
use serde::Serialize;

/// A reason code and its description in one context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Reason {
    pub code: &'static str,
    /// The kind of event that the code describes.
    pub kind: &'static str,
    pub means: &'static str,
    pub to_do: &'static str,
}

/// Returns all reason codes, grouped by kind.
pub(crate) fn reasons() -> Vec<Reason> {
    let mut all: Vec<Reason> = SKIP_REASONS
        .iter()
        .map(|m| Reason { code: m.code, kind: "a node was skipped", means: m.means, to_do: m.to_do })
        .collect();
    let plain = |code, kind, means| Reason { code, kind, means, to_do: "" };
    all.extend(TestStatus::ALL.iter().map(|s| plain(s.code(), "a test on a node", test_status(*s))));
    all.extend(NotStartedReason::ALL.iter().map(|w| plain(w.code(), "a run never started", not_started(*w))));
    all.extend(IncompleteReason::ALL.iter().map(|w| plain(w.code(), "a run is incomplete", incomplete(*w))));
    all.extend(CancelReason::ALL.iter().map(|w| plain(w.code(), "a run is being cancelled", cancel(*w))));
    all.extend(ClassificationReason::ALL.iter().map(|w| {
        let (means, to_do) = classification_reason(*w);
        Reason { code: w.code(), kind: "a result", means, to_do }
    }));
    all.push(Reason {
        code: DISTURBED_REPEATEDLY,
        kind: "a finding",
        means: "the same program disturbed a test of this node three times in a row",
        to_do: "end the program, keep it off nodes that are tested, or hold the node; the next undisturbed result clears it",
    });
    all.extend(Severity::ALL.iter().map(|s| plain(s.code(), "severity of a finding", s.meaning())));
    all.extend(FailureKind::ALL.iter().map(|k| Reason {
        code: k.code(),
        kind: "a check could not run",
        means: failure(*k),
        to_do: failure_remedy(*k),
    }));
    all.extend(Software::ALL.iter().map(|s| Reason {
        code: s.code(),
        kind: "a test does not apply",
        means: software(*s),
        to_do: s.remedy(),
    }));
    all.extend(Purpose::ALL.iter().map(|p| plain(p.code(), "purpose of a run", purpose(*p))));
    all.extend(StepState::ALL.iter().map(|s| plain(s.code(), "a step of a case", step(*s))));
    all.extend(CaseOutcome::ALL.iter().map(|c| plain(c.code(), "how a case ended", case_outcome(*c))));
    all.extend(node_states().iter().map(|state| {
        let (means, to_do) = node_state(state);
        Reason { code: state.as_str(), kind: "state of a node", means, to_do }
    }));
    all
}

/// Returns a node state of each kind.
pub(crate) fn node_states() -> [NodeState; 7] {
    [
        NodeState::InService,
        NodeState::Suspect,
        NodeState::Quarantined,
        NodeState::Repairing { step: StepKind::Reset, tries: 1 },
        NodeState::Requalifying { run: None },
        NodeState::Out,
        NodeState::Held { by: String::new() },
    ]
}

/// Returns the meaning and what to do.
const fn node_state(state: &NodeState) -> (&'static str, &'static str) {
    match state {
        NodeState::InService => ("available to users, with no open finding that fails", ""),
        NodeState::Suspect => (
            "available to users, and a finding is open that does not (yet) take the node out; it is tested first",
            "`doctor why NODE` shows the finding",
        ),
        NodeState::Quarantined => (
            "out of service because of its case; no repair step is in progress",
            "`doctor why NODE` shows the case and the next step",
        ),
        NodeState::Repairing { .. } => {
            ("out of service; a repair step has been started and has not ended", "`doctor why NODE` shows the step")
        }
        NodeState::Requalifying { .. } => {
            ("out of service; its tests and its agent's checks decide whether it returns", "wait for the results")
        }
        NodeState::Out => (
            "out of service until an operator releases it or another machine takes its name: no permitted step is left",
            "repair or replace the machine, then `doctor release NODE`",
        ),
        NodeState::Held { .. } => (
            "an operator holds it: the controller records results and does nothing else with the node",
            "`doctor release NODE` ends the hold",
        ),
    }
}

/// Returns the meaning and what to do.
const fn classification_reason(why: ClassificationReason) -> (&'static str, &'static str) {
    match why {
        ClassificationReason::WithinLimits => ("all measurements within limits", ""),
        ClassificationReason::NothingMeasured => {
            ("the check ran and reported nothing, which is not a pass", "see its log")
        }
        ClassificationReason::PartlyJudged => (
            "everything that was compared is within its limit; other measurements have no expected value",
            "`doctor-node profile show` on the node shows which profile was found and why; `profile learn` writes one",
        ),
        ClassificationReason::NoExpectation => (
            "measured, and neither a profile, the scheduler, peers nor the node's past give a value to compare with",
            "`doctor-node profile show` on the node shows which profile was found and why; `profile learn` writes one",
        ),
        ClassificationReason::NoHardware => ("the node has none of what the check counts, and nothing expects any", ""),
        ClassificationReason::HardwareMissing => (
            "the check found nothing of its kind, and the profile, the scheduler or the node's past expect it",
            "check the count that failed beside it, such as `gpu-count`; the hardware or its driver is missing",
        ),
        ClassificationReason::MetricMissing => ("the check did not report a metric that a rule needs", "see its log"),
        ClassificationReason::NotANumber => ("the check reported a value that is not a number", "see its log"),
        ClassificationReason::NoHistory => (
            "a rule compares with earlier results, and there are too few of them",
            "wait for more results; agent reports have no history",
        ),
        ClassificationReason::FailedTogether => (
            "a run over several nodes failed as a whole, and the faulty node is not known",
            "the controller tests each node in a pair with a known good node; `doctor audit` shows the outcome",
        ),
        ClassificationReason::Booting => (
            "the machine has just booted, and what was checked may not be ready yet",
            "none: the check is repeated; `agents.boot_grace` sets how long after boot nothing is classified",
        ),
    }
}

const fn test_status(status: TestStatus) -> &'static str {
    match status {
        TestStatus::Pass => "it passed within the cut-off",
        TestStatus::Fail => "it failed and has not passed since",
        TestStatus::Inconclusive => {
            "the newest result says nothing about the node: the test could not run or be classified"
        }
        TestStatus::NotApplicable => "the node has nothing that this test covers",
        TestStatus::NotJudged => "measured, but nothing gives an expected value to compare with",
        TestStatus::Stale => "it passed or did not apply, but longer ago than the cut-off",
        TestStatus::NeverTested => "it never ran on this node; that counts as older than any result",
    }
}

const fn not_started(why: NotStartedReason) -> &'static str {
    match why {
        NotStartedReason::PendingTooLong => {
            "its job waited longer than `limits.pending` and was cancelled; the node backs off"
        }
        NotStartedReason::NodeTaken => "users took the node before the job started",
        NotStartedReason::Rejected => "the scheduler rejected the job",
        NotStartedReason::Withdrawn => "an operator withdrew it, or its node is gone",
    }
}

const fn incomplete(why: IncompleteReason) -> &'static str {
    match why {
        IncompleteReason::NodeTaken => "users needed the node while it ran",
        IncompleteReason::OverTimeLimit => "it exceeded the time limit of its tests",
        IncompleteReason::NoResult => "its job ended and no result arrived within `limits.result_grace`",
        IncompleteReason::JobLost => "the scheduler no longer knows its job",
        IncompleteReason::NodeVanished => "the cluster no longer lists its node",
        IncompleteReason::NodeDied => "its node failed, or was unreachable for too long",
        IncompleteReason::Withdrawn => "an operator withdrew it",
        IncompleteReason::Crashed => "its job crashed",
    }
}

const fn cancel(why: CancelReason) -> &'static str {
    match why {
        CancelReason::PendingTooLong => "its job waited longer than `limits.pending`",
        CancelReason::NodeTaken => "users need the node",
        CancelReason::OverTimeLimit => "it exceeds the time limit of its tests",
        CancelReason::NodeVanished => "the cluster no longer lists its node",
        CancelReason::Withdrawn => "an operator withdrew it",
    }
}

const fn failure_remedy(kind: FailureKind) -> &'static str {
    match kind {
        FailureKind::Denied => {
            "the text names the access, `doctor explain CHECK` what the check needs: deploy the agent, which has it, or give \
             it to jobs (the page of your backend says how)"
        }
        _ => "",
    }
}

const fn failure(kind: FailureKind) -> &'static str {
    match kind {
        FailureKind::Missing => "a file, tool or library is missing",
        FailureKind::NotInstalled => "the third-party program or library that it runs is not installed",
        FailureKind::Unsupported => "the hardware is of a kind that the test does not support",
        FailureKind::Denied => "permission denied, or the job was not given the access that the check needs",
        FailureKind::TimedOut => "it exceeded its time limit and was killed",
        FailureKind::Abandoned => "it hung in the kernel, could not be killed, and was abandoned",
        FailureKind::Killed => "it was killed by a signal",
        FailureKind::Failed => "a tool ran and reported a failure",
        FailureKind::TooLong => "its output exceeded the limit",
        FailureKind::Unparseable => "its output could not be parsed",
        FailureKind::Empty => "it ran and reported nothing, which is never a pass",
        FailureKind::Disturbed => {
            "another process used what was measured; the text names it and its owner. The test is repeated"
        }
    }
}

const fn software(software: Software) -> &'static str {
    match software {
        Software::Dcgm => "DCGM is not installed on the node",
        Software::Fio => "fio is not installed on the node",
        Software::Nccl => "NCCL is not installed on the node",
        Software::Perftest => {
            "the program that loads the ports, of perftest or libfabric, is not installed on the node"
        }
        Software::NvmeCli => "nvme-cli is not installed on the node",
    }
}

const fn purpose(purpose: Purpose) -> &'static str {
    match purpose {
        Purpose::Validation => "its tests were due",
        Purpose::Confirmation => "a failed test is repeated to confirm the failure",
        Purpose::Requalification => "requalification of a repaired node",
        Purpose::Requested => "an operator requested it",
    }
}

const fn step(state: StepState) -> &'static str {
    match state {
        StepState::Proposed => "it waits for an operator: the policy does not allow it",
        StepState::Intended => "it is recorded; the effect may or may not have happened",
        StepState::Done => "it was done",
        StepState::Failed => "it was attempted and failed",
    }
}

const fn case_outcome(how: CaseOutcome) -> &'static str {
    match how {
        CaseOutcome::Returned => "requalified and back in service",
        CaseOutcome::Replaced => "another machine has the node name now",
        CaseOutcome::Withdrawn => "an operator withdrew it",
    }
}
