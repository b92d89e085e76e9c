//! What is left of a job without a result: the states of its pods' containers in the kubelet's words, the events of a pod that
//! never started, and the end of the log.

use std::time::{Duration, Instant};

use doctor_backend::{BackendError, MAX_REMAINING_OUTPUT};
use doctor_checks::result_transport;
use doctor_core::{
    ids::NodeName,
    last_output::{LastOutput, end_of},
    run::Run,
};
use hyper::http::Request;
use kube::{ResourceExt, api::ListParams};
use serde::{Deserialize, de::DeserializeOwned};

use super::{
    cluster::{KubeRequestError, KubernetesBackend},
    names,
    objects::{ContainerStatus, PodObject, PodStatus, pod_resource},
};

const OPERATION: &str = "read the output of a job";
/// The limit for one request, and for all requests about one run: an unreachable kubelet must not delay the cycle.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(6);
const RUN_TIMEOUT: Duration = Duration::from_secs(15);
/// How much of the end of a log is requested. The API server counts the bytes from the first of these lines, so that it would cut
/// the end of long ones: it is asked for more than is kept.
const LOG_LINES: u32 = 200;
const LOG_BYTES: usize = 1 << 20;
/// The events of one pod that are read, and the newest that are kept.
const MAX_EVENTS: u32 = 100;
const KEPT_EVENTS: usize = 3;

/// An event of a pod, such as `FailedScheduling` or `FailedMount`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Event {
    #[serde(rename = "type")]
    kind: String,
    reason: String,
    message: String,
    last_timestamp: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Events {
    items: Vec<Event>,
}

impl KubernetesBackend {
    pub(super) fn remaining_output_of(&self, run: &Run) -> Result<Vec<LastOutput>, BackendError> {
        let until = Instant::now() + RUN_TIMEOUT;
        let label = format!("{}={}", names::run_label(&self.config), run.id);
        let api = self.jobs::<PodObject>(&pod_resource());
        let pods = self.request_within(OPERATION, REQUEST_TIMEOUT, api.list(&ListParams::default().labels(&label)))?;
        let mut outputs: Vec<LastOutput> = Vec::new();
        for pod in &pods.items {
            // A pod without a node is shown under the first node that has nothing yet.
            let free = || run.nodes.iter().find(|node| outputs.iter().all(|output| output.node != **node)).cloned();
            let node = pod.spec.node_name.as_ref().and_then(|name| NodeName::new(name).ok());
            if let Some(node) = node.filter(|node| run.nodes.contains(node)).or_else(free) {
                outputs.push(self.output_of_pod(pod, node, until));
            }
        }
        if outputs.is_empty() {
            // The pods are gone. The log may have been fetched before.
            let logs = self.pod_results.logs(run.id).into_iter();
            outputs.extend(logs.map(|(node, text)| LastOutput { node, ending: None, text }));
        }
        if outputs.iter().all(|output| output.ending.is_none()) {
            let ending = self.ending_of_job(run)?;
            if outputs.is_empty() && ending.is_some() {
                outputs.push(LastOutput { node: run.nodes.first().clone(), ending: None, text: String::new() });
            }
            outputs.iter_mut().for_each(|output| output.ending.clone_from(&ending));
        }
        Ok(outputs)
    }

    /// Returns why the job failed, in the job controller's words: for pods that are gone, or say nothing.
    fn ending_of_job(&self, run: &Run) -> Result<Option<String>, BackendError> {
        let jobs = self.list_runs()?;
        let job = jobs.into_iter().find(|job| names::run_of(&job.metadata, &self.config) == Some(run.id));
        let conditions = job.and_then(|job| job.status).map(|status| status.conditions).unwrap_or_default();
        let failed = ["Failed", "FailureTarget"];
        let failed = conditions.iter().find(|condition| failed.iter().any(|kind| condition.matches(kind, "True")));
        Ok(failed.map(|failed| format!("Job {}: {}", failed.reason, failed.message)))
    }

