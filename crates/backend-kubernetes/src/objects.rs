//! The fields of Kubernetes objects that the backend reads. A node has hundreds of fields and a cluster thousands of nodes, so
//! all others are dropped.

use std::sync::Arc;

use doctor_core::{node::Hardware, time::Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry;
use kube::core::{ApiResource, GroupVersionKind, Object};
use serde::Deserialize;

use super::pairs::{Pairs, Shared, SharedPairs};

/// A node as the API server sends it.
pub(super) type NodeAnswer = Object<NodeSpec, NodeStatus>;
pub(super) type PodObject = Object<PodSpec, PodStatus>;
pub(super) type JobObject = Object<JobSpec, JobStatus>;

pub(super) fn node_resource() -> ApiResource {
    ApiResource::from_gvk(&GroupVersionKind::gvk("", "v1", "Node"))
}

pub(super) fn pod_resource() -> ApiResource {
    ApiResource::from_gvk(&GroupVersionKind::gvk("", "v1", "Pod"))
}

pub(super) fn job_resource() -> ApiResource {
    ApiResource::from_gvk(&GroupVersionKind::gvk("batch", "v1", "Job"))
}

pub(super) fn service_resource() -> ApiResource {
    ApiResource::from_gvk(&GroupVersionKind::gvk("", "v1", "Service"))
}

pub(super) fn secret_resource() -> ApiResource {
    ApiResource::from_gvk(&GroupVersionKind::gvk("", "v1", "Secret"))
}

/// Resource quantities as written: `8`, `500m`, `1Gi`.
pub(super) type Amounts = Pairs;

/// A node in its compact form, of which thousands are kept. Tests parse it from a server's JSON.
#[derive(Debug, Clone, Deserialize)]
#[serde(from = "NodeAnswer")]
pub(super) struct NodeObject {
    pub(super) metadata: NodeMeta,
    pub(super) spec: KeptSpec,
    pub(super) status: Option<KeptStatus>,
}

#[derive(Debug, Clone)]
pub(super) struct NodeMeta {
    pub(super) name: Arc<str>,
    pub(super) resource_version: Option<Box<str>>,
    pub(super) labels: Pairs,
    pub(super) annotations: Pairs,
}

#[derive(Debug, Clone)]
pub(super) struct KeptSpec {
    pub(super) unschedulable: bool,
    /// Whether we were the last to write the cordon, according to `managedFields`.
    pub(super) cordon_is_ours: bool,
    pub(super) taints: Arc<[Taint]>,
}

#[derive(Debug, Clone)]
pub(super) struct KeptStatus {
    pub(super) capacity: Amounts,
    pub(super) allocatable: Amounts,
    pub(super) ready: Ready,
    pub(super) hardware: Arc<Hardware>,
}

/// The `Ready` condition, as set by the kubelet or, if it is silent, by the node controller. The other conditions are not kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Ready {
    Yes,
    /// The message, or the reason if there is none.
    No(Box<str>),
    /// The node has no such condition.
    Unsaid,
}

impl Ready {
    fn of(conditions: Vec<Condition>) -> Self {
        match conditions.into_iter().find(|condition| condition.kind == "Ready") {
            Some(ready) if ready.status == "True" => Self::Yes,
            Some(ready) if ready.message.is_empty() => Self::No(ready.reason.into()),
            Some(ready) => Self::No(ready.message.into()),
            None => Self::Unsaid,
        }
    }
}

/// Interned values that are equal in many nodes, or in one node before and after a change.
#[derive(Debug, Default)]
pub(super) struct SharedByNodes {
    names: Shared<str>,
    pairs: SharedPairs,
    taints: Shared<[Taint]>,
    machines: Shared<Hardware>,
}

impl NodeObject {
    pub(super) fn name(&self) -> &str {
        &self.metadata.name
    }

    pub(super) fn is_ready(&self) -> bool {
        self.status.as_ref().is_some_and(|status| status.ready == Ready::Yes)
    }

    /// Returns the form that is kept: without foreign annotations and without results, and with interned values.
    pub(super) fn sharing(self, shared: &mut SharedByNodes, prefix: &str) -> Self {
        let own = |name: &str| {
            let rest = name.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('/'));
            rest.is_some_and(|name| !matches!(name, "results" | "quarantine-result"))
        };
        let Self { mut metadata, mut spec, mut status } = self;
        metadata.name = shared.names.one(metadata.name);
        metadata.annotations = metadata.annotations.only(own);
        shared.pairs.share(&mut metadata.labels);
        spec.taints = shared.taints.one(spec.taints);
        if let Some(status) = &mut status {
            shared.pairs.share(&mut status.capacity);
            shared.pairs.share(&mut status.allocatable);
            status.hardware = shared.machines.one(Arc::clone(&status.hardware));
        }
        Self { metadata, spec, status }
    }
}

