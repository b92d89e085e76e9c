//! Agents on Kubernetes: the real service and agent, and a real API server that reviews tokens.

use std::{
    fs::{self, File},
    io::Write,
    net::TcpListener,
    process::{Command, Stdio},
};

use serde_json::{Value, json};

use crate::{
    kubernetes::{BAD, Cluster, NAMESPACE},
    this_machine::Service,
    workdir::{Workdir, doctor_node, wait_until},
};

const AGENT: &str = "cluster-doctor-agent";
/// A line that the kernel log check reports as a fault.
const FAULT: &str = "mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 7: be00000000800400";

/// A cluster of two nodes, a service with an agent endpoint, and a recorded machine for the agent to check.
struct AgentFixture {
    bed: Workdir,
    cluster: Cluster,
    port: u16,
}

impl AgentFixture {
    fn new() -> Option<Self> {
        let bed = Workdir::new();
        for directory in ["data", "machine/dev", "machine/proc/sys/kernel/random"] {
            fs::create_dir_all(bed.path(directory)).unwrap();
        }
        bed.write("machine/dev/kmsg", "6,1,1000,-;Linux version 6.8\n");
        bed.write("machine/proc/uptime", "1000000.00 5.0\n");
        bed.write("machine/proc/meminfo", "MemTotal: 64000000 kB\nMemFree: 60000000 kB\nMemAvailable: 60000000 kB\n");
        bed.write("machine/proc/sys/kernel/random/boot_id", "8a5b1c9e-5d0e-4a77-9d3c-1f7a1f7a1f7a\n");
        policy(&bed, "version = 1\n");
        let cluster = Cluster::start(&bed, &["gpu-1", "gpu-2"])?;
        let accounts = format!("/api/v1/namespaces/{NAMESPACE}/serviceaccounts");
        let account = json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": { "name": AGENT } });
        // The printed manifests may have created it already.
        let made = cluster.plane.request("POST", &accounts, Some(&account)).unwrap();
        assert!(made.is_success() || made.status == 409, "{}", made.text);
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let kubeconfig = cluster.plane.kubeconfig_for_service_account(NAMESPACE, "cluster-doctor").unwrap();
        bed.write(
            "doctor.toml",
            &format!(
                "store = \"doctor.db\"\ndata = \"data\"\npolicy = \"policy.toml\"\ncycle = \"1s\"\nlease = \"30s\"\n\
                 [agents]\nlisten = \"127.0.0.1:{port}\"\n[backend.kubernetes]\nkubeconfig = \"{}\"\n\
                 share = {{ host-path = \"/data\" }}\npolicy_map = \"policy\"\nagents = {{ remember = \"1s\" }}\n",
                kubeconfig.display()
            ),
        );
        let stage = Self { bed, cluster, port };
        stage.pod("agent-1", "gpu-1");
        stage.renew_token("agent-1");
        Some(stage)
    }

    /// Creates a pod of the agents' account. Its containers are simulated; the test starts the program.
    fn pod(&self, name: &str, node: &str) {
        self.cluster.plane.create(&json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name, "namespace": NAMESPACE },
            "spec": {
                "nodeName": node, "serviceAccountName": AGENT, "automountServiceAccountToken": false,
                "containers": [{ "name": "agent", "image": "agent" }],
            },
        }));
    }

    /// Renews the token like the kubelet: a new file replaces the old one.
    fn renew_token(&self, pod: &str) {
        let token = self.cluster.plane.pod_token(NAMESPACE, AGENT, pod, "cluster-doctor").unwrap();
        self.bed.write("token.new", &token);
        fs::rename(self.bed.path("token.new"), self.bed.path("token")).unwrap();
    }

    fn agent(&self, node: &str) -> Service {
        let mut command = Command::new(doctor_node());
        command.args(["agent", "--token", "token", "--node", node, "--root", "machine", "--policy", "policy.toml"]);
        command.args([
            "--state",
            &format!("state-of-{node}"),
            "--controller",
            &format!("http://127.0.0.1:{}", self.port),
        ]);
        command.current_dir(self.bed.path("")).stdin(Stdio::null()).env_clear();
        Service::spawn(command)
    }

    fn append_kernel_log(&self, text: &str) {
        let mut log = File::options().append(true).open(self.bed.path("machine/dev/kmsg")).unwrap();
        writeln!(log, "3,2,999999000000,-;{text}").unwrap();
    }

    fn listed(&self, node: &str) -> Value {
        let agents = self.bed.json(&["agent", "list"]);
        agents.as_array().into_iter().flatten().find(|agent| agent["node"] == node).cloned().unwrap_or_default()
    }

    fn spooled(&self, node: &str) -> usize {
        let files = fs::read_dir(self.bed.path(&format!("state-of-{node}/spool"))).into_iter().flatten().flatten();
        files.filter(|file| file.file_name().to_string_lossy().ends_with(".report")).count()
    }

    fn has_finding(&self, words: &str) -> bool {
        let why = self.bed.json(&["why", "gpu-1"]);
        why["open_findings"].as_array().into_iter().flatten().any(|found| found["text"].to_string().contains(words))
    }

    /// Returns what `doctor config check --live` reports about this.
    fn live(&self, what: &str) -> Value {
        let view = self.bed.json(&["config", "check", "--live"]);
        let found = view["live"].as_array().unwrap().iter().find(|one| one["what"] == what).cloned();
        found.unwrap_or_else(|| panic!("nothing of {what}: {view}"))
    }

    fn taints(&self) -> String {
        self.cluster.node("gpu-1")["spec"]["taints"].to_string()
    }

    /// Changes the policy of the service and the agent, and waits until both report that it is in force.
    fn set_policy(&self, policy_text: &str, version: u32, service: &mut Service, agent: &mut Service) {
        policy(&self.bed, policy_text);
        service.wait_for_log(&format!("configuration reloaded policy={version}"));
        agent.reload();
        agent.wait_for_log(&format!("the changed configuration is in force, policy version {version}"));
    }
}

