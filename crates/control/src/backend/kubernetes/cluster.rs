//! The backend itself: asks the API server, and blocks until it has answered.

use std::{collections::HashMap, sync::Arc, time::Duration};

use doctor_core::{
    ids::{JobId, NodeName, PoolName, RunId, Sku},
    node::{Hardware, MarkKind, Node},
    run::JobSeen,
    snapshot::Caps,
};
use kube::{
    Api, Client, ResourceExt,
    api::{DynamicObject, ListParams, Patch, PatchParams, PostParams},
    config::{KubeConfigOptions, Kubeconfig},
    core::{ApiResource, DynamicResourceScope},
};
use tokio::runtime::Runtime;

use super::{
    KubernetesConfig, job,
    marks::{self, Standing},
    objects::{
        Amounts, FIELD_MANAGER, JobObject, NodeObject, PodObject, job_resource, node_resource, note_writers,
        pod_resource, secret_resource,
    },
    occupancy::{Tenant, is_gpu, occupancy, whole},
    watch::{self, Placed, Watched},
};
use crate::{
    backend::{Backend, BackendError, Change, Effect, JobRequest, NodeOp, PolledJob, SeenNode},
    clock::{Clock, SystemClock},
};

/// For the first lists, and for new ones after a watch broke.
const PATIENCE: Duration = Duration::from_secs(10);
/// One exchange with the API server.
const EXCHANGE: Duration = Duration::from_secs(15);
/// Somebody else may change a node between our reading and our writing.
const TRIES: usize = 5;

pub struct KubernetesBackend {
    config: Arc<KubernetesConfig>,
    client: Client,
    watched: Arc<Watched>,
    runtime: Runtime,
}

impl std::fmt::Debug for KubernetesBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KubernetesBackend").field("config", &self.config).finish_non_exhaustive()
    }
}

impl KubernetesBackend {
    /// Begins to watch the cluster. Whether it answers is told by the first snapshot.
    ///
    /// # Errors
    /// If nobody says where the cluster is, or what says so cannot be read.
    pub fn open(config: KubernetesConfig) -> Result<Self, BackendError> {
        let operation = "open the Kubernetes backend";
        let refuse = |text: String| BackendError { operation, text, effect: Effect::NoneGiveUp };
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("doctor-kube")
            .enable_all()
            .build()
            .map_err(|error| refuse(error.to_string()))?;
        let client = runtime.block_on(connect(&config)).map_err(refuse)?;
        let (config, watched) = (Arc::new(config), Arc::new(Watched::new()));
        runtime.spawn(watch::follow_nodes(client.clone(), Arc::clone(&config), Arc::clone(&watched)));
        runtime.spawn(watch::follow_pods(client.clone(), Arc::clone(&config), Arc::clone(&watched)));
        Ok(Self { config, client, watched, runtime })
    }

