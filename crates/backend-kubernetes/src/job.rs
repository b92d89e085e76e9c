//! Builds the Job of a run, and derives the run's state from the Job and its pods. Pure.

use doctor_backend::JobRequest;
use doctor_checks::result_transport::URL_VARIABLE;
use doctor_core::{
    ids::RunId,
    run::{JobEnd, ObservedJobState},
    time::{Span, Timestamp},
};
use serde_json::{Value, json};

use super::{
    config::{KubernetesConfig, RunAs, Share},
    job_access::JobAccess,
    job_template::Template,
    multi_node,
    names::{
        CONTAINER, DATA_PATH, DEADLINE_EXCEEDED_REASON, HOST_PATH, KEY, KEY_VARIABLE, POD_FAILURE_POLICY_REASON,
        POLICY_PATH, RENDEZVOUS, STATE_PATH, TERMINATION_LOG, job_id, object_name, run_label,
    },
    objects::{Condition, ContainerState, JobObject, PodObject, Quantities, Time},
    volcano,
};

/// How long after a job's limit the cluster ends it, as a backstop for the job itself and the controller. Kubernetes counts from
/// the job's creation, so waiting for a node and for the image is included.
const DEADLINE_MARGIN: Span = Span::minutes(30);

/// Builds the job of a run. It requests all `gpus` of its nodes, so that the scheduler places no other GPU work there.
pub(super) fn manifest(
    job: &JobRequest,
    gpus: &Quantities,
    cordoned_by_us: bool,
    template: &Template,
    config: &KubernetesConfig,
) -> Value {
    let labels = json!({ run_label(config): job.run.to_string(), "app.kubernetes.io/name": "cluster-doctor" });
    let data = match &config.share {
        Share::None => None,
        Share::Claim(claim) => Some(json!({ "persistentVolumeClaim": { "claimName": claim } })),
        Share::HostPath(path) => Some(json!({ "hostPath": { "path": path, "type": "DirectoryOrCreate" } })),
    };
    let (mut volumes, mut mounts) = (Vec::new(), Vec::new());
    if let Some(mut volume) = data {
        volume["name"] = json!("data");
        volumes.push(volume);
        mounts.push(json!({ "name": "data", "mountPath": DATA_PATH }));
    }
    volumes.push(json!({ "name": "state", "hostPath": { "path": STATE_PATH, "type": "DirectoryOrCreate" } }));
    mounts.push(json!({ "name": "state", "mountPath": STATE_PATH }));
    if let Some(map) = &config.policy_map {
        volumes.push(json!({ "name": "policy", "configMap": { "name": map } }));
        mounts.push(json!({ "name": "policy", "mountPath": POLICY_PATH, "readOnly": true }));
    }
    let access = JobAccess::new(&job.access, template.requests_devices(config), config);
    let mut variables = vec![json!({
        "name": KEY_VARIABLE, "valueFrom": { "secretKeyRef": { "name": object_name(job.run), "key": KEY } },
    })];
    variables.extend(job.results.iter().map(|url| json!({ "name": URL_VARIABLE, "value": url })));
    let container = json!({
        "name": CONTAINER,
        "command": command(job, access.has_host(), config),
        "terminationMessagePath": TERMINATION_LOG, "terminationMessagePolicy": "File",
        "env": variables,
        "resources": { "limits": gpus },
        "volumeMounts": mounts,
    });
    // The terms are alternatives, because a field has one value.
    let pinned = |node| json!({ "matchFields": [{ "key": "metadata.name", "operator": "In", "values": [node] }] });
    let pinned: Vec<Value> = job.nodes.iter().map(pinned).collect();
    let mut pod = json!({
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": config.grace.millis() / 1000,
        "affinity": { "nodeAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": pinned } } },
        "tolerations": tolerations(cordoned_by_us, config),
        "containers": [container],
        "volumes": volumes,
    });
    access.apply(&mut pod);
    if let Some(class) = &config.priority_class {
        pod["priorityClassName"] = json!(class);
    }
    if let Some(account) = &config.service_account {
        pod["serviceAccountName"] = json!(account);
    }
    let mut ours = json!({
        "apiVersion": "batch/v1", "kind": "Job",
        "metadata": { "name": object_name(job.run), "namespace": config.namespace, "labels": labels },
        "spec": {
            "backoffLimit": 0, "completions": 1, "parallelism": 1,
            "activeDeadlineSeconds": (job.limit.millis() + DEADLINE_MARGIN.millis()) / 1000,
            "ttlSecondsAfterFinished": config.keep.millis() / 1000,
            // Records in the Job itself that its pod was disrupted, because the pod may be deleted.
            "podFailurePolicy": { "rules": [
                { "action": "FailJob", "onPodConditions": [{ "type": "DisruptionTarget", "status": "True" }] } ] },
            "template": {
                "metadata": { "labels": labels, "annotations": { config.prefixed("node"): job.nodes.first() } },
                "spec": pod,
            },
        },
    });
    if job.nodes.len() > 1 {
        multi_node::make_indexed(&mut ours, job, config);
    }
    let job = template.fill(template_defaults(config), ours);
    match &config.run_as {
        RunAs::Job => job,
        RunAs::Volcano(volcano) => volcano::manifest(job, volcano),
    }
}

