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
    result_validation::{self, ClassifyContext},
    settings::Settings,
    share::Share,
};
use doctor_sim::{Effect, EffectKind, Tolerances, check_effects};
use doctor_store::{
    Store,
    records::{HistoryFilter, HistoryRow, RunRecord},
};

use crate::fixture::{Fixture, POLICY};

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
    fixture: &Fixture,
    effects: &[Effect],
    patience: Tolerances,
    world: &[Node],
    were_away: &BTreeSet<NodeName>,
) -> (Counts, Vec<String>) {
    let store = fixture.open_store();
    let runs = cluster_runs(effects);
    let mut wrong: Vec<String> = check_effects(effects, patience).iter().map(ToString::to_string).collect();
    let rows = store.history(&HistoryFilter::default()).unwrap();
    compare_runs(&runs, &store, &mut wrong);
    let was_away = |node: &NodeName| were_away.contains(node);
    let unjudged = compare_rows(fixture, &runs, &store, &rows, was_away, &mut wrong);
    let cases = store.cases_all(u32::MAX >> 1).unwrap();
    compare_marks(world, &store, &cases, &mut wrong);
    let count = |is_kind: fn(&EffectKind) -> bool| effects.iter().filter(|effect| is_kind(&effect.what)).count();
    let figures = Counts {
        runs: runs.len(),
        started: runs.values().filter(|run| run.started).count(),
        documents: runs.values().map(|run| run.results.len()).sum(),
        rows: rows.len(),
        unclassified: unjudged,
        marked: count(|what| matches!(what, EffectKind::Marked { .. })),
        disturbed: count(|what| matches!(what, EffectKind::Disturbed { .. })),
        repeated: count(|what| {
            matches!(what, EffectKind::RepeatedOperation { .. } | EffectKind::SubmittedAgain { .. })
        }),
        open_cases: cases.iter().filter(|case| case.is_open()).count(),
        cases: cases.len(),
    };
    (figures, wrong)
}

fn cluster_runs(effects: &[Effect]) -> BTreeMap<RunId, ClusterRun> {
    let mut runs: BTreeMap<RunId, ClusterRun> = BTreeMap::new();
    for effect in effects {
        match &effect.what {
            EffectKind::Submitted { run, nodes, tests } => {
                let run = runs.entry(*run).or_default();
                run.nodes = nodes.iter().map(|target| target.node.clone()).collect();
                run.tests = tests.iter().cloned().collect();
            }
            EffectKind::Started { run, .. } => runs.entry(*run).or_default().started = true,
            EffectKind::Ended { run, .. } => runs.entry(*run).or_default().ended = true,
            EffectKind::Document { run, node, answers, .. } if !answers.is_empty() => {
                runs.entry(*run).or_default().results.insert(node.clone(), answers.iter().cloned().collect());
            }
            _ => {}
        }
    }
    runs
}

