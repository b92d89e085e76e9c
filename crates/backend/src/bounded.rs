//! Gives every call to a backend a deadline.
//!
//! [`BoundedBackend`] is the backend that the controller uses. Each call runs on a thread of its own, under a [`Deadline`] that
//! derives from the length of a cycle ([`CallLimits`]). Backends end in time by themselves: each request that they start takes
//! the time that is left. The thread is for what cannot be interrupted, such as a read from a file server that hangs: after a
//! grace the call is given up and returns an error, and its thread can start nothing any more, because no time is left.
//!
//! A call that was given up blocks its own repetition until it has ended, so that a file server that hangs for a day holds one
//! thread for each operation and not one for each cycle.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use doctor_core::{
    ids::{JobId, NodeName, OpId, RunId},
    last_output::LastOutput,
    run::Run,
    snapshot::Capabilities,
    time::{Span, Timestamp},
};

use crate::{
    Backend, BackendError, ChangeReason, Effect, JobRequest, NodeOp, ObservedJobFailure, ObservedNode, PolledJob,
    RenderedStatus, ReportProgress, StatusWriter,
    deadline::{self, Deadline},
    progress::Progress,
};

/// The shortest limits: a cycle of a second is for tests, and a scheduler needs longer for one answer.
const MIN_READ: Duration = Duration::from_secs(20);
const MIN_CHANGE: Duration = Duration::from_secs(30);
/// How long a call may take beyond its deadline before it is given up: the time to end a process that ignores SIGTERM.
const GRACE: Duration = Duration::from_secs(5);
/// The most calls that are out at once. More means that most of them hang.
const MAX_IN_FLIGHT: usize = 512;

/// The limits of calls to a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallLimits {
    /// For a call that only reads.
    pub read: Duration,
    /// For a call that changes the cluster. A site's own command to replace a machine may take 40 seconds.
    pub change: Duration,
}

impl CallLimits {
    /// A read may take one cycle and a change one and a half: less than the two cycles without progress after which a
    /// controller counts as stuck.
    pub fn of_cycle(cycle: Span) -> Self {
        let cycle = cycle.to_std();
        Self { read: cycle.max(MIN_READ), change: (cycle * 3 / 2).max(MIN_CHANGE) }
    }

    /// Returns the time after which any call has ended or was given up.
    pub fn longest(self) -> Duration {
        self.read.max(self.change) + GRACE
    }
}

/// A backend whose calls end.
pub struct BoundedBackend {
    inner: Arc<dyn Backend>,
    limits: CallLimits,
    grace: Duration,
    in_flight: Arc<InFlight>,
    /// Set by the engine. A change starts nothing once its lease has ended.
    progress: OnceLock<Progress>,
}

impl std::fmt::Debug for BoundedBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BoundedBackend").field("inner", &self.inner.name()).field("limits", &self.limits).finish()
    }
}

/// The calls that have not ended, including those that were given up.
#[derive(Debug, Default)]
struct InFlight {
    calls: Mutex<Vec<Call>>,
    next: AtomicU64,
}

#[derive(Debug)]
struct Call {
    number: u64,
    /// The operation and what it is about: two calls with the same key would wait for the same thing.
    key: String,
    begun: Instant,
    given_up: bool,
}

impl InFlight {
    fn calls(&self) -> MutexGuard<'_, Vec<Call>> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a call. `Err` is why it must not begin.
    fn begin(&self, key: &str) -> Result<u64, String> {
        let mut calls = self.calls();
        if let Some(stuck) = calls.iter().find(|call| call.given_up && call.key == key) {
            let seconds = stuck.begun.elapsed().as_secs();
            return Err(format!("an earlier call ({key}) was given up and has not ended for {seconds} s"));
        }
        if calls.len() >= MAX_IN_FLIGHT {
            return Err(format!("{} earlier calls have not ended", calls.len()));
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        calls.push(Call { number, key: key.to_owned(), begun: Instant::now(), given_up: false });
        Ok(number)
    }

    fn give_up(&self, number: u64) {
        self.calls().iter_mut().filter(|call| call.number == number).for_each(|call| call.given_up = true);
    }

    fn end(&self, number: u64) {
        self.calls().retain(|call| call.number != number);
    }
}

/// Ends the registration of a call with its thread, also after a panic.
struct Registration {
    in_flight: Arc<InFlight>,
    number: u64,
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.in_flight.end(self.number);
    }
}

