//! What a process that does not lead can know: the store, and the cluster as the last cycle saw it or as it is now.
//!
//! Nothing here writes, takes the lease or touches the cluster. The leader leaves what it saw in the store
//! ([`Cluster`]), together with the policy and the tests that are in force there: whoever reads it on another machine,
//! with other files, shows what the leader judges by and not what he would.

use std::collections::BTreeMap;

use doctor_core::{
    ids::{NodeName, PoolName, RunId, Sku, TestId},
    node::{Marks, Node, Occupancy},
    policy::{Policy, TestPolicy},
    snapshot::{Caps, RecentActions, Snapshot},
    time::{Span, Timestamp},
    view::{Facts, Latest, PassedBy},
};
use serde::{Deserialize, Serialize};

use crate::{
    backend::{Backend, BackendError, PolledJob, SeenNode},
    observe,
    settings::Settings,
    store::{
        Store, StoreError,
        records::{LatestRow, StoredNode},
    },
};

/// A cluster as a cycle saw it, and by what it was judged.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Cluster {
    pub backend: String,
    pub caps: Caps,
    pub policy: Policy,
    pub tests: Vec<TestPolicy>,
    pub nodes: Vec<ClusterRow>,
}

/// A node as a cycle saw it. Which machine it is, the store knows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterRow {
    pub node: NodeName,
    pub pool: PoolName,
    pub occupancy: Occupancy,
    #[serde(default)]
    pub marks: Marks,
    #[serde(default)]
    pub sku: Option<Sku>,
    #[serde(default)]
    pub heard: Option<Timestamp>,
}

impl Cluster {
    /// What a snapshot says of the cluster.
    pub fn of(backend: &str, snapshot: &Snapshot) -> Self {
        let rows = snapshot.nodes.iter().map(|record| ClusterRow {
            node: record.node.name.clone(),
            pool: record.node.pool.clone(),
            occupancy: record.node.occupancy.clone(),
            marks: record.node.marks.clone(),
            sku: record.node.sku.clone(),
            heard: record.heard,
        });
        Self {
            backend: backend.to_owned(),
            caps: snapshot.caps,
            policy: (*snapshot.policy).clone(),
            tests: snapshot.tests.to_vec(),
            nodes: rows.collect(),
        }
    }
}

impl Cluster {
    /// A cluster that no cycle has seen yet, and by what it would be judged.
    pub fn unseen(settings: &Settings) -> Self {
        Self {
            backend: String::new(),
            caps: Caps::NONE,
            policy: (*settings.policy).clone(),
            tests: settings.tests.to_vec(),
            nodes: Vec::new(),
        }
    }
}

impl ClusterRow {
    fn seen(self) -> SeenNode {
        let node = Node {
            name: self.node,
            pool: self.pool,
            occupancy: self.occupancy,
            marks: self.marks,
            hardware: None,
            sku: self.sku,
        };
        SeenNode { node: node.into(), heard: self.heard, jobs: Vec::new() }
    }
}

/// What the last cycle saw, and when. `None`: no cycle has left anything.
///
/// # Errors
/// If the store fails, or holds what this program does not understand.
pub fn last_seen(store: &Store) -> Result<Option<(Timestamp, Cluster)>, StoreError> {
    let Some((at, bytes)) = store.cluster()? else { return Ok(None) };
    let cluster = serde_json::from_slice(&bytes)
        .map_err(|error| StoreError::Unreadable { what: "picture of the cluster", why: error.to_string() })?;
    Ok(Some((at, cluster)))
}

/// The facts that people are shown: the store now, the cluster as it was last seen.
///
/// # Errors
/// If the store fails.
pub fn facts(store: &Store, seen: Option<Timestamp>, cluster: Cluster, now: Timestamp) -> Result<Facts, StoreError> {
    let by = Judged { caps: cluster.caps, policy: cluster.policy, tests: cluster.tests };
    let nodes = cluster.nodes.into_iter().map(ClusterRow::seen).collect();
    let (snapshot, gone) = assemble(store, by, nodes, &BTreeMap::new(), now)?;
    let tests = snapshot.tests.clone();
    let gone = gone.into_iter().map(|(name, stored)| observe::record(&tests, no_longer_named(name), Some(stored)));
    let mut latest: BTreeMap<NodeName, BTreeMap<TestId, Latest>> = BTreeMap::new();
    for row in store.latest_all()? {
        let (node, test, result) = split(row);
        latest.entry(node).or_default().insert(test, result);
    }
    let reasons = store.reasons_all()?.into_iter();
    Ok(Facts {
        now,
        seen,
        gone: gone.collect(),
        latest,
        reasons: reasons.map(|row| (row.node, PassedBy { since: row.since, reason: row.reason })).collect(),
        snapshot,
    })
}

/// The snapshot a cycle would plan from if it ran now. Asks the cluster; changes nothing.
///
/// # Errors
/// If the store or the cluster does not answer.
pub fn fresh(store: &Store, backend: &dyn Backend, settings: &Settings, now: Timestamp) -> Result<Snapshot, LookError> {
    let mut nodes = backend.snapshot()?;
    nodes.sort_by(|a, b| a.node.name.cmp(&b.node.name));
    nodes.dedup_by(|a, b| a.node.name == b.node.name);
    let runs = store.active_runs()?;
    observe::mark_strangers(&runs, &mut nodes);
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
    const DAY: i64 = 86_400_000;
    let mut stored = store.load_nodes()?;
    let records = seen.into_iter().map(|seen| {
        let known = stored.remove(&seen.node.name);
        observe::record(&by.tests, seen, known)
    });
    let nodes = records.collect();
    let runs = store.active_runs()?;
    let midnight = Timestamp::from_millis(now.millis().div_euclid(DAY) * DAY);
    let snapshot = Snapshot {
        at: now,
        nodes,
        runs: observe::active(&runs, polled, &BTreeMap::new()),
        cases: store.cases(now.minus(by.policy.repair.memory))?,
        recent: RecentActions { taken_out: store.taken_out_since(now.minus(Span::hours(1)))? },
        spent: store.spent_since(midnight)?,
        breaker: store.breaker()?,
        pauses: store.pauses(now)?,
        requests: store.requests()?,
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
        occupancy: Occupancy::Unknown { why: "the cluster does not name it any more".into() },
        marks: Marks::default(),
        hardware: None,
        sku: None,
    };
    SeenNode { node: node.into(), heard: None, jobs: Vec::new() }
}

fn split(row: LatestRow) -> (NodeName, TestId, Latest) {
    let LatestRow { node, test, at, verdict, reason, run, conclusive, misses } = row;
    (node, test, Latest { at, verdict, reason, run, conclusive, misses })
}
