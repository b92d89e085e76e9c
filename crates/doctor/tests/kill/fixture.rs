//! The environment of the kill test: a directory with the configuration, and the processes started from it. However the
//! test ends, none of its processes survives.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::mpsc,
    time::{Duration, Instant},
};

use doctor_core::time::Span;
use doctor_sim::{Assumptions, Disruptions, JobFault, PoolConfig, RemoteSim, WorldConfig, disruptions::CallChances};
use doctor_store::{Store, StoreUrl};
use rustix::process::{Pid, Signal, kill_process};

/// Simulated seconds per real second: half an hour. Two minutes of kills are two and a half days in the cluster.
pub(crate) const SPEED: f64 = 1800.0;

/// The lease in real time: two hours of the cluster.
pub(crate) const LEASE: Duration = Duration::from_secs(4);

/// The length of the occasional outages in which the whole cluster does not answer.
pub(crate) const OUTAGE: Span = Span::minutes(10);

/// The limit of every wait, long enough for the busiest machine.
pub(crate) const WAIT_LIMIT: Duration = Duration::from_secs(120);

/// Allows everything and widens the breaker, so that much happens. Periods are short for the same reason.
pub(crate) const POLICY: &str = r#"
mode = "act"

[allow]
drain = true
reset = true
reboot = true
replace = true

[limits]
jobs = 12
per_share = 6

[retry]
inconclusive = "10m"
inconclusive_cap = "1h"
not_started = "5m"
not_started_cap = "30m"
confirm = "5m"

[breaker]
percent_of_pool = 80.0
nodes_per_hour = 1000

[repair]
drain_deadline = "4h"

[tests.storage]
cutoff = "2h"
[tests.dl]
cutoff = "3h"
[tests.nccl]
cutoff = "4h"
# The agents do this one.
[tests.gpu-health]
enabled = false
"#;

/// The directory and the store.
pub(crate) struct Fixture {
    folder: tempfile::TempDir,
    pub(crate) store: StoreUrl,
}

impl Fixture {
    pub(crate) fn new(seed: u64, store: impl FnOnce(&Path) -> StoreUrl) -> Self {
        let folder = tempfile::Builder::new().prefix("doctor-kill-").tempdir().unwrap();
        let store = store(folder.path());
        let fixture = Self { folder, store };
        fs::create_dir(fixture.share()).unwrap();
        fs::write(fixture.path("policy.toml"), POLICY).unwrap();
        fs::write(fixture.path("world.toml"), toml::to_string(&fixture.world(seed)).unwrap()).unwrap();
        // A cycle is five simulated seconds, a few real milliseconds: the controller hardly ever idles. The lease lasts
        // for real seconds (`LEASE`), but the next controller detects that its holder is dead and does not wait.
        // All documents are compared with what is stored; half an hour has more simulated days than logs are kept by default.
        let service = format!(
            "store = \"{}\"\ndata = \"share\"\npolicy = \"policy.toml\"\ncycle = \"5s\"\npublish = \"10m\"\nlease = \"2h\"\n\
             workers = 4\n[retention]\nlogs = \"365d\"\n[backend.sim]\nsocket = \"sim.sock\"\n",
            fixture.store
        );
        fs::write(fixture.path("doctor.toml"), service).unwrap();
        fixture
    }