/// Whether a call changes the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Access {
    Read,
    Change,
}

impl BoundedBackend {
    pub fn new(inner: Arc<dyn Backend>, limits: CallLimits) -> Self {
        Self { inner, limits, grace: GRACE, in_flight: Arc::default(), progress: OnceLock::new() }
    }

    /// Runs a call on a thread of its own and waits for its end, at most until its deadline and a grace.
    fn call<T: Send + 'static>(
        &self,
        access: Access,
        operation: &'static str,
        about: &str,
        work: impl FnOnce(&dyn Backend) -> Result<T, BackendError> + Send + 'static,
    ) -> Result<T, BackendError> {
        let failed = |text: String, effect| Err(BackendError { operation, text, effect });
        let limit = if access == Access::Read { self.limits.read } else { self.limits.change };
        // The cycle may have become shorter since the limits were set.
        let limit = self.progress.get().map_or(limit, |progress| limit.min(progress.call_deadline()));
        let permit = self.progress.get().filter(|_| access == Access::Change).map(Progress::effects_permit);
        if permit.as_ref().is_some_and(|permit| !permit.is_valid()) {
            return failed("not started: the lease has ended".to_owned(), Effect::NotAppliedRetry);
        }
        let key = if about.is_empty() { operation.to_owned() } else { format!("{operation} {about}") };
        let number = match self.in_flight.begin(&key) {
            Ok(number) => number,
            Err(why) => return failed(why, Effect::NotAppliedRetry),
        };
        let registration = Registration { in_flight: Arc::clone(&self.in_flight), number };
        let (call, inner, span) =
            (Deadline::of_change(limit, permit), Arc::clone(&self.inner), tracing::Span::current());
        let (sender, answer) = mpsc::channel();
        let within = call.clone();
        let spawned = thread::Builder::new().name(format!("call {operation}")).spawn(move || {
            let _registration = registration;
            let result = span.in_scope(|| deadline::enter(Some(within), || work(&*inner)));
            // The caller may have given up.
            let _late = sender.send(result);
        });
        let thread = match spawned {
            Ok(thread) => thread,
            Err(error) => return failed(format!("a thread cannot be started: {error}"), Effect::NotAppliedRetry),
        };
        match answer.recv_timeout(limit + self.grace) {
            Ok(result) => result,
            Err(RecvTimeoutError::Timeout) => {
                call.cancel();
                self.in_flight.give_up(number);
                let effect = if access == Access::Read { Effect::NotAppliedRetry } else { Effect::Unknown };
                failed(format!("{} did not answer within {} s", self.inner.name(), limit.as_secs()), effect)
            }
            Err(RecvTimeoutError::Disconnected) => match thread.join() {
                Err(panic) => std::panic::resume_unwind(panic),
                Ok(()) => failed("the call ended without an answer".to_owned(), Effect::Unknown),
            },
        }
    }
}

impl Backend for BoundedBackend {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn caps(&self) -> Capabilities {
        self.inner.caps()
    }

    fn snapshot(&self) -> Result<Vec<ObservedNode>, BackendError> {
        self.call(Access::Read, "read the cluster", "", |inner| inner.snapshot())
    }

    fn nodes_with_unread_marks(&self) -> Vec<NodeName> {
        self.inner.nodes_with_unread_marks()
    }

    fn set_recorded_runs(&self, runs: &[&Run]) {
        self.inner.set_recorded_runs(runs);
    }

    fn submit(&self, job: &JobRequest) -> Result<JobId, BackendError> {
        let job = job.clone();
        self.call(Access::Change, "submit", &job.run.to_string(), move |inner| inner.submit(&job))
    }

    fn poll(&self, runs: &[RunId]) -> Result<Vec<PolledJob>, BackendError> {
        let runs = runs.to_vec();
        self.call(Access::Read, "poll", "", move |inner| inner.poll(&runs))
    }

