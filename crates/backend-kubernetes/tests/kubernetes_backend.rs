//! Tests the Kubernetes backend on a real control plane: the contract, and an unavailable API server. The testbed's kubelet
//! emulates pods; scheduling, preemption and the Job controller are real.

#[path = "kubernetes_backend/api_failures.rs"]
mod api_failures;
#[path = "kubernetes_backend/failures.rs"]
mod failures;
#[path = "kubernetes_backend/node_ops.rs"]
mod node_ops;
#[path = "kubernetes_backend/result_transport.rs"]
mod result_transport;
#[path = "kubernetes_backend/template.rs"]
mod template;
#[path = "kubernetes_backend/volcano.rs"]
mod volcano;

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, Mutex, OnceLock},
    time::{Duration, Instant},
};

use doctor_backend::{
    Backend, Change, Effect, JobOutput, JobRequest, NodeOp, ReportProgress,
    clock::{Clock, SystemClock},
    contract_tests::{self, Length, TestOccupancy, Testbed, run_of},
};
use doctor_backend_kubernetes::{KubernetesBackend, KubernetesConfig, Share, manifests};
use doctor_checks::document::RunKey;
use doctor_core::{
    ids::{IdSource, NodeName, RunId, TestId},
    node::{MarkKind, Node, Occupancy, OurMark},
    run::{JobEnd, NonEmpty, ObservedJobState, Run},
    time::{Span, Timestamp},
};
use doctor_testbed::kubernetes::{
    ControlPlane,
    kubelet::{Exit, FakeNode, Kubelet, PodBehavior},
};
use serde_json::{Value, json};

const NAMESPACE: &str = "cluster-doctor";
/// Generous for a busy machine; a passing test never waits this long.
const PATIENCE: Duration = Duration::from_secs(240);

/// How many pods were ever started, by run.
type Started = Arc<Mutex<HashMap<String, usize>>>;

struct Cluster {
    plane: ControlPlane,
    kubelet: Kubelet,
    started: Started,
    /// The kubeconfig of an account with exactly the permissions that `doctor deploy kubernetes` grants.
    account: PathBuf,
}

/// Returns the cluster that all tests of this file share; each uses its own nodes.
fn cluster() -> Option<&'static Cluster> {
    static CLUSTER: OnceLock<Option<Cluster>> = OnceLock::new();
    CLUSTER
        .get_or_init(|| {
            let names: Vec<String> = (1..=18).map(|number| format!("gpu-{number}")).collect();
            Cluster::start(&names.iter().map(String::as_str).collect::<Vec<_>>())
        })
        .as_ref()
}

impl Cluster {
    fn start(nodes: &[&str]) -> Option<Self> {
        let programs = ControlPlane::programs().inspect_err(|why| why.skip_tests("the Kubernetes backend")).ok()?;
        let plane = ControlPlane::start(&programs).unwrap();
        let started = Started::default();
        let counts = Arc::clone(&started);
        let instance = "aws:///us-east-1a/i-0123456789abcdef0";
        let nodes = nodes.iter().map(|node| FakeNode::gpu(node).provider_id(instance)).collect();
        let kubelet = Kubelet::start(plane.admin(), nodes, move |pod| {
            let run = pod.metadata.labels.as_ref().and_then(|labels| labels.get("cluster-doctor.io/run"));
            if let Some(run) = run {
                *counts.lock().unwrap().entry(run.clone()).or_default() += 1;
            }
            let args = pod.spec.as_ref().and_then(|spec| spec.containers.first()).and_then(|one| one.command.clone());
            let has = |word: &str| args.as_ref().is_some_and(|command| command.iter().any(|one| one == word));
            let (lasts, killed) = (Duration::from_millis(300), Exit::code(137).with_reason("OOMKilled"));
            match () {
                () if has("short") => PodBehavior::RunFor { lasts, then: Exit::code(0) },
                () if has("out-of-memory") => PodBehavior::RunFor { lasts, then: killed },
                () if has("no-image") || has("report") => PodBehavior::StayWaiting {
                    reason: "ErrImagePull".to_owned(),
                    message: "manifest for doctor-node:none not found".to_owned(),
                },
                () => PodBehavior::RunUntilEnded,
            }
        })
        .unwrap();
        let mut cluster = Self { plane, kubelet, started, account: PathBuf::new() };
        for object in manifests(&KubernetesConfig::default()) {
            cluster.plane.create(&object);
        }
        cluster.account = cluster.plane.kubeconfig_for_service_account(NAMESPACE, "cluster-doctor").unwrap();
        Some(cluster)
    }

