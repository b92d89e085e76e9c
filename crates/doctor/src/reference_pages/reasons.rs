//! Every reason code that is shown to people, with its meaning. The matches are exhaustive, so that the compiler
//! rejects a code without a description.

use doctor_core::{
    case::{CaseOutcome, StepState},
    classify::ClassificationReason,
    finding::Severity,
    observation::FailureKind,
    run::{CancelReason, IncompleteReason, NotStartedReason, Purpose},
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
    all.extend(Severity::ALL.iter().map(|s| plain(s.code(), "severity of a finding", s.meaning())));
    all.extend(FailureKind::ALL.iter().map(|k| plain(k.code(), "a check could not run", failure(*k))));
    all.extend(Purpose::ALL.iter().map(|p| plain(p.code(), "purpose of a run", purpose(*p))));
    all.extend(StepState::ALL.iter().map(|s| plain(s.code(), "a step of a case", step(*s))));
    all.extend(CaseOutcome::ALL.iter().map(|c| plain(c.code(), "how a case ended", case_outcome(*c))));
    all
}

/// Returns the meaning and what to do.
const fn classification_reason(why: ClassificationReason) -> (&'static str, &'static str) {
    match why {
        ClassificationReason::WithinLimits => ("all measurements within limits", ""),
        ClassificationReason::NothingMeasured => {
            ("the check ran and reported nothing, which is not a pass", "see its log")
        }
        ClassificationReason::NoLimit => (
            "no rule or profile has an expected value for this machine",
            "`doctor-node profile show` on the node shows which profile was found and why; `profile learn` writes one",
        ),
        ClassificationReason::MetricMissing => ("the check did not report a metric that a rule needs", "see its log"),
        ClassificationReason::NotANumber => ("the check reported a value that is not a number", "see its log"),
        ClassificationReason::NoPeers => (
            "a rule compares with other nodes of the type, and too few of them have results",
            "wait until more of them are tested, or lower `peers_at_least`",
        ),
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

const fn failure(kind: FailureKind) -> &'static str {
    match kind {
        FailureKind::Missing => "a file, tool or library is missing",
        FailureKind::Denied => "permission denied",
        FailureKind::TimedOut => "it exceeded its time limit and was killed",
        FailureKind::Abandoned => "it hung in the kernel, could not be killed, and was abandoned",
        FailureKind::Killed => "it was killed by a signal",
        FailureKind::Failed => "a tool ran and reported a failure",
        FailureKind::TooLong => "its output exceeded the limit",
        FailureKind::Unparseable => "its output could not be parsed",
        FailureKind::Empty => "it ran and reported nothing, which is never a pass",
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
