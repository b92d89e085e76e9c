//! Tests results without a shared directory on a real control plane: from the termination message, even of a pod that is gone.
//! The emulated kubelet has no logs; results in logs are tested on a real one.

use std::time::Duration;

use doctor_backend::Backend;
use doctor_backend_kubernetes::{KubernetesBackend, KubernetesConfig, Share};
use doctor_checks::result_transport::PackedDocument;
use doctor_core::{
    ids::RunId,
    run::{JobEnd, ObservedJobState},
};
use doctor_testbed::kubernetes::kubelet::Exit;

use super::{Cluster, NAMESPACE, cluster, ids, polled, request, seen, until};

fn backend(cluster: &Cluster) -> KubernetesBackend {
    KubernetesBackend::open(KubernetesConfig { share: Share::None, ..cluster.config() }).unwrap()
}

/// Returns the pod of a run once it runs.
fn pod(cluster: &Cluster, run: RunId) -> String {
    let pods = format!("/api/v1/namespaces/{NAMESPACE}/pods?labelSelector=cluster-doctor.io%2Frun%3D{run}");
    until("the pod to run", || cluster.get(&pods)["items"][0]["status"]["phase"] == "Running");
    cluster.get(&pods)["items"][0]["metadata"]["name"].as_str().unwrap().to_owned()
}

fn says(document: &[u8], code: i32) -> Exit {
    Exit::code(code).with_message(PackedDocument::pack(document).unwrap().to_termination_message())
}

#[test]
fn a_result_is_read_from_the_termination_message_and_a_truncated_message_has_none() {
    let Some(cluster) = cluster() else { return };
    let backend = backend(cluster);
    seen(&backend, "gpu-14");
    let run = ids(21).run();
    backend.submit(&request(run, "gpu-14", "endless")).unwrap();
    let name = pod(cluster, run);
    let pod_object = cluster.get(&format!("/api/v1/namespaces/{NAMESPACE}/pods/{name}"));
    let command = pod_object["spec"]["containers"][0]["command"].to_string();
    assert!(command.contains("\"--carry\",\"/dev/termination-log\"") && !command.contains("--document"), "{command}");
    assert!(!pod_object["spec"]["volumes"].to_string().contains("\"data\""), "{}", pod_object["spec"]["volumes"]);
    assert!(backend.poll(&[run]).unwrap()[0].documents.is_empty(), "it runs");
    cluster.kubelet.end_pod(NAMESPACE, &name, says(b"signed", 0)).unwrap();
    until("the result", || backend.poll(&[run]).unwrap()[0].documents == [b"signed".to_vec()]);
    until("the job's end", || matches!(polled(&backend, run), ObservedJobState::Ended { how: JobEnd::Exited, .. }));
    assert_eq!(backend.poll(&[run]).unwrap()[0].documents.len(), 1, "it is returned until the run is over");

    let run = ids(22).run();
    backend.submit(&request(run, "gpu-14", "endless")).unwrap();
    let name = pod(cluster, run);
    let message = PackedDocument::pack(b"signed").unwrap().to_termination_message();
    cluster.kubelet.end_pod(NAMESPACE, &name, Exit::code(0).with_message(&message[..message.len() - 5])).unwrap();
    until("the job's end", || matches!(polled(&backend, run), ObservedJobState::Ended { .. }));
    assert!(backend.poll(&[run]).unwrap()[0].documents.is_empty(), "a truncated document is no result");
}

#[test]
fn the_result_of_a_pod_is_known_after_the_pod_was_deleted() {
    let Some(cluster) = cluster() else { return };
    let backend = backend(cluster);
    seen(&backend, "gpu-15");
    // Nothing reports that the watch has started, so the test repeats until it has.
    let mut seed = 30;
    until("a result of a pod that is gone", || {
        seed += 1;
        let run = ids(seed).run();
        backend.submit(&request(run, "gpu-15", "endless")).unwrap();
        let name = pod(cluster, run);
        cluster.kubelet.end_pod(NAMESPACE, &name, says(b"half of it", 143)).unwrap();
        let path = format!("/api/v1/namespaces/{NAMESPACE}/pods/{name}");
        until("the pod to end", || cluster.get(&path)["status"]["phase"] == "Failed");
        cluster.delete(&path);
        until("the pod to be gone", || cluster.plane.request("GET", &path, None).unwrap().status == 404);
        // The watch delivers the end before the deletion, both slightly later than seen here.
        let has_document = || backend.poll(&[run]).unwrap()[0].documents == [b"half of it".to_vec()];
        (0..40).any(|_| {
            has_document() || {
                std::thread::sleep(Duration::from_millis(50));
                false
            }
        })
    });
}
