//! Takes a node's own report through a job on it, before a repair destroys what it shows. The job prints the report, packed, to its
//! log: no directory is needed, and the log outlives the pod's end.

use std::time::Duration;

use doctor_backend::{BackendError, Effect, ReportProgress, VendorReport};
use doctor_checks::result_transport;
use doctor_core::{
    ids::{NodeName, OpId},
    last_output,
};
use doctor_host::vendor_reports::TOOL_TIMEOUT;
use hyper::http::Request;
use kube::{
    Api, ResourceExt,
    api::{DynamicObject, ListParams},
};
use serde_json::Value;

use super::{
    cluster::{KubeRequestError, KubernetesBackend},
    config::KubernetesConfig,
    evict_and_repair::{is_ready, post_params},
    names,
    objects::{JobObject, PodObject, job_resource, pod_resource},
    repair_job::{self, HOST, NodeJob, RepairStage},
};

const OPERATION: &str = "report";
/// The label of the job and its pod, by operation.
const LABEL: &str = "report";
/// The limit for fetching the log, of megabytes.
const LOG_TIMEOUT: Duration = Duration::from_secs(30);
/// Above the longest packed report, and the size at which logs are rotated.
const LOG_BYTES: usize = 10 << 20;
/// Why a container waits that is about to start.
const STARTING: [&str; 3] = ["", "ContainerCreating", "PodInitializing"];
/// In the container.
const OUT: &str = "/tmp/doctor-report";

fn job_name(op: OpId) -> String {
    format!("doctor-report-{op}")
}

fn manifest(op: OpId, node: &NodeName, config: &KubernetesConfig) -> Value {
    let limit = TOOL_TIMEOUT.to_string();
    let command = ["doctor-node", "report", "--root", HOST, "--out", OUT, "--limit", &limit, "--carry"];
    let job = NodeJob { name: job_name(op), command: command.map(str::to_owned).to_vec(), label: LABEL };
    repair_job::node_job(job, op, node, config)
}

impl KubernetesBackend {
    pub(super) fn collect_report_from(&self, node: &NodeName, op: OpId) -> ReportProgress {
        self.progress(node, op).unwrap_or_else(|error| match error.effect {
            Effect::NotAppliedPermanent => ReportProgress::Failed { text: error.text },
            // The caller repeats it, and stops when it has waited long enough.
            Effect::NotAppliedRetry | Effect::Unknown => {
                tracing::debug!(%node, %error, "report not collected yet");
                ReportProgress::InProgress
            }
        })
    }

    fn progress(&self, node: &NodeName, op: OpId) -> Result<ReportProgress, BackendError> {
        let jobs: Api<JobObject> = self.jobs(&job_resource());
        let job = match self.request(OPERATION, jobs.get(&job_name(op))) {
            Ok(job) => job,
            Err(KubeRequestError { code: Some(404), .. }) => return self.start_report(node, op),
            Err(failed) => return Err(failed.into()),
        };
        match repair_job::stage(&job) {
            RepairStage::Running => Ok(self.start_problem(op)?.map_or(ReportProgress::InProgress, |why| failed(&why))),
            RepairStage::Succeeded => Ok(self.report_log(op)?.map_or_else(
                || failed("the pod of the report is gone"),
                |log| match parse(&log) {
                    Ok(report) => ReportProgress::Done(Box::new(report)),
                    Err(text) => failed(&text),
                },
            )),
            RepairStage::Failed(text) => {
                let line = self.report_log(op).ok().flatten().and_then(|log| last_output::last_line(&log));
                Ok(failed(&line.map_or_else(|| text.clone(), |line| format!("{text}: {line}"))))
            }
        }
    }

    fn start_report(&self, node: &NodeName, op: OpId) -> Result<ReportProgress, BackendError> {
        let now = self.read_node(OPERATION, node)?;
        if !is_ready(&now) {
            return Ok(failed("its kubelet does not respond"));
        }
        let job: DynamicObject = serde_json::from_value(manifest(op, node, &self.config)).map_err(|error| {
            BackendError { operation: OPERATION, text: error.to_string(), effect: Effect::NotAppliedPermanent }
        })?;
        let api: Api<DynamicObject> = self.jobs(&job_resource());
        match self.request(OPERATION, api.create(&post_params(), &job)) {
            Ok(_) | Err(KubeRequestError { already_exists: true, .. }) => Ok(ReportProgress::InProgress),
            Err(failed) => Err(failed.into()),
        }
    }

