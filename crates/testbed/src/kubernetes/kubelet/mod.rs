//! A fake kubelet for many simulated nodes. It registers them, renews their leases, and simulates the pods that the
//! real scheduler binds to them: containers do what the test specifies, and the API server sees the status updates of a
//! real kubelet.
//!
//! ```no_run
//! use std::time::Duration;
//! use doctor_testbed::kubernetes::{ControlPlane, kubelet::{Exit, FakeNode, Kubelet, PodBehavior}};
//!
//! let plane = ControlPlane::start(&ControlPlane::programs()?)?;
//! let nodes = (1..=4).map(|n| FakeNode::gpu(&format!("gpu-{n}"))).collect();
//! let kubelet = Kubelet::start(plane.admin(), nodes, |pod| match pod.metadata.name.as_deref() {
//!     Some("user") => PodBehavior::RunUntilEnded,
//!     _ => PodBehavior::RunFor { lasts: Duration::from_millis(50), then: Exit::code(1).with_message("a broken link") },
//! })?;
//! kubelet.end_pod("default", "user", Exit::code(0))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Not simulated: a pod ends once, regardless of its restart policy; all its containers end alike; there are no logs,
//! probes, evictions by pressure or pod deadlines (a Job's deadline belongs to the controller manager and works).

mod node;
mod pods;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread::JoinHandle,
    time::Duration,
};

use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig, KubeconfigError},
    runtime::utils::Backoff,
};
use tokio::{
    runtime::{Builder, Handle},
    sync::{mpsc::UnboundedSender, oneshot},
};

pub use node::FakeNode;
use pods::PodCommand;

/// How long a request may be retried on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// The extra time for each node to be registered: several times what it takes on two busy cores.
const PATIENCE_PER_NODE: Duration = Duration::from_millis(100);

/// The retry interval. Short, because tests kill and restart the API server.
const PAUSE: Duration = Duration::from_millis(200);

/// The number of nodes handled in parallel.
const AT_ONCE: usize = 16;

/// What the containers of a pod do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PodBehavior {
    /// They run for this long and then end.
    RunFor { lasts: Duration, then: Exit },
    /// They run until [`Kubelet::end_pod`] or until the pod is deleted.
    RunUntilEnded,
    /// They never start, for a reason such as `ImagePullBackOff`.
    StayWaiting { reason: String, message: String },
}

/// How containers end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exit {
    code: i32,
    reason: Option<String>,
    message: String,
}

impl Exit {
    /// Ends with this exit code.
    pub fn code(code: i32) -> Self {
        Self { code, reason: None, message: String::new() }
    }

    /// Adds a termination message.
    #[must_use]
    pub fn with_message(mut self, message: impl Into<String>) -> Self {
        self.message = message.into();
        self
    }

    /// Sets a reason other than `Completed` or `Error`, such as `OOMKilled`.
    #[must_use]
    pub fn with_reason(mut self, reason: impl Into<String>) -> Self {
        self.reason = Some(reason.into());
        self
    }
}

/// Why the kubelet did not start or an operation failed.
#[derive(Debug, thiserror::Error)]
pub enum KubeletError {
    #[error("reading the kubeconfig {path}")]
    Kubeconfig {
        path: PathBuf,
        #[source]
        source: Box<KubeconfigError>,
    },
    #[error("starting the kubelet's thread")]
    Thread(#[source] std::io::Error),
    #[error("{operation}")]
    Api {
        operation: String,
        #[source]
        source: Box<kube::Error>,
    },
    #[error("{operation}: timed out after {} s", patience.as_secs())]
    Timeout { operation: &'static str, patience: Duration },
    #[error("the kubelet has no pod {pod}: it was not bound to a node of this kubelet, or is gone")]
    NoSuchPod { pod: String },
    #[error("the kubelet has no node {node}")]
    NoSuchNode { node: String },
}

/// The simulated pods by namespace and name, each with its uid and the channel to its task.
type ActivePods = Arc<Mutex<BTreeMap<String, (String, UnboundedSender<PodCommand>)>>>;

/// A running kubelet. Dropping it leaves nodes and pods in the cluster unchanged.
pub struct Kubelet {
    client: Client,
    nodes: BTreeSet<String>,
    active_pods: ActivePods,
    runtime: Handle,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for Kubelet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kubelet").field("nodes", &self.nodes).finish_non_exhaustive()
    }
}

impl Kubelet {
    /// Registers the nodes and simulates the pods bound to them; `play` is called once per pod. Returns when the nodes
    /// are ready and schedulable.
    ///
    /// # Errors
    /// Fails if the API server does not answer or rejects a node.
    pub fn start<F>(kubeconfig: &Path, nodes: Vec<FakeNode>, play: F) -> Result<Self, KubeletError>
    where
        F: Fn(&Pod) -> PodBehavior + Send + 'static,
    {
        let names: BTreeSet<String> = nodes.iter().map(|node| node.name().to_owned()).collect();
        let runtime = Builder::new_current_thread().enable_all().build().map_err(KubeletError::Thread)?;
        let handle = runtime.handle().clone();
        let client = runtime.block_on(connect(kubeconfig))?;
        let (stop, stopped) = oneshot::channel();
        // All work is done in tasks of this runtime and ends with it.
        let thread = std::thread::Builder::new().name("kubelet".into()).spawn(move || {
            drop(runtime.block_on(stopped));
        });
        let kubelet = Self {
            client,
            nodes: names,
            active_pods: ActivePods::default(),
            runtime: handle,
            stop: Some(stop),
            thread: Some(thread.map_err(KubeletError::Thread)?),
        };
        let played = pods::run_pods(kubelet.client.clone(), kubelet.nodes.clone(), kubelet.active_pods.clone(), play);
        kubelet.runtime.spawn(played);
        kubelet.add(nodes)?;
        Ok(kubelet)
    }

