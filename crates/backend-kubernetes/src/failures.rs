//! A watch of failed user pods.
//!
//! The watch of live pods cannot report failures: a pod that ends no longer matches its selector, and the server then sends the
//! pod's previous state. Fetching each pod that disappears would also cost a request for every pod that succeeded. This second
//! watch selects failed pods only, starting now: old ones, of which a cluster keeps thousands, are never listed. A failure while
//! the watch is interrupted is missed; failures are only a hint.
//!
//! Where no directory is shared, the same watch also delivers the results of our cancelled jobs, whose pods are gone before the
//! next poll.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use doctor_backend::{
    ObservedJobFailure,
    clock::{Clock, SystemClock},
};
use doctor_core::{
    ids::{NodeName, RunId},
    job_failures::{JobFailure, JobFailureKind, Label},
    run::{JobEnd, ObservedJobState},
    time::Timestamp,
};
use futures_util::StreamExt;
use kube::{
    Api, Client, ResourceExt,
    api::{ListParams, WatchParams},
    core::WatchEvent,
};

use super::{
    config::{KubernetesConfig, Share},
    names,
    objects::{CachedNode, ContainerStatus, PodObject, PodStatus, Terminated, Time, pod_resource},
    occupancy::uses_gpus,
    result_transport::{self, PodResults},
    watch::{MAX_BACKOFF, MIN_BACKOFF, WATCH_SECONDS, WatchCache},
};

const FAILED_PODS: &str = "status.phase=Failed";
/// The maximum number of failures held until they are queried. The oldest are dropped.
const MAX_FAILURES: usize = 4096;
/// Reasons of failed pods that were evicted, were rejected by their node, or exceeded their own time limit.
const IGNORED_REASONS: [&str; 8] =
    ["Evicted", "Preempting", "Shutdown", "NodeShutdown", "Terminated", "NodeAffinity", "Rejected", "DeadlineExceeded"];
/// The maximum number of runs remembered as ended by the death of their node. No more end within one cycle.
const MAX_NODE_DEATHS: usize = 256;
/// The limit for fetching one log.
const LOG_TIMEOUT: Duration = Duration::from_secs(15);
/// A watch that lasted less than this was closed immediately.
const IMMEDIATE: Duration = Duration::from_secs(1);
/// The server no longer has the resourceVersion from which a watch should start.
const GONE: u16 = 410;

#[derive(Debug, Default)]
struct FailureLog {
    /// With the time at which the watch reported it.
    reported: VecDeque<(Timestamp, ObservedJobFailure)>,
    down_since: Option<(Instant, String)>,
    /// Runs whose pods ended because their node did, the newest last.
    runs_lost_with_node: VecDeque<RunId>,
}

/// The failures that the watch has reported.
#[derive(Debug, Default)]
pub(super) struct Failures(Mutex<FailureLog>);

impl Failures {
    fn lock(&self) -> MutexGuard<'_, FailureLog> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the failures reported since then and drops the older ones.
    ///
    /// # Errors
    /// If the watch has been broken for longer than [`MAX_BACKOFF`].
    pub(super) fn since(&self, since: Timestamp) -> Result<Vec<ObservedJobFailure>, String> {
        let mut state = self.lock();
        if let Some((began, why)) = &state.down_since
            && began.elapsed() > MAX_BACKOFF
        {
            return Err(format!("the watch of failed pods has been down for {} s: {why}", began.elapsed().as_secs()));
        }
        state.reported.retain(|(reported_at, _)| *reported_at >= since);
        Ok(state.reported.iter().map(|(_, failure)| failure.clone()).collect())
    }

    fn record(&self, failure: ObservedJobFailure, now: Timestamp) {
        let mut state = self.lock();
        if state.reported.len() >= MAX_FAILURES {
            state.reported.pop_front();
        }
        state.reported.push_back((now, failure));
    }

    /// Records a run whose pod ended with its node. The pod may be gone by the next poll.
    pub(super) fn record_node_death(&self, pod: &PodObject, config: &KubernetesConfig, watched: &WatchCache) {
        let is_ready = || {
            pod.spec.node_name.as_deref().and_then(|node| watched.with_node(node, CachedNode::is_ready)) == Some(true)
        };
        let Some(run) = names::run_of(&pod.metadata, config).filter(|_| died_with_its_node(pod, is_ready)) else {
            return;
        };
        let mut state = self.lock();
        if !state.runs_lost_with_node.contains(&run) {
            if state.runs_lost_with_node.len() >= MAX_NODE_DEATHS {
                state.runs_lost_with_node.pop_front();
            }
            state.runs_lost_with_node.push_back(run);
        }
    }