    fn output_of_pod(&self, pod: &PodObject, node: NodeName, until: Instant) -> LastOutput {
        let status = pod.status.clone().unwrap_or_default();
        let mut endings = container_endings(&status);
        let mut text = String::new();
        if has_run(&status) {
            match self.log_end(pod, until) {
                Ok(log) => text = log,
                // The API server has no log of a container that could not be started.
                Err(KubeRequestError { code: Some(400 | 404), .. }) => {}
                Err(failed) => endings.push(format!("its log could not be read: {}", failed.error.text)),
            }
        } else {
            match self.events_of(pod, until) {
                Ok(events) => text = event_lines(events),
                Err(failed) => endings.push(format!("its events could not be read: {}", failed.error.text)),
            }
        }
        // The runtime's message says why a container could not be started.
        for message in messages(&status) {
            text.push_str(&message);
            text.push('\n');
        }
        LastOutput { node, ending: (!endings.is_empty()).then(|| endings.join("; ")), text }
    }

    fn log_end(&self, pod: &PodObject, until: Instant) -> Result<String, KubeRequestError> {
        let path = format!(
            "/api/v1/namespaces/{}/pods/{}/log?container={}&tailLines={LOG_LINES}&limitBytes={LOG_BYTES}",
            self.config.namespace,
            pod.name_any(),
            names::CONTAINER
        );
        let log = self.request_within(OPERATION, limit(until), async {
            let request = Request::get(path).body(Vec::new()).map_err(kube::Error::HttpError)?;
            self.client.request_text(request).await
        })?;
        let log = result_transport::split_log(&log).0;
        Ok(end_of(log, usize::try_from(MAX_REMAINING_OUTPUT).unwrap_or(usize::MAX)).to_owned())
    }

    fn events_of(&self, pod: &PodObject, until: Instant) -> Result<Vec<Event>, KubeRequestError> {
        let path = format!(
            "/api/v1/namespaces/{}/events?fieldSelector=involvedObject.name%3D{}&limit={MAX_EVENTS}",
            self.config.namespace,
            pod.name_any()
        );
        self.get::<Events>(&path, limit(until)).map(|events| events.items)
    }

    fn get<T: DeserializeOwned>(&self, path: &str, limit: Duration) -> Result<T, KubeRequestError> {
        self.request_within(OPERATION, limit, async {
            let request = Request::get(path).body(Vec::new()).map_err(kube::Error::HttpError)?;
            self.client.request::<T>(request).await
        })
    }
}

/// Returns the time left for one request. With none left, a request fails at once.
fn limit(until: Instant) -> Duration {
    until.saturating_duration_since(Instant::now()).min(REQUEST_TIMEOUT)
}

fn containers(status: &PodStatus) -> impl Iterator<Item = &ContainerStatus> {
    status.init_container_statuses.iter().chain(&status.container_statuses)
}

/// Returns whether our program may have run, so that there is a log.
fn has_run(status: &PodStatus) -> bool {
    let ours = status.container_statuses.iter().find(|container| container.name == names::CONTAINER);
    ours.is_some_and(|ours| ours.state.running.is_some() || ours.state.terminated.is_some())
}

/// Returns how the containers and the pod ended, or what they wait for.
fn container_endings(status: &PodStatus) -> Vec<String> {
    let mut endings = Vec::new();
    for container in containers(status) {
        let state = &container.state;
        let ending = match (&state.waiting, &state.terminated) {
            (Some(waiting), _) if !waiting.reason.is_empty() => waiting.reason.clone(),
            (_, Some(end)) if end.signal != 0 => format!("{}, signal {}", end.reason, end.signal),
            (_, Some(end)) => format!("{}, exit code {}", end.reason, end.exit_code),
            _ => continue,
        };
        // Most pods have one container, which needs no name.
        let name = (container.name != names::CONTAINER).then(|| format!("container {}: ", container.name));
        endings.push(format!("{}{ending}", name.unwrap_or_default()));
    }
    if !status.reason.is_empty() {
        endings.push(match status.message.is_empty() {
            true => format!("pod {}", status.reason),
            false => format!("pod {}: {}", status.reason, status.message),
        });
    }
    let unscheduled = status.conditions.iter().find(|condition| condition.matches("PodScheduled", "False"));
    endings.extend(unscheduled.map(|condition| format!("{}: {}", condition.reason, condition.message)));
    endings
}

