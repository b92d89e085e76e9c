//! A Slurm with the backend, and the contract's [`Testbed`](doctor_backend::contract_tests::Testbed) for it.

use std::{
    cell::Cell,
    fs,
    path::PathBuf,
    time::{Duration, Instant},
};

use doctor_backend::{
    Backend, JobOutput, JobRequest, ObservedNode,
    clock::{Clock, SystemClock},
    contract_tests::{Length, TestOccupancy, Testbed},
};
use doctor_backend_slurm::{SlurmBackend, SlurmConfig};
use doctor_checks::{document::RunKey, proc_stat::ProcStat};
use doctor_core::{
    ids::{NodeName, RunId, TestId},
    node::{MarkKind, Occupancy},
    run::{NonEmpty, ObservedJobState},
    time::{Span, Timestamp},
};
use doctor_testbed::{
    programs::doctor_node,
    slurm::{Daemon, Generation, Layout, Slurm, SlurmTestbedError},
};
use tempfile::TempDir;

pub(crate) const KEY: RunKey = RunKey::new([7; 32]);
/// A policy with a test that outlasts all of these tests.
const POLICY: &str = "[tests.endless.params]\ncommand = [\"/bin/sleep\", \"600\"]\ntimeout = \"20m\"\n";
/// For transitions that Slurm makes by itself.
const PATIENCE: Duration = Duration::from_secs(240);
const PAUSE: Duration = Duration::from_millis(100);

pub(crate) struct Stage {
    pub(crate) slurm: Slurm,
    pub(crate) config: SlurmConfig,
    directory: TempDir,
    /// A user's job on the contract's node.
    user: Cell<Option<u32>>,
}

impl Stage {
    /// Returns `None`, after printing so, if this Slurm is not installed.
    pub(crate) fn new(what: &str, generation: Generation) -> Option<Self> {
        Self::with(what, &Layout { generation, nodes: 3, ..Layout::default() })
    }

    pub(crate) fn with(what: &str, layout: &Layout) -> Option<Self> {
        let slurm = match Slurm::start(layout) {
            Ok(slurm) => slurm,
            Err(why @ SlurmTestbedError::Unsupported { .. }) => {
                why.skip_tests(what);
                return None;
            }
            Err(other) => panic!("{other}"),
        };
        // In the folder of the Slurm, which its own root contains too.
        let directory = tempfile::tempdir_in(slurm.conf().parent().unwrap()).unwrap();
        fs::write(directory.path().join("policy.toml"), POLICY).unwrap();
        fs::create_dir(directory.path().join("data")).unwrap();
        let program = directory.path().join("doctor-node");
        fs::copy(doctor_node(), &program).unwrap();
        let config = SlurmConfig {
            programs: Some(slurm.programs().to_owned()),
            slurm_conf: Some(slurm.conf()),
            doctor_node: program,
            node_state: directory.path().join("state"),
            reset: vec!["true".to_owned()],
            ..SlurmConfig::default()
        };
        Some(Self { slurm, config, directory, user: Cell::new(None) })
    }

    pub(crate) fn open(&self) -> SlurmBackend {
        self.open_with(self.config.clone())
    }

    pub(crate) fn open_with(&self, config: SlurmConfig) -> SlurmBackend {
        let at = |name: &str| self.directory.path().join(name);
        SlurmBackend::open(config, &at("data"), Some(&at("policy.toml"))).unwrap()
    }

    pub(crate) fn data(&self, path: &str) -> PathBuf {
        self.directory.path().join("data").join(path)
    }

    pub(crate) fn request(run: RunId, nodes: &[&str], length: Length) -> JobRequest {
        let test = match length {
            Length::Short => "memory",
            Length::Endless => "endless",
        };
        let output = |name: &&str| JobOutput {
            node: node(name),
            logs: vec![format!("{test}/{name}/{run}.log").into()],
            document: format!("{test}/{name}/{run}.json").into(),
        };
        JobRequest {
            run,
            nodes: NonEmpty::new(nodes.iter().map(|name| node(name)).collect()).unwrap(),
            tests: NonEmpty::one(TestId::new(test).unwrap()),
            access: Vec::new(),
            limit: Span::minutes(10),
            key: KEY,
            results: None,
            outputs: nodes.iter().map(output).collect(),
        }
    }

    /// Returns whether a user's job starts on the node, or stays pending.
    pub(crate) fn is_open_to_users(&self, node: &str) -> bool {
        let job =
            self.slurm.submit(&["--nodelist", node, "--job-name=probe", "--time=1", "--wrap=exec sleep 60"]).unwrap();
        // The scheduler tries a job when it is submitted; its state then is the answer.
        let mut state = String::new();
        for _ in 0..8 {
            state = self.slurm.job_state(job).unwrap();
            if state != "PENDING" {
                break;
            }
            std::thread::sleep(PAUSE);
        }
        self.slurm.run("scancel", &[&job.to_string()]).unwrap();
        self.slurm.wait_for_job(job, "CANCELLED").unwrap();
        state != "PENDING"
    }
}

pub(crate) fn node(name: &str) -> NodeName {
    NodeName::new(name).unwrap()
}

pub(crate) fn run_id(number: u64) -> RunId {
    // A recent id, so that it is not pruned as an old one.
    RunId::from_number((u64::try_from(SystemClock.now().millis()).unwrap() << 21) | number)
}

