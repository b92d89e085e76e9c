//! `doctor rejudge`: classifies stored evidence again, with the current policy or another one.

use std::path::PathBuf;

use doctor_core::{hostlist::Selector, policy::Policy, time::Timestamp};
use doctor_engine::{
    reclassify::{Difference, Reclassification, ReclassifiedResult, Scope, reclassify},
    settings::Settings,
};
use serde::Serialize;

use super::{history::parse_since, why::verdict_cell};
use crate::{
    config::ConfigError,
    context::Context,
    exit::Exit,
    failure::Result,
    output::{Table, cell, format_time, plural},
};

/// Classify past results again and show what would differ. Nothing is changed.
///
/// The raw evidence of results is kept (`[retention] evidence`). It is classified with the current rules and profiles,
/// or with those of another policy file, so that the effect of a rule change is known before it is made.
///
/// Exit code 0 if nothing would differ, 1 if something would.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Nodes: node[01-64], pool=NAME, state=STATE, or a name with `*`. Default: all.
    #[arg(long = "node", value_name = "SELECTOR", value_delimiter = ' ')]
    nodes: Vec<Selector>,
    /// Results since then: a duration such as "30d", or a time such as "2026-11-15T08:00:00Z".
    #[arg(long, value_name = "WHEN", default_value = "30d")]
    since: String,
    /// Use this policy file instead of the one in force.
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,
    /// Maximum number of differences shown; all are counted.
    #[arg(long, value_name = "N", default_value_t = 100)]
    limit: usize,
}

#[derive(Debug, Serialize)]
struct RejudgeView<'a> {
    since: Timestamp,
    policy_version: u32,
    #[serde(flatten)]
    rejudged: &'a Reclassification,
}

pub(crate) fn run(context: &Context, args: &Args) -> Result<Exit> {
    let store = context.store()?;
    let facts = context.facts(&store)?;
    let loaded = context.loaded()?;
    let settings = match &args.policy {
        Some(path) => with_policy_file(&loaded.settings, path)?,
        None => loaded.settings.clone(),
    };
    let since = parse_since(&args.since, facts.now)?;
    let nodes = match args.nodes.as_slice() {
        [] => None,
        selectors => Some(context.select_nodes(&facts, selectors)?.into_iter().collect()),
    };
    let types = facts.nodes().filter_map(|(record, _)| Some((record.node.name.clone(), record.node.sku.clone()?)));
    let scope = Scope { nodes, since, types: types.collect() };
    let rejudged = reclassify(&store, &settings, &scope)?;
    let shown = RejudgeView { since, policy_version: settings.policy.version, rejudged: &rejudged };
    context.out.show(&shown, |page| {
        if !rejudged.changed.is_empty() {
            let shown = || rejudged.changed.iter().take(args.limit);
            page.table(&table(shown()));
            page.legend(shown().flat_map(|difference| [difference.old.severity, difference.new.severity]).flatten());
            page.blank();
        }
        let remaining = rejudged.changed.len().saturating_sub(args.limit);
        if remaining > 0 {
            page.line(format!("and {remaining} more; --limit shows them"));
        }
        page.line(format!(
            "{} since {} reclassified with policy version {}: {} would differ, {} would not. Nothing was changed.",
            plural(usize::try_from(rejudged.reclassified).unwrap_or(usize::MAX), "result"),
            format_time(since),
            settings.policy.version,
            rejudged.changed.len(),
            rejudged.unchanged,
        ));
        for (why, count) in &rejudged.skipped {
            page.line(format!("{count} could not be reclassified: {why}"));
        }
    })?;
    Ok(if rejudged.changed.is_empty() { Exit::Ok } else { Exit::ProblemsFound })
}

fn with_policy_file(settings: &Settings, path: &PathBuf) -> Result<Settings> {
    let read = |source| ConfigError::Read { path: path.clone(), source };
    let text = std::fs::read_to_string(path).map_err(read)?;
    let policy =
        Policy::with_site_settings(&text).map_err(|error| ConfigError::Invalid { path: path.clone(), error })?;
    let with = |source| ConfigError::Settings { path: path.clone(), source };
    Ok(settings.with_policy(policy).map_err(with)?)
}

fn table<'a>(differences: impl Iterator<Item = &'a Difference>) -> Table {
    let mut table = Table::new(["AT (UTC)", "NODE", "TEST", "WAS", "REASON", "WOULD BE", "REASON", "WHY"]);
    let because = |result: &ReclassifiedResult| match result.severity {
        Some(severity) => cell(format!("{} ({severity})", result.reason)),
        None => cell(result.reason.as_str()),
    };
    for difference in differences {
        table.row([
            cell(format_time(difference.at)),
            cell(difference.node.as_str()),
            cell(difference.test.as_str()),
            verdict_cell(difference.old.verdict),
            because(&difference.old),
            verdict_cell(difference.new.verdict),
            because(&difference.new),
            cell(difference.text.as_str()),
        ]);
    }
    table
}
