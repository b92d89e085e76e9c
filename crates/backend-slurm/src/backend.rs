//! Implements [`Backend`] for [`SlurmBackend`]: snapshot, submit, poll, cancel, and the operations on nodes.

use std::{collections::HashMap, sync::PoisonError};

use doctor_backend::{
    Backend, BackendError, Change, ChangeReason, Effect, JobRequest, NodeOp, ObservedJobFailure, ObservedNode,
    PolledJob, ReportProgress, StatusWriter,
    clock::{Clock, SystemClock},
};
use doctor_core::{
    ids::{JobId, NodeName, OpId, RunId},
    last_output::LastOutput,
    node::MarkKind,
    run::{ObservedJobState, Run},
    snapshot::Capabilities,
    time::Timestamp,
};

use super::{
    cluster::SlurmBackend,
    job, maintenance_reservation,
    marks::{self, ReservationKind},
    programs::Access,
    queue::Job,
    view::View,
};

impl SlurmBackend {
    fn change_marks(
        &self,
        node: &NodeName,
        change: &NodeOp,
        reason: Option<&ChangeReason>,
    ) -> Result<(), BackendError> {
        let operation = "change the node";
        let refuse = |text: String| BackendError { operation, text, effect: Effect::NotAppliedPermanent };
        let [now] = &self.nodes_named(operation, std::slice::from_ref(node))?[..] else {
            return Err(refuse(format!("Slurm has no node {node}")));
        };
        let there = self.reservations(operation)?;
        let held = there
            .iter()
            .filter(|one| one.holds(node))
            .map(maintenance_reservation::reservation_kind)
            .find(|kind| kind.exists());
        let reservation = held.unwrap_or_default();
        let update = marks::update(now, reservation.exists(), change.op, &change.what, reason, &self.config);
        if let Some(update) = update.map_err(|in_use| refuse(in_use.to_string()))? {
            self.write(operation, &now.name, &update)?;
        }
        match &change.what {
            // Even if the change is recorded: a controller may have been killed between the two steps.
            Change::Unmark(mark) if mark.kind == MarkKind::Maintenance && reservation.exists() => {
                self.end_our_reservations(operation, node)
            }
            // The planner has moved on and does not repeat the abandoned repair, so its reservation is removed here.
            _ if reservation == ReservationKind::Repair => self.end_abandoned_repairs(operation, node),
            _ => Ok(()),
        }
    }

    fn apply_change(
        &self,
        node: &NodeName,
        change: &NodeOp,
        reason: Option<&ChangeReason>,
    ) -> Result<(), BackendError> {
        match change.what {
            Change::Mark(_) | Change::Unmark(_) | Change::Drain | Change::Undrain => {
                self.change_marks(node, change, reason)
            }
            Change::Reboot => self.reboot(node, change.op, reason),
            Change::Reset => self.reset(node, change.op),
            Change::Replace => self.replace(node, change.op),
            Change::Evict => Err(BackendError {
                operation: "evict",
                text: "Slurm does not evict jobs: on a drained node they run to their end".to_owned(),
                effect: Effect::NotAppliedPermanent,
            }),
        }
    }
}

impl Backend for SlurmBackend {
    fn name(&self) -> &str {
        "slurm"
    }

    fn caps(&self) -> Capabilities {
        Capabilities {
            mark: true,
            drain: true,
            evict: false,
            reset: !self.config.reset.is_empty(),
            reboot: self.config.reboot,
            replace: !self.config.replace.is_empty(),
        }
    }

    fn snapshot(&self) -> Result<Vec<ObservedNode>, BackendError> {
        // Nodes first: a job that starts or ends in between then shows in one of the two.
        let nodes = self.nodes()?;
        let jobs = self.jobs("read the queue", &[])?;
        let reservations = self.reservations("read the reservations")?;
        let cluster_config = self.cluster_config()?;
        let view = View {
            nodes: &nodes,
            jobs: &jobs,
            reservations: &reservations,
            cluster_config: &cluster_config,
            user: self.user,
        };
        let (seen, status_numbers) = view.seen_nodes(SystemClock.now(), &self.config);
        *self.status_numbers.lock().unwrap_or_else(PoisonError::into_inner) = status_numbers;
        Ok(seen)
    }

    fn submit(&self, request: &JobRequest) -> Result<JobId, BackendError> {
        self.submit_run(request)
    }

    fn poll(&self, runs: &[RunId]) -> Result<Vec<PolledJob>, BackendError> {
        if runs.is_empty() {
            return Ok(Vec::new());
        }
        let jobs = self.our_jobs("poll", &[])?;
        let mut of_run: HashMap<RunId, Vec<&Job>> = HashMap::new();
        for job in &jobs {
            if let Some(run) = job::run_of(&job.name) {
                of_run.entry(run).or_default().push(job);
            }
        }
        let observe = |run: &RunId| {
            let known = of_run.get(run).and_then(|jobs| job::job_state(*run, jobs));
            // Slurm purges a job soon after its end; the claims on the shared directory remain.
            known.unwrap_or_else(|| {
                self.claims(*run).map_or_else(
                    |error| ObservedJobState::Unknown { why: format!("reading its claims failed: {error}") },
                    |claims| job::state_from_claims(*run, &claims),
                )
            })
        };
        Ok(runs.iter().map(|run| PolledJob { state: observe(run), documents: Vec::new() }).collect())
    }

    fn remaining_output(&self, run: &Run) -> Result<Vec<LastOutput>, BackendError> {
        self.remaining_output_of(run)
    }

    fn cancel(&self, run: RunId) -> Result<(), BackendError> {
        let args = [format!("--name={}", job::name(run)), format!("--user={}", self.user)];
        match self.programs.run("cancel", "scancel", &args, "", Access::Write) {
            Err(error) if error.text.contains("already completing or completed") => Ok(()),
            // Whether or not it took effect, the caller should repeat it.
            Err(error) => Err(BackendError { effect: Effect::Unknown, ..error }),
            Ok(_) => Ok(()),
        }
    }

    fn apply(&self, node: &NodeName, change: &NodeOp) -> Result<(), BackendError> {
        self.apply_change(node, change, None)
    }

    fn apply_with_reason(&self, node: &NodeName, change: &NodeOp, reason: &ChangeReason) -> Result<(), BackendError> {
        self.apply_change(node, change, Some(reason))
    }

    fn status_writer(&self) -> Option<&dyn StatusWriter> {
        (self.config.status_note || self.config.validated_feature.is_some()).then_some(self as &dyn StatusWriter)
    }

    fn collect_report(&self, node: &NodeName, op: OpId) -> ReportProgress {
        self.collect_report_from(node, op)
    }

    fn job_failures(&self, since: Timestamp) -> Result<Vec<ObservedJobFailure>, BackendError> {
        self.failures(since)
    }
}
