//! `doctor why NODE`: everything known about one node, and what to do.

use std::collections::BTreeMap;

use doctor_core::{
    ids::NodeName,
    job_failures::JobFailure,
    time::Timestamp,
    view::{self, AuditLine, CaseView, Due, FindingView, TestLine, TestStatus, WhyView},
};
use doctor_engine::{
    agents::{self, AgentView},
    cluster_state,
};

use serde::Serialize;

use super::{agent, nodes::status_cell, status::names};
use crate::{
    context::Context,
    exit::Exit,
    failure::{Failure, Result},
    output::{Cell, Page, Table, ago, cell, comma_separated, format_time},
};

/// Explain the state of a node: findings with their rule and evidence, every test, why it is not being tested now, past
/// actions and the next step.
///
/// Exit code 1 if the node has open findings.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    node: NodeName,
    /// Number of lines of the audit trail.
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub(super) audit: u32,
    /// One line for each test instead of each suite.
    #[arg(long)]
    tests: bool,
}

pub(crate) fn run(context: &Context, args: &Args) -> Result<Exit> {
    let store = context.store()?;
    let facts = context.facts(&store)?;
    let node = &args.node;
    let Some(view) = view::why(&facts, node, cluster_state::node_details(&store, &facts, node, args.audit)?) else {
        context.select_nodes(&facts, &[doctor_core::hostlist::Selector::Names([node.clone()].into())])?;
        return Err(Failure::Unknown { what: "node", name: node.to_string(), known: "see `doctor nodes`".to_owned() });
    };
    let agent = agents::views(&store, &facts)?.into_iter().find(|agent| agent.node == *node);
    let explanation = NodeExplanation { view, agent };
    context.out.show(&explanation, |page| text(page, &explanation, args.tests))?;
    Ok(if explanation.view.findings.is_empty() { Exit::Ok } else { Exit::ProblemsFound })
}

/// A node and its agent.
#[derive(Debug, Serialize)]
struct NodeExplanation {
    #[serde(flatten)]
    view: WhyView,
    /// `None`: no agent was enrolled.
    agent: Option<AgentView>,
}

fn text(page: &mut Page, NodeExplanation { view, agent }: &NodeExplanation, every_test: bool) {
    let now = view.at;
    page.line(format!("{}.", view.headline));
    page.line(state_line(view));
    if let Some(agent) = agent {
        page.line(format!("Its agent: {}", agent::describe(agent, now)));
    }
    match &view.row.skipped {
        Some(passed) => {
            page.line(format!("Skipped since {} UTC ({}): {}", format_time(passed.since), passed.code, passed.text))
        }
        None => match &view.row.run {
            Some(run) => page.line(format!(
                "Run {} ({}) is {} since {}: {}",
                run.run,
                names(&run.tests),
                run.state,
                format_time(run.since),
                run.because
            )),
            None => page,
        },
    };
    if let Some(ended) = &view.without_result {
        page.line(format!("{} UTC: {}", format_time(ended.ended), ended.sentence()));
        page.line(format!("  `doctor log {}` shows the rest", ended.run));
    }
    page.heading("What to do");
    for line in &view.next {
        page.line(format!("  - {line}"));
    }
    if !view.findings.is_empty() {
        page.heading("Open findings");
        findings(page, &view.findings, now);
    }
    if !view.job_failures.is_empty() {
        page.heading("Recent failed user work");
        page.table(&failed_work(&view.job_failures));
    }
    test_results(page, view, every_test);
    if let Some(case) = &view.case {
        print_case(page, case);
    }
    if !view.audit.is_empty() {
        page.heading("Recent actions");
        page.table(&audit(&view.audit));
    }
}

