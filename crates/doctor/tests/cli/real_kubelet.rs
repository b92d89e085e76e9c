//! The service on a real node end to end: its printed permissions, a real control plane, and a real kubelet with
//! containers that run `doctor-node` in our image. Only the GPUs are pretended.

use std::{net::TcpListener, path::Path, sync::Arc};

use doctor_testbed::kubernetes::{ControlPlane, KubernetesTestbedError, real_node::RealNode};
use serde_json::{Value, json};

use crate::{
    deployment::endpoint_certificate,
    out_of_the_box,
    this_machine::Service,
    workdir::{Workdir, doctor_node, wait_or_explain, wait_until},
};

const NAMESPACE: &str = "cluster-doctor";
const PODS: &str = "/api/v1/namespaces/cluster-doctor/pods";
const NODE: &str = "real-1";
/// A reboot in this test: a file that only a program with access to the node's file system can create.
const REBOOTED: &str = "rebooted";

/// Fails everywhere, because every machine has more than 0 bytes of memory. The node may be rebooted.
const BAD: &str = "mode = \"act\"\n[allow]\ndrain = true\nreboot = true\n\
                   [[rules]]\nid = \"bad\"\ncheck = \"memory\"\nmetric = \"mem_total_bytes\"\nabove = 0.0\n\
                   severity = \"reboot\"\nreason = \"bad-memory\"\ntext = \"a planted fault\"\n";

/// The service and its one node.
struct Cluster {
    workdir: Workdir,
    plane: Arc<ControlPlane>,
    node: RealNode,
    policy: u32,
}

impl Cluster {
    fn start() -> Result<Self, KubernetesTestbedError> {
        let programs = RealNode::programs()?;
        let plane = Arc::new(ControlPlane::start(&ControlPlane::programs()?)?);
        let node = RealNode::start(&programs, &plane, NODE)?;
        node.install(Path::new(env!("CARGO_BIN_EXE_doctor")), doctor_node())?;
        node.set_gpus(8)?;
        let workdir = Workdir::new();
        std::fs::create_dir(workdir.path("data")).unwrap();
        let agent_address = TcpListener::bind((node.host(), 0)).and_then(|listener| listener.local_addr()).unwrap();
        let settings = format!(
            "store = \"doctor.db\"\ndata = \"data\"\npolicy = \"policy.toml\"\ncycle = \"1s\"\nlease = \"30s\"\n\
             [agents]\nlisten = \"{agent_address}\"\ntls = {{ certificate = \"tls.crt\", key = \"tls.key\" }}\n[backend.kubernetes]\nshare = {{ host-path = \"{}\" }}\npolicy_map = \"policy\"\n\
             reboot = [\"chroot\", \"/host\", \"touch\", \"{}\"]\n",
            workdir.path("data").display(),
            workdir.path(REBOOTED).display()
        );
        workdir.write("doctor.toml", &settings);
        workdir.policy_for(&["memory"], "version = 1\n");
        let printed: Value = workdir.json(&["deploy", "kubernetes", "--what", "rights"]);
        for object in printed["items"].as_array().unwrap() {
            plane.create(object);
        }
        plane.create(&endpoint_certificate(&workdir));
        let kubeconfig = plane.kubeconfig_for_service_account(NAMESPACE, "cluster-doctor")?;
        workdir.write("doctor.toml", &format!("{settings}kubeconfig = \"{}\"\n", kubeconfig.display()));
        let mut cluster = Self { workdir, plane, node, policy: 0 };
        cluster.change_policy("1s", "");
        Ok(cluster)
    }

    /// Changes the policy: the storage test takes this long per pattern. The service reads a file, jobs a ConfigMap.
    /// Missing results are given up soon.
    fn change_policy(&mut self, pattern_time: &str, extra: &str) {
        self.change_policy_and_wait("1s", pattern_time, extra);
    }

