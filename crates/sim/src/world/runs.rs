//! Our jobs: submitted, pending, running test by test, and ended in one way or another.

use std::collections::VecDeque;

use doctor_backend::{BackendError, Effect as After, JobRequest, PolledJob};
use doctor_checks::document::TestEvidence;
use doctor_core::{
    ids::{JobId, NodeName, RunId, TestId},
    last_output::LastOutput,
    run::{JobEnd, ObservedJobState},
    time::{Span, Timestamp},
};

use super::{World, event_queue::Event, share};
use crate::{
    disruptions::{Call, CallFailure, JobFault},
    effects::EffectKind,
    machine::scaled,
    random::Purpose,
    shipped_tests, simulated_tests,
};

/// How long after a job's end its results are kept for polls.
const RESULT_RETENTION: Span = Span::days(1);

/// One job of ours.
#[derive(Debug)]
pub(super) struct TestRun {
    pub(super) request: JobRequest,
    job: JobId,
    pub(super) slots: Vec<u32>,
    pub(super) phase: Phase,
    submitted: Timestamp,
    pub(super) trouble: Option<JobFault>,
    /// The durations of the tests, drawn at the start.
    lengths: Vec<Span>,
    /// When the current test began.
    pub(super) test_began: Timestamp,
    /// The evidence of finished tests, by node, then by test.
    pub(super) evidence: Vec<Vec<TestEvidence>>,
    /// Signed results, ready for delivery.
    pub(super) documents: Vec<Vec<u8>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Pending,
    Running {
        since: Timestamp,
    },
    /// Cancelled, but still on its nodes.
    Dying {
        since: Timestamp,
    },
    Ended {
        started: Option<Timestamp>,
        at: Timestamp,
        how: JobEnd,
    },
}

impl TestRun {
    /// Whether it is on its nodes, cancelled or not.
    pub(super) const fn is_running(&self) -> bool {
        matches!(self.phase, Phase::Running { .. } | Phase::Dying { .. })
    }

    const fn started(&self) -> Option<Timestamp> {
        match self.phase {
            Phase::Pending => None,
            Phase::Running { since } | Phase::Dying { since } => Some(since),
            Phase::Ended { started, .. } => started,
        }
    }

    #[expect(clippy::cast_precision_loss, reason = "a job has few nodes")]
    pub(super) fn node_hours_under_way(&self, now: Timestamp) -> f64 {
        match self.phase {
            Phase::Running { since } | Phase::Dying { since } => now.since(since).as_hours() * self.slots.len() as f64,
            Phase::Pending | Phase::Ended { .. } => 0.0,
        }
    }

    fn seen(&self) -> ObservedJobState {
        let job = self.job.clone();
        match self.phase {
            Phase::Pending => ObservedJobState::Pending { job, since: self.submitted },
            Phase::Running { since } | Phase::Dying { since } => ObservedJobState::Running { job, since },
            Phase::Ended { started, at, how } => ObservedJobState::Ended { job, started, at, how },
        }
    }
}

/// Ended jobs whose results are still kept, oldest first.
pub(super) type KeptResults = VecDeque<(Timestamp, u32)>;

impl World {
    /// Creates a job for a run, or returns its existing job.
    ///
    /// # Errors Like a cluster: for unknown nodes or tests and invalid paths, and by hostile behaviour.
    pub fn submit(&mut self, request: &JobRequest) -> Result<JobId, BackendError> {
        const SUBMIT: &str = "submit";
        self.check_reachable(SUBMIT)?;
        if let Some(&known) = self.by_run.get(&request.run) {
            self.log(EffectKind::SubmittedAgain { run: request.run });
            return Ok(self.runs[known as usize].job.clone());
        }
        let failure = self.check_refused(SUBMIT, Call::Submit)?;
        let refuse = |text: String| BackendError { operation: SUBMIT, text, effect: After::NotAppliedPermanent };
        let slots = request.nodes.iter().map(|node| self.find(SUBMIT, node)).collect::<Result<Vec<_>, _>>()?;
        if let Some(test) = request.tests.iter().find(|test| self.typical_duration(test).is_none()) {
            return Err(refuse(format!("the simulated nodes have no test `{test}`")));
        }
        if let Some(output) = request.outputs.iter().find(|output| !share::is_inside(output)) {
            return Err(refuse(format!("`{}` is not inside the shared directory", output.document.display())));
        }
        let job = self.make_run(request, slots);
        self.check_answered(SUBMIT, failure)?;
        Ok(job)
    }

    fn make_run(&mut self, request: &JobRequest, slots: Vec<u32>) -> JobId {
        let number = u32::try_from(self.runs.len()).unwrap_or(u32::MAX);
        let job = JobId(format!("sim-{}", number + 1));
        let nodes = slots.iter().map(|slot| self.target(*slot)).collect();
        self.log(EffectKind::Submitted { run: request.run, nodes, tests: request.tests.to_vec() });
        for &slot in &slots {
            self.slot_mut(slot).runs.push(number);
            self.note_change(slot);
        }
        let fault = self.job_trouble();
        self.runs.push(TestRun {
            evidence: vec![Vec::new(); slots.len()],
            request: request.clone(),
            job: job.clone(),
            slots,
            phase: Phase::Pending,
            submitted: self.now,
            trouble: fault,
            lengths: Vec::new(),
            test_began: self.now,
            documents: Vec::new(),
        });
        self.by_run.insert(request.run, number);
        self.schedule_start(number);
        job
    }

