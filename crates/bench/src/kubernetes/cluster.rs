//! The measured control plane, and the benchmark's own client.
//!
//! API server and etcd are real and run alone: without controllers or kubelets, every change of an object comes from
//! the service or from the benchmark. Their data is generated once and cached.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Instant,
};

use doctor_backend_kubernetes::{KubernetesConfig, manifests};

use anyhow::{Context, Result, bail};
use doctor_testbed::kubernetes::{ControlPlane, KubernetesTestbedError, Setup, kubelet::connect};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use kube::{
    Client,
    api::{ListParams, Patch, PatchParams, PostParams, Request},
};
use serde_json::{Value, json};
use tokio::runtime::{Builder, Runtime};

use super::population::{self, NODES, Pod};
use crate::{cache, random::spread};

const NODE_PATH: &str = "/api/v1/nodes";
/// Concurrent requests while the cluster is created.
const AT_ONCE: usize = 24;

pub(super) struct Cluster {
    pub(super) plane: ControlPlane,
    runtime: Runtime,
    client: Client,
}

impl Cluster {
    /// Starts the cluster from cached data, which is created on first use. The inner `Err` is what this machine lacks.
    pub(super) fn start() -> Result<Result<Self, String>> {
        let programs = match ControlPlane::programs() {
            Ok(programs) => programs,
            Err(KubernetesTestbedError::Unsupported { why }) => return Ok(Err(why)),
            Err(other) => return Err(other.into()),
        };
        let data = cache::input("kubernetes", fingerprint(&programs), |path| {
            eprintln!("  creating {NODES} nodes and {} pods, once", population::PODS);
            let began = Instant::now();
            let cluster = Self::on(&programs, None)?;
            cluster.runtime.block_on(fill(&cluster))?;
            cluster.plane.keep_data(path)?;
            eprintln!("  created in {:.0} s", began.elapsed().as_secs_f64());
            Ok(())
        })?;
        let cluster = Self::on(&programs, Some(&data))?;
        for object in manifests(&KubernetesConfig::default()) {
            cluster.plane.create(&object);
        }
        Ok(Ok(cluster))
    }

    fn on(programs: &Path, data: Option<&Path>) -> Result<Self> {
        let plane = ControlPlane::start_with(programs, Setup { data, controllers: false, ..Setup::default() })?;
        let runtime = Builder::new_current_thread().enable_all().build().context("creating a runtime")?;
        let client = runtime.block_on(connect(plane.admin()))?;
        Ok(Self { plane, runtime, client })
    }

    /// Writes a kubeconfig of the service's account that points to this port instead of the API server's.
    pub(super) fn kubeconfig(&self, port: u16, folder: &Path) -> Result<PathBuf> {
        let own = self.plane.kubeconfig_for_service_account("cluster-doctor", "cluster-doctor")?;
        let text = std::fs::read_to_string(&own).context("reading the service's kubeconfig")?;
        let path = folder.join("kubeconfig");
        let there = text.replace(&self.plane.url(), &format!("https://127.0.0.1:{port}"));
        std::fs::write(&path, there).context("writing the service's kubeconfig")?;
        Ok(path)
    }

    /// Returns the port of the API server.
    pub(super) fn port(&self) -> Result<u16> {
        let url = self.plane.url();
        url.rsplit(':').next().and_then(|port| port.parse().ok()).with_context(|| format!("{url} has no port"))
    }

    /// Returns all objects of a kind, as JSON text.
    pub(super) fn list(&self, path: &str) -> Result<String> {
        let request = Request::new(path).list(&ListParams::default()).context("requesting a list")?;
        self.runtime.block_on(self.client.request_text(request)).with_context(|| format!("listing {path}"))
    }

    /// Returns all nodes by name.
    pub(super) fn nodes(&self) -> Result<BTreeMap<String, Value>> {
        let mut list: Value = serde_json::from_str(&self.list(NODE_PATH)?).context("reading the list of nodes")?;
        let Value::Array(items) = list["items"].take() else { bail!("the list of nodes has no items") };
        let named = |item: Value| Some((item["metadata"]["name"].as_str()?.to_owned(), item));
        Ok(items.into_iter().filter_map(named).collect())
    }

    /// Returns the number of writes to nodes so far, from the API server's metrics.
    pub(super) fn node_writes(&self) -> Result<u64> {
        let metrics = self.plane.request("GET", "/metrics", None)?.text;
        let writes = metrics.lines().filter(|line| {
            line.starts_with("apiserver_request_total{")
                && line.contains("resource=\"nodes\"")
                && !["GET", "LIST", "WATCH"].iter().any(|verb| line.contains(&format!("verb=\"{verb}\"")))
        });
        let count = |line: &str| line.rsplit(' ').next().and_then(|count| count.parse::<f64>().ok());
        Ok(writes.filter_map(count).sum::<f64>() as u64)
    }

    /// Patches these nodes, `at_once` at a time.
    pub(super) fn patch_nodes(&self, names: &[String], at_once: usize, patch: impl Fn(&str) -> Value) -> Result<()> {
        let change = |name: &String| patch_node(self.client.clone(), name.clone(), None, patch(name), "bench");
        let changes: Vec<_> = names.iter().map(change).collect();
        self.runtime.block_on(stream::iter(changes).buffer_unordered(at_once).try_collect())
    }

