//! Failed jobs of users and their instances. Pure.

use doctor_backend::ObservedJobFailure;
use doctor_core::{
    ids::NodeName,
    job_failures::{JobFailure, JobFailureKind, Label},
    time::Timestamp,
};

use super::{
    api_types::{Instance, run_of},
    run_types::{JobSubmission, Run},
};

/// Returns the failures since then on these instances. Work that was stopped, found no instance, or exceeded its own time limit
/// has not failed.
pub(super) fn failures(runs: &[Run], instances: &[&Instance], since: Timestamp) -> Vec<ObservedJobFailure> {
    let of_users = runs.iter().filter(|run| run_of(run.name()).is_none());
    of_users.filter_map(|run| failure(run, instances, since)).collect()
}

/// The jobs of one run count as one piece of work.
fn failure(run: &Run, instances: &[&Instance], since: Timestamp) -> Option<ObservedJobFailure> {
    let failed: Vec<(NodeName, Timestamp, JobFailureKind)> = run
        .jobs
        .iter()
        .filter_map(|job| {
            let newest = job.job_submissions.last()?;
            let at = newest.finished_at.filter(|at| *at >= since)?;
            let host = newest.job_provisioning_data.as_ref()?.hostname.as_deref()?;
            let instance = instances.iter().find(|instance| instance.hostname.as_deref() == Some(host))?;
            Some((NodeName::new(&instance.name).ok()?, at, failure_kind(newest)?))
        })
        .collect();
    let (_, at, how) = failed.first()?.clone();
    let work =
        JobFailure { id: Label::new(&run.id), name: Label::new(run.name()), owner: Label::new(&run.user), at, how };
    Some(ObservedJobFailure { job: work, nodes: failed.into_iter().map(|(node, _, _)| node).collect() })
}

fn failure_kind(submission: &JobSubmission) -> Option<JobFailureKind> {
    match (submission.termination_reason.as_deref()?, submission.exit_status) {
        ("instance_unreachable", _) => Some(JobFailureKind::NodeFailed),
        // Shells report a signal as 128 plus its number.
        ("container_exited_with_error", Some(code @ 129..=159)) => Some(JobFailureKind::Signal { number: code - 128 }),
        ("container_exited_with_error", Some(code)) => Some(JobFailureKind::Exit { code }),
        ("container_exited_with_error", None) => Some(JobFailureKind::Unknown),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api_types::tests::{FAILED, STOPPED, fleet, run};

    #[test]
    fn a_job_that_failed_by_itself_is_reported_with_its_instance() {
        let fleet = fleet();
        let instances: Vec<&Instance> = fleet.instances.iter().collect();
        let long_ago = Timestamp::from_secs(0);
        let [failure] = &failures(&[run(FAILED), run(STOPPED)], &instances, long_ago)[..] else { panic!("one failed") };
        assert_eq!((failure.job.name.as_str(), failure.job.how), ("val1", JobFailureKind::Exit { code: 1 }));
        assert_eq!(failure.nodes.len(), 1);
        let later = failure.job.at.plus(doctor_core::time::Span::from_secs(1));
        assert_eq!(failures(&[run(FAILED)], &instances, later), []);
        assert_eq!(failures(&[run(FAILED)], &[], long_ago), [], "an instance that is gone has no node");
        let died = FAILED.replace("container_exited_with_error", "instance_unreachable");
        assert_eq!(failures(&[run(&died)], &instances, long_ago)[0].job.how, JobFailureKind::NodeFailed);
    }
}
