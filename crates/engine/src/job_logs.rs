//! Logs that come with jobs, on their way to the shared directory.
//!
//! They are written there by the writing thread, which may be slow or hang. A run ends with its result meanwhile, and then the
//! cluster is not asked for its log again: before results are collected, the end of each log that is not saved yet is kept in the
//! store, where `doctor log` finds it after a crash.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use doctor_backend::{Backend, MAX_REMAINING_OUTPUT};
use doctor_core::{
    ids::{NodeName, RunId},
    last_output::{LastOutput, end_of},
    time::Timestamp,
};
use doctor_store::{Earlier, Lease, Store, StoreError, records::StoredRun};

use crate::{job_outputs, share::Share};

/// How long a cycle waits for the writing thread before it keeps logs in the store: a file server that is well takes less.
const PATIENCE: Duration = Duration::from_secs(2);

/// A log of a run on one node.
type LogId = (RunId, NodeName);

/// What became of the logs of active runs.
#[derive(Debug, Default)]
pub(crate) struct JobLogs {
    given: Arc<Mutex<BTreeMap<LogId, LogState>>>,
    /// Those whose end is in the store.
    kept: BTreeSet<LogId>,
}

/// A log that was given to the shared directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LogState {
    Queued,
    Saved,
}

impl JobLogs {
    /// Saves the logs that have arrived with jobs and are not saved yet.
    ///
    /// # Errors
    /// If the store fails.
    pub(crate) fn save(
        &mut self,
        share: &Share,
        (store, lease, now): (&Store, &Lease, Timestamp),
        runs: &[StoredRun],
        backend: &dyn Backend,
        mut advanced: impl FnMut(),
    ) -> Result<(), StoreError> {
        let is_active = |id: &LogId| runs.iter().any(|stored| stored.run.id == id.0);
        lock(&self.given).retain(|id, _| is_active(id));
        self.kept.retain(is_active);
        let mut unsaved: Vec<(&StoredRun, LastOutput)> = Vec::new();
        for stored in runs {
            advanced();
            for (node, text) in backend.logs(stored.run.id) {
                let id = (stored.run.id, node);
                let state = lock(&self.given).get(&id).copied();
                if state == Some(LogState::Saved) {
                    continue;
                }
                if !self.kept.contains(&id) {
                    let most = usize::try_from(MAX_REMAINING_OUTPUT).unwrap_or(usize::MAX);
                    let text = end_of(&text, most).to_owned();
                    unsaved.push((stored, LastOutput { node: id.1.clone(), ending: None, text }));
                }
                if state.is_none() {
                    self.give(share, stored, &id, text);
                }
            }
        }
        if unsaved.is_empty() {
            return Ok(());
        }
        share.settle(PATIENCE);
        let is_saved =
            |run: RunId, node: &NodeName| lock(&self.given).get(&(run, node.clone())) == Some(&LogState::Saved);
        unsaved.retain(|(stored, output)| !is_saved(stored.run.id, &output.node));
        for of_run in unsaved.chunk_by(|(one, _), (next, _)| one.run.id == next.run.id) {
            advanced();
            let stored = of_run[0].0;
            let is_first = !self.kept.iter().any(|(run, _)| *run == stored.run.id);
            // What is there was said of an earlier attempt, unless the job is being cancelled or other nodes' logs are kept.
            let earlier = if is_first && stored.cancelling.is_none() { Earlier::Replace } else { Earlier::Keep };
            let outputs: Vec<LastOutput> =
                of_run.iter().map(|(_, output)| job_outputs::clean(output.clone())).collect();
            store.record_job_output(lease, stored.run.id, &outputs, earlier, now)?;
            self.kept.extend(of_run.iter().map(|(stored, output)| (stored.run.id, output.node.clone())));
        }
        Ok(())
    }

