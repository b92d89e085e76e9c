//! A fleet without a scheduler end to end: the service over real sshd hosts. Runs survive the service and its
//! connections, users come first, and a host is rebooted only while it has no users.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use doctor_testbed::ssh::{Host, SshFleet};
use serde_json::json;

use crate::{
    slurm_flows::rows,
    this_machine::Service,
    workdir::{Workdir, doctor_node, wait_until},
};

/// The seed's limit for users of a scheduler: a host under test is given up within a minute.
const GIVEN_UP_WITHIN: Duration = Duration::from_secs(60);

/// Hosts, and the service's directory.
pub(crate) struct SshFixture {
    pub(crate) bed: Workdir,
    pub(crate) fleet: SshFleet,
}

impl SshFixture {
    /// Starts the hosts. `None`: this machine cannot run them, which is printed; in CI it is a failure.
    pub(crate) fn start(what: &str, hosts: u8) -> Option<Self> {
        let fleet = SshFleet::start(hosts).inspect_err(|why| why.skip_tests(what)).ok()?;
        let bed = Workdir::new();
        fs::create_dir(bed.path("data")).unwrap();
        let site = Self { bed, fleet };
        site.configure("");
        Some(site)
    }

    /// Configures a service without a shared directory: everything comes over SSH.
    pub(crate) fn configure(&self, settings: &str) {
        // Debug symbols are not copied to every host.
        let program = self.bed.path("carried");
        if !program.exists() {
            let stripped = Command::new("strip").arg("-o").arg(&program).arg(doctor_node()).status().unwrap();
            assert!(stripped.success(), "strip doctor-node");
        }
        self.bed.write(
            "doctor.toml",
            &format!(
                "store = \"doctor.db\"\ndata = \"data\"\npolicy = \"policy.toml\"\ncycle = \"1s\"\nlease = \"5s\"\n\
                 [backend.ssh]\nhostfile = \"{}\"\nssh_config = \"{}\"\ndoctor_node = \"{}\"\nstate = \"{}\"\n\
                 connect = \"3s\"\nlocks = [\"/run/site-lock\"]\nreboot = [\"/root/reboot\"]\n{settings}",
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
        let nodes = self.bed.json(&["nodes"]);
        let row = nodes.as_array().and_then(|all| all.iter().find(|row| row["node"] == host).cloned());
        row.map(|row| row["used"].as_str().unwrap_or_default().to_owned()).unwrap_or_default()
    }

    /// Returns the active run of a host, from the files there.
    fn run_on(&self, host: usize) -> Option<String> {
        let runs = fs::read_dir(own(&self.fleet.hosts()[host])?.join("runs")).ok()?;
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
            println!("{}", self.bed.doctor(&[question]).out);
        }
        for host in self.fleet.hosts() {
            println!("{}", self.bed.doctor(&["why", &host.name]).out);
            let runs = own(host).and_then(|own| fs::read_dir(own.join("runs")).ok());
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
fn own(host: &Host) -> Option<PathBuf> {
    let hosts = fs::read_dir(host.home().join(".cluster-doctor/hosts")).ok()?;
    hosts.flatten().map(|entry| entry.path()).next()
}

pub(crate) fn put(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn a_run_outlives_the_service_and_its_connection_and_its_result_is_taken_in_once() {
    let Some(site) = SshFixture::start("a run over SSH outlives the service", 1) else { return };
    let SshFixture { bed, fleet } = &site;
    bed.policy_for(
        &[],
        "[tests.slow.params]\ncommand = [\"/bin/sh\", \"-c\", \"until [ -e /root/go ]; do sleep 0.1; done; echo fine\"]\n",
    );
    bed.expect(0, &["config", "check", "--live"])
        .stdout_contains("1 host reachable")
        .stdout_contains("All checks passed.");
    let service = Service::start(bed);
    wait_until("the run on the host", || site.run_on(0).is_some());
    let run = site.run_on(0).unwrap();
    // The service is killed and every connection cut: no controller exists when the run ends.
    drop(service);
    fleet.hosts()[0].cut_connections().unwrap();
    site.on("host1", "touch /root/go");
    wait_until("the end of the run", || site.run_on(0).is_none());
    assert!(rows(bed, "slow").is_empty());

    let mut service = Service::start(bed);
    wait_until("the result", || !rows(bed, "slow").is_empty());
    let found = rows(bed, "slow");
    assert_eq!((&found[0]["verdict"], &found[0]["run"]), (&json!("pass"), &json!(run)), "{found:?}");
    // The log came over SSH, and there was one job.
    let log = bed.expect(0, &["log", &run]);
    log.stdout_contains("| fine");
    assert_eq!(log.out.matches(" job: run ").count(), 1, "{}", log.out);
    bed.policy_for(&[], "version = 2\n");
    service.wait_for_log("configuration reloaded policy=2");
    assert_eq!(rows(bed, "slow").len(), 1, "stored once");
    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
    bed.expect(0, &["db", "verify"]).stdout_contains("The store is consistent.");
}

#[test]
fn whoever_comes_to_a_host_gets_it_within_a_minute_and_a_lock_keeps_us_off() {
    let Some(site) = SshFixture::start("users come first on SSH hosts", 3) else { return };
    let SshFixture { bed, fleet } = &site;
    bed.policy_for(
        &[],
        "[limits]\nresult_grace = \"1s\"\n[retry]\ninconclusive = \"1h\"\n\
         [tests.slow.params]\ntimeout = \"15m\"\ncommand = [\"/bin/sh\", \"-c\", \"exec sleep 600\"]\n",
    );
    site.on("host3", "touch /run/site-lock");
    let service = Service::start(bed);
    wait_until("a run on each free host", || site.run_on(0).is_some() && site.run_on(1).is_some());
    wait_until("the lock to be seen", || site.used("host3") == "busy");

    let asked = Instant::now();
    let mut typist = site.login(&["-tt"], "host1", "while :; do :; done");
    let mut trainer = site.login(&[], "host2", "exec 3</dev/nvidia0; read x");
    wait_until("both hosts to be given up", || site.run_on(0).is_none() && site.run_on(1).is_none());
    assert!(asked.elapsed() < GIVEN_UP_WITHIN, "{:?}", asked.elapsed());
    wait_until("the history rows of the active runs", || rows(bed, "slow").len() == 2);
    for row in rows(bed, "slow") {
        assert_eq!((&row["verdict"], &row["reason"]), (&json!("inconclusive"), &json!("node-taken")), "{row}");
    }
    wait_until("both to be busy", || site.used("host1") == "busy" && site.used("host2") == "busy");
    bed.doctor(&["why", "host2"]).stdout_contains("holds a GPU");
    for user in [&mut typist, &mut trainer] {
        user.kill().unwrap();
        user.wait().unwrap();
    }
    fleet.hosts()[0].cut_connections().unwrap();
    wait_until("a host without users to be free", || site.used("host1") == "free");
    // No run ever started on the host with the lock.
    let runs = own(&fleet.hosts()[2]).and_then(|own| own.join("runs").read_dir().ok());
    assert!(runs.is_none_or(|mut runs| runs.next().is_none()));
    bed.doctor(&["why", "host3"]).stdout_contains("/run/site-lock exists");
    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
    bed.expect(0, &["db", "verify"]).stdout_contains("The store is consistent.");
}

#[test]
fn a_host_that_is_silent_when_the_service_comes_back_keeps_the_marks_that_it_had() {
    let Some(mut site) = SshFixture::start("marks of silent SSH hosts", 2) else { return };
    let acting = "mode = \"act\"\n[allow]\nmark = true\ndrain = true\n[repair]\nproving = [\"memory\"]\n";
    site.bed.policy_for(&["memory"], acting);
    put(&site.fleet.path("foreign.json"), "[{\"by\": \"alice\", \"text\": \"fan noise\", \"blocks\": false}]");
    let service = Service::start(&site.bed);
    wait_until("both hosts to pass", || rows(&site.bed, "memory").len() == 2);
    fs::copy(site.fleet.path("foreign.json"), own(&site.fleet.hosts()[0]).unwrap().join("foreign.json")).unwrap();
    site.bed.expect(0, &["quarantine", "host1", "--why", "a noise", "--yes"]);
    let marks = |bed: &Workdir| {
        let nodes = bed.json(&["nodes"]);
        let row = nodes.as_array().and_then(|all| all.iter().find(|row| row["node"] == "host1").cloned()).unwrap();
        (row["our_marks"].to_string(), row["foreign_marks"].to_string())
    };
    wait_until("the marks", || marks(&site.bed).0.contains("unhealthy") && marks(&site.bed).1.contains("fan noise"));
    let before = marks(&site.bed);
    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
    // The next controller has never seen the host and cannot reach it.
    site.fleet.host("host1").unwrap().stop();
    site.bed.expect(0, &["run"]);
    assert_eq!(site.used("host1"), "unknown");
    assert_eq!(marks(&site.bed), before);
    let plan = site.bed.doctor(&["plan", "--json"]).out;
    assert!(!plan.contains("mark-removed") && !plan.contains("hold-over"), "{plan}");
}

#[test]
fn a_reboot_that_does_not_come_back_is_told_by_its_deadline_and_one_that_does_is_proven() {
    let Some(mut site) = SshFixture::start("reboots of SSH hosts", 3) else { return };
    let told = site.fleet.hosts()[0].home().join("told");
    put(&site.fleet.hosts()[0].home().join("reboot"), "#!/bin/sh\necho once >>/root/told\n");
    let acting = "mode = \"act\"\n[allow]\nmark = true\ndrain = true\nreboot = true\n\
        [repair]\nreboot_deadline = \"5s\"\ntries = 2\nproving = [\"memory\"]\n";
    site.bed.policy_for(&["memory"], &format!("version = 1\n{acting}"));
    let mut service = Service::start(&site.bed);
    wait_until("all hosts to pass", || rows(&site.bed, "memory").len() == 3);
    // Fails everywhere, because every machine has more than 0 bytes of memory.
    let bad = "[[rules]]\nid = \"bad\"\ncheck = \"memory\"\nmetric = \"mem_total_bytes\"\nabove = 0.0\n\
        severity = \"reboot\"\nreason = \"bad-memory\"\ntext = \"a planted fault\"\n";
    site.bed.policy_for(&["memory"], &format!("version = 2\n{acting}{bad}"));
    service.wait_for_log("configuration reloaded policy=2");
    site.bed.expect(0, &["test", "host1", "--test", "memory", "--why", "a planted fault", "--yes"]);
    let times = || fs::read_to_string(&told).map_or(0, |text| text.lines().count());
    wait_until("the reboot command on the host", || times() == 1);
    // The host does not reboot.
    wait_until("the deadline", || site.bed.doctor(&["audit"]).out.contains("reboot did not happen within 5s"));
    wait_until("the second try", || times() == 2);
    site.bed.policy_for(&["memory"], &format!("version = 3\n{acting}"));
    site.fleet.host("host1").unwrap().boot().unwrap();
    let life = || site.bed.json(&["why", "host1"])["life"].as_str().unwrap_or_default().to_owned();
    wait_until("the host to be back", || life() == "in-service");
    assert_eq!(times(), 2);
    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
    site.bed.expect(0, &["db", "verify"]).stdout_contains("The store is consistent.");
}

#[test]
fn before_a_reboot_the_hosts_own_report_is_put_away() {
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
    site.bed.policy_for(&["memory"], &format!("version = 1\n{acting}"));
    let mut service = Service::start(&site.bed);
    wait_until("all hosts to pass", || rows(&site.bed, "memory").len() == 3);
    site.bed.policy_for(&["memory"], &format!("version = 2\n{acting}{bad}"));
    service.wait_for_log("configuration reloaded policy=2");
    site.bed.expect(0, &["test", "host1", "--test", "memory", "--why", "a planted fault", "--yes"]);
    let kept = || -> Option<PathBuf> {
        let mut files = fs::read_dir(site.bed.path("data/handoff")).ok()?.flatten();
        files.find_map(|file| file.path().to_str()?.ends_with("-reboot.tar.gz").then(|| file.path()))
    };
    wait_until("the reboot command on the host", || {
        let told = home.join("told").exists();
        assert!(!told || kept().is_some(), "the reboot must come after the evidence is stored");
        told
    });
    let archive = kept().unwrap();
    let unpacked = Command::new("tar").arg("-xzf").arg(&archive).current_dir(site.bed.path("")).status().unwrap();
    assert!(unpacked.success());
    let name = archive.file_name().unwrap().to_str().unwrap().split('-').next().unwrap();
    let file = |part: &str| site.bed.read(&format!("case-{name}/{part}"));
    assert_eq!(file("node/nvidia-bug-report.log.gz"), "what the boot would lose");
    assert!(file("summary.md").contains("It is in node/"), "{}", file("summary.md"));
    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
}
