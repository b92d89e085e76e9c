//! Collects results and logs from the pods of runs when the controller polls, where jobs and controller share no directory.

use std::time::{Duration, Instant};

use doctor_backend::BackendError;
use doctor_core::{ids::RunId, run::ObservedJobState};

use super::{
    cluster::KubernetesBackend,
    config::Share,
    objects::{PodObject, pod_resource},
    result_transport::fetch,
};

/// Limits for one log, and for all logs of one poll: unreachable nodes must not delay the cycle.
const LOG_TIMEOUT: Duration = Duration::from_secs(6);
const POLL_TIMEOUT: Duration = Duration::from_secs(15);

impl KubernetesBackend {
    /// Lists pods again if a job ended between listing pods and jobs, so that its end is never reported without its results.
    pub(super) fn recheck_ended_jobs(&self, runs: &[RunId], seen: &[ObservedJobState]) -> Result<(), BackendError> {
        let missed = |(run, seen): (&RunId, &ObservedJobState)| {
            matches!(seen, ObservedJobState::Ended { .. }) && !self.pod_results.has_run(*run)
        };
        if self.config.share == Share::None && runs.iter().zip(seen).any(missed) {
            let pods: Vec<PodObject> = self.list("poll", &pod_resource())?;
            self.collect_from_pods(runs, pods.iter());
        }
        Ok(())
    }

    /// Takes the results of these runs from their pods, if no directory is shared.
    pub(super) fn collect_from_pods<'a>(&self, runs: &[RunId], pods: impl Iterator<Item = &'a PodObject>) {
        if self.config.share != Share::None {
            return;
        }
        self.pod_results.retain_runs(&runs.iter().copied().collect());
        let began = Instant::now();
        for log_fetch in pods.filter_map(|pod| self.pod_results.take_from(pod, &self.config)) {
            let left = POLL_TIMEOUT.saturating_sub(began.elapsed());
            if left.is_zero() {
                return;
            }
            let fetched = fetch(&self.client, &self.config, &self.pod_results, &log_fetch);
            if let Err(failed) = self.request_within("fetch the log of a job", left.min(LOG_TIMEOUT), fetched) {
                tracing::warn!(run = %log_fetch.run, pod = log_fetch.pod, error = %failed.error, "job log not fetched");
            }
        }
    }
}
