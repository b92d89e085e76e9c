//! The printed permissions are exactly those used, according to the API server's audit log of the service account.

use std::collections::BTreeSet;

use doctor_backend::{
    Backend, Change, JobOutput, JobRequest, NodeOp, RenderedStatus,
    clock::{Clock, SystemClock},
    contract_tests::run_of,
};
use doctor_backend_kubernetes::{KubernetesBackend, KubernetesConfig, inspect, manifests};
use doctor_checks::{document::RunKey, result_transport::PackedDocument};
use doctor_core::{
    ids::{IdSource, NodeName, RunId, TestId},
    node::{MarkKind, OurMark},
    node_status::{NodeHealth, NodeStatus},
    run::{NonEmpty, ObservedJobState},
    time::Span,
};
use doctor_testbed::kubernetes::kubelet::Exit;
use serde_json::{Value, json};

use crate::{AGENT, AUDIENCE, Cluster, NAMESPACE, cluster, everything, nothing_shared, until};

/// Everything that the service does in a cluster. A new operation needs a new entry.
const FLOWS: &[fn(&Stage<'_>)] =
    &[looking, running, waiting, carrying, marking, showing, evicting, repairing, hearing, inspecting, replacing];

struct Stage<'a> {
    cluster: &'a Cluster,
    backend: &'a KubernetesBackend,
}

fn ids(seed: u64) -> IdSource {
    let mut ids = IdSource::new(seed);
    ids.set_time(SystemClock.now());
    ids
}

fn request(run: RunId, node: &NodeName) -> JobRequest {
    JobRequest {
        run,
        nodes: NonEmpty::one(node.clone()),
        tests: NonEmpty::one(TestId::new("memory").unwrap()),
        access: Vec::new(),
        limit: Span::minutes(10),
        key: RunKey::new([3; 32]),
        results: None,
        outputs: vec![JobOutput { node: node.clone(), logs: vec!["a.log".into()], document: "a.json".into() }],
    }
}

fn looking(stage: &Stage<'_>) {
    until("the nodes", || stage.backend.snapshot().is_ok_and(|nodes| nodes.len() >= 3));
}

fn running(stage: &Stage<'_>) {
    let (run, node) = (ids(77).run(), NodeName::new("gpu-3").unwrap());
    let request = request(run, &node);
    // Twice: the second call reads the existing job.
    assert_eq!(stage.backend.submit(&request).unwrap(), stage.backend.submit(&request).unwrap());
    let seen = || stage.backend.poll(&[run]).unwrap().remove(0).state;
    until("the job to run", || matches!(seen(), ObservedJobState::Running { .. }));
    stage.backend.cancel(run).unwrap();
    until("the job to end", || matches!(seen(), ObservedJobState::Ended { .. }));
    let nodes = NonEmpty::new(["gpu-2", "gpu-3"].map(|node| NodeName::new(node).unwrap()).to_vec()).unwrap();
    let over_several = JobRequest { run: ids(76).run(), nodes, ..request };
    stage.backend.submit(&over_several).unwrap();
    stage.backend.cancel(over_several.run).unwrap();
}

/// A job that cannot start says why, in the events of its pod.
fn waiting(stage: &Stage<'_>) {
    let (run, node) = (ids(83).run(), NodeName::new("gpu-1").unwrap());
    let cordon = |value: bool| {
        let patch = json!({ "spec": { "unschedulable": value } });
        let answer = stage.cluster.plane.request("PATCH", "/api/v1/nodes/gpu-1", Some(&patch)).unwrap();
        assert!(answer.is_success(), "{}", answer.text);
    };
    cordon(true);
    let request = request(run, &node);
    stage.backend.submit(&request).unwrap();
    let run = run_of(request, SystemClock.now());
    until("the reason", || {
        let outputs = stage.backend.remaining_output(&run).unwrap();
        outputs.iter().any(|output| output.node == node && output.text.contains("FailedScheduling"))
    });
    stage.backend.cancel(run.id).unwrap();
    cordon(false);
}

/// A job that returns its result with its pod. The emulated kubelet has no logs; requesting one is enough here.
fn carrying(stage: &Stage<'_>) {
    let share = nothing_shared().share;
    let backend = KubernetesBackend::open(KubernetesConfig { share, ..stage.cluster.config() }).unwrap();
    until("the nodes", || backend.snapshot().is_ok_and(|nodes| nodes.len() >= 3));
    let (run, node) = (ids(82).run(), NodeName::new("gpu-2").unwrap());
    let request = request(run, &node);
    backend.submit(&request).unwrap();
    let pods = format!("/api/v1/namespaces/{NAMESPACE}/pods?labelSelector=cluster-doctor.io%2Frun%3D{run}");
    until("the pod to run", || stage.cluster.get(&pods)["items"][0]["status"]["phase"] == "Running");
    let name = stage.cluster.get(&pods)["items"][0]["metadata"]["name"].as_str().unwrap().to_owned();
    let message = PackedDocument::pack(b"a result").unwrap().to_termination_message();
    stage.cluster.kubelet.end_pod(NAMESPACE, &name, Exit::code(0).with_message(message)).unwrap();
    until("the result", || backend.poll(&[run]).unwrap().remove(0).documents == [b"a result".to_vec()]);
}

fn marking(stage: &Stage<'_>) {
    let mut ids = ids(78);
    let mark = OurMark { kind: MarkKind::Unhealthy, case: None };
    // A node that is not watched is read from the API server.
    for node in ["gpu-3", "plain"].map(|node| NodeName::new(node).unwrap()) {
        for what in [Change::Mark(mark.clone()), Change::Drain, Change::Undrain, Change::Unmark(mark.clone())] {
            stage.backend.apply(&node, &NodeOp { op: ids.op(), what }).unwrap();
        }
    }
}

fn showing(stage: &Stage<'_>) {
    let status = NodeStatus {
        status: NodeHealth::Pass,
        severity: None,
        state: "in-service",
        case: None,
        operator: None,
        advice: None,
        passed: 1,
        not_applicable: 0,
        not_judged: 0,
        findings: Vec::new(),
        more_findings: 0,
        not_known: Vec::new(),
        more_not_known: 0,
        agent_silent: false,
    };
    let writer = stage.backend.status_writer().expect("nodes are written on here");
    writer.write(&NodeName::new("gpu-3").unwrap(), &RenderedStatus::new(status)).unwrap();
}

fn evicting(stage: &Stage<'_>) {
    let (plane, node) = (&stage.cluster.plane, NodeName::new("gpu-3").unwrap());
    let labels = json!({ "app": "web" });
    plane.create(&json!({
        "apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": { "name": "web", "namespace": "default" },
        "spec": { "replicas": 1, "selector": { "matchLabels": labels }, "template": { "metadata": { "labels": labels },
            "spec": { "nodeSelector": { "kubernetes.io/hostname": "gpu-3" }, "terminationGracePeriodSeconds": 0,
                "containers": [{ "name": "web", "image": "web" }] } } },
    }));
    let pods = "/api/v1/namespaces/default/pods?labelSelector=app%3Dweb";
    until("the pod to run", || stage.cluster.get(pods)["items"][0]["status"]["phase"] == "Running");
    let evict = NodeOp { op: ids(79).op(), what: Change::Evict };
    assert!(stage.backend.apply(&node, &evict).unwrap_err().text.contains("eviction requested"));
    let path = "/apis/apps/v1/namespaces/default/replicasets/web?propagationPolicy=Background";
    assert!(plane.request("DELETE", path, None).unwrap().is_success());
    until("the pods to be gone", || stage.cluster.get(pods)["items"].as_array().is_some_and(Vec::is_empty));
}

/// The repair job is created; its completion is not simulated here.
fn repairing(stage: &Stage<'_>) {
    let reset = NodeOp { op: ids(80).op(), what: Change::Reset };
    let error = stage.backend.apply(&NodeName::new("gpu-3").unwrap(), &reset).unwrap_err();
    assert!(error.text.contains("repair job created"), "{error}");
}

/// Last, because it deletes the node.
fn replacing(stage: &Stage<'_>) {
    let replace = NodeOp { op: ids(81).op(), what: Change::Replace };
    stage.backend.apply(&NodeName::new("doomed").unwrap(), &replace).unwrap();
}

fn hearing(stage: &Stage<'_>) {
    stage.cluster.agent_pod("agent-3", "gpu-3", AGENT);
    let token = stage.cluster.plane.pod_token(NAMESPACE, AGENT, "agent-3", AUDIENCE).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    assert_eq!(runtime.block_on(stage.backend.token_reviewer().review(token)).unwrap().as_str(), "gpu-3");
}

/// Runs `doctor config check --live` with all optional settings.
fn inspecting(stage: &Stage<'_>) {
    for config in [
        KubernetesConfig { policy_map: Some("none".to_owned()), ..stage.cluster.config() },
        KubernetesConfig { share: everything().share, ..stage.cluster.config() },
    ] {
        assert!(!inspect(&config).findings.is_empty());
    }
}

/// Formats a permission: `get nodes`, or `create tokenreviews.authentication.k8s.io`.
fn right(verb: &str, group: &str, resource: &str) -> String {
    if group.is_empty() { format!("{verb} {resource}") } else { format!("{verb} {resource}.{group}") }
}

fn granted() -> BTreeSet<String> {
    let strings = |value: &Value| -> Vec<String> {
        value.as_array().unwrap().iter().map(|item| item.as_str().unwrap().to_owned()).collect()
    };
    let mut all = BTreeSet::new();
    let subject = |object: &Value| object["metadata"]["name"] == "cluster-doctor";
    let printed = [manifests(&everything()), manifests(&nothing_shared())].concat();
    for object in printed.iter().filter(|object| subject(object)) {
        for rule in object["rules"].as_array().into_iter().flatten() {
            for group in strings(&rule["apiGroups"]) {
                for resource in strings(&rule["resources"]) {
                    all.extend(strings(&rule["verbs"]).iter().map(|verb| right(verb, &group, &resource)));
                }
            }
        }
    }
    all
}

#[test]
fn every_granted_right_is_used_and_every_used_right_is_granted() {
    let Some(cluster) = cluster() else { return };
    let backend = cluster.backend();
    for flow in FLOWS {
        flow(&Stage { cluster, backend: &backend });
    }
    let ours = format!("system:serviceaccount:{NAMESPACE}:cluster-doctor");
    let mut requests = cluster.plane.audited_requests().unwrap();
    requests.retain(|request| request.user == ours);
    assert!(!requests.is_empty(), "the audit log is empty");
    let rights = |refused: bool| -> BTreeSet<String> {
        let matching = requests.iter().filter(|request| (request.status == 403) == refused);
        matching.map(|request| right(&request.verb, &request.group, &request.resource)).collect()
    };
    let (used, missing) = (rights(false), rights(true));
    let unused: BTreeSet<String> = granted().difference(&used).cloned().collect();
    assert_eq!((missing, unused), (BTreeSet::new(), BTreeSet::new()), "missing in rights.rs, and unused there");
}

#[test]
fn a_server_that_does_not_stream_lists_is_listed_in_pages() {
    let Some(cluster) = cluster() else { return };
    let backend = cluster.backend();
    until("the nodes", || backend.snapshot().is_ok_and(|nodes| nodes.len() >= 3));
    let requests = cluster.plane.audited_requests().unwrap();
    for resource in ["nodes", "pods"] {
        let was = |verb: &str, status: u16| {
            requests.iter().any(|one| one.resource == resource && one.verb == verb && one.status == status)
        };
        assert!(was("watch", 422), "a streamed list of {resource} is rejected: {requests:#?}");
        assert!(was("list", 200), "{resource} are listed: {requests:#?}");
    }
}
