//! `doctor plan`: what the next cycle would do and why, and why not for every other node. Nothing is done.

use doctor_control::{
    picture::{self, LookError},
    store::{Store, StoreUrl},
};
use doctor_core::{
    hostlist::{self, Selector},
    ids::{IdSource, NodeName},
    plan::{self, Action, Conclusion, Notice},
    reason::Because,
    view::{passed_over_code, passed_over_text},
};
use serde::Serialize;

use crate::{
    context::{self, Context},
    engine::World,
    exit::Exit,
    failure::{Failure, Result},
    output::{Page, Table, cell, list, plural},
};

/// Show what the next cycle would do, and why; and for every other node, why not.
///
/// Asks the cluster and the store, changes neither, and does not take the lease.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only these nodes: node[01-64], pool=NAME, life=STATE, or a name with `*`.
    #[arg(value_name = "SELECTOR")]
    nodes: Vec<Selector>,
    /// Name every node that is passed over, instead of counting them.
    #[arg(long)]
    all: bool,
}

#[derive(Debug, Serialize)]
struct PlanView {
    actions: Vec<ActionRow>,
    passed_over: Vec<PassedRow>,
}

/// An action in one line.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct ActionRow {
    pub action: &'static str,
    pub nodes: Option<String>,
    pub what: String,
    pub code: String,
    pub why: String,
}

#[derive(Debug, Serialize)]
struct PassedRow {
    node: String,
    code: &'static str,
    why: String,
}

pub(crate) fn run(context: &Context, args: &Args) -> Result<Exit> {
    let loaded = context.loaded()?;
    let world = World::open(loaded)?;
    let store = match &loaded.config.store {
        // Planning on a laptop for the first time leaves nothing behind.
        StoreUrl::Sqlite(path) if !path.exists() => Store::open_in_memory()?,
        url => context::open(url)?,
    };
    let snapshot =
        picture::fresh(&store, &*world.backend, &loaded.settings, world.clock.now()).map_err(|error| match error {
            LookError::Store(error) => Failure::Store(error),
            LookError::Backend(error) => Failure::Backend(error),
        })?;
    // Ids of a plan that nobody carries out need not be unlike others.
    let plan = plan::plan(&snapshot, &mut IdSource::new(0));
    let selected = |name: &NodeName| {
        let place = snapshot.nodes.binary_search_by(|record| record.node.name.cmp(name));
        args.nodes.is_empty()
            || place.is_ok_and(|place| {
                let record = &snapshot.nodes[place];
                args.nodes.iter().any(|selector| selector.matches(name, &record.node.pool, record.life.word()))
            })
    };
    let passed_over = plan.passed_over.iter().filter(|(name, _)| selected(name)).map(|(name, reason)| PassedRow {
        node: name.to_string(),
        code: passed_over_code(reason),
        why: passed_over_text(reason),
    });
    let view = PlanView { actions: plan.actions.iter().map(action_row).collect(), passed_over: passed_over.collect() };
    context.out.show(&view, |page| text(page, &view, args.all || !args.nodes.is_empty()))?;
    Ok(Exit::Ok)
}

fn text(page: &mut Page, view: &PlanView, all: bool) {
    page.line(format!(
        "The next cycle would take {} and pass over {}.",
        plural(view.actions.len(), "action"),
        plural(view.passed_over.len(), "node")
    ));
    if !view.actions.is_empty() {
        page.blank();
        let mut table = Table::new(["ACTION", "NODE", "WHAT", "CODE", "WHY"]);
        for row in &view.actions {
            table.row(row.cells());
        }
        page.table(&table);
    }
    if view.passed_over.is_empty() {
        return;
    }
    page.heading("Passed over");
    if all {
        let mut table = Table::new(["NODE", "CODE", "WHY"]).indent(2);
        for row in &view.passed_over {
            table.row([cell(row.node.clone()), cell(row.code), cell(row.why.clone())]);
        }
        page.table(&table);
        return;
    }
    let mut counts: std::collections::BTreeMap<&str, usize> = std::collections::BTreeMap::new();
    for row in &view.passed_over {
        *counts.entry(row.code).or_default() += 1;
    }
    let mut table = Table::new(["NODES", "CODE", "MEANS"]).right(&[0]).indent(2);
    for (code, count) in counts {
        let means = doctor_core::view::PASSED_OVER.iter().find(|meaning| meaning.code == code);
        table.row([cell(count.to_string()), cell(code), cell(means.map_or("", |meaning| meaning.means))]);
    }
    page.table(&table);
    page.line("  --all names them.");
}

/// One line for an action.
pub(crate) fn action_row(action: &Because<Action>) -> ActionRow {
    let (name, nodes, what) = describe(&action.what);
    ActionRow { action: name, nodes, what, code: action.code.to_string(), why: action.text.clone() }
}

fn describe(action: &Action) -> (&'static str, Option<String>, String) {
    match action {
        Action::Submit(run) => ("test", Some(hostlist::fold(&run.nodes)), list(run.tests.iter())),
        Action::Resubmit { run } => ("test again", None, format!("run {run} never reached the cluster")),
        Action::Cancel { run, why } => ("cancel", None, format!("run {run}: {why}")),
        Action::Conclude { run, end } => ("conclude", None, format!("run {run}: {}", conclusion(*end))),
        Action::OpenCase(case) => {
            ("open case", Some(case.node.to_string()), format!("{} ({})", case.id, case.severity))
        }
        Action::Escalate { case, to } => ("escalate", None, format!("{case} to {to}")),
        Action::Worsen { case, node } => ("worsen", Some(node.to_string()), case.to_string()),
        Action::Step { node, step, tries, .. } => ("do", Some(node.to_string()), format!("{step}, try {tries}")),
        Action::Propose { node, step, .. } => ("propose", Some(node.to_string()), step.to_string()),
        Action::Settle { case, done, .. } => {
            ("settle", None, format!("a step of {case} {}", if *done { "is done" } else { "failed" }))
        }
        Action::Move { node, to, .. } => ("move", Some(node.to_string()), to.word().to_owned()),
        Action::CloseCase { case, node, how } => ("close case", Some(node.to_string()), format!("{case}: {how}")),
        Action::Follow { case, node } => ("follow", Some(node.to_string()), format!("{case} follows its machine")),
        Action::OpenBreaker => ("open breaker", None, "nothing more is marked".to_owned()),
        Action::Notice(Notice::AgentsSilent { silent, of }) => {
            ("notice", None, format!("{silent} of {of} agents are silent"))
        }
        Action::Notice(Notice::AgentsBack) => ("notice", None, "agents are heard again".to_owned()),
        Action::Answer { request } => ("answer", None, format!("request {request}")),
        Action::Identify { node, hardware } => ("identify", Some(node.to_string()), hardware.to_string()),
        Action::Rename { node, hardware } => ("rename", Some(node.to_string()), format!("{hardware} now")),
    }
}

const fn conclusion(end: Conclusion) -> &'static str {
    match end {
        Conclusion::Incomplete(why) => why.code(),
        Conclusion::NotStarted(why) => why.code(),
    }
}
