//! `doctor nodes`: one line per node.

use doctor_core::{
    finding::Severity,
    hostlist::Selector,
    ids::NodeName,
    time::Timestamp,
    view::{self, NodeRow, OccupancyKind, TestCell, TestStatus},
};
use doctor_engine::agents::{self, AgentView};
use serde::Serialize;

use super::{agent, status::names};
use crate::{
    context::Context,
    exit::Exit,
    failure::Result,
    output::{Cell, Page, Table, ago, cell, comma_separated, plural, short_duration},
};

/// List nodes with their occupancy, their state and the latest result of each test.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Nodes: node[01-64], pool=NAME, state=STATE, or a name with `*`. Default: all.
    #[arg(value_name = "SELECTOR")]
    nodes: Vec<Selector>,
}

/// A node and its agent.
#[derive(Debug, Serialize)]
struct NodeWithAgent {
    #[serde(flatten)]
    row: NodeRow,
    /// `None`: no agent was enrolled.
    agent: Option<AgentView>,
}

/// With more tests than this, they are counted by status in one column instead of getting one column each.
const MAX_TEST_COLUMNS: usize = 4;

pub(crate) fn run(context: &Context, args: &Args) -> Result<Exit> {
    let store = context.store()?;
    let facts = context.facts(&store)?;
    let names = context.select_nodes(&facts, &args.nodes)?;
    let agents = agents::views(&store, &facts)?;
    let agent_of = |node: &NodeName| agents.iter().find(|agent| agent.node == *node).cloned();
    let rows = view::node_rows(&facts, &names).into_iter();
    let rows: Vec<NodeWithAgent> = rows.map(|row| NodeWithAgent { agent: agent_of(&row.node), row }).collect();
    let tests: Vec<&str> =
        facts.snapshot.tests.iter().filter(|test| test.routine).map(|test| test.id.as_str()).collect();
    context.out.show(&rows, |page| text(page, &rows, &tests, facts.now, facts.observed_at))?;
    Ok(Exit::Ok)
}

fn text(page: &mut Page, rows: &[NodeWithAgent], tests: &[&str], now: Timestamp, seen: Option<Timestamp>) {
    if rows.is_empty() {
        page.line(match seen {
            Some(_) => "No node matches.",
            None => "No nodes: no cycle has observed the cluster yet. Run `doctor run`.",
        });
        return;
    }
    let columns = tests.len() <= MAX_TEST_COLUMNS;
    let mut header = vec!["NODE", "POOL", "STATE", "USE"];
    let upper: Vec<String> = tests.iter().map(|test| test.to_uppercase()).collect();
    if columns {
        header.extend(upper.iter().map(String::as_str));
    } else {
        header.push("TESTS");
    }
    header.push("NOTE");
    let mut table = Table::new(header);
    for NodeWithAgent { row, agent } in rows {
        let mut cells = vec![
            cell(row.node.as_str()),
            cell(row.pool.as_ref().map_or("-", |pool| pool.as_str())),
            state_cell(row.state),
            use_cell(row.occupancy),
        ];
        if columns {
            cells.extend(tests.iter().map(|test| {
                let found = row.tests.iter().find(|cell| cell.test.as_str() == *test);
                found.map_or_else(|| cell("-").faint(), |found| test_cell(found, now))
            }));
        } else {
            cells.push(summary(&row.tests));
        }
        cells.push(cell(remarks(row, agent.as_ref())));
        table.row(cells);
    }
    page.table(&table).legend(rows.iter().filter_map(|row| row.row.worst));
    let seen =
        seen.map_or_else(|| "cluster never observed".to_owned(), |seen| format!("cluster observed {}", ago(now, seen)));
    page.line(format!("{}; {seen}", plural(rows.len(), "node")));
}

pub(crate) fn state_cell(word: &str) -> Cell {
    match word {
        "in-service" => cell(word),
        "suspect" | "held" | "requalifying" => cell(word).warn(),
        _ => cell(word).bad(),
    }
}

fn use_cell(used: OccupancyKind) -> Cell {
    match used {
        OccupancyKind::Free | OccupancyKind::Busy => cell(used.code()),
        OccupancyKind::Unknown => cell(used.code()).warn(),
        OccupancyKind::Gone => cell(used.code()).faint(),
    }
}

/// Returns the status of a test and its age.
fn test_cell(test: &TestCell, now: Timestamp) -> Cell {
    let age = test.at.map_or_else(String::new, |at| format!(" {}", short_duration(now.since(at))));
    status_cell(test.status, format!("{}{age}", test.status.label()))
}

/// Colours a status. Only a pass is green.
pub(crate) fn status_cell(status: TestStatus, text: String) -> Cell {
    match status {
        TestStatus::Pass => cell(text).good(),
        TestStatus::Fail => cell(text).bad(),
        TestStatus::Inconclusive | TestStatus::Stale | TestStatus::NeverTested => cell(text).warn(),
        TestStatus::NotApplicable | TestStatus::NotJudged => cell(text).faint(),
    }
}

/// Counts the tests by status, those that are not pass first.
fn summary(tests: &[TestCell]) -> Cell {
    let bad_first = [
        TestStatus::Fail,
        TestStatus::Inconclusive,
        TestStatus::Stale,
        TestStatus::NeverTested,
        TestStatus::Pass,
        TestStatus::NotApplicable,
        TestStatus::NotJudged,
    ];
    let count = |status: TestStatus| tests.iter().filter(|cell| cell.status == status).count();
    let there: Vec<TestStatus> = bad_first.into_iter().filter(|status| count(*status) > 0).collect();
    let text = comma_separated(there.iter().map(|status| format!("{} {}", count(*status), status.label())));
    match there.first() {
        Some(worst) => status_cell(*worst, text),
        None => cell(text),
    }
}

fn remarks(row: &NodeRow, agent: Option<&AgentView>) -> String {
    let mut notes = Vec::new();
    if row.findings > 0 {
        let worst = row.worst.map_or("", Severity::code);
        notes.push(format!("{} ({worst})", plural(row.findings as usize, "finding")));
    }
    match (&row.run, &row.skipped) {
        (Some(run), _) => notes.push(format!("{} {}", run.state, names(&run.tests))),
        (None, Some(passed)) if !matches!(passed.code, "fresh" | "busy" | "out-of-service") => {
            notes.push(passed.code.to_owned());
        }
        _ => {}
    }
    notes.extend(row.foreign_marks.iter().cloned());
    notes.extend(agent.and_then(agent::remark));
    notes.join("; ")
}