fn policy(bed: &Workdir, beginning: &str) {
    bed.policy_for(&["memory", "kernel-log"], beginning);
}

#[test]
fn an_agent_speaks_with_its_pods_token_and_what_it_finds_marks_the_node_until_it_is_proven() {
    let Some(stage) = AgentFixture::new() else { return };
    let mut service = Service::start(&stage.bed);
    service.wait_for_log("agent endpoint listening");
    let mut agent = stage.agent("gpu-1");
    agent.wait_for_log("reporting as gpu-1 to http://127.0.0.1:");
    wait_until("a report of the agent", || stage.listed("gpu-1")["state"] == "reports");
    assert_eq!(stage.listed("gpu-1")["speaks_by"], "token");
    stage.bed.expect(0, &["agent", "list"]).stdout_contains("token");

    // The token of one node is not accepted for another.
    let mut liar = stage.agent("gpu-2");
    liar.wait_for_log(
        "does not accept this node's token (403: the token belongs to the agent on gpu-1; it cannot report for gpu-2)",
    );
    drop(liar);
    assert!(stage.listed("gpu-2").is_null());

    // A failure that only the agent sees: label and taint, a finding by the agent, and no test was run for it.
    stage.set_policy(BAD, 2, &mut service, &mut agent);
    wait_until("the taint", || stage.taints().contains("cluster-doctor.io/unhealthy"));
    let written = |kind: &str, name: &str| {
        let metadata = stage.cluster.node("gpu-1")["metadata"].take();
        metadata[kind][format!("cluster-doctor.io/{name}")].as_str().unwrap_or_default().to_owned()
    };
    assert_eq!(written("labels", "status"), "fail");
    wait_until("the annotation", || written("annotations", "results").contains("a planted fault"));
    stage.bed.doctor(&["why", "gpu-1"]).stdout_contains("a planted fault").stdout_contains("by the agent");

    // The check passes again, an operator releases the node, and a run requalifies it.
    stage.set_policy("version = 3\n", 3, &mut service, &mut agent);
    stage.bed.expect(0, &["release", "gpu-1", "--why", "it was planted", "--yes"]);
    wait_until("the node to be back", || !stage.taints().contains("cluster-doctor"));
    wait_until("label and annotation to say so", || {
        written("labels", "status") != "fail" && !written("annotations", "results").contains("a planted fault")
    });
    assert_eq!(stage.bed.json(&["history", "gpu-1", "--test", "memory"])[0]["verdict"], "pass", "requalified");

    stage.bed.expect(0, &["agent", "revoke", "gpu-1", "--why", "taken over", "--yes"]);
    stage.append_kernel_log(FAULT);
    agent.wait_for_log("does not accept this node's token (401: the credential of gpu-1 was revoked)");
    assert!(!stage.has_finding("Machine Check"));
    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
    let token = stage.bed.read("token");
    let (_, said) = agent.stop();
    assert!(!log.contains(&token) && !said.contains(&token), "a log contains the token");
}

#[test]
fn a_live_check_names_who_is_not_heard_and_while_the_api_server_is_away_no_token_is_believed_and_nothing_is_lost() {
    let Some(stage) = AgentFixture::new() else { return };
    assert_eq!(
        stage.live("store")["text"].as_str().map(|text| text.ends_with("the first start creates it")),
        Some(true)
    );
    assert_eq!(stage.live("data")["standing"], "good");
    assert_eq!(stage.live("agents")["standing"], "unknown", "not known without a store");
    let mut service = Service::start(&stage.bed);
    service.wait_for_log("agent endpoint listening");
    let mut agent = stage.agent("gpu-1");
    wait_until("a report of the agent", || stage.listed("gpu-1")["state"] == "reports");
    wait_until("a cycle that knows of the agent", || stage.bed.json(&["status"])["silent"]["agents"] == 1);
    let agents = stage.live("agents");
    assert!(agents["text"].to_string().contains("1 of 2 GPU nodes did not report: gpu-2"), "{agents}");
    assert!(agents["remedy"].to_string().contains("no pod of cluster-doctor-agent runs on gpu-2"), "{agents}");
    // The policy's ConfigMap for jobs does not exist here: it is reported with its remedy.
    let said = stage.bed.expect(1, &["config", "check", "--live"]);
    said.stdout_contains("bad      policy in ConfigMap policy")
        .stdout_contains("create configmap policy --from-file=policy.toml");
    said.stdout_contains("good     rights: all ")
        .stdout_contains("unknown  image: not verified")
        .stdout_contains(" failed; ");

    stage.cluster.plane.kill_apiserver().unwrap();
    service.wait_for_log("read the cluster state");
    stage.append_kernel_log(FAULT);
    agent.wait_for_log("is busy (503: token review failed");
    wait_until("a report that waits", || stage.spooled("gpu-1") >= 1);
    assert!(!stage.has_finding("Machine Check"));
    assert_eq!(stage.live("cluster")["standing"], "bad");
    stage.cluster.plane.restart_apiserver().unwrap();
    stage.renew_token("agent-1");
    wait_until("the finding", || stage.has_finding("Machine Check"));
    wait_until("an empty spool", || stage.spooled("gpu-1") == 0);
    let audit = stage.bed.json(&["audit"]);
    let opened = audit
        .as_array()
        .unwrap()
        .iter()
        .filter(|line| line["what"] == "finding-opened" && line["text"].to_string().contains("Machine Check"));
    assert_eq!(opened.count(), 1);
}
