//! The summary of a period of time, such as a day.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::{
    CoverageRow, Facts, Slot, coverage, is_overdue,
    period::{Period, RunFacts, TestResult, closed_at, spent},
    run_end, skip_code,
    time_slots::slots,
};
use crate::{
    case::Case,
    finding::{Severity, Verdict},
    ids::{CaseId, NodeName, TestId},
    node::Occupancy,
    run::{Run, RunEnd, RunState},
    time::{Span, Timestamp},
};

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ReportView {
    pub since: Timestamp,
    pub until: Timestamp,
    pub nodes: u32,
    /// Jobs that were planned.
    pub queued: u32,
    /// Jobs that started.
    pub run: u32,
    pub completed: u32,
    /// Jobs that started without a complete result, by reason.
    pub incomplete: Vec<Count>,
    /// Jobs that never started, by reason.
    pub not_started: Vec<Count>,
    /// Nodes that were passed over by the last plan, by reason.
    pub skipped: Vec<Count>,
    pub results: Vec<ResultsRow>,
    pub busy: u32,
    pub unknown: u32,
    /// Nodes with a due test.
    pub overdue: Vec<NodeName>,
    pub coverage: Vec<CoverageRow>,
    pub faults: Vec<FaultRow>,
    /// Findings that are open now.
    pub open_findings: u32,
    pub cases_opened: u32,
    pub cases_closed: u32,
    pub cases_open: u32,
    pub node_hours: f64,
    /// Validation node-hours per opened case. `None`: no case was opened.
    pub node_hours_per_fault: Option<f64>,
    /// The period in slots of equal length, for plots.
    pub slots: Vec<Slot>,
}

/// The count of one reason code.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Count {
    pub code: &'static str,
    pub count: u32,
}

/// Results of one test in the period.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ResultsRow {
    pub test: TestId,
    pub pass: u32,
    pub fail: u32,
    pub inconclusive: u32,
    pub not_applicable: u32,
    /// Nodes that failed it at least once.
    pub failing_nodes: u32,
}

/// A case that was opened.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FaultRow {
    pub case: CaseId,
    pub node: NodeName,
    pub opened: Timestamp,
    pub severity: Severity,
    pub text: String,
    pub open: bool,
}

/// Builds the summary of `[since, now)`.
pub fn report(facts: &Facts, period: &Period, since: Timestamp) -> ReportView {
    let until = facts.now;
    let inside = |at: Timestamp| at >= since && at < until;
    let runs: Vec<&RunFacts> = period.runs.iter().filter(|facts| inside(facts.run.planned)).collect();
    let ends = || runs.iter().filter_map(|facts| end_of(&facts.run));
    let node_hours: f64 = period.runs.iter().map(|run| spent(run, since, until)).sum::<Span>().as_hours();
    let opened: Vec<&Case> = period.cases.iter().filter(|case| inside(case.opened)).collect();
    let closed = period.cases.iter().filter(|case| closed_at(case).is_some_and(inside));
    let records = &facts.snapshot.nodes;
    ReportView {
        since,
        until,
        nodes: count(records.len()),
        queued: count(runs.len()),
        run: count(runs.iter().filter(|facts| facts.started.is_some()).count()),
        completed: count(ends().filter(|end| matches!(end, RunEnd::Completed(_))).count()),
        incomplete: counts(
            ends().filter(|end| matches!(end, RunEnd::Incomplete { .. })).filter_map(|end| run_end(end).1),
        ),
        not_started: counts(ends().filter(|end| matches!(end, RunEnd::NotStarted(_))).filter_map(|end| run_end(end).1)),
        skipped: counts(facts.skip_reasons.values().map(|passed| skip_code(&passed.reason))),
        results: results(period),
        busy: count(records.iter().filter(|r| matches!(r.node.occupancy, Occupancy::Busy { .. })).count()),
        unknown: count(records.iter().filter(|r| matches!(r.node.occupancy, Occupancy::Unknown { .. })).count()),
        overdue: records.iter().filter(|r| is_overdue(facts, r)).map(|r| r.node.name.clone()).collect(),
        coverage: coverage(facts),
        open_findings: count(facts.nodes().map(|(record, _)| record.findings.len()).sum()),
        cases_opened: count(opened.len()),
        cases_closed: count(closed.count()),
        cases_open: count(period.cases.iter().filter(|case| case.is_open()).count()),
        node_hours,
        node_hours_per_fault: (!opened.is_empty()).then(|| node_hours / f64::from(count(opened.len()))),
        faults: opened.into_iter().map(fault).collect(),
        slots: slots(period, since, until),
    }
}

fn count(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

const fn end_of(run: &Run) -> Option<&RunEnd> {
    match &run.state {
        RunState::Ended(end) => Some(end),
        RunState::Planned | RunState::Submitted { .. } | RunState::Running { .. } => None,
    }
}

/// Counts codes, most frequent first.
fn counts(codes: impl Iterator<Item = &'static str>) -> Vec<Count> {
    let mut by_code: BTreeMap<&'static str, u32> = BTreeMap::new();
    for code in codes {
        *by_code.entry(code).or_default() += 1;
    }
    let mut counts: Vec<Count> = by_code.into_iter().map(|(code, count)| Count { code, count }).collect();
    counts.sort_by_key(|row| std::cmp::Reverse(row.count));
    counts
}

fn results(period: &Period) -> Vec<ResultsRow> {
    let mut rows: BTreeMap<&TestId, (ResultsRow, BTreeSet<&NodeName>)> = BTreeMap::new();
    for TestResult { test, node, verdict, .. } in &period.results {
        let (row, failing) = rows.entry(test).or_insert_with(|| {
            let (pass, fail, inconclusive, not_applicable, failing_nodes) = (0, 0, 0, 0, 0);
            let test = test.clone();
            (ResultsRow { test, pass, fail, inconclusive, not_applicable, failing_nodes }, BTreeSet::new())
        });
        *match verdict {
            Verdict::Pass => &mut row.pass,
            Verdict::Fail => &mut row.fail,
            Verdict::Inconclusive => &mut row.inconclusive,
            Verdict::NotApplicable => &mut row.not_applicable,
        } += 1;
        if *verdict == Verdict::Fail {
            failing.insert(node);
        }
    }
    rows.into_values()
        .map(|(mut row, failing)| {
            row.failing_nodes = count(failing.len());
            row
        })
        .collect()
}

fn fault(case: &Case) -> FaultRow {
    let worst = case.findings.iter().max_by_key(|finding| finding.severity);
    FaultRow {
        case: case.id,
        node: case.node.clone(),
        opened: case.opened,
        severity: case.severity,
        text: worst.map_or_else(|| "taken out by an operator".to_owned(), |finding| finding.text.clone()),
        open: case.is_open(),
    }
}
