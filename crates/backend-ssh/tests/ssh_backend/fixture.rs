//! SSH hosts for these tests: real sshd, the program under test, a policy with an endless test, and repairs that leave traces.

use std::{
    cell::RefCell,
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
    time::{Duration, Instant},
};

use doctor_backend::{
    Backend, JobOutput, JobRequest, PolledJob,
    clock::{Clock, SystemClock},
    contract_tests::{Length, TestOccupancy, Testbed},
};
use doctor_backend_ssh::{SshBackend, SshConfig};
use doctor_checks::{document::RunKey, job_file::JobFile};
use doctor_core::{
    case::StepKind,
    ids::{NodeName, RunId, TestId},
    node::Occupancy,
    run::{JobEnd, NonEmpty, ObservedJobState},
    time::{Span, Timestamp},
};
use doctor_host::host_directory;
use doctor_testbed::{programs, ssh::SshFleet};
use tempfile::TempDir;

pub(crate) const KEY: RunKey = RunKey::new([7; 32]);

/// A policy with a test that outlasts all of these tests.
const POLICY: &str = "[tests.endless.params]\ncommand = [\"/bin/sleep\", \"600\"]\ntimeout = \"20m\"\n";

/// Returns the program under test, stripped of debug information, because each host receives it over SSH.
fn doctor_node() -> &'static Path {
    static BUILT: OnceLock<(TempDir, PathBuf)> = OnceLock::new();
    let (_, program) = BUILT.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("doctor-node");
        let stripped = Command::new("strip").arg("-o").arg(&program).arg(programs::doctor_node()).status().unwrap();
        assert!(stripped.success(), "strip doctor-node");
        (folder, program)
    });
    program
}

pub(crate) struct Hosts {
    pub(crate) fleet: RefCell<SshFleet>,
    pub(crate) config: SshConfig,
    policy: PathBuf,
}

impl Hosts {
    /// Returns `None`, after printing so, if this machine cannot run them.
    pub(crate) fn new(what: &str, hosts: u8) -> Option<Self> {
        let fleet = SshFleet::start(hosts).inspect_err(|why| why.skip_tests(what)).ok()?;
        let policy = fleet.path("policy.toml");
        fs::write(&policy, POLICY).unwrap();
        for host in fleet.hosts() {
            put(&host.home().join("reset"), "#!/bin/sh\necho once >>/root/resets\n");
            put(&host.home().join("reboot"), "#!/bin/sh\necho once >>/root/told; touch /root/down\n");
        }
        let config = SshConfig {
            hostfile: Some(fleet.path("hostfile")),
            ssh_config: Some(fleet.ssh_config()),
            doctor_node: Some(doctor_node().to_owned()),
            connect: Span::from_secs(15),
            deadline: Span::from_secs(90),
            copy: Span::minutes(10),
            locks: vec!["/run/site-lock".into()],
            reset: vec!["/root/reset".to_owned()],
            reboot: vec!["/root/reboot".to_owned()],
            state: fleet.path("s"),
            ..SshConfig::default()
        };
        Some(Self { fleet: RefCell::new(fleet), config, policy })
    }

    pub(crate) fn open(&self) -> SshBackend {
        SshBackend::open(self.config.clone(), Some(&self.policy)).unwrap()
    }

    /// Returns the path of a file of the host below `remote`.
    pub(crate) fn at(&self, host: &str, path: &str) -> PathBuf {
        let remote = self.fleet.borrow_mut().host(host).unwrap().home().join(".cluster-doctor");
        remote.join(self.own(host)).join(path)
    }

    /// Returns the host's own folder. All hosts of this testbed have the same machine id.
    fn own(&self, name: &str) -> PathBuf {
        host_directory::host_path(name, &fs::read_to_string("/etc/machine-id").unwrap_or_default())
    }

