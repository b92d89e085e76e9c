//! The cluster state for a process that does not lead: the store, combined with the cluster as the last cycle observed
//! it or as it is now.
//!
//! Nothing here writes, takes the lease or changes the cluster. The leader stores what it observed ([`Cluster`])
//! together with its policy and tests: a reader on another machine, with other configuration files, shows what the
//! leader uses.

use std::collections::BTreeMap;

use doctor_backend::{Backend, BackendError, PolledJob, SeenNode};
use doctor_core::{
    ids::{NodeName, PoolName, RunId, TestId},
    node::{Marks, Node, Occupancy},
    policy::{Policy, TestPolicy},
    snapshot::{ActiveRun, Caps, RecentActions, Records, Snapshot},
    time::{Span, Timestamp},
    view::{AuditLine, CycleView, Facts, Kept, Latest, Ledger, PassedBy},
};
use doctor_store::{
    Store, StoreError,
    records::{AuditRow, LatestRow, StoredNode},
};

use crate::{
    audience::Seen,
    failed_work, recall,
    settings::Settings,
    snapshot::{Cluster, ClusterRow, active, mark_strangers, record},
};

const DAY: i64 = 86_400_000;

/// Returns the facts for views: the store now, combined with the cluster as last observed.
///
/// # Errors
/// If the store fails.
pub fn facts(store: &Store, seen: Option<Timestamp>, cluster: Cluster, now: Timestamp) -> Result<Facts, StoreError> {
    let by = Judged { caps: cluster.caps, policy: cluster.policy, tests: cluster.tests };
    let nodes = cluster.nodes.into_iter().map(ClusterRow::seen).collect();
    let (snapshot, gone) = assemble(store, by, nodes, &BTreeMap::new(), now)?;
    let (tests, never) = (snapshot.tests.clone(), Records::never(snapshot.tests.len()));
    let gone = gone.into_iter().map(|(name, stored)| record(&tests, &never, no_longer_named(name), Some(stored), None));
    Ok(Facts { now, seen, gone: gone.collect(), reasons: reasons(store)?, snapshot })
}

/// Returns the facts for a cluster that this process has just observed. The snapshot is updated with what the cycle has
/// written to the store since.
///
/// # Errors
/// If the store fails.
pub fn facts_of(store: &Store, seen: Seen) -> Result<Facts, StoreError> {
    let Seen { mut snapshot, behind, .. } = seen;
    catch_up(store, &mut snapshot, &behind)?;
    let (tests, never) = (snapshot.tests.clone(), Records::never(snapshot.tests.len()));
    let here = |name: &NodeName| snapshot.nodes.binary_search_by(|record| record.node.name.cmp(name)).is_ok();
    let names: Vec<NodeName> = store.node_names()?.into_iter().filter(|name| !here(name)).collect();
    let gone = if names.is_empty() { BTreeMap::new() } else { store.load_nodes_named(&names)? };
    let gone = gone.into_iter();
    let gone = gone.map(|(name, stored)| record(&tests, &never, no_longer_named(name), Some(stored), None));
    let (now, seen) = (snapshot.at, Some(snapshot.at));
    Ok(Facts { now, seen, gone: gone.collect(), reasons: reasons(store)?, snapshot })
}

/// Updates a snapshot from the store.
fn catch_up(store: &Store, snapshot: &mut Snapshot, behind: &[NodeName]) -> Result<(), StoreError> {
    let stored = if behind.is_empty() { BTreeMap::new() } else { store.load_nodes_named(behind)? };
    let (tests, never) = (snapshot.tests.clone(), Records::never(snapshot.tests.len()));
    for (name, stored) in stored {
        let Ok(place) = snapshot.nodes.binary_search_by(|record| record.node.name.cmp(&name)) else { continue };
        let known = &mut snapshot.nodes[place];
        let node = SeenNode { node: known.node.clone().into(), heard: known.heard, jobs: Vec::new() };
        *known = record(&tests, &never, node, Some(stored), known.failed.clone());
    }
    let runs = active(&store.active_runs()?, &BTreeMap::new(), &BTreeMap::new());
    let mut polled: BTreeMap<RunId, ActiveRun> =
        std::mem::take(&mut snapshot.runs).into_iter().map(|active| (active.run.id, active)).collect();
    // Only the cycle knows what the backend reported about a job.
    let known = |active: ActiveRun| match polled.remove(&active.run.id) {
        Some(seen) => ActiveRun { seen: seen.seen, absent_since: seen.absent_since, ..active },
        None => active,
    };
    snapshot.runs = runs.into_iter().map(known).collect();
    let now = snapshot.at;
    snapshot.cases = store.cases(now.minus(snapshot.policy.repair.memory))?;
    snapshot.recent = RecentActions { taken_out: store.taken_out_since(now.minus(Span::hours(1)))? };
    snapshot.breaker = store.breaker()?;
    snapshot.pauses = store.pauses(now)?;
    snapshot.requests = store.requests()?;
    Ok(())
}

fn reasons(store: &Store) -> Result<BTreeMap<NodeName, PassedBy>, StoreError> {
    let rows = store.reasons_all()?.into_iter();
    Ok(rows.map(|row| (row.node, PassedBy { since: row.since, reason: row.reason })).collect())
}

