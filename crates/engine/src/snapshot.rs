//! Builds a snapshot from its sources: a node as the cluster reports it and the store knows it, the active runs, and
//! the cluster state that the leader stores for processes that do not lead.

use std::{collections::BTreeMap, sync::Arc};

use doctor_backend::{ObservedNode, PolledJob};
use doctor_core::{
    ids::{NodeName, PoolName, RunId, Sku},
    job_failures::NodeJobFailures,
    lifecycle::NodeState,
    node::{Declared, Marks, Node, Occupancy},
    policy::{Policy, TestPolicy},
    run::ObservedJobState,
    snapshot::{ActiveRun, Capabilities, NodeRecord, Snapshot, TestRecord, TestRecords},
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
pub struct ObservedCluster {
    pub backend: String,
    /// When a controller last ran a cycle, whether the cluster answered or not. Absent: stored by a version without it.
    #[serde(default)]
    pub cycle_at: Option<Timestamp>,
    /// The version of the controller that observed it. `None`: that controller did not store it.
    #[serde(default)]
    pub program: Option<String>,
    pub caps: Capabilities,
    pub policy: Policy,
    pub tests: Vec<TestPolicy>,
    pub nodes: Vec<ClusterStateRow>,
}

/// A node as a cycle observed it. Its hardware identity is in the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterStateRow {
    pub node: NodeName,
    pub pool: PoolName,
    pub occupancy: Occupancy,
    #[serde(default)]
    pub marks: Marks,
    #[serde(default)]
    pub sku: Option<Sku>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub declared: Option<Declared>,
    #[serde(default)]
    pub last_report: Option<Timestamp>,
}

/// Serialises the cluster part of a snapshot in the form that [`last_observed`] reads. It borrows the nodes instead of
/// copying them: there may be thousands, and this runs continually.
pub(crate) fn serializable<'a>(backend: &'a str, snapshot: &'a Snapshot) -> impl Serialize + 'a {
    ObservedClusterRef {
        backend,
        cycle_at: snapshot.at,
        program: env!("CARGO_PKG_VERSION"),
        caps: snapshot.capabilities,
        policy: &snapshot.policy,
        tests: &snapshot.tests,
        nodes: NodeRows(&snapshot.nodes),
    }
}

/// A [`ObservedCluster`], borrowed.
#[derive(Serialize)]
struct ObservedClusterRef<'a> {
    backend: &'a str,
    cycle_at: Timestamp,
    program: &'static str,
    caps: Capabilities,
    policy: &'a Policy,
    tests: &'a [TestPolicy],
    nodes: NodeRows<'a>,
}

struct NodeRows<'a>(&'a [NodeRecord]);

impl Serialize for NodeRows<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        /// A [`ClusterStateRow`], borrowed.
        #[derive(Serialize)]
        struct Row<'a> {
            node: &'a NodeName,
            pool: &'a PoolName,
            occupancy: &'a Occupancy,
            marks: &'a Marks,
            sku: &'a Option<Sku>,
            #[serde(skip_serializing_if = "Option::is_none")]
            declared: Option<&'a Declared>,
            last_report: Option<Timestamp>,
        }

        serializer.collect_seq(self.0.iter().map(|NodeRecord { node, last_report, .. }| Row {
            node: &node.name,
            pool: &node.pool,
            occupancy: &node.occupancy,
            marks: &node.marks,
            sku: &node.sku,
            declared: node.declared.as_deref(),
            last_report: *last_report,
        }))
    }
}

impl ObservedCluster {
    /// Returns the time of the last cycle of a cluster that last answered at this time.
    pub fn last_cycle(&self, observed_at: Timestamp) -> Timestamp {
        self.cycle_at.map_or(observed_at, |cycle_at| cycle_at.max(observed_at))
    }

    /// A cluster that no cycle has observed yet.
    pub fn unobserved(settings: &Settings) -> Self {
        Self {
            backend: String::new(),
            cycle_at: None,
            program: None,
            caps: Capabilities::NONE,
            policy: (*settings.policy).clone(),
            tests: settings.tests.to_vec(),
            nodes: Vec::new(),
        }
    }
}