    /// The same, with this `result_grace` for results after the end of their job.
    fn change_policy_and_wait(&mut self, grace: &str, pattern_time: &str, extra: &str) {
        self.policy += 1;
        let storage = format!("size = \"16MiB\"\npattern_time = \"{pattern_time}\"\ndirectories = [\"/tmp\"]\n");
        let version = self.policy;
        let text = format!(
            "version = {version}\n{extra}[limits]\nresult_grace = \"{grace}\"\npending = \"40s\"\n\
             [retry]\nnot_started = \"5s\"\n[tests.storage.params]\n{storage}"
        );
        self.workdir.policy_for(&["memory", "disk-space", "storage"], &text);
        let map = json!({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "policy", "namespace": NAMESPACE },
            "data": { "policy.toml": self.workdir.read("policy.toml") },
        });
        if self.policy == 1 {
            self.plane.create(&map);
        } else {
            self.ask("PATCH", &format!("/api/v1/namespaces/{NAMESPACE}/configmaps/policy"), Some(&map));
        }
    }

    fn ask(&self, method: &str, path: &str, body: Option<&Value>) -> Value {
        let response = self.plane.request(method, path, body).unwrap();
        assert!(response.is_success(), "{method} {path}: {} {}", response.status, response.text);
        serde_json::from_str(&response.text).unwrap()
    }

    fn pods(&self) -> Vec<Value> {
        self.ask("GET", PODS, None)["items"].as_array().unwrap().clone()
    }

    /// Runs a test to its end, and returns the run and the pod. The service deletes a pod whose result has arrived: a finalizer
    /// keeps this one until it was read. The kubelet rejects a pod, or the scheduler leaves it pending, while they still count
    /// the GPUs of the pod before it: then the test is run again.
    fn test_admitted(&self, test: &str) -> (String, Value) {
        let mut rejections = Vec::new();
        while rejections.len() < 5 {
            let (run, pod) = self.test(&[test]);
            let path = format!("{PODS}/{pod}");
            let finalizers = |names: Value| json!({ "metadata": { "finalizers": names } });
            self.ask("PATCH", &path, Some(&finalizers(json!(["example.org/read-by-the-test"]))));
            wait_until("the result", || self.verdict(&run, test).is_some() || self.is_given_up(&run));
            let pod = self.ask("GET", &path, None);
            self.ask("PATCH", &path, Some(&finalizers(Value::Null)));
            if !is_rejected(&pod) && !self.is_given_up(&run) {
                return (run, pod);
            }
            rejections.push(pod["status"].to_string());
        }
        panic!("the kubelet admits no pod: {rejections:#?}");
    }

    /// Requests memory and storage tests, and waits until the storage test runs. Returns the run and its pod.
    fn test_storage(&self) -> (String, String) {
        self.test_storage_with(|run, _| self.log(run))
    }

    /// The same, with the log of a run and its pod. A pod that the kubelet rejects is followed by another one.
    fn test_storage_with(&self, log: impl Fn(&str, &str) -> String) -> (String, String) {
        for _ in 0..5 {
            let (run, name) = self.test(&["memory", "storage"]);
            let mut rejected = false;
            wait_until("the storage test to run", || {
                let is_this = |pod: &&Value| pod["metadata"]["name"] == name;
                rejected = self.pods().iter().filter(is_this).any(is_rejected) || self.is_given_up(&run);
                rejected || log(&run, &name).contains("storage: | fio")
            });
            if !rejected {
                return (run, name);
            }
        }
        panic!("the kubelet admits no pod: {:#?}", self.pods());
    }

    /// Requests these tests. Returns the run and its pod; scheduled runs may exist besides.
    fn test(&self, tests: &[&str]) -> (String, String) {
        let (named, before) = (json!(tests.join(",")), self.pods());
        let tests: Vec<&str> = tests.iter().flat_map(|test| ["--test", test]).collect();
        let is_new = |pod: &&Value| {
            let command = pod["spec"]["containers"][0]["command"].as_array();
            command.is_some_and(|command| command.contains(&named))
                && before.iter().all(|old| old["metadata"]["uid"] != pod["metadata"]["uid"])
        };
        self.workdir.expect(0, &[&["test", NODE, "--why", "nothing is shared", "--yes"], &tests[..]].concat());
        let mut found = None;
        wait_until("the job's pod", || {
            found = self.pods().iter().find(is_new).map(|pod| {
                let run = pod["metadata"]["labels"]["cluster-doctor.io/run"].as_str().unwrap();
                (run.to_owned(), pod["metadata"]["name"].as_str().unwrap().to_owned())
            });
            found.is_some()
        });
        found.unwrap()
    }

    /// Whether the run's pod stayed pending for too long.
    fn is_given_up(&self, run: &str) -> bool {
        let rows = self.workdir.json(&["audit"]);
        let is_pending = |row: &Value| row["run"] == run && row["code"] == "pending-too-long";
        rows.as_array().is_some_and(|rows| rows.iter().any(is_pending))
    }

    fn audit(&self) -> String {
        self.workdir.doctor(&["audit"]).out
    }

    fn log(&self, run: &str) -> String {
        self.workdir.doctor(&["log", run]).out
    }

    /// Returns the verdict of a test in a run; `None` while it is unknown.
    fn verdict(&self, run: &str, test: &str) -> Option<String> {
        let rows = self.workdir.json(&["history", "--test", test]);
        let row = rows.as_array()?.iter().find(|row| row["run"] == run)?;
        row["verdict"].as_str().map(str::to_owned)
    }

    /// Returns the type and reason of the condition with which the run's job ended.
    fn job_end(&self, run: &str) -> Option<(String, String)> {
        let job = self.ask("GET", &format!("/apis/batch/v1/namespaces/{NAMESPACE}/jobs/doctor-{run}"), None);
        let ended = job["status"]["conditions"].as_array()?.iter().find(|condition| {
            condition["status"] == "True" && (condition["type"] == "Complete" || condition["type"] == "Failed")
        })?;
        Some((ended["type"].as_str()?.to_owned(), ended["reason"].as_str()?.to_owned()))
    }

    fn until_ended(&self, run: &str, how: (&str, &str)) {
        let mut end = None;
        wait_until("the end of the job", || {
            end = self.job_end(run);
            end.is_some()
        });
        assert_eq!(end.as_ref().map(|(kind, reason)| (kind.as_str(), reason.as_str())), Some(how), "{}", self.log(run));
    }
}