    /// Refines how a job ended by what is known of its pods.
    pub(super) fn refine_end(&self, run: RunId, mut seen: ObservedJobState) -> ObservedJobState {
        if let ObservedJobState::Ended { how: how @ JobEnd::Preempted, .. } = &mut seen
            && self.lock().runs_lost_with_node.contains(&run)
        {
            *how = JobEnd::NodeDied;
        }
        seen
    }

    fn set_down(&self, why: String) {
        self.lock().down_since.get_or_insert((Instant::now(), why));
    }

    fn set_up(&self) {
        self.lock().down_since = None;
    }
}

/// Follows failed pods until the process ends.
pub(super) async fn watch_failures(
    client: Client,
    config: Arc<KubernetesConfig>,
    failures: Arc<Failures>,
    watched: Arc<WatchCache>,
    pod_results: Arc<PodResults>,
) {
    let to = FailureSink {
        client: &client,
        config: &config,
        failures: &failures,
        watched: &watched,
        pod_results: &pod_results,
    };
    let mut version = None;
    let mut backoff = WatchBackoff(MIN_BACKOFF);
    loop {
        let began = Instant::now();
        let ended = watch(&to, &mut version).await;
        if let Err(error) = &ended {
            tracing::debug!(%error, "watch of failed pods failed; restarting it");
            if matches!(error, kube::Error::Api(status) if status.code == GONE) {
                version = None;
            }
            failures.set_down(error.to_string());
        }
        tokio::time::sleep(backoff.wait_after(began.elapsed(), ended.is_err())).await;
    }
}

/// The delay before the next watch: it grows with each watch that broke or was closed immediately, by the server or a proxy.
struct WatchBackoff(Duration);

impl WatchBackoff {
    fn wait_after(&mut self, lasted: Duration, failed: bool) -> Duration {
        if lasted > Duration::from_secs(WATCH_SECONDS.into()) / 2 {
            self.0 = MIN_BACKOFF;
        }
        if !failed && lasted >= IMMEDIATE {
            return Duration::ZERO;
        }
        let delay = self.0;
        self.0 = (delay * 2).min(MAX_BACKOFF);
        delay
    }
}

/// The receivers of the watch's events.
struct FailureSink<'a> {
    client: &'a Client,
    config: &'a Arc<KubernetesConfig>,
    failures: &'a Failures,
    watched: &'a WatchCache,
    pod_results: &'a Arc<PodResults>,
}

impl FailureSink<'_> {
    fn handle(&self, pod: &PodObject) {
        let now = SystemClock.now();
        if let Some(failure) = failure(pod, now, self.config) {
            self.failures.record(failure, now);
        }
        let ours = pod.namespace().as_deref() == Some(&self.config.namespace);
        if ours {
            self.failures.record_node_death(pod, self.config, self.watched);
        }
        if ours && self.config.share == Share::None {
            self.fetch_log(pod);
        }
    }

    /// Fetches the log in a task of its own: the pod may soon be gone, and the watch must not wait.
    fn fetch_log(&self, pod: &PodObject) {
        let Some(log_fetch) = self.pod_results.take_from(pod, self.config) else { return };
        let (client, config, pod_results) =
            (self.client.clone(), Arc::clone(self.config), Arc::clone(self.pod_results));
        tokio::spawn(async move {
            let fetched =
                tokio::time::timeout(LOG_TIMEOUT, result_transport::fetch(&client, &config, &pod_results, &log_fetch))
                    .await;
            if let Ok(Err(error)) = fetched {
                tracing::debug!(%error, ?log_fetch, "log of a terminated job not fetched");
            }
        });
    }
}

/// Runs one watch from the version at which the last one ended.
async fn watch(to: &FailureSink<'_>, version: &mut Option<String>) -> kube::Result<()> {
    let from = match version.take() {
        Some(known) => known,
        None => current_version(to.client, to.config).await?,
    };
    *version = Some(from.clone());
    let api: Api<PodObject> = Api::all_with(to.client.clone(), &pod_resource());
    let settings = WatchParams::default().fields(FAILED_PODS).timeout(WATCH_SECONDS);
    let mut events = std::pin::pin!(api.watch(&settings, &from).await?);
    to.failures.set_up();
    while let Some(event) = events.next().await {
        match event? {
            WatchEvent::Added(pod) | WatchEvent::Modified(pod) => {
                to.handle(&pod);
                *version = pod.resource_version();
            }
            WatchEvent::Deleted(pod) => *version = pod.resource_version(),
            WatchEvent::Bookmark(bookmark) => *version = Some(bookmark.metadata.resource_version),
            WatchEvent::Error(status) => return Err(kube::Error::Api(status)),
        }
    }
    Ok(())
}

/// Returns the current resourceVersion of pods without listing any: no pod has this name, and the server looks up only one name.
async fn current_version(client: &Client, config: &KubernetesConfig) -> kube::Result<String> {
    let api: Api<PodObject> = Api::namespaced_with(client.clone(), &config.namespace, &pod_resource());
    let none = api.list(&ListParams::default().fields("metadata.name=doctor-asks-for-the-version")).await?;
    Ok(none.metadata.resource_version.unwrap_or_default())
}

