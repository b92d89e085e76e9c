//! `doctor nodes`: one line per node.

use doctor_core::{
    finding::Severity,
    hostlist::Selector,
    ids::NodeName,
    time::Timestamp,
    view::{self, NodeRow, Standing, TestCell, Use},
};
use doctor_engine::agents::{self, AgentView};
use serde::Serialize;

use super::agent;
use crate::{
    context::Context,
    exit::Exit,
    failure::Result,
    output::{Cell, Page, Table, ago, cell, length, list, plural},
};

/// List nodes with their owner, their state and the latest result of each test.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Nodes: node[01-64], pool=NAME, life=STATE, or a name with `*`. Default: all.
    #[arg(value_name = "SELECTOR")]
    nodes: Vec<Selector>,
}

/// A node and its agent.
#[derive(Debug, Serialize)]
struct Row {
    #[serde(flatten)]
    row: NodeRow,
    /// `None`: no agent was enrolled.
    agent: Option<AgentView>,
}

/// With more tests than this, tests are summarised instead of getting one column each.
const MOST_COLUMNS: usize = 4;

pub(crate) fn run(context: &Context, args: &Args) -> Result<Exit> {
    let store = context.store()?;
    let facts = context.facts(&store)?;
    let names = context.pick(&facts, &args.nodes)?;
    let agents = agents::views(&store, &facts)?;
    let agent_of = |node: &NodeName| agents.iter().find(|agent| agent.node == *node).cloned();
    let rows = view::node_rows(&facts, &names).into_iter();
    let rows: Vec<Row> = rows.map(|row| Row { agent: agent_of(&row.node), row }).collect();
    let tests: Vec<&str> =
        facts.snapshot.tests.iter().filter(|test| test.routine).map(|test| test.id.as_str()).collect();
    context.out.show(&rows, |page| text(page, &rows, &tests, facts.now, facts.seen))?;
    Ok(Exit::Ok)
}

fn text(page: &mut Page, rows: &[Row], tests: &[&str], now: Timestamp, seen: Option<Timestamp>) {
    if rows.is_empty() {
        page.line("No nodes: no cycle has observed the cluster yet. Run `doctor run`.");
        return;
    }
    let columns = tests.len() <= MOST_COLUMNS;
    let mut header = vec!["NODE", "POOL", "STATE", "USE"];
    let upper: Vec<String> = tests.iter().map(|test| test.to_uppercase()).collect();
    if columns {
        header.extend(upper.iter().map(String::as_str));
    } else {
        header.push("TESTS");
    }
    header.push("NOTE");
    let mut table = Table::new(header);
    for Row { row, agent } in rows {
        let mut cells = vec![
            cell(row.node.as_str()),
            cell(row.pool.as_ref().map_or("-", |pool| pool.as_str())),
            life(row.life),
            used(row.used),
        ];
        if columns {
            cells.extend(tests.iter().map(|test| {
                let found = row.tests.iter().find(|cell| cell.test.as_str() == *test);
                found.map_or_else(|| cell("-").faint(), |found| standing(found, now))
            }));
        } else {
            cells.push(cell(summary(&row.tests)));
        }
        cells.push(cell(note(row, agent.as_ref())));
        table.row(cells);
    }
    page.table(&table).legend(rows.iter().filter_map(|row| row.row.worst));
    let seen =
        seen.map_or_else(|| "cluster never observed".to_owned(), |seen| format!("cluster observed {}", ago(now, seen)));
    page.line(format!("{}; {seen}", plural(rows.len(), "node")));
}

pub(crate) fn life(word: &str) -> Cell {
    match word {
        "in-service" => cell(word),
        "suspect" | "held" | "proving" => cell(word).warn(),
        _ => cell(word).bad(),
    }
}

fn used(used: Use) -> Cell {
    match used {
        Use::Free | Use::Busy => cell(used.code()),
        Use::Unknown => cell(used.code()).warn(),
        Use::Gone => cell(used.code()).faint(),
    }
}

/// Returns the status of a test and its age.
fn standing(test: &TestCell, now: Timestamp) -> Cell {
    let age = test.at.map_or_else(String::new, |at| format!(" {}", length(now.since(at))));
    toned(test.standing, format!("{}{age}", test.standing.word()))
}

/// Colours a status. Only a pass is green.
pub(crate) fn toned(standing: Standing, text: String) -> Cell {
    match standing {
        Standing::Pass => cell(text).good(),
        Standing::Fail => cell(text).bad(),
        Standing::Inconclusive | Standing::Stale | Standing::NeverTested => cell(text).warn(),
        Standing::NotApplicable => cell(text).faint(),
    }
}

fn summary(tests: &[TestCell]) -> String {
    let counts = Standing::ALL.iter().filter_map(|standing| {
        let count = tests.iter().filter(|cell| cell.standing == *standing).count();
        (count > 0).then(|| format!("{count} {}", standing.word()))
    });
    list(counts)
}

fn note(row: &NodeRow, agent: Option<&AgentView>) -> String {
    let mut notes = Vec::new();
    if row.findings > 0 {
        let worst = row.worst.map_or("", Severity::code);
        notes.push(format!("{} ({worst})", plural(row.findings as usize, "finding")));
    }
    match (&row.run, &row.passed_over) {
        (Some(run), _) => notes.push(format!("{} {}", run.state, list(&run.tests))),
        (None, Some(passed)) if !matches!(passed.code, "fresh" | "busy" | "out-of-service") => {
            notes.push(passed.code.to_owned());
        }
        _ => {}
    }
    notes.extend(row.foreign_marks.iter().cloned());
    notes.extend(agent.and_then(agent::note));
    notes.join("; ")
}