    fn get(&self, path: &str) -> Value {
        let answer = self.plane.request("GET", path, None).unwrap();
        assert!(answer.is_success(), "{path}: {}", answer.text);
        serde_json::from_str(&answer.text).unwrap()
    }

    fn delete(&self, path: &str) {
        let answer = self.plane.request("DELETE", &format!("{path}?gracePeriodSeconds=0"), None).unwrap();
        assert!(answer.is_success() || answer.status == 404, "{path}: {}", answer.text);
    }

    fn config(&self) -> KubernetesConfig {
        KubernetesConfig {
            kubeconfig: Some(self.account.clone()),
            share: Share::HostPath("/data".into()),
            keep: Span::minutes(10),
            grace: Span::from_secs(1),
            ..KubernetesConfig::default()
        }
    }

    fn backend(&self) -> KubernetesBackend {
        KubernetesBackend::open(self.config()).unwrap()
    }

    /// Creates a user's pod that requests all GPUs of a node.
    fn user_pod(&self, name: &str, node: &str) {
        self.plane.create(&json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name, "namespace": "default" },
            "spec": {
                "nodeSelector": { "kubernetes.io/hostname": node }, "terminationGracePeriodSeconds": 0,
                "containers": [{ "name": "train", "image": "train", "command": ["train"],
                    "resources": { "limits": { "nvidia.com/gpu": "8" } } }],
            },
        }));
    }

    fn taint(&self, node: &str, taints: &Value) {
        let path = format!("/api/v1/nodes/{node}");
        let patch = json!({ "spec": { "taints": taints } });
        let answer = self.plane.request("PATCH", &path, Some(&patch)).unwrap();
        assert!(answer.is_success(), "{path}: {}", answer.text);
    }
}

/// Waits until the condition holds.
fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < PATIENCE, "timed out waiting for {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn seen(backend: &dyn Backend, node: &str) -> Node {
    let nodes = backend.snapshot().unwrap();
    let found = nodes.into_iter().find(|seen| seen.node.name.as_str() == node);
    Arc::unwrap_or_clone(found.unwrap_or_else(|| panic!("{node} is not there")).node)
}

fn request(run: RunId, node: &str, test: &str) -> JobRequest {
    let node = NodeName::new(node).unwrap();
    JobRequest {
        run,
        nodes: NonEmpty::one(node.clone()),
        tests: NonEmpty::one(TestId::new(test).unwrap()),
        access: Vec::new(),
        limit: Span::minutes(10),
        key: RunKey::new([3; 32]),
        results: None,
        outputs: vec![JobOutput { node, logs: vec!["a.log".into()], document: "a.json".into() }],
    }
}

fn polled(backend: &dyn Backend, run: RunId) -> ObservedJobState {
    backend.poll(&[run]).unwrap().remove(0).state
}

fn ids(seed: u64) -> IdSource {
    let mut ids = IdSource::new(seed);
    ids.set_time(SystemClock.now());
    ids
}

struct RealBed<'a> {
    cluster: &'static Cluster,
    backend: &'a KubernetesBackend,
    node: &'static str,
}

impl RealBed<'_> {
    fn wait(&self, what: &str, condition: impl Fn(&Node) -> bool) {
        until(what, || condition(&seen(self.backend, self.node)));
    }

    fn user(&self) -> String {
        format!("user-on-{}", self.node)
    }
}

