//! Implements [`Backend`] for [`KubernetesBackend`]: snapshot, submit, poll, cancel, and the operations on nodes.

use std::{collections::HashMap, sync::Arc};

use doctor_backend::{
    Backend, BackendError, Board, Change, Effect, JobRequest, NodeOp, PolledJob, SeenFailure, SeenNode,
    clock::{Clock, SystemClock},
};
use doctor_core::{
    ids::{JobId, NodeName, PoolName, RunId},
    node::Node,
    run::JobSeen,
    snapshot::Caps,
    time::Timestamp,
};
use kube::{
    Api,
    api::{DynamicObject, Patch, PatchParams},
};

use super::{
    cluster::{Failed, KubernetesBackend, PATIENCE, TRIES},
    config::{KubernetesConfig, Replace},
    job,
    marks::{self, Standing},
    names,
    objects::{FIELD_MANAGER, JobObject, NodeObject, PodObject, pod_resource},
    occupancy::{Tenant, occupancy},
    pairs::Shared,
    repair::Repair,
    wanted::{self, Offer, Waiting},
    watch::{Kept, Placed},
};

impl KubernetesBackend {
    /// Returns the nodes that pending user work needs and could have without our jobs.
    fn wanted(
        &self,
        nodes: &HashMap<Arc<str>, Box<NodeObject>>,
        tenants: &HashMap<&str, Vec<&Placed>>,
        waiting: Vec<&Waiting>,
    ) -> HashMap<String, String> {
        let of = |node: &NodeObject| tenants.get(node.name()).map_or(&[][..], Vec::as_slice);
        let mut offers: Vec<Offer<'_>> = nodes
            .values()
            .filter(|node| {
                let seen = seen_node(node, of(node), None, &self.config, &mut Words::default());
                seen.is_some_and(|seen| seen.node.occupancy.is_free())
            })
            .map(|node| Offer { node, ours: of(node).iter().any(|placed| placed.tenant.ours) })
            .collect();
        offers.sort_by(|a, b| a.node.name().cmp(b.node.name()));
        wanted::wanted(&offers, waiting, &self.config)
    }
}

fn seen_node(
    node: &NodeObject,
    tenants: &[&Placed],
    wanted_by: Option<&str>,
    config: &KubernetesConfig,
    words: &mut Words,
) -> Option<SeenNode> {
    let standing = Standing::of(node, config);
    let on_it: Vec<Tenant> = tenants.iter().map(|placed| placed.tenant.clone()).collect();
    let mut label = |key: &str| node.metadata.labels.get(key).map(|value| words.word(value));
    Some(SeenNode {
        node: Arc::new(Node {
            name: NodeName::try_from(Arc::clone(&node.metadata.name)).ok()?,
            pool: label(&config.pool_label).and_then(|pool| pool.try_into().ok()).unwrap_or_else(default_pool),
            occupancy: occupancy(node, &standing, &on_it, wanted_by, config),
            marks: standing.marks,
            hardware: node.status.as_ref().map(|status| Arc::clone(&status.hardware)),
            sku: label(&config.sku_label).and_then(|sku| sku.try_into().ok()),
            apart: None,
        }),
        heard: None,
        jobs: tenants.iter().filter_map(|placed| placed.run).collect(),
    })
}

/// Strings that many nodes have in common: pools and machine types.
type Words = Shared<str>;

fn default_pool() -> PoolName {
    PoolName::new("default").expect("a valid pool name")
}

impl Backend for KubernetesBackend {
    fn name(&self) -> &str {
        "kubernetes"
    }

    fn caps(&self) -> Caps {
        Caps {
            mark: true,
            drain: true,
            evict: true,
            reset: !self.config.reset.is_empty(),
            reboot: !self.config.reboot.is_empty(),
            replace: self.config.replace != Replace::None,
        }
    }

