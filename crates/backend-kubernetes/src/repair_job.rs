//! Builds the one-shot privileged Jobs of `doctor-node` for repairs and reports that only a process on the node can make, and
//! decides which pods have to leave a node before a repair. Pure.

use doctor_core::ids::{NodeName, OpId};
use kube::core::ObjectMeta;
use serde_json::{Value, json};

use super::{
    config::KubernetesConfig,
    names,
    objects::{Condition, JobObject, PodObject},
};

/// The node's file system in the job's container.
pub(super) const HOST: &str = "/host";
/// The deadline after which the cluster ends a repair job.
const DEADLINE_SECONDS: u32 = 900;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Repair {
    Reset,
    Reboot,
}

impl Repair {
    pub(super) const fn operation(self) -> &'static str {
        match self {
            Self::Reset => "reset",
            Self::Reboot => "reboot",
        }
    }

    /// Returns the site's command for this repair. Empty: there is none.
    pub(super) fn command(self, config: &KubernetesConfig) -> &[String] {
        match self {
            Self::Reset => &config.reset,
            Self::Reboot => &config.reboot,
        }
    }
}

pub(super) fn job_name(op: OpId) -> String {
    format!("doctor-{op}")
}

/// Builds the job that performs a repair. The caller has verified that the node is empty.
pub(super) fn manifest(repair: Repair, op: OpId, node: &NodeName, boot: &str, config: &KubernetesConfig) -> Value {
    let mut command = vec!["doctor-node".to_owned(), "repair".to_owned(), repair.operation().to_owned()];
    if repair == Repair::Reboot && !boot.is_empty() {
        command.extend(["--boot".to_owned(), boot.to_owned()]);
    }
    command.push("--".to_owned());
    command.extend(repair.command(config).iter().cloned());
    let mut job = node_job(NodeJob { name: job_name(op), command, label: "repair" }, op, node, config);
    job["metadata"]["annotations"][config.prefixed("boot")] = json!(boot);
    job
}

/// One command of `doctor-node` on one node.
pub(super) struct NodeJob {
    pub(super) name: String,
    pub(super) command: Vec<String>,
    /// A label of the job and its pod, by operation, besides `op`.
    pub(super) label: &'static str,
}

/// Builds a privileged job that runs the command on the node with the host's file system. It requests no GPU, because some may be
/// gone. It tolerates every taint and evicts nothing.
pub(super) fn node_job(job: NodeJob, op: OpId, node: &NodeName, config: &KubernetesConfig) -> Value {
    let NodeJob { name, command, label } = job;
    let labels = json!({
        config.prefixed("op"): op.to_string(), config.prefixed(label): op.to_string(),
        "app.kubernetes.io/name": "cluster-doctor",
    });
    let pinned = json!({ "key": "metadata.name", "operator": "In", "values": [node.as_str()] });
    let mut pod = json!({
        "restartPolicy": "Never",
        "automountServiceAccountToken": false,
        "hostPID": true,
        "terminationGracePeriodSeconds": config.grace.millis() / 1000,
        "affinity": { "nodeAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{ "matchFields": [pinned] }] } } },
        "tolerations": [{ "operator": "Exists" }],
        "containers": [{
            "name": names::CONTAINER, "image": config.image, "imagePullPolicy": config.image_pull_policy,
            "command": command,
            "securityContext": { "privileged": true },
            "volumeMounts": [{ "name": "host", "mountPath": HOST }],
        }],
        "volumes": [{ "name": "host", "hostPath": { "path": "/" } }],
    });
    if let Some(account) = &config.service_account {
        pod["serviceAccountName"] = json!(account);
    }
    json!({
        "apiVersion": "batch/v1", "kind": "Job",
        "metadata": { "name": name, "namespace": config.namespace, "labels": labels,
            "annotations": { config.prefixed("node"): node.as_str() } },
        "spec": {
            "backoffLimit": 0, "completions": 1, "parallelism": 1,
            "activeDeadlineSeconds": DEADLINE_SECONDS,
            "ttlSecondsAfterFinished": config.keep.millis() / 1000,
            "template": { "metadata": { "labels": labels }, "spec": pod },
        },
    })
}

/// The progress of a repair.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RepairStage {
    Running,
    /// Its command succeeded.
    Succeeded,
    Failed(String),
}

pub(super) fn stage(job: &JobObject) -> RepairStage {
    let conditions = job.status.as_ref().map_or(&[][..], |status| &status.conditions);
    let has = |kind: &str| conditions.iter().find(|condition| condition.matches(kind, "True"));
    match (has("Complete"), has("Failed")) {
        (Some(_), _) => RepairStage::Succeeded,
        (None, Some(Condition { reason, message, .. })) => RepairStage::Failed(format!("{reason}: {message}")),
        (None, None) => RepairStage::Running,
    }
}

