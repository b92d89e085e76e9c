//! Tests failed user pods as a real API server reports them: only failures, only from the start of the watch, and across a
//! restarted watch.

use doctor_backend::{Backend, ObservedJobFailure};
use doctor_core::{
    job_failures::JobFailureKind,
    node::Occupancy,
    run::{JobEnd, ObservedJobState},
    time::Timestamp,
};
use doctor_testbed::kubernetes::kubelet::Exit;
use serde_json::json;

use super::{NAMESPACE, cluster, ids, polled, request, seen, until};

const NODE: &str = "gpu-13";

/// Returns the failures reported on this node.
fn reported_failures(backend: &dyn Backend) -> Vec<ObservedJobFailure> {
    let mut all = backend.job_failures(Timestamp::MIN).unwrap();
    all.retain(|failed| failed.nodes.iter().any(|node| node.as_str() == NODE));
    all
}

#[test]
fn failed_user_pods_are_reported_and_succeeded_or_deleted_pods_are_not() {
    let Some(cluster) = cluster() else { return };
    let backend = cluster.backend();
    seen(&backend, NODE);
    let runs = |name: &str| {
        cluster.user_pod(name, NODE);
        let path = format!("/api/v1/namespaces/default/pods/{name}");
        until("the pod to run", || cluster.get(&path)["status"]["phase"] == "Running");
    };
    let ends = |name: &str, exit: Exit| {
        runs(name);
        cluster.kubelet.end_pod("default", name, exit).unwrap();
        let path = format!("/api/v1/namespaces/default/pods/{name}");
        until("the pod to end", || cluster.get(&path)["status"]["phase"] != "Running");
    };
    ends("well", Exit::code(0));
    runs("cancelled");
    cluster.delete("/api/v1/namespaces/default/pods/cancelled");
    ends("crashed", Exit::code(139));
    ends("too-large", Exit::code(137).with_reason("OOMKilled"));
    until("both to be told", || reported_failures(&backend).len() >= 2);
    let names: Vec<(String, JobFailureKind)> =
        reported_failures(&backend).into_iter().map(|failed| (failed.job.name.to_string(), failed.job.how)).collect();
    let expected = [
        ("default/crashed", JobFailureKind::Signal { number: 11 }),
        ("default/too-large", JobFailureKind::OutOfMemory),
    ];
    assert_eq!(names, expected.map(|(name, how)| (name.to_owned(), how)));
    assert!(reported_failures(&backend).iter().all(|failed| failed.job.owner.as_str() == "default"));

    // Failures before the watch started are not listed. Nothing reports its start, so the test repeats until it has started.
    let later = cluster.backend();
    seen(&later, NODE);
    let mut tries = 0;
    until("the next to be told", || {
        tries += 1;
        ends(&format!("again-{tries}"), Exit::code(1));
        !reported_failures(&later).is_empty()
    });
    assert!(reported_failures(&later).iter().all(|failed| failed.job.name.as_str().starts_with("default/again-")));
    let again: Vec<String> = (1..=tries).map(|number| format!("again-{number}")).collect();
    for name in ["well", "crashed", "too-large"].into_iter().chain(again.iter().map(String::as_str)) {
        cluster.delete(&format!("/api/v1/namespaces/default/pods/{name}"));
    }
}

/// The conditions that the cluster's controllers set when a node has been unreachable for five minutes.
#[test]
fn a_job_whose_node_died_is_not_reported_as_preempted_by_a_user() {
    let Some(cluster) = cluster() else { return };
    let backend = cluster.backend();
    seen(&backend, "gpu-16");
    let run = ids(41).run();
    backend.submit(&request(run, "gpu-16", "endless")).unwrap();
    until("our job to run", || matches!(polled(&backend, run), ObservedJobState::Running { .. }));
    cluster.kubelet.set_ready("gpu-16", false).unwrap();
    until("the node to be unknown", || matches!(seen(&backend, "gpu-16").occupancy, Occupancy::Unknown { .. }));
    let pods = format!("/api/v1/namespaces/{NAMESPACE}/pods");
    let found = cluster.get(&format!("{pods}?labelSelector=cluster-doctor.io%2Frun%3D{run}"));
    let name = found["items"][0]["metadata"]["name"].as_str().unwrap();
    let disruption = json!({ "type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager" });
    let patch = json!({ "status": { "phase": "Failed", "conditions": [disruption] } });
    let answer = cluster.plane.request("PATCH", &format!("{pods}/{name}/status"), Some(&patch)).unwrap();
    assert!(answer.is_success(), "{}", answer.text);
    until("the job's end", || matches!(polled(&backend, run), ObservedJobState::Ended { .. }));
    assert!(
        matches!(polled(&backend, run), ObservedJobState::Ended { how: JobEnd::NodeDied, .. }),
        "{:?}",
        polled(&backend, run)
    );
}
