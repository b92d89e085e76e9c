//! Takes results and logs from pods before they are deleted, where jobs and controller share no directory.
//!
//! A pod that ended by itself remains until its job is removed, and the next poll sees it. A pod that was deleted disappears
//! as soon as it has ended; the watch of failed pods reports it in time. The result document is in the container's termination
//! message, which outlives the node, or, if it is too long for that, in the log, which only the node has. What cannot be fetched
//! in time is lost, and the run reports that.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use doctor_checks::result_transport::{self, TerminationMessage};
use doctor_core::ids::{NodeName, RunId};
use hyper::http::Request;
use kube::{Client, ResourceExt};

use super::{
    KubernetesConfig, names,
    objects::{PodObject, Terminated},
};

/// How much of the end of a log is fetched for operators.
const LOG_LINES: usize = 20_000;
const LOG_BYTES: usize = 4 << 20;
/// How many lines may follow the document in the log.
const LINES_AFTER_DOCUMENT: usize = 8;
/// Longer than any line of a document.
const LINE_BYTES: usize = 4096;
/// The maximum number of pods whose results are held. More are never active.
const MAX_PODS: usize = 1024;
/// A document waits for its log at most this long: a kubelet that is busy may not serve the log of a container that has just
/// ended, and a run whose document was handed over is not polled again. Much less than `limits.result_grace`.
const LOG_PATIENCE: Duration = Duration::from_secs(20);

/// Results taken from pods, by run and pod.
#[derive(Debug, Default)]
pub(super) struct PodResults(Mutex<BTreeMap<(RunId, String), PodResult>>);

#[derive(Debug, Clone)]
struct PodResult {
    node: NodeName,
    document: Option<Vec<u8>>,
    /// How many lines of the log the document has, until it is fetched.
    log_lines: Option<usize>,
    log: LogState,
    seen: Instant,
}

impl PodResult {
    /// Returns the document, unless it still waits for its log.
    fn document(&self, patience: Duration) -> Option<&Vec<u8>> {
        let is_waiting = self.log == LogState::Pending && self.seen.elapsed() < patience;
        self.document.as_ref().filter(|_| !is_waiting)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum LogState {
    Pending,
    Fetched(String),
    Gone,
}

/// A log to be fetched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LogFetch {
    pub(super) run: RunId,
    pub(super) pod: String,
    log_lines: Option<usize>,
}

impl PodResults {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<(RunId, String), PodResult>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the result from a pod of ours that has ended. Returns the log that is still to be fetched, if any.
    pub(super) fn take_from(&self, pod: &PodObject, config: &KubernetesConfig) -> Option<LogFetch> {
        let run = names::run_of(&pod.metadata, config)?;
        let end = container_end(pod)?;
        let node = NodeName::new(pod.spec.node_name.as_ref()?).ok()?;
        let mut all = self.lock();
        let key = (run, pod.name_any());
        if all.len() >= MAX_PODS && !all.contains_key(&key) {
            return None;
        }
        let entry = all.entry(key).or_insert_with(|| {
            let (document, in_log) = match result_transport::parse_termination_message(&end.message) {
                Ok(TerminationMessage::Document(document)) => (Some(document), None),
                Ok(TerminationMessage::InLog { lines }) => (None, Some(lines)),
                Err(why) => {
                    tracing::warn!(run = %run, pod = pod.name_any(), %why, "job left no result");
                    (None, None)
                }
            };
            PodResult { node, document, log_lines: in_log, log: LogState::Pending, seen: Instant::now() }
        });
        let log_fetch = LogFetch { run, pod: pod.name_any(), log_lines: entry.log_lines };
        (entry.log == LogState::Pending || entry.log_lines.is_some()).then_some(log_fetch)
    }

    fn store(&self, log_fetch: &LogFetch, fetched: FetchedLog) {
        let mut all = self.lock();
        let Some(entry) = all.get_mut(&(log_fetch.run, log_fetch.pod.clone())) else { return };
        match fetched {
            FetchedLog::Log { document, text } => {
                if document.is_some() {
                    (entry.document, entry.log_lines) = (document, None);
                }
                entry.log = LogState::Fetched(text);
            }
            FetchedLog::Gone => (entry.log, entry.log_lines) = (LogState::Gone, None),
        }
    }

