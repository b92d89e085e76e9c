//! Tests node operations beyond marks: eviction under a real disruption budget, repair by a job, replacement.

use std::{
    io::{Read as _, Write as _},
    net::TcpListener,
};

use doctor_backend::{Backend, BackendError, Change, Effect, NodeOp};
use doctor_backend_kubernetes::{KubernetesBackend, KubernetesConfig, Replace, Webhook, manifests};
use doctor_core::{
    ids::{NodeName, OpId},
    run::ObservedJobState,
};
use doctor_testbed::{fake_aws::FakeAws, kubernetes::kubelet::Exit};
use serde_json::{Value, json};

use super::{Cluster, NAMESPACE, cluster, ids, polled, request, until};

fn apply(backend: &KubernetesBackend, node: &str, op: OpId, what: Change) -> Result<(), BackendError> {
    backend.apply(&NodeName::new(node).unwrap(), &NodeOp { op, what })
}

/// A user's pod without GPUs on this node, recreated by a ReplicaSet.
fn set_of(name: &str, node: &str) -> Value {
    let labels = json!({ "app": name });
    json!({
        "apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": { "name": name, "namespace": "default" },
        "spec": { "replicas": 1, "selector": { "matchLabels": labels },
            "template": { "metadata": { "labels": labels }, "spec": on(node) } },
    })
}

fn on(node: &str) -> Value {
    json!({ "nodeSelector": { "kubernetes.io/hostname": node }, "terminationGracePeriodSeconds": 0,
        "containers": [{ "name": "web", "image": "web" }] })
}

impl Cluster {
    fn pods_of(&self, app: &str) -> Vec<Value> {
        let path = format!("/api/v1/namespaces/default/pods?labelSelector=app%3D{app}");
        self.get(&path)["items"].as_array().unwrap().clone()
    }

    fn runs_on(&self, app: &str, node: &str) -> bool {
        let runs = |pod: &Value| pod["spec"]["nodeName"] == node && pod["status"]["phase"] == "Running";
        self.pods_of(app).iter().any(runs)
    }

    fn cordon(&self, node: &str, there: bool) {
        let patch = json!({ "spec": { "unschedulable": there } });
        let answer = self.plane.request("PATCH", &format!("/api/v1/nodes/{node}"), Some(&patch)).unwrap();
        assert!(answer.is_success(), "{}", answer.text);
    }

    /// Returns the pod of a repair once it runs.
    fn repair_pod(&self, op: OpId) -> String {
        let path = format!("/api/v1/namespaces/{NAMESPACE}/pods?labelSelector=cluster-doctor.io%2Fop%3D{op}");
        let mut name = None;
        until("the repair to run", || {
            let pods = self.get(&path);
            let running = pods["items"].as_array().unwrap().iter().find(|pod| pod["status"]["phase"] == "Running");
            name = running.and_then(|pod| pod["metadata"]["name"].as_str()).map(str::to_owned);
            name.is_some()
        });
        name.unwrap()
    }

    fn repair_jobs(&self, op: OpId) -> usize {
        let path = format!("/apis/batch/v1/namespaces/{NAMESPACE}/jobs?labelSelector=cluster-doctor.io%2Fop%3D{op}");
        self.get(&path)["items"].as_array().unwrap().len()
    }
}

