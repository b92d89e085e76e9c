//! `doctor history`: lists results, newest first.

use doctor_core::{
    hostlist::Selector,
    ids::TestId,
    time::{Span, Timestamp},
};
use doctor_store::records::{HistoryFilter, HistoryRow};

use super::why::verdict_cell;
use crate::{
    context::Context,
    exit::Exit,
    failure::{Failure, Result},
    output::{Table, cell, format_time, plural},
};

/// List past results, newest first.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Nodes: node[01-64], pool=NAME, state=STATE, or a name with `*`. Default: all.
    #[arg(value_name = "SELECTOR")]
    nodes: Vec<Selector>,
    /// Only results of this test.
    #[arg(long, value_name = "TEST")]
    test: Option<TestId>,
    /// Only results since then: a duration such as "7d", or a time such as "2026-11-15T08:00:00Z".
    #[arg(long, value_name = "WHEN")]
    since: Option<String>,
    /// Maximum number of results.
    #[arg(long, value_name = "N", default_value_t = 50)]
    pub(super) limit: u32,
}

pub(crate) fn run(context: &Context, args: &Args) -> Result<Exit> {
    let store = context.store()?;
    let facts = context.facts(&store)?;
    let since = args.since.as_deref().map(|text| parse_since(text, facts.now)).transpose()?;
    let limit = Some(args.limit);
    let filter = HistoryFilter { test: args.test.clone(), since, limit, ..HistoryFilter::default() };
    let rows = if args.nodes.is_empty() {
        store.history(&filter)?
    } else {
        let mut rows: Vec<HistoryRow> = Vec::new();
        for node in context.select_nodes(&facts, &args.nodes)? {
            rows.extend(store.history(&HistoryFilter { node: Some(node), ..filter.clone() })?);
            // After each node, so that the rows of thousands of nodes are never in memory together.
            rows.sort_by_key(|row| std::cmp::Reverse(row.at));
            rows.truncate(args.limit as usize);
        }
        rows
    };
    context.out.show(&rows, |page| {
        if rows.is_empty() {
            page.line("No results. A node without results is untested, not healthy; `doctor status` shows coverage.");
            return;
        }
        page.table(&table(&rows)).legend(rows.iter().filter_map(|row| row.severity));
        page.line(format!("{}; `doctor log RUN` shows a run's output", plural(rows.len(), "result")));
    })?;
    Ok(Exit::Ok)
}

fn table(rows: &[HistoryRow]) -> Table {
    let mut table =
        Table::new(["AT (UTC)", "NODE", "TEST", "RESULT", "REASON", "SEVERITY", "TOOK", "RUN"]).right_align(&[6]);
    for row in rows {
        // Imported results have no run here, and neither have those of agents.
        let run = match (row.run, row.untrusted) {
            (_, true) => "imported, untrusted".to_owned(),
            (Some(run), false) => run.to_string(),
            (None, false) if row.by_agent => "agent".to_owned(),
            (None, false) => "-".to_owned(),
        };
        table.row([
            cell(format_time(row.at)),
            cell(row.node.as_str()),
            cell(row.test.as_str()),
            verdict_cell(row.verdict),
            cell(row.reason.as_str()),
            cell(row.severity.map_or("-", doctor_core::finding::Severity::code)),
            cell(crate::output::short_duration(row.duration)),
            cell(run),
        ]);
    }
    table
}

/// Parses a duration before now, or a timestamp.
pub(crate) fn parse_since(text: &str, now: Timestamp) -> Result<Timestamp> {
    text.parse::<Span>().map(|span| now.minus(span)).or_else(|_| text.parse::<Timestamp>()).map_err(|_| {
        Failure::Usage(format!(
            "`{text}` is neither a duration such as \"7d\" nor a time such as \"2026-11-15T08:00:00Z\""
        ))
    })
}