/// Returns the store's data about one node, with at most `audit` lines of the audit log.
///
/// # Errors
/// If the store fails.
pub fn kept(store: &Store, facts: &Facts, node: &NodeName, audit: u32) -> Result<Kept, StoreError> {
    let case = facts.node(node).and_then(|(record, _)| record.case);
    let line = |row: AuditRow| AuditLine {
        at: row.at,
        by: row.by,
        what: row.what,
        code: row.code,
        text: row.text,
        run: row.run,
    };
    Ok(Kept {
        latest: store.latest_of(node)?.into_iter().map(split).collect(),
        case: case.map(|id| store.case(id)).transpose()?.flatten(),
        audit: store.audit(audit, Some(node))?.into_iter().map(line).collect(),
    })
}

/// Returns the store's data that is not about nodes.
///
/// # Errors
/// If the store fails.
pub fn ledger(store: &Store, now: Timestamp) -> Result<Ledger, StoreError> {
    let midnight = Timestamp::from_millis(now.millis().div_euclid(DAY) * DAY);
    let last_cycle = store.cycles(1)?.into_iter().next().map(|row| CycleView {
        at: row.at,
        took: row.took,
        actions: row.actions,
        submitted: row.submitted,
        trouble: row.trouble,
    });
    Ok(Ledger {
        last_cycle,
        leader: store.leader()?,
        rejected: store.counters()?.documents_rejected,
        spent_today: store.spent_since(midnight)?,
    })
}

/// Returns the snapshot that a cycle would plan from now. Queries the cluster; changes nothing.
///
/// # Errors
/// If the store or the cluster does not answer.
pub fn fresh(store: &Store, backend: &dyn Backend, settings: &Settings, now: Timestamp) -> Result<Snapshot, LookError> {
    let mut nodes = backend.snapshot()?;
    nodes.sort_by(|a, b| a.node.name.cmp(&b.node.name));
    nodes.dedup_by(|a, b| a.node.name == b.node.name);
    recall::recall(store, backend, None, &mut nodes)?;
    let runs = store.active_runs()?;
    mark_strangers(&runs, &mut nodes);
    let ids: Vec<RunId> = runs.iter().map(|stored| stored.run.id).collect();
    let polled = if ids.is_empty() { Vec::new() } else { backend.poll(&ids)? };
    let polled: BTreeMap<RunId, PolledJob> = ids.into_iter().zip(polled).collect();
    let by = Judged { caps: backend.caps(), policy: (*settings.policy).clone(), tests: settings.tests.to_vec() };
    Ok(assemble(store, by, nodes, &polled, now)?.0)
}

/// Why there is no fresh snapshot.
#[derive(Debug, thiserror::Error)]
pub enum LookError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Backend(#[from] BackendError),
}

struct Judged {
    caps: Caps,
    policy: Policy,
    tests: Vec<TestPolicy>,
}

type Gone = BTreeMap<NodeName, StoredNode>;

fn assemble(
    store: &Store,
    by: Judged,
    seen: Vec<SeenNode>,
    polled: &BTreeMap<RunId, PolledJob>,
    now: Timestamp,
) -> Result<(Snapshot, Gone), StoreError> {
    let mut stored = store.load_nodes()?;
    let never = Records::never(by.tests.len());
    let failed = failed_work::stored(store, by.policy.user_work.window, now)?;
    let records = seen.into_iter().map(|seen| {
        let (known, failed) = (stored.remove(&seen.node.name), failed.get(&seen.node.name).cloned());
        record(&by.tests, &never, seen, known, failed)
    });
    let nodes = records.collect();
    let runs = store.active_runs()?;
    let midnight = Timestamp::from_millis(now.millis().div_euclid(DAY) * DAY);
    let snapshot = Snapshot {
        at: now,
        nodes,
        runs: active(&runs, polled, &BTreeMap::new()),
        cases: store.cases(now.minus(by.policy.repair.memory))?,
        recent: RecentActions { taken_out: store.taken_out_since(now.minus(Span::hours(1)))? },
        spent: store.spent_since(midnight)?,
        breaker: store.breaker()?,
        pauses: store.pauses(now)?,
        requests: store.requests()?,
        trials: Vec::new(),
        silence_reported: store.silence_reported()?,
        caps: by.caps,
        policy: by.policy.into(),
        tests: by.tests.into(),
    };
    Ok((snapshot, stored))
}

/// A node that only the store knows. The pool is a placeholder that views do not show.
fn no_longer_named(name: NodeName) -> SeenNode {
    let node = Node {
        name,
        pool: PoolName::new("gone").expect("a plain word is a pool name"),
        occupancy: Occupancy::Unknown { why: "the cluster no longer lists it".into() },
        marks: Marks::default(),
        hardware: None,
        sku: None,
        apart: None,
    };
    SeenNode { node: node.into(), heard: None, jobs: Vec::new() }
}

fn split(row: LatestRow) -> (TestId, Latest) {
    let LatestRow { node: _, test, at, verdict, reason, run, conclusive, misses } = row;
    (test, Latest { at, verdict, reason, run, conclusive, misses })
}
