//! Builds the one-shot privileged Job of `doctor-node` for repairs that only a process on the node can make, and decides which
//! pods have to leave a node before. Pure.

use doctor_core::ids::{NodeName, OpId};
use kube::core::ObjectMeta;
use serde_json::{Value, json};

use super::{
    config::KubernetesConfig,
    names,
    objects::{Condition, JobObject, PodObject},
};

/// The node's file system in the job's container.
const HOST: &str = "/host";
/// The deadline after which the cluster ends a repair job.
const LONGEST_SECONDS: u32 = 900;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Repair {
    Reset,
    Reboot,
}

impl Repair {
    pub(super) const fn word(self) -> &'static str {
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

pub(super) fn name(op: OpId) -> String {
    format!("doctor-{op}")
}

/// Builds the job that performs a repair. It requests no GPU, because some may be gone. It tolerates every taint and evicts
/// nothing: the caller has verified that the node is empty.
pub(super) fn manifest(repair: Repair, op: OpId, node: &NodeName, boot: &str, config: &KubernetesConfig) -> Value {
    let labels = json!({ config.own("op"): op.to_string(), "app.kubernetes.io/name": "cluster-doctor" });
    let mut command = vec!["doctor-node".to_owned(), "repair".to_owned(), repair.word().to_owned()];
    if repair == Repair::Reboot && !boot.is_empty() {
        command.extend(["--boot".to_owned(), boot.to_owned()]);
    }
    command.push("--".to_owned());
    command.extend(repair.command(config).iter().cloned());
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
        "metadata": { "name": name(op), "namespace": config.namespace, "labels": labels,
            "annotations": { config.own("node"): node.as_str(), config.own("boot"): boot } },
        "spec": {
            "backoffLimit": 0, "completions": 1, "parallelism": 1,
            "activeDeadlineSeconds": LONGEST_SECONDS,
            "ttlSecondsAfterFinished": config.keep.millis() / 1000,
            "template": { "metadata": { "labels": labels }, "spec": pod },
        },
    })
}

/// The progress of a repair.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Stage {
    UnderWay,
    /// Its command succeeded.
    Told,
    Failed(String),
}

pub(super) fn stage(job: &JobObject) -> Stage {
    let conditions = job.status.as_ref().map_or(&[][..], |status| &status.conditions);
    let has = |kind: &str| conditions.iter().find(|condition| condition.is(kind, "True"));
    match (has("Complete"), has("Failed")) {
        (Some(_), _) => Stage::Told,
        (None, Some(Condition { reason, message, .. })) => Stage::Failed(format!("{reason}: {message}")),
        (None, None) => Stage::UnderWay,
    }
}

/// Returns the boot id of the node at the time of the request.
pub(super) fn boot_before(job: &JobObject, config: &KubernetesConfig) -> Option<String> {
    job.metadata.annotations.as_ref()?.get(&config.own("boot")).cloned()
}

/// What happens to a pod when its node is emptied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Leaving {
    /// It belongs to the node, has ended, or is ours.
    Stays,
    /// It is evicted, and its controller recreates it elsewhere.
    Goes,
    /// It is already terminating.
    OnItsWay,
    /// It has no controller that would recreate it: an operator has to end it.
    Lost,
}

pub(super) fn leaving(pod: &PodObject, config: &KubernetesConfig) -> Leaving {
    let metadata = &pod.metadata;
    let ended = pod.status.as_ref().is_some_and(|status| matches!(status.phase.as_str(), "Succeeded" | "Failed"));
    let owners = metadata.owner_references.as_deref().unwrap_or_default();
    let controller = owners.iter().find(|owner| owner.controller == Some(true));
    let of_node = controller.is_some_and(|owner| owner.kind == "DaemonSet") || is_mirror(metadata);
    if ended || of_node || is_ours(metadata, config) {
        Leaving::Stays
    } else if metadata.deletion_timestamp.is_some() {
        Leaving::OnItsWay
    } else if controller.is_none() && !config.evict_unowned {
        Leaving::Lost
    } else {
        Leaving::Goes
    }
}

/// Returns whether the pod is a mirror pod: a static pod of the kubelet, shown in the API server for information.
fn is_mirror(metadata: &ObjectMeta) -> bool {
    metadata.annotations.as_ref().is_some_and(|all| all.contains_key("kubernetes.io/config.mirror"))
}

fn is_ours(metadata: &ObjectMeta, config: &KubernetesConfig) -> bool {
    let labelled = |name: &str| metadata.labels.as_ref().is_some_and(|all| all.contains_key(&config.own(name)));
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
    fn user_work_goes_what_belongs_to_the_node_stays_and_what_would_be_lost_is_left_to_a_person() {
        let config = KubernetesConfig::default();
        let eager = KubernetesConfig { evict_unowned: true, ..KubernetesConfig::default() };
        let bare = |pod: &mut Value| pod["metadata"]["ownerReferences"] = json!([]);
        assert_eq!(leaving(&pod(|_| {}), &config), Leaving::Goes);
        assert_eq!(leaving(&pod(bare), &config), Leaving::Lost);
        assert_eq!(leaving(&pod(bare), &eager), Leaving::Goes);
        let daemon = pod(|pod| pod["metadata"]["ownerReferences"][0]["kind"] = json!("DaemonSet"));
        assert_eq!(leaving(&daemon, &config), Leaving::Stays);
        let mirror = pod(|pod| pod["metadata"]["annotations"] = json!({ "kubernetes.io/config.mirror": "x" }));
        assert_eq!(leaving(&mirror, &config), Leaving::Stays);
        for phase in ["Succeeded", "Failed"] {
            assert_eq!(leaving(&pod(|pod| pod["status"]["phase"] = json!(phase)), &config), Leaving::Stays);
        }
        let going = pod(|pod| pod["metadata"]["deletionTimestamp"] = json!("2026-11-15T20:00:00Z"));
        assert_eq!(leaving(&going, &config), Leaving::OnItsWay);
        let ours = |namespace: &str| {
            pod(|pod| {
                pod["metadata"]["namespace"] = json!(namespace);
                pod["metadata"]["labels"] = json!({ "cluster-doctor.io/run": "1" });
            })
        };
        assert_eq!(leaving(&ours("cluster-doctor"), &config), Leaving::Stays);
        // Any user may set this label.
        assert_eq!(leaving(&ours("team"), &config), Leaving::Goes);
    }
}
