//! A controller and an agent as real processes on loopback: from a line in the kernel log to a finding.

use std::{
    fs::{self, File},
    io::Write,
    path::PathBuf,
    process::{Command, Stdio},
    time::{SystemTime, UNIX_EPOCH},
};

use doctor_testbed::fake_machine::{FakeMachine, fake_nvidia_library};

use crate::{
    api,
    out_of_the_box::replace_machine,
    this_machine::Service,
    traces,
    workdir::{Workdir, doctor_node, wait_until},
};

/// A cluster of one node on which no job is started, with an agent endpoint and a recorded machine for the agent to
/// check.
struct AgentFixture {
    workdir: Workdir,
}

impl AgentFixture {
    fn new() -> Self {
        let workdir = Workdir::local();
        let port = doctor_testbed::ports::reserve_one().unwrap();
        workdir.write("busy", "");
        let config = workdir.read("doctor.toml").replace(
            "[backend",
            &format!("[agents]\nlisten = \"127.0.0.1:{port}\"\n[web]\nlisten = \"127.0.0.1:0\"\n[backend"),
        );
        workdir.write("doctor.toml", &format!("{config}busy_file = \"busy\"\n"));
        for directory in ["machine/dev", "machine/proc/sys/kernel/random"] {
            fs::create_dir_all(workdir.path(directory)).unwrap();
        }
        workdir.write("machine/dev/kmsg", "6,1,1000,-;Linux version 6.8\n");
        workdir.write("machine/proc/uptime", "1000000.00 5.0\n");
        workdir.write("machine/proc/sys/kernel/random/boot_id", "8a5b1c9e-5d0e-4a77-9d3c-1f7a1f7a1f7a\n");
        let output = workdir.expect(0, &["agent", "enroll", "here", "--out", "keys", "--yes"]);
        output.stdout_contains("Enrolled 1 agent").stdout_contains("agent.key");
        Self { workdir }
    }

    fn agent(&self) -> Service {
        let mut command = Command::new(doctor_node());
        command.arg("agent").args(["--credential", "keys/here.key", "--state", "agent", "--root", "machine"]);
        command.current_dir(self.workdir.path("")).stdin(Stdio::null()).env_clear();
        Service::spawn(command)
    }

    fn append_kernel_log(&self, sequence: u32, text: &str) {
        let mut log = File::options().append(true).open(self.workdir.path("machine/dev/kmsg")).unwrap();
        writeln!(log, "3,{sequence},999999000000,-;{text}").unwrap();
    }

    /// Returns when the controller first saw the finding with these words, in milliseconds since 1970.
    fn finding_time(&self, text: &str) -> Option<i64> {
        let why = self.workdir.json(&["why", "here"]);
        let found =
            why["open_findings"].as_array()?.iter().find(|finding| finding["text"].to_string().contains(text))?;
        let at: doctor_core::time::Timestamp = found["first_seen"].as_str()?.parse().unwrap();
        Some(at.millis())
    }

    fn spooled(&self) -> usize {
        let files = fs::read_dir(self.workdir.path("agent/spool")).into_iter().flatten().flatten();
        files.filter(|file| file.file_name().to_string_lossy().ends_with(".report")).count()
    }

    fn opened(&self, text: &str) -> usize {
        let audit = self.workdir.json(&["audit"]);
        let lines = audit.as_array().unwrap().iter();
        lines.filter(|line| line["what"] == "finding-opened" && line["text"].to_string().contains(text)).count()
    }

    fn key(&self) -> PathBuf {
        self.workdir.path("keys/here.key")
    }
}

fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as i64
}

const OFF_THE_BUS: &str = "NVRM: Xid (PCI:0000:18:00): 79, pid=1, GPU has fallen off the bus.";
const MACHINE_CHECK: &str = "mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 7: be00000000800400";

