//! Failed user work as the cluster reports it: jobs that crashed, because of a machine's fault or their own. The
//! reports do not tell the two apart.

use std::collections::VecDeque;

use doctor_backend::{BackendError, ObservedJobFailure};
use doctor_core::{
    ids::NodeName,
    job_failures::{JobFailure, JobFailureKind, Label},
    time::{Span, Timestamp},
};

use super::World;

/// The number of users.
const OWNERS: u64 = 40;

/// How long the cluster remembers failed work.
const RETENTION: Span = Span::days(1);

#[derive(Debug, Default)]
pub(super) struct Failures {
    /// Oldest first.
    reported: VecDeque<ObservedJobFailure>,
    scripted: u32,
}

impl World {
    /// Returns the work that failed since then, newest first.
    ///
    /// # Errors While the cluster does not answer.
    pub(crate) fn failed_work(&self, since: Timestamp) -> Result<Vec<ObservedJobFailure>, BackendError> {
        self.check_reachable("asking for failed user work")?;
        Ok(self.failures.reported.iter().rev().take_while(|failed| failed.job.at >= since).cloned().collect())
    }

    /// Reports a user job that has crashed on its nodes.
    pub(super) fn report_crash(&mut self, job: u32) {
        let crashed = &self.users.jobs[job as usize];
        let (label, owner) = (Label::new(&crashed.label), Label::new(&format!("user-{:02}", crashed.choice % OWNERS)));
        let nodes = crashed.nodes.iter().map(|node| self.name(*node)).collect();
        let (name, how) = (label.clone(), JobFailureKind::Exit { code: 1 });
        let work = JobFailure { id: label, name, owner, at: self.now, how };
        self.report_failure(ObservedJobFailure { job: work, nodes });
    }

    /// Reports a failure from a script.
    pub(super) fn scripted_failure(&mut self, nodes: &[NodeName], owner: &str) {
        self.failures.scripted += 1;
        let label = Label::new(&format!("scripted work {}", self.failures.scripted));
        let (name, owner, how) = (label.clone(), Label::new(owner), JobFailureKind::Signal { number: 11 });
        let work = JobFailure { id: label, name, owner, at: self.now, how };
        self.report_failure(ObservedJobFailure { job: work, nodes: nodes.to_vec() });
    }

    fn report_failure(&mut self, failed: ObservedJobFailure) {
        let begin = self.now.minus(RETENTION);
        let reported = &mut self.failures.reported;
        while reported.front().is_some_and(|oldest| oldest.job.at < begin) {
            reported.pop_front();
        }
        reported.push_back(failed);
    }
}
