//! Builds a snapshot from its sources: a node as the cluster reports it and the store knows it, the active runs, and
//! the cluster state that the leader stores for processes that do not lead.

use std::{collections::BTreeMap, sync::Arc};

use doctor_backend::{PolledJob, SeenNode};
use doctor_core::{
    failed_work::FailedHere,
    ids::{NodeName, PoolName, RunId, Sku},
    lifecycle::Life,
    node::{Marks, Node, Occupancy},
    policy::{Policy, TestPolicy},
    run::JobSeen,
    snapshot::{ActiveRun, Caps, NodeRecord, Records, Snapshot, TestRecord},
    time::Timestamp,
};
use doctor_store::{
    Store, StoreError,
    records::{StoredNode, StoredRun},
};
use serde::{Deserialize, Serialize, Serializer};

use crate::settings::Settings;

/// A cluster as a cycle observed it, with the policy and tests of that cycle.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Cluster {
    pub backend: String,
    pub caps: Caps,
    pub policy: Policy,
    pub tests: Vec<TestPolicy>,
    pub nodes: Vec<ClusterRow>,
}

/// A node as a cycle observed it. Its hardware identity is in the store.
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

/// Serialises the cluster part of a snapshot in the form that [`last_seen`] reads. It borrows the nodes instead of
/// copying them: there may be thousands, and this runs continually.
pub(crate) fn written<'a>(backend: &'a str, snapshot: &'a Snapshot) -> impl Serialize + 'a {
    Written {
        backend,
        caps: snapshot.caps,
        policy: &snapshot.policy,
        tests: &snapshot.tests,
        nodes: Rows(&snapshot.nodes),
    }
}

/// A [`Cluster`], borrowed.
#[derive(Serialize)]
struct Written<'a> {
    backend: &'a str,
    caps: Caps,
    policy: &'a Policy,
    tests: &'a [TestPolicy],
    nodes: Rows<'a>,
}

struct Rows<'a>(&'a [NodeRecord]);

impl Serialize for Rows<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        /// A [`ClusterRow`], borrowed.
        #[derive(Serialize)]
        struct Row<'a> {
            node: &'a NodeName,
            pool: &'a PoolName,
            occupancy: &'a Occupancy,
            marks: &'a Marks,
            sku: &'a Option<Sku>,
            heard: Option<Timestamp>,
        }

        serializer.collect_seq(self.0.iter().map(|NodeRecord { node, heard, .. }| Row {
            node: &node.name,
            pool: &node.pool,
            occupancy: &node.occupancy,
            marks: &node.marks,
            sku: &node.sku,
            heard: *heard,
        }))
    }
}

impl Cluster {
    /// A cluster that no cycle has observed yet.
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
    pub(crate) fn seen(self) -> SeenNode {
        let node = Node {
            name: self.node,
            pool: self.pool,
            occupancy: self.occupancy,
            marks: self.marks,
            hardware: None,
            sku: self.sku,
            apart: None,
        };
        SeenNode { node: node.into(), heard: self.heard, jobs: Vec::new() }
    }
}

/// Returns what the last cycle observed, and when. `None`: no cycle has stored anything.
///
/// # Errors
/// If the store fails, or its content cannot be parsed by this version.
pub fn last_seen(store: &Store) -> Result<Option<(Timestamp, Cluster)>, StoreError> {
    let Some((at, bytes)) = store.cluster()? else { return Ok(None) };
    let cluster = serde_json::from_slice(&bytes)
        .map_err(|error| StoreError::Unreadable { what: "picture of the cluster", why: error.to_string() })?;
    Ok(Some((at, cluster)))
}

/// A job of ours that this store does not know (an empty store, another controller) occupies its node too.
pub(crate) fn mark_strangers(runs: &[StoredRun], seen: &mut [SeenNode]) {
    for seen in seen.iter_mut().filter(|seen| !seen.jobs.is_empty() && seen.node.occupancy.is_free()) {
        let known = |run: &RunId| runs.iter().any(|stored| stored.run.id == *run);
        if let Some(run) = seen.jobs.iter().find(|run| !known(run)) {
            let by = format!("validation job {run}, unknown to this store").into();
            Arc::make_mut(&mut seen.node).occupancy = Occupancy::Busy { by };
        }
    }
}

pub(crate) fn active(
    runs: &[StoredRun],
    polled: &BTreeMap<RunId, PolledJob>,
    absent: &BTreeMap<RunId, Timestamp>,
) -> Vec<ActiveRun> {
    runs.iter()
        .map(|stored| ActiveRun {
            run: stored.run.clone(),
            seen: polled
                .get(&stored.run.id)
                .map_or_else(|| JobSeen::Unknown { why: "the backend was not queried".into() }, |job| job.seen.clone()),
            started: stored.started,
            cancelling: stored.cancelling,
            absent_since: absent.get(&stored.run.id).copied(),
        })
        .collect()
}

/// Builds a node's record. `never` is shared by all nodes without a test result.
pub(crate) fn record(
    tests: &[TestPolicy],
    never: &Records,
    seen: SeenNode,
    stored: Option<StoredNode>,
    failed: Option<Arc<FailedHere>>,
) -> NodeRecord {
    let known = stored.as_ref().map(|stored| &stored.records).filter(|known| !known.is_empty());
    let records = known.map_or_else(
        || never.clone(),
        |known| tests.iter().map(|test| known.get(&test.id).copied().unwrap_or(TestRecord::NEVER)).collect(),
    );
    match stored {
        Some(stored) => NodeRecord {
            node: Arc::unwrap_or_clone(seen.node),
            life: stored.life,
            since: stored.since,
            records,
            findings: stored.findings,
            backoff: stored.backoff,
            hold: stored.hold,
            hardware: stored.hardware,
            case: stored.case,
            heard: seen.heard,
            failed,
        },
        None => NodeRecord {
            node: Arc::unwrap_or_clone(seen.node),
            life: Life::InService,
            since: Timestamp::MIN,
            records,
            findings: Vec::new(),
            backoff: None,
            hold: None,
            hardware: None,
            case: None,
            heard: seen.heard,
            failed,
        },
    }
}