#[test]
fn a_kernel_log_line_becomes_a_finding_within_two_seconds_between_cycles() {
    let fixture = AgentFixture::new();
    let mut service = Service::start(&fixture.workdir);
    service.wait_for_log("agent endpoint listening");
    let mut agent = fixture.agent();
    agent.wait_for_log("reporting as here to http://127.0.0.1:");
    let list = || fixture.workdir.json(&["agent", "list"])[0].clone();
    wait_until("the first report", || list()["state"] == "reports");
    assert_eq!((list()["schema"].as_str(), list()["skew"].as_array().map(Vec::len)), (Some("1.2"), Some(0)));
    assert_eq!(fixture.finding_time("fallen off the bus"), None);
    wait_until("a cycle that knows of the agent", || fixture.workdir.json(&["status"])["silent"]["agents"] == 1);

    let address = traces::address(&mut service);
    let agent_of = |node: &serde_json::Value| -> (String, bool, String) {
        let word = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
        let agent = &node["agent"];
        (word(&agent["state"]), agent["silent"].as_bool().unwrap_or(true), word(&agent["program"]))
    };
    let expected = ("reports".to_owned(), false, env!("CARGO_PKG_VERSION").to_owned());
    wait_until("the API shows it", || agent_of(&api::get(&address, "/nodes/here", None).1) == expected);
    wait_until("and lists it", || agent_of(&api::get(&address, "/nodes", None).1["items"][0]) == expected);

    let at = now();
    fixture.append_kernel_log(2, OFF_THE_BUS);
    wait_until("the finding", || fixture.finding_time("fallen off the bus").is_some());
    let elapsed = fixture.finding_time("fallen off the bus").unwrap() - at;
    assert!((0..2000).contains(&elapsed), "it took {elapsed} ms");
    eprintln!("from the kernel's line to the finding: {elapsed} ms");
    fixture
        .workdir
        .expect(1, &["why", "here"])
        .stdout_contains("Its agent: last report")
        .stdout_contains("by the agent");

    let (code, output) = agent.stop();
    assert_eq!(code, Some(0), "{output}");
    assert!(output.contains("stopped; reports in the spool: 0"), "{output}");
    assert_eq!(service.stop().0, Some(0));
}

#[test]
fn findings_made_while_the_controller_is_down_are_delivered_once_when_it_returns() {
    let fixture = AgentFixture::new();
    let mut service = Service::start(&fixture.workdir);
    service.wait_for_log("agent endpoint listening");
    let mut agent = fixture.agent();
    wait_until("the first report", || fixture.workdir.json(&["agent", "list"])[0]["state"] == "reports");
    assert_eq!(service.stop().0, Some(0));

    fixture.append_kernel_log(2, OFF_THE_BUS);
    wait_until("a report that waits", || fixture.spooled() >= 1);
    agent.wait_for_log("does not answer");
    // Restarting the agent loses nothing either.
    let (code, output) = agent.stop();
    assert_eq!(code, Some(0), "{output}");
    let mut agent = fixture.agent();
    fixture.append_kernel_log(3, MACHINE_CHECK);
    wait_until("more reports that wait", || fixture.spooled() >= 2);

    let mut service = Service::start(&fixture.workdir);
    service.wait_for_log("agent endpoint listening");
    agent.wait_for_log("accepts reports again");
    wait_until("both findings", || {
        fixture.finding_time("fallen off the bus").is_some() && fixture.finding_time("Machine Check").is_some()
    });
    wait_until("an empty spool", || fixture.spooled() == 0);
    assert_eq!((fixture.opened("fallen off the bus"), fixture.opened("Machine Check")), (1, 1));
}

#[test]
fn a_bad_change_of_the_agents_settings_keeps_the_last_good_one_and_says_so() {
    let fixture = AgentFixture::new();
    fixture.workdir.write("agent.toml", "credential = \"keys/here.key\"\nstate = \"agent\"\nroot = \"machine\"\n");
    let mut command = Command::new(doctor_node());
    command.args(["agent", "--config", "agent.toml"]).current_dir(fixture.workdir.path("")).env_clear();
    let mut agent = Service::spawn(command);
    agent.wait_for_log("reporting as here to http://127.0.0.1:");
    fixture.workdir.write("agent.toml", "credental = \"keys/here.key\"\n");
    agent.reload();
    agent.wait_for_log("is invalid, the previous one stays in force: agent.toml: line 1");
    let good =
        "controller = \"http://127.0.0.1:9\"\ncredential = \"keys/here.key\"\nstate = \"agent\"\nroot = \"machine\"\n";
    fixture.workdir.write("agent.toml", good);
    agent.reload();
    agent.wait_for_log("the changed configuration is in force");
    agent.wait_for_log("http://127.0.0.1:9 does not answer");
}