#[test]
fn pods_are_evicted_within_their_disruption_budgets_and_unowned_pods_are_left_to_an_operator() {
    let Some(cluster) = cluster() else { return };
    let (backend, node) = (cluster.backend(), "gpu-5");
    cluster.plane.create(&set_of("web", node));
    cluster.plane.create(&json!({
        "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": { "name": "web", "namespace": "default" },
        "spec": { "minAvailable": 1, "selector": { "matchLabels": { "app": "web" } } },
    }));
    cluster.plane.create(&json!({ "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": "bare-on-gpu-5", "namespace": "default" }, "spec": on(node) }));
    cluster.plane.create(&json!({
        "apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": { "name": "monitor", "namespace": "default" },
        "spec": { "selector": { "matchLabels": { "app": "monitor" } },
            "template": { "metadata": { "labels": { "app": "monitor" } }, "spec": on(node) } },
    }));
    until("the pods to run", || cluster.runs_on("web", node) && cluster.runs_on("monitor", node));
    until("the budget to be counted", || {
        let budget = cluster.get("/apis/policy/v1/namespaces/default/poddisruptionbudgets/web");
        budget["status"]["currentHealthy"] == 1
    });
    cluster.cordon(node, true);
    let op = ids(11).op();
    let error = apply(&backend, node, op, Change::Evict).unwrap_err();
    assert_eq!(error.effect, Effect::NotAppliedRetry);
    assert!(error.text.contains("default/web-") && error.text.contains("disruption budget"), "{error}");
    assert!(error.text.contains("default/bare-on-gpu-5 has no controller"), "{error}");
    assert!(cluster.runs_on("web", node), "its disruption budget was violated");
    cluster.delete("/apis/policy/v1/namespaces/default/poddisruptionbudgets/web");
    until("the pod to have left", || {
        let left = apply(&backend, node, op, Change::Evict).unwrap_err();
        !left.text.contains("default/web-")
    });
    assert!(!cluster.runs_on("web", node));
    cluster.delete("/api/v1/namespaces/default/pods/bare-on-gpu-5");
    until("the node to be empty", || apply(&backend, node, op, Change::Evict).is_ok());
    assert!(cluster.runs_on("monitor", node), "what belongs to the node stays");
    for kind in ["replicasets/web", "daemonsets/monitor"] {
        cluster.delete(&format!("/apis/apps/v1/namespaces/default/{kind}"));
    }
    cluster.cordon(node, false);
}

#[test]
fn a_reboot_is_complete_when_the_boot_id_changes_and_never_runs_under_user_pods() {
    let Some(cluster) = cluster() else { return };
    let (backend, node) = (cluster.backend(), "gpu-6");
    let mut ids = ids(12);
    cluster.plane.create(&json!({ "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": "user-on-gpu-6", "namespace": "default" }, "spec": on(node) }));
    // Before that, nothing would be in the way of the reboot.
    let pod = "/api/v1/namespaces/default/pods/user-on-gpu-6";
    until("the user's pod to be on the node", || cluster.get(pod)["spec"]["nodeName"] == node);
    let op = ids.op();
    until(
        "the user's pod to be in the way",
        || matches!(apply(&backend, node, op, Change::Reboot), Err(error) if error.text.contains("default/user-on-gpu-6")),
    );
    assert_eq!(cluster.repair_jobs(op), 0, "it uses no GPU and would be ended all the same");
    cluster.delete("/api/v1/namespaces/default/pods/user-on-gpu-6");
    until(
        "the reboot to begin",
        || matches!(apply(&backend, node, op, Change::Reboot), Err(error) if error.effect == Effect::Unknown),
    );
    let pod = cluster.repair_pod(op);
    let path = format!("/api/v1/namespaces/{NAMESPACE}/pods/{pod}");
    let spec = cluster.get(&path)["spec"].clone();
    assert_eq!(spec["nodeName"], node);
    assert_eq!(spec["containers"][0]["securityContext"]["privileged"], true);
    let command = spec["containers"][0]["command"].to_string();
    assert!(command.starts_with("[\"doctor-node\",\"repair\",\"reboot\",\"--boot\",\"00000000-"), "{command}");
    cluster.kubelet.end_pod(NAMESPACE, &pod, Exit::code(0)).unwrap();
    until(
        "the reboot to be requested",
        || matches!(apply(&backend, node, op, Change::Reboot), Err(error) if error.text.contains("boot ID not")),
    );
    cluster.kubelet.set_boot_id(node, "11111111-1111-4111-8111-111111111111").unwrap();
    until("the reboot to be done", || apply(&backend, node, op, Change::Reboot).is_ok());
    // Its job is deleted at some point; the annotation on the node remains.
    let jobs = format!("/apis/batch/v1/namespaces/{NAMESPACE}/jobs/doctor-{op}");
    cluster.plane.request("DELETE", &format!("{jobs}?propagationPolicy=Background"), None).unwrap();
    until("the job to be gone", || cluster.repair_jobs(op) == 0);
    apply(&backend, node, op, Change::Reboot).unwrap();
    assert_eq!(cluster.repair_jobs(op), 0, "it was rebooted once");
}

