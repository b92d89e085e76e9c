//! Plain values that go into the store and come out of it.

use std::collections::BTreeMap;

use doctor_checks::document::{ConfirmedResults, DroppedReports, RunKey, Versions};
use doctor_core::{
    alert::Notification,
    finding::{Finding, OpenFinding, Severity, Verdict},
    ids::{CaseId, HardwareId, NodeName, RunId, TestId},
    last_output::LastOutput,
    lifecycle::NodeState,
    measured_count::MeasuredCount,
    node::{Hardware, Hold},
    plan::{Action, Conclusion, SkipReason},
    reason::{ReasonCode, WithReason},
    run::{Outcome, Run, RunEnd},
    snapshot::{Backoff, Cancelling, TestRecord},
    time::{Span, Timestamp},
};
use serde::{Deserialize, Serialize};

/// The stored state of one node, without its history.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredNode {
    pub state: NodeState,
    pub state_since: Timestamp,
    /// By test; a test that never ran is absent.
    pub records: BTreeMap<TestId, TestRecord>,
    pub findings: Vec<OpenFinding>,
    pub backoff: Option<Backoff>,
    pub hold: Option<Hold>,
    pub hardware: Option<HardwareId>,
    pub case: Option<CaseId>,
    /// GPUs that the node had when it was last accepted; zero if it never had one.
    pub remembered_gpus: u32,
}

/// The counts and sizes of one node, by metric.
pub type NodeCounts = BTreeMap<String, MeasuredCount>;

/// A run that has not ended, with its key, which only the controller may know.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredRun {
    pub run: Run,
    pub key: RunKey,
    pub started: Option<Timestamp>,
    pub cancelling: Option<Cancelling>,
}

/// One cycle's plan, committed before it is carried out.
#[derive(Debug, Clone)]
pub struct CycleIntent<'a> {
    pub at: Timestamp,
    pub actions: &'a [WithReason<Action>],
    /// A key for each `Action::Submit`, by run.
    pub keys: &'a BTreeMap<RunId, RunKey>,
    /// The findings for each `Action::Name`, in order.
    pub attributed_findings: &'a [Vec<Finding>],
    /// Only reasons that differ from the previous cycle.
    pub changed_reasons: &'a [(NodeName, SkipReason)],
    pub policy_version: u32,
    /// Back-off of a node whose run did not start.
    pub retry: &'a doctor_core::policy::Retry,
    /// Notifications about this plan.
    pub notifications: &'a [RoutedNote],
}

/// A notification and its receiver.
#[derive(Debug, Clone, PartialEq)]
pub struct RoutedNote {
    pub receiver: String,
    pub note: Notification,
}

/// A verified and classified result.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ClassifiedResult {
    pub run: RunId,
    pub node: NodeName,
    pub outcomes: Vec<Outcome>,
    pub hardware: Hardware,
    /// The signed bytes as received; stored compressed, with a size limit.
    #[serde(skip)]
    pub evidence: Vec<u8>,
    /// Whether the document covers every test of the run.
    pub complete: bool,
    pub received: Timestamp,
    pub policy_version: u32,
    pub profile_version: Option<u32>,
}

/// The outcome of submitting a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accepted {
    Stored,
    /// This run and node already had a result, or the run had ended.
    Duplicate,
    UnknownRun,
}

/// Results reported by a node's agent, outside of a run.
#[derive(Debug, Clone)]
pub struct AgentFindings {
    pub node: NodeName,
    /// Number and send time by the node's clock, by which the store recognises a repeated report.
    pub number: u64,
    pub sent: Timestamp,
    pub received: Timestamp,
    /// How long the report waited on the node before it was sent.
    pub waited: Span,
    /// By check: everything that fails now. An empty list clears the check's findings.
    pub by_check: BTreeMap<TestId, Vec<Finding>>,
    /// The result of each check in the report, inconclusive ones included.
    pub results: BTreeMap<TestId, AgentResult>,
    /// Checks that ran again with unchanged results.
    pub confirmed: Vec<ConfirmedRound>,
    pub hardware: Hardware,
    /// Reports that the agent discarded before it could send them.
    pub dropped: Option<DroppedReports>,
}