    /// Asks the API server, and no longer than is reasonable.
    fn ask<T>(
        &self,
        operation: &'static str,
        question: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<T, Failed> {
        self.runtime.block_on(async {
            match tokio::time::timeout(EXCHANGE, question).await {
                Ok(answer) => answer.map_err(|error| Failed::of(operation, &error)),
                Err(_) => {
                    let text = format!("no answer within {} s", EXCHANGE.as_secs());
                    Err(Failed {
                        code: None,
                        exists: false,
                        error: BackendError { operation, text, effect: Effect::Unknown },
                    })
                }
            }
        })
    }

    fn nodes(&self) -> Api<NodeObject> {
        Api::all_with(self.client.clone(), &node_resource())
    }

    fn jobs<K: Described>(&self, of: &ApiResource) -> Api<K> {
        Api::namespaced_with(self.client.clone(), &self.config.namespace, of)
    }

    /// The node that a job is for, as it is now.
    fn node_of(&self, request: &JobRequest) -> Result<(NodeName, NodeObject), BackendError> {
        let operation = "submit";
        let refuse = |text: String| BackendError { operation, text, effect: Effect::NoneGiveUp };
        let [node] = &*request.nodes else {
            return Err(refuse(format!("a job over {} nodes cannot be run here yet", request.nodes.len())));
        };
        let found = self.watched.now(PATIENCE, |nodes, _| nodes.get(node.as_str()).cloned());
        match found {
            Ok(Some(found)) => Ok((node.clone(), found)),
            Ok(None) => Err(refuse(format!("there is no node {node} with GPUs in this cluster"))),
            Err(text) => Err(BackendError { operation, text, effect: Effect::NoneTryAgain }),
        }
    }

    fn list<K>(&self, operation: &'static str, of: &ApiResource) -> Result<Vec<K>, BackendError>
    where
        K: Described + Clone + std::fmt::Debug + serde::de::DeserializeOwned,
    {
        let ours = ListParams::default().labels(&job::label(&self.config));
        let api: Api<K> = self.jobs(of);
        Ok(self.ask(operation, api.list(&ours))?.items)
    }
}

async fn connect(config: &KubernetesConfig) -> Result<Client, String> {
    let options = KubeConfigOptions { context: config.context.clone(), ..KubeConfigOptions::default() };
    let settings = match &config.kubeconfig {
        Some(path) => {
            let file = Kubeconfig::read_from(path).map_err(|error| format!("{}: {error}", path.display()))?;
            kube::Config::from_custom_kubeconfig(file, &options).await.map_err(|error| error.to_string())
        }
        None if config.context.is_some() => {
            kube::Config::from_kubeconfig(&options).await.map_err(|error| error.to_string())
        }
        None => kube::Config::infer().await.map_err(|error| error.to_string()),
    };
    let mut settings = settings?;
    // A server that is silent or out of breath is an error soon, and an error makes what we know unknown: a client that waits
    // or tries again by itself would leave us with the past.
    settings.read_timeout = Some(watch::SILENCE);
    settings.reset_reader_on_write = true;
    settings.default_retry = false;
    Client::try_from(settings).map_err(|error| error.to_string())
}

/// What kind of object it is, is told at run time.
trait Described: kube::Resource<DynamicType = ApiResource, Scope = DynamicResourceScope> {}

impl<K: kube::Resource<DynamicType = ApiResource, Scope = DynamicResourceScope>> Described for K {}

/// An exchange that failed, and the server's code where it answered.
struct Failed {
    code: Option<u16>,
    /// What was to be made is there already.
    exists: bool,
    error: BackendError,
}

impl Failed {
    fn of(operation: &'static str, error: &kube::Error) -> Self {
        let (code, text, effect) = match error {
            kube::Error::Api(status) => {
                let effect = match status.code {
                    // Somebody else was first, too many ask, it is on its way down or up; or rights and quotas, which people
                    // change while we wait.
                    401 | 403 | 409 | 429 | 503 => Effect::NoneTryAgain,
                    408 => Effect::Unknown,
                    400..=499 => Effect::NoneGiveUp,
                    _ => Effect::Unknown,
                };
                (Some(status.code), status.message.clone(), effect)
            }
            other => (None, other.to_string(), Effect::Unknown),
        };
        let exists = matches!(error, kube::Error::Api(status) if status.reason == "AlreadyExists");
        Self { code, exists, error: BackendError { operation, text, effect } }
    }
}

impl From<Failed> for BackendError {
    fn from(failed: Failed) -> Self {
        failed.error
    }
}

fn seen_node(node: &NodeObject, tenants: &[&Placed], config: &KubernetesConfig) -> Option<SeenNode> {
    let standing = Standing::of(node, config);
    let on_it: Vec<Tenant> = tenants.iter().map(|placed| placed.tenant.clone()).collect();
    let label = |key: &str| node.labels().get(key);
    let info = node.status.as_ref().map(|status| &status.node_info);
    let told = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
    let hardware = info.map(|info| Hardware {
        physical_host: told(&info.system_uuid),
        boot_id: told(&info.boot_id),
        ..Hardware::default()
    });
    Some(SeenNode {
        node: Arc::new(Node {
            name: NodeName::new(&node.name_any()).ok()?,
            pool: label(&config.pool_label).and_then(|pool| PoolName::new(pool).ok()).unwrap_or_else(default_pool),
            occupancy: occupancy(node, &standing, &on_it, config),
            marks: standing.marks,
            hardware: hardware.map(Arc::new),
            sku: label(&config.sku_label).and_then(|sku| Sku::new(sku).ok()),
        }),
        heard: None,
        jobs: tenants.iter().filter_map(|placed| placed.run).collect(),
    })
}

fn default_pool() -> PoolName {
    PoolName::new("default").expect("it is a name")
}

impl Backend for KubernetesBackend {
    fn name(&self) -> &str {
        "kubernetes"
    }

    fn caps(&self) -> Caps {
        Caps { mark: true, drain: true, ..Caps::NONE }
    }

    fn snapshot(&self) -> Result<Vec<SeenNode>, BackendError> {
        let seen = self.watched.now(PATIENCE, |nodes, pods| {
            let mut tenants: HashMap<&str, Vec<&Placed>> = HashMap::new();
            for placed in pods.values() {
                tenants.entry(&placed.node).or_default().push(placed);
            }
            let of = |name: &str| tenants.get(name).map_or(&[][..], Vec::as_slice);
            nodes.iter().filter_map(|(name, node)| seen_node(node, of(name), &self.config)).collect()
        });
        let broken = |text| BackendError { operation: "look at the cluster", text, effect: Effect::NoneTryAgain };
        let mut seen: Vec<SeenNode> = seen.map_err(broken)?;
        seen.sort_by(|a, b| a.node.name.cmp(&b.node.name));
        for one in &mut seen {
            one.jobs.sort_unstable();
            one.jobs.dedup();
        }
        Ok(seen)
    }

    fn submit(&self, request: &JobRequest) -> Result<JobId, BackendError> {
        let operation = "submit";
        let (name, node) = self.node_of(request)?;
        let again = |text: &str| BackendError { operation, text: text.to_owned(), effect: Effect::NoneTryAgain };
        // All that it has, of every kind: the scheduler then keeps everybody else off.
        let allocatable = node.status.as_ref().map(|status| &status.allocatable).into_iter().flatten();
        let gpus: Amounts = allocatable
            .filter(|(name, amount)| is_gpu(name, &self.config) && whole(amount) != Some(0))
            .map(|(name, amount)| (name.clone(), amount.clone()))
            .collect();
        if gpus.is_empty() {
            return Err(again("no GPU of the node can be had now"));
        }
        let cordoned_by_us = Standing::of(&node, &self.config).marks.has_ours(MarkKind::Cordon);
        let manifest = job::manifest(request, &name, &gpus, cordoned_by_us, &self.config);
        let made: DynamicObject = serde_json::from_value(manifest).map_err(|error| BackendError {
            operation,
            text: error.to_string(),
            effect: Effect::NoneGiveUp,
        })?;
        let parameters = PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() };
        let api: Api<DynamicObject> = self.jobs(&job_resource());
        let job = match self.ask(operation, api.create(&parameters, &made)) {
            Ok(job) => job,
            // It is there from an earlier try.
            Err(failed) if failed.exists => {
                let there = self.ask(operation, api.get(&job::name(request.run)));
                there.map_err(|failed| BackendError { effect: Effect::Unknown, ..failed.error })?
            }
            Err(failed) => return Err(failed.into()),
        };
        let uid = job.uid().unwrap_or_default();
        let secret = serde_json::from_value(job::secret(request, &uid, &self.config))
            .map_err(|error| BackendError { operation, text: error.to_string(), effect: Effect::NoneGiveUp })?;
        let secrets: Api<DynamicObject> = self.jobs(&secret_resource());
        match self.ask(operation, secrets.create(&parameters, &secret)) {
            Ok(_) | Err(Failed { exists: true, .. }) => Ok(job::id(&self.config, request.run)),
            // The job is there: it waits for its key until it is submitted again or cancelled.
            Err(Failed { error, .. }) => Err(BackendError { effect: Effect::Unknown, ..error }),
        }
    }

    fn poll(&self, runs: &[RunId]) -> Result<Vec<PolledJob>, BackendError> {
        if runs.is_empty() {
            return Ok(Vec::new());
        }
        // Pods first: a pod that a job had is then seen, or its job says more.
        let pods: Vec<PodObject> = self.list("poll", &pod_resource())?;
        let jobs: Vec<JobObject> = self.list("poll", &job_resource())?;
        let mut of_run: HashMap<RunId, Vec<PodObject>> = HashMap::new();
        for pod in pods {
            if let Some(run) = job::run_of(&pod.metadata, &self.config) {
                of_run.entry(run).or_default().push(pod);
            }
        }
        let jobs: HashMap<RunId, JobObject> =
            jobs.into_iter().filter_map(|job| Some((job::run_of(&job.metadata, &self.config)?, job))).collect();
        let look = |run: &RunId| {
            let pods = of_run.get(run).map_or(&[][..], Vec::as_slice);
            jobs.get(run).map_or(JobSeen::Absent, |job| job::seen(job, pods, *run, &self.config))
        };
        Ok(runs.iter().map(|run| PolledJob { seen: look(run), documents: Vec::new() }).collect())
    }

    fn cancel(&self, run: RunId) -> Result<(), BackendError> {
        let api: Api<DynamicObject> = self.jobs(&job_resource());
        let patch = Patch::Merge(job::cancelled(&self.config, SystemClock.now()));
        let parameters = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
        match self.ask("cancel", api.patch(&job::name(run), &parameters, &patch)) {
            Ok(_) | Err(Failed { code: Some(404), .. }) => Ok(()),
            Err(failed) => Err(failed.into()),
        }
    }

    fn apply(&self, node: &NodeName, change: &NodeOp) -> Result<(), BackendError> {
        let operation = "change the node";
        let refuse = |text: String| BackendError { operation, text, effect: Effect::NoneGiveUp };
        if matches!(change.what, Change::Reset | Change::Reboot | Change::Replace) {
            return Err(refuse(format!("the Kubernetes backend cannot {} yet; see its caps", change.what.step())));
        }
        let parameters = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
        let (nodes, name) = (self.nodes(), node.as_str());
        let mut known = self.watched.node(name);
        for _ in 0..TRIES {
            let now = match known.take() {
                Some(node) => node,
                None => {
                    let mut node = self.ask(operation, nodes.get(name))?;
                    note_writers(&mut node);
                    node
                }
            };
            let Some(patch) = marks::patch(&now, change.op, &change.what, &self.config) else { return Ok(()) };
            match self.ask(operation, nodes.patch(name, &parameters, &Patch::Merge(patch))) {
                Ok(mut written) => {
                    note_writers(&mut written);
                    self.watched.written(&written);
                    return Ok(());
                }
                // What we knew was old: ask, and try with that.
                Err(Failed { code: Some(409), .. }) => {}
                Err(failed) => return Err(failed.into()),
            }
        }
        let text = format!("{node} changed {TRIES} times while we tried");
        Err(BackendError { operation, text, effect: Effect::NoneTryAgain })
    }
}