/// Whether the kubelet rejected the pod, because it still counts the GPUs of the pod before it.
fn is_rejected(pod: &Value) -> bool {
    let reason = pod["status"]["reason"].as_str().unwrap_or_default();
    reason.starts_with("OutOf") || reason == "UnexpectedAdmissionError"
}

#[test]
fn jobs_run_in_containers_and_their_results_survive_pod_and_kubelet_failures() {
    let mut cluster = match Cluster::start() {
        Ok(cluster) => cluster,
        Err(why) => return why.skip_tests("the service on a real kubelet"),
    };
    cluster.workdir.expect(0, &["plan"]).stdout_contains(NODE).stdout_contains("never tested");
    let mut service = Service::start(&cluster.workdir);
    wait_until("the store", || cluster.workdir.path("doctor.db").exists());

    controller_without_rights(&cluster);
    complete_run(&cluster);
    kubelet_dies(&cluster);
    let shared = cluster.workdir.read("doctor.toml");
    service.stop();
    service = nothing_shared(&mut cluster, &shared);
    service.stop();
    cluster.workdir.write("doctor.toml", &shared);
    gpus_are_missed(&cluster);
    cluster.workdir.write("doctor.toml", &shared);
    program_is_missing(&mut cluster);
    cluster.workdir.write("doctor.toml", &shared);
    cluster.change_policy("60s", "");
    service = Service::start(&cluster.workdir);
    pod_deleted(&cluster);
    withdrawn(&cluster);
    agents(&cluster);
    cluster.change_policy("1s", BAD);
    let reloaded = format!("configuration reloaded policy={}", cluster.policy);
    service.wait_for_log(&reloaded);
    rebooted(&cluster);

    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
    cluster.workdir.expect(0, &["db", "verify"]).stdout_contains("The store is consistent.");
}

/// With the shipped policy and without agents, a job has the access that all checks need. The node declares eight GPUs
/// and has none: it is not healthy, and is marked. This has its own store, because the finding stays. The next service does
/// not know that store and would adopt its mark, so an operator removes it.
fn gpus_are_missed(cluster: &Cluster) {
    let settings = cluster.workdir.read("doctor.toml").replace("doctor.db", "missed.db");
    cluster.workdir.write("doctor.toml", &settings);
    cluster.workdir.write("policy.toml", "");
    let map = json!({ "data": { "policy.toml": "" } });
    cluster.ask("PATCH", &format!("/api/v1/namespaces/{NAMESPACE}/configmaps/policy"), Some(&map));
    let service = Service::start(&cluster.workdir);
    wait_until("the store", || cluster.workdir.path("missed.db").exists());
    out_of_the_box::wait_until_gpus_are_missed(&cluster.workdir, NODE);
    let is_marked = || {
        let taints = cluster.node.object().unwrap()["spec"]["taints"].clone();
        taints.as_array().is_some_and(|taints| taints.iter().any(|taint| taint["key"] == "cluster-doctor.io/unhealthy"))
    };
    wait_or_explain("the mark", is_marked, || cluster.workdir.doctor(&["why", NODE]).out);
    assert_eq!(service.stop().0, Some(0));
    cluster.ask("PATCH", &format!("/api/v1/nodes/{NODE}"), Some(&json!({ "spec": { "taints": null } })));
}

