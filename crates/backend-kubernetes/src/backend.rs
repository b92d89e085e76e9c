//! Implements [`Backend`] for [`KubernetesBackend`]: snapshot, submit, poll, cancel, and the operations on nodes.

use std::{collections::HashMap, sync::Arc};

use doctor_backend::{
    Backend, BackendError, Change, Effect, JobRequest, NodeOp, ObservedJobFailure, ObservedNode, PolledJob,
    ReportProgress, StatusWriter,
    clock::{Clock, SystemClock},
};
use doctor_core::{
    ids::{JobId, NodeName, OpId, PoolName, RunId},
    last_output::LastOutput,
    node::{Declared, Node},
    run::{ObservedJobState, Run},
    snapshot::Capabilities,
    time::Timestamp,
};
use kube::{
    Api,
    api::{DynamicObject, ListParams, Patch, PatchParams},
};

use super::{
    cluster::{KubeRequestError, KubernetesBackend, LIST_TIMEOUT, MAX_ATTEMPTS},
    config::{KubernetesConfig, Replace},
    declared,
    interned_map::Interner,
    job, names,
    objects::{CachedNode, FIELD_MANAGER, JobObject, PodObject, pod_resource},
    occupancy::{PodOnNode, occupancy},
    pending_demand::{self, CandidateNode, PendingPod},
    repair_job::Repair,
    taints::{self, NodeMarks},
    watch::{CachedPod, PlacedPod},
};

impl KubernetesBackend {
    /// Returns the nodes that pending user work needs and could have without our jobs.
    fn demanded_nodes(
        &self,
        nodes: &HashMap<Arc<str>, Box<CachedNode>>,
        tenants: &HashMap<&str, Vec<&PlacedPod>>,
        waiting: Vec<&PendingPod>,
    ) -> HashMap<String, String> {
        let of = |node: &CachedNode| tenants.get(node.name()).map_or(&[][..], Vec::as_slice);
        let mut offers: Vec<CandidateNode<'_>> = nodes
            .values()
            .filter(|node| {
                let seen = seen_node(node, of(node), None, &self.config, &mut NodeValues::default());
                seen.is_some_and(|seen| seen.node.occupancy.is_free())
            })
            .map(|node| CandidateNode { node, has_our_job: of(node).iter().any(|placed| placed.tenant.ours) })
            .collect();
        offers.sort_by(|a, b| a.node.name().cmp(b.node.name()));
        pending_demand::demanded_nodes(&offers, waiting, &self.config)
    }
}

fn seen_node(
    node: &CachedNode,
    tenants: &[&PlacedPod],
    demanded_by: Option<&str>,
    config: &KubernetesConfig,
    shared: &mut NodeValues,
) -> Option<ObservedNode> {
    let node_marks = NodeMarks::from_node(node, config);
    let pods_on_node: Vec<PodOnNode> = tenants.iter().map(|placed| placed.tenant.clone()).collect();
    let declared = declared::declared(node, config).map(|declared| shared.declared.intern(Arc::new(declared)));
    let mut label = |key: &str| node.metadata.labels.get(key).map(|value| shared.names.intern_str(value));
    Some(ObservedNode {
        node: Arc::new(Node {
            name: NodeName::try_from(Arc::clone(&node.metadata.name)).ok()?,
            pool: label(&config.pool_label).and_then(|pool| pool.try_into().ok()).unwrap_or_else(default_pool),
            occupancy: occupancy(node, &node_marks, &pods_on_node, demanded_by, config),
            marks: node_marks.marks,
            hardware: node.status.as_ref().map(|status| Arc::clone(&status.hardware)),
            sku: label(&config.sku_label).and_then(|sku| sku.try_into().ok()),
            declared,
            overrides: None,
        }),
        agent_last_seen: None,
        jobs: tenants.iter().filter_map(|placed| placed.run).collect(),
    })
}

/// Values that many nodes have in common.
#[derive(Debug, Default)]
struct NodeValues {
    /// Pools and machine types.
    names: Interner<str>,
    declared: Interner<Declared>,
}

fn default_pool() -> PoolName {
    PoolName::new("default").expect("a valid pool name")
}

impl Backend for KubernetesBackend {
    fn name(&self) -> &str {
        "kubernetes"
    }

    fn caps(&self) -> Capabilities {
        Capabilities {
            mark: true,
            drain: true,
            evict: true,
            reset: !self.config.reset.is_empty(),
            reboot: !self.config.reboot.is_empty(),
            replace: self.config.replace != Replace::None,
        }
    }

    fn snapshot(&self) -> Result<Vec<ObservedNode>, BackendError> {
        let seen = self.watch_cache.read(LIST_TIMEOUT, |nodes, pods| {
            let mut tenants: HashMap<&str, Vec<&PlacedPod>> = HashMap::new();
            let mut waiting = Vec::new();
            for cached in pods.values() {
                match cached {
                    CachedPod::Placed(placed) => tenants.entry(&placed.node).or_default().push(placed),
                    CachedPod::Pending(pod) => waiting.push(&**pod),
                }
            }
            let of = |name: &str| tenants.get(name).map_or(&[][..], Vec::as_slice);
            let demanded =
                if waiting.is_empty() { HashMap::new() } else { self.demanded_nodes(nodes, &tenants, waiting) };
            let by = |name: &str| demanded.get(name).map(String::as_str);
            let mut shared = NodeValues::default();
            let seen =
                nodes.iter().filter_map(|(name, node)| seen_node(node, of(name), by(name), &self.config, &mut shared));
            seen.collect()
        });
        let broken = |text| BackendError { operation: "read the cluster state", text, effect: Effect::NotAppliedRetry };
        let mut seen: Vec<ObservedNode> = seen.map_err(broken)?;
        seen.sort_by(|a, b| a.node.name.cmp(&b.node.name));
        for one in &mut seen {
            one.jobs.sort_unstable();
            one.jobs.dedup();
        }
        Ok(seen)
    }

