//! A run as a Volcano job: the same pod, in the form that Volcano's queues and controller expect. Pure.
//!
//! Volcano recreates a disrupted pod. A run must not run twice, so a policy ends the job instead. Volcano jobs have no deadline,
//! so the pod has one. A job is cancelled by a Volcano Command with the action that is final: an aborted job can be resumed, and
//! its TTL never removes it.

use kube::core::{ApiResource, GroupVersionKind};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    config::Volcano,
    names::{DEADLINE_EXCEEDED_REASON, POD_FAILURE_POLICY_REASON},
    objects::{Condition, JobObject, JobSpec, JobStatus, Time},
    read_object::ReadObject,
};

/// A job as Volcano reports it.
pub(super) type VolcanoJob = ReadObject<VolcanoSpec, VolcanoStatus>;

pub(super) const VERSION: &str = "batch.volcano.sh/v1alpha1";
/// The name of the only task.
const TASK: &str = "run";

pub(super) fn job_resource() -> ApiResource {
    ApiResource::from_gvk(&GroupVersionKind::gvk("batch.volcano.sh", "v1alpha1", "Job"))
}

pub(super) fn command_resource() -> ApiResource {
    ApiResource::from_gvk(&GroupVersionKind::gvk("bus.volcano.sh", "v1alpha1", "Command"))
}

/// No field is read: the backend knows what it submitted.
#[derive(Debug, Clone, Default, Deserialize)]
pub(super) struct VolcanoSpec {}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct VolcanoStatus {
    state: VolcanoState,
    conditions: Vec<PhaseCondition>,
    failed: u32,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct VolcanoState {
    phase: String,
    last_transition_time: Option<Time>,
}

/// A phase that the job was in.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PhaseCondition {
    status: String,
    last_transition_time: Option<Time>,
}

/// Converts the Job of a run for Volcano.
pub(super) fn manifest(mut job: Value, volcano: &Volcano) -> Value {
    let spec = &mut job["spec"];
    let mut template = spec["template"].take();
    let pod = &mut template["spec"];
    pod["schedulerName"] = json!(volcano.scheduler);
    pod["activeDeadlineSeconds"] = spec["activeDeadlineSeconds"].take();
    let mut for_volcano = json!({
        "minAvailable": 1, "maxRetry": 1,
        "schedulerName": volcano.scheduler,
        "ttlSecondsAfterFinished": spec["ttlSecondsAfterFinished"].take(),
        "plugins": volcano.plugins,
        "policies": [{ "event": "PodEvicted", "action": "TerminateJob" }],
        "tasks": [{ "name": TASK, "replicas": 1, "template": null }],
    });
    if let Some(class) = pod.get("priorityClassName") {
        for_volcano["priorityClassName"] = class.clone();
    }
    if let Some(queue) = &volcano.queue {
        for_volcano["queue"] = json!(queue);
    }
    for_volcano["tasks"][0]["template"] = template;
    json!({ "apiVersion": VERSION, "kind": "Job", "metadata": job["metadata"].take(), "spec": for_volcano })
}

/// Builds the Command that ends a job. Volcano deletes it once processed; otherwise it is deleted with the job.
pub(super) fn terminate_command(name: &str, namespace: &str, uid: &str) -> Value {
    let target = json!({ "apiVersion": VERSION, "kind": "Job", "name": name, "uid": uid, "controller": true, "blockOwnerDeletion": true });
    json!({
        "apiVersion": "bus.volcano.sh/v1alpha1", "kind": "Command",
        "metadata": { "name": name, "namespace": namespace, "ownerReferences": [target] },
        "action": "TerminateJob", "target": target, "reason": "Cancelled",
    })
}