    fn snapshot(&self) -> Result<Vec<SeenNode>, BackendError> {
        let seen = self.watched.now(PATIENCE, |nodes, pods| {
            let mut tenants: HashMap<&str, Vec<&Placed>> = HashMap::new();
            let mut waiting = Vec::new();
            for kept in pods.values() {
                match kept {
                    Kept::Placed(placed) => tenants.entry(&placed.node).or_default().push(placed),
                    Kept::Waiting(pod) => waiting.push(&**pod),
                }
            }
            let of = |name: &str| tenants.get(name).map_or(&[][..], Vec::as_slice);
            let wanted = if waiting.is_empty() { HashMap::new() } else { self.wanted(nodes, &tenants, waiting) };
            let by = |name: &str| wanted.get(name).map(String::as_str);
            let mut words = Words::default();
            let seen =
                nodes.iter().filter_map(|(name, node)| seen_node(node, of(name), by(name), &self.config, &mut words));
            seen.collect()
        });
        let broken = |text| BackendError { operation: "read the cluster state", text, effect: Effect::NoneTryAgain };
        let mut seen: Vec<SeenNode> = seen.map_err(broken)?;
        seen.sort_by(|a, b| a.node.name.cmp(&b.node.name));
        for one in &mut seen {
            one.jobs.sort_unstable();
            one.jobs.dedup();
        }
        Ok(seen)
    }

    fn submit(&self, request: &JobRequest) -> Result<JobId, BackendError> {
        self.make_run(request)
    }

    fn poll(&self, runs: &[RunId]) -> Result<Vec<PolledJob>, BackendError> {
        if runs.is_empty() {
            return Ok(Vec::new());
        }
        // Pods first: a job's pod is then either in this list, or the later list of jobs reports its end.
        let pods: Vec<PodObject> = self.list("poll", &pod_resource())?;
        let jobs: Vec<JobObject> = self.list_runs()?;
        self.take_along(runs, pods.iter());
        pods.iter().for_each(|pod| self.failures.notice(pod, &self.config, &self.watched));
        let mut of_run: HashMap<RunId, Vec<PodObject>> = HashMap::new();
        for pod in pods {
            if let Some(run) = names::run_of(&pod.metadata, &self.config) {
                of_run.entry(run).or_default().push(pod);
            }
        }
        let jobs: HashMap<RunId, JobObject> =
            jobs.into_iter().filter_map(|job| Some((names::run_of(&job.metadata, &self.config)?, job))).collect();
        let look = |run: &RunId| {
            let pods = of_run.get(run).map_or(&[][..], Vec::as_slice);
            jobs.get(run).map_or(JobSeen::Absent, |job| job::seen(job, pods, *run, &self.config))
        };
        let seen: Vec<JobSeen> = runs.iter().map(|run| self.failures.told_apart(*run, look(run))).collect();
        self.look_again(runs, &seen)?;
        let documents = runs.iter().map(|run| self.carried.documents(*run));
        Ok(seen.into_iter().zip(documents).map(|(seen, documents)| PolledJob { seen, documents }).collect())
    }

    fn cancel(&self, run: RunId) -> Result<(), BackendError> {
        let api: Api<DynamicObject> = self.jobs(&self.kind_of_runs());
        let patch = Patch::Merge(job::cancelled(&self.config, SystemClock.now()));
        let parameters = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
        match self.ask("cancel", api.patch(&names::object_name(run), &parameters, &patch)) {
            Ok(job) => self.tell_volcano(&job),
            Err(Failed { code: Some(404), .. }) => Ok(()),
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
        let mut known = self.watched.node(name);
        for _ in 0..TRIES {
            let now = match known.take() {
                Some(node) => node,
                None => self.ask(operation, nodes.get(name))?.into(),
            };
            let Some(patch) = marks::patch(&now, change.op, &change.what, &self.config) else { return Ok(()) };
            match self.ask(operation, nodes.patch(name, &parameters, &Patch::Merge(patch))) {
                Ok(written) => {
                    self.tell(&written, &change.what);
                    self.watched.written(&written.into());
                    return Ok(());
                }
                // The cached node was outdated: read it again and retry.
                Err(Failed { code: Some(409), .. }) => {}
                Err(failed) => return Err(failed.into()),
            }
        }
        let text = format!("{node} was modified concurrently {TRIES} times");
        Err(BackendError { operation, text, effect: Effect::NoneTryAgain })
    }

    fn failed_work(&self, since: Timestamp) -> Result<Vec<SeenFailure>, BackendError> {
        let broken = |text| BackendError { operation: "watch failed pods", text, effect: Effect::NoneTryAgain };
        self.failures.since(since).map_err(broken)
    }

    fn logs(&self, run: RunId) -> Vec<(NodeName, String)> {
        self.carried.logs(run)
    }

    fn board(&self) -> Option<&dyn Board> {
        Some(self)
    }
}
