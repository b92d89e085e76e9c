//! The whole way on Kubernetes: the service as it is started, a real control plane, and `doctor-node` run by the bed's kubelet
//! with what its pod says.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Arc, mpsc},
};

use doctor_bed::kubernetes::{
    ControlPlane,
    kubelet::{Exit, FakeNode, Kubelet, Play},
};
use doctor_control::backend::kubernetes::{KubernetesConfig, manifests};
use serde_json::Value;

use crate::{
    bed::{Bed, doctor_node, until},
    this_machine::Service,
};

const NAMESPACE: &str = "cluster-doctor";

/// A cluster whose kubelet runs the programs of our pods on this machine.
struct Cluster {
    plane: Arc<ControlPlane>,
    _kubelet: Arc<Kubelet>,
}

impl Cluster {
    /// `None`: there is no control plane on this machine, which is said, and in CI is a failure.
    fn start(bed: &Bed, nodes: &[&str]) -> Option<Self> {
        let programs = ControlPlane::programs().inspect_err(|why| why.not_run("the service on Kubernetes")).ok()?;
        let plane = Arc::new(ControlPlane::start(&programs).unwrap());
        let (start, started) = mpsc::channel::<Value>();
        let nodes = nodes.iter().map(|node| FakeNode::gpu(node)).collect();
        let kubelet = Kubelet::start(plane.admin(), nodes, move |pod| {
            // Nobody listens any more when the test is over.
            let _gone = start.send(serde_json::to_value(pod).unwrap());
            Play::UntilTold
        });
        let kubelet = Arc::new(kubelet.unwrap());
        let mut node = Container {
            data: bed.path("data"),
            state: bed.path("node"),
            policy: bed.path("policy.toml"),
            plane: Arc::clone(&plane),
        };
        let ending = Arc::downgrade(&kubelet);
        std::thread::spawn(move || {
            for pod in started {
                let code = node.run(&pod);
                let (Some(kubelet), Some(name)) = (ending.upgrade(), pod["metadata"]["name"].as_str()) else { return };
                // A pod that was deleted meanwhile has ended already.
                let _ended = kubelet.end_pod(NAMESPACE, name, Exit::code(code));
            }
        });
        let cluster = Self { plane, _kubelet: kubelet };
        for object in manifests(&KubernetesConfig::default()) {
            cluster.plane.make(&object);
        }
        Some(cluster)
    }

    fn node(&self, name: &str) -> Value {
        let answer = self.plane.request("GET", &format!("/api/v1/nodes/{name}"), None).unwrap();
        serde_json::from_str(&answer.text).unwrap()
    }
}

/// Where a container's paths are on this machine.
struct Container {
    data: PathBuf,
    state: PathBuf,
    policy: PathBuf,
    plane: Arc<ControlPlane>,
}

impl Container {
    /// Runs the pod's command and gives back its exit code.
    fn run(&mut self, pod: &Value) -> i32 {
        let container = &pod["spec"]["containers"][0];
        let words = container["command"].as_array().unwrap().iter().map(|word| word.as_str().unwrap());
        let secret = container["env"][0]["valueFrom"]["secretKeyRef"]["name"].as_str().unwrap();
        let mut command = Command::new(doctor_node());
        command.args(words.skip(1).map(|word| self.here(word))).env("DOCTOR_RUN_KEY", self.key(secret));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().unwrap().code().unwrap_or(-1)
    }

    fn here(&self, word: &str) -> PathBuf {
        let places: [(&str, &Path); 3] = [
            ("/data/", &self.data),
            ("/var/lib/cluster-doctor/node", &self.state),
            ("/etc/cluster-doctor/policy.toml", &self.policy),
        ];
        let found = places.iter().find_map(|(inside, here)| Some((word.strip_prefix(inside)?, here)));
        found.map_or_else(
            || word.into(),
            |(rest, here)| if rest.is_empty() { here.to_path_buf() } else { here.join(rest) },
        )
    }