fn state_line(view: &WhyView) -> String {
    let row = &view.row;
    let mut parts = vec![format!("pool {}", row.pool.as_ref().map_or("-", |pool| pool.as_str()))];
    parts.push(match &row.occupancy_text {
        Some(text) => format!("{} ({text})", row.occupancy),
        None => row.occupancy.to_string(),
    });
    let since = row.since.map_or_else(
        || "since it was first seen".to_owned(),
        |since| format!("since {} UTC ({})", format_time(since), ago(view.at, since)),
    );
    parts.push(format!("{} {since}", row.state));
    if !row.our_marks.is_empty() {
        parts.push(format!("our marks: {}", comma_separated(&row.our_marks)));
    }
    if !row.foreign_marks.is_empty() {
        parts.push(format!("marks of others: {}", comma_separated(&row.foreign_marks)));
    }
    if let Some(backoff) = &view.backoff {
        parts.push(format!("backing off until {} UTC", format_time(backoff.until)));
    }
    if let Some(hardware) = &view.hardware {
        parts.push(hardware.to_string());
    }
    parts.join(" · ")
}

/// Prints findings, two or three lines each, because no column is wide enough for a sentence.
fn findings(page: &mut Page, findings: &[FindingView], now: Timestamp) {
    for finding in findings {
        let confirmed = if finding.confirmed { "confirmed" } else { "not confirmed" };
        page.line(format!("  {} [{}] {}", finding.severity, finding.entity, finding.text));
        page.line(format!(
            "    {} · rule {} · {} · seen {} of {} times, {confirmed} · first {}, last {}{}",
            finding.check,
            finding.rule,
            finding.reason,
            finding.sightings,
            finding.confirm,
            ago(now, finding.first_seen),
            ago(now, finding.last_seen),
            finding.run.map_or_else(|| " · by the agent".to_owned(), |run| format!(" · run {run}"))
        ));
        page.line(format!(
            "    {} · evidence: {} · remedy: {}",
            finding.severity.described(),
            finding.evidence,
            finding.remedy
        ));
    }
}

/// With more tests than this, they are counted by suite, and those that do not apply are grouped by reason.
const MAX_UNGROUPED_TESTS: usize = 12;

/// Prints the tests: all of them, or one line for each suite, and those whose last result has a reason to read.
fn test_results(page: &mut Page, view: &WhyView, every_test: bool) {
    let is_long = view.tests.len() > MAX_UNGROUPED_TESTS;
    let (not_here, here): (Vec<_>, Vec<_>) = view.tests.iter().partition(|line| {
        let grouped = matches!(line.status, TestStatus::NotApplicable | TestStatus::NotJudged);
        grouped && is_long
    });
    if every_test || !is_long {
        page.heading("Tests");
        page.table(&tests(&here, view.at));
        not_applicable(page, &not_here);
        return;
    }
    page.heading("Tests by suite (--tests: one line for each test)");
    page.table(&suites(&view.tests));
    let has_reason = |line: &&TestLine| matches!(line.status, TestStatus::Fail | TestStatus::Inconclusive);
    let explained: Vec<&TestLine> = here.into_iter().filter(has_reason).collect();
    if !explained.is_empty() {
        page.heading("Tests that failed or gave no result");
        page.table(&tests(&explained, view.at));
    }
    not_applicable(page, &not_here);
}

/// Counts the tests of each suite by status, and names those that are not pass.
fn suites(lines: &[TestLine]) -> Table {
    let mut by_suite: BTreeMap<&str, Vec<&TestLine>> = BTreeMap::new();
    for line in lines {
        by_suite.entry(view::suite_label(line.suite.as_ref())).or_default().push(line);
    }
    let mut table = Table::new(["SUITE", "TESTS", "RESULTS", "NOT PASS"]).right_align(&[1]).indent(2);
    for (suite, lines) in by_suite {
        let counts = TestStatus::ALL.iter().filter_map(|status| {
            let count = lines.iter().filter(|line| line.status == *status).count();
            (count > 0).then(|| format!("{count} {}", status.label()))
        });
        let is_good = |line: &&&TestLine| {
            matches!(line.status, TestStatus::Pass | TestStatus::NotApplicable | TestStatus::NotJudged)
        };
        let not_pass: Vec<&str> = lines.iter().filter(|line| !is_good(line)).map(|line| line.test.as_str()).collect();
        table.row([cell(suite), cell(lines.len().to_string()), cell(comma_separated(counts)), cell(names(&not_pass))]);
    }
    table
}

