//! Node operations beyond marks: resetting GPUs, rebooting and replacing the machine.
//!
//! The caller repeats an operation with the same id until it is done. Each call first queries Slurm for the progress. Reboots and
//! resets happen inside a reservation of ours (see `maintenance_reservation`), because Slurm resumes a node after rebooting it,
//! drained or not, and starts no job on a drained node. The node is thus reserved before, during and after, and drained again at the end.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use doctor_backend::{
    BackendError, ChangeReason, Effect,
    site_command::{self, HookParams},
};
use doctor_core::{
    ids::{NodeName, OpId},
    time::{Span, Timestamp},
};

use super::{
    SlurmBackend,
    config::JOB_PREFIX,
    drain_reason::drain_reason,
    job::{self, Placement},
    marks::{self, NodeUpdate},
    node_comment::Note,
    nodes::SlurmNode,
    programs::Access,
    reservations::Reservation,
    states::{Base, Flag, JobState, Phase},
    submit::FOLDER,
};

/// The limit for a site's replacement hook. Shorter than the default lease, so that the leader still leads when the hook ends.
const HOOK_LIMIT: Duration = Duration::from_secs(40);
/// The time limit of a reset.
const RESET_LIMIT: Span = Span::minutes(10);
/// The tolerance of boot times: Slurm derives them from a clock and an uptime, in whole seconds.
const BOOT_TIME_TOLERANCE: Span = Span::from_secs(5);
const REBOOT: &str = "reboot";
const RESET: &str = "reset";
const REPLACE: &str = "replace";

pub(super) fn permanent_error(operation: &'static str, text: String) -> BackendError {
    BackendError { operation, text, effect: Effect::NotAppliedPermanent }
}

pub(super) fn retryable_error(operation: &'static str, text: String) -> BackendError {
    BackendError { operation, text, effect: Effect::NotAppliedRetry }
}

/// The operation was started, and its effect has not been observed yet.
fn in_progress_error(operation: &'static str, text: &str) -> BackendError {
    BackendError { operation, text: text.to_owned(), effect: Effect::Unknown }
}

/// Returns the name of an operation's reservation and job.
pub(super) fn op_name(op: OpId) -> String {
    format!("{JOB_PREFIX}{op}")
}

/// The progress of a reboot, as recorded on the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RebootRecord {
    /// It is requested. The time is that of the node's last boot.
    Requested(Timestamp),
    /// slurmctld has accepted the reboot.
    Issued(Timestamp),
    Done,
}

impl RebootRecord {
    const ISSUED: &str = "/told";
    const DONE: &str = "done";

    fn read(text: &str) -> Option<Self> {
        match (text, text.strip_suffix(Self::ISSUED)) {
            (Self::DONE, _) => Some(Self::Done),
            (_, Some(at)) => at.parse().ok().map(Self::Issued),
            (at, None) => at.parse().ok().map(Self::Requested),
        }
    }

    fn text(self) -> String {
        match self {
            Self::Requested(at) => at.to_string(),
            Self::Issued(at) => format!("{at}{}", Self::ISSUED),
            Self::Done => Self::DONE.to_owned(),
        }
    }
}

