//! A controller and an agent as real processes on loopback: from a line in the kernel log to a finding.

use std::{
    fs::{self, File},
    io::Write,
    net::TcpListener,
    path::PathBuf,
    process::{Command, Stdio},
    time::{SystemTime, UNIX_EPOCH},
};

use crate::{
    api,
    this_machine::Service,
    traces,
    workdir::{Workdir, doctor_node, wait_until},
};

/// A cluster of one node on which no job is started, with an agent endpoint and a recorded machine for the agent to
/// check.
struct AgentFixture {
    bed: Workdir,
}

impl AgentFixture {
    fn new() -> Self {
        let bed = Workdir::local();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        bed.write("busy", "");
        let config = bed.read("doctor.toml").replace(
            "[backend",
            &format!("[agents]\nlisten = \"127.0.0.1:{port}\"\n[web]\nlisten = \"127.0.0.1:0\"\n[backend"),
        );
        bed.write("doctor.toml", &format!("{config}busy_file = \"busy\"\n"));
        for directory in ["machine/dev", "machine/proc/sys/kernel/random"] {
            fs::create_dir_all(bed.path(directory)).unwrap();
        }
        bed.write("machine/dev/kmsg", "6,1,1000,-;Linux version 6.8\n");
        bed.write("machine/proc/uptime", "1000000.00 5.0\n");
        bed.write("machine/proc/sys/kernel/random/boot_id", "8a5b1c9e-5d0e-4a77-9d3c-1f7a1f7a1f7a\n");
        let said = bed.expect(0, &["agent", "enroll", "here", "--out", "keys", "--yes"]);
        said.stdout_contains("Enrolled 1 agent").stdout_contains("agent.key");
        Self { bed }
    }

    fn agent(&self) -> Service {
        let mut command = Command::new(doctor_node());
        command.arg("agent").args(["--credential", "keys/here.key", "--state", "agent", "--root", "machine"]);
        command.current_dir(self.bed.path("")).stdin(Stdio::null()).env_clear();
        Service::spawn(command)
    }

    fn append_kernel_log(&self, sequence: u32, text: &str) {
        let mut log = File::options().append(true).open(self.bed.path("machine/dev/kmsg")).unwrap();
        writeln!(log, "3,{sequence},999999000000,-;{text}").unwrap();
    }

    /// Returns when the controller first saw the finding with these words, in milliseconds since 1970.
    fn finding_time(&self, words: &str) -> Option<i64> {
        let why = self.bed.json(&["why", "here"]);
        let found =
            why["open_findings"].as_array()?.iter().find(|finding| finding["text"].to_string().contains(words))?;
        let at: doctor_core::time::Timestamp = found["first_seen"].as_str()?.parse().unwrap();
        Some(at.millis())
    }

    fn spooled(&self) -> usize {
        let files = fs::read_dir(self.bed.path("agent/spool")).into_iter().flatten().flatten();
        files.filter(|file| file.file_name().to_string_lossy().ends_with(".report")).count()
    }

    fn opened(&self, words: &str) -> usize {
        let audit = self.bed.json(&["audit"]);
        let lines = audit.as_array().unwrap().iter();
        lines.filter(|line| line["what"] == "finding-opened" && line["text"].to_string().contains(words)).count()
    }

    fn key(&self) -> PathBuf {
        self.bed.path("keys/here.key")
    }
}

fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as i64
}

const OFF_THE_BUS: &str = "NVRM: Xid (PCI:0000:18:00): 79, pid=1, GPU has fallen off the bus.";
const MACHINE_CHECK: &str = "mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 7: be00000000800400";

#[test]
fn a_line_in_the_kernels_log_is_a_finding_within_two_seconds_although_cycles_are_half_a_minute_apart() {
    let stage = AgentFixture::new();
    let mut service = Service::start(&stage.bed);
    service.wait_for_log("agent endpoint listening");
    let mut agent = stage.agent();
    agent.wait_for_log("reporting as here to http://127.0.0.1:");
    let list = || stage.bed.json(&["agent", "list"])[0].clone();
    wait_until("the first report", || list()["state"] == "reports");
    assert_eq!((list()["schema"].as_str(), list()["skew"].as_array().map(Vec::len)), (Some("1.1"), Some(0)));
    assert_eq!(stage.finding_time("fallen off the bus"), None);
    wait_until("a cycle that knows of the agent", || stage.bed.json(&["status"])["silent"]["agents"] == 1);

    let address = traces::address(&mut service);
    let agent_of = |node: &serde_json::Value| -> (String, bool, String) {
        let word = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
        let agent = &node["agent"];
        (word(&agent["state"]), agent["silent"].as_bool().unwrap_or(true), word(&agent["program"]))
    };
    let heard = ("reports".to_owned(), false, env!("CARGO_PKG_VERSION").to_owned());
    wait_until("the API shows it", || agent_of(&api::get(&address, "/nodes/here", None).1) == heard);
    wait_until("and lists it", || agent_of(&api::get(&address, "/nodes", None).1["items"][0]) == heard);

    let at = now();
    stage.append_kernel_log(2, OFF_THE_BUS);
    wait_until("the finding", || stage.finding_time("fallen off the bus").is_some());
    let took = stage.finding_time("fallen off the bus").unwrap() - at;
    assert!((0..2000).contains(&took), "it took {took} ms");
    eprintln!("from the kernel's line to the finding: {took} ms");
    stage.bed.expect(1, &["why", "here"]).stdout_contains("Its agent: last report").stdout_contains("by the agent");

    let (code, said) = agent.stop();
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("stopped; reports in the spool: 0"), "{said}");
    assert_eq!(service.stop().0, Some(0));
}

