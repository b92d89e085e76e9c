//! The cluster state for a process that is not the leader: the store, combined with the cluster as the last cycle
//! observed it or as it is now.
//!
//! Nothing here writes, takes the lease or changes the cluster. The leader stores what it observed ([`ObservedCluster`])
//! together with its policy and tests: a reader on another machine, with other configuration files, shows what the
//! leader uses.

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
};

use doctor_backend::{Backend, BackendError, ObservedNode, PolledJob};
use doctor_core::{
    ids::{NodeName, PoolName, RunId, TestId},
    node::{Marks, Node, Occupancy},
    policy::{Policy, TestPolicy},
    snapshot::{ActiveRun, Capabilities, NodeRecord, RecentActions, Snapshot, TestRecords},
    software::Software,
    time::{Span, Timestamp},
    view::{
        self, AuditLine, CycleView, Facts, LatestResult, RunWithoutResult, SkippedSince, StoredNodeData, StoredStatus,
    },
};
use doctor_store::{
    Store, StoreError,
    records::{AuditRow, EndedWithoutResult, LatestRow, StoredNode},
};

use crate::{
    job_failures, mark_recovery, recent_runs,
    settings::Settings,
    snapshot::{ClusterStateRow, ObservedCluster, active_runs, mark_unknown_jobs, node_record},
    snapshot_feed::ObservedSnapshot,
};

const DAY: i64 = 86_400_000;

/// Returns the facts for views: the store now, combined with the cluster as last observed.
///
/// # Errors
/// If the store fails.
pub fn facts(
    store: &Store,
    observed_at: Option<Timestamp>,
    cluster: ObservedCluster,
    now: Timestamp,
) -> Result<Facts, StoreError> {
    let cycle_at = observed_at.map(|observed_at| cluster.last_cycle(observed_at));
    let backend = Some(cluster.backend).filter(|name| !name.is_empty());
    let inputs = PlanInputs { caps: cluster.caps, policy: cluster.policy, tests: cluster.tests };
    let nodes = cluster.nodes.into_iter().map(ClusterStateRow::into_seen_node).collect();
    let (mut snapshot, stored_only) = assemble(store, inputs, nodes, &BTreeMap::new(), now)?;
    let (tests, never) = (snapshot.tests.clone(), TestRecords::untested(snapshot.tests.len()));
    let stored_only = stored_only.into_iter().map(|(name, stored)| {
        let node = if observed_at.is_some() { unlisted_node(name) } else { not_observed(name) };
        node_record(&tests, &never, node, Some(stored), None)
    });
    let stored_only: Vec<NodeRecord> = stored_only.collect();
    // Before the first observation, no node is known to be gone.
    let gone = if observed_at.is_some() {
        stored_only
    } else {
        snapshot.nodes = stored_only;
        Vec::new()
    };
    Ok(Facts { now, backend, observed_at, cycle_at, gone, skip_reasons: skip_reasons(store)?, snapshot })
}

/// Returns the facts for a cluster that this process has just observed. The snapshot is updated with what the cycle has
/// written to the store since.
///
/// # Errors
/// If the store fails.
pub fn facts_from_snapshot(store: &Store, observed: ObservedSnapshot) -> Result<Facts, StoreError> {
    let ObservedSnapshot { mut snapshot, backend, observed_at, changed_in_store, .. } = observed;
    refresh_from_store(store, &mut snapshot, &changed_in_store)?;
    let (tests, never) = (snapshot.tests.clone(), TestRecords::untested(snapshot.tests.len()));
    let listed: HashSet<&NodeName> = snapshot.nodes.iter().map(|record| &record.node.name).collect();
    let names: Vec<NodeName> = store.node_names()?.into_iter().filter(|name| !listed.contains(name)).collect();
    let gone = if names.is_empty() { BTreeMap::new() } else { store.load_nodes_named(&names)? };
    let gone = gone.into_iter();
    let gone = gone.map(|(name, stored)| node_record(&tests, &never, unlisted_node(name), Some(stored), None));
    let (now, cycle_at) = (snapshot.at, Some(snapshot.at));
    let (gone, skip_reasons) = (gone.collect(), skip_reasons(store)?);
    Ok(Facts { now, backend: Some(backend), observed_at, cycle_at, gone, skip_reasons, snapshot })
}

