//! A fleet without a scheduler end to end: the service over real sshd hosts. Runs survive the service and its
//! connections, users come first, and a host is rebooted only while it has no users.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use doctor_testbed::{
    fake_machine::FakeMachine,
    ssh::{Host, SshFleet},
};
use serde_json::json;

use crate::{
    out_of_the_box,
    slurm_flows::rows,
    this_machine::Service,
    workdir::{Workdir, doctor_node, wait_until},
};

/// The seed's limit for users of a scheduler: a host under test is given up within a minute.
const GIVEN_UP_WITHIN: Duration = Duration::from_secs(60);

/// Hosts, and the service's directory.
pub(crate) struct SshFixture {
    pub(crate) workdir: Workdir,
    pub(crate) fleet: SshFleet,
}

impl SshFixture {
    /// Starts the hosts. `None`: this machine cannot run them, which is printed; in CI it is a failure.
    pub(crate) fn start(what: &str, hosts: u8) -> Option<Self> {
        let fleet = SshFleet::start(hosts).inspect_err(|why| why.skip_tests(what)).ok()?;
        let workdir = Workdir::new();
        fs::create_dir(workdir.path("data")).unwrap();
        let site = Self { workdir, fleet };
        site.configure("");
        Some(site)
    }

    /// Configures a service without a shared directory: everything comes over SSH.
    pub(crate) fn configure(&self, settings: &str) {
        // Debug symbols are not copied to every host.
        let program = self.workdir.path("carried");
        if !program.exists() {
            let stripped = Command::new("strip").arg("-o").arg(&program).arg(doctor_node()).status().unwrap();
            assert!(stripped.success(), "strip doctor-node");
        }
        self.workdir.write(
            "doctor.toml",
            &format!(
                "store = \"doctor.db\"\ndata = \"data\"\npolicy = \"policy.toml\"\ncycle = \"1s\"\nlease = \"5s\"\n\
                 [backend.ssh]\nhostfile = \"{}\"\nssh_config = \"{}\"\ndoctor_node = \"{}\"\nstate = \"{}\"\n\
                 connect = \"15s\"\nlocks = [\"/run/site-lock\"]\nreboot = [\"/root/reboot\"]\n{settings}",
                self.fleet.path("hostfile").display(),
                self.fleet.ssh_config().display(),
                program.display(),
                self.fleet.path("s").display(),
            ),
        );
    }

    pub(crate) fn on(&self, host: &str, command: &str) {
        let output = self.fleet.ssh(host, command).output().unwrap();
        assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    }

    fn used(&self, host: &str) -> String {
        let nodes = self.workdir.json(&["nodes"]);
        let row = nodes.as_array().and_then(|all| all.iter().find(|row| row["node"] == host).cloned());
        row.map(|row| row["occupancy"].as_str().unwrap_or_default().to_owned()).unwrap_or_default()
    }

    /// Returns the active run of a host, from the files there.
    pub(crate) fn run_on(&self, host: usize) -> Option<String> {
        let runs = fs::read_dir(host_dir(&self.fleet.hosts()[host])?.join("runs")).ok()?;
        let claimed = |run: &fs::DirEntry| {
            let claim = fs::read_to_string(run.path().join("job.json")).unwrap_or_default();
            claim.contains("\"ended\":null")
        };
        Some(runs.flatten().find(claimed)?.file_name().into_string().unwrap())
    }

    fn login(&self, options: &[&str], host: &str, command: &str) -> Child {
        let mut ssh = Command::new("ssh");
        ssh.arg("-F").arg(self.fleet.ssh_config()).args(options).args([host, command]);
        ssh.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    }
}

/// A failing test prints the state of the service.
impl Drop for SshFixture {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        for question in ["nodes", "history", "audit", "status"] {
            println!("{}", self.workdir.doctor(&[question]).out);
        }
        for host in self.fleet.hosts() {
            println!("{}", self.workdir.doctor(&["why", &host.name]).out);
            let runs = host_dir(host).and_then(|directory| fs::read_dir(directory.join("runs")).ok());
            for run in runs.into_iter().flatten().flatten() {
                for file in ["job.json", "log.txt", "output.txt"] {
                    let text = fs::read_to_string(run.path().join(file)).unwrap_or_default();
                    println!("{} {:?} {file}: {text}", host.name, run.file_name());
                }
            }
        }
    }
}