/// Defaults that a template may override.
fn template_defaults(config: &KubernetesConfig) -> Value {
    let container = json!({ "name": CONTAINER, "image": config.image, "imagePullPolicy": config.image_pull_policy });
    let pod = json!({ "automountServiceAccountToken": false, "containers": [container] });
    json!({ "spec": { "template": { "spec": pod } } })
}

/// Returns the tolerations: our taints, those that every node of its kind has, and our own cordon, which keeps other work off a
/// node under requalification. If an operator cordons the node before the pod is scheduled, the pod is not placed there.
fn tolerations(cordoned_by_us: bool, config: &KubernetesConfig) -> Vec<Value> {
    let mut keys = vec![config.prefixed("unhealthy"), config.prefixed("maintenance")];
    keys.extend(cordoned_by_us.then(|| "node.kubernetes.io/unschedulable".to_owned()));
    keys.iter().chain(&config.usual_taints).map(|key| json!({ "key": key, "operator": "Exists" })).collect()
}

fn command(job: &JobRequest, has_host: bool, config: &KubernetesConfig) -> Vec<String> {
    let tests = job.tests.iter().map(|test| test.as_str()).collect::<Vec<_>>().join(",");
    let mut command: Vec<String> = vec!["doctor-node".into(), "job".into(), "--run".into(), job.run.to_string()];
    command.extend([
        "--tests".into(),
        tests,
        "--limit".into(),
        job.limit.to_string(),
        "--state".into(),
        STATE_PATH.into(),
    ]);
    if has_host {
        command.extend(["--root".into(), HOST_PATH.into()]);
    }
    if config.policy_map.is_some() {
        command.extend(["--policy".into(), format!("{POLICY_PATH}/policy.toml")]);
    }
    if config.share == Share::None {
        command.extend(["--carry".into(), TERMINATION_LOG.into()]);
    }
    for output in &job.outputs {
        command.extend(["--node".into(), output.node.to_string()]);
        if config.share == Share::None {
            continue;
        }
        let in_data = |path: &std::path::Path| std::path::Path::new(DATA_PATH).join(path).display().to_string();
        for log in &output.logs {
            command.extend(["--log".into(), in_data(log)]);
        }
        command.extend(["--document".into(), in_data(&output.document)]);
    }
    command
}

/// Builds the secret with the job's signing key. It is deleted with the job.
pub(super) fn secret(job: &JobRequest, uid: &str, config: &KubernetesConfig) -> Value {
    let owner = match config.run_as {
        RunAs::Job => "batch/v1",
        RunAs::Volcano(_) => volcano::VERSION,
    };
    json!({
        "apiVersion": "v1", "kind": "Secret", "type": "Opaque",
        "metadata": {
            "name": object_name(job.run), "namespace": config.namespace,
            "labels": { run_label(config): job.run.to_string() },
            "ownerReferences": [{ "apiVersion": owner, "kind": "Job", "name": object_name(job.run), "uid": uid }],
        },
        "stringData": { KEY: job.key.to_hex(), RENDEZVOUS: job.key.rendezvous_secret() },
    })
}

/// Builds the patch that cancels a job; Volcano also needs a command. The job remains, with its end, until it is removed like any
/// other. `is_pending`: its pod has not started, which cannot be seen any more once the pod is gone.
pub(super) fn cancel_patch(config: &KubernetesConfig, now: Timestamp, is_pending: bool) -> Value {
    let mut patch = json!({ "metadata": { "annotations": { config.prefixed("cancelled"): now.to_string() } } });
    if is_pending {
        patch["metadata"]["annotations"][config.prefixed(CANCELLED_PENDING)] = json!("true");
    }
    if config.run_as == RunAs::Job {
        patch["spec"] = json!({ "activeDeadlineSeconds": 0 });
    }
    patch
}