    pub(crate) fn ssh(&self, host: &str, command: &str) -> String {
        let output = self.fleet.borrow().ssh(host, command).output().unwrap();
        assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    pub(crate) fn request(&self, host: &str, run: RunId, tests: &[&str]) -> JobRequest {
        self.request_on(&[host], run, tests)
    }

    pub(crate) fn request_on(&self, hosts: &[&str], run: RunId, tests: &[&str]) -> JobRequest {
        let tests = tests.iter().map(|test| TestId::new(test).unwrap()).collect();
        let output = |host: &&str| JobOutput {
            node: node(host),
            logs: vec![format!("{host}/{run}.log").into()],
            document: format!("{host}/{run}.json").into(),
        };
        JobRequest {
            run,
            nodes: NonEmpty::new(hosts.iter().map(|host| node(host)).collect()).unwrap(),
            tests: NonEmpty::new(tests).unwrap(),
            access: Vec::new(),
            limit: Span::minutes(10),
            key: KEY,
            results: None,
            outputs: hosts.iter().map(output).collect(),
        }
    }

    /// Counts the lines of a file in the host's home.
    pub(crate) fn lines(&self, host: &str, file: &str) -> usize {
        let home = self.fleet.borrow_mut().host(host).unwrap().home();
        fs::read_to_string(home.join(file)).map_or(0, |text| text.lines().count())
    }

    /// Reboots the host with a new boot id, if it was requested to reboot.
    pub(crate) fn reboot_if_requested(&self, host: &str) {
        let mut fleet = self.fleet.borrow_mut();
        let host = fleet.host(host).unwrap();
        if fs::remove_file(host.home().join("down")).is_ok() {
            host.boot().unwrap();
        }
    }

    pub(crate) fn log(&self, host: &str, run: RunId) -> String {
        fs::read_to_string(self.at(host, &format!("runs/{run}/log.txt"))).unwrap_or_default()
    }
}

/// Writes an executable on a host.
pub(crate) fn put(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

pub(crate) fn node(name: &str) -> NodeName {
    NodeName::new(name).unwrap()
}

pub(crate) fn run_id(number: u64) -> RunId {
    // A recent id, so that it is not pruned as an old one.
    RunId::from_number((u64::try_from(SystemClock.now().millis()).unwrap() << 21) | number)
}

pub(crate) fn wait<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = condition() {
            return found;
        }
        assert!(began.elapsed() < Duration::from_secs(240), "timed out waiting for {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub(crate) fn polled(backend: &SshBackend, run: RunId) -> PolledJob {
    backend.poll(&[run]).unwrap().remove(0)
}

pub(crate) fn wait_ended(backend: &SshBackend, run: RunId) -> (JobEnd, Vec<Vec<u8>>) {
    wait("the end of the job", || match polled(backend, run) {
        PolledJob { state: ObservedJobState::Ended { how, .. }, documents } => Some((how, documents)),
        _ => None,
    })
}

pub(crate) fn occupancy(backend: &SshBackend, host: &str) -> Occupancy {
    let nodes = backend.snapshot().unwrap();
    nodes.iter().find(|seen| seen.node.name == node(host)).unwrap().node.occupancy.clone()
}

pub(crate) fn why(occupancy: &Occupancy) -> &str {
    match occupancy {
        Occupancy::Free => "free",
        Occupancy::Busy { by } => by,
        Occupancy::Unknown { why } => why,
    }
}

impl Testbed for Hosts {
    fn now(&self) -> Timestamp {
        SystemClock.now()
    }

    fn node(&self) -> NodeName {
        node("host1")
    }

    fn set_occupancy(&self, _: &NodeName, desired: TestOccupancy) {
        let fleet = self.fleet.borrow();
        let load = match desired {
            TestOccupancy::Free => "0.10 0.10 0.10 1/84 7182\n",
            TestOccupancy::Busy => "999.0 0.10 0.10 1/84 7182\n",
            TestOccupancy::Unknown => "soon\n",
        };
        fleet.hosts()[0].set_load(load).unwrap();
    }

    fn set_foreign_mark(&self, _: &NodeName, present: bool) {
        let mark = r#"{"by": "ops", "text": "fan noise", "blocks": true}"#;
        let path = self.at("host1", "foreign.json");
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, if present { format!("[{mark}]") } else { "[]".to_owned() }).unwrap();
    }

    fn job(&self, run: RunId, length: Length) -> JobRequest {
        self.request("host1", run, if length == Length::Short { &["memory"] } else { &["endless"] })
    }

    fn jobs_started(&self, run: RunId) -> usize {
        self.log("host1", run).lines().filter(|line| line.contains(" job: run ")).count()
    }

    fn lose_job(&self, run: RunId) {
        let claim = fs::read_to_string(self.at("host1", &format!("runs/{run}/job.json"))).unwrap();
        let claim: JobFile = serde_json::from_str(&claim).unwrap();
        self.ssh("host1", &format!("kill -9 {}", claim.process.unwrap().pid));
    }

    fn repairs_done(&self, what: StepKind) -> Option<usize> {
        Some(self.lines("host1", if what == StepKind::Reset { "resets" } else { "told" }))
    }

    fn let_time_pass(&self) {
        self.reboot_if_requested("host1");
        std::thread::sleep(Duration::from_millis(10));
    }

    fn restarted(&self) -> Option<Box<dyn Backend>> {
        Some(Box::new(self.open()))
    }
}
