//! The status that is published on a node: one word, and the results behind it.
//!
//! Users select nodes by the word and other systems act on it. So a node has `pass` only if every test that should be
//! fresh has passed; unknown results give `unknown`, and a node that is out of service has `fail` regardless of its
//! tests.

use serde::Serialize;

use crate::{
    case::{Advice, Case, CaseState},
    finding::Severity,
    ids::{CaseId, TestId},
    lifecycle::NodeState,
    node::Occupancy,
    reason::coded,
    snapshot::{NodeRecord, Snapshot},
    test_status::TestStatus,
    time::Timestamp,
};

coded! {
    /// The one-word status of a node.
    pub enum NodeHealth {
        /// Every test that should have run has passed, and no finding is open.
        Pass => "pass",
        /// The node is out of service, or a confirmed finding is open.
        Fail => "fail",
        /// Not tested, not tested recently, or without a conclusive result.
        Unknown => "unknown",
    }
}

/// Upper limits of what is shown; the remainder is counted.
const MAX_FINDINGS: usize = 32;
const MOST_NOT_KNOWN: usize = 16;
/// Length of a finding's text, in characters.
const MAX_TEXT_CHARS: usize = 256;

/// The published status of a node. It contains no time, so that equal facts give an equal value and nothing is written
/// while nothing changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NodeStatus {
    pub status: NodeHealth,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub severity: Option<Severity>,
    pub state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub case: Option<CaseId>,
    /// What an operator requested for the node, while that applies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub operator: Option<OperatorNote>,
    /// The recommendation of the examination, while the case is open.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advice: Option<Advice>,
    pub passed: u32,
    #[serde(skip_serializing_if = "is_zero")]
    pub not_applicable: u32,
    /// Tests with measurements that nothing gives an expected value for.
    #[serde(skip_serializing_if = "is_zero")]
    pub not_judged: u32,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub findings: Vec<StatusFinding>,
    /// Number of findings beyond those.
    #[serde(skip_serializing_if = "is_zero")]
    pub more_findings: u32,
    /// Tests without a valid pass or fail, and what they have instead.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub not_known: Vec<(TestId, TestStatus)>,
    /// Number of such tests beyond those.
    #[serde(skip_serializing_if = "is_zero")]
    pub more_not_known: u32,
    /// The agent should report and does not.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub agent_silent: bool,
}

