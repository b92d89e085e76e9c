//! The one place where anything is decided.

use serde::{Deserialize, Serialize};

use crate::{
    case::{Case, Closed, Rung, StepKind},
    ids::{CaseId, NodeName, OpId, PoolName, RunId, TestId},
    lifecycle::Life,
    reason::Because,
    run::{CancelWhy, IncompleteWhy, NotStarted, Run},
    time::Timestamp,
};

/// What to do, and for every node not chosen, why not.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Plan {
    pub actions: Vec<Because<Action>>,
    /// Every node that no action names and no run occupies, by name.
    pub passed_over: Vec<(NodeName, PassedOver)>,
}

/// One thing to do. Those that touch the cluster are written down before they are done.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Action {
    /// A new run.
    Submit(Run),
    /// A run that was written down in an earlier cycle and never reached the backend.
    Resubmit { run: RunId },
    Cancel { run: RunId, why: CancelWhy },
    /// A run is over without a result.
    Conclude { run: RunId, end: Conclusion },
    OpenCase(Case),
    /// The case climbs: what was tried did not help.
    Escalate { case: CaseId, to: Rung },
    /// New trouble in a case that is open already; the case's findings are replaced by the node's open ones.
    Worsen { case: CaseId, node: NodeName },
    Step { case: CaseId, node: NodeName, step: StepKind, op: OpId, tries: u32 },
    /// A step that the policy leaves to a person.
    Propose { case: CaseId, node: NodeName, step: StepKind, op: OpId },
    /// A step that somebody else, or the passing of time, has settled.
    Settle { case: CaseId, op: OpId, done: bool },
    Move { node: NodeName, to: Life, case: Option<CaseId> },
    CloseCase { case: CaseId, node: NodeName, how: Closed },
    OpenBreaker,
    /// Something people should know, said once.
    Notice(Notice),
    /// An operator's request has been seen to.
    Answer { request: u64 },
    /// The machine behind this name is another one than before: its past begins anew.
    Rename { node: NodeName, hardware: crate::ids::HardwareId },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Notice {
    /// So many agents fell silent at once that the fault is ours.
    AgentsSilent { silent: u32, of: u32 },
    AgentsBack,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Conclusion {
    /// It had started: incomplete rows.
    Incomplete(IncompleteWhy),
    /// It had not: no row.
    NotStarted(NotStarted),
}

/// Why a node was not chosen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "because")]
pub enum PassedOver {
    Busy { by: String },
    OccupancyUnknown { why: String },
    ForeignMark { by: String, text: String },
    Held { by: String },
    OutOfService { life: Life },
    BackingOff { until: Timestamp },
    /// Nothing is due before then.
    Fresh { until: Timestamp },
    NothingApplies,
    Paused { by: String },
    QuietWindow,
    /// Due, and others are before it.
    WaitingForSlot,
    PoolFull { pool: PoolName },
    /// What is due loads something shared that is in use.
    ShareBusy { test: TestId },
    BudgetSpent,
}