/// Returns `None` if the pod used no GPUs, is ours, or was ended on purpose.
fn failure(pod: &PodObject, now: Timestamp, config: &KubernetesConfig) -> Option<ObservedJobFailure> {
    let status = pod.status.as_ref().filter(|status| status.phase == "Failed")?;
    let namespace = pod.namespace()?;
    // Our namespace contains only our own pods.
    if namespace == config.namespace || pod.metadata.deletion_timestamp.is_some() || !uses_gpus(&pod.spec, config) {
        return None;
    }
    let displaced = status.conditions.iter().any(|condition| condition.matches("DisruptionTarget", "True"));
    if displaced || IGNORED_REASONS.contains(&status.reason.as_str()) || status.reason.starts_with("OutOf") {
        return None;
    }
    let node = NodeName::new(pod.spec.node_name.as_deref()?).ok()?;
    let end = container_end(status);
    let owners = pod.metadata.owner_references.as_deref().unwrap_or_default();
    // The pods of one job count as one piece of work.
    let controller = owners.iter().find(|owner| owner.controller == Some(true)).map(|owner| owner.uid.clone());
    let work = JobFailure {
        id: Label::new(&controller.or_else(|| pod.uid())?),
        name: Label::new(&format!("{namespace}/{}", pod.name_any())),
        owner: Label::new(&namespace),
        at: end.and_then(|end| end.finished_at).map_or(now, Time::timestamp),
        how: end.map_or(JobFailureKind::Unknown, failure_kind),
    };
    Some(ObservedJobFailure { job: work, nodes: vec![node] })
}

/// Returns whether the cluster removed the pod because its node was deleted or does not respond. A NoExecute taint on a healthy
/// node also removes pods; that is a disruption, and the node has not died.
fn died_with_its_node(pod: &PodObject, is_ready: impl Fn() -> bool) -> bool {
    let conditions = pod.status.as_ref().map_or(&[][..], |status| &status.conditions);
    let disruption = conditions.iter().find(|condition| condition.matches("DisruptionTarget", "True"));
    match disruption.map(|disruption| disruption.reason.as_str()) {
        Some("DeletionByPodGC") => true,
        Some("DeletionByTaintManager") => !is_ready(),
        _ => false,
    }
}

/// Returns the end of the first container that failed.
fn container_end(status: &PodStatus) -> Option<&Terminated> {
    let all = status.init_container_statuses.iter().chain(&status.container_statuses);
    let ended = all.filter_map(|container: &ContainerStatus| container.state.terminated.as_ref());
    ended.filter(|end| end.exit_code != 0).min_by_key(|end| end.finished_at.map(Time::timestamp))
}

