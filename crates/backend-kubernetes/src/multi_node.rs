//! A multi-node run: one pod on each node, and a service by which they find the first. Pure.
//!
//! The job is indexed, so that each pod has a rank, and the first pod a DNS name that the others know before it exists. Each pod
//! learns its node's name from the cluster and writes the outputs of that node.

use serde_json::{Value, json};

use doctor_backend::JobRequest;

use super::{
    config::KubernetesConfig,
    names::{RENDEZVOUS, object_name, run_label},
};

/// Turns the job of a run into an indexed one over all its nodes.
pub(super) fn make_indexed(ours: &mut Value, job: &JobRequest, config: &KubernetesConfig) {
    let (name, nodes) = (object_name(job.run), job.nodes.len());
    let spec = &mut ours["spec"];
    (spec["completions"], spec["parallelism"], spec["completionMode"]) = (json!(nodes), json!(nodes), json!("Indexed"));
    // A pod's node is known only once it is scheduled.
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
            // The first pod of an indexed job, in the subdomain of the service.
            json!({ "name": "DOCTOR_RENDEZVOUS", "value": format!("{name}-0.{name}") }),
            json!({ "name": "DOCTOR_RENDEZVOUS_SECRET", "valueFrom": secret }),
        ]);
    }
}

/// Builds the headless service by which the pods of a run find each other before they are ready. It is deleted with the job.
pub(super) fn headless_service(job: &JobRequest, uid: &str, config: &KubernetesConfig) -> Value {
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