impl Testbed for RealBed<'_> {
    fn now(&self) -> Timestamp {
        SystemClock.now()
    }

    fn node(&self) -> NodeName {
        NodeName::new(self.node).unwrap()
    }

    fn set_occupancy(&self, _: &NodeName, occupancy: TestOccupancy) {
        let cluster = self.cluster;
        cluster.kubelet.set_ready(self.node, occupancy != TestOccupancy::Unknown).unwrap();
        cluster.delete(&format!("/api/v1/namespaces/default/pods/{}", self.user()));
        match occupancy {
            TestOccupancy::Busy => {
                cluster.user_pod(&self.user(), self.node);
                self.wait("the node to be busy", |node| matches!(node.occupancy, Occupancy::Busy { .. }));
            }
            TestOccupancy::Unknown => {
                self.wait("the node to be unknown", |node| matches!(node.occupancy, Occupancy::Unknown { .. }));
            }
            TestOccupancy::Free => self.wait("the node to be free", |node| {
                node.occupancy.is_free() || node.marks.blocking_foreign_mark().is_some() || !node.marks.ours.is_empty()
            }),
        }
    }

    fn set_foreign_mark(&self, _: &NodeName, there: bool) {
        let taints = if there { json!([{ "key": "team", "value": "ml", "effect": "NoSchedule" }]) } else { json!([]) };
        self.cluster.taint(self.node, &taints);
        self.wait("the foreign mark", |node| node.marks.foreign.is_empty() != there);
    }

    fn job(&self, run: RunId, length: Length) -> JobRequest {
        request(run, self.node, if length == Length::Short { "short" } else { "endless" })
    }

    fn jobs_started(&self, run: RunId) -> usize {
        let run = run.to_string();
        self.cluster.started.lock().unwrap().get(&run).copied().unwrap_or(0)
    }

    fn lose_job(&self, run: RunId) {
        let run = run.to_string();
        let pods = format!("/api/v1/namespaces/{NAMESPACE}/pods");
        let found = self.cluster.get(&format!("{pods}?labelSelector=cluster-doctor.io%2Frun%3D{run}"));
        for pod in found["items"].as_array().unwrap() {
            self.cluster.delete(&format!("{pods}/{}", pod["metadata"]["name"].as_str().unwrap()));
        }
    }

    fn let_time_pass(&self) {
        std::thread::sleep(Duration::from_millis(50));
    }

    fn restarted(&self) -> Option<Box<dyn Backend>> {
        Some(Box::new(self.cluster.backend()))
    }
}

#[test]
fn the_contract_is_kept_on_a_real_control_plane() {
    let Some(cluster) = cluster() else { return };
    let backend = cluster.backend();
    let testbed = RealBed { cluster, backend: &backend, node: "gpu-1" };
    assert_eq!(contract_tests::violations(&backend, &testbed), []);
}

#[test]
fn a_user_pod_preempts_our_job() {
    let Some(cluster) = cluster() else { return };
    let backend = cluster.backend();
    let run = ids(2).run();
    backend.submit(&request(run, "gpu-2", "endless")).unwrap();
    until("our job to run", || matches!(polled(&backend, run), ObservedJobState::Running { .. }));
    let node = seen(&backend, "gpu-2");
    assert!(node.occupancy.is_free(), "a job of ours is no user: {:?}", node.occupancy);
    let seen_run =
        backend.snapshot().unwrap().into_iter().find(|seen| seen.node.name.as_str() == "gpu-2").unwrap().jobs;
    assert_eq!(seen_run, [run]);
    cluster.user_pod("user-on-gpu-2", "gpu-2");
    until("our job to be gone", || {
        matches!(polled(&backend, run), ObservedJobState::Ended { how: JobEnd::Preempted, .. })
    });
    until(
        "the user's pod to have the node",
        || matches!(seen(&backend, "gpu-2").occupancy, Occupancy::Busy { by } if by.contains("user-on-gpu-2")),
    );
    cluster.delete("/api/v1/namespaces/default/pods/user-on-gpu-2");
}

#[test]
fn a_node_is_reported_as_demanded_when_a_waiting_user_pod_may_not_preempt() {
    let Some(cluster) = cluster() else { return };
    let backend = cluster.backend();
    cluster.plane.create(&json!({ "apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass",
        "metadata": { "name": "polite" }, "value": 1000, "preemptionPolicy": "Never" }));
    let run = ids(6).run();
    backend.submit(&request(run, "gpu-10", "endless")).unwrap();
    until("our job to run", || matches!(polled(&backend, run), ObservedJobState::Running { .. }));
    cluster.plane.create(&json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "polite-on-gpu-10", "namespace": "default" },
        "spec": {
            "priorityClassName": "polite", "nodeSelector": { "kubernetes.io/hostname": "gpu-10" },
            "terminationGracePeriodSeconds": 0,
            "containers": [{ "name": "train", "image": "train", "command": ["train"],
                "resources": { "limits": { "nvidia.com/gpu": "8" } } }],
        },
    }));
    until(
        "the node to be wanted",
        || matches!(seen(&backend, "gpu-10").occupancy, Occupancy::Busy { by } if by.contains("polite-on-gpu-10, which waits")),
    );
    assert!(matches!(polled(&backend, run), ObservedJobState::Running { .. }), "only the controller ends it");
    backend.cancel(run).unwrap();
    until(
        "the user's pod to have the node",
        || matches!(seen(&backend, "gpu-10").occupancy, Occupancy::Busy { by } if by == "pod default/polite-on-gpu-10".into()),
    );
    cluster.delete("/api/v1/namespaces/default/pods/polite-on-gpu-10");
}