/// Updates a snapshot from the store.
fn refresh_from_store(store: &Store, snapshot: &mut Snapshot, changed_nodes: &[NodeName]) -> Result<(), StoreError> {
    let stored = if changed_nodes.is_empty() { BTreeMap::new() } else { store.load_nodes_named(changed_nodes)? };
    let (tests, never) = (snapshot.tests.clone(), TestRecords::untested(snapshot.tests.len()));
    for (name, stored) in stored {
        let Ok(index) = snapshot.nodes.binary_search_by(|record| record.node.name.cmp(&name)) else { continue };
        let known = &mut snapshot.nodes[index];
        let node = ObservedNode { node: Arc::clone(&known.node), agent_last_seen: known.last_report, jobs: Vec::new() };
        *known = node_record(&tests, &never, node, Some(stored), known.job_failures.clone());
    }
    let runs = active_runs(&store.active_runs()?, &BTreeMap::new(), &BTreeMap::new());
    let mut polled: BTreeMap<RunId, ActiveRun> =
        std::mem::take(&mut snapshot.runs).into_iter().map(|active| (active.run.id, active)).collect();
    // Only the cycle knows what the backend reported about a job.
    let known = |active: ActiveRun| match polled.remove(&active.run.id) {
        Some(polled_run) => ActiveRun { job: polled_run.job, absent_since: polled_run.absent_since, ..active },
        None => active,
    };
    snapshot.runs = runs.into_iter().map(known).collect();
    let now = snapshot.at;
    snapshot.cases = store.cases(now.minus(snapshot.policy.repair.memory))?;
    snapshot.recent = RecentActions { taken_out: store.nodes_taken_out_since(now.minus(Span::hours(1)))? };
    snapshot.breaker = store.breaker()?;
    snapshot.pauses = store.pauses(now)?;
    snapshot.commands = store.open_commands()?;
    Ok(())
}

fn skip_reasons(store: &Store) -> Result<BTreeMap<NodeName, SkippedSince>, StoreError> {
    let rows = store.skip_reasons()?.into_iter();
    Ok(rows.map(|row| (row.node, SkippedSince { since: row.since, reason: row.reason })).collect())
}

/// Returns the store's data about one node, with at most `audit` lines of the audit log.
///
/// # Errors
/// If the store fails.
pub fn node_details(store: &Store, facts: &Facts, node: &NodeName, audit: u32) -> Result<StoredNodeData, StoreError> {
    let case = facts.node(node).and_then(|(record, _)| record.case);
    let line = |row: AuditRow| AuditLine {
        at: row.at,
        by: row.by,
        what: row.what,
        code: row.code,
        text: row.text,
        run: row.run,
    };
    Ok(StoredNodeData {
        latest: store.latest_of(node)?.into_iter().map(latest_entry).collect(),
        case: case.map(|id| store.case(id)).transpose()?.flatten(),
        audit: store.audit(audit, Some(node))?.into_iter().map(line).collect(),
        without_result: store.last_without_result(node)?.map(run_without_result),
    })
}

fn run_without_result(ended: EndedWithoutResult) -> RunWithoutResult {
    let (state, end) = view::run_end(&ended.end);
    let last_output = ended.output.quote();
    let node = ended.output.node;
    RunWithoutResult { run: ended.run, node, tests: ended.tests, state, end, ended: ended.ended, last_output }
}

/// Returns the store's data that is not about nodes.
///
/// # Errors
/// If the store fails.
pub fn ledger(store: &Store, now: Timestamp) -> Result<StoredStatus, StoreError> {
    let midnight = Timestamp::from_millis(now.millis().div_euclid(DAY) * DAY);
    let last_cycle = store.cycles(1)?.into_iter().next().map(|row| CycleView {
        at: row.at,
        duration: row.duration,
        actions: row.actions,
        submitted: row.submitted,
        problem: row.error,
    });
    Ok(StoredStatus {
        last_cycle,
        leader: store.leader_at(now)?,
        rejected: store.counters()?.documents_rejected,
        rejected_at: store.last_rejection()?,
        spent_today: store.node_time_since(midnight)?,
        ..StoredStatus::default()
    })
}

/// As [`ledger`], with what the newest results say about the tests that occupy nodes (their durations, nodes without the
/// software that they need), how the latest runs ended, and what operators have acknowledged.
///
/// # Errors
/// If the store fails.
pub fn status_ledger(store: &Store, facts: &Facts) -> Result<StoredStatus, StoreError> {
    let tests = |deep: bool| {
        let wanted = facts.snapshot.tests.iter().filter(move |test| !deep || (test.routine && test.exclusive));
        wanted.map(|test| test.id.clone()).collect::<Vec<TestId>>()
    };
    let codes: Vec<_> = Software::ALL.iter().map(|software| software.reason()).collect();
    let missing = store.nodes_not_applicable(&tests(false), &codes)?.into_iter();
    let missing = missing.filter_map(|(test, code, nodes)| Some((Software::from_code(code.as_str())?, test, nodes)));
    // A snooze that has expired may still be stored: the delivery of alerts removes it, and a site without alerts has none.
    let muted = store.mutes()?.into_iter().filter(|(_, mute)| mute.until.is_none_or(|until| until > facts.now));
    Ok(StoredStatus {
        durations: store.mean_durations(&tests(true))?,
        missing_software: missing.collect(),
        recent_runs: recent_runs::ended(store)?,
        acknowledged: muted.map(|(case, mute)| (case, mute.by)).collect(),
        alerts_lost: store.alerts_given_up_since(facts.now.minus(Span::days(1)))?,
        ..ledger(store, facts.now)?
    })
}

