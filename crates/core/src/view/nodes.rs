//! One row per node.

use serde::Serialize;

use super::{ActiveView, Facts, TestStatus, skip_code, skip_text};
use crate::{
    finding::Severity,
    ids::{CaseId, NodeName, PoolName, TestId},
    node::Occupancy,
    reason::coded,
    snapshot::NodeRecord,
    time::Timestamp,
};

coded! {
    /// The occupancy of a node in one word.
    pub enum OccupancyKind {
        Free => "free",
        Busy => "busy",
        /// Could not be determined. Never treated as free.
        Unknown => "unknown",
        /// The cluster no longer lists it.
        Gone => "gone",
    }
}

/// A node in a list.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NodeRow {
    pub node: NodeName,
    /// Unknown for a node that is gone.
    pub pool: Option<PoolName>,
    pub state: &'static str,
    /// `None`: since it has been known.
    pub since: Option<Timestamp>,
    pub occupancy: OccupancyKind,
    /// The user of the node, or why it is unknown.
    pub occupancy_text: Option<String>,
    pub tests: Vec<TestCell>,
    /// Number of open failing findings.
    pub findings: u32,
    pub worst: Option<Severity>,
    pub case: Option<CaseId>,
    pub our_marks: Vec<String>,
    pub foreign_marks: Vec<String>,
    pub run: Option<ActiveView>,
    /// Why it is not being tested now.
    pub skipped: Option<SkipInfo>,
}

/// A reason as a code and as text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SkipInfo {
    pub code: &'static str,
    pub text: String,
    pub since: Timestamp,
}

/// One test in a node's row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TestCell {
    pub test: TestId,
    pub status: TestStatus,
    /// Time of the newest result of any kind.
    pub at: Option<Timestamp>,
}

/// Returns the rows of these nodes, sorted by name. Unknown names are omitted.
pub fn node_rows(facts: &Facts, names: &[NodeName]) -> Vec<NodeRow> {
    let selected: std::collections::BTreeSet<&NodeName> = names.iter().collect();
    let records = facts.nodes().filter(|(record, _)| selected.contains(&record.node.name));
    records.map(|(record, listed)| node_row(facts, record, listed)).collect()
}

/// Returns one node's row.
pub fn node_row(facts: &Facts, record: &NodeRecord, here: bool) -> NodeRow {
    let (used, used_text) = occupancy_of(record, here);
    let tests = facts.tests_of(record).map(|(test, known)| TestCell {
        test: test.id.clone(),
        status: TestStatus::of(known, test, facts.now),
        at: known.attempt(),
    });
    let marks = &record.node.marks;
    let foreign = |mark: &crate::node::ForeignMark| format!("{}: {}", mark.by, mark.text);
    NodeRow {
        node: record.node.name.clone(),
        pool: here.then(|| record.node.pool.clone()),
        state: record.state.as_str(),
        since: (record.since != Timestamp::MIN).then_some(record.since),
        occupancy: used,
        occupancy_text: used_text,
        tests: tests.collect(),
        findings: u32::try_from(record.findings.len()).unwrap_or(u32::MAX),
        worst: record.findings.iter().map(|open| open.finding.severity).max(),
        case: record.case,
        our_marks: marks.ours.iter().map(|mark| mark.kind.to_string()).collect(),
        foreign_marks: marks.foreign.iter().map(foreign).collect(),
        run: facts.run_on(&record.node.name).map(ActiveView::of),
        skipped: skip_info(facts, record, here),
    }
}

/// Returns the last reason for passing the node over, unless a run occupies it by now.
pub(super) fn skip_info(facts: &Facts, record: &NodeRecord, here: bool) -> Option<SkipInfo> {
    if !here || facts.run_on(&record.node.name).is_some() {
        return None;
    }
    let passed = facts.skip_reasons.get(&record.node.name)?;
    Some(SkipInfo { code: skip_code(&passed.reason), text: skip_text(&passed.reason), since: passed.since })
}

pub(super) fn occupancy_of(record: &NodeRecord, here: bool) -> (OccupancyKind, Option<String>) {
    match &record.node.occupancy {
        _ if !here => (OccupancyKind::Gone, Some("no longer listed by the cluster".to_owned())),
        Occupancy::Free => (OccupancyKind::Free, None),
        Occupancy::Busy { by } => (OccupancyKind::Busy, Some(by.to_string())),
        Occupancy::Unknown { why } => (OccupancyKind::Unknown, Some(why.to_string())),
    }
}