/// Every run has ended on both sides, and in the same way.
fn compare_runs(cluster_runs: &BTreeMap<RunId, ClusterRun>, store: &Store, wrong: &mut Vec<String>) {
    let records = store.last_runs(u32::MAX >> 1).unwrap();
    let known: BTreeMap<RunId, &RunRecord> = records.iter().map(|record| (record.run.id, record)).collect();
    for (id, cluster_run) in cluster_runs {
        let Some(record) = known.get(id) else {
            wrong.push(format!("{id} has a job and is not in the store"));
            continue;
        };
        let complete = cluster_run.nodes.iter().all(|node| cluster_run.results.get(node) == Some(&cluster_run.tests));
        let fits = match &record.run.state {
            RunState::Ended(RunEnd::Completed(_)) => complete,
            RunState::Ended(RunEnd::Incomplete { .. }) => cluster_run.started && !complete,
            RunState::Ended(RunEnd::NotStarted(_)) => !cluster_run.started,
            RunState::Planned | RunState::Submitted { .. } | RunState::Running { .. } => false,
        };
        if !fits || !cluster_run.ended {
            wrong.push(format!("{id}: the store says {:?}, the cluster {cluster_run:?}", record.run.state));
        }
    }
    for record in records.iter().filter(|record| !cluster_runs.contains_key(&record.run.id)) {
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
    fixture: &Fixture,
    cluster_runs: &BTreeMap<RunId, ClusterRun>,
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
    let mut stored_rows: BTreeMap<(RunId, NodeName), BTreeMap<TestId, &HistoryRow>> = BTreeMap::new();
    for row in rows {
        let Some(run) = row.run else {
            // Agents report the results of this test.
            if row.test.as_str() != "gpu-health" {
                wrong.push(format!("a row of {} {} belongs to no run", row.node, row.test));
            }
            continue;
        };
        if stored_rows.entry((run, row.node.clone())).or_default().insert(row.test.clone(), row).is_some() {
            wrong.push(format!("{run}: {} {} is there twice", row.node, row.test));
        }
    }
    for (id, cluster_run) in cluster_runs.iter().filter(|(_, cluster_run)| cluster_run.started) {
        for node in &cluster_run.nodes {
            let rows = stored_rows.remove(&(*id, node.clone())).unwrap_or_default();
            let verdicts = match cluster_run.results.contains_key(node) {
                true => expected_verdicts(fixture, &settings, store, *id, node, wrong),
                false => BTreeMap::new(),
            };
            for test in &cluster_run.tests {
                let expected = verdicts.get(test).copied().unwrap_or(Verdict::Inconclusive);
                match rows.get(test) {
                    None => wrong.push(format!("{id}: {test} of {node} is lost, expected {expected}")),
                    Some(row) if doctor_core::classify::is_not_judged(&row.reason) && was_away(node) => unjudged += 1,
                    Some(row) if row.verdict != expected => {
                        wrong.push(format!(
                            "{id}: {test} of {node} is {} ({}), expected {expected}",
                            row.verdict, row.reason
                        ));
                    }
                    Some(_) => {}
                }
            }
            for test in rows.keys().filter(|test| !cluster_run.tests.contains(*test)) {
                wrong.push(format!("{id}: {test} of {node} was not requested"));
            }
        }
    }
    for ((run, node), rows) in stored_rows {
        wrong.push(format!("{run}: {} rows of {node}, where it never started", rows.len()));
    }
    unjudged
}

/// Returns the verdicts of a node's document on the share, which the store must hold byte for byte.
fn expected_verdicts(
    fixture: &Fixture,
    settings: &Settings,
    store: &Store,
    run: RunId,
    node: &NodeName,
    wrong: &mut Vec<String>,
) -> BTreeMap<TestId, Verdict> {
    let Some(record) = store.run(run).unwrap() else { return BTreeMap::new() };
    let bytes = match fs::read(fixture.share().join(Share::document_path(&record.run, node))) {
        Ok(bytes) => bytes,
        Err(error) => {
            wrong.push(format!("{run}: the good document of {node} is gone from the share: {error}"));
            return BTreeMap::new();
        }
    };
    if store.evidence(run, node).unwrap().is_none_or(|stored| stored.bytes != bytes) {
        wrong.push(format!("{run}: the evidence of {node} differs from its document"));
    }
    let body = bytes.iter().position(|byte| *byte == b'\n').map_or(&[][..], |end| &bytes[end + 1..]);
    let document: Document = serde_json::from_slice(body).unwrap();
    let sku = doctor_sim::simulated_tests::sku();
    let profile = settings.profiles.resolve(Some(&sku), document.machine.as_ref());
    let by = ClassifyContext { settings, profile, declared: None, acknowledged: &[] };
    let judged = document.tests.iter().map(|evidence| {
        let past = Baselines::at(evidence.ended);
        (evidence.test.clone(), result_validation::classify_evidence(by, evidence, &past, None).verdict)
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
        let (case, stored_node) = (open.remove(&node.name), stored.get(&node.name));
        let held = stored_node.is_some_and(|stored| matches!(stored.state, NodeState::Held { .. }));
        let summary = stored_node.map(|stored| (&stored.state, stored.case));
        if stored_node.and_then(|stored| stored.case) != case.map(|case| case.id) {
            wrong.push(format!("{}: its open case is {:?}, it says {summary:?}", node.name, case.map(|case| case.id)));
        }
        for (kind, set, unset) in [
            (MarkKind::Unhealthy, StepKind::Mark, StepKind::Unmark),
            (MarkKind::Cordon, StepKind::Drain, StepKind::Undrain),
        ] {
            let marked = node.marks.has_ours(kind);
            let believed = case.is_some_and(|case| step_is_set(case, set, unset));
            if marked && case.is_none() {
                wrong.push(format!("{} has an orphaned mark {:?}: {summary:?}", node.name, node.marks.ours));
            }
            if believed && !marked && !held {
                wrong.push(format!("{}: {set} is done and there is no mark: {summary:?}, {case:?}", node.name));
            }
            if marked && case.is_some() && !believed && !held {
                wrong.push(format!("{}: the mark {kind} exists but its case does not record it: {case:?}", node.name));
            }
        }
    }
    // A machine that was removed for good may leave an open case under a name that is no longer used.
    for (name, case) in open {
        let is_same_machine =
            |node: &&Node| node.hardware.as_ref().is_some_and(|hardware| hardware.matches(&case.hardware));
        if let Some(node) = world.iter().find(is_same_machine) {
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