    /// Returns why the report's container cannot be started, such as an image that cannot be pulled: a repair does not wait for it.
    fn start_problem(&self, op: OpId) -> Result<Option<String>, BackendError> {
        let status = self.report_pod(op)?.and_then(|pod| pod.status).unwrap_or_default();
        let waiting = status.container_statuses.into_iter().filter_map(|container| container.state.waiting);
        let mut stuck = waiting.filter(|waiting| !STARTING.contains(&waiting.reason.as_str()));
        Ok(stuck.next().map(|waiting| format!("{}: {}", waiting.reason, waiting.message)))
    }

    fn report_pod(&self, op: OpId) -> Result<Option<PodObject>, BackendError> {
        let label = format!("{}={op}", self.config.prefixed(LABEL));
        let api = self.jobs::<PodObject>(&pod_resource());
        let pods = self.request(OPERATION, api.list(&ListParams::default().labels(&label)))?;
        Ok(pods.items.into_iter().next())
    }

    /// Returns the log of the report's pod, if that still exists.
    fn report_log(&self, op: OpId) -> Result<Option<String>, BackendError> {
        let Some(pod) = self.report_pod(op)? else { return Ok(None) };
        let path = format!(
            "/api/v1/namespaces/{}/pods/{}/log?container={}&limitBytes={LOG_BYTES}",
            self.config.namespace,
            pod.name_any(),
            names::CONTAINER
        );
        let log = self.request_within(OPERATION, LOG_TIMEOUT, async {
            let request = Request::get(path).body(Vec::new()).map_err(kube::Error::HttpError)?;
            self.client.request_text(request).await
        });
        Ok(Some(log?))
    }
}

fn failed(text: &str) -> ReportProgress {
    ReportProgress::Failed { text: text.to_owned() }
}

/// Extracts the report from the log. It comes from a node, and its size is limited when it is unpacked.
fn parse(log: &str) -> Result<VendorReport, String> {
    let packed = result_transport::extract_from_log(log).map_err(|error| error.to_string())?;
    serde_json::from_slice(&packed).map_err(|error| format!("the report cannot be read: {error}"))
}

#[cfg(test)]
mod tests {
    use doctor_checks::result_transport::PackedDocument;
    use doctor_core::ids::IdSource;
    use doctor_host::vendor_reports::VendorFile;
    use serde_json::json;

    use super::*;

    #[test]
    fn the_report_is_taken_from_the_log_and_a_cut_one_is_none() {
        let file = VendorFile { name: "nvidia-bug-report.log.gz".to_owned(), bytes: vec![1, 2, 3] };
        let report = VendorReport { machine: json!({ "gpus": [] }), file: Some(file) };
        let packed = PackedDocument::pack(&serde_json::to_vec(&report).unwrap()).unwrap().to_log_lines();
        let log = format!("nvidia-bug-report.sh wrote nvidia-bug-report.log.gz\n{packed}");
        assert_eq!(parse(&log).unwrap(), report);
        assert!(parse(&log[..log.len() - 40]).is_err());
        let other = PackedDocument::pack(b"[]").unwrap().to_log_lines();
        assert!(parse(&other).unwrap_err().contains("cannot be read"));
    }

    #[test]
    fn the_job_reads_the_host_and_asks_for_no_gpu() {
        let (config, op) = (KubernetesConfig::default(), IdSource::new(1).op());
        let job = manifest(op, &NodeName::new("gpu-1").unwrap(), &config);
        let pod = &job["spec"]["template"];
        assert_eq!(job["metadata"]["name"], format!("doctor-report-{op}"));
        // The label of an operation keeps it from being evicted.
        for label in ["op", "report"] {
            assert_eq!(pod["metadata"]["labels"][config.prefixed(label)], op.to_string());
        }
        let container = &pod["spec"]["containers"][0];
        let command: Vec<&str> =
            container["command"].as_array().unwrap().iter().map(|word| word.as_str().unwrap()).collect();
        assert_eq!(command[..4], ["doctor-node", "report", "--root", "/host"]);
        assert!(container["resources"].is_null(), "{container:#}");
    }
}
