//! The contract that every backend keeps, as a test suite that runs against any of them.
//!
//! A backend is done when [`violations`] finds none on the real system. The [`Backend`] trait cannot make a node busy, lose a job
//! or set a foreign mark; the suite does these through a [`Testbed`], which each kind of cluster implements once. The suite reports
//! every broken rule, not only the first.

use std::{sync::Arc, time::Duration};

use doctor_core::{
    case::StepKind,
    ids::{IdSource, JobId, NodeName, OpId, RunId},
    last_output::LastOutput,
    node::{MarkKind, Node, Occupancy, OurMark},
    reason::WithReason,
    run::{JobEnd, ObservedJobState, Purpose, Run, RunState},
    time::Timestamp,
};

use super::{
    Backend, BackendError, Change, Effect, JobRequest, NodeOp, ObservedNode,
    deadline::{self, Deadline},
};

/// The environment of a backend under test.
pub trait Testbed {
    fn now(&self) -> Timestamp;

    /// Returns the node that the suite may use freely. It is free and has no marks.
    fn node(&self) -> NodeName;

    /// Makes the cluster report this occupancy for the node.
    fn set_occupancy(&self, node: &NodeName, desired: TestOccupancy);

    /// Sets or removes a mark on the node under a foreign owner.
    fn set_foreign_mark(&self, node: &NodeName, present: bool);

    /// Returns a request that the backend accepts, on [`Testbed::node`].
    fn job(&self, run: RunId, length: Length) -> JobRequest;

    /// Counts the jobs ever started for this run, observed from outside the backend.
    fn jobs_started(&self, run: RunId) -> usize;

    /// Ends the run's job in a way that prevents it from reporting how it ended.
    fn lose_job(&self, run: RunId);

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
pub enum TestOccupancy {
    Free,
    Busy,
    Unknown,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Length {
    /// Ends by itself within a few calls of [`Testbed::let_time_pass`].
    Short,
    /// Runs until it is cancelled.
    Endless,
}

/// A broken rule, and what the suite observed instead.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContractViolation {
    pub rule: &'static str,
    pub observed: String,
}

/// How many times the suite lets time pass before it stops waiting.
const PATIENCE: usize = 1000;

/// Returns the run of a request, as the engine knows it.
pub fn run_of(request: JobRequest, planned: Timestamp) -> Run {
    let JobRequest { run, nodes, tests, limit, .. } = request;
    let purpose = WithReason::new(Purpose::Validation, "due", "");
    Run { id: run, nodes, tests, state: RunState::Planned, purpose, case: None, planned, limit }
}

type RuleCheck<'a> = fn(&mut Suite<'a>) -> Result<(), String>;

/// Checks every rule and returns the broken ones. An empty list means that the backend keeps the contract.
pub fn violations<'a>(backend: &'a dyn Backend, testbed: &'a dyn Testbed) -> Vec<ContractViolation> {
    let mut suite = Suite { backend, testbed, ids: IdSource::new(0xc0de) };
    let rules: [(&'static str, RuleCheck<'a>); 13] = [
        ("every node is in the snapshot, once", Suite::nodes_are_listed_once),
        ("unknown and busy are never reported as free", Suite::occupancy_is_distinguished),
        ("a run that was not submitted is absent, and poll results keep their order", Suite::unknown_run_is_absent),
        ("submitting twice with one run id gives one job", Suite::submit_is_idempotent),
        ("an ended job is reported as ended and is not started again", Suite::an_end_is_final),
        (
            "cancelling ends the job, which then says how it ended; cancelling nothing is fine",
            Suite::cancel_is_idempotent,
        ),
        ("a lost job is reported neither as running nor as successful", Suite::lost_job_is_reported),
        ("a restarted controller finds the job", Suite::a_restart_keeps_all_runs),
        ("marks and drains are idempotent, visible, and leave foreign marks alone", Suite::marks_are_ours_only),
        ("a repair runs once, and never while the node is in use", Suite::repairs_are_done_once),
        ("a change that is not in caps is refused permanently", Suite::capabilities_are_accurate),
        ("an unknown node is refused, without any effect", Suite::unknown_nodes_are_rejected),
        ("a call without time left starts nothing late and guesses nothing", Suite::calls_end_in_time),
    ];
    let mut broken = Vec::new();
    for (rule, check) in rules {
        let node = testbed.node();
        testbed.set_occupancy(&node, TestOccupancy::Free);
        if let Err(seen) = check(&mut suite) {
            broken.push(ContractViolation { rule, observed: seen });
        }
        testbed.set_occupancy(&node, TestOccupancy::Free);
        testbed.set_foreign_mark(&node, false);
    }
    broken
}

