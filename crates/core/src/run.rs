//! A run: some tests on some nodes, from planning to its end.

use serde::{Deserialize, Serialize};

use crate::{
    finding::{Finding, Verdict},
    ids::{CaseId, JobId, NodeName, RunId, TestId},
    reason::{ReasonCode, WithReason, coded},
    time::{Span, Timestamp},
};

/// A list that cannot be empty.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<T>", into = "Vec<T>", bound(serialize = "T: Serialize + Clone"))]
pub struct NonEmpty<T>(Vec<T>);

impl<T> NonEmpty<T> {
    pub fn one(item: T) -> Self {
        Self(vec![item])
    }

    pub fn new(items: Vec<T>) -> Option<Self> {
        if items.is_empty() { None } else { Some(Self(items)) }
    }

    pub fn first(&self) -> &T {
        &self.0[0]
    }

    pub fn map<U>(&self, each: impl FnMut(&T) -> U) -> NonEmpty<U> {
        NonEmpty(self.0.iter().map(each).collect())
    }
}

impl<T> std::ops::Deref for NonEmpty<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<T> TryFrom<Vec<T>> for NonEmpty<T> {
    type Error = &'static str;
    fn try_from(items: Vec<T>) -> Result<Self, &'static str> {
        Self::new(items).ok_or("the list must not be empty")
    }
}

impl<T> From<NonEmpty<T>> for Vec<T> {
    fn from(list: NonEmpty<T>) -> Self {
        list.0
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Run {
    pub id: RunId,
    pub nodes: NonEmpty<NodeName>,
    pub tests: NonEmpty<TestId>,
    pub state: RunState,
    pub purpose: WithReason<Purpose>,
    pub case: Option<CaseId>,
    /// When it was planned.
    pub planned: Timestamp,
    /// A run that takes longer is cancelled and counts as incomplete.
    pub limit: Span,
}

coded! {
    /// What a run is for.
    pub enum Purpose {
        /// Its tests were due.
        Validation => "validation",
        /// A failing test is repeated before it counts.
        Confirmation => "confirmation",
        /// Requalifies a repaired node before it returns to service.
        Requalification => "requalification",
        /// An operator requested it.
        Requested => "requested",
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RunState {
    /// Decided and recorded; the backend may or may not know it.
    Planned,
    Submitted {
        job: JobId,
        at: Timestamp,
    },
    Running {
        job: JobId,
        since: Timestamp,
    },
    Ended(RunEnd),
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RunEnd {
    Completed(Report),
    /// The test had started. Each test without a result gets an `incomplete` row.
    Incomplete {
        why: IncompleteReason,
        partial: Option<Report>,
    },
    /// The test had not started: no history row.
    NotStarted(NotStartedReason),
}

coded! {
    /// Why a run never started. These leave no history row.
    pub enum NotStartedReason {
        PendingTooLong => "pending-too-long",
        NodeTaken => "node-taken",
        Rejected => "rejected",
        Withdrawn => "withdrawn",
    }
}

coded! {
    /// Why a run that had started has no complete result.
    pub enum IncompleteReason {
        NodeTaken => "node-taken",
        OverTimeLimit => "over-time-limit",
        /// The job ended without a result.
        NoResult => "no-result",
        /// The backend no longer knows the job.
        JobLost => "job-lost",
        NodeVanished => "node-vanished",
        /// The node failed while the run was on it.
        NodeDied => "node-died",
        /// An operator withdrew it.
        Withdrawn => "withdrawn",
        Crashed => "crashed",
    }
}

impl IncompleteReason {
    /// Returns whether the run was ended because a user or an operator wanted the node. It says nothing about the node
    /// or the test: the result before it stays in force, and the test is repeated without a delay.
    pub const fn is_interruption(self) -> bool {
        matches!(self, Self::NodeTaken | Self::Withdrawn)
    }
}

coded! {
    /// Why a run is being cancelled.
    pub enum CancelReason {
        PendingTooLong => "pending-too-long",
        NodeTaken => "node-taken",
        OverTimeLimit => "over-time-limit",
        NodeVanished => "node-vanished",
        Withdrawn => "withdrawn",
    }
}

impl CancelReason {
    /// How the run ends if the test had not started.
    pub const fn not_started(self) -> NotStartedReason {
        match self {
            Self::PendingTooLong | Self::OverTimeLimit => NotStartedReason::PendingTooLong,
            Self::NodeTaken => NotStartedReason::NodeTaken,
            Self::NodeVanished | Self::Withdrawn => NotStartedReason::Withdrawn,
        }
    }

    /// How the run ends if the test had started.
    pub const fn incomplete(self) -> IncompleteReason {
        match self {
            Self::PendingTooLong | Self::OverTimeLimit => IncompleteReason::OverTimeLimit,
            Self::NodeTaken => IncompleteReason::NodeTaken,
            Self::NodeVanished => IncompleteReason::NodeVanished,
            Self::Withdrawn => IncompleteReason::Withdrawn,
        }
    }
}

/// The results of a run: one outcome for each requested node and test.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    pub outcomes: Vec<Outcome>,
}

/// One row of the history.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    pub node: NodeName,
    pub test: TestId,
    pub verdict: Verdict,
    pub reason: ReasonCode,
    /// The controller's time. The clock of a node never decides the order of results.
    pub at: Timestamp,
    pub duration: Span,
    pub findings: Vec<Finding>,
}

/// The state of a run's job as the backend reports it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "is")]
pub enum ObservedJobState {
    /// The backend could not be queried. Nothing follows from this.
    Unknown {
        why: String,
    },
    /// The backend was queried and knows no such job.
    Absent,
    Pending {
        job: JobId,
        since: Timestamp,
    },
    Running {
        job: JobId,
        since: Timestamp,
    },
    /// The job has ended. `started` is `None` if it never ran.
    Ended {
        job: JobId,
        started: Option<Timestamp>,
        at: Timestamp,
        how: JobEnd,
    },
}

coded! {
    /// How a job ended, as reported by its backend.
    pub enum JobEnd {
        Exited => "exited",
        Failed => "failed",
        Killed => "killed",
        /// The cluster preempted it for work of higher priority.
        Preempted => "displaced",
        /// Its node failed; the job was not preempted.
        NodeDied => "node-died",
        Lost => "lost",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_reads_back() {
        for why in IncompleteReason::ALL {
            assert_eq!(IncompleteReason::from_code(why.code()), Some(*why));
        }
        for why in NotStartedReason::ALL {
            assert_eq!(NotStartedReason::from_code(why.code()), Some(*why));
        }
        for why in CancelReason::ALL {
            assert_eq!(CancelReason::from_code(why.code()), Some(*why));
        }
        for purpose in Purpose::ALL {
            assert_eq!(Purpose::from_code(purpose.code()), Some(*purpose));
        }
        for end in JobEnd::ALL {
            assert_eq!(JobEnd::from_code(end.code()), Some(*end));
        }
    }

    #[test]
    fn an_empty_list_of_nodes_is_refused() {
        assert!(serde_json::from_str::<NonEmpty<NodeName>>("[]").is_err());
        assert_eq!(serde_json::from_str::<NonEmpty<NodeName>>("[\"a\"]").unwrap().len(), 1);
    }
}
