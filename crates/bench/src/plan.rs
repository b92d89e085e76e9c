//! M1: planning for 100,000 nodes and 10 tests, from scratch and after one event.
//!
//! Correctness check: the incremental planner decides and explains as one that starts from scratch, and nodes are
//! selected in the order of a plain sort.

mod fleet;
mod naive;

use std::collections::HashMap;

use anyhow::{Context, Result, ensure};
use doctor_core::{
    ids::{IdSource, NodeName, TestId},
    node::Occupancy,
    plan::{Action, Plan, Planner, SkipReason, plan},
    reason::WithReason,
    snapshot::{NodeRecord, Snapshot},
    time::Span,
};
use serde_json::json;

use crate::{
    Measured,
    random::Random,
    stopwatch::{REPEATS, Samples, time},
};

const NODES: usize = 100_000;
const TESTS: usize = 10;

/// The number of nodes selected in the check of their order.
const QUEUE: u32 = 500;

/// The number of events whose plans are compared, node by node, with plans from scratch.
const COMPARED: usize = 3;

pub(crate) fn run() -> Result<Measured> {
    let snapshot = fleet::busy(NODES, TESTS);
    eprintln!("  checking: the order of the queue");
    same_queue(&snapshot)?;
    let mut planner = Planner::new(snapshot.clone());
    let mut ids = IdSource::new(1);
    planner.plan(snapshot.at, &mut ids);
    let mut events = Random::new(2);
    eprintln!("  checking: incremental plan against a full plan");
    for _ in 0..COMPARED {
        let changed = event(&planner, &mut events);
        same_plan(&mut planner, changed, &ids)?;
    }

    eprintln!("  measuring");
    let (mut cold, mut one_event) = (Samples::default(), Samples::default());
    for _ in 0..REPEATS {
        let (planned, sample) = time(|| plan(&snapshot, &mut ids.clone()));
        ensure!(accounted(&planned) >= NODES, "a full plan omits nodes");
        cold.push(sample);
        let changed = event(&planner, &mut events);
        let at = planner.snapshot().at.plus(Span::from_secs(1));
        let ((known, planned), sample) = time(|| (planner.set_node(changed), planner.plan(at, &mut ids)));
        ensure!(known && !planned.actions.is_empty(), "a plan after an event has no actions");
        one_event.push(sample);
    }
    let inputs = json!({
        "nodes": NODES, "tests": TESTS, "pools": fleet::POOLS, "busy_percent": fleet::BUSY_PERCENT,
        "due_nodes": naive::queue(&snapshot).len(), "jobs_open": fleet::OPEN_SLOTS,
    });
    let mut figures = Vec::new();
    figures.extend(cold.figures("cold", "", &inputs, "plan() of a snapshot, with the reason of every skipped node"));
    figures.extend(one_event.figures(
        "one_event",
        "",
        &inputs,
        "one node changes: Planner::set_node and Planner::plan",
    ));
    Ok(Measured::Figures(figures))
}

/// Returns a node with its occupancy flipped between free and busy.
fn event(planner: &Planner, random: &mut Random) -> NodeRecord {
    let nodes = &planner.snapshot().nodes;
    let index = usize::try_from(random.below(nodes.len() as u64)).unwrap_or(0);
    let mut record = nodes[index].clone();
    record.node_mut().occupancy = match record.node.occupancy {
        Occupancy::Free => Occupancy::Busy { by: "user job 77".into() },
        Occupancy::Busy { .. } | Occupancy::Unknown { .. } => Occupancy::Free,
    };
    record
}

/// Counts the nodes of a plan: skipped, in an action, or in a run that is under way.
fn accounted(planned: &Plan) -> usize {
    planned.skipped.len() + planned.actions.len() + fleet::RUNNING
}

fn same_plan(planner: &mut Planner, changed: NodeRecord, ids: &IdSource) -> Result<()> {
    ensure!(planner.set_node(changed), "the planner does not know the node that changed");
    let at = planner.snapshot().at.plus(Span::from_secs(1));
    let grown = planner.plan(at, &mut ids.clone());
    let fresh = plan(planner.snapshot(), &mut ids.clone());
    ensure!(grown.actions == fresh.actions, "the actions of the incremental plan and the full plan differ");
    let reasons: HashMap<NodeName, SkipReason> = fresh.skipped.into_iter().collect();
    for record in &planner.snapshot().nodes {
        let name = &record.node.name;
        ensure!(planner.skip_reason(name).as_ref() == reasons.get(name), "{name} is skipped for another reason");
    }
    Ok(())
}

/// Verifies that nodes are selected in the order of a plain sort if only the number of jobs is limited.
fn same_queue(snapshot: &Snapshot) -> Result<()> {
    let unhindered = fleet::unhindered(snapshot.clone(), QUEUE);
    let planned = plan(&unhindered, &mut IdSource::new(1));
    let selected: Vec<(NodeName, Vec<TestId>)> = planned.actions.iter().filter_map(submitted).collect();
    let queue = naive::queue(&unhindered);
    let expected = queue.get(..selected.len()).context("more nodes were selected than are due")?;
    ensure!(selected.len() == QUEUE as usize, "{} nodes were selected, expected {QUEUE}", selected.len());
    for (position, (selected, expected)) in selected.iter().zip(expected).enumerate() {
        ensure!(selected == expected, "position {position}: selected {selected:?}, expected {expected:?}");
    }
    Ok(())
}

fn submitted(action: &WithReason<Action>) -> Option<(NodeName, Vec<TestId>)> {
    match &action.value {
        Action::Submit(run) => Some((run.nodes.first().clone(), run.tests.to_vec())),
        _ => None,
    }
}
