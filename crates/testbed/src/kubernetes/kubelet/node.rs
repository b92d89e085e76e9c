//! Simulated nodes: the objects that a kubelet registers and updates.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use futures_util::{StreamExt as _, pin_mut, stream};
use k8s_openapi::{
    api::{coordination::v1::Lease, core::v1::Node},
    apimachinery::pkg::apis::meta::v1::MicroTime,
    jiff::Timestamp,
};
use kube::{
    Api, Client,
    api::{Patch, PatchParams, PostParams},
    runtime::{WatchStreamExt as _, watcher},
};
use serde_json::{Value, json};

use super::{AT_ONCE, ConstantBackoff, KubeletError, failed, retry};

/// The namespace of node leases, and the lease duration.
const LEASE_NAMESPACE: &str = "kube-node-lease";
const LEASE_SECONDS: u32 = 40;

/// A real kubelet renews every ten seconds. Here it is one second, so that tests see a missed lease sooner.
const LEASE_RENEW_INTERVAL: Duration = Duration::from_secs(1);

const MANAGER: &str = "fake-kubelet";

/// The reported kubelet version, recent enough not to trigger compatibility behaviour.
const VERSION: &str = "v1.36.0";

/// The taint that the controller manager removes from a ready node.
const NOT_READY: &str = "node.kubernetes.io/not-ready";

/// Numbers the nodes of this process, for unique addresses and boot ids.
static MADE: AtomicU32 = AtomicU32::new(1);

/// A node to be registered.
#[derive(Debug, Clone)]
pub struct FakeNode {
    name: String,
    labels: BTreeMap<String, String>,
    resources: BTreeMap<String, String>,
    boot_id: String,
    number: u32,
    provider_id: Option<String>,
    lease: bool,
}

impl FakeNode {
    /// A node with eight GPUs and the label of NVIDIA's GPU operator.
    pub fn gpu(name: &str) -> Self {
        Self::plain(name).label("nvidia.com/gpu.present", "true").resource("nvidia.com/gpu", "8")
    }

    /// A node without GPUs.
    pub fn plain(name: &str) -> Self {
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let node = Self {
            name: name.to_owned(),
            labels: BTreeMap::new(),
            resources: BTreeMap::new(),
            boot_id: format!("00000000-0000-4000-8000-{number:012x}"),
            number,
            provider_id: None,
            lease: false,
        };
        node.label("kubernetes.io/hostname", name)
            .label("kubernetes.io/os", "linux")
            .label("kubernetes.io/arch", "amd64")
            .resource("cpu", "96")
            .resource("memory", "1Ti")
            .resource("ephemeral-storage", "1Ti")
            .resource("pods", "110")
    }

    #[must_use]
    pub fn label(mut self, key: &str, value: &str) -> Self {
        self.labels.insert(key.to_owned(), value.to_owned());
        self
    }

    /// Sets capacity and allocatable of a resource, in Kubernetes' quantity notation.
    #[must_use]
    pub fn resource(mut self, resource: &str, quantity: &str) -> Self {
        self.resources.insert(resource.to_owned(), quantity.to_owned());
        self
    }

    #[must_use]
    pub fn boot_id(mut self, boot_id: &str) -> Self {
        self.boot_id = boot_id.to_owned();
        self
    }

    /// Sets the cloud instance id, such as `aws:///us-east-1a/i-0123456789abcdef0`.
    #[must_use]
    pub fn provider_id(mut self, provider_id: &str) -> Self {
        self.provider_id = Some(provider_id.to_owned());
        self
    }

