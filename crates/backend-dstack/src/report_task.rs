//! Takes a node's own report: over SSH where dstack starts nothing, otherwise through a task that prints it to its log.

use std::sync::atomic::Ordering;

use doctor_backend::{
    Backend as _, BackendError, Effect, ReportProgress,
    clock::{Clock, SystemClock},
};
use doctor_checks::result_transport;
use doctor_core::{
    ids::{NodeName, OpId},
    last_output,
    time::Span,
};
use serde_json::{Value, json};

use super::{
    client::Access,
    cluster::{DstackBackend, permanent_error, retryable_error},
    result_transport::read_log,
    run_types::Run,
    ssh_fallback::{is_skipped_by_dstack, is_unused},
    task,
};

const REPORT: &str = "report";
/// How late dstack may show the end of a log.
const LOG_DELAY: Span = Span::minutes(1);

/// Returns the name of the task. It is no name of a run: until the task has ended, its instance counts as in use.
fn task_name(op: OpId) -> String {
    format!("doctor-report-{op}")
}

impl DstackBackend {
    pub(super) fn collect_report_from(&self, node: &NodeName, op: OpId) -> ReportProgress {
        self.report_progress(node, op).unwrap_or_else(|error| match error.effect {
            Effect::NotAppliedPermanent => ReportProgress::Failed { text: error.text },
            // The caller repeats it, and stops when it has waited long enough.
            Effect::NotAppliedRetry | Effect::Unknown => {
                tracing::debug!(%node, %error, "report not collected yet");
                ReportProgress::InProgress
            }
        })
    }

    fn report_progress(&self, node: &NodeName, op: OpId) -> Result<ReportProgress, BackendError> {
        let found = self.client.post::<Run>(&self.in_project("runs/get"), &json!({ "run_name": task_name(op) }));
        match found {
            Ok(task) => self.report_of(&task),
            Err(error) if error.is_not_found() => self.start_report(node, op),
            Err(error) => Err(error.to_backend_error(REPORT, Access::Read)),
        }
    }

    fn start_report(&self, node: &NodeName, op: OpId) -> Result<ReportProgress, BackendError> {
        let (fleet, instance) = self.instance(REPORT, node)?;
        if is_skipped_by_dstack(&instance) {
            let Some(fallback) = &self.ssh_fallback else {
                let why = format!("dstack starts nothing on {node}; [backend.dstack.ssh] allows to reach it");
                return Err(permanent_error(REPORT, why));
            };
            if !fallback.hosts_set.load(Ordering::Relaxed) {
                fallback.set_hosts(&self.fleets(REPORT)?);
            }
            return Ok(fallback.ssh.collect_report(node, op));
        }
        if !is_unused(&instance) {
            return Err(retryable_error(REPORT, format!("dstack does not report {node} as idle")));
        }
        let plan = task::report_plan(&task_name(op), (&fleet.name, &instance), &self.config);
        let applied: Result<Value, _> = self.client.post(&self.in_project("runs/apply"), &plan);
        applied.map(|_| ReportProgress::InProgress).map_err(|error| error.to_backend_error(REPORT, Access::Write))
    }

    fn report_of(&self, task: &Run) -> Result<ReportProgress, BackendError> {
        let Some(job) = task.latest_submission().filter(|job| job.status.is_finished()) else {
            return Ok(ReportProgress::InProgress);
        };
        let log = read_log(&self.client, &self.config.project, task);
        let log = log.map_err(|error| error.to_backend_error(REPORT, Access::Read))?;
        let is_recent = job.finished_at.is_none_or(|at| SystemClock.now().since(at) < LOG_DELAY);
        Ok(match parse(&log) {
            Ok(report) => report,
            Err(_) if is_recent => ReportProgress::InProgress,
            Err(why) => {
                let line = last_output::last_line(result_transport::split_log(&log).0).unwrap_or(why);
                ReportProgress::Failed { text: format!("{}: {line}", job.ending()) }
            }
        })
    }
}

/// Extracts the report from the log. It comes from a node, and its size is limited when it is unpacked.
fn parse(log: &str) -> Result<ReportProgress, String> {
    let packed = result_transport::extract_from_log(log).map_err(|error| error.to_string())?;
    let report = serde_json::from_slice(&packed).map_err(|error| format!("the report cannot be read: {error}"))?;
    Ok(ReportProgress::Done(Box::new(report)))
}