/// Converts the state of a Volcano job into that of a Kubernetes Job.
pub(super) fn to_job(job: VolcanoJob) -> JobObject {
    let status = job.status.unwrap_or_default();
    let at = status.state.last_transition_time;
    let condition = |kind: &str, reason: &str| Condition {
        kind: kind.to_owned(),
        status: "True".to_owned(),
        reason: reason.to_owned(),
        last_transition_time: at,
        ..Condition::default()
    };
    let conditions = match status.state.phase.as_str() {
        "Completed" => vec![condition("Complete", "")],
        "Failed" => vec![condition("Failed", "")],
        // By us, or because its pod was disrupted.
        "Terminated" => vec![condition("Failed", POD_FAILURE_POLICY_REASON)],
        // By an operator: nothing else aborts jobs.
        "Aborted" => vec![condition("Failed", DEADLINE_EXCEEDED_REASON)],
        "Aborting" | "Terminating" | "Completing" => vec![condition("FailureTarget", "")],
        // It is pending, or its pod has the details.
        _ => Vec::new(),
    };
    let ran = status.conditions.iter().find(|reached| reached.status == "Running");
    let start_time = ran.and_then(|reached| reached.last_transition_time);
    JobObject {
        metadata: job.metadata,
        spec: JobSpec::default(),
        status: Some(JobStatus { conditions, start_time, failed: status.failed }),
    }
}

#[cfg(test)]
mod tests {
    use doctor_core::{
        ids::IdSource,
        run::{JobEnd, ObservedJobState},
    };

    use super::{
        super::{KubernetesConfig, job},
        *,
    };

    fn seen(phase: &str, cancelled: bool) -> ObservedJobState {
        let config = KubernetesConfig::default();
        let annotations = if cancelled { json!({ config.prefixed("cancelled"): "now" }) } else { json!({}) };
        let job = json!({
            "apiVersion": VERSION, "kind": "Job",
            "metadata": { "name": "doctor-x", "creationTimestamp": "2026-11-15T10:00:00Z", "annotations": annotations },
            "spec": { "minAvailable": 1 },
            "status": {
                "state": { "phase": phase, "lastTransitionTime": "2026-11-15T10:05:00Z" },
                "conditions": [{ "status": "Running", "lastTransitionTime": "2026-11-15T10:01:00Z" }],
            },
        });
        let job: VolcanoJob = serde_json::from_value(job).unwrap();
        job::job_state(&to_job(job), &[], IdSource::new(1).run(), &config)
    }

    #[test]
    fn each_phase_maps_to_a_job_state_and_an_unknown_phase_is_not_an_end() {
        for (phase, cancelled, end) in [
            ("Completed", false, JobEnd::Exited),
            ("Failed", false, JobEnd::Lost),
            ("Terminated", false, JobEnd::Preempted),
            ("Terminated", true, JobEnd::Killed),
            ("Aborted", false, JobEnd::Killed),
        ] {
            let seen = seen(phase, cancelled);
            assert!(matches!(&seen, ObservedJobState::Ended { how, .. } if *how == end), "{phase}: {seen:?}");
        }
        for phase in ["Terminating", "Aborting", "Completing"] {
            assert!(matches!(seen(phase, true), ObservedJobState::Running { .. }), "{phase}");
        }
        for phase in ["", "Pending", "Inqueue", "Running"] {
            assert!(matches!(seen(phase, false), ObservedJobState::Pending { .. }), "{phase}: its pod has not begun");
        }
    }

    #[test]
    fn the_pod_template_is_unchanged_and_fields_unknown_to_volcano_are_omitted() {
        let volcano = Volcano { queue: Some("gpu".to_owned()), ..Volcano::default() };
        let job = json!({ "apiVersion": "batch/v1", "kind": "Job", "metadata": { "name": "doctor-x" }, "spec": {
            "backoffLimit": 0, "activeDeadlineSeconds": 60, "ttlSecondsAfterFinished": 5, "podFailurePolicy": {},
            "template": { "metadata": { "labels": { "a": "b" } }, "spec": { "priorityClassName": "low", "containers": [1] } } } });
        let volcano_job = manifest(job, &volcano);
        assert_eq!(volcano_job["apiVersion"], VERSION);
        let mut keys: Vec<&String> = volcano_job["spec"].as_object().unwrap().keys().collect();
        keys.sort();
        let known =
            ["maxRetry", "minAvailable", "plugins", "policies", "priorityClassName", "queue", "schedulerName", "tasks"];
        assert_eq!(keys, [&known[..], &["ttlSecondsAfterFinished"]].concat());
        assert_eq!(
            volcano_job["spec"]["tasks"][0]["template"],
            json!({ "metadata": { "labels": { "a": "b" } }, "spec": {
            "priorityClassName": "low", "containers": [1], "schedulerName": "volcano", "activeDeadlineSeconds": 60 } })
        );
    }
}
