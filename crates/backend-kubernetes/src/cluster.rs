//! The backend itself: asks the API server, and blocks until it has answered.

use std::{collections::HashMap, sync::Arc, time::Duration};

use doctor_backend::{
    Backend, BackendError, Board, Change, Effect, JobRequest, NodeOp, PolledJob, SeenFailure, SeenNode,
    clock::{Clock, SystemClock},
    vouch::Voucher,
};
use doctor_core::{
    ids::{JobId, NodeName, PoolName, RunId},
    node::Node,
    run::JobSeen,
    snapshot::Caps,
    time::Timestamp,
};
use hyper::http::Request;
use kube::{
    Api, Client,
    api::{DynamicObject, ListParams, Patch, PatchParams},
    config::{KubeConfigOptions, Kubeconfig},
    core::{ApiResource, DynamicResourceScope},
};
use serde_json::Value;
use tokio::runtime::Runtime;

use super::{
    KubernetesConfig, Replace,
    carry::Carried,
    failures::{self, Failures},
    job,
    marks::{self, Standing},
    objects::{FIELD_MANAGER, JobObject, NodeAnswer, NodeObject, PodObject, node_resource, pod_resource},
    occupancy::{Tenant, occupancy},
    pairs::Shared,
    repair::Repair,
    template::Templates,
    tokens::Reviews,
    wanted::{self, Offer, Waiting},
    watch::{self, Kept, Placed, Watched},
};

/// For the first lists, and for new ones after a watch broke.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
/// One exchange with the API server.
const EXCHANGE: Duration = Duration::from_secs(15);
/// Somebody else may change a node between our reading and our writing.
pub(super) const TRIES: usize = 5;

