//! Results and logs where jobs and controller share no directory: taken from the pod before it goes.
//!
//! A pod that ended by itself stays until its job is removed, and is seen when the cluster is asked what became of runs. One that
//! was told to end goes as soon as it has: of that the watch of failed pods tells in time. The document is in the message that
//! the container left of its end, which outlives the node; where it is too long for that, in the log, which only the
//! node has. What cannot be had in time is lost, and the run says so.

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

/// Of a log that is for people: its end.
const LOG_LINES: usize = 20_000;
const LOG_BYTES: usize = 4 << 20;
/// Lines that may have come after the document.
const AFTER: usize = 8;
/// Longer than any line in which a document is written.
const LINE_BYTES: usize = 4096;
/// Pods of which something is held. More are not under way.
const MOST: usize = 1024;

/// What was taken from pods, by run and pod.
#[derive(Debug, Default)]
pub(super) struct Carried(Mutex<BTreeMap<(RunId, String), Parcel>>);

#[derive(Debug, Clone)]
struct Parcel {
    node: NodeName,
    document: Option<Vec<u8>>,
    /// Lines of the document in the log, while it was not fetched from there.
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

    /// Takes what a pod of ours says of its end. What is left to fetch, if anything is.
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
                    tracing::warn!(run = %run, pod = pod.name_any(), %why, "a job left no result");
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

    /// Forgets all but these runs.
    pub(super) fn only(&self, runs: &BTreeSet<RunId>) {
        self.lock().retain(|(run, _), _| runs.contains(run));
    }

    /// Whether a pod of the run was seen to end.
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
    /// Nobody has it any more.
    Gone,
}

/// How the job's container ended, if it has.
fn end(pod: &PodObject) -> Option<&Terminated> {
    let statuses = &pod.status.as_ref()?.container_statuses;
    statuses.iter().find(|container| container.name == names::CONTAINER)?.state.terminated.as_ref()
}

/// Fetches a log and keeps it. What fails may be tried again.
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
    // The end alone: what stands before it must not push it over the limit.
    if let Some(lines) = errand.in_log {
        let lines = lines + AFTER;
        match carried::read_log(&ask(lines, lines * LINE_BYTES).await?) {
            Ok(found) => document = Some(found),
            Err(why) => tracing::warn!(run = %errand.run, pod = errand.pod, %why, "a job's result is not in its log"),
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
        assert_eq!(carried.documents(run()).len(), 1, "it is still offered");
        carried.only(&BTreeSet::new());
        assert!(carried.documents(run()).is_empty() && carried.logs(run()).is_empty());
    }

    #[test]
    fn a_long_document_comes_with_the_log_and_is_asked_for_until_it_came_or_nobody_has_it() {
        let carried = Carried::default();
        let errand = carried.notice(&pod("p", "doctor-in-log-1 9"), &config()).unwrap();
        assert_eq!((carried.documents(run()), errand.in_log), (Vec::new(), Some(9)));
        carried.keep(&errand, Fetched::Log { document: None, text: String::new() });
        let again = carried.notice(&pod("p", "doctor-in-log-1 9"), &config()).unwrap();
        assert_eq!(again, errand, "the log was cut: it is tried again while there is time");
        carried.keep(&again, Fetched::Log { document: Some(b"long".to_vec()), text: String::new() });
        assert_eq!(carried.documents(run()), [b"long".to_vec()]);
        let other = carried.notice(&pod("q", "doctor-in-log-1 9"), &config()).unwrap();
        carried.keep(&other, Fetched::Gone);
        assert_eq!(carried.notice(&pod("q", "doctor-in-log-1 9"), &config()), None);
        assert_eq!(carried.documents(run()).len(), 1, "of two pods one brought a result");
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