impl ClusterStateRow {
    pub(crate) fn into_seen_node(self) -> ObservedNode {
        let node = Node {
            name: self.node,
            pool: self.pool,
            occupancy: self.occupancy,
            marks: self.marks,
            hardware: None,
            sku: self.sku,
            declared: self.declared.map(Arc::new),
            overrides: None,
        };
        ObservedNode { node: node.into(), agent_last_seen: self.last_report, jobs: Vec::new() }
    }
}

/// Returns what the last cycle observed, and when the cluster last answered. `None`: no cycle has stored anything.
///
/// # Errors
/// If the store fails, or its content cannot be parsed by this version.
pub fn last_observed(store: &Store) -> Result<Option<(Timestamp, ObservedCluster)>, StoreError> {
    let Some((at, bytes)) = store.cluster_state()? else { return Ok(None) };
    let cluster = serde_json::from_slice(&bytes)
        .map_err(|error| StoreError::Unreadable { what: "picture of the cluster", why: error.to_string() })?;
    Ok(Some((at, cluster)))
}

/// A job of ours that this store does not know (an empty store, another controller) occupies its node too. So does one
/// whose run has ended and which has not left the node yet, but the run that follows it there is not cancelled for it.
///
/// # Errors
/// If the store fails.
pub(crate) fn mark_unknown_jobs(
    store: &Store,
    runs: &[StoredRun],
    observed: &mut [ObservedNode],
) -> Result<(), StoreError> {
    for observed in
        observed.iter_mut().filter(|observed| !observed.jobs.is_empty() && observed.node.occupancy.is_free())
    {
        let is_active = |run: &RunId| runs.iter().any(|stored| stored.run.id == *run);
        let has_run = runs.iter().any(|stored| stored.run.nodes.iter().any(|node| *node == observed.node.name));
        for run in observed.jobs.iter().filter(|run| !is_active(run)) {
            let by = match store.run(*run)? {
                Some(_) if has_run => continue,
                Some(_) => format!("validation job {run}, which is leaving"),
                None => format!("validation job {run}, unknown to this store"),
            };
            Arc::make_mut(&mut observed.node).occupancy = Occupancy::Busy { by: by.into() };
            break;
        }
    }
    Ok(())
}

pub(crate) fn active_runs(
    runs: &[StoredRun],
    polled: &BTreeMap<RunId, PolledJob>,
    absent: &BTreeMap<RunId, Timestamp>,
) -> Vec<ActiveRun> {
    runs.iter()
        .map(|stored| ActiveRun {
            run: stored.run.clone(),
            job: polled.get(&stored.run.id).map_or_else(
                || ObservedJobState::Unknown { why: "the backend was not queried".into() },
                |job| job.state.clone(),
            ),
            started: stored.started,
            cancelling: stored.cancelling,
            absent_since: absent.get(&stored.run.id).copied(),
        })
        .collect()
}

/// Builds a node's record. `never` is shared by all nodes without a test result.
pub(crate) fn node_record(
    tests: &[TestPolicy],
    never: &TestRecords,
    observed: ObservedNode,
    stored: Option<StoredNode>,
    failed: Option<Arc<NodeJobFailures>>,
) -> NodeRecord {
    let known = stored.as_ref().map(|stored| &stored.records).filter(|known| !known.is_empty());
    let records = known.map_or_else(
        || never.clone(),
        |known| tests.iter().map(|test| known.get(&test.id).copied().unwrap_or(TestRecord::NEVER)).collect(),
    );
    match stored {
        Some(stored) => NodeRecord {
            node: observed.node,
            state: stored.state,
            since: stored.state_since,
            test_records: records,
            findings: stored.findings,
            backoff: stored.backoff,
            hold: stored.hold,
            hardware: stored.hardware,
            case: stored.case,
            last_report: observed.agent_last_seen,
            job_failures: failed,
            remembered_gpus: stored.remembered_gpus,
        },
        None => NodeRecord {
            node: observed.node,
            state: NodeState::InService,
            since: Timestamp::MIN,
            test_records: records,
            findings: Vec::new(),
            backoff: None,
            hold: None,
            hardware: None,
            case: None,
            last_report: observed.agent_last_seen,
            job_failures: failed,
            remembered_gpus: 0,
        },
    }
}