/// The result of a check of an agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentResult {
    pub verdict: Verdict,
    /// The worst of its findings.
    pub severity: Option<Severity>,
    pub reason: ReasonCode,
}

/// Results of a node's agent that it has confirmed by running the checks again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentConfirmation {
    pub node: NodeName,
    /// Number of the agent's last report with results.
    pub through: u64,
    pub rounds: Vec<ConfirmedRound>,
}

/// Checks that an agent ran together, by the controller's clock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfirmedRound {
    pub at: Timestamp,
    pub checks: Vec<TestId>,
}

/// Older rounds renew nothing: no result is valid for longer without a report.
const MAX_ROUND_AGE: Span = Span::days(1);

impl ConfirmedRound {
    /// Converts what a message that was received at this time confirms.
    pub fn from_message(confirmed: ConfirmedResults, received: Timestamp) -> Vec<Self> {
        let rounds = confirmed.rounds.into_iter().filter(|round| round.age <= MAX_ROUND_AGE);
        rounds.map(|round| Self { at: received.minus(round.age), checks: round.checks }).collect()
    }
}

/// An agent that was enrolled or that authenticates by a cluster token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentRow {
    pub node: NodeName,
    pub auth: AgentAuth,
    pub created: Timestamp,
    pub revoked: Option<Timestamp>,
    /// `None`: it never reported.
    pub last_contact: Option<AgentContact>,
}

/// The latest contact of an agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentContact {
    /// Controller's clock.
    pub at: Timestamp,
    pub number: u64,
    /// Node's clock.
    pub sent: Timestamp,
    pub versions: Versions,
}

/// How an agent authenticates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AgentAuth {
    /// By the key it was enrolled with; a revoked agent has none.
    Key,
    /// By a token of its cluster, reviewed periodically.
    Token,
}

/// The credential of a node's agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AgentKey {
    Enrolled {
        key: RunKey,
        last_contact: Option<AgentContact>,
        since: Timestamp,
    },
    /// Never enrolled: the cluster authenticates each message by a token.
    ClusterToken {
        last_contact: Option<AgentContact>,
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
    pub duration: Span,
    /// Imported and not trusted.
    pub untrusted: bool,
    /// Reported by the node's agent, which reports changed results only.
    pub by_agent: bool,
}

/// The newest result of one test on one node. A result of the node's agent has no run, and neither has an imported one.
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

/// Verdict counts of a test over a period.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FailureRate {
    pub test: TestId,
    pub pass: u64,
    pub fail: u64,
    pub inconclusive: u64,
    pub not_applicable: u64,
}

/// An audit line: who did what, when and why.
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
    /// Origin of an API request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<String>,
    /// The plan that an API client confirmed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<String>,
}

/// A past cycle.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CycleRow {
    pub at: Timestamp,
    pub actions: u32,
    pub submitted: u32,
    pub duration: Option<Span>,
    /// What kept the cycle from observing or doing everything, if anything.
    pub error: Option<String>,
}

/// The id of a cycle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CycleId(pub u64);

/// A run in any state, for display. An ended run has no key.
#[derive(Debug, Clone, PartialEq)]
pub struct RunRecord {
    /// An ended run's report is built from history; its findings are in its evidence.
    pub run: Run,
    pub submitted: Option<Timestamp>,
    pub started: Option<Timestamp>,
    pub ended: Option<Timestamp>,
    pub cancelling: Option<Cancelling>,
}