    /// Drops the results of all other runs.
    pub(super) fn retain_runs(&self, runs: &BTreeSet<RunId>) {
        self.lock().retain(|(run, _), _| runs.contains(run));
    }

    /// Returns whether a pod of the run has ended.
    pub(super) fn has_run(&self, run: RunId) -> bool {
        !self.for_run(run, |_| Some(())).is_empty()
    }

    pub(super) fn documents(&self, run: RunId) -> Vec<Vec<u8>> {
        self.documents_within(run, LOG_PATIENCE)
    }

    fn documents_within(&self, run: RunId, patience: Duration) -> Vec<Vec<u8>> {
        self.for_run(run, |entry| entry.document(patience).cloned())
    }

    pub(super) fn logs(&self, run: RunId) -> Vec<(NodeName, String)> {
        self.for_run(run, |entry| match &entry.log {
            LogState::Fetched(text) => Some((entry.node.clone(), text.clone())),
            LogState::Pending | LogState::Gone => None,
        })
    }

    fn for_run<T>(&self, run: RunId, take: impl Fn(&PodResult) -> Option<T>) -> Vec<T> {
        let all = self.lock();
        all.range((run, String::new())..)
            .take_while(|((of, _), _)| *of == run)
            .filter_map(|(_, one)| take(one))
            .collect()
    }
}

enum FetchedLog {
    Log {
        document: Option<Vec<u8>>,
        text: String,
    },
    /// The API server no longer has it.
    Gone,
}

/// Returns the end of the job's container, if it has ended.
fn container_end(pod: &PodObject) -> Option<&Terminated> {
    let statuses = &pod.status.as_ref()?.container_statuses;
    statuses.iter().find(|container| container.name == names::CONTAINER)?.state.terminated.as_ref()
}

/// Fetches and stores a log. After an error the caller may retry.
pub(super) async fn fetch(
    client: &Client,
    config: &KubernetesConfig,
    pod_results: &PodResults,
    log_fetch: &LogFetch,
) -> kube::Result<()> {
    let fetched = match fetch_document_and_log(client, config, log_fetch).await {
        Err(kube::Error::Api(status)) if status.code == 404 => FetchedLog::Gone,
        other => other?,
    };
    pod_results.store(log_fetch, fetched);
    Ok(())
}

async fn fetch_document_and_log(
    client: &Client,
    config: &KubernetesConfig,
    log_fetch: &LogFetch,
) -> kube::Result<FetchedLog> {
    let ask = |lines: usize, bytes: usize| {
        let (namespace, pod) = (&config.namespace, &log_fetch.pod);
        let path = format!(
            "/api/v1/namespaces/{namespace}/pods/{pod}/log?container={}&tailLines={lines}&limitBytes={bytes}",
            names::CONTAINER
        );
        async move {
            let request = Request::get(path).body(Vec::new()).map_err(kube::Error::HttpError)?;
            client.request_text(request).await
        }
    };
    let mut document = None;
    // Request only the end, so that earlier output does not exceed the limit.
    if let Some(lines) = log_fetch.log_lines {
        let lines = lines + LINES_AFTER_DOCUMENT;
        match result_transport::extract_from_log(&ask(lines, lines * LINE_BYTES).await?) {
            Ok(found) => document = Some(found),
            Err(why) => {
                tracing::warn!(run = %log_fetch.run, pod = log_fetch.pod, %why, "result missing from the job log");
            }
        }
    }
    let text = ask(LOG_LINES, LOG_BYTES).await?;
    Ok(FetchedLog::Log { document, text: result_transport::split_log(&text).0.to_owned() })
}

#[cfg(test)]
mod tests {
    use doctor_checks::result_transport::PackedDocument;
    use serde_json::json;

    use super::*;
    use crate::config::Share;

    fn config() -> KubernetesConfig {
        KubernetesConfig { share: Share::None, ..KubernetesConfig::default() }
    }