#[test]
fn foreign_marks_are_respected_and_our_marks_end_when_an_operator_removes_them() {
    let Some(cluster) = cluster() else { return };
    let backend = cluster.backend();
    let mut ids = ids(3);
    let name = NodeName::new("gpu-3").unwrap();
    let mut apply = |what: Change| backend.apply(&name, &NodeOp { op: ids.op(), what }).unwrap();
    // An operator cordons the node; our drain and undrain leave it cordoned.
    let path = "/api/v1/nodes/gpu-3";
    let cordon = |there: bool| {
        let patch = json!({ "spec": { "unschedulable": there } });
        assert!(cluster.plane.request("PATCH", path, Some(&patch)).unwrap().is_success());
    };
    cordon(true);
    until("the cordon to be seen", || seen(&backend, "gpu-3").marks.blocking_foreign_mark().is_some());
    apply(Change::Drain);
    assert!(seen(&backend, "gpu-3").marks.has_ours(MarkKind::Cordon));
    apply(Change::Undrain);
    assert_eq!(cluster.get(path)["spec"]["unschedulable"], true);
    assert!(seen(&backend, "gpu-3").marks.blocking_foreign_mark().is_some());
    cordon(false);
    until("the cordon to be gone", || seen(&backend, "gpu-3").occupancy.is_free());
    // An operator removes our cordon and later cordons the node again: that cordon is foreign.
    apply(Change::Drain);
    assert_eq!(cluster.get(path)["spec"]["unschedulable"], true);
    cordon(false);
    cordon(true);
    until("the later cordon to be the operator's", || {
        let marks = seen(&backend, "gpu-3").marks;
        marks.blocking_foreign_mark().is_some() && marks.ours.is_empty()
    });
    apply(Change::Undrain);
    assert_eq!(cluster.get(path)["spec"]["unschedulable"], true);
    cordon(false);
    until("the cordon to be gone", || seen(&backend, "gpu-3").occupancy.is_free());
    // An operator removes the taint of our mark.
    apply(Change::Mark(OurMark { kind: MarkKind::Unhealthy, case: None }));
    let marked = cluster.get(path);
    assert_eq!(marked["metadata"]["labels"]["cluster-doctor.io/status"], "fail");
    // The cordon's own taint may still be there until the controller manager removes it.
    let taints = marked["spec"]["taints"].as_array().unwrap();
    assert!(taints.iter().any(|taint| taint["key"] == "cluster-doctor.io/unhealthy"), "{taints:?}");
    cluster.taint("gpu-3", &json!([]));
    until("our mark to be gone", || seen(&backend, "gpu-3").marks.ours.is_empty());
    apply(Change::Unmark(OurMark { kind: MarkKind::Unhealthy, case: None }));
    assert_eq!(cluster.get(path)["metadata"]["labels"].get("cluster-doctor.io/status"), None);
}

