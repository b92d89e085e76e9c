//! Agents on Kubernetes: the real service and agent, and a real API server that reviews tokens.

use std::{
    fs::{self, File},
    io::Write,
    process::{Command, Stdio},
};

use doctor_testbed::certificates::{Authority, Validity};
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
    workdir: Workdir,
    cluster: Cluster,
    port: u16,
}

impl AgentFixture {
    fn new() -> Option<Self> {
        let workdir = Workdir::new();
        for directory in ["data", "machine/dev", "machine/proc/sys/kernel/random"] {
            fs::create_dir_all(workdir.path(directory)).unwrap();
        }
        workdir.write("machine/dev/kmsg", "6,1,1000,-;Linux version 6.8\n");
        workdir.write("machine/proc/uptime", "1000000.00 5.0\n");
        workdir
            .write("machine/proc/meminfo", "MemTotal: 64000000 kB\nMemFree: 60000000 kB\nMemAvailable: 60000000 kB\n");
        workdir.write("machine/proc/sys/kernel/random/boot_id", "8a5b1c9e-5d0e-4a77-9d3c-1f7a1f7a1f7a\n");
        policy(&workdir, "version = 1\n");
        let cluster = Cluster::start(&workdir, &["gpu-1", "gpu-2"])?;
        let accounts = format!("/api/v1/namespaces/{NAMESPACE}/serviceaccounts");
        let account = json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": { "name": AGENT } });
        // The printed manifests may have created it already.
        let response = cluster.plane.request("POST", &accounts, Some(&account)).unwrap();
        assert!(response.is_success() || response.status == 409, "{}", response.text);
        let port = doctor_testbed::ports::reserve_one().unwrap();
        let kubeconfig = cluster.plane.kubeconfig_for_service_account(NAMESPACE, "cluster-doctor").unwrap();
        // As the printed manifests mount them: the controller's Secret, and what the agents trust.
        let authority = Authority::new();
        let issued = authority.issue(&["localhost", "127.0.0.1"], Validity::Now);
        workdir.write("ca.crt", &authority.certificate);
        workdir.write("tls.crt", &issued.certificate);
        workdir.write("tls.key", &issued.key);
        workdir.write(
            "doctor.toml",
            &format!(
                "store = \"doctor.db\"\ndata = \"data\"\npolicy = \"policy.toml\"\ncycle = \"1s\"\nlease = \"30s\"\n\
                 [agents]\nlisten = \"127.0.0.1:{port}\"\ntls = {{ certificate = \"tls.crt\", key = \"tls.key\" }}\n[backend.kubernetes]\nkubeconfig = \"{}\"\n\
                 share = {{ host-path = \"/data\" }}\npolicy_map = \"policy\"\nagents = {{ remember = \"1s\" }}\n",
                kubeconfig.display()
            ),
        );
        let fixture = Self { workdir, cluster, port };
        fixture.pod("agent-1", "gpu-1");
        fixture.renew_token("agent-1");
        Some(fixture)
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
        self.workdir.write("token.new", &token);
        fs::rename(self.workdir.path("token.new"), self.workdir.path("token")).unwrap();
    }

    fn agent(&self, node: &str) -> Service {
        let mut command = Command::new(doctor_node());
        command.args(["agent", "--token", "token", "--node", node, "--root", "machine", "--policy", "policy.toml"]);
        command.args(["--state", &format!("state-of-{node}"), "--ca-file", "ca.crt", "--controller"]);
        command.arg(format!("https://127.0.0.1:{}", self.port));
        command.current_dir(self.workdir.path("")).stdin(Stdio::null()).env_clear();
        Service::spawn(command)
    }

    fn append_kernel_log(&self, text: &str) {
        let mut log = File::options().append(true).open(self.workdir.path("machine/dev/kmsg")).unwrap();
        writeln!(log, "3,2,999999000000,-;{text}").unwrap();
    }

    fn listed(&self, node: &str) -> Value {
        let agents = self.workdir.json(&["agent", "list"]);
        agents.as_array().into_iter().flatten().find(|agent| agent["node"] == node).cloned().unwrap_or_default()
    }

    fn spooled(&self, node: &str) -> usize {
        let files = fs::read_dir(self.workdir.path(&format!("state-of-{node}/spool"))).into_iter().flatten().flatten();
        files.filter(|file| file.file_name().to_string_lossy().ends_with(".report")).count()
    }

    fn has_finding(&self, text: &str) -> bool {
        let why = self.workdir.json(&["why", "gpu-1"]);
        why["open_findings"].as_array().into_iter().flatten().any(|found| found["text"].to_string().contains(text))
    }

    /// Returns what `doctor config check --live` reports about this.
    fn live(&self, what: &str) -> Value {
        let view = self.workdir.json(&["config", "check", "--live"]);
        let found = view["live"].as_array().unwrap().iter().find(|one| one["subject"] == what).cloned();
        found.unwrap_or_else(|| panic!("nothing of {what}: {view}"))
    }

    fn taints(&self) -> String {
        self.cluster.node("gpu-1")["spec"]["taints"].to_string()
    }

    /// Changes the policy of the service and the agent, and waits until both report that it is in force.
    fn set_policy(&self, policy_text: &str, version: u32, service: &mut Service, agent: &mut Service) {
        policy(&self.workdir, policy_text);
        service.wait_for_log(&format!("configuration reloaded policy={version}"));
        agent.reload();
        agent.wait_for_log(&format!("the changed configuration is in force, policy version {version}"));
    }
}

