//! Compares the cluster's record of effects with the store.
//!
//! The cluster's process, which is never killed, writes the record. Documents are classified here once more from the
//! files on the share, so that a wrongly recorded result is detected too.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use doctor_checks::document::Document;
use doctor_core::{
    case::{Case, StepKind, StepState},
    classify::Baselines,
    finding::Verdict,
    ids::{NodeName, RunId, TestId},
    lifecycle::NodeState,
    node::{MarkKind, Node},
    policy::Policy,
    profile::Profiles,
    run::{RunEnd, RunState},
    time::Timestamp,
};
use doctor_engine::{
    ingest::{self, ClassifyContext},
    settings::Settings,
    share::Share,
};
use doctor_sim::{Effect, EffectKind, check_effects};
use doctor_store::{
    Store,
    records::{HistoryFilter, HistoryRow, RunRecord},
};

use crate::{
    fixture::{Fixture, POLICY},
    startup_time::StartupTimes,
};

/// One run in the cluster's record.
#[derive(Debug, Default)]
struct ClusterRun {
    tests: BTreeSet<TestId>,
    nodes: Vec<NodeName>,
    started: bool,
    ended: bool,
    /// By node: the tests with results in a valid document.
    results: BTreeMap<NodeName, BTreeSet<TestId>>,
}

/// The amounts of data that were compared.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) runs: usize,
    pub(crate) started: usize,
    pub(crate) documents: usize,
    pub(crate) rows: usize,
    /// Rows of good results that were not classified because their node had left the cluster.
    pub(crate) unclassified: usize,
    pub(crate) marked: usize,
    pub(crate) disturbed: usize,
    pub(crate) repeated: usize,
    pub(crate) open_cases: usize,
    pub(crate) cases: usize,
}

/// Returns all differences in words; none if the test passes.
pub(crate) fn compare(
    stage: &Fixture,
    effects: &[Effect],
    pace: &StartupTimes,
    world: &[Node],
    were_away: &BTreeSet<NodeName>,
) -> (Counts, Vec<String>) {
    let store = stage.open_store();
    let told = cluster_runs(effects);
    let mut wrong: Vec<String> = check_effects(effects, pace.patience()).iter().map(ToString::to_string).collect();
    let rows = store.history(&HistoryFilter::default()).unwrap();
    compare_runs(&told, &store, &mut wrong);
    let was_away = |node: &NodeName| were_away.contains(node);
    let unjudged = compare_rows(stage, &told, &store, &rows, was_away, &mut wrong);
    let cases = store.cases_all(u32::MAX >> 1).unwrap();
    compare_marks(world, &store, &cases, &mut wrong);
    let count = |wanted: fn(&EffectKind) -> bool| effects.iter().filter(|effect| wanted(&effect.what)).count();
    let figures = Counts {
        runs: told.len(),
        started: told.values().filter(|told| told.started).count(),
        documents: told.values().map(|told| told.results.len()).sum(),
        rows: rows.len(),
        unclassified: unjudged,
        marked: count(|what| matches!(what, EffectKind::Marked { .. })),
        disturbed: count(|what| matches!(what, EffectKind::Disturbed { .. })),
        repeated: count(|what| matches!(what, EffectKind::AskedAgain { .. } | EffectKind::SubmittedAgain { .. })),
        open_cases: cases.iter().filter(|case| case.is_open()).count(),
        cases: cases.len(),
    };
    (figures, wrong)
}

fn cluster_runs(effects: &[Effect]) -> BTreeMap<RunId, ClusterRun> {
    let mut told: BTreeMap<RunId, ClusterRun> = BTreeMap::new();
    for effect in effects {
        match &effect.what {
            EffectKind::Submitted { run, nodes, tests } => {
                let run = told.entry(*run).or_default();
                run.nodes = nodes.iter().map(|target| target.node.clone()).collect();
                run.tests = tests.iter().cloned().collect();
            }
            EffectKind::Started { run, .. } => told.entry(*run).or_default().started = true,
            EffectKind::Ended { run, .. } => told.entry(*run).or_default().ended = true,
            EffectKind::Document { run, node, answers, .. } if !answers.is_empty() => {
                told.entry(*run).or_default().results.insert(node.clone(), answers.iter().cloned().collect());
            }
            _ => {}
        }
    }
    told
}