#[test]
fn a_failed_repair_command_is_reported_and_a_retry_creates_another_job() {
    let Some(cluster) = cluster() else { return };
    let (backend, node) = (cluster.backend(), "gpu-7");
    let mut ids = ids(13);
    for (code, done) in [(1, false), (0, true)] {
        let op = ids.op();
        assert_eq!(apply(&backend, node, op, Change::Reset).unwrap_err().effect, Effect::Unknown);
        let pod = cluster.repair_pod(op);
        cluster.kubelet.end_pod(NAMESPACE, &pod, Exit::code(code)).unwrap();
        until("the reset to end", || match apply(&backend, node, op, Change::Reset) {
            Ok(()) => done,
            Err(error) if error.effect == Effect::NotAppliedPermanent => {
                !done && error.text.contains("BackoffLimitExceeded")
            }
            Err(_) => false,
        });
    }
}

#[test]
fn a_node_is_replaced_by_deletion_where_that_is_configured_and_allowed() {
    let Some(cluster) = cluster() else { return };
    let (node, op) = ("gpu-8", ids(14).op());
    let refused = apply(&cluster.backend(), node, op, Change::Replace).unwrap_err();
    assert_eq!(refused.effect, Effect::NotAppliedPermanent, "{refused}");
    let config = KubernetesConfig { replace: Replace::DeleteNode, ..cluster.config() };
    let backend = KubernetesBackend::open(config.clone()).unwrap();
    let forbidden = apply(&backend, node, op, Change::Replace).unwrap_err();
    assert!(forbidden.text.contains("cannot delete resource"), "{forbidden}");
    let role = manifests(&config).into_iter().find(|object| object["kind"] == "ClusterRole").unwrap();
    let path = "/apis/rbac.authorization.k8s.io/v1/clusterroles/cluster-doctor";
    assert!(cluster.plane.request("PATCH", path, Some(&json!({ "rules": role["rules"] }))).unwrap().is_success());
    until("the permission to take effect", || apply(&backend, node, op, Change::Replace).is_ok());
    assert_eq!(cluster.plane.request("GET", &format!("/api/v1/nodes/{node}"), None).unwrap().status, 404);
    apply(&backend, node, op, Change::Replace).unwrap();
    until("it to be gone", || backend.snapshot().unwrap().iter().all(|seen| seen.node.name.as_str() != node));
}

/// Responds to each call with the next of these codes, and returns the requests.
fn server(codes: &'static [u16]) -> (String, std::thread::JoinHandle<Vec<String>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/replace?cluster=a", listener.local_addr().unwrap());
    let calls = std::thread::spawn(move || {
        let answer = |code: &u16| {
            let (mut stream, _) = listener.accept().unwrap();
            let (mut received, mut part) = (Vec::new(), [0; 4096]);
            while !String::from_utf8_lossy(&received).ends_with('}') {
                let count = stream.read(&mut part).unwrap();
                received.extend(&part[..count]);
            }
            write!(stream, "HTTP/1.1 {code} X\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").unwrap();
            String::from_utf8(received).unwrap()
        };
        codes.iter().map(answer).collect()
    });
    (url, calls)
}

#[test]
fn a_webhook_is_called_once_with_the_instance() {
    let Some(cluster) = cluster() else { return };
    let (url, calls) = server(&[503, 404, 200]);
    let replace = Replace::Webhook(Webhook { url, token_variable: None });
    let backend = KubernetesBackend::open(KubernetesConfig { replace, ..cluster.config() }).unwrap();
    let mut ids = ids(15);
    let op = ids.op();
    assert_ne!(apply(&backend, "gpu-9", op, Change::Replace).unwrap_err().effect, Effect::NotAppliedPermanent);
    assert_eq!(apply(&backend, "gpu-9", op, Change::Replace).unwrap_err().effect, Effect::NotAppliedPermanent);
    apply(&backend, "gpu-9", op, Change::Replace).unwrap();
    // Once it is done, a repeated operation calls nothing.
    apply(&backend, "gpu-9", op, Change::Replace).unwrap();
    let calls = calls.join().unwrap();
    assert!(calls[2].starts_with("POST /replace?cluster=a HTTP/1.1"), "{}", calls[2]);
    let body: Value = serde_json::from_str(calls[2].split("\r\n\r\n").nth(1).unwrap()).unwrap();
    assert_eq!(body["node"], "gpu-9");
    assert_eq!(body["instance"], "i-0123456789abcdef0");
    assert_eq!(body["op"], op.to_string());
}