    fn submit(&self, request: &JobRequest) -> Result<JobId, BackendError> {
        self.create_run(request)
    }

    fn poll(&self, runs: &[RunId]) -> Result<Vec<PolledJob>, BackendError> {
        if runs.is_empty() {
            return Ok(Vec::new());
        }
        // Pods first: a job's pod is then either in this list, or the later list of jobs reports its end.
        let pods: Vec<PodObject> = self.list("poll", &pod_resource())?;
        let jobs: Vec<JobObject> = self.list_runs()?;
        self.collect_from_pods(runs, pods.iter());
        pods.iter().for_each(|pod| self.failures.record_node_death(pod, &self.config, &self.watch_cache));
        let mut of_run: HashMap<RunId, Vec<PodObject>> = HashMap::new();
        for pod in pods {
            if let Some(run) = names::run_of(&pod.metadata, &self.config) {
                of_run.entry(run).or_default().push(pod);
            }
        }
        let jobs: HashMap<RunId, JobObject> =
            jobs.into_iter().filter_map(|job| Some((names::run_of(&job.metadata, &self.config)?, job))).collect();
        let observe = |run: &RunId| {
            let pods = of_run.get(run).map_or(&[][..], Vec::as_slice);
            jobs.get(run).map_or(ObservedJobState::Absent, |job| job::job_state(job, pods, *run, &self.config))
        };
        let seen: Vec<ObservedJobState> = runs.iter().map(|run| self.failures.refine_end(*run, observe(run))).collect();
        self.recheck_ended_jobs(runs, &seen)?;
        let documents = runs.iter().map(|run| self.pod_results.documents(*run));
        Ok(seen.into_iter().zip(documents).map(|(seen, documents)| PolledJob { state: seen, documents }).collect())
    }

    fn cancel(&self, run: RunId) -> Result<(), BackendError> {
        let api: Api<DynamicObject> = self.jobs(&self.run_resource());
        let label = format!("{}={run}", names::run_label(&self.config));
        let pods: Api<PodObject> = self.jobs(&pod_resource());
        // Without an answer, the job counts as one that may have started.
        let pods = self.request("cancel", pods.list(&ListParams::default().labels(&label)));
        let is_pending = pods.is_ok_and(|pods| job::is_pending(&pods.items));
        let patch = Patch::Merge(job::cancel_patch(&self.config, SystemClock.now(), is_pending));
        let parameters = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
        match self.request("cancel", api.patch(&names::object_name(run), &parameters, &patch)) {
            Ok(job) => self.terminate_in_volcano(&job),
            Err(KubeRequestError { code: Some(404), .. }) => Ok(()),
            Err(failed) => Err(failed.into()),
        }
    }

    fn apply(&self, node: &NodeName, change: &NodeOp) -> Result<(), BackendError> {
        let operation = "change the node";
        match change.what {
            Change::Evict => return self.evict(node),
            Change::Reset => return self.repair(node, change.op, Repair::Reset),
            Change::Reboot => return self.repair(node, change.op, Repair::Reboot),
            Change::Replace => return self.replace(node, change.op),
            Change::Mark(_) | Change::Unmark(_) | Change::Drain | Change::Undrain => {}
        }
        let parameters = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
        let (nodes, name) = (self.nodes(), node.as_str());
        let mut known = self.watch_cache.node(name);
        for _ in 0..MAX_ATTEMPTS {
            let now = match known.take() {
                Some(node) => node,
                None => self.request(operation, nodes.get(name))?.into(),
            };
            let Some(patch) = taints::patch(&now, change.op, &change.what, &self.config) else { return Ok(()) };
            match self.request(operation, nodes.patch(name, &parameters, &Patch::Merge(patch))) {
                Ok(written) => {
                    self.record_event(&written, &change.what);
                    self.watch_cache.store_written(&written.into());
                    return Ok(());
                }
                // The cached node was outdated: read it again and retry.
                Err(KubeRequestError { code: Some(409), .. }) => {}
                Err(failed) => return Err(failed.into()),
            }
        }
        let text = format!("{node} was modified concurrently {MAX_ATTEMPTS} times");
        Err(BackendError { operation, text, effect: Effect::NotAppliedRetry })
    }

    fn job_failures(&self, since: Timestamp) -> Result<Vec<ObservedJobFailure>, BackendError> {
        let broken = |text| BackendError { operation: "watch failed pods", text, effect: Effect::NotAppliedRetry };
        self.failures.since(since).map_err(broken)
    }

    fn logs(&self, run: RunId) -> Vec<(NodeName, String)> {
        self.pod_results.logs(run)
    }

    fn remaining_output(&self, run: &Run) -> Result<Vec<LastOutput>, BackendError> {
        self.remaining_output_of(run)
    }

    fn collect_report(&self, node: &NodeName, op: OpId) -> ReportProgress {
        self.collect_report_from(node, op)
    }

    fn status_writer(&self) -> Option<&dyn StatusWriter> {
        Some(self)
    }
}