    /// Renews the node's lease while the kubelet runs. A node without a lease sends no heartbeat and counts as ready
    /// for [`Setup::node_grace`](crate::kubernetes::Setup).
    #[must_use]
    pub fn with_lease(mut self) -> Self {
        self.lease = true;
        self
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn has_lease(&self) -> bool {
        self.lease
    }

    /// Creates the node or updates an existing one of that name, as a kubelet does when it starts.
    pub(super) async fn register(self, client: Client) -> Result<(), KubeletError> {
        let nodes: Api<Node> = Api::all(client.clone());
        let object = self.object();
        let node: Node = serde_json::from_value(object.clone()).expect("the JSON below is a Node");
        let parameters = PostParams::default();
        match retry(|| nodes.create(&parameters, &node)).await {
            Ok(_) => return Ok(()),
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            Err(error) => return Err(failed(format!("creating node {}", self.name))(error)),
        }
        let labels = Patch::Merge(json!({ "metadata": { "labels": self.labels } }));
        let parameters = PatchParams::default();
        retry(|| nodes.patch(&self.name, &parameters, &labels))
            .await
            .map_err(failed(format!("labelling node {}", self.name)))?;
        patch_status(&client, &self.name, &object["status"]).await
    }

    fn object(&self) -> Value {
        let [_, high, middle, low] = self.number.to_be_bytes();
        let mut status = json!({
            "capacity": self.resources,
            "allocatable": self.resources,
            "addresses": [
                { "type": "InternalIP", "address": format!("10.{high}.{middle}.{low}") },
                { "type": "Hostname", "address": self.name },
            ],
            "nodeInfo": {
                "architecture": "amd64",
                "bootID": self.boot_id,
                "containerRuntimeVersion": "containerd://2.0.0",
                "kernelVersion": "6.8.0",
                "kubeProxyVersion": "",
                "kubeletVersion": VERSION,
                "machineID": format!("{:032x}", self.number),
                "operatingSystem": "linux",
                "osImage": "a node that does not exist",
                "systemUUID": format!("00000000-0000-4000-9000-{:012x}", self.number),
            },
        });
        status["conditions"] = ready_status(true)["conditions"].take();
        json!({
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": { "name": self.name, "labels": self.labels },
            "spec": { "providerID": self.provider_id },
            "status": status,
        })
    }
}

pub(super) fn ready_status(ready: bool) -> Value {
    let now = Timestamp::now();
    let (status, reason) = if ready { ("True", "KubeletReady") } else { ("False", "KubeletNotReady") };
    let condition = |kind: &str, status: &str, reason: &str| {
        json!({
            "type": kind, "status": status, "reason": reason, "message": "",
            "lastHeartbeatTime": now, "lastTransitionTime": now,
        })
    };
    json!({ "conditions": [
        condition("MemoryPressure", "False", "KubeletHasSufficientMemory"),
        condition("DiskPressure", "False", "KubeletHasNoDiskPressure"),
        condition("PIDPressure", "False", "KubeletHasSufficientPID"),
        condition("Ready", status, reason),
    ] })
}

pub(super) fn boot_status(boot_id: &str) -> Value {
    json!({ "nodeInfo": { "bootID": boot_id } })
}

pub(super) fn resource_status(resource: &str, quantity: &str) -> Value {
    json!({ "capacity": { resource: quantity }, "allocatable": { resource: quantity } })
}

/// Patches the status. Conditions are merged by type; everything else is replaced.
pub(super) async fn patch_status(client: &Client, node: &str, status: &Value) -> Result<(), KubeletError> {
    let nodes: Api<Node> = Api::all(client.clone());
    let patch = Patch::Strategic(json!({ "status": status }));
    let parameters = PatchParams::default();
    retry(|| nodes.patch_status(node, &parameters, &patch))
        .await
        .map(drop)
        .map_err(failed(format!("reporting the status of node {node}")))
}

/// Waits until the controller manager has removed the initial taint from all these nodes.
pub(super) async fn wait_until_schedulable(client: &Client, mut waiting: BTreeSet<String>) -> Result<(), KubeletError> {
    let nodes: Api<Node> = Api::all(client.clone());
    let seen = watcher(nodes, watcher::Config::default()).backoff(ConstantBackoff).applied_objects();
    pin_mut!(seen);
    while !waiting.is_empty() {
        // The watch retries after errors; the caller bounds the time.
        let Some(Ok(node)) = seen.next().await else { continue };
        let tainted = node.spec.and_then(|spec| spec.taints).into_iter().flatten().any(|taint| taint.key == NOT_READY);
        if let Some(name) = node.metadata.name.filter(|_| !tainted) {
            waiting.remove(&name);
        }
    }
    Ok(())
}

/// Renews the leases of these nodes while the kubelet runs.
pub(super) async fn keep_leases(client: Client, nodes: Vec<String>) {
    let leases: Api<Lease> = Api::namespaced(client, LEASE_NAMESPACE);
    let mut ticks = tokio::time::interval(LEASE_RENEW_INTERVAL);
    loop {
        ticks.tick().await;
        let renewing = nodes.iter().cloned().map(|node| renew(leases.clone(), node));
        stream::iter(renewing).buffer_unordered(AT_ONCE).collect::<()>().await;
    }
}

async fn renew(leases: Api<Lease>, node: String) {
    let lease = json!({
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": { "name": node },
        "spec": {
            "holderIdentity": node,
            "leaseDurationSeconds": LEASE_SECONDS,
            "renewTime": MicroTime(Timestamp::now()),
        },
    });
    if let Err(error) = leases.patch(&node, &PatchParams::apply(MANAGER).force(), &Patch::Apply(&lease)).await {
        // The next tick retries, as in a real kubelet. The message explains a node that is not ready.
        eprintln!("the lease of {node} was not renewed: {error}");
    }
}
