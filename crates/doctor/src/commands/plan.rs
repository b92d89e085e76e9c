//! `doctor plan`: shows what the next cycle would do and why, and why it would skip the other nodes. It has no effects.

use doctor_core::{
    hostlist::Selector,
    ids::{IdSource, NodeName},
    plan,
    view::{self, PlanView},
};
use doctor_engine::cluster_state::{self, ObserveError};
use doctor_store::{Store, StoreUrl};

use super::run::action_cells;
use crate::{
    context::{self, Context},
    controller::ClusterConnection,
    exit::Exit,
    failure::{Failure, Result},
    output::{Page, Table, cell, plural},
};

/// Show what the next cycle would do and why, and why it would skip the other nodes.
///
/// Queries the cluster and the store, changes neither, and does not take the lease.
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
    let loaded = context.loaded()?;
    let world = ClusterConnection::open(loaded)?;
    let store = match &loaded.config.store {
        // A first plan on a laptop must not create a database.
        StoreUrl::Sqlite(path) if !path.exists() => Store::open_in_memory()?,
        url => context::open(url)?,
    };
    let snapshot =
        cluster_state::observe_now(&store, &*world.backend, &loaded.settings, world.clock.now()).map_err(|error| {
            match error {
                ObserveError::Store(error) => Failure::Store(error),
                ObserveError::Backend(error) => Failure::Backend(error),
            }
        })?;
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
