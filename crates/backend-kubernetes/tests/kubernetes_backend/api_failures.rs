//! Tests a difficult cluster: concurrent writers, a server that throttles, broken connections.

use std::{
    io,
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use doctor_backend::{
    Backend, Change, Effect, NodeOp,
    bounded::{BoundedBackend, CallLimits},
};
use doctor_backend_kubernetes::{KubernetesBackend, KubernetesConfig};
use doctor_core::{
    ids::NodeName,
    node::{MarkKind, OurMark},
};
use serde_json::{Value, json};

use super::{Cluster, NAMESPACE, PATIENCE, ids, seen, until};

/// A TCP proxy to the API server whose connections can be cut.
struct CuttableProxy {
    port: u16,
    open: Arc<Mutex<Vec<TcpStream>>>,
}

impl CuttableProxy {
    fn to(server: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (port, open) = (listener.local_addr().unwrap().port(), Arc::<Mutex<Vec<TcpStream>>>::default());
        let connections = Arc::clone(&open);
        std::thread::spawn(move || {
            for here in listener.incoming().map_while(Result::ok) {
                let Ok(there) = TcpStream::connect(&server) else { continue };
                for (from, to) in [(&here, &there), (&there, &here)] {
                    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    std::thread::spawn(move || {
                        // One side has closed, or both were cut.
                        let _ended = io::copy(&mut from, &mut to);
                        let _gone = to.shutdown(Shutdown::Both);
                    });
                }
                connections.lock().unwrap().extend([here, there]);
            }
        });
        Self { port, open }
    }

    fn cut(&self) -> usize {
        let mut open = self.open.lock().unwrap();
        open.drain(..).filter(|stream| stream.shutdown(Shutdown::Both).is_ok()).count()
    }
}

impl Cluster {
    /// Returns the settings of a backend that uses this proxy.
    fn by(&self, wire: &CuttableProxy) -> KubernetesConfig {
        let text = std::fs::read_to_string(&self.account).unwrap();
        let server = self.plane.url();
        assert!(text.contains(&server), "{text}");
        let path = self.account.with_extension("wire");
        std::fs::write(&path, text.replace(&server, &format!("https://127.0.0.1:{}", wire.port))).unwrap();
        KubernetesConfig { kubeconfig: Some(path), ..self.config() }
    }

    fn label(&self, node: &str, value: &str) {
        let patch = json!({ "metadata": { "labels": { "others": value } } });
        let answer = self.plane.request("PATCH", &format!("/api/v1/nodes/{node}"), Some(&patch)).unwrap();
        assert!(answer.is_success(), "{}", answer.text);
    }

    /// Limits our concurrent writes to nodes to one, by API Priority and Fairness.
    fn reject_us(&self) {
        self.plane.create(&json!({
            "apiVersion": "flowcontrol.apiserver.k8s.io/v1", "kind": "PriorityLevelConfiguration",
            "metadata": { "name": "no-seats" },
            "spec": { "type": "Limited", "limited": { "nominalConcurrencyShares": 0, "lendablePercent": 0,
                "borrowingLimitPercent": 0, "limitResponse": { "type": "Reject" } } },
        }));
        self.plane.create(&json!({
            "apiVersion": "flowcontrol.apiserver.k8s.io/v1", "kind": "FlowSchema", "metadata": { "name": "no-seats" },
            "spec": { "matchingPrecedence": 2, "priorityLevelConfiguration": { "name": "no-seats" }, "rules": [{
                "subjects": [{ "kind": "ServiceAccount", "serviceAccount": { "name": "cluster-doctor", "namespace": NAMESPACE } }],
                "resourceRules": [{ "apiGroups": [""], "resources": ["nodes"], "verbs": ["patch"], "clusterScope": true }] }] },
        }));
    }
}

fn our_taints(cluster: &Cluster) -> usize {
    let node = cluster.get("/api/v1/nodes/gpu-1");
    let ours = |taint: &&Value| taint["key"] == "cluster-doctor.io/unhealthy";
    node["spec"]["taints"].as_array().map_or(0, |taints| taints.iter().filter(ours).count())
}

/// Has its own control plane, because its faults would break the other tests.
#[test]
fn conflicts_rejections_and_broken_watches_duplicate_nothing_and_lose_nothing() {
    let Some(cluster) = Cluster::start(&["gpu-1"]) else { return };
    let wire = CuttableProxy::to(cluster.plane.url().trim_start_matches("https://").to_owned());
    let backend = KubernetesBackend::open(cluster.by(&wire)).unwrap();
    let node = NodeName::new("gpu-1").unwrap();
    let mark = OurMark { kind: MarkKind::Unhealthy, case: None };
    let mut ids = ids(21);
    until("the node", || backend.snapshot().is_ok_and(|nodes| nodes.len() == 1));

    // Another client writes to the node continuously (409): our writes succeed, and none of its writes is lost.
    let (over, written) = (AtomicBool::new(false), Mutex::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::SeqCst) {
                let mut written = written.lock().unwrap();
                *written += 1;
                cluster.label("gpu-1", &written.to_string());
            }
        });
        for round in 0..10 {
            let what = if round % 2 == 0 { Change::Mark(mark.clone()) } else { Change::Unmark(mark.clone()) };
            let change = NodeOp { op: ids.op(), what };
            until("the change to be made", || match backend.apply(&node, &change) {
                Ok(()) => true,
                Err(error) => {
                    assert_eq!(error.effect, Effect::NotAppliedRetry, "{error}");
                    false
                }
            });
            assert_eq!(our_taints(&cluster), usize::from(round % 2 == 0));
        }
        over.store(true, Ordering::SeqCst);
    });
    assert_eq!(cluster.get("/api/v1/nodes/gpu-1")["metadata"]["labels"]["others"], written.lock().unwrap().to_string());

    // The server throttles concurrent requests (429): those have no effect, and a retry takes effect once.
    cluster.reject_us();
    let change = NodeOp { op: ids.op(), what: Change::Mark(mark) };
    until("a rejection", || {
        let drains: Vec<NodeOp> = (0..8).map(|_| NodeOp { op: ids.op(), what: Change::Drain }).collect();
        let outcomes: Vec<_> = std::thread::scope(|scope| {
            let handles: Vec<_> = drains.iter().map(|drain| scope.spawn(|| backend.apply(&node, drain))).collect();
            handles.into_iter().map(|handle| handle.join().unwrap()).collect()
        });
        let errors: Vec<_> = outcomes.into_iter().filter_map(Result::err).collect();
        assert!(errors.iter().all(|error| error.effect == Effect::NotAppliedRetry), "{errors:?}");
        errors.iter().any(|error| error.text.to_lowercase().contains("too many requests"))
    });
    assert_eq!(our_taints(&cluster), 0);
    cluster.delete("/apis/flowcontrol.apiserver.k8s.io/v1/flowschemas/no-seats");
    until("the change to be made", || backend.apply(&node, &change).is_ok());
    assert_eq!(our_taints(&cluster), 1);

    // Connections are cut while the cluster changes: the changes are seen later, and until then no outdated state is reported.
    for round in 0..3 {
        assert!(wire.cut() > 0, "there was nothing to cut");
        let there = round % 2 == 0;
        cluster.taint("gpu-1", &if there { json!([{ "key": "team", "effect": "NoSchedule" }]) } else { json!([]) });
        until("what happened meanwhile to be seen", || {
            backend.snapshot().is_ok() && seen(&backend, "gpu-1").marks.foreign.is_empty() != there
        });
    }
}

