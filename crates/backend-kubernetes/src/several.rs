//! A run over several nodes: one pod on each, and a service by which they find the first. Pure.
//!
//! The job is an indexed one, so that each pod has its rank, and the first a name that the others know before it is there. Which
//! node a pod is on it learns from the cluster, and writes what belongs to that node.

use serde_json::{Value, json};

use doctor_backend::JobRequest;

use super::{
    config::KubernetesConfig,
    names::{RENDEZVOUS, object_name, run_label},
};

/// Makes the job of a run one over all its nodes.
pub(super) fn spread(ours: &mut Value, job: &JobRequest, config: &KubernetesConfig) {
    let (name, nodes) = (object_name(job.run), job.nodes.len());
    let spec = &mut ours["spec"];
    (spec["completions"], spec["parallelism"], spec["completionMode"]) = (json!(nodes), json!(nodes), json!("Indexed"));
    // Which of them it is on, only its place says.
    spec["template"]["metadata"]["annotations"] = json!({});
    let pod = &mut spec["template"]["spec"];
    pod["subdomain"] = json!(name);
    let run = json!({ "matchLabels": { run_label(config): job.run.to_string() } });
    pod["affinity"]["podAntiAffinity"] = json!({ "requiredDuringSchedulingIgnoredDuringExecution": [
        { "labelSelector": run, "topologyKey": "kubernetes.io/hostname" }] });
    if let Some(variables) = pod["containers"][0]["env"].as_array_mut() {
        let secret = json!({ "secretKeyRef": { "name": name, "key": RENDEZVOUS } });
        variables.extend([
            json!({ "name": "DOCTOR_NODE_NAME", "valueFrom": { "fieldRef": { "fieldPath": "spec.nodeName" } } }),
            json!({ "name": "DOCTOR_NODES", "value": nodes.to_string() }),
            // The first pod of an indexed job, in the domain of the service.
            json!({ "name": "DOCTOR_RENDEZVOUS", "value": format!("{name}-0.{name}") }),
            json!({ "name": "DOCTOR_RENDEZVOUS_SECRET", "valueFrom": secret }),
        ]);
    }
}

/// By this the pods of a run find each other, before they are ready. It goes with the job.
pub(super) fn service(job: &JobRequest, uid: &str, config: &KubernetesConfig) -> Value {
    let name = object_name(job.run);
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {
            "name": name, "namespace": config.namespace,
            "labels": { run_label(config): job.run.to_string() },
            "ownerReferences": [{ "apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": uid }],
        },
        "spec": {
            "clusterIP": "None", "publishNotReadyAddresses": true,
            "selector": { run_label(config): job.run.to_string() },
        },
    })
}
