//! Takes results and logs from pods before they are deleted, where jobs and controller share no directory.
//!
//! A pod that ended by itself remains until its job is removed, and the next poll sees it. A pod that was told to end disappears
//! as soon as it has ended; the watch of failed pods reports it in time. The result document is in the container's termination
//! message, which outlives the node, or, if it is too long for that, in the log, which only the node has. What cannot be fetched
//! in time is lost, and the run reports that.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Mutex, MutexGuard, PoisonError},
};

use doctor_checks::carried::{self, Told};
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
const AFTER: usize = 8;
/// Longer than any line of a document.
const LINE_BYTES: usize = 4096;
/// The most pods whose results are held. More are never active.
const MOST: usize = 1024;

/// Results taken from pods, by run and pod.
#[derive(Debug, Default)]
pub(super) struct Carried(Mutex<BTreeMap<(RunId, String), Parcel>>);

#[derive(Debug, Clone)]
struct Parcel {
    node: NodeName,
    document: Option<Vec<u8>>,
    /// How many lines of the log the document has, until it is fetched.
    in_log: Option<usize>,
    log: Log,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Log {
    NotYet,
    Fetched(String),
    Gone,
}

/// A log to be fetched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Errand {
    pub(super) run: RunId,
    pub(super) pod: String,
    in_log: Option<usize>,
}

impl Carried {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<(RunId, String), Parcel>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the result from a pod of ours that has ended. Returns the log that is still to be fetched, if any.
    pub(super) fn notice(&self, pod: &PodObject, config: &KubernetesConfig) -> Option<Errand> {
        let run = names::run_of(&pod.metadata, config)?;
        let end = end(pod)?;
        let node = NodeName::new(pod.spec.node_name.as_ref()?).ok()?;
        let mut all = self.lock();
        let key = (run, pod.name_any());
        if all.len() >= MOST && !all.contains_key(&key) {
            return None;
        }
        let parcel = all.entry(key).or_insert_with(|| {
            let (document, in_log) = match carried::read_message(&end.message) {
                Ok(Told::Document(document)) => (Some(document), None),
                Ok(Told::InLog { lines }) => (None, Some(lines)),
                Err(why) => {
                    tracing::warn!(run = %run, pod = pod.name_any(), %why, "job left no result");
                    (None, None)
                }
            };
            Parcel { node, document, in_log, log: Log::NotYet }
        });
        let errand = Errand { run, pod: pod.name_any(), in_log: parcel.in_log };
        (parcel.log == Log::NotYet || parcel.in_log.is_some()).then_some(errand)
    }

    fn keep(&self, errand: &Errand, fetched: Fetched) {
        let mut all = self.lock();
        let Some(parcel) = all.get_mut(&(errand.run, errand.pod.clone())) else { return };
        match fetched {
            Fetched::Log { document, text } => {
                if document.is_some() {
                    (parcel.document, parcel.in_log) = (document, None);
                }
                parcel.log = Log::Fetched(text);
            }
            Fetched::Gone => (parcel.log, parcel.in_log) = (Log::Gone, None),
        }
    }

    /// Drops the results of all other runs.
    pub(super) fn only(&self, runs: &BTreeSet<RunId>) {
        self.lock().retain(|(run, _), _| runs.contains(run));
    }

    /// Returns whether a pod of the run has ended.
    pub(super) fn knows(&self, run: RunId) -> bool {
        !self.of(run, |_| Some(())).is_empty()
    }

    pub(super) fn documents(&self, run: RunId) -> Vec<Vec<u8>> {
        self.of(run, |parcel| parcel.document.clone())
    }

    pub(super) fn logs(&self, run: RunId) -> Vec<(NodeName, String)> {
        self.of(run, |parcel| match &parcel.log {
            Log::Fetched(text) => Some((parcel.node.clone(), text.clone())),
            Log::NotYet | Log::Gone => None,
        })
    }

    fn of<T>(&self, run: RunId, take: impl Fn(&Parcel) -> Option<T>) -> Vec<T> {
        let all = self.lock();
        all.range((run, String::new())..)
            .take_while(|((of, _), _)| *of == run)
            .filter_map(|(_, one)| take(one))
            .collect()
    }
}

enum Fetched {
    Log {
        document: Option<Vec<u8>>,
        text: String,
    },
    /// The API server no longer has it.
    Gone,
}

