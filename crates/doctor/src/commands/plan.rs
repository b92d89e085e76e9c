//! `doctor plan`: shows what the next cycle would do and why, and why it would skip the other nodes. It has no effects.

use doctor_core::{
    hostlist::{self, Selector},
    ids::{IdSource, NodeName},
    plan,
    snapshot::{NodeRecord, Snapshot},
    view::{self, PlanView},
};
use doctor_engine::{
    cluster_state::{self, ObserveError},
    snapshot::{self, ObservedCluster},
};
use doctor_store::{Store, StoreUrl};

use super::run::action_cells;
use crate::{
    context::{self, Context},
    controller::ClusterConnection,
    exit::Exit,
    failure::{Failure, Result},
    output::{Page, Table, ago, cell, plural},
};

/// Show what the next cycle would do and why, and why it would skip the other nodes.
///
/// Queries the cluster and the store, changes neither, and does not take the lease. With `--store` and no `--config`, and
/// for a client of the API, it plans the cluster that the controller of that store last observed, and says when that was.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only these nodes: node[01-64], pool=NAME, state=STATE, or a name with `*`.
    #[arg(value_name = "SELECTOR")]
    nodes: Vec<Selector>,
    /// List every skipped node instead of counting them.
    #[arg(long)]
    all: bool,
}

pub(crate) fn run(context: &Context, args: &Args) -> Result<Exit> {
    let snapshot = match context.plans_last_observation() {
        true => last_observation(context)?,
        false => observe(context)?,
    };
    // The plan is not carried out, so its ids need not be unique.
    let plan = plan::plan(&snapshot, &mut IdSource::new(0));
    let selected = |name: &NodeName| {
        let index = snapshot.nodes.binary_search_by(|record| record.node.name.cmp(name));
        args.nodes.is_empty()
            || index.is_ok_and(|index| {
                let record = &snapshot.nodes[index];
                args.nodes.iter().any(|selector| selector.matches(name, &record.node.pool, record.state.as_str()))
            })
    };
    let view = view::plan_view(&plan, selected);
    context.out.show(&view, |page| text(page, &view, args.all || !args.nodes.is_empty()))?;
    Ok(Exit::Ok)
}

/// Queries the cluster now.
fn observe(context: &Context) -> Result<Snapshot> {
    let loaded = context.loaded()?;
    let world = ClusterConnection::open(loaded)?;
    let store = match &loaded.config.store {
        // A first plan on a laptop must not create a database.
        StoreUrl::Sqlite(path) if !path.exists() => Store::open_in_memory()?,
        url => context::open_to_read(url)?,
    };
    let snapshot =
        cluster_state::observe_now(&store, &*world.backend, &loaded.settings, world.clock.now()).map_err(|error| {
            match error {
                ObserveError::Store(error) => Failure::Store(error),
                ObserveError::Backend(error) => Failure::Backend(error),
            }
        })?;
    if context.named_store().is_some()
        && let Some((_, recorded)) = snapshot::last_observed(&store)?
    {
        check_same_cluster(&recorded, world.backend.name(), &snapshot)?;
    }
    Ok(snapshot)
}

/// Fails if the store records another cluster than the one that the configuration names: its nodes would be planned
/// with the history of others.
fn check_same_cluster(recorded: &ObservedCluster, backend: &str, observed: &Snapshot) -> Result<()> {
    let is_recorded = |node: &NodeRecord| recorded.nodes.iter().any(|row| row.node == node.node.name);
    let shares_nodes = recorded.nodes.is_empty() || observed.nodes.is_empty() || observed.nodes.iter().any(is_recorded);
    if recorded.backend == backend && shares_nodes {
        return Ok(());
    }
    let names = |names: Vec<NodeName>| match names.len() {
        0 => "no nodes".to_owned(),
        1..=1000 => hostlist::fold(&names),
        count => plural(count, "node"),
    };
    Err(Failure::Usage(format!(
        "the store records another cluster ({}: {}) than the one of the configuration ({backend}: {}): leave out --config to plan \
         the store's cluster",
        recorded.backend,
        names(recorded.nodes.iter().map(|row| row.node.clone()).collect()),
        names(observed.nodes.iter().map(|record| record.node.name.clone()).collect()),
    )))
}

/// Returns the cluster as the controller of the store last observed it.
fn last_observation(context: &Context) -> Result<Snapshot> {
    let store = context.store()?;
    let facts = context.facts(&store)?;
    let Some(observed_at) = facts.observed_at else {
        let url = &context.config()?.store;
        return Err(Failure::Unreachable(format!(
            "the store {url} records no observation of a cluster, so there is nothing to plan: run a controller on it \
             (`doctor serve`, `doctor run`) first"
        )));
    };
    context
        .out
        .note(&format!("planned from the cluster as the controller observed it {}", ago(facts.now, observed_at)));
    Ok(facts.snapshot)
}

fn text(page: &mut Page, view: &PlanView, all: bool) {
    page.line(format!(
        "The next cycle would take {} and skip {}.",
        plural(view.actions.len(), "action"),
        plural(view.skipped.len(), "node")
    ));
    if !view.actions.is_empty() {
        page.blank();
        let mut table = Table::new(["ACTION", "NODE", "WHAT", "CODE", "WHY"]);
        for row in &view.actions {
            table.row(action_cells(row));
        }
        page.table(&table);
    }
    if view.skipped.is_empty() {
        return;
    }
    page.heading("Skipped");
    if all {
        let mut table = Table::new(["NODE", "CODE", "WHY"]).indent(2);
        for row in &view.skipped {
            table.row([cell(row.node.as_str()), cell(row.code), cell(row.why.clone())]);
        }
        page.table(&table);
        return;
    }
    let mut counts: std::collections::BTreeMap<&str, usize> = std::collections::BTreeMap::new();
    for row in &view.skipped {
        *counts.entry(row.code).or_default() += 1;
    }
    let mut table = Table::new(["NODES", "CODE", "MEANS"]).right_align(&[0]).indent(2);
    for (code, count) in counts {
        let means = view::SKIP_REASONS.iter().find(|meaning| meaning.code == code);
        table.row([cell(count.to_string()), cell(code), cell(means.map_or("", |meaning| meaning.means))]);
    }
    page.table(&table);
    page.line("  --all lists them.");
}
