//! What we read of the cluster's objects, and nothing more. A node has hundreds of fields and a cluster thousands of nodes:
//! what is not here is not kept.

use std::collections::BTreeMap;

use doctor_core::time::Timestamp;
use kube::core::{ApiResource, GroupVersionKind, Object};
use serde::Deserialize;

pub(super) type NodeObject = Object<NodeSpec, NodeStatus>;
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

pub(super) fn secret_resource() -> ApiResource {
    ApiResource::from_gvk(&GroupVersionKind::gvk("", "v1", "Secret"))
}

/// Amounts of resources as they are written: `8`, `500m`, `1Gi`.
pub(super) type Amounts = BTreeMap<String, String>;

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct NodeSpec {
    pub(super) unschedulable: bool,
    pub(super) taints: Vec<Taint>,
    /// Whether we were the last to write the cordon, by the object's own record of its writers. Not a field of Kubernetes.
    #[serde(skip)]
    pub(super) cordon_is_ours: bool,
}

/// Who writes, in an object's own record of its writers.
pub(super) const FIELD_MANAGER: &str = "cluster-doctor";

/// Notes who cordoned the node, and drops the long record that tells it.
pub(super) fn note_writers(node: &mut NodeObject) {
    let writers = node.metadata.managed_fields.take().unwrap_or_default();
    node.spec.cordon_is_ours = writers.iter().any(|writer| {
        let fields = writer.fields_v1.as_ref();
        writer.manager.as_deref() == Some(FIELD_MANAGER)
            && fields.is_some_and(|fields| fields.0.pointer("/f:spec/f:unschedulable").is_some())
    });
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Taint {
    pub(super) key: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) value: Option<String>,
    pub(super) effect: String,
    /// Kept as it is: the whole list is written back.
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
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Container {
    pub(super) resources: Resources,
    /// `Always` for an init container that stays.
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
    pub(super) nominated_node_name: Option<String>,
    pub(super) container_statuses: Vec<ContainerStatus>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct ContainerStatus {
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
    /// Pods that failed, counted also when they are gone.
    pub(super) failed: u32,
}

/// A moment as Kubernetes writes it, in whole seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub(super) struct Time(jiff::Timestamp);

impl Time {
    pub(super) fn moment(self) -> Timestamp {
        Timestamp::from_millis(self.0.as_millisecond())
    }
}
