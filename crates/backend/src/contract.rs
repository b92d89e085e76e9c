//! The contract that every backend keeps, as a test suite that runs against any of them.
//!
//! A backend is done when [`breaches`] finds none on the real system. The [`Backend`] trait cannot make a node busy, lose a job
//! or set a foreign mark; the suite does these through a [`Bed`], which each kind of cluster implements once. The suite reports
//! every broken rule, not only the first.

use std::sync::Arc;

use doctor_core::{
    case::StepKind,
    ids::{IdSource, JobId, NodeName, OpId, RunId},
    node::{MarkKind, Node, Occupancy, OurMark},
    run::{JobEnd, JobSeen},
    time::Timestamp,
};

use super::{Backend, BackendError, Change, Effect, JobRequest, NodeOp, SeenNode};

/// The environment of a backend under test.
pub trait Bed {
    fn now(&self) -> Timestamp;

    /// Returns the node that the suite may use freely. It is free and has no marks.
    fn node(&self) -> NodeName;

    /// Makes the cluster report this occupancy for the node.
    fn occupy(&self, node: &NodeName, wanted: Wanted);

    /// Sets or removes a mark on the node under a foreign owner.
    fn mark_by_somebody_else(&self, node: &NodeName, there: bool);

    /// Returns a request that the backend accepts, on [`Bed::node`].
    fn job(&self, run: RunId, length: Length) -> JobRequest;

    /// Counts the jobs ever started for this run, observed from outside the backend.
    fn jobs_started(&self, run: RunId) -> usize;

    /// Ends the run's job in a way that prevents it from reporting how it ended.
    fn lose(&self, run: RunId);

    /// Counts the resets or reboots of the node so far, observed from outside the backend. `None`: this bed cannot count them,
    /// and repairs are tested elsewhere.
    fn repairs_done(&self, _what: StepKind) -> Option<usize> {
        None
    }

    /// Lets a short time pass: milliseconds of a real clock, seconds of a virtual one.
    fn let_time_pass(&self);

    /// Opens the backend again, as after a controller was killed. `None`: the backend keeps no state.
    fn restarted(&self) -> Option<Box<dyn Backend>> {
        None
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    Free,
    Busy,
    Unknown,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Length {
    /// Ends by itself within a few calls of [`Bed::let_time_pass`].
    Short,
    /// Runs until it is cancelled.
    Endless,
}

/// A broken rule, and what the suite observed instead.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Breach {
    pub rule: &'static str,
    pub seen: String,
}

/// How many times the suite lets time pass before it stops waiting.
const PATIENCE: usize = 1000;

type RuleCheck<'a> = fn(&mut Suite<'a>) -> Result<(), String>;

/// Checks every rule and returns the broken ones. An empty list means that the backend keeps the contract.
pub fn breaches<'a>(backend: &'a dyn Backend, bed: &'a dyn Bed) -> Vec<Breach> {
    let mut suite = Suite { backend, bed, ids: IdSource::new(0xc0de) };
    let rules: [(&'static str, RuleCheck<'a>); 12] = [
        ("every node is in the snapshot, once", Suite::nodes_are_there_once),
        ("unknown and busy are never reported as free", Suite::occupancy_is_told_apart),
        ("a run that was not submitted is absent, and poll results keep their order", Suite::absent_is_said),
        ("submitting twice with one run id gives one job", Suite::submit_is_idempotent),
        ("an ended job is reported as ended and is not started again", Suite::an_end_is_final),
        ("cancelling ends the job; cancelling nothing is fine", Suite::cancel_is_idempotent),
        ("a lost job is reported neither as running nor as successful", Suite::lost_is_said),
        ("a restarted controller finds the job", Suite::a_restart_loses_nothing),
        ("marks and drains are idempotent, visible, and leave foreign marks alone", Suite::marks_are_ours_only),
        ("a repair runs once, and never while the node is in use", Suite::repairs_are_done_once),
        ("a change that is not in caps is refused permanently", Suite::caps_are_the_truth),
        ("an unknown node is refused, without any effect", Suite::strangers_are_refused),
    ];
    let mut broken = Vec::new();
    for (rule, check) in rules {
        let node = bed.node();
        bed.occupy(&node, Wanted::Free);
        if let Err(seen) = check(&mut suite) {
            broken.push(Breach { rule, seen });
        }
        bed.occupy(&node, Wanted::Free);
        bed.mark_by_somebody_else(&node, false);
    }
    broken
}

struct Suite<'a> {
    backend: &'a dyn Backend,
    bed: &'a dyn Bed,
    ids: IdSource,
}

#[expect(clippy::needless_pass_by_value, reason = "map_err passes the error by value")]
fn said(error: BackendError) -> String {
    format!("an error: {error} ({:?})", error.effect)
}

