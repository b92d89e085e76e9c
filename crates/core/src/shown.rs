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
    lifecycle::Life,
    node::Occupancy,
    reason::coded,
    snapshot::{NodeRecord, Snapshot},
    test_status::Standing,
};

coded! {
    /// The one-word status of a node.
    pub enum Status {
        /// Every test that should have run has passed, and no finding is open.
        Pass => "pass",
        /// The node is out of service, or a confirmed finding is open.
        Fail => "fail",
        /// Not tested, not tested recently, or without a conclusive result.
        Unknown => "unknown",
    }
}

/// Upper limits of what is shown; the remainder is counted.
const MOST_FINDINGS: usize = 32;
const MOST_NOT_KNOWN: usize = 16;
/// Length of a finding's text, in characters.
const MOST_TEXT: usize = 256;

/// The published status of a node. It contains no time, so that equal facts give an equal value and nothing is written
/// while nothing changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Shown {
    pub status: Status,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub severity: Option<Severity>,
    pub life: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub case: Option<CaseId>,
    /// The recommendation of the examination, while the case is open.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advice: Option<Advice>,
    pub passed: u32,
    #[serde(skip_serializing_if = "is_nothing")]
    pub not_applicable: u32,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub findings: Vec<ShownFinding>,
    /// Number of findings beyond those.
    #[serde(skip_serializing_if = "is_nothing")]
    pub more_findings: u32,
    /// Tests without a valid pass or fail, and what they have instead.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub not_known: Vec<(TestId, Standing)>,
    /// Number of such tests beyond those.
    #[serde(skip_serializing_if = "is_nothing")]
    pub more_not_known: u32,
    /// The agent should report and does not.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub agent_silent: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ShownFinding {
    pub check: TestId,
    pub reason: String,
    pub severity: Severity,
    pub entity: String,
    pub text: String,
    /// An unconfirmed finding makes a node suspect and no more.
    pub confirmed: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_nothing(count: &u32) -> bool {
    *count == 0
}

/// Summary of a node's tests and findings.
struct Weighed {
    status: Status,
    passed: u32,
    not_applicable: u32,
    not_known: Vec<(TestId, Standing)>,
    silent: bool,
}

impl Weighed {
    fn of(snapshot: &Snapshot, record: &NodeRecord) -> Self {
        let at = snapshot.at;
        let (mut passed, mut not_applicable, mut failed, mut not_known) = (0, 0, false, Vec::new());
        for (test, known) in snapshot.tests.iter().zip(&record.records) {
            if !test.pools.as_ref().is_none_or(|pools| pools.contains(&record.node.pool)) {
                continue;
            }
            match Standing::of(known, test, at) {
                Standing::Pass => passed += 1,
                Standing::NotApplicable => not_applicable += 1,
                Standing::Fail => failed = true,
                // Tests that run only on request are not missed.
                other if test.routine => not_known.push((test.id.clone(), other)),
                _ => {}
            }
        }
        let silent = record.heard.is_some_and(|heard| at.since(heard) > snapshot.policy.agents.silent_after);
        let failing = record.life.is_out() || record.findings.iter().any(crate::finding::OpenFinding::is_confirmed);
        // A failure that is not confirmed is neither a pass nor a fail.
        let unseen = matches!(record.node.occupancy, Occupancy::Unknown { .. });
        let doubtful = failed || unseen || !record.findings.is_empty() || matches!(record.life, Life::Held { .. });
        let status = match failing {
            true => Status::Fail,
            false if doubtful || silent || !not_known.is_empty() || passed == 0 => Status::Unknown,
            false => Status::Pass,
        };
        Self { status, passed, not_applicable, not_known, silent }
    }
}

impl Shown {
    /// Returns the status word alone.
    pub fn status_of(snapshot: &Snapshot, record: &NodeRecord) -> Status {
        Weighed::of(snapshot, record).status
    }

    pub fn of(snapshot: &Snapshot, record: &NodeRecord) -> Self {
        let case =
            record.case.and_then(|id| snapshot.cases.iter().find(|case| case.id == id)).filter(|case| case.is_open());
        let Weighed { status, passed, not_applicable, mut not_known, silent } = Weighed::of(snapshot, record);
        let mut findings: Vec<ShownFinding> = record.findings.iter().map(ShownFinding::of).collect();
        findings.sort_by(|a, b| {
            b.severity.cmp(&a.severity).then_with(|| (&a.check, &a.entity).cmp(&(&b.check, &b.entity)))
        });
        let more = findings.len().saturating_sub(MOST_FINDINGS);
        findings.truncate(MOST_FINDINGS);
        let more_not_known = not_known.len().saturating_sub(MOST_NOT_KNOWN);
        not_known.truncate(MOST_NOT_KNOWN);
        Self {
            status,
            severity: findings.first().map(|worst| worst.severity),
            life: record.life.word(),
            case: case.map(|case| case.id),
            advice: case.and_then(advice),
            passed,
            not_applicable,
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

impl ShownFinding {
    fn of(open: &crate::finding::OpenFinding) -> Self {
        let finding = &open.finding;
        Self {
            check: finding.check.clone(),
            reason: finding.reason.to_string(),
            severity: finding.severity,
            entity: finding.entity.to_string(),
            text: finding.text.chars().take(MOST_TEXT).collect(),
            confirmed: open.is_confirmed(),
        }
    }
}