    fn logs(&self, run: RunId) -> Vec<(NodeName, String)> {
        self.inner.logs(run)
    }

    fn remaining_output(&self, run: &Run) -> Result<Vec<LastOutput>, BackendError> {
        let run = run.clone();
        let about = run.id.to_string();
        self.call(Access::Read, "read the output of a job", &about, move |inner| inner.remaining_output(&run))
    }

    fn cancel(&self, run: RunId) -> Result<(), BackendError> {
        self.call(Access::Change, "cancel", &run.to_string(), move |inner| inner.cancel(run))
    }

    fn apply(&self, node: &NodeName, change: &NodeOp) -> Result<(), BackendError> {
        let (node, change) = (node.clone(), change.clone());
        let about = format!("{node} {}", change.what.step());
        self.call(Access::Change, "change the node", &about, move |inner| inner.apply(&node, &change))
    }

    fn apply_with_reason(&self, node: &NodeName, change: &NodeOp, reason: &ChangeReason) -> Result<(), BackendError> {
        let (node, change, reason) = (node.clone(), change.clone(), reason.clone());
        let about = format!("{node} {}", change.what.step());
        let work = move |inner: &dyn Backend| inner.apply_with_reason(&node, &change, &reason);
        self.call(Access::Change, "change the node", &about, work)
    }

    fn job_failures(&self, since: Timestamp) -> Result<Vec<ObservedJobFailure>, BackendError> {
        self.call(Access::Read, "list failed work", "", move |inner| inner.job_failures(since))
    }

    fn collect_report(&self, node: &NodeName, op: OpId) -> ReportProgress {
        let about = node.to_string();
        let of = node.clone();
        let work = move |inner: &dyn Backend| Ok::<_, BackendError>(inner.collect_report(&of, op));
        let progress = self.call(Access::Change, "collect the node's report", &about, work);
        progress.unwrap_or_else(|error| match error.effect {
            Effect::NotAppliedPermanent => ReportProgress::Failed { text: error.to_string() },
            // The report may still come. The caller asks again, and stops when it has waited long enough.
            Effect::NotAppliedRetry | Effect::Unknown => {
                tracing::debug!(%node, %error, "report not collected yet");
                ReportProgress::InProgress
            }
        })
    }

    fn set_progress(&self, progress: &Progress) {
        // The engine passes one for the life of the backend.
        let _first = self.progress.set(progress.clone());
        self.inner.set_progress(progress);
    }

    fn status_writer(&self) -> Option<&dyn StatusWriter> {
        self.inner.status_writer().is_some().then_some(self as &dyn StatusWriter)
    }
}

const WRITE_STATUS: &str = "write the status to the node";

fn no_writer() -> BackendError {
    let text = "this cluster has no place for it".to_owned();
    BackendError { operation: WRITE_STATUS, text, effect: Effect::NotAppliedPermanent }
}

impl StatusWriter for BoundedBackend {
    fn status_hash(&self, node: &NodeName) -> Option<u64> {
        self.inner.status_writer()?.status_hash(node)
    }

    fn write(&self, node: &NodeName, what: &RenderedStatus) -> Result<(), BackendError> {
        let (node, what, about) = (node.clone(), what.clone(), node.to_string());
        let work = move |inner: &dyn Backend| inner.status_writer().ok_or_else(no_writer)?.write(&node, &what);
        self.call(Access::Change, WRITE_STATUS, &about, work)
    }