/// Every run has ended on both sides, and in the same way.
fn compare_runs(told: &BTreeMap<RunId, ClusterRun>, store: &Store, wrong: &mut Vec<String>) {
    let records = store.last_runs(u32::MAX >> 1).unwrap();
    let known: BTreeMap<RunId, &RunRecord> = records.iter().map(|record| (record.run.id, record)).collect();
    for (id, told) in told {
        let Some(record) = known.get(id) else {
            wrong.push(format!("{id} has a job and is not in the store"));
            continue;
        };
        let whole = told.nodes.iter().all(|node| told.results.get(node) == Some(&told.tests));
        let fits = match &record.run.state {
            RunState::Ended(RunEnd::Completed(_)) => whole,
            RunState::Ended(RunEnd::Incomplete { .. }) => told.started && !whole,
            RunState::Ended(RunEnd::NotStarted(_)) => !told.started,
            RunState::Planned | RunState::Submitted { .. } | RunState::Running { .. } => false,
        };
        if !fits || !told.ended {
            wrong.push(format!("{id}: the store says {:?}, the cluster {told:?}", record.run.state));
        }
    }
    for record in records.iter().filter(|record| !told.contains_key(&record.run.id)) {
        if !matches!(record.run.state, RunState::Ended(RunEnd::NotStarted(_))) {
            wrong.push(format!("{} has no job and is {:?}", record.run.id, record.run.state));
        }
    }
}

/// Each test of each started run has one row: its document's verdict, or that there was no result.
///
/// A controller that never saw a node does not know its machine type, and records that instead of a verdict. That is
/// correct only for a node that left the cluster after its result. Such rows are counted.
fn compare_rows(
    stage: &Fixture,
    told: &BTreeMap<RunId, ClusterRun>,
    store: &Store,
    rows: &[HistoryRow],
    was_away: impl Fn(&NodeName) -> bool,
    wrong: &mut Vec<String>,
) -> usize {
    let mut unjudged = 0;
    let settings = Settings::new(
        Policy::with_site_settings(POLICY).unwrap(),
        doctor_sim::simulated_tests::catalogue(),
        Profiles::new([doctor_sim::simulated_tests::profile(doctor_sim::simulated_tests::sku())]),
    )
    .unwrap();
    let mut kept: BTreeMap<(RunId, NodeName), BTreeMap<TestId, &HistoryRow>> = BTreeMap::new();
    for row in rows {
        let Some(run) = row.run else {
            wrong.push(format!("a row of {} {} belongs to no run", row.node, row.test));
            continue;
        };
        if kept.entry((run, row.node.clone())).or_default().insert(row.test.clone(), row).is_some() {
            wrong.push(format!("{run}: {} {} is there twice", row.node, row.test));
        }
    }
    for (id, told) in told.iter().filter(|(_, told)| told.started) {
        for node in &told.nodes {
            let rows = kept.remove(&(*id, node.clone())).unwrap_or_default();
            let said = match told.results.contains_key(node) {
                true => expected_verdicts(stage, &settings, store, *id, node, wrong),
                false => BTreeMap::new(),
            };
            for test in &told.tests {
                let expected = said.get(test).copied().unwrap_or(Verdict::Inconclusive);
                match rows.get(test) {
                    None => wrong.push(format!("{id}: {test} of {node} is lost, expected {expected}")),
                    Some(row) if row.reason.as_str() == "no-limit" && was_away(node) => unjudged += 1,
                    Some(row) if row.verdict != expected => {
                        wrong.push(format!(
                            "{id}: {test} of {node} is {} ({}), expected {expected}",
                            row.verdict, row.reason
                        ));
                    }
                    Some(_) => {}
                }
            }
            for test in rows.keys().filter(|test| !told.tests.contains(*test)) {
                wrong.push(format!("{id}: {test} of {node} was not requested"));
            }
        }
    }
    for ((run, node), rows) in kept {
        wrong.push(format!("{run}: {} rows of {node}, where it never started", rows.len()));
    }
    unjudged
}