/// Returns the state directory of a host.
fn host_dir(host: &Host) -> Option<PathBuf> {
    let hosts = fs::read_dir(host.home().join(".cluster-doctor/hosts")).ok()?;
    hosts.flatten().map(|entry| entry.path()).next()
}

pub(crate) fn put(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn a_run_outlives_the_service_and_its_connection_and_its_result_is_stored_once() {
    let Some(site) = SshFixture::start("a run over SSH outlives the service", 1) else { return };
    let SshFixture { workdir, fleet } = &site;
    workdir.policy_for(
        &[],
        "[tests.slow.params]\ncommand = [\"/bin/sh\", \"-c\", \"until [ -e /root/go ]; do sleep 0.1; done; echo fine\"]\n",
    );
    workdir
        .expect(0, &["config", "check", "--live"])
        .stdout_contains("1 host reachable")
        .stdout_contains("good     host1: rights: root")
        .stdout_contains("good     host1: clock: ")
        .stdout_contains("host1: program: could not try: it is not there yet")
        .stdout_contains("No check failed; ");
    let service = Service::start(workdir);
    wait_until("the run on the host", || site.run_on(0).is_some());
    let run = site.run_on(0).unwrap();
    // The service is killed and every connection cut: no controller exists when the run ends.
    drop(service);
    fleet.hosts()[0].cut_connections().unwrap();
    site.on("host1", "touch /root/go");
    wait_until("the end of the run", || site.run_on(0).is_none());
    assert!(rows(workdir, "slow").is_empty());

    let mut service = Service::start(workdir);
    wait_until("the result", || !rows(workdir, "slow").is_empty());
    let found = rows(workdir, "slow");
    assert_eq!((&found[0]["verdict"], &found[0]["run"]), (&json!("pass"), &json!(run)), "{found:?}");
    // The log came over SSH, and there was one job.
    let log = workdir.expect(0, &["log", &run]);
    log.stdout_contains("| fine");
    assert_eq!(log.out.matches(" job: run ").count(), 1, "{}", log.out);
    workdir.policy_for(&[], "version = 2\n");
    service.wait_for_log("configuration reloaded policy=2");
    assert_eq!(rows(workdir, "slow").len(), 1, "stored once");
    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
    workdir.expect(0, &["db", "verify"]).stdout_contains("The store is consistent.");
}

#[test]
fn a_user_gets_a_host_within_a_minute_and_a_lock_prevents_tests() {
    let Some(site) = SshFixture::start("users come first on SSH hosts", 3) else { return };
    let SshFixture { workdir, fleet } = &site;
    workdir.policy_for(
        &[],
        "[limits]\nresult_grace = \"1s\"\n[retry]\ninconclusive = \"1h\"\n\
         [tests.slow.params]\ntimeout = \"15m\"\ncommand = [\"/bin/sh\", \"-c\", \"exec sleep 600\"]\n",
    );
    site.on("host3", "touch /run/site-lock");
    let service = Service::start(workdir);
    wait_until("a run on each free host", || site.run_on(0).is_some() && site.run_on(1).is_some());
    wait_until("the lock to be seen", || site.used("host3") == "busy");

    let requested_at = Instant::now();
    let mut cpu_user = site.login(&["-tt"], "host1", "while :; do :; done");
    let mut trainer = site.login(&[], "host2", "exec 3</dev/nvidia0; read x");
    wait_until("both hosts to be given up", || site.run_on(0).is_none() && site.run_on(1).is_none());
    assert!(requested_at.elapsed() < GIVEN_UP_WITHIN, "{:?}", requested_at.elapsed());
    wait_until("the history rows of the active runs", || rows(workdir, "slow").len() == 2);
    for row in rows(workdir, "slow") {
        assert_eq!((&row["verdict"], &row["reason"]), (&json!("inconclusive"), &json!("node-taken")), "{row}");
    }
    wait_until("both to be busy", || site.used("host1") == "busy" && site.used("host2") == "busy");
    workdir.doctor(&["why", "host2"]).stdout_contains("holds a GPU");
    for user in [&mut cpu_user, &mut trainer] {
        user.kill().unwrap();
        user.wait().unwrap();
    }
    fleet.hosts()[0].cut_connections().unwrap();
    wait_until("a host without users to be free", || site.used("host1") == "free");
    // No run ever started on the host with the lock.
    let runs = host_dir(&fleet.hosts()[2]).and_then(|directory| directory.join("runs").read_dir().ok());
    assert!(runs.is_none_or(|mut runs| runs.next().is_none()));
    workdir.doctor(&["why", "host3"]).stdout_contains("/run/site-lock exists");
    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
    workdir.expect(0, &["db", "verify"]).stdout_contains("The store is consistent.");
}

#[test]
fn an_unreachable_host_keeps_its_marks_across_a_restart() {
    let Some(mut site) = SshFixture::start("marks of silent SSH hosts", 2) else { return };
    let acting = "mode = \"act\"\n[allow]\nmark = true\ndrain = true\n[repair]\nrequalification = [\"memory\"]\n";
    site.workdir.policy_for(&["memory"], acting);
    put(&site.fleet.path("foreign.json"), "[{\"by\": \"alice\", \"text\": \"fan noise\", \"blocks\": false}]");
    let service = Service::start(&site.workdir);
    wait_until("both hosts to pass", || rows(&site.workdir, "memory").len() == 2);
    fs::copy(site.fleet.path("foreign.json"), host_dir(&site.fleet.hosts()[0]).unwrap().join("foreign.json")).unwrap();
    site.workdir.expect(0, &["quarantine", "host1", "--why", "a noise", "--yes"]);
    let marks = |workdir: &Workdir| {
        let nodes = workdir.json(&["nodes"]);
        let row = nodes.as_array().and_then(|all| all.iter().find(|row| row["node"] == "host1").cloned()).unwrap();
        (row["our_marks"].to_string(), row["foreign_marks"].to_string())
    };
    wait_until("the marks", || {
        marks(&site.workdir).0.contains("unhealthy") && marks(&site.workdir).1.contains("fan noise")
    });
    let before = marks(&site.workdir);
    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
    // The next controller has never seen the host and cannot reach it.
    site.fleet.host("host1").unwrap().stop();
    site.workdir.expect(0, &["run"]);
    assert_eq!(site.used("host1"), "unknown");
    assert_eq!(marks(&site.workdir), before);
    let plan = site.workdir.doctor(&["plan", "--json"]).out;
    assert!(!plan.contains("mark-removed") && !plan.contains("hold-over"), "{plan}");
}

#[test]
fn a_failed_reboot_is_reported_at_its_deadline_and_a_rebooted_host_is_requalified() {
    let Some(mut site) = SshFixture::start("reboots of SSH hosts", 3) else { return };
    let reboot_log = site.fleet.hosts()[0].home().join("told");
    put(&site.fleet.hosts()[0].home().join("reboot"), "#!/bin/sh\necho once >>/root/told\n");
    let acting = "mode = \"act\"\n[allow]\nmark = true\ndrain = true\nreboot = true\n\
        [repair]\nreboot_deadline = \"5s\"\nattempts = 2\nrequalification = [\"memory\"]\n";
    site.workdir.policy_for(&["memory"], &format!("version = 1\n{acting}"));
    let mut service = Service::start(&site.workdir);
    wait_until("all hosts to pass", || rows(&site.workdir, "memory").len() == 3);
    // Fails everywhere, because every machine has more than 0 bytes of memory.
    let bad = "[[rules]]\nid = \"bad\"\ncheck = \"memory\"\nmetric = \"mem_total_bytes\"\nabove = 0.0\n\
        severity = \"reboot\"\nreason = \"bad-memory\"\ntext = \"a planted fault\"\n";
    site.workdir.policy_for(&["memory"], &format!("version = 2\n{acting}{bad}"));
    service.wait_for_log("configuration reloaded policy=2");
    site.workdir.expect(0, &["test", "host1", "--test", "memory", "--why", "a planted fault", "--yes"]);
    let times = || fs::read_to_string(&reboot_log).map_or(0, |text| text.lines().count());
    wait_until("the reboot command on the host", || times() == 1);
    // The host does not reboot.
    wait_until("the deadline", || site.workdir.doctor(&["audit"]).out.contains("reboot did not happen within 5s"));
    wait_until("the second try", || times() == 2);
    site.workdir.policy_for(&["memory"], &format!("version = 3\n{acting}"));
    site.fleet.host("host1").unwrap().boot().unwrap();
    let life = || site.workdir.json(&["why", "host1"])["state"].as_str().unwrap_or_default().to_owned();
    wait_until("the host to be back", || life() == "in-service");
    assert_eq!(times(), 2);
    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
    site.workdir.expect(0, &["db", "verify"]).stdout_contains("The store is consistent.");
}

#[test]
fn the_hosts_report_is_stored_before_a_reboot() {
    let Some(site) = SshFixture::start("reports of SSH hosts before their reboot", 3) else { return };
    let home = site.fleet.hosts()[0].home();
    fs::create_dir(home.join("bin")).unwrap();
    put(
        &home.join("bin/nvidia-bug-report.sh"),
        "#!/bin/sh\nprintf 'what the boot would lose' >nvidia-bug-report.log.gz\n",
    );
    put(&home.join("reboot"), "#!/bin/sh\necho once >>/root/told\n");
    for host in site.fleet.hosts() {
        put(&host.home().join("as-root"), "#!/bin/sh\nPATH=/root/bin:$PATH exec \"$@\"\n");
    }
    site.configure("as_root = [\"/root/as-root\"]\n");
    let acting = "mode = \"act\"\n[allow]\nmark = true\ndrain = true\nreboot = true\n";
    let bad = "[[rules]]\nid = \"bad\"\ncheck = \"memory\"\nmetric = \"mem_total_bytes\"\nabove = 0.0\n\
        severity = \"reboot\"\nreason = \"bad-memory\"\ntext = \"a planted fault\"\n";
    site.workdir.policy_for(&["memory"], &format!("version = 1\n{acting}"));
    let mut service = Service::start(&site.workdir);
    wait_until("all hosts to pass", || rows(&site.workdir, "memory").len() == 3);
    site.workdir.policy_for(&["memory"], &format!("version = 2\n{acting}{bad}"));
    service.wait_for_log("configuration reloaded policy=2");
    site.workdir.expect(0, &["test", "host1", "--test", "memory", "--why", "a planted fault", "--yes"]);
    let stored_report = || -> Option<PathBuf> {
        let mut files = fs::read_dir(site.workdir.path("data/handoff")).ok()?.flatten();
        files.find_map(|file| file.path().to_str()?.ends_with("-reboot.tar.gz").then(|| file.path()))
    };
    wait_until("the reboot command on the host", || {
        let rebooted = home.join("told").exists();
        assert!(!rebooted || stored_report().is_some(), "the reboot must come after the evidence is stored");
        rebooted
    });
    let archive = stored_report().unwrap();
    let unpacked = Command::new("tar").arg("-xzf").arg(&archive).current_dir(site.workdir.path("")).status().unwrap();
    assert!(unpacked.success());
    let name = archive.file_name().unwrap().to_str().unwrap().split('-').next().unwrap();
    let file = |part: &str| site.workdir.read(&format!("case-{name}/{part}"));
    assert_eq!(file("node/nvidia-bug-report.log.gz"), "what the boot would lose");
    assert!(file("summary.md").contains("It is in node/"), "{}", file("summary.md"));
    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
}

#[test]
fn a_host_that_loses_all_its_gpus_is_not_healthy() {
    let Some(fixture) = SshFixture::start("missing GPUs over SSH", 1) else { return };
    let workdir = &fixture.workdir;
    out_of_the_box::replace_machine(workdir, &FakeMachine::hgx_h100());
    let program = out_of_the_box::stand_in_program(workdir);
    let carried = workdir.path("carried").display().to_string();
    workdir.write("doctor.toml", &workdir.read("doctor.toml").replace(&carried, &program.display().to_string()));
    // The shipped policy. SSH declares nothing: what the host had before counts.
    workdir.write("policy.toml", "");
    let service = Service::start(workdir);
    let name = &fixture.fleet.hosts()[0].name;
    wait_until("the first results", || rows(workdir, "dl").iter().any(|row| row["verdict"] == "pass"));
    out_of_the_box::replace_machine(workdir, &out_of_the_box::without_gpus());
    workdir.expect(0, &["test", name, "--test", "dl", "--test", "gpu-count", "--yes"]);
    out_of_the_box::wait_until_gpus_are_missed(workdir, name);
    assert_eq!(service.stop().0, Some(0));
}
