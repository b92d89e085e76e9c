//! Carries out what was decided, and decides nothing.
//!
//! Every effect was written down before. Right before each one the lease is read again: a controller that was paused
//! for an hour finds out here that another one leads. An effect that may or may not have happened is left as it
//! stands; the next cycle asks the backend, and asks again with the same id.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicUsize, Ordering},
};

use doctor_checks::document::RunKey;
use doctor_core::{
    case::StepKind,
    ids::{CaseId, NodeName, OpId, RunId},
    node::{MarkKind, OurMark},
    plan::{Action, unhealthy},
    reason::Because,
    run::Run,
    snapshot::Snapshot,
};

use crate::{
    backend::{Backend, BackendError, Change, Effect, JobOutput, JobRequest, NodeOp},
    clock::Clock,
    settings::Settings,
    share::Share,
    store::{Lease, Store, StoreError},
};

/// What carrying out a plan needs.
#[derive(Clone, Copy)]
pub struct Executor<'a> {
    pub backend: &'a dyn Backend,
    pub store: &'a Store,
    pub clock: &'a dyn Clock,
    pub lease: &'a Lease,
    pub settings: &'a Settings,
    /// Effects at a time. One keeps a simulation in order.
    pub workers: usize,
}

impl std::fmt::Debug for Executor<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Executor").field("workers", &self.workers).finish_non_exhaustive()
    }
}

/// One effect on the cluster, with all it needs.
#[derive(Debug)]
enum Work {
    Submit(JobRequest),
    Cancel(RunId),
    Change { case: CaseId, op: OpId, node: NodeName, changes: Vec<Change> },
}

impl Executor<'_> {
    /// Carries out all actions. Each may fail alone; what failed is returned as one line each.
    ///
    /// # Errors
    /// Only if the store fails or the lease is lost: then nothing more may be done.
    pub fn execute(
        &self,
        actions: &[Because<Action>],
        runs: &BTreeMap<RunId, (Run, RunKey)>,
        snapshot: &Snapshot,
    ) -> Result<Vec<String>, StoreError> {
        let work: Vec<Work> = actions.iter().filter_map(|action| self.work(&action.what, runs, snapshot)).collect();
        let workers = self.workers.clamp(1, work.len().max(1));
        if workers == 1 {
            return work.iter().filter_map(|work| self.perform(work).transpose()).collect();
        }
        let next = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..workers)
                .map(|_| {
                    scope.spawn(|| {
                        let mut troubles = Vec::new();
                        while let Some(work) = work.get(next.fetch_add(1, Ordering::Relaxed)) {
                            troubles.extend(self.perform(work)?);
                        }
                        Ok::<_, StoreError>(troubles)
                    })
                })
                .collect();
            let mut troubles = Vec::new();
            for thread in threads {
                match thread.join() {
                    Ok(outcome) => troubles.extend(outcome?),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
            Ok(troubles)
        })
    }

    fn work(&self, action: &Action, runs: &BTreeMap<RunId, (Run, RunKey)>, snapshot: &Snapshot) -> Option<Work> {
        match action {
            Action::Submit(Run { id, .. }) | Action::Resubmit { run: id } => {
                let (run, key) = runs.get(id)?;
                Some(Work::Submit(job_request(run, key.clone())))
            }
            Action::Cancel { run, .. } => Some(Work::Cancel(*run)),
            Action::Step { case, node, step, op, .. } => {
                let (case, op, node) = (*case, *op, node.clone());
                let changes = match step {
                    StepKind::Mark => vec![Change::Mark(unhealthy(case))],
                    StepKind::Unmark => our_marks(snapshot, &node).into_iter().map(Change::Unmark).collect(),
                    StepKind::Drain => vec![Change::Drain],
                    StepKind::Undrain => vec![Change::Undrain],
                    StepKind::Reset => vec![Change::Reset],
                    StepKind::Reboot => vec![Change::Reboot],
                    StepKind::Replace => vec![Change::Replace],
                    // Done when it was written.
                    StepKind::KeepEvidence | StepKind::Prove | StepKind::HandOver | StepKind::Release => return None,
                };
                Some(Work::Change { case, op, node, changes })
            }
            // The rest is bookkeeping that the commit has done.
            Action::Conclude { .. }
            | Action::OpenCase(_)
            | Action::Escalate { .. }
            | Action::Worsen { .. }
            | Action::Propose { .. }
            | Action::Settle { .. }
            | Action::Move { .. }
            | Action::CloseCase { .. }
            | Action::Follow { .. }
            | Action::OpenBreaker
            | Action::Notice(_)
            | Action::Answer { .. }
            | Action::Identify { .. }
            | Action::Rename { .. } => None,
        }
    }

    /// Does one thing. A line comes back if it did not go well.
    fn perform(&self, work: &Work) -> Result<Option<String>, StoreError> {
        self.store.still_ours(self.lease, self.clock.now())?;
        match work {
            Work::Submit(job) => self.submit(job),
            Work::Cancel(run) => Ok(self.backend.cancel(*run).err().map(|error| format!("{run}: {error}"))),
            Work::Change { case, op, node, changes } => self.change(*case, *op, node, changes),
        }
    }

    fn submit(&self, job: &JobRequest) -> Result<Option<String>, StoreError> {
        match self.backend.submit(job) {
            Ok(id) => {
                self.store.record_submitted(self.lease, job.run, &id, self.clock.now())?;
                Ok(None)
            }
            Err(error) => {
                if error.effect == Effect::NoneGiveUp {
                    let retry = &self.settings.policy.retry;
                    self.store.record_rejected(self.lease, job.run, &error.text, self.clock.now(), retry)?;
                }
                Ok(Some(format!("{}: {error}", job.run)))
            }
        }
    }

    fn change(
        &self,
        case: CaseId,
        op: OpId,
        node: &NodeName,
        changes: &[Change],
    ) -> Result<Option<String>, StoreError> {
        let outcome: Result<(), BackendError> =
            changes.iter().try_for_each(|what| self.backend.apply(node, &NodeOp { op, what: what.clone() }));
        match outcome {
            Ok(()) => {
                self.store.record_step(self.lease, case, op, Ok(()), self.clock.now())?;
                Ok(None)
            }
            Err(error) => {
                // What may have happened, or may work later, stays intended and is asked again with the same id.
                if error.effect == Effect::NoneGiveUp {
                    self.store.record_step(self.lease, case, op, Err(&error.text), self.clock.now())?;
                }
                Ok(Some(format!("{node}: {error}")))
            }
        }
    }
}

/// The marks of ours that say `unhealthy` or `maintenance`; a cordon is lifted by undraining.
fn our_marks(snapshot: &Snapshot, node: &NodeName) -> Vec<OurMark> {
    let record = snapshot.nodes.binary_search_by(|record| record.node.name.cmp(node)).ok();
    let marks = record.map(|place| &snapshot.nodes[place].node.marks.ours);
    marks.into_iter().flatten().filter(|mark| mark.kind != MarkKind::Cordon).cloned().collect()
}

fn job_request(run: &Run, key: RunKey) -> JobRequest {
    let outputs = run
        .nodes
        .iter()
        .map(|node| JobOutput {
            node: node.clone(),
            logs: run.tests.iter().map(|test| Share::log_path(test, node, run.planned)).collect(),
            document: Share::document_path(run, node),
        })
        .collect();
    JobRequest { run: run.id, nodes: run.nodes.clone(), tests: run.tests.clone(), limit: run.limit, key, outputs }
}