    /// Two pools with fault rates far above reality.
    fn world(&self, seed: u64) -> WorldConfig {
        let pool = |name, prefix| PoolConfig::new(name, 12, prefix).unwrap();
        let assumptions = Assumptions {
            hard_per_node_day: 3.0,
            gray_per_node_day: 3.0,
            sdc_per_node_day: 0.5,
            utilisation: 0.4,
            job_median: Span::minutes(30),
            job_longest: Span::hours(4),
            repair_median: Span::hours(1),
            repair_over_a_day: 0.01,
            repair_longest: Span::hours(6),
            ..Assumptions::default()
        };
        let calls = CallChances { refused: 0.03, unanswered: 0.03 };
        let hostile = Disruptions {
            submits: calls,
            changes: calls,
            cancels: calls,
            jobs: JobFault::ALL.iter().map(|fault| (*fault, 0.02)).collect(),
            outages_per_day: 6.0,
            outage: OUTAGE,
        };
        let world = WorldConfig {
            pools: vec![pool("left", "l"), pool("right", "r")],
            assumptions,
            disruptions: hostile,
            share: Some(self.share()),
            // Results come only through the share, as from real nodes.
            carry_documents: false,
            effects: Some(self.effects()),
            ..WorldConfig::default()
        };
        world.with_seed(seed)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn share(&self) -> PathBuf {
        self.path("share")
    }

    /// Returns the path of the cluster's record of effects.
    pub(crate) fn effects(&self) -> PathBuf {
        self.path("effects.jsonl")
    }

    pub(crate) fn open_store(&self) -> Store {
        Store::open(&self.store).unwrap()
    }

    pub(crate) fn start_cluster(&self) -> (Process, RemoteSim) {
        let (world, socket) = (self.path("world.toml"), self.path("sim.sock"));
        let mut command = self.doctor();
        command
            .args(["sim", "serve", "--speed", &SPEED.to_string(), "--world"])
            .arg(world)
            .arg("--socket")
            .arg(&socket);
        let process = Process::start("the cluster", &mut command, &self.path("sim.log"));
        let remote = RemoteSim::connect(&socket, WAIT_LIMIT).unwrap();
        (process, remote)
    }

    pub(crate) fn start_controller(&self) -> Process {
        Process::start("the controller", self.doctor().arg("serve"), &self.path("controllers.log"))
    }

    /// Runs an operator's command, which must succeed, and returns its output.
    pub(crate) fn run(&self, arguments: &[&str]) -> String {
        let output = self.doctor().args(arguments).output().unwrap();
        let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "doctor {}: {}\n{text}", arguments.join(" "), output.status);
        text
    }

    fn doctor(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_doctor"));
        command.env_remove("DOCTOR_STORE").env("DOCTOR_CONFIG", self.path("doctor.toml")).env("DOCTOR_LOG", "info");
        command.current_dir(self.folder.path()).stdin(Stdio::null());
        command
    }
}

impl Drop for Fixture {
    /// Keeps the directory of a failed test for analysis.
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.folder.disable_cleanup(true);
            println!("everything is kept in {}", self.folder.path().display());
        }
    }
}

/// A child process that is killed on drop.
pub(crate) struct Process {
    what: &'static str,
    child: Child,
    began: Instant,
    started: mpsc::Receiver<()>,
    log: PathBuf,
}

impl Process {
    /// Starts a process. Its log is appended to a file; one line says that it has started.
    fn start(what: &'static str, command: &mut Command, log: &Path) -> Self {
        let began = Instant::now();
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stderr.take().expect("stderr is piped"));
        let mut file = File::options().create(true).append(true).open(log).unwrap();
        let (sender, started) = mpsc::channel();
        std::thread::spawn(move || {
            for line in lines.lines().map_while(Result::ok) {
                // The receiver is gone if the process was killed early.
                let _logged = writeln!(file, "{line}").map(|()| line.contains(" started ").then(|| sender.send(())));
            }
        });
        Self { what, child, began, started, log: log.to_owned() }
    }

    /// Waits until the process logs that it has started, just before its first cycle. Returns how long that took.
    pub(crate) fn wait_until_started(&self) -> Duration {
        if self.started.recv_timeout(WAIT_LIMIT).is_err() {
            panic!("{} did not start:\n{}", self.what, self.log_tail());
        }
        self.began.elapsed()
    }

    /// Kills the process, which must still be running.
    pub(crate) fn kill(mut self) {
        if let Some(status) = self.child.try_wait().unwrap() {
            panic!("{} exited early ({status}):\n{}", self.what, self.log_tail());
        }
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Stops the process and waits for it. It must exit successfully.
    pub(crate) fn stop(mut self) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, Signal::TERM).unwrap();
        let status = self.wait();
        assert!(status.success(), "{} was asked to stop: {status}\n{}", self.what, self.log_tail());
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal to the process, which must still be running.
    pub(crate) fn signal(&mut self, signal: Signal) {
        if let Some(status) = self.child.try_wait().unwrap() {
            panic!("{} exited early ({status}):\n{}", self.what, self.log_tail());
        }
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    fn wait(&mut self) -> ExitStatus {
        let began = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(began.elapsed() < WAIT_LIMIT, "{} does not end:\n{}", self.what, self.log_tail());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub(crate) fn log_tail(&self) -> String {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().rev().take(20).collect();
        lines.into_iter().rev().collect::<Vec<_>>().join("\n")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have exited already.
        let _already_exited = self.child.kill();
        let _reaped = self.child.wait();
    }
}