fn failure_kind(end: &Terminated) -> JobFailureKind {
    match (end.reason.as_str(), end.signal, end.exit_code) {
        ("OOMKilled", ..) => JobFailureKind::OutOfMemory,
        (_, number, _) if number != 0 => JobFailureKind::Signal { number },
        // Shells report a signal as 128 plus its number.
        (.., code @ 129..=192) => JobFailureKind::Signal { number: code - 128 },
        (.., code) => JobFailureKind::Exit { code },
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const NOW: Timestamp = Timestamp::from_secs(1_794_729_600);

    /// A pod from the API server of Kubernetes 1.34, shortened by hand.
    fn failure_of(change: impl FnOnce(&mut Value)) -> Option<ObservedJobFailure> {
        let mut pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": { "name": "train-0", "namespace": "team", "uid": "pod-uid", "ownerReferences": [
                { "apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "job-uid", "controller": true }] },
            "spec": { "nodeName": "gpu-1", "containers": [
                { "name": "train", "resources": { "limits": { "nvidia.com/gpu": "8" } } }] },
            "status": { "phase": "Failed", "conditions": [], "containerStatuses": [
                { "name": "train", "state": { "terminated": {
                    "exitCode": 1, "reason": "Error", "startedAt": "2026-11-15T07:00:00Z", "finishedAt": "2026-11-15T07:30:00Z" } } }] },
        });
        change(&mut pod);
        failure(&serde_json::from_value(pod).unwrap(), NOW, &KubernetesConfig::default())
    }

    #[test]
    fn a_failed_user_pod_is_reported_with_its_job_its_namespace_and_its_failure_kind() {
        let failed = failure_of(|_| {}).unwrap();
        let work = &failed.job;
        assert_eq!((work.id.as_str(), work.owner.as_str(), work.name.as_str()), ("job-uid", "team", "team/train-0"));
        assert_eq!((failed.nodes[0].as_str(), work.at), ("gpu-1", "2026-11-15T07:30:00Z".parse().unwrap()));
        assert_eq!(work.how, JobFailureKind::Exit { code: 1 });
        let unowned = failure_of(|pod| pod["metadata"]["ownerReferences"] = json!([])).unwrap();
        assert_eq!(unowned.job.id.as_str(), "pod-uid");
    }

    #[test]
    fn the_failure_kind_is_read_from_the_container_statuses() {
        let failure_kind = |terminated: Value| {
            failure_of(|pod| pod["status"]["containerStatuses"][0]["state"]["terminated"] = terminated).unwrap().job.how
        };
        assert_eq!(failure_kind(json!({ "exitCode": 137, "reason": "OOMKilled" })), JobFailureKind::OutOfMemory);
        assert_eq!(failure_kind(json!({ "exitCode": 139, "reason": "Error" })), JobFailureKind::Signal { number: 11 });
        assert_eq!(failure_kind(json!({ "exitCode": 255, "signal": 7 })), JobFailureKind::Signal { number: 7 });
        assert_eq!(
            failure_kind(json!({ "exitCode": 128, "reason": "StartError" })),
            JobFailureKind::Exit { code: 128 }
        );
        let not_admitted = failure_of(|pod| {
            pod["status"] = json!({ "phase": "Failed", "reason": "UnexpectedAdmissionError",
                "message": "Allocate failed due to no healthy devices present" });
        });
        let not_admitted = not_admitted.unwrap().job;
        assert_eq!((not_admitted.how, not_admitted.at), (JobFailureKind::Unknown, NOW));
    }

    #[test]
    fn disrupted_pods_our_own_pods_and_pods_without_gpus_are_not_reported_as_failed() {
        for (pointer, value) in [
            ("/status/phase", json!("Succeeded")),
            (
                "/status/conditions",
                json!([{ "type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler" }]),
            ),
            ("/metadata/namespace", json!("cluster-doctor")),
            ("/spec/containers/0/resources", json!({})),
            ("/spec", json!({ "containers": [{ "resources": { "limits": { "nvidia.com/gpu": "8" } } }] })),
        ] {
            assert_eq!(failure_of(|pod| *pod.pointer_mut(pointer).unwrap() = value.clone()), None, "{pointer}");
        }
        for reason in ["Evicted", "OutOfnvidia.com/gpu", "DeadlineExceeded", "NodeShutdown"] {
            assert_eq!(failure_of(|pod| pod["status"]["reason"] = json!(reason)), None, "{reason}");
        }
        assert_eq!(failure_of(|pod| pod["metadata"]["deletionTimestamp"] = json!("2026-11-15T07:29:00Z")), None);
    }

    #[test]
    fn a_watch_that_fails_or_ends_at_once_is_restarted_with_increasing_backoff() {
        let (at_once, lasted) = (Duration::from_millis(2), Duration::from_secs(WATCH_SECONDS.into()));
        let mut backoff = WatchBackoff(MIN_BACKOFF);
        assert_eq!(backoff.wait_after(lasted, false), Duration::ZERO, "it ended normally");
        assert_eq!(
            [false, true, false].map(|failed| backoff.wait_after(at_once, failed)),
            [1, 2, 4].map(|n| MIN_BACKOFF * n)
        );
        let longest = (0..10).map(|_| backoff.wait_after(at_once, false)).max();
        assert_eq!(longest, Some(MAX_BACKOFF));
        assert_eq!(backoff.wait_after(lasted, true), MIN_BACKOFF, "it had worked");
    }

    #[test]
    fn a_pod_is_lost_with_its_node_but_not_by_a_taint_on_a_ready_node() {
        let died = |reason: &str, ready: bool| {
            let pod = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "p" }, "spec": {}, "status": {
                "phase": "Failed", "conditions": [{ "type": "DisruptionTarget", "status": "True", "reason": reason }] } });
            died_with_its_node(&serde_json::from_value(pod).unwrap(), || ready)
        };
        assert!(died("DeletionByPodGC", true) && died("DeletionByTaintManager", false));
        assert!(!died("DeletionByTaintManager", true) && !died("PreemptionByScheduler", false));
    }

    #[test]
    fn failures_are_retained_until_they_are_old_and_their_number_is_bounded() {
        let failures = Failures::default();
        let failed = failure_of(|_| {}).unwrap();
        for second in 0..=MAX_FAILURES {
            failures.record(failed.clone(), Timestamp::from_secs(second.try_into().unwrap()));
        }
        assert_eq!(failures.since(Timestamp::MIN).unwrap().len(), MAX_FAILURES);
        assert_eq!(failures.since(Timestamp::from_secs(MAX_FAILURES.try_into().unwrap())).unwrap().len(), 1);
        assert_eq!(failures.since(Timestamp::MIN).unwrap().len(), 1, "failures that are never read are dropped");
    }
}