    fn write_all(&self, work: &[(NodeName, Arc<RenderedStatus>)], workers: usize) -> Vec<(NodeName, BackendError)> {
        let all = work.to_vec();
        let write =
            move |inner: &dyn Backend| Ok(inner.status_writer().ok_or_else(no_writer)?.write_all(&all, workers));
        let written = self.call(Access::Change, WRITE_STATUS, "", write);
        // Of a call that was given up, any write may be missing.
        written.unwrap_or_else(|error| work.iter().map(|(node, _)| (node.clone(), error.clone())).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Condvar, atomic::AtomicUsize};

    use super::*;
    use crate::{
        http::{Client, HttpErrorKind, Proxy, Request},
        process,
    };

    /// A cluster behind a file server that hangs: calls block in an uninterruptible wait until the server answers.
    #[derive(Default)]
    struct HangingCluster {
        answers: Mutex<bool>,
        changed: Condvar,
        asked: AtomicUsize,
        started_late: AtomicUsize,
    }

    impl HangingCluster {
        fn wait(&self) {
            self.asked.fetch_add(1, Ordering::SeqCst);
            drop(self.changed.wait_while(self.answers.lock().unwrap(), |answers| !*answers).unwrap());
        }

        fn set_answering(&self) {
            *self.answers.lock().unwrap() = true;
            self.changed.notify_all();
        }
    }

    impl Backend for HangingCluster {
        fn name(&self) -> &str {
            "hanging"
        }

        fn caps(&self) -> Capabilities {
            Capabilities::NONE
        }

        fn snapshot(&self) -> Result<Vec<ObservedNode>, BackendError> {
            self.wait();
            Ok(Vec::new())
        }

        fn submit(&self, job: &JobRequest) -> Result<JobId, BackendError> {
            Ok(JobId(job.run.to_string()))
        }

        fn poll(&self, _: &[RunId]) -> Result<Vec<PolledJob>, BackendError> {
            panic!("a bug in a backend")
        }

        fn cancel(&self, _: RunId) -> Result<(), BackendError> {
            self.wait();
            if process::output(std::process::Command::new("true"), b"", GRACE, 9).is_ok() {
                self.started_late.fetch_add(1, Ordering::SeqCst);
            }
            Ok(())
        }

        fn apply(&self, _: &NodeName, _: &NodeOp) -> Result<(), BackendError> {
            Ok(())
        }

        fn collect_report(&self, _: &NodeName, _: OpId) -> ReportProgress {
            self.wait();
            ReportProgress::Failed { text: "there is none".to_owned() }
        }
    }

    fn bounded(cluster: &Arc<HangingCluster>) -> BoundedBackend {
        bounded_by(cluster, Duration::from_millis(50))
    }

    fn bounded_by(cluster: &Arc<HangingCluster>, limit: Duration) -> BoundedBackend {
        let limits = CallLimits { read: limit, change: limit };
        let inner: Arc<dyn Backend> = Arc::<HangingCluster>::clone(cluster);
        BoundedBackend { grace: Duration::from_millis(50), ..BoundedBackend::new(inner, limits) }
    }

    fn wait_until(what: &str, condition: impl Fn() -> bool) {
        let began = Instant::now();
        while !condition() {
            assert!(began.elapsed() < Duration::from_secs(120), "timed out waiting for {what}");
            thread::sleep(Duration::from_millis(2));
        }
    }

    #[test]
    fn a_call_that_hangs_is_given_up_once_and_repeated_only_after_its_end() {
        let cluster = Arc::new(HangingCluster::default());
        let backend = bounded(&cluster);
        let error = backend.snapshot().unwrap_err();
        assert!(error.text.contains("hanging did not answer within"), "{error}");
        assert_eq!(error.effect, Effect::NotAppliedRetry);
        let error = backend.snapshot().unwrap_err();
        assert!(error.text.contains("was given up and has not ended"), "{error}");
        assert_eq!(cluster.asked.load(Ordering::SeqCst), 1, "one thread hangs, not one for each cycle");
        cluster.set_answering();
        wait_until("the call to end", || backend.in_flight.calls().is_empty());
        assert_eq!(backend.snapshot(), Ok(Vec::new()));
    }

    #[test]
    fn a_change_that_was_given_up_is_uncertain_and_starts_nothing_later() {
        let cluster = Arc::new(HangingCluster::default());
        let backend = bounded(&cluster);
        let error = backend.cancel(RunId::from_number(1)).unwrap_err();
        assert_eq!(error.effect, Effect::Unknown, "{error}");
        // Another run's call is not blocked by it.
        let other = backend.cancel(RunId::from_number(2)).unwrap_err();
        assert!(other.text.contains("did not answer"), "{other}");
        cluster.set_answering();
        wait_until("both to end", || backend.in_flight.calls().is_empty());
        assert_eq!(cluster.started_late.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn a_change_starts_nothing_after_the_end_of_the_lease_and_a_read_does() {
        let cluster = Arc::new(HangingCluster::default());
        cluster.set_answering();
        let backend = bounded_by(&cluster, Duration::from_secs(600));
        let progress = Progress::default();
        backend.set_progress(&progress);
        backend.cancel(RunId::from_number(1)).unwrap();
        progress.end_effects(0);
        let error = backend.cancel(RunId::from_number(1)).unwrap_err();
        assert_eq!(error.effect, Effect::NotAppliedRetry, "{error}");
        assert_eq!(cluster.asked.load(Ordering::SeqCst), 1, "the backend was not called");
        assert_eq!(backend.snapshot(), Ok(Vec::new()));
        // A change of several requests starts none after it.
        let change = Deadline::of_change(Duration::from_secs(600), Some(progress.effects_permit()));
        assert!(deadline::enter(Some(change), deadline::is_over));
    }

    #[test]
    fn a_report_is_only_given_up_when_the_node_has_none() {
        let cluster = Arc::new(HangingCluster::default());
        let backend = bounded(&cluster);
        let ask =
            |backend: &BoundedBackend| backend.collect_report(&NodeName::new("n1").unwrap(), OpId::from_number(1));
        assert_eq!(ask(&backend), ReportProgress::InProgress, "the call was given up");
        assert_eq!(ask(&backend), ReportProgress::InProgress, "it was refused, because the first has not ended");
        cluster.set_answering();
        let backend = bounded_by(&cluster, Duration::from_secs(600));
        let progress = Progress::default();
        backend.set_progress(&progress);
        assert_eq!(ask(&backend), ReportProgress::Failed { text: "there is none".to_owned() });
        progress.end_effects(0);
        assert_eq!(ask(&backend), ReportProgress::InProgress, "the lease has ended");
    }

    #[test]
    fn a_panic_of_a_backend_reaches_the_caller() {
        // Printing the panic may take a while.
        let backend = bounded_by(&Arc::default(), Duration::from_secs(600));
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| backend.poll(&[])));
        assert!(panicked.is_err());
        assert!(backend.in_flight.calls().is_empty());
    }

    #[test]
    fn no_process_and_no_request_starts_after_the_deadline() {
        let over = Some(Deadline::after(Duration::ZERO));
        let error = deadline::enter(over.clone(), || {
            process::output(std::process::Command::new("true"), b"", Duration::from_secs(600), 9).map(drop).unwrap_err()
        });
        assert_eq!(error.kind(), std::io::ErrorKind::TimedOut);
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let request = Request { url: &url, headers: &[], body: Some(b"x"), timeout: Duration::from_secs(600) };
        let error = deadline::enter(over, || Client::new(&[], Proxy::Never).send(&request)).unwrap_err();
        assert_eq!((error.kind, error.was_sent()), (HttpErrorKind::Timeout, false), "{error}");
    }

    #[test]
    fn a_server_that_accepts_and_never_answers_costs_one_call_and_not_the_sum_of_its_requests() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let request = Request { url: &url, headers: &[], body: Some(b"x"), timeout: Duration::from_secs(600) };
        let began = Instant::now();
        let errors = deadline::enter(Some(Deadline::after(Duration::from_millis(200))), || {
            let client = Client::new(&[], Proxy::Never);
            [client.send(&request).unwrap_err(), client.send(&request).unwrap_err()]
        });
        assert!(began.elapsed() < Duration::from_secs(120), "{errors:?}");
        assert_eq!(
            errors.map(|error| (error.kind, error.was_sent())),
            [(HttpErrorKind::Timeout, true), (HttpErrorKind::Timeout, false)]
        );
    }

    #[test]
    fn the_limits_derive_from_the_cycle_and_are_shorter_than_two_cycles() {
        for seconds in [30, 60, 300] {
            let limits = CallLimits::of_cycle(Span::from_secs(seconds));
            let cycle = Span::from_secs(seconds).to_std();
            assert!(limits.read >= cycle && limits.longest() < 2 * cycle, "{limits:?}");
        }
        assert_eq!(CallLimits::of_cycle(Span::from_secs(1)), CallLimits { read: MIN_READ, change: MIN_CHANGE });
    }
}