    /// Ends the containers of a running pod.
    ///
    /// # Errors
    /// Fails if no such pod is simulated.
    pub fn end_pod(&self, namespace: &str, name: &str, exit: Exit) -> Result<(), KubeletError> {
        let pod = format!("{namespace}/{name}");
        let playing = self.active_pods.lock().unwrap_or_else(PoisonError::into_inner);
        match playing.get(&pod).map(|(_, orders)| orders.send(PodCommand::End(exit))) {
            Some(Ok(())) => Ok(()),
            Some(Err(_)) | None => Err(KubeletError::NoSuchPod { pod }),
        }
    }

    /// Reports a node as ready or not ready. Returns when the API server has stored it; the controller manager then
    /// sets the taints.
    ///
    /// # Errors
    /// Fails if the node does not exist or the API server rejects the update.
    pub fn set_ready(&self, node: &str, ready: bool) -> Result<(), KubeletError> {
        self.change(node, node::ready_status(ready))
    }

    /// Reports a new boot id of a node, as after a reboot.
    ///
    /// # Errors
    /// Fails if the node does not exist or the API server rejects the update.
    pub fn set_boot_id(&self, node: &str, boot_id: &str) -> Result<(), KubeletError> {
        self.change(node, node::boot_status(boot_id))
    }

    /// Reports a node's quantity of a resource, such as 7 of `nvidia.com/gpu`.
    ///
    /// # Errors
    /// Fails if the node does not exist or the API server rejects the update.
    pub fn set_resource(&self, node: &str, resource: &str, quantity: &str) -> Result<(), KubeletError> {
        self.change(node, node::resource_status(resource, quantity))
    }

    fn add(&self, nodes: Vec<FakeNode>) -> Result<(), KubeletError> {
        let client = self.client.clone();
        let names = self.nodes.clone();
        let patience = PATIENCE + PATIENCE_PER_NODE * u32::try_from(nodes.len()).unwrap_or(u32::MAX);
        let leased: Vec<String> = nodes.iter().filter(|node| node.has_lease()).map(|n| n.name().to_owned()).collect();
        if !leased.is_empty() {
            self.runtime.spawn(node::keep_leases(client.clone(), leased));
        }
        self.wait("registering nodes", patience, async move {
            let registering = nodes.into_iter().map(|node| node.register(client.clone()));
            stream::iter(registering).buffer_unordered(AT_ONCE).try_collect::<()>().await?;
            node::wait_until_schedulable(&client, names).await
        })
    }

    fn change(&self, node: &str, status: serde_json::Value) -> Result<(), KubeletError> {
        if !self.nodes.contains(node) {
            return Err(KubeletError::NoSuchNode { node: node.to_owned() });
        }
        let (client, node) = (self.client.clone(), node.to_owned());
        self.wait("changing a node", PATIENCE, async move { node::patch_status(&client, &node, &status).await })
    }

    /// Runs a future on the kubelet's thread and waits for it.
    fn wait<W>(&self, operation: &'static str, patience: Duration, work: W) -> Result<(), KubeletError>
    where
        W: Future<Output = Result<(), KubeletError>> + Send + 'static,
    {
        let (done, outcome) = mpsc::channel();
        self.runtime.spawn(async move {
            let result = tokio::time::timeout(patience, work).await;
            // The receiver is still there: it waits without a limit.
            drop(done.send(result.unwrap_or(Err(KubeletError::Timeout { operation, patience }))));
        });
        outcome.recv().unwrap_or(Err(KubeletError::Timeout { operation, patience }))
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

/// Creates a client from a kubeconfig.
///
/// # Errors
/// Fails if the file cannot be read.
pub async fn connect(kubeconfig: &Path) -> Result<Client, KubeletError> {
    let unreadable = |source| KubeletError::Kubeconfig { path: kubeconfig.to_owned(), source: Box::new(source) };
    let read = Kubeconfig::read_from(kubeconfig).map_err(unreadable)?;
    let config = Config::from_custom_kubeconfig(read, &KubeConfigOptions::default()).await.map_err(unreadable)?;
    Client::try_from(config).map_err(failed("creating a client"))
}

fn failed(operation: impl Into<String>) -> impl FnOnce(kube::Error) -> KubeletError {
    |source| KubeletError::Api { operation: operation.into(), source: Box::new(source) }
}

/// Retries a request while the API server is down, overloaded, or reports a conflict.
async fn retry<T, F>(mut request: impl FnMut() -> F) -> kube::Result<T>
where
    F: Future<Output = kube::Result<T>>,
{
    let began = tokio::time::Instant::now();
    loop {
        match request().await {
            Err(error) if is_transient(&error) && began.elapsed() < PATIENCE => tokio::time::sleep(PAUSE).await,
            outcome => return outcome,
        }
    }
}

fn is_transient(error: &kube::Error) -> bool {
    match error {
        // On a uid conflict the object has been replaced, and retrying does not help.
        kube::Error::Api(status) if status.code == 409 => {
            status.reason != "AlreadyExists" && !status.message.to_lowercase().contains("uid")
        }
        kube::Error::Api(status) => status.code == 429 || status.code >= 500,
        kube::Error::HyperError(_) | kube::Error::Service(_) => true,
        _ => false,
    }
}

/// The constant retry interval of a watch.
#[derive(Debug, Clone, Copy)]
struct ConstantBackoff;

impl Iterator for ConstantBackoff {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        Some(PAUSE)
    }
}

impl Backoff for ConstantBackoff {
    fn reset(&mut self) {}
}
