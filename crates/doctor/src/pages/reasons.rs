//! Every reason code that is shown to people, with its meaning. The matches are exhaustive, so that the compiler
//! rejects a code without a description.

use doctor_core::{
    case::{Closed, StepState},
    classify::JudgedWhy,
    observation::FailureKind,
    run::{CancelWhy, IncompleteWhy, NotStarted, Purpose},
    view::{PASSED_OVER, Standing},
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
    let mut all: Vec<Reason> = PASSED_OVER
        .iter()
        .map(|m| Reason { code: m.code, kind: "a node was not chosen", means: m.means, to_do: m.to_do })
        .collect();
    let plain = |code, kind, means| Reason { code, kind, means, to_do: "" };
    all.extend(Standing::ALL.iter().map(|s| plain(s.code(), "a test on a node", standing(*s))));
    all.extend(NotStarted::ALL.iter().map(|w| plain(w.code(), "a run never started", not_started(*w))));
    all.extend(IncompleteWhy::ALL.iter().map(|w| plain(w.code(), "a run brought no full result", incomplete(*w))));
    all.extend(CancelWhy::ALL.iter().map(|w| plain(w.code(), "a run is being cancelled", cancel(*w))));
    all.extend(JudgedWhy::ALL.iter().map(|w| {
        let (means, to_do) = judged(*w);
        Reason { code: w.code(), kind: "a result", means, to_do }
    }));
    all.extend(FailureKind::ALL.iter().map(|k| plain(k.code(), "a check could not look", failure(*k))));
    all.extend(Purpose::ALL.iter().map(|p| plain(p.code(), "what a run is for", purpose(*p))));
    all.extend(StepState::ALL.iter().map(|s| plain(s.code(), "a step of a case", step(*s))));
    all.extend(Closed::ALL.iter().map(|c| plain(c.code(), "how a case ended", closed(*c))));
    all
}

/// Returns the meaning and what to do.
const fn judged(why: JudgedWhy) -> (&'static str, &'static str) {
    match why {
        JudgedWhy::WithinLimits => ("every rule had its number, and every number kept its limit", ""),
        JudgedWhy::NothingMeasured => ("the check ran and reported nothing, which is no health", "see its log"),
        JudgedWhy::NoLimit => (
            "no rule or profile says what the number should be on this machine",
            "`doctor-node profile show` on the node tells which profile was found and why; `profile learn` writes one",
        ),
        JudgedWhy::MetricMissing => ("the check did not report a number that a rule is about", "see its log"),
        JudgedWhy::NotANumber => ("the check reported something that is no number", "see its log"),
        JudgedWhy::NoPeers => (
            "a rule compares with other nodes of the type, and too few of them are known",
            "wait until more of them were tested, or lower `peers_at_least`",
        ),
        JudgedWhy::NoPast => (
            "a rule looks at earlier results, and too few of them are known",
            "wait for more results; reports of agents have no past",
        ),
        JudgedWhy::FailedTogether => (
            "the nodes of a run over several failed all together, and nothing says which of them it was",
            "pairs with nodes that are known to be good follow by themselves; `doctor audit` tells what they show",
        ),
        JudgedWhy::Booting => (
            "the machine has just booted, and what was measured may still be on its way",
            "it is looked at again; `agents.boot_grace` says how long nothing is judged",
        ),
    }
}

const fn standing(standing: Standing) -> &'static str {
    match standing {
        Standing::Pass => "it passed, not longer ago than the cut-off",
        Standing::Fail => "it failed, and nothing said the contrary since",
        Standing::Inconclusive => {
            "the newest result says nothing about the node: it could not run, or could not be judged"
        }
        Standing::NotApplicable => "there is nothing of this kind on the node",
        Standing::Stale => "it passed or did not apply once, longer ago than the cut-off",
        Standing::NeverTested => "it never ran here; that is older than any result",
    }
}

const fn not_started(why: NotStarted) -> &'static str {
    match why {
        NotStarted::PendingTooLong => {
            "its job waited longer than `limits.pending` and was cancelled; the node backs off"
        }
        NotStarted::NodeTaken => "users wanted the node before the job began",
        NotStarted::Rejected => "the cluster refused the job",
        NotStarted::Withdrawn => "an operator withdrew it, or its node was gone",
    }
}

const fn incomplete(why: IncompleteWhy) -> &'static str {
    match why {
        IncompleteWhy::NodeTaken => "users wanted the node while it ran",
        IncompleteWhy::OverTimeLimit => "it ran longer than its tests may",
        IncompleteWhy::NoResult => "its job ended and no result came within `limits.result_grace`",
        IncompleteWhy::JobLost => "the cluster knows its job no more",
        IncompleteWhy::NodeVanished => "its node is not named by the cluster any more",
        IncompleteWhy::NodeDied => "its node died under it, or was out of the cluster's reach for too long",
        IncompleteWhy::Withdrawn => "an operator withdrew it",
        IncompleteWhy::Crashed => "its job crashed",
    }
}

const fn cancel(why: CancelWhy) -> &'static str {
    match why {
        CancelWhy::PendingTooLong => "its job waited longer than `limits.pending`",
        CancelWhy::NodeTaken => "users want the node",
        CancelWhy::OverTimeLimit => "it runs longer than its tests may",
        CancelWhy::NodeVanished => "its node is not named by the cluster any more",
        CancelWhy::Withdrawn => "an operator withdrew it",
    }
}

const fn failure(kind: FailureKind) -> &'static str {
    match kind {
        FailureKind::Missing => "a file, tool or library is not there",
        FailureKind::Denied => "it may not be read by this user",
        FailureKind::TimedOut => "it took longer than it may and was killed",
        FailureKind::Abandoned => "it could not even be killed, being stuck in the kernel, and was left behind",
        FailureKind::Killed => "somebody killed it",
        FailureKind::Failed => "a tool ran and said that it failed",
        FailureKind::TooLong => "it wrote more than is read",
        FailureKind::Unparseable => "what it wrote could not be understood",
        FailureKind::Empty => "it ran and reported nothing at all, which is never a pass",
    }
}

const fn purpose(purpose: Purpose) -> &'static str {
    match purpose {
        Purpose::Validation => "its tests were due",
        Purpose::Confirmation => "a failing test is repeated before anybody believes it",
        Purpose::Proving => "proof that a repaired node is well",
        Purpose::Requested => "an operator asked for it",
    }
}

const fn step(state: StepState) -> &'static str {
    match state {
        StepState::Proposed => "it waits for a person: the policy does not let the doctor do it",
        StepState::Intended => "it is written down; the effect may or may not have happened",
        StepState::Done => "it was done",
        StepState::Failed => "it was tried and failed",
    }
}

const fn closed(how: Closed) -> &'static str {
    match how {
        Closed::Returned => "proved well and back in service",
        Closed::Replaced => "another machine bears the name now",
        Closed::Withdrawn => "an operator took it away from the doctor",
    }
}