#[test]
fn what_an_agent_sees_while_the_controller_is_away_comes_once_when_it_is_back() {
    let stage = AgentFixture::new();
    let mut service = Service::start(&stage.bed);
    service.wait_for_log("agent endpoint listening");
    let mut agent = stage.agent();
    wait_until("the first report", || stage.bed.json(&["agent", "list"])[0]["state"] == "reports");
    assert_eq!(service.stop().0, Some(0));

    stage.append_kernel_log(2, OFF_THE_BUS);
    wait_until("a report that waits", || stage.spooled() >= 1);
    agent.wait_for_log("does not answer");
    // Restarting the agent loses nothing either.
    let (code, said) = agent.stop();
    assert_eq!(code, Some(0), "{said}");
    let mut agent = stage.agent();
    stage.append_kernel_log(3, MACHINE_CHECK);
    wait_until("more reports that wait", || stage.spooled() >= 2);

    let mut service = Service::start(&stage.bed);
    service.wait_for_log("agent endpoint listening");
    agent.wait_for_log("accepts reports again");
    wait_until("both findings", || {
        stage.finding_time("fallen off the bus").is_some() && stage.finding_time("Machine Check").is_some()
    });
    wait_until("an empty spool", || stage.spooled() == 0);
    assert_eq!((stage.opened("fallen off the bus"), stage.opened("Machine Check")), (1, 1));
}

#[test]
fn a_bad_change_of_the_agents_settings_keeps_the_last_good_one_and_says_so() {
    let stage = AgentFixture::new();
    stage.bed.write("agent.toml", "credential = \"keys/here.key\"\nstate = \"agent\"\nroot = \"machine\"\n");
    let mut command = Command::new(doctor_node());
    command.args(["agent", "--config", "agent.toml"]).current_dir(stage.bed.path("")).env_clear();
    let mut agent = Service::spawn(command);
    agent.wait_for_log("reporting as here to http://127.0.0.1:");
    stage.bed.write("agent.toml", "credental = \"keys/here.key\"\n");
    agent.reload();
    agent.wait_for_log("is invalid, the previous one stays in force: agent.toml: line 1");
    let good =
        "controller = \"http://127.0.0.1:9\"\ncredential = \"keys/here.key\"\nstate = \"agent\"\nroot = \"machine\"\n";
    stage.bed.write("agent.toml", good);
    agent.reload();
    agent.wait_for_log("the changed configuration is in force");
    agent.wait_for_log("http://127.0.0.1:9 does not answer");
}

#[test]
fn a_revoked_agent_is_refused_and_a_new_credential_is_used_without_a_restart() {
    let stage = AgentFixture::new();
    let mut service = Service::start(&stage.bed);
    service.wait_for_log("agent endpoint listening");
    let mut agent = stage.agent();
    wait_until("the first report", || stage.bed.json(&["agent", "list"])[0]["state"] == "reports");
    stage.bed.expect(0, &["agent", "revoke", "here", "--why", "stolen", "--yes"]).stdout_contains("Revoked 1 agent");
    stage.bed.expect(2, &["agent", "revoke", "there", "--why", "stolen", "--yes"]).stderr_contains("there");
    stage.append_kernel_log(2, OFF_THE_BUS);
    agent.wait_for_log("does not accept this node's credential (401: the credential of here was revoked)");
    assert_eq!(stage.finding_time("fallen off the bus"), None);
    assert!(stage.spooled() >= 1, "the report is spooled");

    stage.bed.expect(0, &["agent", "enroll", "here", "--out", "keys", "--yes"]);
    assert!(fs::read_to_string(stage.key()).unwrap().contains("node = \"here\""));
    agent.reload();
    agent.wait_for_log("the changed configuration is in force");
    wait_until("the finding", || stage.finding_time("fallen off the bus").is_some());
}