    /// Returns the states of runs, in the order of the request.
    ///
    /// # Errors While the cluster does not answer.
    pub fn poll(&mut self, runs: &[RunId]) -> Result<Vec<PolledJob>, BackendError> {
        self.check_reachable("poll")?;
        let carry = self.config.carry_documents;
        let answer = |run: &RunId| match self.by_run.get(run) {
            None => PolledJob { state: ObservedJobState::Absent, documents: Vec::new() },
            Some(&known) => {
                if let Some(why) = self.hanging_host(known) {
                    return PolledJob { state: ObservedJobState::Unknown { why }, documents: Vec::new() };
                }
                let run = &self.runs[known as usize];
                let documents = if carry { run.documents.clone() } else { Vec::new() };
                PolledJob { state: run.seen(), documents }
            }
        };
        Ok(runs.iter().map(answer).collect())
    }

    /// Returns what is left of a run's job: how it ended, and the last line of one that crashed.
    ///
    /// # Errors While the cluster does not answer.
    pub fn remaining_output(&self, run: RunId) -> Result<Vec<LastOutput>, BackendError> {
        self.check_reachable("read the output of a job")?;
        let Some(&known) = self.by_run.get(&run) else { return Ok(Vec::new()) };
        let run = &self.runs[known as usize];
        let (ending, text) = match (run.phase, run.trouble) {
            (Phase::Pending, _) => ("pending: no resources".to_owned(), ""),
            (Phase::Running { .. } | Phase::Dying { .. }, _) => return Ok(Vec::new()),
            (Phase::Ended { how: JobEnd::Failed, .. }, Some(JobFault::Crashes)) => {
                ("failed, exit code 137".to_owned(), "doctor-node: out of memory\nKilled\n")
            }
            (Phase::Ended { how, .. }, _) => (how.code().to_owned(), ""),
        };
        let output =
            |node: &NodeName| LastOutput { node: node.clone(), ending: Some(ending.clone()), text: text.to_owned() };
        Ok(run.request.nodes.iter().map(output).collect())
    }

    /// Ends the job of a run. A job that does not exist or has ended is not an error.
    ///
    /// # Errors By hostile behaviour.
    pub fn cancel(&mut self, run: RunId) -> Result<(), BackendError> {
        const CANCEL: &str = "cancel";
        self.check_reachable(CANCEL)?;
        let Some(&number) = self.by_run.get(&run) else { return Ok(()) };
        if let Some(text) = self.hanging_host(number) {
            return Err(BackendError { operation: CANCEL, text, effect: After::NotAppliedRetry });
        }
        let failure = self.check_refused(CANCEL, Call::Cancel)?;
        match self.runs[number as usize].phase {
            Phase::Pending => {
                self.log(EffectKind::CancelRequested { run });
                self.end_run(number, JobEnd::Killed);
            }
            Phase::Running { since } => {
                self.log(EffectKind::CancelRequested { run });
                self.runs[number as usize].phase = Phase::Dying { since };
                self.queue.push(self.now.plus(self.config.assumptions.cancel_takes), Event::RunKilled(number));
            }
            Phase::Dying { .. } | Phase::Ended { .. } => {}
        }
        self.settle();
        self.check_answered(CANCEL, failure)
    }

    /// Returns which node of a run hangs, if one does.
    fn hanging_host(&self, run: u32) -> Option<String> {
        let slots = self.runs[run as usize].slots.iter();
        let hanging = slots.copied().find(|slot| self.slot(*slot).hangs_until > self.now)?;
        Some(format!("{}: it does not answer", self.slot(hanging).seen.node.name))
    }

    /// Returns the usual duration of a test; `None` if the nodes do not have it.
    fn typical_duration(&self, test: &TestId) -> Option<Span> {
        match self.config.shipped_tests {
            true => shipped_tests::typical_duration(test),
            false => simulated_tests::typical_value(test),
        }
    }

    /// Schedules the start of a pending job after the scheduler's delay. A duplicate is harmless.
    pub(super) fn schedule_start(&mut self, run: u32) {
        let mut stream = self.seed.stream(Purpose::Timing, u64::from(run), 0);
        let delay = scaled(self.config.assumptions.start_delay, stream.between(0.1, 1.0));
        self.queue.push(self.now.plus(delay), Event::RunStarts(run));
    }