/// A server that accepts connections and never answers, as one behind a load balancer without a backend. It needs no cluster.
#[test]
fn an_api_server_that_accepts_and_never_answers_costs_one_deadline_for_each_call() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("https://{}", listener.local_addr().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kubeconfig");
    let kubeconfig = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "silent",
        "clusters": [{ "name": "silent", "cluster": { "server": url, "insecure-skip-tls-verify": true } }],
        "users": [{ "name": "silent", "user": { "token": "none" } }],
        "contexts": [{ "name": "silent", "context": { "cluster": "silent", "user": "silent" } }],
    });
    std::fs::write(&path, kubeconfig.to_string()).unwrap();
    let config = KubernetesConfig { kubeconfig: Some(path), ..KubernetesConfig::default() };
    let limit = Duration::from_secs(2);
    let limits = CallLimits { read: limit, change: limit };
    let backend = BoundedBackend::new(Arc::new(KubernetesBackend::open(config).unwrap()), limits);
    let (began, node, mut ids) = (Instant::now(), NodeName::new("gpu-1").unwrap(), ids(22));
    let error = backend.snapshot().unwrap_err();
    assert_eq!(error.effect, Effect::NotAppliedRetry, "{error}");
    let error = backend.poll(&[ids.run()]).unwrap_err();
    assert!(error.text.contains("did not answer within"), "{error}");
    let error = backend.cancel(ids.run()).unwrap_err();
    assert_ne!(error.effect, Effect::NotAppliedPermanent, "{error}");
    let error = backend.apply(&node, &NodeOp { op: ids.op(), what: Change::Drain }).unwrap_err();
    assert_eq!(error.effect, Effect::Unknown, "{error}");
    // Four calls, of which two have several requests.
    println!("four calls to a server that is silent: {:?}", began.elapsed());
    assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
}