    /// As a kubelet does, it waits until the secret is there.
    fn key(&self, secret: &str) -> String {
        let path = format!("/api/v1/namespaces/{NAMESPACE}/secrets/{secret}");
        let mut encoded = None;
        until("the secret", || {
            let answer = self.plane.request("GET", &path, None).unwrap();
            let secret: Value = serde_json::from_str(&answer.text).unwrap_or_default();
            encoded = secret["data"]["key"].as_str().map(str::to_owned);
            encoded.is_some()
        });
        let shell = format!("printf %s '{}' | base64 -d", encoded.unwrap());
        String::from_utf8(Command::new("sh").args(["-c", &shell]).output().unwrap().stdout).unwrap()
    }
}

/// Fails everywhere: no machine has less memory than none.
const BAD: &str = "version = 2\n[[rules]]\nid = \"bad\"\ncheck = \"memory\"\nmetric = \"mem_total_bytes\"\nabove = 0.0\n\
                   severity = \"isolate\"\nreason = \"bad-memory\"\ntext = \"a planted fault\"\n";

#[test]
fn nodes_are_tested_by_real_jobs_and_a_bad_one_is_marked_until_it_is_proven() {
    let bed = Bed::new();
    std::fs::create_dir(bed.path("data")).unwrap();
    bed.policy_for(&["memory", "disk-space"], "version = 1\n");
    let Some(cluster) = Cluster::start(&bed, &["gpu-1", "gpu-2"]) else { return };
    let kubeconfig = cluster.plane.kubeconfig_for_service_account(NAMESPACE, "cluster-doctor").unwrap();
    bed.write(
        "doctor.toml",
        &format!(
            "store = \"doctor.db\"\ndata = \"data\"\npolicy = \"policy.toml\"\ncycle = \"1s\"\nlease = \"30s\"\n\
             [backend.kubernetes]\nkubeconfig = \"{}\"\nshare = {{ host-path = \"/data\" }}\npolicy_map = \"policy\"\n",
            kubeconfig.display()
        ),
    );
    bed.expect(0, &["plan"]).says("gpu-1").says("gpu-2").says("never tested");
    let mut service = Service::start(&bed);
    let rows = || bed.json(&["history", "--test", "memory"]);
    until("both nodes to pass", || {
        bed.path("doctor.db").exists() && rows().as_array().is_some_and(|rows| rows.len() == 2)
    });
    assert!(rows().as_array().unwrap().iter().all(|row| row["verdict"] == "pass"), "{}", rows());
    let run = rows()[0]["run"].as_str().unwrap().to_owned();
    bed.expect(0, &["log", &run]).says("memory");

    bed.policy_for(&["memory", "disk-space"], BAD);
    service.says("the changed configuration is in force policy=2");
    bed.expect(0, &["test", "gpu-1", "--test", "memory", "--why", "a planted fault", "--yes"]);
    let taint = || cluster.node("gpu-1")["spec"]["taints"].to_string();
    until("the taint", || taint().contains("cluster-doctor.io/unhealthy"));
    assert_eq!(cluster.node("gpu-1")["metadata"]["labels"]["cluster-doctor.io/status"], "fail");
    bed.doctor(&["why", "gpu-1"]).says("a planted fault");
    assert!(
        !cluster.node("gpu-2")["spec"]["taints"].to_string().contains("cluster-doctor"),
        "gpu-2 was not tested again"
    );

    bed.policy_for(&["memory", "disk-space"], "version = 3\n");
    service.says("the changed configuration is in force policy=3");
    bed.expect(0, &["release", "gpu-1", "--why", "it was planted", "--yes"]);
    until("the node to be back", || !taint().contains("cluster-doctor"));
    assert_eq!(bed.json(&["history", "gpu-1", "--test", "memory"])[0]["verdict"], "pass", "it was proven");
    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
    bed.expect(0, &["db", "verify"]).says("The store is sound.");
}