#[test]
fn a_revoked_agent_is_refused_and_a_new_credential_is_used_without_a_restart() {
    let fixture = AgentFixture::new();
    let mut service = Service::start(&fixture.workdir);
    service.wait_for_log("agent endpoint listening");
    let mut agent = fixture.agent();
    wait_until("the first report", || fixture.workdir.json(&["agent", "list"])[0]["state"] == "reports");
    fixture
        .workdir
        .expect(0, &["agent", "revoke", "here", "--why", "stolen", "--yes"])
        .stdout_contains("Revoked 1 agent");
    fixture.workdir.expect(2, &["agent", "revoke", "there", "--why", "stolen", "--yes"]).stderr_contains("there");
    fixture.append_kernel_log(2, OFF_THE_BUS);
    agent.wait_for_log("does not accept this node's credential (401: the credential of here was revoked)");
    assert_eq!(fixture.finding_time("fallen off the bus"), None);
    assert!(fixture.spooled() >= 1, "the report is spooled");

    fixture.workdir.expect(0, &["agent", "enroll", "here", "--out", "keys", "--yes"]);
    assert!(fs::read_to_string(fixture.key()).unwrap().contains("node = \"here\""));
    agent.reload();
    agent.wait_for_log("the changed configuration is in force");
    wait_until("the finding", || fixture.finding_time("fallen off the bus").is_some());
}

#[test]
fn a_lost_gpu_and_lost_disks_are_findings_at_the_next_check_without_any_setting_on_the_node() {
    let fixture = AgentFixture::new();
    let workdir = &fixture.workdir;
    fs::remove_dir_all(workdir.path("machine")).unwrap();
    replace_machine(workdir, &FakeMachine::hgx_h100().nvme_disks(8));
    // The machine type is built in; the site adds how many disks its machines have.
    workdir.write("site.toml", "sku = \"hgx-h100\"\nversion = 40\n[expect]\nnvme_disks = 8\n");
    let config = workdir.read("doctor.toml").replace("[agents]", "profiles = [\"site.toml\"]\n[agents]");
    workdir.write("doctor.toml", &format!("{config}sku = \"hgx-h100\"\n"));
    workdir.policy_for(&["gpu-count", "memory", "nvme-count"], "[agents]\ncheck_every = \"2s\"\n");
    let mut service = Service::start(workdir);
    service.wait_for_log("agent endpoint listening");
    let mut command = Command::new(doctor_node());
    command.args(["agent", "--credential", "keys/here.key", "--state", "agent", "--root", "machine"]);
    command.args(["--policy", "policy.toml", "--nvml"]).arg(fake_nvidia_library(doctor_node()));
    command.current_dir(workdir.path("")).stdin(Stdio::null()).env_clear();
    command.env("DOCTOR_FAKE_NVIDIA", workdir.path("nvml.toml"));
    let mut agent = Service::spawn(command);
    agent.wait_for_log("machine type hgx-h100 (by gpus), version ");
    agent.wait_for_log("using 1 of the controller's profiles: machine type hgx-h100 (by gpus), version ");

    let why = || workdir.json(&["why", "here"]);
    let status = |test: &str| {
        let lines = why()["test_lines"].as_array().unwrap().clone();
        let line = lines.into_iter().find(|line| line["test"] == test).unwrap();
        (line["status"].as_str().unwrap().to_owned(), line["last"]["run"].is_null())
    };
    for test in ["gpu-count", "memory", "nvme-count"] {
        wait_until(test, || status(test) == ("pass".to_owned(), true));
    }
    let history = workdir.json(&["history"]);
    assert!(history.as_array().unwrap().iter().all(|row| row["by_agent"] == true), "no run was needed: {history}");
    workdir.expect(0, &["history"]).stdout_contains("agent");

    let began = now();
    let smaller = FakeMachine::hgx_h100().gpu_removed(7).nvme_disks(6);
    replace_machine(workdir, &smaller);
    for text in ["7 GPUs, expected 8 on this machine type", "6 NVMe disks, expected 8 on this machine type"] {
        wait_until(text, || fixture.finding_time(text).is_some());
        eprintln!("{text}: {} ms after the change", fixture.finding_time(text).unwrap() - began);
    }
    wait_until("the result", || status("nvme-count") == ("fail".to_owned(), true));
    // The type by which they are missed stays.
    let stored = workdir.read("agent/machine.json");
    assert_eq!(stored.matches("10de:2330").count(), 8, "{stored}");
    assert_eq!((agent.stop().0, service.stop().0), (Some(0), Some(0)));
}