    /// Queues a log for the shared directory. Without room, or if it cannot be written, it is given again in a later cycle.
    fn give(&self, share: &Share, stored: &StoredRun, id: &LogId, text: String) {
        lock(&self.given).insert(id.clone(), LogState::Queued);
        let (given, run, of) = (Arc::clone(&self.given), stored.run.clone(), id.clone());
        let queued = share.write_later(text.len(), move |files| {
            let written = files.save_log(&run, &of.1, &text);
            let mut given = lock(&given);
            match &written {
                Ok(()) => given.insert(of, LogState::Saved),
                Err(_) => given.remove(&of),
            };
            written
        });
        if !queued {
            lock(&self.given).remove(id);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use doctor_backend::{BackendError, JobRequest, NodeOp, ObservedNode, PolledJob};
    use doctor_checks::document::RunKey;
    use doctor_core::{
        ids::{IdSource, JobId, TestId},
        plan::Action,
        policy::Policy,
        reason::WithReason,
        run::{NonEmpty, Purpose, Run, RunState},
        snapshot::Capabilities,
        time::Span,
    };
    use doctor_store::records::CycleIntent;

    use super::*;

    const NOW: Timestamp = Timestamp::from_secs(1_794_729_600);
    const LONG: Duration = Duration::from_secs(120);

    /// A cluster whose jobs bring their logs with them.
    struct Logs;

    impl Backend for Logs {
        fn name(&self) -> &str {
            "logs"
        }

        fn caps(&self) -> Capabilities {
            Capabilities::NONE
        }

        fn snapshot(&self) -> Result<Vec<ObservedNode>, BackendError> {
            Ok(Vec::new())
        }

        fn submit(&self, job: &JobRequest) -> Result<JobId, BackendError> {
            Ok(JobId(job.run.to_string()))
        }

        fn poll(&self, _: &[RunId]) -> Result<Vec<PolledJob>, BackendError> {
            Ok(Vec::new())
        }

        fn logs(&self, _: RunId) -> Vec<(NodeName, String)> {
            vec![(node(), "the end of the log\n".to_owned())]
        }

        fn cancel(&self, _: RunId) -> Result<(), BackendError> {
            Ok(())
        }

        fn apply(&self, _: &NodeName, _: &NodeOp) -> Result<(), BackendError> {
            Ok(())
        }
    }

    fn node() -> NodeName {
        NodeName::new("n1").unwrap()
    }

    struct Bed {
        folder: tempfile::TempDir,
        store: Store,
        lease: Lease,
        stored: StoredRun,
        logs: JobLogs,
    }

    impl Bed {
        fn new() -> Self {
            let store = Store::open_in_memory().unwrap();
            let lease = store.acquire("tests", NOW, Span::days(1)).unwrap();
            let mut ids = IdSource::new(1);
            ids.set_time(NOW);
            let run = Run {
                id: ids.run(),
                nodes: NonEmpty::one(node()),
                tests: NonEmpty::one(TestId::new("memory").unwrap()),
                state: RunState::Planned,
                purpose: WithReason::new(Purpose::Validation, "due", "due"),
                case: None,
                planned: NOW,
                limit: Span::minutes(30),
            };
            let key = RunKey::new([1; 32]);
            let intent = CycleIntent {
                at: NOW,
                actions: &[WithReason::new(Action::Submit(run.clone()), "due", "due")],
                keys: &[(run.id, key.clone())].into(),
                attributed_findings: &[],
                changed_reasons: &[],
                policy_version: 1,
                retry: &Policy::built_in().retry,
                notifications: &[],
            };
            store.commit(&lease, &intent).unwrap();
            let stored = StoredRun { run, key, started: None, cancelling: None };
            Self { folder: tempfile::tempdir().unwrap(), store, lease, stored, logs: JobLogs::default() }
        }

        fn save(&mut self, share: &Share) {
            let to = (&self.store, &self.lease, NOW);
            self.logs.save(share, to, std::slice::from_ref(&self.stored), &Logs, || {}).unwrap();
        }

        fn is_saved(&self) -> bool {
            let path = Share::log_path(self.stored.run.tests.first(), &node(), NOW);
            std::fs::read_to_string(self.folder.path().join(path)).is_ok_and(|text| text == "the end of the log\n")
        }

        fn kept(&self) -> Vec<LastOutput> {
            self.store.job_output(self.stored.run.id).unwrap()
        }
    }

    #[test]
    fn a_log_that_the_writing_thread_has_not_reached_is_in_the_store() {
        let mut bed = Bed::new();
        let share = Share::open(bed.folder.path()).unwrap();
        let (go_on, wait) = mpsc::channel::<()>();
        assert!(share.write_later(0, move |_| {
            let _ended = wait.recv();
            Ok(())
        }));
        bed.save(&share);
        assert!(!bed.is_saved());
        assert_eq!(bed.kept().iter().map(|output| output.text.as_str()).collect::<Vec<_>>(), ["the end of the log\n"]);
        drop(go_on);
        share.settle(LONG);
        assert!(bed.is_saved());
        bed.save(&share);
        assert_eq!(bed.kept().len(), 1);
    }

    #[test]
    fn a_log_that_could_not_be_written_is_given_again() {
        let mut bed = Bed::new();
        let share = Share::open(bed.folder.path()).unwrap();
        std::fs::write(bed.folder.path().join("memory"), "in place of the folder").unwrap();
        bed.save(&share);
        share.settle(LONG);
        assert!(!bed.is_saved() && bed.kept().len() == 1);
        std::fs::remove_file(bed.folder.path().join("memory")).unwrap();
        bed.save(&share);
        share.settle(LONG);
        assert!(bed.is_saved());
    }
}