/// Returns the messages of the runtime about containers: why an image was not pulled or a program not started. A result document
/// in a termination message is none.
fn messages(status: &PodStatus) -> Vec<String> {
    let mut messages = Vec::new();
    for container in containers(status) {
        let state = &container.state;
        let waiting = state.waiting.as_ref().map(|waiting| waiting.message.as_str());
        let ended = state.terminated.as_ref().map(|end| end.message.as_str());
        let ended = ended.filter(|message| result_transport::parse_termination_message(message).is_err());
        messages
            .extend(waiting.into_iter().chain(ended).filter(|message| !message.trim().is_empty()).map(str::to_owned));
    }
    messages
}

/// Formats the newest warnings, one line each, the newest last.
fn event_lines(mut events: Vec<Event>) -> String {
    events.retain(|event| event.kind == "Warning");
    // The times are in one format, which sorts as text.
    events.sort_by(|a, b| a.last_timestamp.cmp(&b.last_timestamp));
    let skipped = events.len().saturating_sub(KEPT_EVENTS);
    events.iter().skip(skipped).map(|event| format!("{}: {}\n", event.reason, event.message)).collect()
}

#[cfg(test)]
mod tests {
    use doctor_checks::result_transport::PackedDocument;
    use serde_json::{Value, json};

    use super::*;

    /// States as a kubelet of Kubernetes 1.34 reports them, shortened by hand.
    fn status(state: &Value) -> PodStatus {
        let container = json!({ "name": "doctor-node", "state": state });
        serde_json::from_value(json!({ "phase": "Failed", "containerStatuses": [container] })).unwrap()
    }

    #[test]
    fn each_way_to_die_has_an_ending_and_the_message_of_the_runtime() {
        let pull = "Back-off pulling image \"x\": ErrImagePull: not found";
        let exec = "runc create failed: exec: \"doctor-node\": executable file not found in $PATH";
        for (state, ran, ending, message) in [
            (json!({ "waiting": { "reason": "ImagePullBackOff", "message": pull } }), false, "ImagePullBackOff", pull),
            (
                json!({ "terminated": { "exitCode": 128, "reason": "StartError", "message": exec } }),
                true,
                "StartError, exit code 128",
                exec,
            ),
            (json!({ "terminated": { "exitCode": 137, "reason": "OOMKilled" } }), true, "OOMKilled, exit code 137", ""),
            (json!({ "terminated": { "exitCode": 0, "signal": 9, "reason": "Error" } }), true, "Error, signal 9", ""),
        ] {
            let status = status(&state);
            assert_eq!(container_endings(&status), [ending]);
            assert_eq!((has_run(&status), messages(&status).concat().as_str()), (ran, message), "{ending}");
        }
        assert!(container_endings(&status(&json!({ "running": {} }))).is_empty());
    }

    #[test]
    fn a_result_document_is_no_message_and_other_containers_are_named() {
        let document = PackedDocument::pack(b"a document").unwrap().to_termination_message();
        let ended = status(&json!({ "terminated": { "exitCode": 1, "reason": "Error", "message": document } }));
        assert!(messages(&ended).is_empty());
        let injected: PodStatus = serde_json::from_value(json!({
            "phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory.",
            "initContainerStatuses": [{ "name": "mesh", "state": { "terminated": { "exitCode": 2, "reason": "Error" } } }],
        }))
        .unwrap();
        let expected = ["container mesh: Error, exit code 2", "pod Evicted: The node was low on resource: memory."];
        assert_eq!(container_endings(&injected), expected);
        let pending: PodStatus = serde_json::from_value(json!({ "phase": "Pending", "conditions": [{
            "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available" }] }))
        .unwrap();
        assert_eq!(container_endings(&pending), ["Unschedulable: 0/3 nodes are available"]);
    }

    #[test]
    fn the_newest_warnings_are_kept_in_order() {
        let event = |kind: &str, at: u32, message: &str| Event {
            kind: kind.to_owned(),
            reason: "FailedMount".to_owned(),
            message: message.to_owned(),
            last_timestamp: Some(format!("2026-11-18T10:00:0{at}Z")),
        };
        let events = vec![
            event("Warning", 4, "d"),
            event("Normal", 5, "pulled"),
            event("Warning", 1, "a"),
            event("Warning", 3, "c"),
            event("Warning", 2, "b"),
        ];
        assert_eq!(event_lines(events), "FailedMount: b\nFailedMount: c\nFailedMount: d\n");
    }
}