/// Returns the verdicts of a node's document on the share, which the store must hold byte for byte.
fn expected_verdicts(
    stage: &Fixture,
    settings: &Settings,
    store: &Store,
    run: RunId,
    node: &NodeName,
    wrong: &mut Vec<String>,
) -> BTreeMap<TestId, Verdict> {
    let Some(record) = store.run(run).unwrap() else { return BTreeMap::new() };
    let bytes = match fs::read(stage.share().join(Share::document_path(&record.run, node))) {
        Ok(bytes) => bytes,
        Err(error) => {
            wrong.push(format!("{run}: the good document of {node} is gone from the share: {error}"));
            return BTreeMap::new();
        }
    };
    if store.evidence(run, node).unwrap().is_none_or(|kept| kept.bytes != bytes) {
        wrong.push(format!("{run}: the evidence of {node} differs from its document"));
    }
    let body = bytes.iter().position(|byte| *byte == b'\n').map_or(&[][..], |end| &bytes[end + 1..]);
    let document: Document = serde_json::from_slice(body).unwrap();
    let sku = doctor_sim::simulated_tests::sku();
    let by = ClassifyContext { settings, sku: Some(&sku), acknowledged: &[] };
    let judged = document.tests.iter().map(|evidence| {
        let past = Baselines::at(evidence.ended);
        (evidence.test.clone(), ingest::classify_evidence(by, evidence, &past, None).verdict)
    });
    judged.collect()
}

/// Every mark belongs to an open case, and every mark that a case relies on exists.
fn compare_marks(world: &[Node], store: &Store, cases: &[Case], wrong: &mut Vec<String>) {
    let stored = store.load_nodes().unwrap();
    let mut open: BTreeMap<&NodeName, &Case> = BTreeMap::new();
    for case in cases.iter().filter(|case| case.is_open()) {
        if let Some(other) = open.insert(&case.node, case) {
            wrong.push(format!("{} has two open cases, {} and {}", case.node, other.id, case.id));
        }
    }
    for node in world {
        let (case, there) = (open.remove(&node.name), stored.get(&node.name));
        let held = there.is_some_and(|stored| matches!(stored.state, NodeState::Held { .. }));
        let told = there.map(|stored| (&stored.state, stored.case));
        if there.and_then(|stored| stored.case) != case.map(|case| case.id) {
            wrong.push(format!("{}: its open case is {:?}, it says {told:?}", node.name, case.map(|case| case.id)));
        }
        for (kind, set, unset) in [
            (MarkKind::Unhealthy, StepKind::Mark, StepKind::Unmark),
            (MarkKind::Cordon, StepKind::Drain, StepKind::Undrain),
        ] {
            let marked = node.marks.has_ours(kind);
            let believed = case.is_some_and(|case| step_is_set(case, set, unset));
            if marked && case.is_none() {
                wrong.push(format!("{} has an orphaned mark {:?}: {told:?}", node.name, node.marks.ours));
            }
            if believed && !marked && !held {
                wrong.push(format!("{}: {set} is done and there is no mark: {told:?}, {case:?}", node.name));
            }
            if marked && case.is_some() && !believed && !held {
                wrong.push(format!("{}: the mark {kind} exists but its case does not record it: {case:?}", node.name));
            }
        }
    }
    // A machine that was removed for good may leave an open case under a name that is no longer used.
    for (name, case) in open {
        let there = |node: &&Node| node.hardware.as_ref().is_some_and(|hardware| hardware.matches(&case.hardware));
        if let Some(node) = world.iter().find(there) {
            wrong.push(format!("{} is open on {name}; its machine is {} now", case.id, node.name));
        }
    }
}

/// Whether, according to the case, its mark is set.
fn step_is_set(case: &Case, set: StepKind, unset: StepKind) -> bool {
    let last = case
        .steps
        .iter()
        .rev()
        .find(|step| (step.what == set || step.what == unset) && matches!(step.state, StepState::Done));
    last.is_some_and(|step| step.what == set)
}

/// Returns the remaining work: active runs, and marks on which the cluster and the store do not agree yet.
pub(crate) fn pending_work(store: &Store, world: &[Node]) -> Vec<String> {
    let mut work = store.active_runs().unwrap().into_iter().map(|active| format!("{:?}", active.run)).collect();
    compare_marks(world, store, &store.cases(Timestamp::MAX).unwrap(), &mut work);
    work
}
