//! `doctor cases`: lists cases, each from its first finding to return or replacement of the node.

mod mute;

use doctor_core::{case::Case, hostlist::Selector};

use crate::{
    context::Context,
    exit::Exit,
    failure::Result,
    output::{Cell, Table, cell, format_time, plural},
};

/// List cases, each one problem of one machine; acknowledge or snooze them.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Option<mute::MuteCommand>,
    #[command(flatten)]
    query: Query,
}

/// The cases to list.
#[derive(Debug, clap::Args)]
pub(crate) struct Query {
    /// Nodes: node[01-64], pool=NAME, state=STATE, or a name with `*`. Default: all.
    #[arg(value_name = "SELECTOR")]
    nodes: Vec<Selector>,
    /// Include closed cases.
    #[arg(long)]
    all: bool,
    /// Maximum number of cases, newest first.
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub(super) limit: u32,
}

impl Args {
    /// Whether this only reads.
    pub(crate) const fn reads(&self) -> bool {
        self.command.is_none()
    }
}

pub(crate) fn run(context: &Context, args: &Args) -> Result<Exit> {
    if let Some(what) = &args.command {
        return mute::run(context, what);
    }
    list(context, &args.query)
}

pub(super) fn list(context: &Context, args: &Query) -> Result<Exit> {
    let store = context.store()?;
    let facts = context.facts(&store)?;
    let mut cases = if args.all { store.cases_all(args.limit)? } else { store.cases(facts.now)? };
    if !args.all {
        cases.retain(Case::is_open);
    }
    if !args.nodes.is_empty() {
        let names = context.select_nodes(&facts, &args.nodes)?;
        cases.retain(|case| names.contains(&case.node));
    }
    cases.sort_by_key(|case| std::cmp::Reverse(case.opened));
    cases.truncate(args.limit as usize);
    context.out.show(&cases, |page| {
        if cases.is_empty() {
            page.line(if args.all { "No cases." } else { "No open cases; --all shows closed ones." });
            return;
        }
        let mut table = Table::new(["CASE", "NODE", "STATE", "SEVERITY", "REPAIR STEP", "OPENED (UTC)", "WHAT"]);
        for case in &cases {
            table.row(row(case));
        }
        page.table(&table).legend(cases.iter().map(|case| case.severity));
        page.line(format!("{}; `doctor why NODE` shows its steps", plural(cases.len(), "case")));
    })?;
    Ok(Exit::Ok)
}

fn row(case: &Case) -> Vec<Cell> {
    let state = match &case.state {
        doctor_core::case::CaseState::Open if case.waits_for_operator() => cell("waits for an operator").warn(),
        doctor_core::case::CaseState::Open => cell("open").warn(),
        doctor_core::case::CaseState::Closed { how, .. } => cell(how.code()),
    };
    let worst = case.findings.iter().max_by_key(|finding| finding.severity);
    vec![
        cell(case.id.to_string()),
        cell(case.node.as_str()),
        state,
        cell(case.severity.code()),
        cell(case.repair_step.code()),
        cell(format_time(case.opened)),
        cell(match (worst, &case.request) {
            (Some(finding), _) => finding.text.clone(),
            (None, Some(request)) => request.text(),
            (None, None) => "requested by an operator".to_owned(),
        }),
    ]
}