impl From<NodeAnswer> for NodeObject {
    fn from(told: NodeAnswer) -> Self {
        let NodeAnswer { metadata, spec, status, .. } = told;
        let spec = KeptSpec {
            unschedulable: spec.unschedulable,
            cordon_is_ours: is_our_cordon(metadata.managed_fields.as_deref().unwrap_or_default()),
            taints: spec.taints.into(),
        };
        let status = status.map(|NodeStatus { capacity, allocatable, conditions, node_info }| {
            let told = |text: String| Some(text).filter(|text| !text.is_empty());
            let (physical_host, boot_id) = (told(node_info.system_uuid), told(node_info.boot_id));
            let hardware = Arc::new(Hardware { physical_host, boot_id, ..Hardware::default() });
            KeptStatus { capacity, allocatable, ready: Ready::of(conditions), hardware }
        });
        let metadata = NodeMeta {
            name: metadata.name.unwrap_or_default().into(),
            resource_version: metadata.resource_version.map(Into::into),
            labels: metadata.labels.unwrap_or_default().into_iter().collect(),
            annotations: metadata.annotations.unwrap_or_default().into_iter().collect(),
        };
        Self { metadata, spec, status }
    }
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct NodeSpec {
    pub(super) unschedulable: bool,
    /// The cloud instance of the node.
    #[serde(rename = "providerID")]
    pub(super) provider_id: Option<String>,
    pub(super) taints: Vec<Taint>,
}

/// Our name in `managedFields`.
pub(super) const FIELD_MANAGER: &str = "cluster-doctor";

/// Returns whether we wrote the cordon last, according to `managedFields`, which is too long to keep.
fn is_our_cordon(writers: &[ManagedFieldsEntry]) -> bool {
    writers.iter().any(|writer| {
        let fields = writer.fields_v1.as_ref();
        writer.manager.as_deref() == Some(FIELD_MANAGER)
            && fields.is_some_and(|fields| fields.0.pointer("/f:spec/f:unschedulable").is_some())
    })
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Deserialize, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Taint {
    pub(super) key: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) value: Option<String>,
    pub(super) effect: String,
    /// Kept unchanged, because the whole list is written back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) time_added: Option<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct NodeStatus {
    pub(super) capacity: Amounts,
    pub(super) allocatable: Amounts,
    pub(super) conditions: Vec<Condition>,
    pub(super) node_info: NodeInfo,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct NodeInfo {
    #[serde(rename = "bootID")]
    pub(super) boot_id: String,
    #[serde(rename = "systemUUID")]
    pub(super) system_uuid: String,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Condition {
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) status: String,
    pub(super) reason: String,
    pub(super) message: String,
    pub(super) last_transition_time: Option<Time>,
}

impl Condition {
    pub(super) fn is(&self, kind: &str, status: &str) -> bool {
        self.kind == kind && self.status == status
    }
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct PodSpec {
    pub(super) node_name: Option<String>,
    pub(super) containers: Vec<Container>,
    pub(super) init_containers: Vec<Container>,
    pub(super) overhead: Amounts,
    /// Claims of dynamic resource allocation.
    pub(super) resource_claims: Vec<serde::de::IgnoredAny>,
    pub(super) node_selector: Pairs,
    pub(super) affinity: Option<Affinity>,
    pub(super) tolerations: Vec<Toleration>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Affinity {
    pub(super) node_affinity: Option<NodeAffinity>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct NodeAffinity {
    #[serde(rename = "requiredDuringSchedulingIgnoredDuringExecution")]
    pub(super) required: Option<NodeTerms>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct NodeTerms {
    pub(super) node_selector_terms: Vec<NodeTerm>,
}

/// All requirements must match.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct NodeTerm {
    pub(super) match_expressions: Vec<Requirement>,
    pub(super) match_fields: Vec<Requirement>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct Requirement {
    pub(super) key: String,
    pub(super) operator: String,
    pub(super) values: Vec<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct Toleration {
    pub(super) key: Option<String>,
    pub(super) operator: Option<String>,
    pub(super) value: Option<String>,
    pub(super) effect: Option<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Container {
    pub(super) resources: Resources,
    /// `Always` for a sidecar, an init container that keeps running.
    pub(super) restart_policy: Option<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct Resources {
    pub(super) requests: Amounts,
    pub(super) limits: Amounts,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct PodStatus {
    pub(super) phase: String,
    /// Why the kubelet or a controller ended it, if its containers did not end by themselves.
    pub(super) reason: String,
    pub(super) nominated_node_name: Option<String>,
    pub(super) conditions: Vec<Condition>,
    pub(super) init_container_statuses: Vec<ContainerStatus>,
    pub(super) container_statuses: Vec<ContainerStatus>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct ContainerStatus {
    pub(super) name: String,
    pub(super) state: ContainerState,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct ContainerState {
    pub(super) running: Option<Running>,
    pub(super) terminated: Option<Terminated>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Running {
    pub(super) started_at: Option<Time>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Terminated {
    pub(super) started_at: Option<Time>,
    pub(super) finished_at: Option<Time>,
    #[serde(default)]
    pub(super) exit_code: i32,
    #[serde(default)]
    pub(super) signal: i32,
    #[serde(default)]
    pub(super) reason: String,
    /// The container's termination message.
    #[serde(default)]
    pub(super) message: String,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct JobSpec {
    pub(super) suspend: bool,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct JobStatus {
    pub(super) conditions: Vec<Condition>,
    pub(super) start_time: Option<Time>,
    /// How many pods failed, including deleted ones.
    pub(super) failed: u32,
}

/// A Kubernetes timestamp, in whole seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub(super) struct Time(jiff::Timestamp);

impl Time {
    pub(super) fn moment(self) -> Timestamp {
        Timestamp::from_millis(self.0.as_millisecond())
    }
}