/// A run that ended without a complete result, with the last output of its job on one node.
#[derive(Debug, Clone, PartialEq)]
pub struct EndedWithoutResult {
    pub run: RunId,
    pub tests: Vec<TestId>,
    pub ended: Timestamp,
    pub end: RunEnd,
    pub output: LastOutput,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunEndRow {
    pub run: RunId,
    pub nodes: Vec<NodeName>,
    pub at: Timestamp,
    /// `None`: with a result.
    pub end: Option<Conclusion>,
    /// Why it has no result, in words; only for the latest runs.
    pub text: Option<String>,
}

/// Selects history rows, newest first.
#[derive(Debug, Clone, Default)]
pub struct HistoryFilter {
    pub node: Option<NodeName>,
    pub test: Option<TestId>,
    pub since: Option<Timestamp>,
    pub verdict: Option<Verdict>,
    /// Only rows after this one.
    pub after: Option<HistoryCursor>,
    /// Only rows at or before this time.
    pub before: Option<Timestamp>,
    /// `None`: no limit.
    pub limit: Option<u32>,
}

/// History rows, newest first, found with bounded work.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct HistoryPage {
    pub rows: Vec<HistoryRow>,
    /// The search covered everything newer than this and stopped; there may be more. `None`: these are all rows, or as
    /// many as the limit.
    pub searched_back_to: Option<Timestamp>,
}

/// A row's position in history, newest first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HistoryCursor {
    pub at: Timestamp,
    pub run: Option<RunId>,
    pub node: NodeName,
    pub test: TestId,
}

impl HistoryRow {
    pub fn cursor(&self) -> HistoryCursor {
        HistoryCursor { at: self.at, run: self.run, node: self.node.clone(), test: self.test.clone() }
    }
}

/// Why the planner skipped a node, and since when.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SkipReasonRow {
    pub node: NodeName,
    pub since: Timestamp,
    pub reason: SkipReason,
}

/// The raw document behind a result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EvidenceRow {
    pub bytes: Vec<u8>,
    /// The document was too large; the rest was discarded.
    pub truncated: bool,
    pub received: Timestamp,
    /// The versions it was classified with.
    pub policy_version: u32,
    pub profile_version: Option<u32>,
    /// The case that protects it from retention.
    pub pinned_by: Option<CaseId>,
}

/// Totals of what passed through the store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    pub results_stored: u64,
    pub results_duplicate: u64,
    pub results_of_unknown_runs: u64,
    /// Documents rejected on arrival.
    pub documents_rejected: u64,
    pub runs_ended: u64,
    pub cycles: u64,
    pub published: u64,
    /// Notifications delivered, and those given up.
    pub alerts_delivered: u64,
    pub alerts_given_up: u64,
}

/// Retention periods.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RetentionPolicy {
    pub history: Span,
    pub evidence: Span,
    pub logs: Span,
}

/// What retention deleted, and the log files on the share that the caller should delete.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RetentionSummary {
    pub history_rows: u64,
    pub evidence_rows: u64,
    pub run_rows: u64,
    pub audit_rows: u64,
    /// Runs whose logs on the share have expired. They are listed until `logs_deleted` confirms their deletion.
    pub logs: Vec<ExpiredLog>,
}

/// The expired logs of one run on one node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpiredLog {
    pub run: RunId,
    pub node: NodeName,
    pub tests: Vec<TestId>,
    /// When the run was planned, which is part of the log's name.
    pub planned: Timestamp,
}

/// The outcome of an import.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportSummary {
    pub added: u64,
    /// Rows that an earlier import had added.
    pub already_imported: u64,
    /// Of those, how many became trusted.
    pub trusted: u64,
    /// Unreadable rows; the first few are quoted.
    pub skipped: u64,
    pub skipped_examples: Vec<String>,
}

/// The outcome of publishing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PublishOutcome {
    /// Nothing changed since the last copy.
    Unchanged,
    /// The last copy took so long that the next must wait.
    Deferred,
    Written {
        /// Rows added to the copy.
        rows: u64,
        /// Whether everything was rewritten.
        whole: bool,
    },
}

/// The outcome of verifying the store.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerifyReport {
    /// Checks made, as text.
    pub checked: Vec<String>,
    /// Inconsistencies found. Empty: the store is sound.
    pub problems: Vec<String>,
}

impl VerifyReport {
    pub const fn is_consistent(&self) -> bool {
        self.problems.is_empty()
    }
}