/// An image without our program: the container's runtime says so, and its words are kept after the pod is gone. This has its own
/// store, because the node backs off.
fn program_is_missing(cluster: &mut Cluster) {
    let settings = cluster.workdir.read("doctor.toml").replace("doctor.db", "missing.db");
    cluster.workdir.write("doctor.toml", &format!("{settings}image = \"cluster-doctor:latest\"\n"));
    cluster.change_policy("1s", "");
    let service = Service::start(&cluster.workdir);
    wait_until("the store", || cluster.workdir.path("missing.db").exists());
    let last_output = || cluster.workdir.why(NODE)["without_result"].clone();
    wait_or_explain("why the job died", || last_output()["last_output"].is_string(), || cluster.audit());
    let ended = last_output();
    let quote = ended["last_output"].as_str().unwrap();
    assert!(quote.contains("doctor-node") && quote.contains("not found") && quote.contains("StartError"), "{ended}");
    let run = ended["run"].as_str().unwrap();
    cluster
        .workdir
        .expect(0, &["log", run])
        .stdout_contains("not found")
        .stdout_contains(&format!("== on {NODE}: StartError"));
    assert_eq!(service.stop().0, Some(0));
}

/// The controller's image needs no root, no capabilities and no writable root file system.
fn controller_without_rights(cluster: &Cluster) {
    cluster.plane.create(&json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "controller", "namespace": "default" },
        "data": { "doctor.toml": "store = \"sqlite:/data/doctor.db\"\ndata = \"/data\"\n[backend.kubernetes]\n" },
    }));
    cluster.plane.create(&json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "controller", "namespace": "default" },
        "spec": {
            "restartPolicy": "Never",
            "volumes": [{ "name": "settings", "configMap": { "name": "controller" } }, { "name": "data", "emptyDir": {} }],
            "containers": [{
                "name": "doctor", "image": "cluster-doctor:latest", "imagePullPolicy": "Never",
                "args": ["config", "check"],
                "volumeMounts": [
                    { "name": "settings", "mountPath": "/etc/cluster-doctor" }, { "name": "data", "mountPath": "/data" },
                ],
                "securityContext": {
                    "runAsNonRoot": true, "readOnlyRootFilesystem": true, "allowPrivilegeEscalation": false,
                    "capabilities": { "drop": ["ALL"] },
                },
            }],
        },
    }));
    let mut pod = Value::Null;
    wait_until("the controller's pod to end", || {
        pod = cluster.ask("GET", "/api/v1/namespaces/default/pods/controller", None);
        matches!(pod["status"]["phase"].as_str(), Some("Succeeded" | "Failed"))
    });
    let log = cluster.plane.request("GET", "/api/v1/namespaces/default/pods/controller/log", None).unwrap();
    assert!(pod["status"]["phase"] == "Succeeded" && log.text.contains("is valid"), "{log:?}\n{}", pod["status"]);
}

