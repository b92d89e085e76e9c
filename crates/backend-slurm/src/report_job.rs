//! Takes a node's own report through a job on it, which writes it to the shared directory.
//!
//! A node that we drained runs the job inside a reservation of ours, like a repair, and is drained again when the job has ended. On
//! a node that is in service the job waits its turn like any other, for a limited time.

use std::{
    io,
    path::{Path, PathBuf},
};

use doctor_backend::{
    BackendError, Effect, ReportProgress,
    clock::{Clock, SystemClock},
    vendor_reports,
};
use doctor_core::{
    ids::{NodeName, OpId},
    last_output,
    time::Span,
};

use super::{
    SlurmBackend,
    config::JOB_PREFIX,
    job::{self, Placement},
    maintenance_reservation, marks,
    node_ops::{op_name, permanent_error, responds, retryable_error},
    programs::Access,
    states::Phase,
    submit::{FOLDER, OUTPUT, own_folder},
};

const REPORT: &str = "report";
/// How long a node may take to respond.
const RESPONSE_GRACE: Span = Span::minutes(1);
/// The time limit of the job: longer than that of the vendor's tool.
const LIMIT: Span = Span::minutes(5);
/// Slurm removes a job that cannot end within this time, so that none that the controller has given up stays in the queue.
const DEADLINE: &str = "--deadline=now+20minutes";

/// Returns the name of the job. It is no name of a run or of an operation.
fn job_name(op: OpId) -> String {
    format!("{JOB_PREFIX}report-{op}")
}

/// Returns the folder of the report, relative to the shared directory.
fn folder(op: OpId) -> PathBuf {
    PathBuf::from(FOLDER).join(format!("report-{op}"))
}

impl SlurmBackend {
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
        let jobs = self.job_named(REPORT, &job_name(op))?;
        let path = folder(op);
        let started = self.share_files.call("looking for a report", move |root| Ok(root.entry(&path)?.is_some()));
        let started = started.map_err(|error| retryable_error(REPORT, error.to_string()))?;
        match jobs.iter().min_by_key(|job| job.number) {
            Some(job) if job.phase() != Phase::Ended => Ok(ReportProgress::InProgress),
            None if !started => self.start_report(node, op).map(|()| ReportProgress::InProgress),
            // It has ended, or Slurm has purged it.
            Some(_) | None => {
                self.end_report_reservation(op)?;
                self.read_report(op)
            }
        }
    }

    fn start_report(&self, node: &NodeName, op: OpId) -> Result<(), BackendError> {
        let nodes = self.nodes_named(REPORT, std::slice::from_ref(node))?;
        let Some(now) = nodes.first() else {
            return Err(permanent_error(REPORT, format!("Slurm has no node {node}")));
        };
        // One that we set down responds, but Slurm shows a node that was just resumed as not responding for some seconds.
        if !responds(now) {
            let text = format!("Slurm starts nothing on {node}: it does not respond");
            let is_recent = SystemClock.now().since(op.born()) < RESPONSE_GRACE;
            return Err(if is_recent { retryable_error(REPORT, text) } else { permanent_error(REPORT, text) });
        }
        let ours = self.reservations(REPORT)?;
        let is_ours = |one: &_| maintenance_reservation::reservation_kind(one).exists() && one.holds(node);
        let closed = marks::is_drained_by_us(now, &self.config) || ours.iter().any(is_ours);
        if closed {
            self.require_no_jobs(REPORT, node, now)?;
            self.reserve_and_resume(REPORT, &op_name(op), std::slice::from_ref(node))?;
        }
        let path = folder(op);
        let unwritable = |error: io::Error| retryable_error(REPORT, error.to_string());
        let on_node = self.share_path().join(folder(op));
        let partition = self.partition(&nodes, LIMIT)?;
        let reservation = closed.then(|| op_name(op));
        let placement = Placement {
            nodes: std::slice::from_ref(node),
            partition: partition.as_deref(),
            // Some GPUs of a machine that needs a repair may be gone.
            gpus: 0,
            reservation: reservation.as_deref(),
        };
        let comment = format!("Cluster Doctor report {op}");
        let output = on_node.join(OUTPUT);
        let mut arguments = job::arguments(&job_name(op), &comment, &placement, LIMIT, &output, &self.config);
        arguments.push(DEADLINE.to_owned());
        let program = self.config.doctor_node.display().to_string();
        let limit = vendor_reports::TOOL_TIMEOUT.to_string();
        let command = [&program, "report", "--out", &on_node.display().to_string(), "--limit", &limit];
        let script = job::repair_script(&command.map(str::to_owned));
        // Before the job: without the folder, a purged one would be submitted again.
        let made = path.clone();
        self.share_files
            .call("making the folder of a report", move |root| own_folder(root, &made).map(drop))
            .map_err(unwritable)?;
        let submitted = self.programs.run(REPORT, "sbatch", &arguments, &script, Access::Write);
        if submitted.as_ref().is_err_and(|error| error.effect != Effect::Unknown) {
            let removed = self.share_files.call_noting("removing the folder of a report", move |root, progress| {
                let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return Ok(true) };
                let Some(parent) = root.subdirectory(parent)? else { return Ok(true) };
                parent.remove_tree(name, &progress.while_removing())
            });
            if !removed.map_err(unwritable)? {
                return Err(retryable_error(REPORT, "its folder is not removed yet".to_owned()));
            }
            self.end_report_reservation(op)?;
        }
        submitted.map(drop)
    }

    /// Ends the reservation of the report. A repair with the same operation id reserves the node again; while its job is there, the
    /// reservation is the repair's.
    fn end_report_reservation(&self, op: OpId) -> Result<(), BackendError> {
        let name = op_name(op);
        if self.job_named(REPORT, &name)?.iter().any(|job| job.phase() != Phase::Ended) {
            return Ok(());
        }
        let there = self.reservations(REPORT)?;
        there.iter().filter(|one| one.name == name).try_for_each(|one| self.end_reservation(REPORT, one))
    }

    fn read_report(&self, op: OpId) -> Result<ReportProgress, BackendError> {
        // A report that is no JSON stays so. What the file system answers may change.
        let unreadable = |error: io::Error| {
            let fail = if error.kind() == io::ErrorKind::Other { permanent_error } else { retryable_error };
            fail(REPORT, format!("the report cannot be read: {error}"))
        };
        let read = move |root: &Path| vendor_reports::read(root, &folder(op), vendor_reports::MAX_FILE_BYTES);
        let report = self.share_files.at_root("reading a report", read).map_err(unreadable)?;
        Ok(match report {
            Some(report) => ReportProgress::Done(Box::new(report)),
            None => {
                let output = self.output_end(&folder(op).join(OUTPUT)).ok().flatten();
                let line = output.and_then(|text| last_output::last_line(&text));
                let why = line.unwrap_or_else(|| "the job did not run, or wrote nothing".to_owned());
                ReportProgress::Failed { text: format!("`doctor-node report` on the node: {why}") }
            }
        })
    }
}