/// Retries until it succeeds.
pub(crate) fn wait<T>(what: &str, mut check: impl FnMut() -> Result<T, String>) -> T {
    let began = Instant::now();
    loop {
        match check() {
            Ok(found) => return found,
            Err(seen) => assert!(began.elapsed() < PATIENCE, "timed out waiting for {what}: {seen}"),
        }
        std::thread::sleep(PAUSE);
    }
}

pub(crate) fn seen(backend: &dyn Backend, name: &str) -> ObservedNode {
    let nodes = backend.snapshot().unwrap();
    nodes.into_iter().find(|seen| seen.node.name.as_str() == name).unwrap()
}

pub(crate) fn has(backend: &dyn Backend, name: &str, kind: MarkKind) -> bool {
    seen(backend, name).node.marks.has_ours(kind)
}

pub(crate) fn wait_free(backend: &dyn Backend, name: &str) {
    wait("the node to be free", || match &seen(backend, name).node.occupancy {
        Occupancy::Free => Ok(()),
        other => Err(format!("{other:?}")),
    });
}

pub(crate) fn job(backend: &dyn Backend, run: RunId) -> ObservedJobState {
    backend.poll(&[run]).unwrap().remove(0).state
}

pub(crate) fn wait_job(
    backend: &dyn Backend,
    run: RunId,
    what: &str,
    is: impl Fn(&ObservedJobState) -> bool,
) -> ObservedJobState {
    wait(what, || {
        let seen = job(backend, run);
        if is(&seen) { Ok(seen) } else { Err(format!("{seen:?}")) }
    })
}

const NODE: &str = "node1";

impl Testbed for Stage {
    fn now(&self) -> Timestamp {
        SystemClock.now()
    }

    fn node(&self) -> NodeName {
        node(NODE)
    }

    fn set_occupancy(&self, name: &NodeName, occupancy: TestOccupancy) {
        if let Some(job) = self.user.take() {
            self.slurm.run("scancel", &[&job.to_string()]).unwrap();
            self.slurm.wait_for_job(job, "CANCELLED").unwrap();
        }
        let state = self.slurm.node_state(NODE).unwrap();
        if state.starts_with("DOWN") {
            self.slurm.run("scontrol", &["update", "nodename=node1", "state=resume"]).unwrap();
        }
        match occupancy {
            // Wait: an ending job and a resume show for a moment.
            TestOccupancy::Free => self
                .slurm
                .wait_for_node(NODE, "idle", |state| {
                    state.starts_with("IDLE") && !state.contains("NOT_RESPONDING") && !state.contains("COMPLETING")
                })
                .unwrap(),
            TestOccupancy::Busy => {
                let job =
                    self.slurm.submit(&["--nodelist", name.as_str(), "--gres=gpu:1", "--wrap=exec sleep 600"]).unwrap();
                self.slurm.wait_for_job(job, "RUNNING").unwrap();
                self.user.set(Some(job));
            }
            TestOccupancy::Unknown => {
                self.slurm.run("scontrol", &["update", "nodename=node1", "state=down", "reason=moved"]).unwrap();
            }
        }
    }

    fn set_foreign_mark(&self, name: &NodeName, there: bool) {
        let drained = self.slurm.node_state(name.as_str()).unwrap().contains("DRAIN");
        let args: &[&str] = if there { &["state=drain", "reason=fan noise"] } else { &["state=resume"] };
        if there || drained {
            self.slurm.run("scontrol", &[&["update", "nodename=node1"], args].concat()).unwrap();
        }
    }

    fn job(&self, run: RunId, length: Length) -> JobRequest {
        Self::request(run, &[NODE], length)
    }

    fn jobs_started(&self, run: RunId) -> usize {
        let name = format!("--name=doctor-{run}");
        let listed = self.slurm.run("squeue", &["--noheader", "--states=all", "--format=%A", &name]).unwrap();
        listed.lines().count()
    }

    /// Kills the node's slurmd and the job, and restarts slurmd without the job.
    fn lose_job(&self, run: RunId) {
        let daemon = Daemon::Node(NODE);
        self.slurm.kill(daemon).unwrap();
        // slurmstepd first: it would otherwise report the end of the job.
        let jobs = processes_with(&run.to_string());
        for pid in jobs.iter().filter_map(|pid| parent(*pid)).chain(jobs.clone()) {
            if let Some(pid) = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw) {
                // It may have just ended.
                let _gone = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
        self.slurm.wait_for_node(NODE, "down", |state| state.starts_with("DOWN")).unwrap();
        self.slurm.restart(daemon).unwrap();
        self.slurm.wait_for_node(NODE, "idle", |state| state.starts_with("IDLE")).unwrap();
    }

    fn let_time_pass(&self) {
        std::thread::sleep(PAUSE);
    }

    fn restarted(&self) -> Option<Box<dyn Backend>> {
        Some(Box::new(self.open()))
    }
}

/// Returns the slurmstepd that started this process.
fn parent(pid: u32) -> Option<u32> {
    let stat = ProcStat::parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?;
    let line = fs::read(format!("/proc/{}/cmdline", stat.parent)).unwrap_or_default();
    String::from_utf8_lossy(&line).starts_with("slurmstepd").then_some(stat.parent)
}

/// Returns the processes of this machine with this in their command line.
fn processes_with(argument: &str) -> Vec<u32> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let has_it = |pid: &u32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(argument)
    };
    pids.filter(has_it).collect()
}