/// From submission to the stored result with its log.
fn complete_run(cluster: &Cluster) {
    let rows = || cluster.workdir.json(&["history", "--test", "memory"]);
    wait_until("the first result", || rows().as_array().is_some_and(|rows| !rows.is_empty()));
    let run = rows()[0]["run"].as_str().unwrap().to_owned();
    assert_eq!(cluster.verdict(&run, "memory").as_deref(), Some("pass"));
    cluster.workdir.expect(0, &["log", &run]).stdout_contains("mem_total_bytes").stdout_contains("job: done");
    cluster.until_ended(&run, ("Complete", "CompletionsReached"));
    let pods = cluster.pods();
    let [pod] = &pods[..] else { panic!("one run is one pod: {pods:?}") };
    assert_eq!(pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"], "8");
    assert_eq!(pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"], 0, "{pod}");
}

/// Containers continue without the kubelet, which finds them again after its restart.
fn kubelet_dies(cluster: &Cluster) {
    let (run, _) = cluster.test_storage();
    cluster.node.kill_kubelet().unwrap();
    cluster.node.start_kubelet().unwrap();
    wait_until("the result", || cluster.verdict(&run, "storage").is_some());
    let log = cluster.log(&run);
    assert!(log.contains("storage_verified") && log.contains("job: done"), "{log}");
    cluster.until_ended(&run, ("Complete", "CompletionsReached"));
}

/// Prints more than a container's termination message can hold.
const LARGE: &str =
    "[tests.large.params]\ncommand = [\"/bin/sh\", \"-c\", \"head -c 30000 /dev/urandom | od -An -tx1\"]\n";

/// Without a shared directory, results come with the pods: small ones in termination messages, large ones in logs, and
/// those of a deleted pod before it is gone.
fn nothing_shared(cluster: &mut Cluster, shared: &str) -> Service {
    let config = shared.replace("data = \"data\"", "data = \"own\"");
    let lines: Vec<&str> = config.lines().filter(|line| !line.starts_with("share = ")).collect();
    std::fs::create_dir(cluster.workdir.path("own")).unwrap();
    cluster.workdir.write("doctor.toml", &format!("{}\n", lines.join("\n")));
    for object in cluster.workdir.json(&["deploy", "kubernetes", "--what", "rights"])["items"].as_array().unwrap() {
        if object["kind"] == "Role" {
            let path = format!("/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/roles/cluster-doctor");
            cluster.ask("PATCH", &path, Some(object));
        }
    }
    // If a log is not available immediately because the kubelet is busy, the next cycle requests it again.
    cluster.change_policy_and_wait("2m", "1s", LARGE);
    let mut service = Service::start(&cluster.workdir);
    for test in ["memory", "large"] {
        check_result_transport(cluster, test);
    }
    cluster.change_policy("60s", LARGE);
    service.wait_for_log("configuration reloaded policy=3");
    let (run, pod) = cluster.test_storage_with(|_, pod| {
        let log = cluster.plane.request("GET", &format!("{PODS}/{pod}/log"), None);
        log.map(|log| log.text).unwrap_or_default()
    });
    cluster.ask("DELETE", &format!("{PODS}/{pod}"), None);
    wait_until("what had finished", || cluster.verdict(&run, "memory").is_some());
    assert_eq!(cluster.verdict(&run, "memory").as_deref(), Some("pass"));
    wait_until("the run to be given up", || cluster.verdict(&run, "storage").as_deref() == Some("inconclusive"));
    service
}

/// Checks a result that came with its pod, and its log.
fn check_result_transport(cluster: &Cluster, test: &str) {
    let (run, pod) = cluster.test_admitted(test);
    let log = cluster.log(&run);
    assert_eq!(
        cluster.verdict(&run, test).as_deref(),
        Some("pass"),
        "{test}: {log}\n{}\n{}",
        pod["status"],
        cluster.audit()
    );
    assert!(log.contains("job: done") && !log.contains("DOCTOR RESULT"), "{log}");
    let end = &pod["status"]["containerStatuses"][0]["state"]["terminated"];
    let beginning = if test == "memory" { "doctor-carried-1 " } else { "doctor-in-log-1 " };
    assert!(end["message"].as_str().is_some_and(|message| message.starts_with(beginning)), "{test}: {end}");
}

/// The pod is deleted. It has time to sign what had finished.
fn pod_deleted(cluster: &Cluster) {
    let (run, pod) = cluster.test_storage();
    cluster.ask("DELETE", &format!("{PODS}/{pod}"), None);
    cluster.until_ended(&run, ("Failed", "BackoffLimitExceeded"));
    cut_short(cluster, &run);
    wait_until("the run to be given up", || cluster.audit().contains("job-lost"));
}

/// An operator holds the node: the job is ended, and has time to sign what had finished.
fn withdrawn(cluster: &Cluster) {
    let (run, _) = cluster.test_storage();
    cluster.workdir.expect(0, &["hold", NODE, "--why", "needed for debugging", "--yes"]);
    cluster.until_ended(&run, ("Failed", "DeadlineExceeded"));
    cut_short(cluster, &run);
    wait_until("the run to be given up", || cluster.audit().contains("withdrawn: the job ended (killed)"));
}

/// The printed agents: the DaemonSet controller places one on the node, the kubelet gives it a token for the service
/// only, and the pod that replaces it is accepted as well. This cluster has no DNS, so the service's address is written
/// down.
fn agents(cluster: &Cluster) {
    let label = json!({ "metadata": { "labels": { "nvidia.com/gpu.present": "true" } } });
    cluster.ask("PATCH", &format!("/api/v1/nodes/{NODE}"), Some(&label));
    let settings = ["--set", "images.pullPolicy=Never", "--set", "agent.hostNetwork=true"];
    let printed = |what: &str| {
        let args = ["deploy", "kubernetes", "--what", what, "--image", "cluster-doctor-node:latest"];
        cluster.workdir.json(&[&args[..], &settings].concat())["items"].as_array().unwrap().clone()
    };
    for object in printed("configuration").iter().filter(|object| object["metadata"]["name"] == "cluster-doctor-policy")
    {
        cluster.plane.create(object);
    }
    for mut object in printed("agent") {
        let service = json!([{ "ip": cluster.node.host(), "hostnames": ["cluster-doctor.cluster-doctor.svc"] }]);
        object["spec"]["template"]["spec"]["hostAliases"] = service;
        cluster.plane.create(&object);
    }
    let agent = || {
        let mut pods = cluster.pods();
        pods.retain(|pod| pod["metadata"]["labels"]["app.kubernetes.io/component"] == "agent");
        pods.into_iter().find(|pod| pod["status"]["phase"] == "Running")
    };
    let reporting_agent = || {
        let agents = cluster.workdir.json(&["agent", "list"]);
        let found =
            agents.as_array().unwrap().iter().find(|agent| agent["node"] == NODE && agent["state"] == "reports");
        found.cloned()
    };
    wait_until("a report of the agent", || reporting_agent().is_some());
    assert_eq!(reporting_agent().unwrap()["authenticated_by"], "token");
    let first = agent().unwrap();
    let sources =
        first["spec"]["volumes"].as_array().unwrap().iter().filter(|volume| volume.get("projected").is_some());
    let audiences: Vec<&Value> =
        sources.map(|volume| &volume["projected"]["sources"][0]["serviceAccountToken"]["audience"]).collect();
    assert_eq!(audiences, ["cluster-doctor"], "the API server's token is not there");
    let name = first["metadata"]["name"].as_str().unwrap();
    cluster.ask("DELETE", &format!("{PODS}/{name}"), None);
    let mut began = String::new();
    wait_until("another agent", || {
        if let Some(pod) = agent().filter(|pod| pod["metadata"]["uid"] != first["metadata"]["uid"]) {
            let running = &pod["status"]["containerStatuses"][0]["state"]["running"];
            began = running["startedAt"].as_str().unwrap_or_default().to_owned();
        }
        !began.is_empty()
    });
    // The report time is stored once a minute. Timestamps sort as text.
    wait_until("a report of the other agent", || {
        reporting_agent().is_some_and(|agent| *agent["last_contact"].as_str().unwrap() > *began)
    });
}

/// On a bad node a privileged pod runs the reboot command of the node's system. That alone does not complete the step.
fn rebooted(cluster: &Cluster) {
    cluster.workdir.expect(0, &["release", NODE, "--why", "they are done", "--yes"]);
    cluster.workdir.expect(0, &["test", NODE, "--test", "memory", "--why", "a planted fault", "--yes"]);
    wait_or_explain(
        "the reboot",
        || cluster.workdir.path(REBOOTED).exists(),
        || {
            let why = cluster.workdir.doctor(&["why", NODE]).out;
            format!("{why}\n{}\n{:#?}", cluster.audit(), cluster.pods())
        },
    );
    let node = cluster.node.object().unwrap();
    assert_eq!(node["spec"]["unschedulable"], true, "it was drained before: {}", node["spec"]);
    cluster.workdir.doctor(&["why", NODE]).stdout_contains("is being repaired (reboot");
    // The node's own report was taken by a job on it, and saved before.
    let mut saved = std::fs::read_dir(cluster.workdir.path("data/handoff")).unwrap().flatten();
    let archive = saved.next().unwrap().path();
    let unpacked =
        std::process::Command::new("tar").arg("xzOf").arg(&archive).arg("--wildcards").arg("*/firmware.json").output();
    let firmware: Value = serde_json::from_slice(&unpacked.unwrap().stdout).unwrap();
    assert!(firmware["vendor_report"].is_object() && firmware["system"]["kernel"].is_string(), "{firmware:#}");
}

/// The signal reached `doctor-node`, which signed the test that had finished, but not the one that was running.
fn cut_short(cluster: &Cluster, run: &str) {
    wait_until("what had finished", || cluster.verdict(run, "memory").is_some());
    assert_eq!(cluster.verdict(run, "memory").as_deref(), Some("pass"));
    let unfinished = cluster.verdict(run, "storage");
    assert!(matches!(unfinished.as_deref(), None | Some("inconclusive")), "{unfinished:?}");
    let log = cluster.log(run);
    assert!(log.contains("stopped by a signal; the result has the tests that finished"), "{log}");
}