/// The next step of a reboot.
#[derive(Debug, PartialEq, Eq)]
enum RebootStep {
    Begin { before: Option<Timestamp> },
    Close,
    Nothing,
    Wait(&'static str),
    GiveUp(&'static str),
}

/// Decides the next step from the record on the node and Slurm's state.
fn next_reboot_step(recorded: Option<RebootRecord>, node: &SlurmNode) -> RebootStep {
    let at_it = node.state.any(&[Flag::RebootRequested, Flag::RebootIssued]).is_some();
    match recorded {
        Some(RebootRecord::Done) => RebootStep::Nothing,
        Some(RebootRecord::Requested(before) | RebootRecord::Issued(before)) if has_booted(node, before) => {
            RebootStep::Close
        }
        _ if at_it => RebootStep::Wait("Slurm is rebooting it"),
        Some(_) if node.reason_text().ends_with("reboot timed out") => {
            RebootStep::GiveUp("it did not come back in time (ResumeTimeout of slurm.conf)")
        }
        Some(RebootRecord::Issued(_)) if !responds(node) || node.state.base() == Some(Base::Down) => {
            RebootStep::Wait("it has not come back yet")
        }
        // Slurm does not drop a reboot by itself.
        Some(RebootRecord::Issued(_)) => RebootStep::GiveUp("an operator cancelled it (scontrol cancel_reboot)"),
        Some(RebootRecord::Requested(before)) => RebootStep::Begin { before: Some(before) },
        None => RebootStep::Begin { before: None },
    }
}

impl SlurmBackend {
    /// Reboots the node through Slurm. Done when Slurm reports a newer boot.
    pub(super) fn reboot(&self, node: &NodeName, op: OpId, reason: Option<&ChangeReason>) -> Result<(), BackendError> {
        if !self.config.reboot {
            return Err(permanent_error(REBOOT, "disabled by `backend.slurm.reboot`".to_owned()));
        }
        let now = self.read_node(REBOOT, node)?;
        let recorded = Note::read(&now, &self.config).into_note().node_ops.get(op, REBOOT).and_then(RebootRecord::read);
        let before = match next_reboot_step(recorded, &now) {
            RebootStep::Nothing => return Ok(()),
            RebootStep::Close => return self.close_after_reboot(node, op),
            RebootStep::Wait(why) => return Err(in_progress_error(REBOOT, why)),
            RebootStep::GiveUp(why) => {
                self.end_our_reservations(REBOOT, node)?;
                return Err(permanent_error(REBOOT, why.to_owned()));
            }
            RebootStep::Begin { before } => before,
        };
        self.require_no_jobs(REBOOT, node, &now)?;
        let unknown = || retryable_error(REBOOT, "Slurm has not reported its boot time yet".to_owned());
        let before = match before {
            Some(before) => before,
            None => {
                let booted = now.booted.ok_or_else(unknown)?;
                self.record_op(REBOOT, &now, op, &RebootRecord::Requested(booted).text())?;
                booted
            }
        };
        self.reserve_and_resume(REBOOT, &op_name(op), std::slice::from_ref(node))?;
        self.require_not_out_by_others(REBOOT, &self.read_node(REBOOT, node)?)?;
        let case = reason.and_then(|reason| reason.case);
        let args = [
            REBOOT.to_owned(),
            "ASAP".to_owned(),
            "nextstate=RESUME".to_owned(),
            format!("reason={}", drain_reason(case, reason, &self.config)),
            node.to_string(),
        ];
        self.programs.run(REBOOT, "scontrol", &args, "", Access::Write)?;
        let record_issued =
            || self.record_op(REBOOT, &self.read_node(REBOOT, node)?, op, &RebootRecord::Issued(before).text());
        // If this is not recorded, a reboot that an operator cancels is requested once more.
        let _unwritten = record_issued();
        Err(in_progress_error(REBOOT, "reboot requested"))
    }

    /// Drains the node that Slurm has resumed, even if an operator has deleted its reservation meanwhile.
    fn close_after_reboot(&self, node: &NodeName, op: OpId) -> Result<(), BackendError> {
        self.end_our_reservations(REBOOT, node)?;
        let now = self.read_node(REBOOT, node)?;
        let closing = marks::closing_update(&now, &self.config).unwrap_or_default();
        let mut note = Note::read(&now, &self.config).into_note();
        note.node_ops.record(op, REBOOT, &RebootRecord::Done.text());
        let field = note.to_field(&now, &self.config).map_err(|in_use| permanent_error(REBOOT, in_use.to_string()))?;
        self.write(REBOOT, &now.name, &NodeUpdate { field: Some(field), ..closing })
    }

    /// Resets the GPUs through a job on the node. Done when the job has succeeded.
    pub(super) fn reset(&self, node: &NodeName, op: OpId) -> Result<(), BackendError> {
        if self.config.reset.is_empty() {
            return Err(permanent_error(RESET, "no command is configured (`backend.slurm.reset`)".to_owned()));
        }
        let jobs = self.job_named(RESET, &op_name(op))?;
        let now = self.read_node(RESET, node)?;
        let known = Note::read(&now, &self.config).into_note().node_ops.get(op, RESET).is_some();
        match jobs.iter().min_by_key(|job| job.number) {
            Some(job) if job.phase() != Phase::Ended => return Err(self.reset_in_progress(node, op, job.phase())),
            Some(job) => {
                self.end_our_reservations(RESET, node)?;
                return match job.state {
                    Some(JobState::Completed) => Ok(()),
                    state => {
                        let state_name = state.map_or("unknown", JobState::word);
                        Err(permanent_error(
                            RESET,
                            format!("the reset job ended as {state_name}: see {}", self.output_path(op).display()),
                        ))
                    }
                };
            }
            // Slurm no longer has the job: its result is unknown.
            None if known => {
                self.end_our_reservations(RESET, node)?;
                return Err(permanent_error(RESET, "the reset job is gone, and how it ended is unknown".to_owned()));
            }
            None => {}
        }
        self.require_no_jobs(RESET, node, &now)?;
        self.reserve_and_resume(RESET, &op_name(op), std::slice::from_ref(node))?;
        // The reservation has changed the node's state, so read it again.
        let now = self.read_node(RESET, node)?;
        self.require_not_out_by_others(RESET, &now)?;
        // Before the job: an unrecorded one would be submitted again after Slurm has purged it.
        self.record_op(RESET, &now, op, "")?;
        match self.submit_reset(node, &now, op) {
            Ok(()) => Err(in_progress_error(RESET, "reset job submitted")),
            Err(error) => {
                if error.effect != Effect::Unknown {
                    let unmade = |note: &mut Note| note.node_ops.remove(op, RESET);
                    self.rewrite_note(RESET, &self.read_node(RESET, node)?, unmade)?;
                }
                Err(error)
            }
        }
    }

    /// Handles a reset whose job exists. If its reservation is gone, the job would stay pending forever, on a node that was
    /// resumed inside it.
    fn reset_in_progress(&self, node: &NodeName, op: OpId, phase: Phase) -> BackendError {
        let is_reserved = |all: Vec<Reservation>| all.iter().any(|one| one.name == op_name(op));
        match self.reservations(RESET).map(is_reserved) {
            Ok(false) if phase == Phase::Pending => {
                let ended = self.cancel_repair(RESET, &op_name(op)).and_then(|()| self.close(RESET, node));
                match ended {
                    Ok(()) => {
                        permanent_error(RESET, "its reservation was deleted before the reset job started".to_owned())
                    }
                    Err(error) => error,
                }
            }
            Ok(_) => in_progress_error(RESET, "reset job in progress"),
            Err(error) => BackendError { effect: Effect::Unknown, ..error },
        }
    }

    fn close(&self, operation: &'static str, node: &NodeName) -> Result<(), BackendError> {
        let now = self.read_node(operation, node)?;
        marks::closing_update(&now, &self.config).map_or(Ok(()), |closing| self.write(operation, &now.name, &closing))
    }

    fn submit_reset(&self, node: &NodeName, now: &SlurmNode, op: OpId) -> Result<(), BackendError> {
        let program = self.config.doctor_node.display().to_string();
        let mut args: Vec<String> = [&program, "repair", RESET, "--"].map(str::to_owned).to_vec();
        args.extend(self.config.reset.iter().cloned());
        let (name, output) = (op_name(op), self.output_path(op));
        self.share_files
            .call("making the folder of repairs", |root| root.make_subdirectory(Path::new(FOLDER)).map(drop))
            .map_err(|error| retryable_error(RESET, error.to_string()))?;
        let partition = self.partition(std::slice::from_ref(now), RESET_LIMIT)?;
        let placement = Placement {
            nodes: std::slice::from_ref(node),
            partition: partition.as_deref(),
            // Some GPUs of a machine that needs a reset may be gone; the reservation keeps other jobs off.
            gpus: 0,
            reservation: Some(&name),
        };
        let comment = format!("Cluster Doctor reset {op}");
        let arguments = job::arguments(&name, &comment, &placement, RESET_LIMIT, &output, &self.config);
        self.programs.run(RESET, "sbatch", &arguments, &job::repair_script(&args), Access::Write).map(drop)
    }

    fn output_path(&self, op: OpId) -> PathBuf {
        self.share_path().join(FOLDER).join(format!("repair-{op}.txt"))
    }

    /// Replaces the machine through the site's command.
    pub(super) fn replace(&self, node: &NodeName, op: OpId) -> Result<(), BackendError> {
        if self.config.replace.is_empty() {
            return Err(permanent_error(REPLACE, "no method is configured (`backend.slurm.replace`)".to_owned()));
        }
        let now = self.read_node(REPLACE, node)?;
        if Note::read(&now, &self.config).into_note().node_ops.get(op, REPLACE).is_some() {
            return Ok(());
        }
        self.require_no_jobs(REPLACE, node, &now)?;
        let params = HookParams { values: vec![("node", node.to_string()), ("op", op.to_string())] };
        site_command::run(REPLACE, &self.config.replace, &params, HOOK_LIMIT)?;
        // If this fails, the caller repeats it: the hook then receives the same operation id.
        self.record_op(REPLACE, &now, op, "").map_err(|failed| in_progress_error(REPLACE, &failed.text))
    }

    fn read_node(&self, operation: &'static str, node: &NodeName) -> Result<SlurmNode, BackendError> {
        let found = self.nodes_named(operation, std::slice::from_ref(node))?.into_iter().next();
        found.ok_or_else(|| permanent_error(operation, format!("Slurm has no node {node}")))
    }

    /// Fails if an operator took the node out of service since the last snapshot: they work on it, or want it unchanged.
    fn require_not_out_by_others(&self, operation: &'static str, now: &SlurmNode) -> Result<(), BackendError> {
        if !marks::is_out_by_others(now, &self.config) {
            return Ok(());
        }
        let by = now.reason.as_ref().and_then(|reason| reason.by.as_deref()).unwrap_or("an unknown user");
        Err(retryable_error(operation, format!("{by} took it out of service: {}", now.reason_text())))
    }

    /// Fails while a user's job is on the node. A drained node may still run jobs.
    pub(super) fn require_no_jobs(
        &self,
        operation: &'static str,
        node: &NodeName,
        now: &SlurmNode,
    ) -> Result<(), BackendError> {
        self.require_not_out_by_others(operation, now)?;
        let working =
            matches!(now.state.base(), Some(Base::Allocated | Base::Mixed)) || now.state.has(Flag::Completing);
        let here = format!("--nodelist={node}");
        let jobs = self.jobs(operation, &[&here])?;
        let mut active = jobs.iter().filter(|job| job.phase() == Phase::Active);
        match active.next() {
            Some(job) => Err(retryable_error(operation, format!("job {} of {} would be killed", job.number, job.user))),
            None if working => Err(retryable_error(operation, "a job would be killed".to_owned())),
            None => Ok(()),
        }
    }

    /// Records on the node that this operation was started.
    fn record_op(&self, operation: &'static str, now: &SlurmNode, op: OpId, text: &str) -> Result<(), BackendError> {
        self.rewrite_note(operation, now, |note| note.node_ops.record(op, operation, text))
    }

    fn rewrite_note(
        &self,
        operation: &'static str,
        now: &SlurmNode,
        change: impl FnOnce(&mut Note),
    ) -> Result<(), BackendError> {
        let mut note = Note::read(now, &self.config).into_note();
        change(&mut note);
        let field =
            note.to_field(now, &self.config).map_err(|in_use| permanent_error(operation, in_use.to_string()))?;
        self.write(operation, &now.name, &NodeUpdate { field: Some(field), ..NodeUpdate::default() })
    }
}

pub(super) fn responds(node: &SlurmNode) -> bool {
    node.state.any(&[Flag::RebootRequested, Flag::RebootIssued, Flag::NotResponding]).is_none()
        && node.state.base() != Some(Base::Unregistered)
}

/// Returns whether the node has booted and responds. Slurm may have set it down since then: when it registers after
/// `ResumeTimeout`, or twice ("Node unexpectedly rebooted").
fn has_booted(node: &SlurmNode, before: Timestamp) -> bool {
    responds(node) && node.booted.is_some_and(|now| now.since(before) > BOOT_TIME_TOLERANCE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{nodes::Reason, states::SlurmNodeState};

    const BEFORE: Timestamp = Timestamp::from_secs(1_794_700_800);

    fn node(state: &str, booted: Timestamp, reason: &str) -> SlurmNode {
        SlurmNode {
            state: SlurmNodeState::parse(state),
            booted: Some(booted),
            reason: Some(Reason { text: reason.to_owned(), by: None }),
            ..SlurmNode::default()
        }
    }

    #[test]
    fn a_reboot_record_is_read_back() {
        for reboot in [RebootRecord::Requested(BEFORE), RebootRecord::Issued(BEFORE), RebootRecord::Done] {
            assert_eq!(RebootRecord::read(&reboot.text()), Some(reboot));
        }
        assert_eq!(RebootRecord::read("unknown"), None);
    }

    #[test]
    fn a_reboot_ends_with_a_newer_boot_time_and_is_requested_once() {
        let same = |state| node(state, BEFORE, "doctor: x");
        let newer = node("IDLE", BEFORE.plus(Span::minutes(1)), "");
        let (requested, issued) = (Some(RebootRecord::Requested(BEFORE)), Some(RebootRecord::Issued(BEFORE)));
        assert_eq!(next_reboot_step(None, &same("IDLE+DRAIN")), RebootStep::Begin { before: None });
        assert_eq!(
            next_reboot_step(requested, &same("IDLE+DRAIN")),
            RebootStep::Begin { before: Some(BEFORE) },
            "Slurm was not told"
        );
        for recorded in [requested, issued] {
            assert_eq!(next_reboot_step(recorded, &newer), RebootStep::Close);
            for under_way in ["IDLE+REBOOT_REQUESTED", "DOWN+REBOOT_ISSUED"] {
                assert!(matches!(next_reboot_step(recorded, &same(under_way)), RebootStep::Wait(_)), "{under_way}");
            }
            let gone = node("DOWN", BEFORE, "doctor: x : reboot issued : reboot timed out");
            assert!(matches!(next_reboot_step(recorded, &gone), RebootStep::GiveUp(_)));
            for reason in ["doctor: x : reboot issued : reboot timed out", "Node unexpectedly rebooted"] {
                let late = node("DOWN", BEFORE.plus(Span::minutes(1)), reason);
                assert_eq!(next_reboot_step(recorded, &late), RebootStep::Close, "{reason}");
                let lost = SlurmNode { state: SlurmNodeState::parse("DOWN+NOT_RESPONDING"), ..late };
                assert_ne!(next_reboot_step(recorded, &lost), RebootStep::Close, "{reason}");
            }
        }
        assert!(matches!(next_reboot_step(issued, &same("DOWN+NOT_RESPONDING")), RebootStep::Wait(_)));
        assert!(matches!(next_reboot_step(issued, &same("IDLE")), RebootStep::GiveUp(_)), "an operator cancelled it");
        assert!(
            matches!(next_reboot_step(None, &same("IDLE+REBOOT_REQUESTED")), RebootStep::Wait(_)),
            "a foreign reboot"
        );
        // An operator who resumed the node since then had a reason.
        assert_eq!(next_reboot_step(Some(RebootRecord::Done), &newer), RebootStep::Nothing);
    }
}