#[test]
fn a_run_key_is_a_secret_that_is_deleted_with_its_job() {
    let Some(cluster) = cluster() else { return };
    let backend = cluster.backend();
    let run = ids(4).run();
    backend.submit(&request(run, "gpu-4", "short")).unwrap();
    until("the job to end", || matches!(polled(&backend, run), ObservedJobState::Ended { how: JobEnd::Exited, .. }));
    let name = format!("doctor-{run}");
    let job = cluster.get(&format!("/apis/batch/v1/namespaces/{NAMESPACE}/jobs/{name}"));
    let secret = cluster.get(&format!("/api/v1/namespaces/{NAMESPACE}/secrets/{name}"));
    assert_eq!(secret["metadata"]["ownerReferences"][0]["uid"], job["metadata"]["uid"]);
    assert!(!job.to_string().contains(&RunKey::new([3; 32]).to_hex()), "the job contains the key");
    let jobs = format!("/apis/batch/v1/namespaces/{NAMESPACE}/jobs/{name}");
    let answer = cluster.plane.request("DELETE", &format!("{jobs}?propagationPolicy=Background"), None).unwrap();
    assert!(answer.is_success(), "{}", answer.text);
    until("the secret to go with it", || {
        let path = format!("/api/v1/namespaces/{NAMESPACE}/secrets/{name}");
        cluster.plane.request("GET", &path, None).unwrap().status == 404
    });
    assert_eq!(polled(&backend, run), ObservedJobState::Absent);
}

#[test]
fn a_job_that_dies_or_never_starts_says_why_and_a_report_that_cannot_start_is_given_up() {
    let Some(cluster) = cluster() else { return };
    let backend = cluster.backend();
    let mut ids = ids(44);
    let quote = |run: &Run| {
        let outputs = backend.remaining_output(run).unwrap();
        let [output] = &outputs[..] else { panic!("{outputs:?}") };
        assert_eq!(output.node.as_str(), "gpu-17");
        output.quote().unwrap_or_default()
    };
    let killed = run_of(request(ids.run(), "gpu-17", "out-of-memory"), SystemClock.now());
    backend.submit(&request(killed.id, "gpu-17", "out-of-memory")).unwrap();
    until("the job to die", || matches!(polled(&backend, killed.id), ObservedJobState::Ended { .. }));
    assert!(quote(&killed).contains("OOMKilled, exit code 137"), "{}", quote(&killed));

    // The image is missing: its pod waits, and says so while it is there.
    let waiting = run_of(request(ids.run(), "gpu-17", "no-image"), SystemClock.now());
    backend.submit(&request(waiting.id, "gpu-17", "no-image")).unwrap();
    until("the pod to wait for its image", || {
        backend
            .remaining_output(&waiting)
            .unwrap()
            .iter()
            .any(|output| output.ending.as_deref() == Some("ErrImagePull"))
    });
    assert_eq!(quote(&waiting), "manifest for doctor-node:none not found (ErrImagePull)");
    backend.cancel(waiting.id).unwrap();
    until("the job to end", || matches!(polled(&backend, waiting.id), ObservedJobState::Ended { .. }));
    assert!(!quote(&waiting).is_empty(), "the pod is gone, and the job remains");

    let (node, op) = (NodeName::new("gpu-17").unwrap(), ids.op());
    until("the report to be given up", || match backend.collect_report(&node, op) {
        ReportProgress::InProgress => false,
        ReportProgress::Failed { text } => {
            assert!(text.contains("ErrImagePull: manifest for"), "{text}");
            true
        }
        ReportProgress::Done(report) => panic!("{report:?}"),
    });
}

/// Has its own control plane, because stopping the API server would break the other tests.
#[test]
fn while_the_api_server_is_down_no_snapshot_is_returned_and_afterwards_no_job_is_duplicated() {
    let Some(cluster) = Cluster::start(&["gpu-1"]) else { return };
    let backend = cluster.backend();
    assert!(seen(&backend, "gpu-1").occupancy.is_free());
    let run = ids(5).run();
    let job_request = request(run, "gpu-1", "endless");
    let job = backend.submit(&job_request).unwrap();
    until("the job to run", || matches!(polled(&backend, run), ObservedJobState::Running { .. }));
    cluster.plane.kill_apiserver().unwrap();
    until("the outage to be noticed", || backend.snapshot().is_err());
    assert_eq!(backend.snapshot().unwrap_err().effect, Effect::NotAppliedRetry);
    assert!(backend.poll(&[run]).is_err());
    assert_ne!(backend.submit(&job_request).unwrap_err().effect, Effect::NotAppliedPermanent);
    cluster.plane.restart_apiserver().unwrap();
    until("the node to be seen again", || backend.snapshot().is_ok_and(|nodes| nodes.len() == 1));
    assert_eq!(backend.submit(&job_request).unwrap(), job);
    assert!(matches!(polled(&backend, run), ObservedJobState::Running { .. }));
    assert_eq!(cluster.started.lock().unwrap().values().sum::<usize>(), 1);
}
