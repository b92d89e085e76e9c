//! The service on Kubernetes end to end: a real control plane, and `doctor-node` run by the bed's kubelet as its pod
//! specifies.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Arc, Mutex, OnceLock, mpsc},
};

use doctor_backend_kubernetes::{KubernetesConfig, manifests};

use doctor_testbed::kubernetes::{
    ControlPlane,
    kubelet::{Exit, FakeNode, Kubelet, PodBehavior},
};
use serde_json::Value;

use crate::{
    this_machine::Service,
    workdir::{Workdir, doctor_node, wait_until},
};

pub(crate) const NAMESPACE: &str = "cluster-doctor";

/// A cluster whose kubelet runs the programs of our pods on this machine.
pub(crate) struct Cluster {
    pub(crate) plane: Arc<ControlPlane>,
    pub(crate) kubelet: Arc<Kubelet>,
}

impl Cluster {
    /// Starts the cluster. On nodes named `stuck…` no container starts, on nodes named `slow…` none ends. `None`: this
    /// machine has no control plane, which is printed; in CI it is a failure.
    pub(crate) fn start(workdir: &Workdir, nodes: &[&str]) -> Option<Self> {
        let programs = ControlPlane::programs().inspect_err(|why| why.skip_tests("the service on Kubernetes")).ok()?;
        let plane = Arc::new(ControlPlane::start(&programs).unwrap());
        let (start, started) = mpsc::channel::<Value>();
        let nodes = nodes.iter().map(|node| FakeNode::gpu(node)).collect();
        let kubelet = Kubelet::start(plane.admin(), nodes, move |pod| {
            let of_a_run = |labels: &std::collections::BTreeMap<_, _>| labels.contains_key("cluster-doctor.io/run");
            let on = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default();
            if on.starts_with("stuck") {
                return PodBehavior::StayWaiting {
                    reason: "ImagePullBackOff".to_owned(),
                    message: "no such image".to_owned(),
                };
            }
            if pod.metadata.labels.as_ref().is_some_and(of_a_run) && !on.starts_with("slow") {
                // The receiver is gone when the test is over.
                let _closed = start.send(serde_json::to_value(pod).unwrap());
            }
            PodBehavior::RunUntilEnded
        });
        let kubelet = Arc::new(kubelet.unwrap());
        let container = Arc::new(Container {
            data: workdir.path("data"),
            state: workdir.path("node"),
            policy: workdir.path("policy.toml"),
            plane: Arc::clone(&plane),
            meetings: Mutex::default(),
        });
        let ending = Arc::downgrade(&kubelet);
        std::thread::spawn(move || {
            for pod in started {
                let (container, ending) = (Arc::clone(&container), ending.clone());
                // The pods of one run wait for each other, so each has a thread.
                std::thread::spawn(move || {
                    let code = container.run(&pod);
                    let (Some(kubelet), Some(name)) = (ending.upgrade(), pod["metadata"]["name"].as_str()) else {
                        return;
                    };
                    // A pod that was deleted in the meantime has ended already.
                    let _ended = kubelet.end_pod(NAMESPACE, name, Exit::code(code));
                });
            }
        });
        let cluster = Self { plane, kubelet };
        for object in manifests(&KubernetesConfig::default()) {
            cluster.plane.create(&object);
        }
        Some(cluster)
    }

    pub(crate) fn node(&self, name: &str) -> Value {
        let response = self.plane.request("GET", &format!("/api/v1/nodes/{name}"), None).unwrap();
        serde_json::from_str(&response.text).unwrap()
    }
}

/// The locations of a container's paths on this machine.
struct Container {
    data: PathBuf,
    state: PathBuf,
    policy: PathBuf,
    plane: Arc<ControlPlane>,
    /// The local ports at which pods meet that would meet at a name of the cluster.
    meetings: Mutex<HashMap<String, u16>>,
}

