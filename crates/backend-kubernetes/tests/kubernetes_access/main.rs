//! Tests access on a real control plane: the service's permissions and those it uses, agents' tokens, and the findings of `doctor
//! config check --live`.

mod inspection;
mod rights;
mod tokens;

use std::{
    path::PathBuf,
    sync::OnceLock,
    time::{Duration, Instant},
};

use doctor_backend_kubernetes::{KubernetesBackend, KubernetesConfig, Replace, Share, WriteConfig, manifests};

use doctor_testbed::kubernetes::{
    ControlPlane, Setup,
    kubelet::{FakeNode, Kubelet, PodBehavior},
};
use serde_json::{Value, json};

const NAMESPACE: &str = "cluster-doctor";
const AGENT: &str = "cluster-doctor-agent";
const AUDIENCE: &str = "cluster-doctor";
/// Generous for a busy machine; a passing test never waits this long.
const PATIENCE: Duration = Duration::from_secs(240);

struct Cluster {
    plane: ControlPlane,
    kubelet: Kubelet,
    /// The kubeconfig of an account with exactly the permissions that `doctor deploy kubernetes` grants.
    account: PathBuf,
}

/// Returns the cluster that all tests of this program share; each uses its own nodes.
fn cluster() -> Option<&'static Cluster> {
    static CLUSTER: OnceLock<Option<Cluster>> = OnceLock::new();
    CLUSTER.get_or_init(Cluster::start).as_ref()
}

impl Cluster {
    fn start() -> Option<Self> {
        let programs = ControlPlane::programs().inspect_err(|why| why.skip_tests("access to Kubernetes")).ok()?;
        // The other tests' servers stream lists; this one, like servers before 1.32, does not.
        let setup = Setup { audit: true, streaming_lists: false, ..Setup::default() };
        let plane = ControlPlane::start_with(&programs, setup).unwrap();
        let nodes = ["gpu-1", "gpu-2", "gpu-3"].map(FakeNode::gpu).into_iter();
        let nodes = nodes.chain(["plain", "doomed"].map(FakeNode::plain));
        let kubelet = Kubelet::start(plane.admin(), nodes.collect(), |_| PodBehavior::RunUntilEnded).unwrap();
        for object in manifests(&everything()) {
            plane.create(&object);
        }
        // One cluster serves both ways of collecting results, so it also gets the permissions of the other one.
        for mut object in manifests(&nothing_shared()).into_iter().filter(is_role_here) {
            let name = json!("cluster-doctor-carried");
            object["metadata"]["name"].clone_from(&name);
            if object["roleRef"].is_object() {
                object["roleRef"]["name"] = name;
            }
            plane.create(&object);
        }
        // `doctor deploy` prints this account with the agents; the test needs only the account.
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

    /// Creates a pod on this node like those of the agents' DaemonSet.
    fn agent_pod(&self, name: &str, node: &str, account: &str) {
        self.plane.create(&json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name, "namespace": NAMESPACE },
            "spec": {
                "nodeName": node, "serviceAccountName": account, "automountServiceAccountToken": false,
                "terminationGracePeriodSeconds": 0, "containers": [{ "name": "agent", "image": "agent" }],
            },
        }));
    }
}

/// Settings that need every permission.
fn everything() -> KubernetesConfig {
    let write = WriteConfig { condition: Some("GpuHealthy".to_owned()), ..WriteConfig::default() };
    let share = Share::Claim("cluster-doctor-data".to_owned());
    KubernetesConfig { replace: Replace::DeleteNode, write, share, ..KubernetesConfig::default() }
}

/// The same without a shared directory.
fn nothing_shared() -> KubernetesConfig {
    KubernetesConfig { share: Share::None, ..everything() }
}

/// A role in our namespace, or its binding.
fn is_role_here(object: &Value) -> bool {
    object["kind"].as_str().is_some_and(|kind| kind.starts_with("Role"))
}

/// Waits until the condition holds.
#[track_caller]
fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < PATIENCE, "timed out waiting for {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}