pub struct KubernetesBackend {
    pub(super) config: Arc<KubernetesConfig>,
    pub(super) client: Client,
    pub(super) watched: Arc<Watched>,
    failures: Arc<Failures>,
    pub(super) carried: Arc<Carried>,
    pub(super) templates: Templates,
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
        if let Replace::Webhook(webhook) = &config.replace {
            super::webhook::check(&webhook.url).map_err(refuse)?;
        }
        let templates = Templates::open(&config).map_err(|error| refuse(error.to_string()))?;
        let client = runtime.block_on(connect(&config)).map_err(refuse)?;
        let (config, watched) = (Arc::new(config), Arc::new(Watched::new()));
        runtime.spawn(watch::follow_nodes(client.clone(), Arc::clone(&config), Arc::clone(&watched)));
        runtime.spawn(watch::follow_pods(client.clone(), Arc::clone(&config), Arc::clone(&watched)));
        let (failures, carried) = (Arc::new(Failures::default()), Arc::new(Carried::default()));
        let (to, nodes, along) = (Arc::clone(&failures), Arc::clone(&watched), Arc::clone(&carried));
        runtime.spawn(failures::follow(client.clone(), Arc::clone(&config), to, nodes, along));
        Ok(Self { config, client, watched, failures, carried, templates, runtime })
    }

    /// Who says whose a token of this cluster is.
    pub fn voucher(&self) -> Arc<dyn Voucher> {
        Arc::new(Reviews::new(self.client.clone(), self.runtime.handle().clone(), Arc::clone(&self.config)))
    }

    /// Asks the API server, and no longer than is reasonable.
    pub(super) fn ask<T>(
        &self,
        operation: &'static str,
        question: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<T, Failed> {
        self.ask_for(operation, EXCHANGE, question)
    }

    /// Asks somebody, for no longer than this.
    pub(super) fn ask_for<T>(
        &self,
        operation: &'static str,
        limit: Duration,
        question: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<T, Failed> {
        self.runtime.block_on(async {
            match tokio::time::timeout(limit, question).await {
                Ok(answer) => answer.map_err(|error| Failed::of(operation, &error)),
                Err(_) => {
                    let text = format!("no answer within {} s", limit.as_secs());
                    let error = BackendError { operation, text, effect: Effect::Unknown };
                    Err(Failed { code: None, exists: false, error })
                }
            }
        })
    }

    /// Posts what no typed call is there for.
    pub(super) fn post(&self, operation: &'static str, path: &str, body: &Value) -> Result<Value, Failed> {
        self.ask(operation, async {
            let request = Request::post(path).header("content-type", "application/json");
            let request = request.body(body.to_string().into_bytes()).map_err(kube::Error::HttpError)?;
            self.client.request::<Value>(request).await
        })
    }

    pub(super) fn nodes(&self) -> Api<NodeAnswer> {
        Api::all_with(self.client.clone(), &node_resource())
    }

    pub(super) fn jobs<K: Described>(&self, of: &ApiResource) -> Api<K> {
        Api::namespaced_with(self.client.clone(), &self.config.namespace, of)
    }

    /// Nodes that user work waits for, which users could have if we were not there.
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

    pub(super) fn list<K>(&self, operation: &'static str, of: &ApiResource) -> Result<Vec<K>, BackendError>
    where
        K: Described + Clone + std::fmt::Debug + serde::de::DeserializeOwned,
    {
        let ours = ListParams::default().labels(&job::label(&self.config));
        let api: Api<K> = self.jobs(of);
        Ok(self.ask(operation, api.list(&ours))?.items)
    }
}

pub(super) async fn connect(config: &KubernetesConfig) -> Result<Client, String> {
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
pub(super) trait Described: kube::Resource<DynamicType = ApiResource, Scope = DynamicResourceScope> {}

impl<K: kube::Resource<DynamicType = ApiResource, Scope = DynamicResourceScope>> Described for K {}

/// An exchange that failed, and the server's code where it answered.
pub(super) struct Failed {
    pub(super) code: Option<u16>,
    /// What was to be made is there already.
    pub(super) exists: bool,
    pub(super) error: BackendError,
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

/// Words that many nodes have in common: pools and machine types.
type Words = Shared<str>;

fn default_pool() -> PoolName {
    PoolName::new("default").expect("it is a name")
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
        self.make_run(request)
    }

    fn poll(&self, runs: &[RunId]) -> Result<Vec<PolledJob>, BackendError> {
        if runs.is_empty() {
            return Ok(Vec::new());
        }
        // Pods first: a pod that a job had is then seen, or its job says more.
        let pods: Vec<PodObject> = self.list("poll", &pod_resource())?;
        let jobs: Vec<JobObject> = self.list_runs()?;
        self.take_along(runs, pods.iter());
        pods.iter().for_each(|pod| self.failures.notice(pod, &self.config, &self.watched));
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
        let seen: Vec<JobSeen> = runs.iter().map(|run| self.failures.told_apart(*run, look(run))).collect();
        self.look_again(runs, &seen)?;
        let documents = runs.iter().map(|run| self.carried.documents(*run));
        Ok(seen.into_iter().zip(documents).map(|(seen, documents)| PolledJob { seen, documents }).collect())
    }

    fn cancel(&self, run: RunId) -> Result<(), BackendError> {
        let api: Api<DynamicObject> = self.jobs(&self.kind_of_runs());
        let patch = Patch::Merge(job::cancelled(&self.config, SystemClock.now()));
        let parameters = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
        match self.ask("cancel", api.patch(&job::name(run), &parameters, &patch)) {
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
                // What we knew was old: ask, and try with that.
                Err(Failed { code: Some(409), .. }) => {}
                Err(failed) => return Err(failed.into()),
            }
        }
        let text = format!("{node} changed {TRIES} times while we tried");
        Err(BackendError { operation, text, effect: Effect::NoneTryAgain })
    }

    fn failed_work(&self, since: Timestamp) -> Result<Vec<SeenFailure>, BackendError> {
        let broken = |text| BackendError { operation: "follow failed pods", text, effect: Effect::NoneTryAgain };
        self.failures.since(since).map_err(broken)
    }

    fn logs(&self, run: RunId) -> Vec<(NodeName, String)> {
        self.carried.logs(run)
    }

    fn board(&self) -> Option<&dyn Board> {
        Some(self)
    }
}