/// A request of an operator: who, what and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct OperatorNote {
    /// The command: `hold`, `quarantine`, or the repair step.
    pub request: &'static str,
    pub by: String,
    pub why: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct StatusFinding {
    pub check: TestId,
    pub reason: String,
    pub severity: Severity,
    pub entity: String,
    pub text: String,
    /// An unconfirmed finding makes a node suspect and no more.
    pub confirmed: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_zero(count: &u32) -> bool {
    *count == 0
}

/// Summary of a node's tests and findings.
struct Assessment {
    status: NodeHealth,
    passed: u32,
    not_applicable: u32,
    not_judged: u32,
    not_known: Vec<(TestId, TestStatus)>,
    silent: bool,
}

impl Assessment {
    fn of(snapshot: &Snapshot, record: &NodeRecord) -> Self {
        let at = snapshot.at;
        let (mut passed, mut not_applicable, mut not_judged, mut failed) = (0, 0, 0, false);
        let mut not_known = Vec::new();
        for (test, known) in snapshot.tests.iter().zip(&record.test_records) {
            if !test.pools.as_ref().is_none_or(|pools| pools.contains(&record.node.pool)) {
                continue;
            }
            match TestStatus::of(known, test, at) {
                TestStatus::Pass => {
                    passed += 1;
                    not_judged += u32::from(known.has_not_judged());
                }
                TestStatus::NotApplicable => not_applicable += 1,
                TestStatus::NotJudged => not_judged += 1,
                TestStatus::Fail => failed = true,
                // Tests that run only on request are not missed.
                other if test.routine => not_known.push((test.id.clone(), other)),
                _ => {}
            }
        }
        let silent =
            record.last_report.is_some_and(|last_report| at.since(last_report) > snapshot.policy.agents.silent_after);
        let failing =
            record.state.is_out_of_service() || record.findings.iter().any(crate::finding::OpenFinding::is_confirmed);
        // A failure that is not confirmed is neither a pass nor a fail.
        let unreachable = matches!(record.node.occupancy, Occupancy::Unknown { .. });
        let doubtful =
            failed || unreachable || !record.findings.is_empty() || matches!(record.state, NodeState::Held { .. });
        let status = match failing {
            true => NodeHealth::Fail,
            false if doubtful || silent || !not_known.is_empty() || passed == 0 => NodeHealth::Unknown,
            false => NodeHealth::Pass,
        };
        Self { status, passed, not_applicable, not_judged, not_known, silent }
    }
}

impl NodeStatus {
    /// Returns the status word alone.
    pub fn health_of(snapshot: &Snapshot, record: &NodeRecord) -> NodeHealth {
        Assessment::of(snapshot, record).status
    }

    pub fn of(snapshot: &Snapshot, record: &NodeRecord) -> Self {
        let case =
            record.case.and_then(|id| snapshot.cases.iter().find(|case| case.id == id)).filter(|case| case.is_open());
        let Assessment { status, passed, not_applicable, not_judged, mut not_known, silent } =
            Assessment::of(snapshot, record);
        let mut findings: Vec<StatusFinding> = record.findings.iter().map(StatusFinding::of).collect();
        findings.sort_by(|a, b| {
            b.severity.cmp(&a.severity).then_with(|| (&a.check, &a.entity).cmp(&(&b.check, &b.entity)))
        });
        let more = findings.len().saturating_sub(MAX_FINDINGS);
        findings.truncate(MAX_FINDINGS);
        let more_not_known = not_known.len().saturating_sub(MOST_NOT_KNOWN);
        not_known.truncate(MOST_NOT_KNOWN);
        Self {
            status,
            severity: findings.first().map(|worst| worst.severity),
            state: record.state.as_str(),
            case: case.map(|case| case.id),
            operator: OperatorNote::of(record, case, snapshot.at),
            advice: case.and_then(advice),
            passed,
            not_applicable,
            not_judged,
            findings,
            more_findings: u32::try_from(more).unwrap_or(u32::MAX),
            not_known,
            more_not_known: u32::try_from(more_not_known).unwrap_or(u32::MAX),
            agent_silent: silent,
        }
    }
}

fn advice(case: &Case) -> Option<Advice> {
    case.advice.filter(|_| case.state == CaseState::Open)
}

impl OperatorNote {
    /// A hold applies before what was requested earlier.
    fn of(record: &NodeRecord, case: Option<&Case>, at: Timestamp) -> Option<Self> {
        let short = |text: &str| text.chars().take(MAX_TEXT_CHARS).collect();
        let note = |request, by: &str, why: &str| Self { request, by: short(by), why: short(why) };
        let hold = record.hold_at(at).map(|hold| note("hold", &hold.by, &hold.why));
        hold.or_else(|| {
            let request = case?.request.as_ref()?;
            let what = request.repair.as_ref().map_or("quarantine", |repair| repair.what.code());
            Some(note(what, &request.by, &request.why))
        })
    }

    /// Returns the note as one sentence.
    pub fn text(&self) -> String {
        format!("{} requested by {}: {}", self.request, self.by, self.why)
    }
}

impl StatusFinding {
    fn of(open: &crate::finding::OpenFinding) -> Self {
        let finding = &open.finding;
        Self {
            check: finding.check.clone(),
            reason: finding.reason.to_string(),
            severity: finding.severity,
            entity: finding.entity.to_string(),
            text: finding.text.chars().take(MAX_TEXT_CHARS).collect(),
            confirmed: open.is_confirmed(),
        }
    }
}
