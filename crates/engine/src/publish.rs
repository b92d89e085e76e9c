//! Publishes the results of a cycle: the free-node list, the seed's database, and the cluster state in the store. Each
//! is replaced as a whole.
//!
//! The files go to the shared directory on its writing thread. While that hangs nothing more is queued, and the first cycle after
//! it answers publishes what is current then.

mod history_copy;

use std::{
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use doctor_backend::progress::EffectsPermit;
use doctor_core::time::{Span, Timestamp};
use doctor_store::{Lease, Store, StoreError};
use history_copy::HistoryCopy;

use crate::{
    deps::EngineDeps,
    fence, free_node_list,
    observe::PlannerState,
    share::{Share, ShareFiles},
    snapshot,
};

/// Measured in real time, because readers live in real time: a simulated month that takes seconds stores few copies.
const SAVE_STATE_EVERY: Duration = Duration::from_secs(15);
/// When to publish again what could not be published: soon, because an operator who repaired the share waits for the problem to
/// go.
const RETRY: Span = Span::minutes(1);

/// How long a cycle waits for what it has given to the share, so that its report says how that went.
const CYCLE_WAIT: Duration = Duration::from_secs(5);
/// How long a controller that stops waits for its last files.
const STOP_WAIT: Duration = Duration::from_secs(15);

#[derive(Debug)]
pub(crate) struct Publisher {
    every: Span,
    /// When the next files are due. `None`: now.
    due: Option<Timestamp>,
    state_saved: Option<Instant>,
    job: Arc<Mutex<Job>>,
}

/// What the writing thread and the loop share.
#[derive(Debug, Default)]
struct Job {
    /// Whether it is queued or runs.
    is_pending: bool,
    /// Whether files were due while it was pending.
    is_missed: bool,
    /// Whether a cycle has waited for it already. Copying a long history takes longer than a cycle may wait.
    is_waited_for: bool,
    /// What failed the last time.
    problems: Vec<String>,
    history: HistoryCopy,
}

impl Publisher {
    pub(crate) fn new(every: Span) -> Self {
        Self { every, due: None, state_saved: None, job: Arc::default() }
    }

    /// Returns what failed the last time, for each cycle until it succeeds.
    pub(crate) fn problems(&self) -> Vec<String> {
        self.lock().problems.clone()
    }

    /// Publishes the files if they are due. Failures of the share are reported and never stop a cycle: an outdated list harms
    /// no node.
    ///
    /// # Errors
    /// If this controller no longer leads, or the store fails.
    pub(crate) fn publish(
        &mut self,
        deps: &EngineDeps,
        lease: &Lease,
        planner_state: &PlannerState,
        now: Timestamp,
    ) -> Result<(), StoreError> {
        let (is_missed, failed) = {
            let job = self.lock();
            (job.is_missed && !job.is_pending, !job.problems.is_empty())
        };
        if is_missed || self.is_due(failed, now) {
            self.publish_now(deps, lease, planner_state, now)?;
        }
        Ok(())
    }

    /// Whether files are due, which is the case sooner after a failure. Files published later than now were published
    /// before the clock was set back.
    fn is_due(&self, failed: bool, now: Timestamp) -> bool {
        let Some(published) = self.due.map(|due| due.minus(self.every)) else { return true };
        let pause = if failed { RETRY.min(self.every) } else { self.every };
        now >= published.plus(pause) || now < published
    }

    /// Publishes the files, unless those of an earlier cycle still wait. They are written only while the term of this lease
    /// lasts: files that waited would replace those of the next leader.
    ///
    /// # Errors
    /// Those of [`Self::publish`].
    pub(crate) fn publish_now(
        &mut self,
        deps: &EngineDeps,
        lease: &Lease,
        planner_state: &PlannerState,
        now: Timestamp,
    ) -> Result<(), StoreError> {
        let (Some(share), Some(snapshot)) = (&deps.share, planner_state.snapshot()) else { return Ok(()) };
        let permit = deps.progress.effects_permit();
        fence::check(&deps.store, &*deps.clock, lease, &deps.progress)?;
        {
            let mut job = self.lock();
            if job.is_pending || !share.is_answering() {
                job.is_missed = true;
                return Ok(());
            }
            (job.is_pending, job.is_missed) = (true, false);
        }
        let (list, store, folder) =
            (free_node_list::text(snapshot), deps.store.without_progress(), deps.copy_folder.clone());
        let job = Arc::clone(&self.job);
        let queued = share.write_later(list.len(), move |files| {
            write_files(&EndsJob(&job), files, &permit, &list, (&store, folder.as_deref()));
            Ok(())
        });
        if queued {
            self.due = Some(now.plus(self.every));
        } else {
            let mut job = self.lock();
            (job.is_pending, job.is_missed) = (false, true);
        }
        Ok(())
    }

    /// Waits a moment for what was given to the share, and returns everything that failed there since the last call.
    pub(crate) fn settle(&self, share: &Share) -> Vec<String> {
        let is_waited_for = self.lock().is_waited_for;
        self.take_problems(share, if is_waited_for { Duration::ZERO } else { CYCLE_WAIT })
    }

    /// Waits for the last files of a controller that stops, and returns what failed.
    pub(crate) fn finish(&self, share: &Share) -> Vec<String> {
        self.take_problems(share, STOP_WAIT)
    }

    fn take_problems(&self, share: &Share, limit: Duration) -> Vec<String> {
        let mut problems = share.take_problems(limit);
        let mut job = self.lock();
        job.is_waited_for = job.is_pending;
        problems.extend(job.problems.iter().cloned());
        problems
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Job> {
        self.job.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores the cluster state for processes that do not lead, if the last copy is too old.
    pub(crate) fn save_state_if_due(
        &mut self,
        deps: &EngineDeps,
        lease: &Lease,
        planner_state: &PlannerState,
    ) -> Result<(), StoreError> {
        if self.state_saved.is_some_and(|saved| saved.elapsed() < SAVE_STATE_EVERY) {
            return Ok(());
        }
        self.save_state(deps, lease, planner_state)
    }

    /// Stores the cluster state under the time at which the cluster last answered: neither a failed observation nor the stop
    /// of the controller makes it younger.
    pub(crate) fn save_state(
        &mut self,
        deps: &EngineDeps,
        lease: &Lease,
        planner_state: &PlannerState,
    ) -> Result<(), StoreError> {
        let observed = planner_state.snapshot().zip(planner_state.observed_at());
        let Some((snapshot, observed_at)) = observed else { return Ok(()) };
        deps.store.save_cluster_state(lease, observed_at, &snapshot::serializable(deps.backend.name(), snapshot))?;
        self.state_saved = Some(Instant::now());
        Ok(())
    }
}

/// Ends the job when it is dropped, also by a panic: the next files would never be published otherwise.
struct EndsJob<'a>(&'a Mutex<Job>);

impl EndsJob<'_> {
    fn lock(&self) -> std::sync::MutexGuard<'_, Job> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for EndsJob<'_> {
    fn drop(&mut self) {
        self.lock().is_pending = false;
    }
}

/// Writes the files on the share's thread, which may have hung since they were queued: each only if the term of `permit`
/// still lasts.
fn write_files(
    job: &EndsJob<'_>,
    files: &ShareFiles,
    permit: &EffectsPermit,
    list: &str,
    (store, folder): (&Store, Option<&Path>),
) {
    if !permit.is_valid() {
        job.lock().is_missed = true;
        return;
    }
    let mut history = std::mem::take(&mut job.lock().history);
    let mut problems = Vec::new();
    problems.extend(publish_list(files, list).err());
    if permit.is_valid() {
        problems.extend(history.publish(files, permit, store, folder).err());
    }
    let mut job = job.lock();
    (job.history, job.problems) = (history, problems);
    // What was left out is due at the start of the next term.
    job.is_missed |= !permit.is_valid();
}

fn publish_list(files: &ShareFiles, list: &str) -> Result<(), String> {
    let written = files.publish(free_node_list::FILE, &mut list.as_bytes());
    written.map(drop).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use doctor_backend::progress::Progress;

    use super::*;

    #[test]
    fn files_are_due_after_the_interval_sooner_after_a_failure_and_when_the_clock_was_set_back() {
        let at = Timestamp::from_secs(1_794_800_000);
        let mut publisher = Publisher::new(Span::hours(1));
        assert!(publisher.is_due(false, at));
        publisher.due = Some(at.plus(Span::hours(1)));
        for (failed, now, expected) in [
            (false, at, false),
            (false, at.plus(Span::minutes(59)), false),
            (false, at.plus(Span::hours(1)), true),
            (true, at, false),
            (true, at.plus(RETRY), true),
            (false, at.minus(Span::from_secs(1)), true),
        ] {
            assert_eq!(publisher.is_due(failed, now), expected, "{failed} {now}");
        }
    }

    #[test]
    fn files_that_waited_for_longer_than_the_term_are_not_written_even_if_this_controller_leads_again() {
        let folder = tempfile::tempdir().unwrap();
        let share = Share::open(folder.path()).unwrap();
        let list = folder.path().join("metadata").join(free_node_list::FILE);
        let (store, job, progress) =
            (Store::open_in_memory().unwrap(), Mutex::new(Job::default()), Progress::default());
        progress.begin_term(1, None);
        let queued = progress.effects_permit();
        let write = |permit: &EffectsPermit| {
            job.lock().unwrap().is_pending = true;
            write_files(&EndsJob(&job), share.files(), permit, "n1\n", (&store, None));
            let job = job.lock().unwrap();
            assert!(!job.is_pending);
            job.is_missed
        };
        progress.end_effects(1);
        assert!(write(&queued) && !list.exists());
        progress.begin_term(2, None);
        assert!(write(&queued) && !list.exists(), "another controller led between the two terms");
        write(&progress.effects_permit());
        assert_eq!(std::fs::read_to_string(&list).unwrap(), "n1\n");
    }
}
