//! The fields of Kubernetes objects that the backend reads. A node has hundreds of fields and a cluster thousands of nodes, so
//! all others are dropped.

use std::sync::Arc;

use doctor_core::{node::Hardware, time::Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry;
use kube::core::{ApiResource, GroupVersionKind, Object};
use serde::Deserialize;

use super::{
    interned_map::{InternedMap, Interner, MapInterner},
    read_object::ReadObject,
};

/// A node as the API server sends it.
pub(super) type ApiNode = Object<NodeSpec, NodeStatus>;
pub(super) type PodObject = ReadObject<PodSpec, PodStatus>;
pub(super) type JobObject = ReadObject<JobSpec, JobStatus>;

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
pub(super) type Quantities = InternedMap;

/// A node in its compact form, of which thousands are kept. Tests parse it from a server's JSON.
#[derive(Debug, Clone, Deserialize)]
#[serde(from = "ApiNode")]
pub(super) struct CachedNode {
    pub(super) metadata: CachedNodeMeta,
    pub(super) spec: CachedNodeSpec,
    pub(super) status: Option<CachedNodeStatus>,
}

#[derive(Debug, Clone)]
pub(super) struct CachedNodeMeta {
    pub(super) name: Arc<str>,
    pub(super) resource_version: Option<Box<str>>,
    pub(super) labels: InternedMap,
    pub(super) annotations: InternedMap,
}

#[derive(Debug, Clone)]
pub(super) struct CachedNodeSpec {
    pub(super) unschedulable: bool,
    /// Whether we were the last to write the cordon, according to `managedFields`.
    pub(super) cordon_is_ours: bool,
    pub(super) taints: Arc<[Taint]>,
}

#[derive(Debug, Clone)]
pub(super) struct CachedNodeStatus {
    pub(super) capacity: Quantities,
    pub(super) allocatable: Quantities,
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
    Unreported,
}

impl Ready {
    fn from_conditions(conditions: Vec<Condition>) -> Self {
        match conditions.into_iter().find(|condition| condition.kind == "Ready") {
            Some(ready) if ready.status == "True" => Self::Yes,
            Some(ready) if ready.message.is_empty() => Self::No(ready.reason.into()),
            Some(ready) => Self::No(ready.message.into()),
            None => Self::Unreported,
        }
    }
}

/// Interned values that are equal in many nodes, or in one node before and after a change.
#[derive(Debug, Default)]
pub(super) struct NodeInterners {
    names: Interner<str>,
    pairs: MapInterner,
    taints: Interner<[Taint]>,
    machines: Interner<Hardware>,
}

impl CachedNode {
    pub(super) fn name(&self) -> &str {
        &self.metadata.name
    }

    pub(super) fn is_ready(&self) -> bool {
        self.status.as_ref().is_some_and(|status| status.ready == Ready::Yes)
    }

    /// Returns the form that is kept: without foreign annotations and without results, and with interned values.
    pub(super) fn interned(self, shared: &mut NodeInterners, prefix: &str) -> Self {
        let own = |name: &str| {
            let rest = name.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('/'));
            rest.is_some_and(|name| !matches!(name, "results" | "quarantine-result"))
        };
        let Self { mut metadata, mut spec, mut status } = self;
        metadata.name = shared.names.intern(metadata.name);
        metadata.annotations = metadata.annotations.filter_keys(own);
        shared.pairs.intern(&mut metadata.labels);
        spec.taints = shared.taints.intern(spec.taints);
        if let Some(status) = &mut status {
            shared.pairs.intern(&mut status.capacity);
            shared.pairs.intern(&mut status.allocatable);
            status.hardware = shared.machines.intern(Arc::clone(&status.hardware));
        }
        Self { metadata, spec, status }
    }
}

impl From<ApiNode> for CachedNode {
    fn from(node: ApiNode) -> Self {
        let ApiNode { metadata, spec, status, .. } = node;
        let spec = CachedNodeSpec {
            unschedulable: spec.unschedulable,
            cordon_is_ours: is_our_cordon(metadata.managed_fields.as_deref().unwrap_or_default()),
            taints: spec.taints.into(),
        };
        let status = status.map(|NodeStatus { capacity, allocatable, conditions, node_info }| {
            let non_empty = |text: String| Some(text).filter(|text| !text.is_empty());
            let (physical_host, boot_id) = (non_empty(node_info.system_uuid), non_empty(node_info.boot_id));
            let hardware = Arc::new(Hardware { physical_host, boot_id, ..Hardware::default() });
            CachedNodeStatus { capacity, allocatable, ready: Ready::from_conditions(conditions), hardware }
        });
        let metadata = CachedNodeMeta {
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
    pub(super) capacity: Quantities,
    pub(super) allocatable: Quantities,
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
    pub(super) fn matches(&self, kind: &str, status: &str) -> bool {
        self.kind == kind && self.status == status
    }
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct PodSpec {
    pub(super) node_name: Option<String>,
    pub(super) containers: Vec<Container>,
    pub(super) init_containers: Vec<Container>,
    pub(super) overhead: Quantities,
    /// Claims of dynamic resource allocation.
    pub(super) resource_claims: Vec<serde::de::IgnoredAny>,
    pub(super) node_selector: InternedMap,
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
    pub(super) requests: Quantities,
    pub(super) limits: Quantities,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct PodStatus {
    pub(super) phase: String,
    /// Why the kubelet or a controller ended it, if its containers did not end by themselves.
    pub(super) reason: String,
    pub(super) message: String,
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
    pub(super) waiting: Option<Waiting>,
    pub(super) running: Option<Running>,
    pub(super) terminated: Option<Terminated>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct Waiting {
    pub(super) reason: String,
    pub(super) message: String,
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
    pub(super) fn timestamp(self) -> Timestamp {
        Timestamp::from_millis(self.0.as_millisecond())
    }
}