/// A requalification waits for the agent's next check, so the checks are frequent.
fn policy(workdir: &Workdir, beginning: &str) {
    let text = format!("{beginning}[agents]\ncheck_every = \"10s\"\n");
    workdir.policy_for(&["memory", "kernel-log"], &text);
}

#[test]
fn an_agent_authenticates_with_its_pod_token_and_its_finding_taints_the_node_until_requalified() {
    let Some(fixture) = AgentFixture::new() else { return };
    let mut service = Service::start(&fixture.workdir);
    service.wait_for_log("agent endpoint listening");
    let mut agent = fixture.agent("gpu-1");
    agent.wait_for_log("reporting as gpu-1 to https://127.0.0.1:");
    wait_until("a report of the agent", || fixture.listed("gpu-1")["state"] == "reports");
    assert_eq!(fixture.listed("gpu-1")["authenticated_by"], "token");
    fixture.workdir.expect(0, &["agent", "list"]).stdout_contains("token");

    // The token of one node is not accepted for another.
    let mut impostor = fixture.agent("gpu-2");
    impostor.wait_for_log(
        "does not accept this node's token (403: the token belongs to the agent on gpu-1; it cannot report for gpu-2)",
    );
    drop(impostor);
    assert!(fixture.listed("gpu-2").is_null());

    // A failure that only the agent sees: label and taint, a finding by the agent, and no test was run for it.
    fixture.set_policy(BAD, 2, &mut service, &mut agent);
    wait_until("the taint", || fixture.taints().contains("cluster-doctor.io/unhealthy"));
    let written = |kind: &str, name: &str| {
        let metadata = fixture.cluster.node("gpu-1")["metadata"].take();
        metadata[kind][format!("cluster-doctor.io/{name}")].as_str().unwrap_or_default().to_owned()
    };
    assert_eq!(written("labels", "status"), "fail");
    wait_until("the annotation", || written("annotations", "results").contains("a planted fault"));
    fixture.workdir.doctor(&["why", "gpu-1"]).stdout_contains("a planted fault").stdout_contains("by the agent");

    // The check passes again, an operator releases the node, and a run requalifies it.
    fixture.set_policy("version = 3\n", 3, &mut service, &mut agent);
    fixture.workdir.expect(0, &["release", "gpu-1", "--why", "it was planted", "--yes"]);
    wait_until("the node to be back", || !fixture.taints().contains("cluster-doctor"));
    wait_until("label and annotation to say so", || {
        written("labels", "status") != "fail" && !written("annotations", "results").contains("a planted fault")
    });
    assert_eq!(fixture.workdir.json(&["history", "gpu-1", "--test", "memory"])[0]["verdict"], "pass", "requalified");

    fixture.workdir.expect(0, &["agent", "revoke", "gpu-1", "--why", "taken over", "--yes"]);
    fixture.append_kernel_log(FAULT);
    agent.wait_for_log("does not accept this node's token (401: the credential of gpu-1 was revoked)");
    assert!(!fixture.has_finding("Machine Check"));
    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
    let token = fixture.workdir.read("token");
    let (_, log_tail) = agent.stop();
    assert!(!log.contains(&token) && !log_tail.contains(&token), "a log contains the token");
}

#[test]
fn a_live_check_names_silent_agents_and_an_api_server_outage_rejects_tokens_and_loses_no_report() {
    let Some(fixture) = AgentFixture::new() else { return };
    assert_eq!(
        fixture.live("store")["text"].as_str().map(|text| text.ends_with("the first start creates it")),
        Some(true)
    );
    assert_eq!(fixture.live("data")["status"], "good");
    assert_eq!(fixture.live("agents")["status"], "unknown", "not known without a store");
    let mut service = Service::start(&fixture.workdir);
    service.wait_for_log("agent endpoint listening");
    let mut agent = fixture.agent("gpu-1");
    wait_until("a report of the agent", || fixture.listed("gpu-1")["state"] == "reports");
    wait_until("a cycle that knows of the agent", || fixture.workdir.json(&["status"])["silent"]["agents"] == 1);
    let agents = fixture.live("agents");
    assert!(agents["text"].to_string().contains("1 of 2 GPU nodes did not report: gpu-2"), "{agents}");
    assert!(agents["remedy"].to_string().contains("no pod of cluster-doctor-agent runs on gpu-2"), "{agents}");
    // The policy's ConfigMap for jobs does not exist here: it is reported with its remedy.
    let output = fixture.workdir.expect(1, &["config", "check", "--live"]);
    output
        .stdout_contains("bad      policy in ConfigMap policy")
        .stdout_contains("create configmap policy --from-file=policy.toml");
    output
        .stdout_contains("good     rights: all ")
        .stdout_contains("unknown  image: not verified")
        .stdout_contains(" failed; ");

    fixture.cluster.plane.kill_apiserver().unwrap();
    service.wait_for_log("read the cluster state");
    fixture.append_kernel_log(FAULT);
    agent.wait_for_log("is busy (503: token review failed");
    wait_until("a report that waits", || fixture.spooled("gpu-1") >= 1);
    assert!(!fixture.has_finding("Machine Check"));
    assert_eq!(fixture.live("cluster")["status"], "bad");
    fixture.cluster.plane.restart_apiserver().unwrap();
    fixture.renew_token("agent-1");
    wait_until("the finding", || fixture.has_finding("Machine Check"));
    wait_until("an empty spool", || fixture.spooled("gpu-1") == 0);
    let audit = fixture.workdir.json(&["audit"]);
    let opened = audit
        .as_array()
        .unwrap()
        .iter()
        .filter(|line| line["what"] == "finding-opened" && line["text"].to_string().contains("Machine Check"));
    assert_eq!(opened.count(), 1);
}
