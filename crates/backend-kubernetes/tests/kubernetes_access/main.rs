//! Who may do what, on a real control plane: the rights that the service is given and those it uses, the tokens that agents
//! speak with, and what `doctor config check --live` says of a cluster.

mod inspection;
mod rights;
mod tokens;

use std::{
    path::PathBuf,
    sync::OnceLock,
    time::{Duration, Instant},
};

use doctor_backend_kubernetes::{KubernetesBackend, KubernetesConfig, Replace, Share, Write, manifests};

use doctor_bed::kubernetes::{
    ControlPlane, Setup,
    kubelet::{FakeNode, Kubelet, Play},
};
use serde_json::{Value, json};

const NAMESPACE: &str = "cluster-doctor";
const AGENT: &str = "cluster-doctor-agent";
const AUDIENCE: &str = "cluster-doctor";
/// Long on a busy machine, and never waited for where all is well.
const PATIENCE: Duration = Duration::from_secs(240);

struct Cluster {
    plane: ControlPlane,
    kubelet: Kubelet,
    /// Of the account that has exactly the rights that `doctor deploy kubernetes` gives.
    account: PathBuf,
}

/// One for all tests of this program; each uses nodes of its own.
fn cluster() -> Option<&'static Cluster> {
    static CLUSTER: OnceLock<Option<Cluster>> = OnceLock::new();
    CLUSTER.get_or_init(Cluster::start).as_ref()
}

impl Cluster {
    fn start() -> Option<Self> {
        let programs = ControlPlane::programs().inspect_err(|why| why.not_run("access to Kubernetes")).ok()?;
        let plane = ControlPlane::start_with(&programs, Setup { audit: true, ..Setup::default() }).unwrap();
        let nodes = ["gpu-1", "gpu-2", "gpu-3"].map(FakeNode::gpu).into_iter();
        let nodes = nodes.chain(["plain", "doomed"].map(FakeNode::plain));
        let kubelet = Kubelet::start(plane.admin(), nodes.collect(), |_| Play::UntilTold).unwrap();
        for object in manifests(&everything()) {
            plane.make(&object);
        }
        // One cluster for two ways to get at results: what the other needs is given beside it.
        for mut object in manifests(&nothing_shared()).into_iter().filter(is_role_here) {
            let name = json!("cluster-doctor-carried");
            object["metadata"]["name"].clone_from(&name);
            if object["roleRef"].is_object() {
                object["roleRef"]["name"] = name;
            }
            plane.make(&object);
        }
        // Printed with the rest by those who deploy agents; here it is all there is of them.
        let answer = plane.request(
            "POST",
            &format!("/api/v1/namespaces/{NAMESPACE}/serviceaccounts"),
            Some(&json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": { "name": AGENT } })),
        );
        assert!(answer.as_ref().is_ok_and(|answer| answer.is_success() || answer.status == 409), "{answer:?}");
        let account = plane.kubeconfig_for_service_account(NAMESPACE, "cluster-doctor").unwrap();
        Some(Self { plane, kubelet, account })
    }

    fn config(&self) -> KubernetesConfig {
        KubernetesConfig {
            kubeconfig: Some(self.account.clone()),
            share: Share::HostPath("/data".into()),
            ..everything()
        }
    }

    fn backend(&self) -> KubernetesBackend {
        KubernetesBackend::open(self.config()).unwrap()
    }

    fn get(&self, path: &str) -> Value {
        let answer = self.plane.request("GET", path, None).unwrap();
        assert!(answer.is_success(), "{path}: {}", answer.text);
        serde_json::from_str(&answer.text).unwrap()
    }

    /// A pod as the agents' DaemonSet makes them, on this node.
    fn agent_pod(&self, name: &str, node: &str, account: &str) {
        self.plane.make(&json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name, "namespace": NAMESPACE },
            "spec": {
                "nodeName": node, "serviceAccountName": account, "automountServiceAccountToken": false,
                "terminationGracePeriodSeconds": 0, "containers": [{ "name": "agent", "image": "agent" }],
            },
        }));
    }
}

/// Settings that need every right there is.
fn everything() -> KubernetesConfig {
    let write = Write { condition: Some("GpuHealthy".to_owned()), ..Write::default() };
    let share = Share::Claim("cluster-doctor-data".to_owned());
    KubernetesConfig { replace: Replace::DeleteNode, write, share, ..KubernetesConfig::default() }
}

/// The same without a shared directory.
fn nothing_shared() -> KubernetesConfig {
    KubernetesConfig { share: Share::None, ..everything() }
}

/// A role in our namespace, or who has it.
fn is_role_here(object: &Value) -> bool {
    object["kind"].as_str().is_some_and(|kind| kind.starts_with("Role"))
}

/// Waits until it is so.
#[track_caller]
fn until(what: &str, mut so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !so() {
        assert!(began.elapsed() < PATIENCE, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}
