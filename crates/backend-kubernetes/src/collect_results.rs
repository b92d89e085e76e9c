//! Collects results and logs from the pods of runs when the controller polls, where jobs and controller share no directory.

use std::time::{Duration, Instant};

use doctor_backend::BackendError;
use doctor_core::{ids::RunId, run::JobSeen};

use super::{
    carry::fetch,
    cluster::KubernetesBackend,
    config::Share,
    objects::{PodObject, pod_resource},
};

/// Limits for one log, and for all logs of one poll: unreachable nodes must not delay the cycle.
const FOR_ONE: Duration = Duration::from_secs(6);
const PATIENCE: Duration = Duration::from_secs(15);

impl KubernetesBackend {
    /// Lists pods again if a job ended between listing pods and jobs, so that its end is never reported without its results.
    pub(super) fn look_again(&self, runs: &[RunId], seen: &[JobSeen]) -> Result<(), BackendError> {
        let missed =
            |(run, seen): (&RunId, &JobSeen)| matches!(seen, JobSeen::Ended { .. }) && !self.carried.knows(*run);
        if self.config.share == Share::None && runs.iter().zip(seen).any(missed) {
            let pods: Vec<PodObject> = self.list("poll", &pod_resource())?;
            self.take_along(runs, pods.iter());
        }
        Ok(())
    }

    /// Takes the results of these runs from their pods, if no directory is shared.
    pub(super) fn take_along<'a>(&self, runs: &[RunId], pods: impl Iterator<Item = &'a PodObject>) {
        if self.config.share != Share::None {
            return;
        }
        self.carried.only(&runs.iter().copied().collect());
        let began = Instant::now();
        for errand in pods.filter_map(|pod| self.carried.notice(pod, &self.config)) {
            let left = PATIENCE.saturating_sub(began.elapsed());
            if left.is_zero() {
                return;
            }
            let fetched = fetch(&self.client, &self.config, &self.carried, &errand);
            if let Err(failed) = self.ask_for("fetch the log of a job", left.min(FOR_ONE), fetched) {
                tracing::warn!(run = %errand.run, pod = errand.pod, error = %failed.error, "job log not fetched");
            }
        }
    }
}