/// Returns the boot id of the node at the time of the request.
pub(super) fn boot_id_before(job: &JobObject, config: &KubernetesConfig) -> Option<String> {
    job.metadata.annotations.as_ref()?.get(&config.prefixed("boot")).cloned()
}

/// What happens to a pod when its node is emptied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EvictionClass {
    /// It belongs to the node, has ended, or is ours.
    Exempt,
    /// It is evicted, and its controller recreates it elsewhere.
    Evictable,
    /// It is already terminating.
    Terminating,
    /// It has no controller that would recreate it: an operator has to end it.
    Unowned,
}

pub(super) fn eviction_class(pod: &PodObject, config: &KubernetesConfig) -> EvictionClass {
    let metadata = &pod.metadata;
    let ended = pod.status.as_ref().is_some_and(|status| matches!(status.phase.as_str(), "Succeeded" | "Failed"));
    let owners = metadata.owner_references.as_deref().unwrap_or_default();
    let controller = owners.iter().find(|owner| owner.controller == Some(true));
    let of_node = controller.is_some_and(|owner| owner.kind == "DaemonSet") || is_mirror(metadata);
    if ended || of_node || is_ours(metadata, config) {
        EvictionClass::Exempt
    } else if metadata.deletion_timestamp.is_some() {
        EvictionClass::Terminating
    } else if controller.is_none() && !config.evict_unowned {
        EvictionClass::Unowned
    } else {
        EvictionClass::Evictable
    }
}

/// Returns whether the pod is a mirror pod: a static pod of the kubelet, shown in the API server for information.
fn is_mirror(metadata: &ObjectMeta) -> bool {
    metadata.annotations.as_ref().is_some_and(|all| all.contains_key("kubernetes.io/config.mirror"))
}

fn is_ours(metadata: &ObjectMeta, config: &KubernetesConfig) -> bool {
    let labelled = |name: &str| metadata.labels.as_ref().is_some_and(|all| all.contains_key(&config.prefixed(name)));
    metadata.namespace.as_deref() == Some(&config.namespace) && (labelled("run") || labelled("op"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(change: impl FnOnce(&mut Value)) -> PodObject {
        let mut pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": { "name": "p", "namespace": "team", "ownerReferences": [
                { "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "1", "controller": true }] },
            "spec": { "containers": [] }, "status": { "phase": "Running" },
        });
        change(&mut pod);
        serde_json::from_value(pod).unwrap()
    }

    #[test]
    fn user_pods_are_evicted_node_pods_stay_and_unowned_pods_are_left_to_an_operator() {
        let config = KubernetesConfig::default();
        let evicting = KubernetesConfig { evict_unowned: true, ..KubernetesConfig::default() };
        let unowned = |pod: &mut Value| pod["metadata"]["ownerReferences"] = json!([]);
        assert_eq!(eviction_class(&pod(|_| {}), &config), EvictionClass::Evictable);
        assert_eq!(eviction_class(&pod(unowned), &config), EvictionClass::Unowned);
        assert_eq!(eviction_class(&pod(unowned), &evicting), EvictionClass::Evictable);
        let daemon = pod(|pod| pod["metadata"]["ownerReferences"][0]["kind"] = json!("DaemonSet"));
        assert_eq!(eviction_class(&daemon, &config), EvictionClass::Exempt);
        let mirror = pod(|pod| pod["metadata"]["annotations"] = json!({ "kubernetes.io/config.mirror": "x" }));
        assert_eq!(eviction_class(&mirror, &config), EvictionClass::Exempt);
        for phase in ["Succeeded", "Failed"] {
            assert_eq!(
                eviction_class(&pod(|pod| pod["status"]["phase"] = json!(phase)), &config),
                EvictionClass::Exempt
            );
        }
        let terminating = pod(|pod| pod["metadata"]["deletionTimestamp"] = json!("2026-11-15T20:00:00Z"));
        assert_eq!(eviction_class(&terminating, &config), EvictionClass::Terminating);
        let ours = |namespace: &str| {
            pod(|pod| {
                pod["metadata"]["namespace"] = json!(namespace);
                pod["metadata"]["labels"] = json!({ "cluster-doctor.io/run": "1" });
            })
        };
        assert_eq!(eviction_class(&ours("cluster-doctor"), &config), EvictionClass::Exempt);
        // Any user may set this label.
        assert_eq!(eviction_class(&ours("team"), &config), EvictionClass::Evictable);
    }
}