    pub(super) fn run_starts(&mut self, number: u32) {
        let run = &self.runs[number as usize];
        let ready = run.phase == Phase::Pending
            && run.trouble != Some(JobFault::NeverStarts)
            && run.slots.iter().all(|slot| self.can_start_on(*slot));
        if !ready {
            return;
        }
        let nodes = run.slots.iter().map(|slot| self.target(*slot)).collect();
        let (id, now) = (run.request.run, self.now);
        self.log(EffectKind::Started { run: id, nodes });
        let mut stream = self.seed.stream(Purpose::Timing, u64::from(number), 1);
        let sigma = self.config.assumptions.length_sigma;
        let tests = self.runs[number as usize].request.tests.clone();
        let usual = tests.iter().map(|test| self.typical_duration(test).unwrap_or(Span::ZERO));
        let lengths = usual.map(|usual| scaled(usual, (1.0 + sigma * stream.normal()).max(0.2))).collect();
        let run = &mut self.runs[number as usize];
        run.phase = Phase::Running { since: now };
        run.test_began = now;
        run.lengths = lengths;
        match run.trouble {
            Some(JobFault::Hung) => {}
            Some(JobFault::Lost | JobFault::Crashes) => {
                let half = scaled(run.lengths.iter().copied().sum(), 0.5);
                self.queue.push(now.plus(half), Event::RunBreaks(number));
            }
            Some(_) | None => self.schedule_test(number, 0),
        }
        self.log_lines(number, "began");
    }

    fn schedule_test(&mut self, number: u32, test: u32) {
        let length = self.runs[number as usize].lengths[test as usize];
        if self.share.is_some() {
            self.queue.push(self.now.plus(scaled(length, 0.5)), Event::TestHalf(number, test));
        }
        self.queue.push(self.now.plus(length), Event::TestEnds(number, test));
    }

    pub(super) fn test_half(&mut self, number: u32, test: u32) {
        if self.is_running_test(number, test) {
            self.log_lines(number, "is halfway");
        }
    }

    /// Whether the run is at this test and was not cancelled.
    fn is_running_test(&self, number: u32, test: u32) -> bool {
        let run = &self.runs[number as usize];
        matches!(run.phase, Phase::Running { .. }) && run.evidence.first().map(Vec::len) == Some(test as usize)
    }

    pub(super) fn test_ends(&mut self, number: u32, test: u32) {
        if !self.is_running_test(number, test) {
            return;
        }
        self.log_lines(number, "ended");
        self.finish_test(number);
        self.runs[number as usize].test_began = self.now;
        if (test as usize) + 1 < self.runs[number as usize].request.tests.len() {
            self.schedule_test(number, test + 1);
            self.log_lines(number, "began");
        } else {
            self.deliver_results(number);
            self.end_run(number, JobEnd::Exited);
        }
    }

    /// Ends a job that is lost or crashes. It delivers nothing.
    pub(super) fn run_breaks(&mut self, number: u32) {
        if self.runs[number as usize].is_running() {
            let how = match self.runs[number as usize].trouble {
                Some(JobFault::Lost) => JobEnd::Lost,
                _ => JobEnd::Failed,
            };
            self.end_run(number, how);
        }
    }

    /// Ends a cancelled job. It delivers its results so far, as `doctor-node` does.
    pub(super) fn run_killed(&mut self, number: u32) {
        if matches!(self.runs[number as usize].phase, Phase::Dying { .. }) {
            if self.runs[number as usize].evidence.iter().any(|tests| !tests.is_empty()) {
                self.deliver_results(number);
            }
            self.end_run(number, JobEnd::Killed);
        }
    }

    /// Ends a running job whose node went away. A pending job waits for the node.
    pub(super) fn lose_node(&mut self, number: u32) {
        if self.runs[number as usize].is_running() {
            self.end_run(number, JobEnd::Lost);
        }
    }

    /// Ends the job as lost, unless it has ended.
    pub(super) fn lose_run(&mut self, number: u32) {
        if !matches!(self.runs[number as usize].phase, Phase::Ended { .. }) {
            self.end_run(number, JobEnd::Lost);
        }
    }

    fn end_run(&mut self, number: u32, how: JobEnd) {
        let now = self.now;
        self.counters.validation_node_hours += self.runs[number as usize].node_hours_under_way(now);
        let run = &mut self.runs[number as usize];
        let started = run.started();
        run.phase = Phase::Ended { started, at: now, how };
        run.evidence = Vec::new();
        let (id, slots) = (run.request.run, run.slots.clone());
        self.log(EffectKind::Ended { run: id, how, started });
        for slot in slots {
            self.slot_mut(slot).runs.retain(|run| *run != number);
            self.note_change(slot);
            self.node_cleared(slot);
        }
        self.kept_results.push_back((now, number));
        while let Some(&(ended, old)) = self.kept_results.front() {
            if now.since(ended) <= RESULT_RETENTION {
                break;
            }
            self.kept_results.pop_front();
            self.runs[old as usize].documents = Vec::new();
        }
    }

    /// Returns how many jobs were started for a run, for the backend contract suite.
    pub fn jobs_started(&self, run: RunId) -> usize {
        let started = |entry: &&crate::Effect| matches!(entry.what, EffectKind::Started { run: r, .. } if r == run);
        self.effects.entries().iter().filter(started).count()
    }

    /// Fails if the answer of the call is lost.
    fn check_answered(&self, operation: &'static str, failure: Option<CallFailure>) -> Result<(), BackendError> {
        match failure {
            Some(CallFailure::Unanswered) => Err(super::incidents::unanswered(operation)),
            _ => Ok(()),
        }
    }
}