    pub(super) fn patch_node_status(&self, names: &[String], patch: impl Fn(&str) -> Value) -> Result<()> {
        let change =
            |name: &String| patch_node(self.client.clone(), name.clone(), Some("status"), patch(name), "kubelet");
        let changes: Vec<_> = names.iter().map(change).collect();
        self.runtime.block_on(stream::iter(changes).buffer_unordered(AT_ONCE).try_collect())
    }

    /// Plays lifecycle events of pods, concurrently across pods and in order for each.
    pub(super) fn play(&self, pods: &[Pod], parts: &[Part]) -> Result<()> {
        let playing = pods.iter().map(|pod| play(self.client.clone(), pod, parts)).collect::<Vec<_>>();
        self.runtime.block_on(stream::iter(playing).buffer_unordered(AT_ONCE).try_collect())
    }
}

/// One event in the lifecycle of a pod, which every watcher of pods receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Made,
    /// Created with a node assigned, bypassing the scheduler.
    MadeInPlace,
    Bound,
    Creating,
    Running,
    Ended,
}

async fn play(client: Client, pod: &Pod, parts: &[Part]) -> Result<()> {
    let path = format!("/api/v1/namespaces/{}/pods", pod.namespace);
    for part in parts {
        let pods = Request::new(&path);
        let report = |status: Value| {
            let parameters = PatchParams { field_manager: Some("kubelet".to_owned()), ..PatchParams::default() };
            pods.patch_subresource("status", &pod.name, &parameters, &Patch::Strategic(status))
        };
        let request = match part {
            Part::Made => pods.create(&made_by("pytorch-operator"), body(&pod.object(false))),
            Part::MadeInPlace => pods.create(&made_by("pytorch-operator"), body(&pod.object(true))),
            Part::Bound => {
                let target = json!({ "apiVersion": "v1", "kind": "Node", "name": population::node_name(pod.node) });
                let binding = json!({ "apiVersion": "v1", "kind": "Binding", "metadata": { "name": pod.name }, "target": target });
                pods.create_subresource("binding", &pod.name, &made_by("kube-scheduler"), body(&binding))
            }
            Part::Creating => report(pod.creating()),
            Part::Running => report(pod.running()),
            Part::Ended => report(pod.ended()),
        };
        let request = request.with_context(|| format!("{part:?} of pod {}", pod.name))?;
        client.request_text(request).await.with_context(|| format!("{part:?} of pod {}", pod.name))?;
    }
    Ok(())
}

async fn patch_node(
    client: Client,
    name: String,
    subresource: Option<&str>,
    patch: Value,
    manager: &str,
) -> Result<()> {
    let parameters = PatchParams { field_manager: Some(manager.to_owned()), ..PatchParams::default() };
    let (nodes, patch) = (Request::new(NODE_PATH), Patch::Merge(patch));
    let request = match subresource {
        Some(subresource) => nodes.patch_subresource(subresource, &name, &parameters, &patch),
        None => nodes.patch(&name, &parameters, &patch),
    };
    let response = client.request_text(request.with_context(|| format!("patching node {name}"))?).await;
    response.map(drop).with_context(|| format!("patching node {name}"))
}

fn made_by(manager: &str) -> PostParams {
    PostParams { field_manager: Some(manager.to_owned()), ..PostParams::default() }
}

fn body(object: &Value) -> Vec<u8> {
    object.to_string().into_bytes()
}

/// Creates nodes as kubelets register them and an operator labels them, then pods as they are created and reported.
async fn fill(cluster: &Cluster) -> Result<()> {
    let account = |namespace: &str| {
        json!({ "apiVersion": "v1", "kind": "ServiceAccount",
        "metadata": { "name": "default", "namespace": namespace } })
    };
    for namespace in population::namespaces() {
        cluster.plane.create(&json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": namespace } }));
        cluster.plane.create(&account(&namespace));
    }
    cluster.plane.create(&account("kube-system"));
    let register = |number: usize| {
        let client = cluster.client.clone();
        async move {
            let name = population::node_name(number);
            let node = body(&population::node(number));
            let request = Request::new(NODE_PATH).create(&made_by("kubelet"), node);
            let request = request.with_context(|| format!("registering node {name}"))?;
            client.request_text(request).await.with_context(|| format!("registering node {name}"))?;
            patch_node(client, name, None, population::operator_labels(number), "gpu-operator").await
        }
    };
    stream::iter((0..NODES).map(register)).buffer_unordered(AT_ONCE).try_collect::<()>().await?;
    let pods = population::pods();
    let parts = [Part::MadeInPlace, Part::Running];
    let playing = pods.iter().map(|pod| play(cluster.client.clone(), pod, &parts));
    stream::iter(playing).buffer_unordered(AT_ONCE).try_collect::<()>().await
}

/// Returns a fingerprint that changes with the generated objects and the Kubernetes version.
fn fingerprint(programs: &Path) -> u64 {
    const MADE: u64 = 1;
    let version = programs.file_name().unwrap_or_default();
    let mut text = format!("{}/{NODES}/{}", version.display(), population::PODS);
    for number in 0..50 {
        text.push_str(&population::node(number).to_string());
        text.push_str(&population::operator_labels(number).to_string());
    }
    for pod in population::pods().iter().take(200) {
        text.push_str(&pod.object(true).to_string());
        text.push_str(&pod.running().to_string());
    }
    text.bytes().fold(spread(MADE), |seen, byte| spread(seen ^ u64::from(byte)))
}