fn must(kept: bool, otherwise: impl FnOnce() -> String) -> Result<(), String> {
    if kept { Ok(()) } else { Err(otherwise()) }
}

const fn job_of(seen: &JobSeen) -> Option<&JobId> {
    match seen {
        JobSeen::Unknown { .. } | JobSeen::Absent => None,
        JobSeen::Pending { job, .. } | JobSeen::Running { job, .. } | JobSeen::Ended { job, .. } => Some(job),
    }
}

impl Suite<'_> {
    fn run(&mut self) -> RunId {
        self.ids.at(self.bed.now());
        self.ids.run()
    }

    fn op(&mut self) -> OpId {
        self.ids.at(self.bed.now());
        self.ids.op()
    }

    fn nodes(&self) -> Result<Vec<SeenNode>, String> {
        self.backend.snapshot().map_err(said)
    }

    fn node(&self) -> Result<Node, String> {
        let name = self.bed.node();
        let found = self.nodes()?.into_iter().find(|seen| seen.node.name == name);
        found.map(|seen| Arc::unwrap_or_clone(seen.node)).ok_or_else(|| format!("no node {name} in the snapshot"))
    }

    fn submit(&self, run: RunId, length: Length) -> Result<JobId, String> {
        self.backend.submit(&self.bed.job(run, length)).map_err(said)
    }

    fn seen(&self, run: RunId) -> Result<JobSeen, String> {
        let polled = self.backend.poll(&[run]).map_err(said)?;
        must(polled.len() == 1, || format!("{} results for a poll of one run", polled.len()))?;
        polled.into_iter().next().map(|job| job.seen).ok_or_else(|| "no result for a poll".to_owned())
    }

    /// Lets time pass until the job satisfies `wanted`.
    fn wait(&self, run: RunId, what: &str, wanted: impl Fn(&JobSeen) -> bool) -> Result<JobSeen, String> {
        for _ in 0..PATIENCE {
            let seen = self.seen(run)?;
            if wanted(&seen) {
                return Ok(seen);
            }
            self.bed.let_time_pass();
        }
        Err(format!("timed out waiting for {what}; state is {:?}", self.seen(run)?))
    }

    fn wait_running(&self, run: RunId) -> Result<JobSeen, String> {
        self.wait(run, "the job to run", |seen| matches!(seen, JobSeen::Running { .. }))
    }

    fn wait_ended(&self, run: RunId) -> Result<JobSeen, String> {
        self.wait(run, "the job to end", |seen| matches!(seen, JobSeen::Ended { .. }))
    }

    /// Cancels the job and waits for its end, so that no job of one rule is still running in the next.
    fn end(&self, run: RunId) -> Result<(), String> {
        self.backend.cancel(run).map_err(said)?;
        self.wait(run, "the job to be gone", |seen| matches!(seen, JobSeen::Ended { .. } | JobSeen::Absent)).map(drop)
    }

    fn nodes_are_there_once(&mut self) -> Result<(), String> {
        let mut names: Vec<_> = self.nodes()?.into_iter().map(|seen| seen.node.name.clone()).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        must(names.len() == count, || format!("{count} nodes under {} names", names.len()))?;
        must(names.contains(&self.bed.node()), || format!("{} is missing", self.bed.node()))
    }

    fn occupancy_is_told_apart(&mut self) -> Result<(), String> {
        let name = self.bed.node();
        for wanted in [Wanted::Unknown, Wanted::Busy, Wanted::Free, Wanted::Unknown] {
            self.bed.occupy(&name, wanted);
            let seen = self.node()?.occupancy;
            let right = match wanted {
                Wanted::Free => seen.is_free(),
                Wanted::Busy => matches!(seen, Occupancy::Busy { .. }),
                Wanted::Unknown => matches!(seen, Occupancy::Unknown { .. }),
            };
            must(right, || format!("a node that is {wanted:?} was reported as {seen:?}"))?;
        }
        Ok(())
    }

    fn absent_is_said(&mut self) -> Result<(), String> {
        let (unsubmitted, ours) = (self.run(), self.run());
        self.submit(ours, Length::Endless)?;
        let polled = self.backend.poll(&[unsubmitted, ours, unsubmitted]).map_err(said)?;
        let seen: Vec<_> = polled.iter().map(|job| &job.seen).collect();
        let right =
            matches!(seen[..], [JobSeen::Absent, JobSeen::Pending { .. } | JobSeen::Running { .. }, JobSeen::Absent]);
        let text = format!("{seen:?}");
        self.end(ours)?;
        must(right, || text)?;
        must(self.backend.poll(&[]).map_err(said)?.is_empty(), || "results for an empty poll".to_owned())
    }

    fn submit_is_idempotent(&mut self) -> Result<(), String> {
        let run = self.run();
        let first = self.submit(run, Length::Endless)?;
        let at_once = self.submit(run, Length::Endless)?;
        let seen = self.wait_running(run)?;
        let later = self.submit(run, Length::Endless)?;
        let started = self.bed.jobs_started(run);
        self.end(run)?;
        must(first == at_once && first == later, || format!("jobs {first:?}, {at_once:?}, {later:?}"))?;
        must(job_of(&seen) == Some(&first), || format!("submitted {first:?}, polled {seen:?}"))?;
        must(started == 1, || format!("{started} jobs were started"))
    }

    fn an_end_is_final(&mut self) -> Result<(), String> {
        let run = self.run();
        let job = self.submit(run, Length::Short)?;
        let ended = self.wait_ended(run)?;
        must(
            matches!(&ended, JobSeen::Ended { started: Some(started), at, how: JobEnd::Exited, .. } if started <= at),
            || format!("a job that ran to its end is {ended:?}"),
        )?;
        must(self.submit(run, Length::Short)? == job, || "another job for a run that had ended".to_owned())?;
        self.bed.let_time_pass();
        let again = self.seen(run)?;
        must(again == ended, || format!("its end changed from {ended:?} to {again:?}"))?;
        must(self.bed.jobs_started(run) == 1, || format!("{} jobs were started", self.bed.jobs_started(run)))
    }

    fn cancel_is_idempotent(&mut self) -> Result<(), String> {
        let (unsubmitted, run) = (self.run(), self.run());
        self.backend.cancel(unsubmitted).map_err(said)?;
        must(self.seen(unsubmitted)? == JobSeen::Absent, || "cancelling an unknown run created a job".to_owned())?;
        self.submit(run, Length::Endless)?;
        self.wait_running(run)?;
        self.backend.cancel(run).map_err(said)?;
        let ended = self.wait_ended(run)?;
        must(!matches!(ended, JobSeen::Ended { how: JobEnd::Exited, .. }), || {
            format!("a cancelled job looks as if it had finished: {ended:?}")
        })?;
        self.backend.cancel(run).map_err(said)?;
        // A job that is cancelled before any poll saw it start must not start afterwards.
        let early = self.run();
        self.submit(early, Length::Endless)?;
        self.backend.cancel(early).map_err(said)?;
        self.wait_ended(early)?;
        self.bed.let_time_pass();
        let still = self.seen(early)?;
        must(matches!(still, JobSeen::Ended { .. }), || format!("a cancelled job came back: {still:?}"))
    }

    fn lost_is_said(&mut self) -> Result<(), String> {
        let run = self.run();
        self.submit(run, Length::Endless)?;
        self.wait_running(run)?;
        self.bed.lose(run);
        let gone = |seen: &JobSeen| matches!(seen, JobSeen::Absent | JobSeen::Ended { .. });
        let seen = self.wait(run, "the lost job to be noticed", gone)?;
        must(matches!(seen, JobSeen::Absent | JobSeen::Ended { how: JobEnd::Lost | JobEnd::NodeDied, .. }), || {
            format!("a lost job is {seen:?}")
        })
    }

    fn a_restart_loses_nothing(&mut self) -> Result<(), String> {
        let Some(successor) = self.bed.restarted() else { return Ok(()) };
        let run = self.run();
        let job = self.submit(run, Length::Endless)?;
        let again = successor.submit(&self.bed.job(run, Length::Endless)).map_err(said)?;
        let before = self.wait_running(run)?;
        let after = successor.poll(&[run]).map_err(said)?.into_iter().next().map(|job| job.seen);
        let started = self.bed.jobs_started(run);
        successor.cancel(run).map_err(said)?;
        let ended = self.wait_ended(run).map(drop);
        must(job == again, || format!("job {job:?} became {again:?}"))?;
        must(after.as_ref() == Some(&before), || format!("{before:?} became {after:?}"))?;
        must(started == 1, || format!("{started} jobs were started"))?;
        ended
    }

    fn marks_are_ours_only(&mut self) -> Result<(), String> {
        let caps = self.backend.caps();
        let name = self.bed.node();
        self.bed.mark_by_somebody_else(&name, true);
        let foreign = self.node()?.marks.foreign;
        must(!foreign.is_empty(), || "the foreign mark is not visible".to_owned())?;
        let case = {
            self.ids.at(self.bed.now());
            self.ids.case()
        };
        let mark = |kind| OurMark { kind, case: Some(case) };
        if caps.mark {
            for kind in [MarkKind::Unhealthy, MarkKind::Maintenance] {
                let pair = (Change::Mark(mark(kind)), Change::Unmark(mark(kind)));
                self.there_and_back(pair, kind)?;
            }
        }
        if caps.drain {
            self.there_and_back((Change::Drain, Change::Undrain), MarkKind::Cordon)?;
        }
        let left = self.node()?.marks;
        must(left.foreign == foreign, || format!("foreign marks were {foreign:?} and are {:?}", left.foreign))?;
        must(left.ours.is_empty(), || format!("our marks remain: {:?}", left.ours))
    }

    /// Applies and reverts a change, each twice, then repeats the first operation: it is already done, so it must have no effect.
    fn there_and_back(&mut self, (there, back): (Change, Change), kind: MarkKind) -> Result<(), String> {
        let name = self.bed.node();
        let first = NodeOp { op: self.op(), what: there };
        let second = NodeOp { op: self.op(), what: back };
        for (op, marked) in [(&first, true), (&first, true), (&second, false), (&second, false), (&first, false)] {
            self.backend.apply(&name, op).map_err(said)?;
            let marks = self.node()?.marks;
            must(marks.has_ours(kind) == marked, || format!("after {:?}: {:?}", op.what, marks.ours))?;
            let count = marks.ours.iter().filter(|mark| mark.kind == kind).count();
            must(count <= 1, || format!("{count} marks {kind}"))?;
        }
        Ok(())
    }

    fn repairs_are_done_once(&mut self) -> Result<(), String> {
        let (backend, bed) = (self.backend, self.bed);
        let (caps, name) = (backend.caps(), bed.node());
        for (able, what) in [(caps.reset, Change::Reset), (caps.reboot, Change::Reboot)] {
            let done = || bed.repairs_done(what.step());
            let Some(before) = done().filter(|_| able) else { continue };
            let first = NodeOp { op: self.op(), what: what.clone() };
            bed.occupy(&name, Wanted::Busy);
            let answer = backend.apply(&name, &first);
            let later = matches!(&answer, Err(error) if error.effect == Effect::NoneTryAgain);
            must(later, || format!("{what:?} of a node in use returned {answer:?}"))?;
            must(done() == Some(before), || format!("{what:?} ran on a node in use"))?;
            bed.occupy(&name, Wanted::Free);
            let mut answer = backend.apply(&name, &first);
            for _ in 0..PATIENCE {
                match &answer {
                    Ok(()) => break,
                    Err(error) if error.effect == Effect::NoneGiveUp => break,
                    Err(_) => bed.let_time_pass(),
                }
                answer = backend.apply(&name, &first);
            }
            answer.map_err(said)?;
            let now = done();
            must(now == Some(before + 1), || format!("{what:?} is done and ran {now:?} times, {before} before"))?;
            // Repeat the operation, here and from a restarted controller.
            backend.apply(&name, &first).map_err(said)?;
            if let Some(successor) = bed.restarted() {
                successor.apply(&name, &first).map_err(said)?;
            }
            let now = done();
            must(now == Some(before + 1), || format!("{what:?} ran again: {now:?}"))?;
        }
        Ok(())
    }

    fn caps_are_the_truth(&mut self) -> Result<(), String> {
        let caps = self.backend.caps();
        let name = self.bed.node();
        let changes = [
            (caps.drain, Change::Drain),
            (caps.evict, Change::Evict),
            (caps.reset, Change::Reset),
            (caps.reboot, Change::Reboot),
            (caps.replace, Change::Replace),
        ];
        for (able, what) in changes {
            if able {
                continue;
            }
            let answer = self.backend.apply(&name, &NodeOp { op: self.op(), what: what.clone() });
            let refused = matches!(&answer, Err(error) if error.effect == Effect::NoneGiveUp);
            must(refused, || format!("{what:?} is not in caps and returned {answer:?}"))?;
        }
        Ok(())
    }

    fn strangers_are_refused(&mut self) -> Result<(), String> {
        let stranger = NodeName::new("no-such-node-anywhere").map_err(|error| error.to_string())?;
        let run = self.run();
        let mut job = self.bed.job(run, Length::Short);
        for output in &mut job.outputs {
            output.node = stranger.clone();
        }
        job.nodes = doctor_core::run::NonEmpty::one(stranger.clone());
        let answer = self.backend.submit(&job);
        must(matches!(&answer, Err(error) if error.effect != Effect::Unknown), || format!("submit: {answer:?}"))?;
        let seen = self.seen(run)?;
        must(seen == JobSeen::Absent, || format!("a refused run is {seen:?}"))?;
        if self.backend.caps().mark {
            let what = Change::Mark(OurMark { kind: MarkKind::Unhealthy, case: None });
            let answer = self.backend.apply(&stranger, &NodeOp { op: self.op(), what });
            must(matches!(&answer, Err(error) if error.effect != Effect::Unknown), || format!("mark: {answer:?}"))?;
        }
        Ok(())
    }
}
