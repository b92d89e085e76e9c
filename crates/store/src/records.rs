//! What goes into the store and comes out of it, as plain values.

use std::collections::BTreeMap;

use doctor_checks::document::{Dropped, RunKey, Versions};
use doctor_core::{
    alert::Note,
    finding::{Finding, OpenFinding, Severity, Verdict},
    ids::{CaseId, HardwareId, NodeName, RunId, TestId},
    lifecycle::Life,
    node::{Hardware, Hold},
    plan::{Action, PassedOver},
    reason::{Because, ReasonCode},
    run::{Outcome, Run},
    snapshot::{Backoff, Cancelling, TestRecord},
    time::{Span, Timestamp},
};
use serde::{Deserialize, Serialize};

/// All the store knows of one node, but for its past results.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredNode {
    pub life: Life,
    pub since: Timestamp,
    /// By test; a test that never ran is not in it.
    pub records: BTreeMap<TestId, TestRecord>,
    pub findings: Vec<OpenFinding>,
    pub backoff: Option<Backoff>,
    pub hold: Option<Hold>,
    pub hardware: Option<HardwareId>,
    pub case: Option<CaseId>,
}

/// A run that has not ended, with what only the controller may know of it.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredRun {
    pub run: Run,
    pub key: RunKey,
    pub started: Option<Timestamp>,
    pub cancelling: Option<Cancelling>,
}

/// One cycle's decision, written before anything is done about it.
#[derive(Debug, Clone)]
pub struct CycleIntent<'a> {
    pub at: Timestamp,
    pub actions: &'a [Because<Action>],
    /// One for each `Action::Submit`, by run.
    pub keys: &'a BTreeMap<RunId, RunKey>,
    /// What the rules make of each `Action::Name`, in their order.
    pub named: &'a [Vec<Finding>],
    /// Only reasons that differ from the last cycle's.
    pub changed_reasons: &'a [(NodeName, PassedOver)],
    pub policy_version: u32,
    /// Back-off of a node whose run did not start.
    pub retry: &'a doctor_core::policy::Retry,
    /// What people are told of it.
    pub told: &'a [Addressed],
}

/// A note and who is to be told.
#[derive(Debug, Clone, PartialEq)]
pub struct Addressed {
    pub receiver: String,
    pub note: Note,
}

/// A verified and judged result, ready to be kept.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct JudgedResult {
    pub run: RunId,
    pub node: NodeName,
    pub outcomes: Vec<Outcome>,
    pub hardware: Hardware,
    /// The signed bytes as they came in; stored compressed, capped.
    #[serde(skip)]
    pub evidence: Vec<u8>,
    /// Whether the document answers every test of the run.
    pub complete: bool,
    pub received: Timestamp,
    pub policy_version: u32,
    pub profile_version: Option<u32>,
}

/// What became of a result at the door.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accepted {
    Kept,
    /// This run and node had a result, or the run had ended, before.
    Duplicate,
    UnknownRun,
}

/// Findings that came from a node's agent and not from a run.
#[derive(Debug, Clone)]
pub struct AgentFindings {
    pub node: NodeName,
    /// By these the store knows a report that it has kept already: its number, and when it was sent by the node's clock.
    pub number: u64,
    pub sent: Timestamp,
    pub received: Timestamp,
    /// Of each check that reported: all that fails now. An empty list clears that check's findings.
    pub by_check: BTreeMap<TestId, Vec<Finding>>,
    pub hardware: Hardware,
    /// Reports that its agent had to throw away before it could send them.
    pub dropped: Option<Dropped>,
}

/// An agent that was enrolled, or that its cluster vouches for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentRow {
    pub node: NodeName,
    pub speaks_by: SpeaksBy,
    pub created: Timestamp,
    pub revoked: Option<Timestamp>,
    /// `None`: it never spoke.
    pub heard: Option<AgentHeard>,
}

/// The newest that was heard of an agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentHeard {
    /// By the controller's clock.
    pub at: Timestamp,
    pub number: u64,
    /// By the node's clock.
    pub sent: Timestamp,
    pub versions: Versions,
}

/// What makes an agent believed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SpeaksBy {
    /// The key it was enrolled with; one that was revoked has none any more.
    Key,
    /// A token of its cluster, looked at anew again and again.
    Token,
}

/// What is known of the key that a node's agent signs with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AgentKey {
    Enrolled {
        key: RunKey,
        heard: Option<AgentHeard>,
        since: Timestamp,
    },
    /// It was never enrolled: its cluster vouches for each message by a token.
    Vouched {
        heard: Option<AgentHeard>,
    },
    Revoked,
    Unknown,
}

/// A row of history.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HistoryRow {
    pub node: NodeName,
    pub test: TestId,
    pub at: Timestamp,
    pub verdict: Verdict,
    pub reason: ReasonCode,
    pub severity: Option<Severity>,
    pub run: Option<RunId>,
    pub took: Span,
    /// Imported from elsewhere and not believed.
    pub untrusted: bool,
}

/// The newest result of one test on one node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LatestRow {
    pub node: NodeName,
    pub test: TestId,
    pub at: Timestamp,
    pub verdict: Verdict,
    pub reason: ReasonCode,
    pub run: Option<RunId>,
    /// The newest pass or fail.
    pub conclusive: Option<(Verdict, Timestamp)>,
    pub misses: u32,
}

