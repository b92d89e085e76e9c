//! Node operations beyond marks: resetting GPUs, rebooting and replacing the machine.
//!
//! The caller repeats an operation with the same id until it is done. Each call first queries Slurm for the progress. Reboots and
//! resets happen inside a reservation of ours (see `shelter`), because Slurm resumes a node after rebooting it, drained or not,
//! and starts no job on a drained node. The node is thus reserved before, during and after, and drained again at the end.

use std::{fs, path::PathBuf, time::Duration};

use doctor_backend::{
    BackendError, Effect, Ground,
    hook::{self, Told},
};
use doctor_core::{
    ids::{NodeName, OpId},
    time::{Span, Timestamp},
};

use super::{
    SlurmBackend,
    config::OURS,
    job::{self, Place},
    marks::{self, Update},
    nodes::NodeSeen,
    note::Note,
    programs::Does,
    reservations::Reservation,
    states::{Base, Flag, JobState, Phase},
    submit::FOLDER,
};

/// The limit for a site's replacement hook. Shorter than the default lease, so that the leader still leads when the hook ends.
const HOOK_LIMIT: Duration = Duration::from_secs(40);
/// The time limit of a reset.
const RESET_LIMIT: Span = Span::minutes(10);
/// The tolerance of boot times: Slurm derives them from a clock and an uptime, in whole seconds.
const BLUR: Span = Span::from_secs(5);
const REBOOT: &str = "reboot";
const RESET: &str = "reset";
const REPLACE: &str = "replace";

fn refuse(operation: &'static str, text: String) -> BackendError {
    BackendError { operation, text, effect: Effect::NoneGiveUp }
}

fn later(operation: &'static str, text: String) -> BackendError {
    BackendError { operation, text, effect: Effect::NoneTryAgain }
}

/// The operation was started, and its effect has not been observed yet.
fn under_way(operation: &'static str, text: &str) -> BackendError {
    BackendError { operation, text: text.to_owned(), effect: Effect::Unknown }
}

/// Returns the name of an operation's reservation and job.
fn name(op: OpId) -> String {
    format!("{OURS}{op}")
}

/// The progress of a reboot, as recorded on the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reboot {
    /// It is requested. The time is that of the node's last boot.
    Wanted(Timestamp),
    /// slurmctld has accepted the reboot.
    Told(Timestamp),
    Done,
}

impl Reboot {
    const TOLD: &str = "/told";
    const DONE: &str = "done";

    fn read(text: &str) -> Option<Self> {
        match (text, text.strip_suffix(Self::TOLD)) {
            (Self::DONE, _) => Some(Self::Done),
            (_, Some(at)) => at.parse().ok().map(Self::Told),
            (at, None) => at.parse().ok().map(Self::Wanted),
        }
    }

    fn text(self) -> String {
        match self {
            Self::Wanted(at) => at.to_string(),
            Self::Told(at) => format!("{at}{}", Self::TOLD),
            Self::Done => Self::DONE.to_owned(),
        }
    }
}