impl Container {
    /// Runs the pod's command and returns its exit code. Its GPUs and NCCL are stand-ins; on a node named `bad…` its
    /// first GPU hangs.
    fn run(&self, pod: &Value) -> i32 {
        let container = &pod["spec"]["containers"][0];
        let args = container["command"].as_array().unwrap().iter().map(|arg| arg.as_str().unwrap());
        let variables: HashMap<String, String> =
            container["env"].as_array().unwrap().iter().map(|one| self.variable(pod, one)).collect();
        let mut command = Command::new(doctor_node());
        command.args(args.skip(1).map(|arg| self.here(arg))).envs(&variables);
        if let Some(rank) = variables.get("JOB_COMPLETION_INDEX") {
            static STANDIN: OnceLock<PathBuf> = OnceLock::new();
            let library = STANDIN.get_or_init(|| doctor_testbed::fake_machine::fake_nvidia_library(doctor_node()));
            command.env("DOCTOR_CUDA", library).env("DOCTOR_NCCL", library);
            command.env("DOCTOR_FAKE_NVIDIA_GPUS", "2").env("DOCTOR_FAKE_NVIDIA_NODE", rank);
            if pod["spec"]["nodeName"].as_str().is_some_and(|node| node.starts_with("bad")) {
                command.env("DOCTOR_FAKE_NVIDIA_FAULTS", format!("hang:{}", 2 * rank.parse::<u32>().unwrap()));
            }
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().unwrap().code().unwrap_or(-1)
    }

    /// Resolves an environment variable as a kubelet does.
    fn variable(&self, pod: &Value, one: &Value) -> (String, String) {
        let (name, from) = (one["name"].as_str().unwrap().to_owned(), &one["valueFrom"]);
        if let Some(key) = from["secretKeyRef"]["key"].as_str() {
            return (name, self.secret(from["secretKeyRef"]["name"].as_str().unwrap(), key));
        }
        if let Some(path) = from["fieldRef"]["fieldPath"].as_str() {
            let within = |kind: &str| path.strip_prefix(kind)?.strip_prefix("['")?.strip_suffix("']");
            let value = match (within("metadata.labels"), within("metadata.annotations")) {
                (Some(label), _) => &pod["metadata"]["labels"][label],
                (_, Some(annotation)) => &pod["metadata"]["annotations"][annotation],
                _ => &pod["spec"]["nodeName"],
            };
            return (name, value.as_str().unwrap().to_owned());
        }
        let value = one["value"].as_str().unwrap();
        if name != "DOCTOR_RENDEZVOUS" {
            return (name, value.to_owned());
        }
        let free = || doctor_testbed::ports::reserve_one().unwrap();
        let port = *self.meetings.lock().unwrap().entry(value.to_owned()).or_insert_with(free);
        (name, format!("127.0.0.1:{port}"))
    }

    fn here(&self, arg: &str) -> PathBuf {
        let mounts: [(&str, &Path); 3] = [
            ("/data/", &self.data),
            ("/var/lib/cluster-doctor/node", &self.state),
            ("/etc/cluster-doctor/policy.toml", &self.policy),
        ];
        let found = mounts.iter().find_map(|(inside, here)| Some((arg.strip_prefix(inside)?, here)));
        found.map_or_else(
            || arg.into(),
            |(rest, here)| if rest.is_empty() { here.to_path_buf() } else { here.join(rest) },
        )
    }

    /// Reads a secret and, like a kubelet, waits until it exists.
    fn secret(&self, secret: &str, key: &str) -> String {
        let path = format!("/api/v1/namespaces/{NAMESPACE}/secrets/{secret}");
        let mut encoded = None;
        wait_until("the secret", || {
            let response = self.plane.request("GET", &path, None).unwrap();
            let secret: Value = serde_json::from_str(&response.text).unwrap_or_default();
            encoded = secret["data"][key].as_str().map(str::to_owned);
            encoded.is_some()
        });
        let shell = format!("printf %s '{}' | base64 -d", encoded.unwrap());
        String::from_utf8(Command::new("sh").args(["-c", &shell]).output().unwrap().stdout).unwrap()
    }
}

fn taint_of(cluster: &Cluster, node: &str) -> String {
    cluster.node(node)["spec"]["taints"].to_string()
}

/// Fails everywhere, because every machine has more than 0 bytes of memory.
pub(crate) const BAD: &str = "version = 2\n[[rules]]\nid = \"bad\"\ncheck = \"memory\"\nmetric = \"mem_total_bytes\"\nabove = 0.0\n\
                   severity = \"isolate\"\nreason = \"bad-memory\"\ntext = \"a planted fault\"\n";

#[test]
fn nodes_are_tested_by_real_jobs_and_a_faulty_one_is_tainted_until_requalified() {
    let workdir = Workdir::new();
    std::fs::create_dir(workdir.path("data")).unwrap();
    workdir.policy_for(&["memory", "cpu-online"], "version = 1\n");
    let Some(cluster) = Cluster::start(&workdir, &["gpu-1", "gpu-2"]) else { return };
    let kubeconfig = cluster.plane.kubeconfig_for_service_account(NAMESPACE, "cluster-doctor").unwrap();
    workdir.write(
        "doctor.toml",
        &format!(
            "store = \"doctor.db\"\ndata = \"data\"\npolicy = \"policy.toml\"\ncycle = \"1s\"\nlease = \"30s\"\n\
             [backend.kubernetes]\nkubeconfig = \"{}\"\nshare = {{ host-path = \"/data\" }}\npolicy_map = \"policy\"\n",
            kubeconfig.display()
        ),
    );
    workdir.expect(0, &["plan"]).stdout_contains("gpu-1").stdout_contains("gpu-2").stdout_contains("never tested");
    let mut service = Service::start(&workdir);
    let rows = || workdir.json(&["history", "--test", "memory"]);
    wait_until("both nodes to pass", || {
        workdir.path("doctor.db").exists() && rows().as_array().is_some_and(|rows| rows.len() == 2)
    });
    assert!(rows().as_array().unwrap().iter().all(|row| row["verdict"] == "pass"), "{}", rows());
    let run = rows()[0]["run"].as_str().unwrap().to_owned();
    workdir.expect(0, &["log", &run]).stdout_contains("memory");

    let label =
        |node: &str, name: &str| cluster.node(node)["metadata"]["labels"][format!("cluster-doctor.io/{name}")].clone();
    wait_until("results written on the nodes", || {
        label("gpu-1", "status") == "pass" && label("gpu-2", "status") == "pass"
    });

    workdir.policy_for(&["memory", "cpu-online"], BAD);
    service.wait_for_log("configuration reloaded policy=2");
    workdir.expect(0, &["test", "gpu-1", "--test", "memory", "--why", "a planted fault", "--yes"]);
    let taint = || taint_of(&cluster, "gpu-1");
    wait_until("the taint", || taint().contains("cluster-doctor.io/unhealthy"));
    assert_eq!(cluster.node("gpu-1")["metadata"]["labels"]["cluster-doctor.io/status"], "fail");
    workdir.doctor(&["why", "gpu-1"]).stdout_contains("a planted fault");
    let annotation = |node: &str, name: &str| {
        let text = cluster.node(node)["metadata"]["annotations"][format!("cluster-doctor.io/{name}")].clone();
        serde_json::from_str::<Value>(text.as_str().unwrap_or("null")).unwrap()
    };
    wait_until("the results on the node", || {
        annotation("gpu-1", "results")["findings"][0]["text"] == "a planted fault"
    });
    assert_eq!(label("gpu-1", "severity"), "isolate");
    let events = cluster.plane.request("GET", "/api/v1/namespaces/default/events", None).unwrap().text;
    assert!(events.contains("MarkedUnhealthy"), "{events}");
    assert!(
        !cluster.node("gpu-2")["spec"]["taints"].to_string().contains("cluster-doctor"),
        "gpu-2 was not tested again"
    );

    workdir.policy_for(&["memory", "cpu-online"], "version = 3\n[repair]\nexamine = [\"memory\", \"cpu-online\"]\n");
    service.wait_for_log("configuration reloaded policy=3");
    workdir.expect(0, &["release", "gpu-1", "--why", "it was planted", "--yes"]);
    wait_until("the node to be back", || !taint().contains("cluster-doctor"));
    assert_eq!(workdir.json(&["history", "gpu-1", "--test", "memory"])[0]["verdict"], "pass", "requalified");
    wait_until("the node to pass again", || label("gpu-1", "status") == "pass" && label("gpu-1", "severity").is_null());
    assert_eq!(label("gpu-2", "status"), "pass", "{}", workdir.doctor(&["why", "gpu-2"]).out);

    // An operator quarantines the node: it is examined, the advice is recorded, and it stays out of service.
    workdir.expect(0, &["quarantine", "gpu-2", "--why", "it smells", "--yes"]);
    wait_until("the advice", || annotation("gpu-2", "quarantine-result")["recommendation"] == "return");
    assert!(taint_of(&cluster, "gpu-2").contains("unhealthy"), "an operator decides");
    assert_eq!(cluster.node("gpu-2")["spec"]["unschedulable"], true);
    workdir.doctor(&["why", "gpu-2"]).stdout_contains("the examination recommends return");
    workdir.expect(0, &["release", "gpu-2", "--why", "it does not", "--yes"]);
    wait_until("gpu-2 to be back", || !taint_of(&cluster, "gpu-2").contains("cluster-doctor"));
    wait_until("the advice to be gone", || annotation("gpu-2", "quarantine-result").is_null());
    assert_eq!(cluster.node("gpu-2")["spec"]["unschedulable"], Value::Null);
    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
    workdir.expect(0, &["db", "verify"]).stdout_contains("The store is consistent.");
}