/// How often a test failed over a time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FailureRate {
    pub test: TestId,
    pub pass: u64,
    pub fail: u64,
    pub inconclusive: u64,
    pub not_applicable: u64,
}

/// One line of the audit trail: who did what, when, why.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AuditRow {
    pub at: Timestamp,
    pub by: String,
    pub what: String,
    pub node: Option<NodeName>,
    pub case: Option<CaseId>,
    pub run: Option<RunId>,
    pub code: ReasonCode,
    pub text: String,
    /// From where it was asked for, of what came by the API.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<String>,
    /// What was shown of it before it was done, of what came by the API.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<String>,
}

/// A cycle as it was.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CycleRow {
    pub at: Timestamp,
    pub actions: u32,
    pub submitted: u32,
    pub took: Option<Span>,
    /// What kept the cycle from seeing or doing everything, if anything did.
    pub trouble: Option<String>,
}

/// A cycle's number in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CycleId(pub u64);

/// A run in whatever state, as people ask for it. A run that has ended has no key any more.
#[derive(Debug, Clone, PartialEq)]
pub struct RunRecord {
    /// An ended run's report is put together from history; what its findings were is told by its evidence.
    pub run: Run,
    pub submitted: Option<Timestamp>,
    pub started: Option<Timestamp>,
    pub ended: Option<Timestamp>,
    pub cancelling: Option<Cancelling>,
}

/// Which rows of history are wanted; newest first.
#[derive(Debug, Clone, Default)]
pub struct HistoryFilter {
    pub node: Option<NodeName>,
    pub test: Option<TestId>,
    pub since: Option<Timestamp>,
    pub verdict: Option<Verdict>,
    /// Only what follows this row.
    pub after: Option<HistoryPlace>,
    /// Only what is not younger than this.
    pub before: Option<Timestamp>,
    /// Absent: all of them.
    pub limit: Option<u32>,
}

/// Some rows of history, newest first, found without looking at more than a question may.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct HistoryPart {
    pub rows: Vec<HistoryRow>,
    /// All that is younger was looked at, and nothing else: there may be more. `None`: these are all, or as many as were wanted.
    pub searched: Option<Timestamp>,
}

/// Where a row of history stands among all, newest first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HistoryPlace {
    pub at: Timestamp,
    pub run: Option<RunId>,
    pub node: NodeName,
    pub test: TestId,
}

impl HistoryRow {
    pub fn place(&self) -> HistoryPlace {
        HistoryPlace { at: self.at, run: self.run, node: self.node.clone(), test: self.test.clone() }
    }
}

/// Why a node was not chosen, and since when that is so.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReasonRow {
    pub node: NodeName,
    pub since: Timestamp,
    pub reason: PassedOver,
}

/// The raw document behind a result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EvidenceRow {
    pub bytes: Vec<u8>,
    /// The document was larger than what is kept; the rest is gone.
    pub truncated: bool,
    pub received: Timestamp,
    /// With these versions it was judged.
    pub policy_version: u32,
    pub profile_version: Option<u32>,
    /// The case that keeps it from being pruned.
    pub pinned_by: Option<CaseId>,
}

/// How much went through the store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    pub results_kept: u64,
    pub results_duplicate: u64,
    pub results_of_unknown_runs: u64,
    /// Documents that were refused at the door.
    pub documents_rejected: u64,
    pub runs_ended: u64,
    pub cycles: u64,
    pub published: u64,
    /// Messages to people that arrived, and those that were given up.
    pub alerts_delivered: u64,
    pub alerts_lost: u64,
}

/// How long things are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RetentionPolicy {
    pub history: Span,
    pub evidence: Span,
    pub logs: Span,
}

/// What retention removed, and what somebody with access to the share should remove.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Pruned {
    pub history_rows: u64,
    pub evidence_rows: u64,
    pub run_rows: u64,
    pub audit_rows: u64,
    /// Runs whose logs on the share have outlived their time. They are named until `logs_deleted` says they are gone.
    pub logs: Vec<ExpiredLog>,
}

/// The logs of one run on one node, too old to be kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpiredLog {
    pub run: RunId,
    pub node: NodeName,
    pub tests: Vec<TestId>,
    /// When the run was decided on, which is part of the log's name.
    pub planned: Timestamp,
}

/// What an import brought in.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Imported {
    pub added: u64,
    /// Rows that an earlier import had brought already.
    pub known: u64,
    /// Of those, how many were not believed and are now.
    pub trusted: u64,
    /// Rows that could not be understood; the first few are quoted.
    pub skipped: u64,
    pub skipped_examples: Vec<String>,
}

/// What became of the published copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Published {
    /// Nothing changed since the last copy.
    Unchanged,
    /// The last copy took so long that the next has to wait a little.
    Later,
    Written {
        /// Rows that the last copy did not have.
        rows: u64,
        /// Whether everything was written anew.
        whole: bool,
    },
}

/// What a check of the whole store found.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verified {
    /// What was looked at, in words.
    pub checked: Vec<String>,
    /// What is wrong. Empty: the store is sound.
    pub troubles: Vec<String>,
}

impl Verified {
    pub const fn is_sound(&self) -> bool {
        self.troubles.is_empty()
    }
}