/// An EC2 endpoint that throttles.
fn throttling() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming().take(4) {
            let (mut stream, mut part) = (stream.unwrap(), [0; 65536]);
            let _request = stream.read(&mut part).unwrap();
            let body = "<Response><Errors><Error><Code>RequestLimitExceeded</Code><Message>Request limit exceeded.</Message>\
                        </Error></Errors><RequestID>1</RequestID></Response>";
            write!(stream, "HTTP/1.1 503 X\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}", body.len())
                .unwrap();
        }
    });
    url
}

#[test]
fn an_instance_is_terminated_through_its_cloud_and_a_wrong_id_is_distinguished_from_throttling() {
    let Some(cluster) = cluster() else { return };
    let cloud = match FakeAws::start() {
        Ok(cloud) => cloud,
        Err(why) => return why.skip_tests("replacement through a cloud"),
    };
    let run =
        ["ec2", "run-instances", "--image-id", "ami-12c6146b", "--count", "1", "--query", "Instances[0].InstanceId"];
    let instance = cloud.aws(&[&run[..], &["--output", "text"]].concat());
    let state = || {
        let query = "Reservations[0].Instances[0].State.Name";
        cloud.aws(&["ec2", "describe-instances", "--instance-ids", &instance, "--query", query, "--output", "text"])
    };
    assert_eq!(state(), "running");
    let node = |name: &str, instance: &str| {
        cluster.plane.create(&json!({ "apiVersion": "v1", "kind": "Node",
            "metadata": { "name": name, "labels": { "nvidia.com/gpu.present": "true" } },
            "spec": { "providerID": format!("aws:///us-east-1a/{instance}") } }));
    };
    node("in-the-cloud", &instance);
    node("mistaken", "i-0badbadbadbadbad0");
    let backend = |before: Vec<String>| {
        let replace = Replace::Command([before, Replace::aws_command()].concat());
        KubernetesBackend::open(KubernetesConfig { replace, ..cluster.config() }).unwrap()
    };
    let mut ids = ids(16);
    let wrong = apply(&backend(cloud.command_prefix()), "mistaken", ids.op(), Change::Replace).unwrap_err();
    assert_eq!(wrong.effect, Effect::NotAppliedPermanent);
    assert!(wrong.text.contains("InvalidInstanceID.NotFound"), "{wrong}");
    let op = ids.op();
    let later =
        apply(&backend(cloud.command_prefix_at(&throttling())), "in-the-cloud", op, Change::Replace).unwrap_err();
    assert_eq!(later.effect, Effect::NotAppliedRetry, "{later}");
    assert_eq!(state(), "running");
    apply(&backend(cloud.command_prefix()), "in-the-cloud", op, Change::Replace).unwrap();
    assert!(["shutting-down", "terminated"].contains(&state().as_str()), "{}", state());
    // A repeated operation succeeds, even if the cloud no longer knows the instance.
    apply(&backend(vec!["false".to_owned()]), "in-the-cloud", op, Change::Replace).unwrap();
    for name in ["in-the-cloud", "mistaken"] {
        cluster.delete(&format!("/api/v1/nodes/{name}"));
    }
}

/// The planner cancels the run, because its node is no longer in the snapshot; the job must end although no kubelet is left.
#[test]
fn a_run_on_a_node_that_is_deleted_can_be_ended() {
    let Some(cluster) = cluster() else { return };
    let (backend, name) = (cluster.backend(), "gpu-18");
    let run = ids(41).run();
    backend.submit(&request(run, name, "endless")).unwrap();
    until("our job to run", || matches!(polled(&backend, run), ObservedJobState::Running { .. }));
    // As when a machine is terminated: its kubelet reports nothing any more.
    cluster.kubelet.set_ready(name, false).unwrap();
    cluster.delete(&format!("/api/v1/nodes/{name}"));
    let is_listed = || backend.snapshot().unwrap().iter().any(|seen| seen.node.name.as_str() == name);
    until("the node to leave the snapshot", || !is_listed());
    backend.cancel(run).unwrap();
    until("the end of the job", || {
        matches!(polled(&backend, run), ObservedJobState::Ended { .. } | ObservedJobState::Absent)
    });
}