/// The annotation of a job that was cancelled before its pod started.
const CANCELLED_PENDING: &str = "cancelled-pending";

/// Returns whether there are pods and our program has started in none of them.
pub(super) fn is_pending(pods: &[PodObject]) -> bool {
    let has_begun = |state: &ContainerState| state.running.is_some() || state.terminated.is_some();
    !pods.is_empty() && !pods.iter().any(|pod| program_state(pod).is_some_and(has_begun))
}

/// Returns the state of a job, from the Job object and its pods.
pub(super) fn job_state(
    job: &JobObject,
    pods: &[PodObject],
    run: RunId,
    config: &KubernetesConfig,
) -> ObservedJobState {
    let job_id = job_id(config, run);
    let created = job.metadata.creation_timestamp.as_ref().map(|time| Timestamp::from_millis(time.0.as_millisecond()));
    let since = created.unwrap_or(Timestamp::MIN);
    let conditions = job.status.as_ref().map_or(&[][..], |status| &status.conditions);
    let terminated = pods.iter().find_map(|pod| program_state(pod)?.terminated.as_ref());
    let running = pods.iter().find_map(|pod| program_state(pod)?.running.as_ref());
    let started = terminated
        .and_then(|end| end.started_at)
        .or_else(|| running.and_then(|running| running.started_at))
        .map(Time::timestamp)
        // Some container runtimes report a start in 1970 for a container that could not be started.
        .filter(|at| *at >= since);
    let status = job.status.as_ref();
    let begun = status.and_then(|status| status.start_time).map(Time::timestamp);
    let ended = |condition: &Condition, how, started: Option<Timestamp>| {
        let at = condition.last_transition_time.map_or(since, Time::timestamp);
        let at = terminated.and_then(|end| end.finished_at).map_or(at, Time::timestamp);
        ObservedJobState::Ended { job: job_id.clone(), started, at: at.max(started.unwrap_or(at)), how }
    };
    let was_pending =
        job.metadata.annotations.as_ref().is_some_and(|all| all.contains_key(&config.prefixed(CANCELLED_PENDING)));
    let never_ran = is_pending(pods) || (pods.is_empty() && was_pending);
    if let Some(complete) = conditions.iter().find(|condition| condition.matches("Complete", "True")) {
        // Its pod may be gone already, but it certainly ran.
        return ended(complete, JobEnd::Exited, started.or(begun));
    }
    if let Some(failed) = conditions.iter().find(|condition| condition.matches("Failed", "True")) {
        // A failed pod that is gone may have run; its absence proves nothing.
        let is_gone = pods.is_empty() && status.is_some_and(|status| status.failed > 0);
        let may_have_run = begun.filter(|_| is_gone && !was_pending);
        // A pod that is being deleted was ended from outside: the end of its container is not that of the program.
        let mut not_deleted = pods.iter().filter(|pod| pod.metadata.deletion_timestamp.is_none());
        let ended_itself = not_deleted.any(|pod| program_state(pod).is_some_and(|state| state.terminated.is_some()));
        return ended(failed, job_end(job, failed, ended_itself, config), started.or(may_have_run));
    }
    let cancelled =
        job.metadata.annotations.as_ref().is_some_and(|all| all.contains_key(&config.prefixed("cancelled")));
    if job.spec.suspend && cancelled && pods.is_empty() {
        // The job controller does not end a suspended job, which runs nothing.
        return ObservedJobState::Ended { job: job_id, started: None, at: since, how: JobEnd::Killed };
    }
    if conditions.iter().any(|one| one.matches("FailureTarget", "True") || one.matches("SuccessCriteriaMet", "True")) {
        // The outcome is decided, and its last pod is being removed. A pod that is still there and has no container state
        // never ran; one that is gone may have run.
        return match never_ran {
            true => ObservedJobState::Pending { job: job_id, since },
            false => ObservedJobState::Running { job: job_id, since: started.or(begun).unwrap_or(since) },
        };
    }
    match (running, terminated) {
        (Some(_), _) => ObservedJobState::Running { job: job_id, since: started.unwrap_or(since) },
        // The container has ended, and the job controller has not recorded it yet.
        (None, Some(_)) => ObservedJobState::Running { job: job_id, since: started.unwrap_or(since) },
        (None, None) => ObservedJobState::Pending { job: job_id, since },
    }
}