/// Returns the end of the job's container, if it has ended.
fn end(pod: &PodObject) -> Option<&Terminated> {
    let statuses = &pod.status.as_ref()?.container_statuses;
    statuses.iter().find(|container| container.name == names::CONTAINER)?.state.terminated.as_ref()
}

/// Fetches and stores a log. After an error the caller may retry.
pub(super) async fn fetch(
    client: &Client,
    config: &KubernetesConfig,
    carried: &Carried,
    errand: &Errand,
) -> kube::Result<()> {
    let fetched = match fetch_both(client, config, errand).await {
        Err(kube::Error::Api(status)) if status.code == 404 => Fetched::Gone,
        other => other?,
    };
    carried.keep(errand, fetched);
    Ok(())
}

async fn fetch_both(client: &Client, config: &KubernetesConfig, errand: &Errand) -> kube::Result<Fetched> {
    let ask = |lines: usize, bytes: usize| {
        let (namespace, pod) = (&config.namespace, &errand.pod);
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
    if let Some(lines) = errand.in_log {
        let lines = lines + AFTER;
        match carried::read_log(&ask(lines, lines * LINE_BYTES).await?) {
            Ok(found) => document = Some(found),
            Err(why) => tracing::warn!(run = %errand.run, pod = errand.pod, %why, "result missing from the job log"),
        }
    }
    let text = ask(LOG_LINES, LOG_BYTES).await?;
    Ok(Fetched::Log { document, text: carried::split_log(&text).0.to_owned() })
}

#[cfg(test)]
mod tests {
    use doctor_checks::carried::Packed;
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
    fn a_document_in_the_message_is_there_at_once_and_its_log_is_fetched_once() {
        let carried = Carried::default();
        let message = Packed::of(b"a document").unwrap().for_message();
        let errand = carried.notice(&pod("p", &message), &config()).unwrap();
        assert_eq!((carried.documents(run()), errand.in_log), (vec![b"a document".to_vec()], None));
        carried.keep(&errand, Fetched::Log { document: None, text: "job: done\n".to_owned() });
        assert_eq!(carried.notice(&pod("p", &message), &config()), None, "nothing is left to fetch");
        assert_eq!(carried.logs(run()), [(NodeName::new("gpu-1").unwrap(), "job: done\n".to_owned())]);
        assert_eq!(carried.documents(run()).len(), 1, "it is still returned");
        carried.only(&BTreeSet::new());
        assert!(carried.documents(run()).is_empty() && carried.logs(run()).is_empty());
    }

    #[test]
    fn a_long_document_is_fetched_from_the_log_until_it_is_complete_or_lost() {
        let carried = Carried::default();
        let errand = carried.notice(&pod("p", "doctor-in-log-1 9"), &config()).unwrap();
        assert_eq!((carried.documents(run()), errand.in_log), (Vec::new(), Some(9)));
        carried.keep(&errand, Fetched::Log { document: None, text: String::new() });
        let again = carried.notice(&pod("p", "doctor-in-log-1 9"), &config()).unwrap();
        assert_eq!(again, errand, "a truncated log is fetched again");
        carried.keep(&again, Fetched::Log { document: Some(b"long".to_vec()), text: String::new() });
        assert_eq!(carried.documents(run()), [b"long".to_vec()]);
        let other = carried.notice(&pod("q", "doctor-in-log-1 9"), &config()).unwrap();
        carried.keep(&other, Fetched::Gone);
        assert_eq!(carried.notice(&pod("q", "doctor-in-log-1 9"), &config()), None);
        assert_eq!(carried.documents(run()).len(), 1, "one of the two pods has a result");
    }

    #[test]
    fn a_job_that_left_no_whole_message_brings_no_document() {
        for message in ["", "OOMKilled", "doctor-carried-1 7VtLb9s"] {
            let carried = Carried::default();
            carried.notice(&pod("p", message), &config());
            assert!(carried.documents(run()).is_empty(), "{message}");
        }
        let running = serde_json::from_value::<PodObject>(json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": { "name": "p", "labels": { "cluster-doctor.io/run": run().to_string() } },
            "spec": { "nodeName": "gpu-1" },
            "status": { "containerStatuses": [{ "name": "doctor-node", "state": { "running": {} } }] },
        }));
        assert_eq!(Carried::default().notice(&running.unwrap(), &config()), None, "it has not ended");
    }
}