    fn pod(name: &str, message: &str) -> PodObject {
        serde_json::from_value(json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": { "name": name, "namespace": "cluster-doctor",
                "labels": { "cluster-doctor.io/run": run().to_string() } },
            "spec": { "nodeName": "gpu-1", "containers": [] },
            "status": { "phase": "Failed", "containerStatuses": [
                { "name": "side-car", "state": { "terminated": { "exitCode": 0, "message": "not ours" } } },
                { "name": "doctor-node", "state": { "terminated": { "exitCode": 143, "message": message } } }] },
        }))
        .unwrap()
    }

    fn run() -> RunId {
        RunId::from_number(7)
    }

    #[test]
    fn a_document_in_the_termination_message_is_returned_with_its_log_which_is_fetched_once() {
        let pod_results = PodResults::default();
        let message = PackedDocument::pack(b"a document").unwrap().to_termination_message();
        let log_fetch = pod_results.take_from(&pod("p", &message), &config()).unwrap();
        assert_eq!((pod_results.documents(run()), log_fetch.log_lines), (Vec::new(), None));
        pod_results.store(&log_fetch, FetchedLog::Log { document: None, text: "job: done\n".to_owned() });
        assert_eq!(pod_results.documents(run()), [b"a document".to_vec()]);
        assert_eq!(pod_results.take_from(&pod("p", &message), &config()), None, "nothing is left to fetch");
        assert_eq!(pod_results.logs(run()), [(NodeName::new("gpu-1").unwrap(), "job: done\n".to_owned())]);
        assert_eq!(pod_results.documents(run()).len(), 1, "it is still returned");
        pod_results.retain_runs(&BTreeSet::new());
        assert!(pod_results.documents(run()).is_empty() && pod_results.logs(run()).is_empty());
    }

    #[test]
    fn a_document_whose_log_cannot_be_fetched_is_returned_without_it_after_a_while_or_once_the_log_is_gone() {
        let message = PackedDocument::pack(b"a document").unwrap().to_termination_message();
        let pod_results = PodResults::default();
        pod_results.take_from(&pod("p", &message), &config());
        assert!(pod_results.documents(run()).is_empty());
        assert!(pod_results.take_from(&pod("p", &message), &config()).is_some(), "the log is requested again");
        assert_eq!(pod_results.documents_within(run(), Duration::ZERO).len(), 1);
        let gone = PodResults::default();
        let log_fetch = gone.take_from(&pod("p", &message), &config()).unwrap();
        gone.store(&log_fetch, FetchedLog::Gone);
        assert_eq!((gone.documents(run()).len(), gone.logs(run()).len()), (1, 0));
    }

    #[test]
    fn a_long_document_is_fetched_from_the_log_until_it_is_complete_or_lost() {
        let pod_results = PodResults::default();
        let log_fetch = pod_results.take_from(&pod("p", "doctor-in-log-1 9"), &config()).unwrap();
        assert_eq!((pod_results.documents(run()), log_fetch.log_lines), (Vec::new(), Some(9)));
        pod_results.store(&log_fetch, FetchedLog::Log { document: None, text: String::new() });
        let again = pod_results.take_from(&pod("p", "doctor-in-log-1 9"), &config()).unwrap();
        assert_eq!(again, log_fetch, "a truncated log is fetched again");
        pod_results.store(&again, FetchedLog::Log { document: Some(b"long".to_vec()), text: String::new() });
        assert_eq!(pod_results.documents(run()), [b"long".to_vec()]);
        let other = pod_results.take_from(&pod("q", "doctor-in-log-1 9"), &config()).unwrap();
        pod_results.store(&other, FetchedLog::Gone);
        assert_eq!(pod_results.take_from(&pod("q", "doctor-in-log-1 9"), &config()), None);
        assert_eq!(pod_results.documents(run()).len(), 1, "one of the two pods has a result");
    }

    #[test]
    fn a_job_without_a_complete_message_has_no_document() {
        for message in ["", "OOMKilled", "doctor-carried-1 7VtLb9s"] {
            let pod_results = PodResults::default();
            pod_results.take_from(&pod("p", message), &config());
            assert!(pod_results.documents(run()).is_empty(), "{message}");
        }
        let running = serde_json::from_value::<PodObject>(json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": { "name": "p", "labels": { "cluster-doctor.io/run": run().to_string() } },
            "spec": { "nodeName": "gpu-1" },
            "status": { "containerStatuses": [{ "name": "doctor-node", "state": { "running": {} } }] },
        }));
        assert_eq!(PodResults::default().take_from(&running.unwrap(), &config()), None, "it has not ended");
    }
}