/// Returns the state of the container in which our program runs.
fn program_state(pod: &PodObject) -> Option<&ContainerState> {
    let containers = &pod.status.as_ref()?.container_statuses;
    containers.iter().find(|of| of.name == CONTAINER).map(|of| &of.state)
}

fn job_end(job: &JobObject, failed: &Condition, ended_itself: bool, config: &KubernetesConfig) -> JobEnd {
    let cancelled =
        job.metadata.annotations.as_ref().is_some_and(|all| all.contains_key(&config.prefixed("cancelled")));
    match failed.reason.as_str() {
        // Preempted, evicted, or its node was deleted.
        POD_FAILURE_POLICY_REASON if !cancelled => JobEnd::Preempted,
        DEADLINE_EXCEEDED_REASON | POD_FAILURE_POLICY_REASON => JobEnd::Killed,
        _ if cancelled => JobEnd::Killed,
        _ if ended_itself => JobEnd::Failed,
        // No container status remains to tell how it ended.
        _ => JobEnd::Lost,
    }
}

#[cfg(test)]
mod tests {
    use doctor_core::ids::IdSource;

    use super::*;

    #[test]
    fn a_cancelled_job_whose_pod_was_never_scheduled_has_not_started() {
        let job = json!({ "apiVersion": "batch/v1", "kind": "Job", "metadata": { "name": "j" }, "spec": {},
            "status": { "startTime": "2026-11-17T17:02:50Z",
                "conditions": [{ "type": "FailureTarget", "status": "True", "reason": "DeadlineExceeded" }] } });
        let job: JobObject = serde_json::from_value(job).unwrap();
        let pod = |state: Value| -> PodObject {
            let pod = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "p" }, "spec": { "containers": [] },
                "status": { "phase": "Pending", "containerStatuses": state } });
            serde_json::from_value(pod).unwrap()
        };
        let run = IdSource::new(1).run();
        let state = |pods: &[PodObject]| job_state(&job, pods, run, &KubernetesConfig::default());
        assert!(matches!(state(&[pod(json!([]))]), ObservedJobState::Pending { .. }));
        assert!(matches!(state(&[]), ObservedJobState::Running { .. }), "its pod may have run");
        let patch = cancel_patch(&KubernetesConfig::default(), Timestamp::from_secs(1), true);
        let failed = json!({ "type": "Failed", "status": "True", "reason": "DeadlineExceeded" });
        let cancelled = json!({ "apiVersion": "batch/v1", "kind": "Job", "spec": {}, "metadata": patch["metadata"],
            "status": { "startTime": "2026-11-17T17:02:50Z", "failed": 1, "conditions": [failed] } });
        let cancelled: JobObject = serde_json::from_value(cancelled).unwrap();
        let end = job_state(&cancelled, &[], run, &KubernetesConfig::default());
        assert!(matches!(end, ObservedJobState::Ended { started: None, how: JobEnd::Killed, .. }), "{end:?}");
        let running = json!([{ "name": CONTAINER, "state": { "running": { "startedAt": "2026-11-17T17:02:51Z" } } }]);
        assert!(matches!(state(&[pod(running)]), ObservedJobState::Running { .. }));
    }

    #[test]
    fn a_deleted_pod_makes_the_job_lost_not_failed() {
        let condition = json!({ "type": "Failed", "status": "True", "reason": "BackoffLimitExceeded" });
        let job = json!({ "apiVersion": "batch/v1", "kind": "Job", "metadata": { "name": "j" }, "spec": {},
            "status": { "conditions": [condition] } });
        let job: JobObject = serde_json::from_value(job).unwrap();
        let end = json!({ "exitCode": 143, "startedAt": "2026-11-17T17:02:50Z", "finishedAt": "2026-11-17T17:02:51Z" });
        let pod = |deleted: Option<&str>| -> PodObject {
            let pod = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "p", "deletionTimestamp": deleted },
                "spec": { "containers": [] },
                "status": { "containerStatuses": [{ "name": CONTAINER, "state": { "terminated": end } }] } });
            serde_json::from_value(pod).unwrap()
        };
        let run = IdSource::new(1).run();
        let how = |pods: &[PodObject]| match job_state(&job, pods, run, &KubernetesConfig::default()) {
            ObservedJobState::Ended { how, .. } => how,
            other => panic!("{other:?}"),
        };
        assert_eq!(how(&[pod(None)]), JobEnd::Failed);
        assert_eq!(how(&[pod(Some("2026-11-17T17:03:20Z"))]), JobEnd::Lost);
        assert_eq!(how(&[]), JobEnd::Lost);
    }
}