fn not_applicable(page: &mut Page, lines: &[&TestLine]) {
    let mut by_reason: BTreeMap<(&str, &str), Vec<&str>> = BTreeMap::new();
    for line in lines {
        let reason = line.last.as_ref().map_or("-", |last| last.reason.as_str());
        by_reason.entry((line.status.label(), reason)).or_default().push(line.test.as_str());
    }
    for ((status, reason), tests) in by_reason {
        page.line(format!("  {status} ({reason}): {}", comma_separated(&tests)));
    }
}

fn tests(lines: &[&TestLine], now: Timestamp) -> Table {
    let mut table =
        Table::new(["TEST", "STATUS", "LAST RESULT", "REASON", "LAST PASS OR FAIL", "RUN", "DUE"]).indent(2);
    for line in lines {
        let last = line.last.as_ref();
        let conclusive = last.and_then(|last| last.conclusive);
        table.row([
            cell(line.test.as_str()),
            status_cell(line.status, line.status.label().to_owned()),
            cell(last.map_or_else(|| "-".to_owned(), |last| ago(now, last.at))),
            cell(last.map_or("-", |last| last.reason.as_str())),
            cell(conclusive.map_or_else(|| "never".to_owned(), |(verdict, at)| format!("{verdict} {}", ago(now, at)))),
            cell(last.and_then(|last| last.run).map_or_else(|| "-".to_owned(), |run| run.to_string())),
            due(line, now),
        ]);
    }
    table
}

fn due(line: &TestLine, now: Timestamp) -> Cell {
    match line.due {
        Due::Now => cell("now").warn(),
        Due::At { at } => cell(ago(now, at)),
        Due::ByAgent => cell("by the agent"),
        Due::Retry { at, misses } => cell(format!("{} (after {misses} without result)", ago(now, at))),
    }
}

fn print_case(page: &mut Page, case: &CaseView) {
    let state = if case.open { "open" } else { "closed" };
    // A closed case requires nothing any more.
    let severity = if case.open { case.severity.described() } else { case.severity.to_string() };
    page.heading(&format!(
        "Case {} ({state}, {severity}, since {} UTC, repair step {})",
        case.id,
        format_time(case.opened),
        case.repair_step
    ));
    let mut table = Table::new(["AT (UTC)", "STEP", "STATE", "TRIES", "WHY"]).right_align(&[3]).indent(2);
    for step in &case.steps {
        table.row([
            cell(format_time(step.at)),
            cell(step.what.code()),
            cell(step.state.code()),
            cell(step.attempts.to_string()),
            cell(step.text.clone()),
        ]);
    }
    page.table(&table);
    if !case.job_failures.is_empty() {
        page.line("  User work that had failed on the node when the case was opened:");
        page.table(&failed_work(&case.job_failures));
    }
}

/// Lists failed user work on the node. It proves nothing about the node, but is a starting point for diagnosis.
fn failed_work(works: &[JobFailure]) -> Table {
    let mut table = Table::new(["AT (UTC)", "OWNER", "WORK", "ENDED WITH"]).indent(2);
    for work in works {
        let [owner, name] = [&work.owner, &work.name].map(|label| cell(label.as_str()));
        table.row([cell(format_time(work.at)), owner, name, cell(work.how.to_string())]);
    }
    table
}

fn audit(lines: &[AuditLine]) -> Table {
    let mut table = Table::new(["AT (UTC)", "BY", "WHAT", "WHY"]).indent(2);
    for line in lines {
        table.row([
            cell(format_time(line.at)),
            cell(line.by.clone()),
            cell(line.what.clone()),
            cell(format!("{}: {}", line.code, line.text)),
        ]);
    }
    table
}

/// Formats the verdict of a single result.
pub(crate) fn verdict_cell(verdict: doctor_core::finding::Verdict) -> Cell {
    use doctor_core::finding::Verdict;
    let status = match verdict {
        Verdict::Pass => TestStatus::Pass,
        Verdict::Fail => TestStatus::Fail,
        Verdict::Inconclusive => TestStatus::Inconclusive,
        Verdict::NotApplicable => TestStatus::NotApplicable,
    };
    status_cell(status, status.label().to_owned())
}