/// The next step of a reboot.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    Begin { before: Option<Timestamp> },
    Close,
    Nothing,
    Wait(&'static str),
    GiveUp(&'static str),
}

/// Decides the next step from the record on the node and Slurm's state.
fn next(noted: Option<Reboot>, node: &NodeSeen) -> Next {
    let at_it = node.state.any(&[Flag::RebootRequested, Flag::RebootIssued]).is_some();
    match noted {
        Some(Reboot::Done) => Next::Nothing,
        Some(Reboot::Wanted(before) | Reboot::Told(before)) if has_booted(node, before) => Next::Close,
        _ if at_it => Next::Wait("Slurm is rebooting it"),
        Some(_) if node.reason_text().ends_with("reboot timed out") => {
            Next::GiveUp("it did not come back in time (ResumeTimeout of slurm.conf)")
        }
        Some(Reboot::Told(_)) if is_away(node) => Next::Wait("it has not come back yet"),
        // Slurm does not drop a reboot by itself.
        Some(Reboot::Told(_)) => Next::GiveUp("an operator cancelled it (scontrol cancel_reboot)"),
        Some(Reboot::Wanted(before)) => Next::Begin { before: Some(before) },
        None => Next::Begin { before: None },
    }
}

impl SlurmBackend {
    /// Reboots the node through Slurm. Done when Slurm reports a newer boot.
    pub(super) fn reboot(&self, node: &NodeName, op: OpId, ground: Option<&Ground>) -> Result<(), BackendError> {
        if !self.config.reboot {
            return Err(refuse(REBOOT, "disabled by `backend.slurm.reboot`".to_owned()));
        }
        let now = self.one(REBOOT, node)?;
        let noted = Note::of(&now, &self.config).note().acts.noted(op, REBOOT).and_then(Reboot::read);
        let before = match next(noted, &now) {
            Next::Nothing => return Ok(()),
            Next::Close => return self.close_after_reboot(node, op),
            Next::Wait(why) => return Err(under_way(REBOOT, why)),
            Next::GiveUp(why) => {
                self.leave_shelter(REBOOT, node)?;
                return Err(refuse(REBOOT, why.to_owned()));
            }
            Next::Begin { before } => before,
        };
        self.nobody_is_on(REBOOT, node, &now)?;
        let unknown = || later(REBOOT, "Slurm has not reported its boot time yet".to_owned());
        let before = match before {
            Some(before) => before,
            None => {
                let booted = now.booted.ok_or_else(unknown)?;
                self.note(REBOOT, &now, op, &Reboot::Wanted(booted).text())?;
                booted
            }
        };
        self.shelter(REBOOT, &name(op), std::slice::from_ref(node))?;
        self.nobody_drained(REBOOT, &self.one(REBOOT, node)?)?;
        let case = ground.and_then(|ground| ground.case);
        let words = [
            REBOOT.to_owned(),
            "ASAP".to_owned(),
            "nextstate=RESUME".to_owned(),
            format!("reason={}", marks::reason(case, ground, &self.config)),
            node.to_string(),
        ];
        self.programs.run(REBOOT, "scontrol", &words, "", Does::Changes)?;
        let told = || self.note(REBOOT, &self.one(REBOOT, node)?, op, &Reboot::Told(before).text());
        // If this is not recorded, a reboot that an operator cancels is requested once more.
        let _unwritten = told();
        Err(under_way(REBOOT, "reboot requested"))
    }

    /// Drains the node that Slurm has resumed, even if an operator has deleted its reservation meanwhile.
    fn close_after_reboot(&self, node: &NodeName, op: OpId) -> Result<(), BackendError> {
        self.leave_shelter(REBOOT, node)?;
        let now = self.one(REBOOT, node)?;
        let closing = marks::close(&now, &self.config).unwrap_or_default();
        let mut note = Note::of(&now, &self.config).note();
        note.acts.remember(op, REBOOT, &Reboot::Done.text());
        let field = note.written(&now, &self.config).map_err(|taken| refuse(REBOOT, taken.to_string()))?;
        self.write(REBOOT, &now.name, &Update { field: Some(field), ..closing })
    }

    /// Resets the GPUs through a job on the node. Done when the job has succeeded.
    pub(super) fn reset(&self, node: &NodeName, op: OpId) -> Result<(), BackendError> {
        if self.config.reset.is_empty() {
            return Err(refuse(RESET, "no command is configured (`backend.slurm.reset`)".to_owned()));
        }
        let jobs = self.job_named(RESET, &name(op))?;
        let now = self.one(RESET, node)?;
        let known = Note::of(&now, &self.config).note().acts.noted(op, RESET).is_some();
        match jobs.iter().min_by_key(|job| job.number) {
            Some(job) if job.phase() != Phase::Over => return Err(self.resetting(node, op, job.phase())),
            Some(job) => {
                self.leave_shelter(RESET, node)?;
                return match job.state {
                    Some(JobState::Completed) => Ok(()),
                    state => {
                        let word = state.map_or("unknown", JobState::word);
                        Err(refuse(RESET, format!("the reset job ended as {word}: see {}", self.output(op).display())))
                    }
                };
            }
            // Slurm no longer has the job: its result is unknown.
            None if known => {
                self.leave_shelter(RESET, node)?;
                return Err(refuse(RESET, "the reset job is gone, and how it ended is unknown".to_owned()));
            }
            None => {}
        }
        self.nobody_is_on(RESET, node, &now)?;
        self.shelter(RESET, &name(op), std::slice::from_ref(node))?;
        // The reservation has changed the node's state, so read it again.
        let now = self.one(RESET, node)?;
        self.nobody_drained(RESET, &now)?;
        // Before the job: an unrecorded one would be submitted again after Slurm has purged it.
        self.note(RESET, &now, op, "")?;
        match self.begin_reset(node, &now, op) {
            Ok(()) => Err(under_way(RESET, "reset job submitted")),
            Err(error) => {
                if error.effect != Effect::Unknown {
                    let unmade = |note: &mut Note| note.acts.forget(op, RESET);
                    self.rewrite(RESET, &self.one(RESET, node)?, unmade)?;
                }
                Err(error)
            }
        }
    }

    /// Handles a reset whose job exists. If its reservation is gone, the job would stay pending forever, on a node that was
    /// resumed inside it.
    fn resetting(&self, node: &NodeName, op: OpId, phase: Phase) -> BackendError {
        let sheltered = |all: Vec<Reservation>| all.iter().any(|one| one.name == name(op));
        match self.reservations(RESET).map(sheltered) {
            Ok(false) if phase == Phase::Waiting => {
                let ended = self.cancel_repair(RESET, &name(op)).and_then(|()| self.close(RESET, node));
                match ended {
                    Ok(()) => refuse(RESET, "its reservation was deleted before the reset job started".to_owned()),
                    Err(error) => error,
                }
            }
            Ok(_) => under_way(RESET, "reset job in progress"),
            Err(error) => BackendError { effect: Effect::Unknown, ..error },
        }
    }

    fn close(&self, operation: &'static str, node: &NodeName) -> Result<(), BackendError> {
        let now = self.one(operation, node)?;
        marks::close(&now, &self.config).map_or(Ok(()), |closing| self.write(operation, &now.name, &closing))
    }

    fn begin_reset(&self, node: &NodeName, now: &NodeSeen, op: OpId) -> Result<(), BackendError> {
        let program = self.config.doctor_node.display().to_string();
        let mut words: Vec<String> = [&program, "repair", RESET, "--"].map(str::to_owned).to_vec();
        words.extend(self.config.reset.iter().cloned());
        let (name, output) = (name(op), self.output(op));
        let folder = self.data.join(FOLDER);
        fs::create_dir_all(&folder).map_err(|error| later(RESET, format!("{}: {error}", folder.display())))?;
        let partition = self.partition(std::slice::from_ref(now), RESET_LIMIT)?;
        let place = Place {
            nodes: std::slice::from_ref(node),
            partition: partition.as_deref(),
            // Some GPUs of a machine that needs a reset may be gone; the reservation keeps other jobs off.
            gpus: 0,
            reservation: Some(&name),
        };
        let comment = format!("Cluster Doctor reset {op}");
        let arguments = job::arguments(&name, &comment, &place, RESET_LIMIT, &output, &self.config);
        self.programs.run(RESET, "sbatch", &arguments, &job::errand(&words), Does::Changes).map(drop)
    }

    fn output(&self, op: OpId) -> PathBuf {
        self.share().join(FOLDER).join(format!("repair-{op}.txt"))
    }

    /// Replaces the machine through the site's command.
    pub(super) fn replace(&self, node: &NodeName, op: OpId) -> Result<(), BackendError> {
        if self.config.replace.is_empty() {
            return Err(refuse(REPLACE, "no method is configured (`backend.slurm.replace`)".to_owned()));
        }
        let now = self.one(REPLACE, node)?;
        if Note::of(&now, &self.config).note().acts.noted(op, REPLACE).is_some() {
            return Ok(());
        }
        self.nobody_is_on(REPLACE, node, &now)?;
        let told = Told { words: vec![("node", node.to_string()), ("op", op.to_string())] };
        hook::run(REPLACE, &self.config.replace, &told, HOOK_LIMIT)?;
        // If this fails, the caller repeats it: the hook then receives the same operation id.
        self.note(REPLACE, &now, op, "")
    }

    fn one(&self, operation: &'static str, node: &NodeName) -> Result<NodeSeen, BackendError> {
        let found = self.nodes_named(operation, std::slice::from_ref(node))?.into_iter().next();
        found.ok_or_else(|| refuse(operation, format!("Slurm has no node {node}")))
    }

    /// Fails if an operator took the node out of service since the last snapshot: they work on it, or want it unchanged.
    fn nobody_drained(&self, operation: &'static str, now: &NodeSeen) -> Result<(), BackendError> {
        if !marks::is_out_by_somebody(now, &self.config) {
            return Ok(());
        }
        let by = now.reason.as_ref().and_then(|reason| reason.by.as_deref()).unwrap_or("an unknown user");
        Err(later(operation, format!("{by} took it out of service: {}", now.reason_text())))
    }

    /// Fails while a user's job is on the node. A drained node may still run jobs.
    fn nobody_is_on(&self, operation: &'static str, node: &NodeName, now: &NodeSeen) -> Result<(), BackendError> {
        self.nobody_drained(operation, now)?;
        let working =
            matches!(now.state.base(), Some(Base::Allocated | Base::Mixed)) || now.state.has(Flag::Completing);
        let here = format!("--nodelist={node}");
        let jobs = self.jobs(operation, &[&here])?;
        let mut on_it = jobs.iter().filter(|job| job.phase() == Phase::OnNodes);
        match on_it.next() {
            Some(job) => Err(later(operation, format!("job {} of {} would be killed", job.number, job.user))),
            None if working => Err(later(operation, "a job would be killed".to_owned())),
            None => Ok(()),
        }
    }

    /// Records on the node that this operation was started.
    fn note(&self, operation: &'static str, now: &NodeSeen, op: OpId, text: &str) -> Result<(), BackendError> {
        self.rewrite(operation, now, |note| note.acts.remember(op, operation, text))
    }

    fn rewrite(
        &self,
        operation: &'static str,
        now: &NodeSeen,
        change: impl FnOnce(&mut Note),
    ) -> Result<(), BackendError> {
        let mut note = Note::of(now, &self.config).note();
        change(&mut note);
        let field = note.written(now, &self.config).map_err(|taken| refuse(operation, taken.to_string()))?;
        self.write(operation, &now.name, &Update { field: Some(field), ..Update::default() })
    }
}

fn is_away(node: &NodeSeen) -> bool {
    node.state.any(&[Flag::RebootRequested, Flag::RebootIssued, Flag::NotResponding]).is_some()
        || matches!(node.state.base(), Some(Base::Down | Base::Unheard))
}

fn has_booted(node: &NodeSeen, before: Timestamp) -> bool {
    !is_away(node) && node.booted.is_some_and(|now| now.since(before) > BLUR)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{nodes::Reason, states::State};

    const BEFORE: Timestamp = Timestamp::from_secs(1_794_700_800);

    fn node(state: &str, booted: Timestamp, reason: &str) -> NodeSeen {
        NodeSeen {
            state: State::of_text(state),
            booted: Some(booted),
            reason: Some(Reason { text: reason.to_owned(), by: None }),
            ..NodeSeen::default()
        }
    }

    #[test]
    fn how_far_a_reboot_has_got_reads_back() {
        for reboot in [Reboot::Wanted(BEFORE), Reboot::Told(BEFORE), Reboot::Done] {
            assert_eq!(Reboot::read(&reboot.text()), Some(reboot));
        }
        assert_eq!(Reboot::read("unknown"), None);
    }

    #[test]
    fn a_reboot_ends_with_a_newer_boot_and_is_asked_for_once() {
        let same = |state| node(state, BEFORE, "doctor: x");
        let newer = node("IDLE", BEFORE.plus(Span::minutes(1)), "");
        let (wanted, told) = (Some(Reboot::Wanted(BEFORE)), Some(Reboot::Told(BEFORE)));
        assert_eq!(next(None, &same("IDLE+DRAIN")), Next::Begin { before: None });
        assert_eq!(next(wanted, &same("IDLE+DRAIN")), Next::Begin { before: Some(BEFORE) }, "Slurm was not told");
        for noted in [wanted, told] {
            assert_eq!(next(noted, &newer), Next::Close);
            for under_way in ["IDLE+REBOOT_REQUESTED", "DOWN+REBOOT_ISSUED"] {
                assert!(matches!(next(noted, &same(under_way)), Next::Wait(_)), "{under_way}");
            }
            let late = node("DOWN", BEFORE, "doctor: x : reboot issued : reboot timed out");
            assert!(matches!(next(noted, &late), Next::GiveUp(_)));
        }
        assert!(matches!(next(told, &same("DOWN+NOT_RESPONDING")), Next::Wait(_)));
        assert!(matches!(next(told, &same("IDLE")), Next::GiveUp(_)), "an operator cancelled it");
        assert!(matches!(next(None, &same("IDLE+REBOOT_REQUESTED")), Next::Wait(_)), "a foreign reboot");
        // An operator who resumed the node since then had a reason.
        assert_eq!(next(Some(Reboot::Done), &newer), Next::Nothing);
    }
}