/// Returns the snapshot that a cycle would plan from now. Queries the cluster; changes nothing.
///
/// # Errors
/// If the store or the cluster does not answer.
pub fn observe_now(
    store: &Store,
    backend: &dyn Backend,
    settings: &Settings,
    now: Timestamp,
) -> Result<Snapshot, ObserveError> {
    let mut nodes = backend.snapshot()?;
    nodes.sort_by(|a, b| a.node.name.cmp(&b.node.name));
    nodes.dedup_by(|a, b| a.node.name == b.node.name);
    mark_recovery::restore_marks(store, backend, None, &mut nodes)?;
    let runs = store.active_runs()?;
    mark_unknown_jobs(store, &runs, &mut nodes)?;
    let ids: Vec<RunId> = runs.iter().map(|stored| stored.run.id).collect();
    let polled = if ids.is_empty() { Vec::new() } else { backend.poll(&ids)? };
    let polled: BTreeMap<RunId, PolledJob> = ids.into_iter().zip(polled).collect();
    let inputs =
        PlanInputs { caps: backend.caps(), policy: (*settings.policy).clone(), tests: settings.tests.to_vec() };
    Ok(assemble(store, inputs, nodes, &polled, now)?.0)
}

/// Why there is no fresh snapshot.
#[derive(Debug, thiserror::Error)]
pub enum ObserveError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Backend(#[from] BackendError),
}

struct PlanInputs {
    caps: Capabilities,
    policy: Policy,
    tests: Vec<TestPolicy>,
}

type UnlistedNodes = BTreeMap<NodeName, StoredNode>;

fn assemble(
    store: &Store,
    inputs: PlanInputs,
    observed: Vec<ObservedNode>,
    polled: &BTreeMap<RunId, PolledJob>,
    now: Timestamp,
) -> Result<(Snapshot, UnlistedNodes), StoreError> {
    let mut stored = store.load_nodes()?;
    let never = TestRecords::untested(inputs.tests.len());
    let failed = job_failures::stored(store, inputs.policy.user_work.window, now)?;
    let records = observed.into_iter().map(|observed| {
        let (known, failed) = (stored.remove(&observed.node.name), failed.get(&observed.node.name).cloned());
        node_record(&inputs.tests, &never, observed, known, failed)
    });
    let nodes = records.collect();
    let runs = store.active_runs()?;
    let midnight = Timestamp::from_millis(now.millis().div_euclid(DAY) * DAY);
    let snapshot = Snapshot {
        at: now,
        planned_at: None,
        nodes,
        runs: active_runs(&runs, polled, &BTreeMap::new()),
        cases: store.cases(now.minus(inputs.policy.repair.memory))?,
        recent: RecentActions { taken_out: store.nodes_taken_out_since(now.minus(Span::hours(1)))? },
        spent: store.node_time_since(midnight)?,
        breaker: store.breaker()?,
        pauses: store.pauses(now)?,
        commands: store.open_commands()?,
        trials: Vec::new(),
        silence_reported: store.agent_silence_reported()?,
        capabilities: inputs.caps,
        policy: inputs.policy.into(),
        tests: inputs.tests.into(),
    };
    Ok((snapshot, stored))
}

/// A node that the store knows and the cluster no longer lists.
fn unlisted_node(name: NodeName) -> ObservedNode {
    from_store(name, "gone", "the cluster no longer lists it")
}

/// A node that the store knows, before the first observation of the cluster.
fn not_observed(name: NodeName) -> ObservedNode {
    from_store(name, "unknown", "the cluster has not been observed yet")
}

/// A node that only the store knows. The pool is a placeholder.
fn from_store(name: NodeName, pool: &str, why: &str) -> ObservedNode {
    let node = Node {
        name,
        pool: PoolName::new(pool).expect("a plain word is a pool name"),
        occupancy: Occupancy::Unknown { why: why.into() },
        marks: Marks::default(),
        hardware: None,
        sku: None,
        declared: None,
        overrides: None,
    };
    ObservedNode { node: node.into(), agent_last_seen: None, jobs: Vec::new() }
}

fn latest_entry(row: LatestRow) -> (TestId, LatestResult) {
    let LatestRow { node: _, test, at, verdict, reason, run, conclusive, misses } = row;
    (test, LatestResult { at, verdict, reason, run, conclusive, misses })
}