struct Suite<'a> {
    backend: &'a dyn Backend,
    testbed: &'a dyn Testbed,
    ids: IdSource,
}

#[expect(clippy::needless_pass_by_value, reason = "map_err passes the error by value")]
fn describe_error(error: BackendError) -> String {
    format!("an error: {error} ({:?})", error.effect)
}

fn check(holds: bool, otherwise: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(otherwise()) }
}

const fn job_of(state: &ObservedJobState) -> Option<&JobId> {
    match state {
        ObservedJobState::Unknown { .. } | ObservedJobState::Absent => None,
        ObservedJobState::Pending { job, .. }
        | ObservedJobState::Running { job, .. }
        | ObservedJobState::Ended { job, .. } => Some(job),
    }
}

impl Suite<'_> {
    fn run(&mut self) -> RunId {
        self.ids.set_time(self.testbed.now());
        self.ids.run()
    }

    fn op(&mut self) -> OpId {
        self.ids.set_time(self.testbed.now());
        self.ids.op()
    }

    fn nodes(&self) -> Result<Vec<ObservedNode>, String> {
        self.backend.snapshot().map_err(describe_error)
    }

    fn node(&self) -> Result<Node, String> {
        let name = self.testbed.node();
        let found = self.nodes()?.into_iter().find(|seen| seen.node.name == name);
        found.map(|seen| Arc::unwrap_or_clone(seen.node)).ok_or_else(|| format!("no node {name} in the snapshot"))
    }

    fn submit(&self, run: RunId, length: Length) -> Result<JobId, String> {
        self.backend.submit(&self.testbed.job(run, length)).map_err(describe_error)
    }

    fn poll_one(&self, run: RunId) -> Result<ObservedJobState, String> {
        let polled = self.backend.poll(&[run]).map_err(describe_error)?;
        check(polled.len() == 1, || format!("{} results for a poll of one run", polled.len()))?;
        polled.into_iter().next().map(|job| job.state).ok_or_else(|| "no result for a poll".to_owned())
    }

    /// Lets time pass until the job satisfies `condition`.
    fn wait(
        &self,
        run: RunId,
        what: &str,
        condition: impl Fn(&ObservedJobState) -> bool,
    ) -> Result<ObservedJobState, String> {
        for _ in 0..PATIENCE {
            let seen = self.poll_one(run)?;
            if condition(&seen) {
                return Ok(seen);
            }
            self.testbed.let_time_pass();
        }
        Err(format!("timed out waiting for {what}; state is {:?}", self.poll_one(run)?))
    }

    fn wait_running(&self, run: RunId) -> Result<ObservedJobState, String> {
        self.wait(run, "the job to run", |seen| matches!(seen, ObservedJobState::Running { .. }))
    }

    fn wait_ended(&self, run: RunId) -> Result<ObservedJobState, String> {
        self.wait(run, "the job to end", |seen| matches!(seen, ObservedJobState::Ended { .. }))
    }

    /// Cancels the job and waits for its end, so that no job of one rule is still running in the next.
    fn end(&self, run: RunId) -> Result<(), String> {
        self.backend.cancel(run).map_err(describe_error)?;
        self.wait(run, "the job to be gone", |seen| {
            matches!(seen, ObservedJobState::Ended { .. } | ObservedJobState::Absent)
        })
        .map(drop)
    }

    fn nodes_are_listed_once(&mut self) -> Result<(), String> {
        let mut names: Vec<_> = self.nodes()?.into_iter().map(|seen| seen.node.name.clone()).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        check(names.len() == count, || format!("{count} nodes under {} names", names.len()))?;
        check(names.contains(&self.testbed.node()), || format!("{} is missing", self.testbed.node()))
    }

    fn occupancy_is_distinguished(&mut self) -> Result<(), String> {
        let name = self.testbed.node();
        for desired in [TestOccupancy::Unknown, TestOccupancy::Busy, TestOccupancy::Free, TestOccupancy::Unknown] {
            self.testbed.set_occupancy(&name, desired);
            let seen = self.node()?.occupancy;
            let matches_desired = match desired {
                TestOccupancy::Free => seen.is_free(),
                TestOccupancy::Busy => matches!(seen, Occupancy::Busy { .. }),
                TestOccupancy::Unknown => matches!(seen, Occupancy::Unknown { .. }),
            };
            check(matches_desired, || format!("a node that is {desired:?} was reported as {seen:?}"))?;
        }
        Ok(())
    }

    fn unknown_run_is_absent(&mut self) -> Result<(), String> {
        let (unsubmitted, ours) = (self.run(), self.run());
        self.submit(ours, Length::Endless)?;
        let polled = self.backend.poll(&[unsubmitted, ours, unsubmitted]).map_err(describe_error)?;
        let seen: Vec<_> = polled.iter().map(|job| &job.state).collect();
        let right = matches!(
            seen[..],
            [
                ObservedJobState::Absent,
                ObservedJobState::Pending { .. } | ObservedJobState::Running { .. },
                ObservedJobState::Absent
            ]
        );
        let text = format!("{seen:?}");
        self.end(ours)?;
        check(right, || text)?;
        check(self.backend.poll(&[]).map_err(describe_error)?.is_empty(), || "results for an empty poll".to_owned())
    }

    fn submit_is_idempotent(&mut self) -> Result<(), String> {
        let run = self.run();
        let first = self.submit(run, Length::Endless)?;
        let at_once = self.submit(run, Length::Endless)?;
        let seen = self.wait_running(run)?;
        let later = self.submit(run, Length::Endless)?;
        let started = self.testbed.jobs_started(run);
        self.end(run)?;
        check(first == at_once && first == later, || format!("jobs {first:?}, {at_once:?}, {later:?}"))?;
        check(job_of(&seen) == Some(&first), || format!("submitted {first:?}, polled {seen:?}"))?;
        check(started == 1, || format!("{started} jobs were started"))
    }

    fn an_end_is_final(&mut self) -> Result<(), String> {
        let run = self.run();
        let job = self.submit(run, Length::Short)?;
        let ended = self.wait_ended(run)?;
        check(
            matches!(&ended, ObservedJobState::Ended { started: Some(started), at, how: JobEnd::Exited, .. } if started <= at),
            || format!("a job that ran to its end is {ended:?}"),
        )?;
        check(self.submit(run, Length::Short)? == job, || "another job for a run that had ended".to_owned())?;
        self.testbed.let_time_pass();
        let again = self.poll_one(run)?;
        check(again == ended, || format!("its end changed from {ended:?} to {again:?}"))?;
        check(self.testbed.jobs_started(run) == 1, || format!("{} jobs were started", self.testbed.jobs_started(run)))
    }

    fn cancel_is_idempotent(&mut self) -> Result<(), String> {
        let (unsubmitted, run) = (self.run(), self.run());
        self.backend.cancel(unsubmitted).map_err(describe_error)?;
        check(self.poll_one(unsubmitted)? == ObservedJobState::Absent, || {
            "cancelling an unknown run created a job".to_owned()
        })?;
        self.submit(run, Length::Endless)?;
        self.wait_running(run)?;
        self.backend.cancel(run).map_err(describe_error)?;
        let ended = self.wait_ended(run)?;
        check(!matches!(ended, ObservedJobState::Ended { how: JobEnd::Exited, .. }), || {
            format!("a cancelled job looks as if it had finished: {ended:?}")
        })?;
        self.says_how_it_ended(run)?;
        self.backend.cancel(run).map_err(describe_error)?;
        // A job that is cancelled before any poll saw it start must not start afterwards.
        let early = self.run();
        self.submit(early, Length::Endless)?;
        self.backend.cancel(early).map_err(describe_error)?;
        self.wait_ended(early)?;
        self.testbed.let_time_pass();
        let still = self.poll_one(early)?;
        check(matches!(still, ObservedJobState::Ended { .. }), || format!("a cancelled job came back: {still:?}"))
    }

    /// Checks that a job without a complete result says why, under the run's own nodes.
    fn says_how_it_ended(&self, run: RunId) -> Result<(), String> {
        let run = run_of(self.testbed.job(run, Length::Endless), self.testbed.now());
        let outputs = self.backend.remaining_output(&run).map_err(describe_error)?;
        let says = |output: &LastOutput| run.nodes.contains(&output.node) && output.quote().is_some();
        check(!outputs.is_empty() && outputs.iter().all(says), || format!("a cancelled job says {outputs:?}"))
    }

    fn lost_job_is_reported(&mut self) -> Result<(), String> {
        let run = self.run();
        self.submit(run, Length::Endless)?;
        self.wait_running(run)?;
        self.testbed.lose_job(run);
        let is_gone =
            |seen: &ObservedJobState| matches!(seen, ObservedJobState::Absent | ObservedJobState::Ended { .. });
        let seen = self.wait(run, "the lost job to be noticed", is_gone)?;
        check(
            matches!(
                seen,
                ObservedJobState::Absent | ObservedJobState::Ended { how: JobEnd::Lost | JobEnd::NodeDied, .. }
            ),
            || format!("a lost job is {seen:?}"),
        )
    }

    fn a_restart_keeps_all_runs(&mut self) -> Result<(), String> {
        let Some(successor) = self.testbed.restarted() else { return Ok(()) };
        let run = self.run();
        let job = self.submit(run, Length::Endless)?;
        let again = successor.submit(&self.testbed.job(run, Length::Endless)).map_err(describe_error)?;
        let before = self.wait_running(run)?;
        let after = successor.poll(&[run]).map_err(describe_error)?.into_iter().next().map(|job| job.state);
        let started = self.testbed.jobs_started(run);
        successor.cancel(run).map_err(describe_error)?;
        let ended = self.wait_ended(run).map(drop);
        check(job == again, || format!("job {job:?} became {again:?}"))?;
        check(after.as_ref() == Some(&before), || format!("{before:?} became {after:?}"))?;
        check(started == 1, || format!("{started} jobs were started"))?;
        ended
    }

    fn marks_are_ours_only(&mut self) -> Result<(), String> {
        let caps = self.backend.caps();
        let name = self.testbed.node();
        self.testbed.set_foreign_mark(&name, true);
        let foreign = self.node()?.marks.foreign;
        check(!foreign.is_empty(), || "the foreign mark is not visible".to_owned())?;
        let case = {
            self.ids.set_time(self.testbed.now());
            self.ids.case()
        };
        let mark = |kind| OurMark { kind, case: Some(case) };
        if caps.mark {
            for kind in [MarkKind::Unhealthy, MarkKind::Maintenance] {
                let pair = (Change::Mark(mark(kind)), Change::Unmark(mark(kind)));
                self.apply_and_revert(pair, kind)?;
            }
        }
        if caps.drain {
            self.apply_and_revert((Change::Drain, Change::Undrain), MarkKind::Cordon)?;
        }
        let left = self.node()?.marks;
        check(left.foreign == foreign, || format!("foreign marks were {foreign:?} and are {:?}", left.foreign))?;
        check(left.ours.is_empty(), || format!("our marks remain: {:?}", left.ours))
    }

    /// Applies and reverts a change, each twice, then repeats the first operation: it is already done, so it must have no effect.
    fn apply_and_revert(&mut self, (change, revert): (Change, Change), kind: MarkKind) -> Result<(), String> {
        let name = self.testbed.node();
        let first = NodeOp { op: self.op(), what: change };
        let second = NodeOp { op: self.op(), what: revert };
        for (op, marked) in [(&first, true), (&first, true), (&second, false), (&second, false), (&first, false)] {
            self.backend.apply(&name, op).map_err(describe_error)?;
            let marks = self.node()?.marks;
            check(marks.has_ours(kind) == marked, || format!("after {:?}: {:?}", op.what, marks.ours))?;
            let count = marks.ours.iter().filter(|mark| mark.kind == kind).count();
            check(count <= 1, || format!("{count} marks {kind}"))?;
        }
        Ok(())
    }

    fn repairs_are_done_once(&mut self) -> Result<(), String> {
        let (backend, testbed) = (self.backend, self.testbed);
        let (caps, name) = (backend.caps(), testbed.node());
        for (able, what) in [(caps.reset, Change::Reset), (caps.reboot, Change::Reboot)] {
            let done = || testbed.repairs_done(what.step());
            let Some(before) = done().filter(|_| able) else { continue };
            let first = NodeOp { op: self.op(), what: what.clone() };
            testbed.set_occupancy(&name, TestOccupancy::Busy);
            let result = backend.apply(&name, &first);
            let later = matches!(&result, Err(error) if error.effect == Effect::NotAppliedRetry);
            check(later, || format!("{what:?} of a node in use returned {result:?}"))?;
            check(done() == Some(before), || format!("{what:?} ran on a node in use"))?;
            testbed.set_occupancy(&name, TestOccupancy::Free);
            let mut result = backend.apply(&name, &first);
            for _ in 0..PATIENCE {
                match &result {
                    Ok(()) => break,
                    Err(error) if error.effect == Effect::NotAppliedPermanent => break,
                    Err(_) => testbed.let_time_pass(),
                }
                result = backend.apply(&name, &first);
            }
            result.map_err(describe_error)?;
            let now = done();
            check(now == Some(before + 1), || format!("{what:?} is done and ran {now:?} times, {before} before"))?;
            // Repeat the operation, here and from a restarted controller.
            backend.apply(&name, &first).map_err(describe_error)?;
            if let Some(successor) = testbed.restarted() {
                successor.apply(&name, &first).map_err(describe_error)?;
            }
            let now = done();
            check(now == Some(before + 1), || format!("{what:?} ran again: {now:?}"))?;
        }
        Ok(())
    }

    fn capabilities_are_accurate(&mut self) -> Result<(), String> {
        let caps = self.backend.caps();
        let name = self.testbed.node();
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
            let result = self.backend.apply(&name, &NodeOp { op: self.op(), what: what.clone() });
            let refused = matches!(&result, Err(error) if error.effect == Effect::NotAppliedPermanent);
            check(refused, || format!("{what:?} is not in caps and returned {result:?}"))?;
        }
        Ok(())
    }

    fn unknown_nodes_are_rejected(&mut self) -> Result<(), String> {
        let unknown_node = NodeName::new("no-such-node-anywhere").map_err(|error| error.to_string())?;
        let run = self.run();
        let mut job = self.testbed.job(run, Length::Short);
        for output in &mut job.outputs {
            output.node = unknown_node.clone();
        }
        job.nodes = doctor_core::run::NonEmpty::one(unknown_node.clone());
        let result = self.backend.submit(&job);
        check(matches!(&result, Err(error) if error.effect != Effect::Unknown), || format!("submit: {result:?}"))?;
        let seen = self.poll_one(run)?;
        check(seen == ObservedJobState::Absent, || format!("a refused run is {seen:?}"))?;
        if self.backend.caps().mark {
            let what = Change::Mark(OurMark { kind: MarkKind::Unhealthy, case: None });
            let result = self.backend.apply(&unknown_node, &NodeOp { op: self.op(), what });
            check(matches!(&result, Err(error) if error.effect != Effect::Unknown), || format!("mark: {result:?}"))?;
        }
        Ok(())
    }

    /// A call whose deadline has passed does what needs no time, or fails and may be repeated.
    fn calls_end_in_time(&mut self) -> Result<(), String> {
        let (backend, testbed) = (self.backend, self.testbed);
        let late = || Some(Deadline::after(Duration::ZERO));
        let may_repeat = |error: &BackendError| error.effect == Effect::NotAppliedRetry;
        let unsent = self.run();
        match deadline::enter(late(), || backend.submit(&testbed.job(unsent, Length::Endless))) {
            Ok(_) => {
                backend.cancel(unsent).map_err(describe_error)?;
                self.wait_ended(unsent)?;
            }
            Err(error) => {
                check(may_repeat(&error), || format!("a submission that was never sent: {}", describe_error(error)))?;
                check(self.poll_one(unsent)? == ObservedJobState::Absent, || "the job exists".to_owned())?;
                check(testbed.jobs_started(unsent) == 0, || "the job was started".to_owned())?;
            }
        }
        let run = self.run();
        self.submit(run, Length::Endless)?;
        self.wait_running(run)?;
        let polled = deadline::enter(late(), || backend.poll(&[run]));
        let seen = polled.map(|jobs| jobs.into_iter().map(|job| job.state).collect::<Vec<_>>());
        let guesses =
            |state: &ObservedJobState| matches!(state, ObservedJobState::Absent | ObservedJobState::Ended { .. });
        check(!seen.as_ref().is_ok_and(|states| states.iter().any(guesses)), || format!("a running job is {seen:?}"))?;
        let nodes = deadline::enter(late(), || backend.snapshot());
        let listed = nodes.as_ref().map_or(true, |nodes| nodes.iter().any(|seen| seen.node.name == testbed.node()));
        check(listed, || "the node is absent from a snapshot that had no time".to_owned())?;
        backend.cancel(run).map_err(describe_error)?;
        self.wait_ended(run).map(drop)
    }
}
