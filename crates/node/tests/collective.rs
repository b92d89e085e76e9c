//! `doctor-node test collective` from its command line to its verdict, with fake GPUs and a fake NCCL: ranks really
//! reduce, over sockets of this machine, and each planted fault is identified.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    net::TcpStream,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::OnceLock,
    time::{Duration, Instant},
};

use doctor_testbed::fake_machine::{FakeMachine, InstalledMachine, fake_nvidia_library};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

/// Timeout that distinguishes a hang from slowness, even on a busy machine.
const DEAD: Duration = Duration::from_secs(240);
const PROGRAM: &str = env!("CARGO_BIN_EXE_doctor-node");
const SECRET: &str = "a secret of the nodes of one job";

fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| fake_nvidia_library(Path::new(PROGRAM)))
}

/// A machine with fake GPUs, which are slower than any real ones.
struct Bench {
    folder: TempDir,
    /// The machine's files and its driver, if the test is about them.
    machine: Option<InstalledMachine>,
    /// Other files of the machine, without a driver.
    root: Option<PathBuf>,
}

impl Bench {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let metrics = ["nccl_busbw", "nccl_ib_loopback_busbw", "nccl_nodes_busbw"];
        let limits = metrics.iter().flat_map(|metric| ["floor", "profile"].map(|limit| (*metric, limit)));
        let rules = limits.map(|(metric, limit)| {
            format!(
                "[[rules]]\nid = \"collective-{metric}_bytes_per_s-{limit}\"\ncheck = \"collective\"\n\
                 metric = \"{metric}_bytes_per_s\"\nbelow = 1.0\nwhere_measured = true\nreason = \"collective-slow\"\n\
                 severity = \"monitor\"\ntext = \"{{value}}\"\n"
            )
        });
        // Messages take microseconds on a busy machine: only large deviations count as slow here.
        let link = "[[rules]]\nid = \"collective-link-slow\"\ncheck = \"collective\"\nmetric = \"nccl_link_percent_of_median\"\n\
                    below = 2.0\nwhere_measured = true\nreason = \"link-slow\"\nseverity = \"monitor\"\ntext = \"{value}\"\n";
        fs::write(folder.path().join("policy.toml"), rules.collect::<String>() + link).unwrap();
        Self { folder, machine: None, root: None }
    }

    fn on(machine: &FakeMachine) -> Self {
        Self { machine: Some(machine.install(Path::new(PROGRAM), library())), ..Self::new() }
    }

    fn command(&self, faults: &str, settings: &[&str]) -> Command {
        let mut command = Command::new(PROGRAM);
        command.args(["test", "collective", "--json", "--policy"]).arg(self.folder.path().join("policy.toml"));
        for setting in ["least=1024", "most=16KiB", "stall=30s"].iter().chain(settings) {
            command.args(["--set", setting]);
        }
        // A machine of its own: the load of this one must not excuse what is slow.
        match &self.machine {
            Some(machine) => {
                command.arg("--root").arg(machine.path("root")).arg("--nvml").arg(library());
                command.env("DOCTOR_FAKE_NVIDIA", machine.path("nvml.toml"));
            }
            None => drop(command.arg("--root").arg(self.root.as_deref().unwrap_or(self.folder.path()))),
        }
        command.env("DOCTOR_CUDA", library()).env("DOCTOR_NCCL", library());
        command.env("DOCTOR_FAKE_NVIDIA_GPUS", "2").env("DOCTOR_FAKE_NVIDIA_FAULTS", faults);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn run(&self, faults: &str, settings: &[&str]) -> TestResult {
        TestResult::of(&self.command(faults, settings).output().unwrap())
    }
}

/// The first row, and the program's exit code.
#[derive(Debug)]
struct TestResult {
    code: Option<i32>,
    /// `VERDICT REASON ENTITY`.
    row: String,
    text: String,
}

impl TestResult {
    fn of(output: &Output) -> Self {
        let rows: Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
        let field = |key: &str| rows[0][key].as_str().unwrap_or("-").to_owned();
        let row = ["verdict", "reason", "entity"].map(field).join(" ");
        Self { code: output.status.code(), row, text: field("text") }
    }

    fn assert_row(&self, code: i32, row: &str, expected_text: &str) {
        assert_eq!((self.code, self.row.as_str()), (Some(code), row), "{self:?}");
        assert!(self.text.contains(expected_text), "{expected_text}: {self:?}");
    }
}

#[test]
fn without_a_driver_the_test_is_inconclusive_and_without_a_gpu_or_nccl_not_applicable() {
    // What is on the PCI bus decides whether a GPU is missing or its driver.
    let with_gpus = FakeMachine::hgx_h100().install(Path::new(PROGRAM), library());
    let without = tempfile::tempdir().unwrap();
    let missing = |root: &Path, variable, library| {
        let bench = Bench { root: Some(root.to_owned()), ..Bench::new() };
        TestResult::of(&bench.command("", &[]).env(variable, library).output().unwrap())
    };
    let with_gpus = with_gpus.path("root");
    missing(&with_gpus, "DOCTOR_CUDA", "libcuda-missing.so").assert_row(
        3,
        "inconclusive missing node",
        "libcuda-missing.so cannot be loaded",
    );
    missing(&with_gpus, "DOCTOR_NCCL", "libnccl-missing.so").assert_row(
        3,
        "not-applicable no-nccl node",
        "NCCL (libnccl-missing.so)",
    );
    missing(&with_gpus, "DOCTOR_FAKE_NVIDIA_GPUS", "0").assert_row(3, "inconclusive missing node", "sees no GPU");
    missing(&with_gpus, "DOCTOR_FAKE_NVIDIA_GPUS", "1").assert_row(3, "not-applicable one-gpu node", "one GPU");
    missing(without.path(), "DOCTOR_CUDA", "libcuda-missing.so").assert_row(
        3,
        "not-applicable no-gpu node",
        "no NVIDIA GPU",
    );
}

#[test]
fn correct_sums_over_the_expected_transport_pass_in_the_node_and_in_loopback() {
    let bench = Bench::new();
    bench.run("", &[]).assert_row(0, "pass within-limits node", "");
    bench.run("", &["mode=loopback"]).assert_row(0, "pass within-limits node", "");
    let mut many = bench.command("", &["mode=loopback"]);
    TestResult::of(&many.env("DOCTOR_FAKE_NVIDIA_GPUS", "5").output().unwrap()).assert_row(
        0,
        "pass within-limits node",
        "",
    );
    // The site's environment does not change the test's transport.
    let mut forbidden = bench.command("", &[]);
    forbidden.env("NCCL_P2P_DISABLE", "1").env("NCCL_COMM_ID", "10.0.0.1:1").env("NCCL_DEBUG", "WARN");
    TestResult::of(&forbidden.output().unwrap()).assert_row(0, "pass within-limits node", "");
}

#[test]
fn every_injected_fault_is_identified() {
    let bench = Bench::new();
    let first = "gpu:0000:18:00.0";
    let second = "gpu:0000:28:00.0";
    for (faults, code, row, expected_text) in [
        ("zero:1:5", 2, format!("fail collective-wrong {second}"), "got 0, expected"),
        ("element:0:3", 2, format!("fail collective-wrong {first}"), "index 3 of a message of 1024 bytes"),
        ("share:1:4095", 2, format!("fail collective-wrong {second}"), "the contribution of rank 1"),
        ("ecc:0", 2, format!("fail gpu-failed {first}"), "CUDA_ERROR_ECC_UNCORRECTABLE"),
        ("crash:1", 3, "inconclusive failed node".to_owned(), "killed by signal 6"),
        ("blind", 3, "inconclusive failed node".to_owned(), "does not detect planted errors"),
        ("mute", 3, "inconclusive failed node".to_owned(), "lists no connection"),
    ] {
        bench.run(faults, &[]).assert_row(code, &row, expected_text);
    }
    bench.run("hang:1", &["stall=1s"]).assert_row(1, "fail collective-hung node", "did not complete within 1s");
}

#[test]
fn a_rank_that_sends_slowly_is_reported_as_a_slow_link() {
    let bench = Bench::new();
    let mut command = bench.command("drag:2:200", &["most=1024"]);
    let results = TestResult::of(&command.env("DOCTOR_FAKE_NVIDIA_GPUS", "4").output().unwrap());
    results.assert_row(1, "fail link-slow link:0000:38:00.0-0000:48:00.0", "");
    // Of three nodes with two GPUs each, rank 3 sends to the third node.
    let results = Job::of(&bench, 3).run("drag:3:200", &["most=1024"]);
    results[0].assert_row(0, "pass within-limits node", "");
    assert!(results[1].row.starts_with("fail link-slow link:0000:28:00.0-"), "{results:?}");
    results[2].assert_row(0, "pass within-limits node", "");
}

#[test]
fn a_transport_fallback_is_inconclusive_and_gives_no_measurement() {
    let bench = Bench::new();
    for (faults, mode, expected_text) in [
        ("socket", "mode=loopback", "8 of 8 connections did not go through the network IB: 8 through sockets"),
        ("shm", "mode=loopback", "through the host's memory"),
        ("peer", "mode=loopback", "from GPU to GPU"),
        ("no-net", "mode=loopback", "NCCL warned: Error: network IB not found."),
        ("shm", "mode=nvlink", "through the host's memory"),
        ("socket", "mode=nvlink", "through sockets"),
    ] {
        bench.run(faults, &[mode]).assert_row(3, "inconclusive failed node", expected_text);
    }
    // So slow that it seems to hang, which is then no finding.
    let slow = bench.run("socket hang:1", &["mode=loopback", "stall=1s"]);
    slow.assert_row(3, "inconclusive failed node", "8 through sockets");
    // It ends after the first size: the others would be meaningless.
    let ends_early = || {
        let started = Instant::now();
        let slow = bench.run("socket slow:1:20", &["mode=loopback", "least=16"]);
        slow.assert_row(3, "inconclusive failed node", "8 through sockets");
        started.elapsed() < Duration::from_secs(5)
    };
    // A busy machine may miss the limit once or twice; six sizes miss it every time.
    assert!((0..5).any(|_| ends_early()), "six sizes take {:?}", Duration::from_millis(6 * 52 * 20));
    bench.run("shm", &["shared_memory=true"]).assert_row(0, "pass within-limits node", "");
    bench.run("", &["mode=loopback", "net=AWS Libfabric"]).assert_row(0, "pass within-limits node", "");
}

/// A machine with a process of a user, and a monitoring process, neither of which uses a GPU.
fn machine_with_user() -> FakeMachine {
    let stat = |pid: u32, name: &str| {
        format!("{pid} ({name}) S 1 900 900 0 -1 4194560 1 0 0 0 1 2 3 4 20 0 1 0 1000 3149824 384")
    };
    FakeMachine::hgx_h100()
        .with_new("/etc/passwd", "root:x:0:0::/root:/bin/sh\nann:x:1000:1000::/home/ann:/bin/sh\n")
        .with_new("/proc/4711/stat", &stat(4711, "python3"))
        .with_new("/proc/4711/status", "Name:\tpython3\nUid:\t1000\t1000\t1000\t1000\n")
        .with_new("/proc/4711/cgroup", "0::/system.slice/slurmstepd.scope/job_17/step_0/user/task_0\n")
        .with_new("/proc/800/stat", &stat(800, "nv-hostengine"))
}

/// Lets a process use a GPU: bytes of its memory and percent of its time.
fn used(machine: FakeMachine, gpu: usize, pid: f64, bytes: f64, percent: f64) -> FakeMachine {
    machine.gpu(gpu, "process.0.pid", pid).gpu(gpu, "process.0.memory", bytes).gpu(
        gpu,
        "process.0.utilization",
        percent,
    )
}

const ANN: &str = "python3 (pid 4711, user ann, Slurm job 17) used gpu:0000:28:00.0; rates measured meanwhile";

#[test]
fn another_process_on_a_gpu_makes_the_result_inconclusive_and_monitoring_does_not() {
    let alone = Bench::on(&machine_with_user());
    alone.run("", &[]).assert_row(0, "pass within-limits node", "");
    let monitored = Bench::on(&used(machine_with_user(), 1, 800.0, 0.0, 1.0));
    monitored.run("", &[]).assert_row(0, "pass within-limits node", "");
    let busy = Bench::on(&used(machine_with_user(), 1, 4711.0, 3e9, 98.0));
    busy.run("", &[]).assert_row(3, "inconclusive disturbed node", ANN);
    // Only GPUs 0 and 1 take part.
    let elsewhere = Bench::on(&used(machine_with_user(), 5, 4711.0, 3e9, 98.0));
    elsewhere.run("", &[]).assert_row(0, "pass within-limits node", "");
    // The cause of what keeps the test from running is named, too.
    let mut missing = busy.command("", &[]);
    let missing = TestResult::of(&missing.env("DOCTOR_NCCL", "libnccl-missing.so").output().unwrap());
    missing.assert_row(3, "inconclusive disturbed node", "python3 (pid 4711");
}

#[test]
fn a_wrong_sum_is_a_finding_also_beside_another_process() {
    let busy = Bench::on(&used(machine_with_user(), 1, 4711.0, 3e9, 98.0));
    busy.run("zero:1:5", &[]).assert_row(2, "fail collective-wrong gpu:0000:28:00.0", "got 0, expected");
}

#[test]
fn a_process_that_starts_during_the_test_disturbs_every_node_of_it() {
    let bench = Bench::on(&machine_with_user());
    let machine = bench.machine.as_ref().unwrap();
    let job = Job::of(&bench, 2);
    let mut first = job.command(0, "", &[]).arg("--echo").spawn().unwrap();
    let log = BufReader::new(first.stderr.take().unwrap());
    // It listens after its first look at the GPUs.
    let started = Instant::now();
    while TcpStream::connect(&job.address).is_err() {
        assert!(started.elapsed() < DEAD, "the first node does not listen");
        std::thread::sleep(Duration::from_millis(20));
    }
    machine.set_driver(&used(machine_with_user(), 1, 4711.0, 3e9, 98.0));
    let mut lines = log.lines().map(Result::unwrap);
    let seen = lines.find(|line| line.starts_with("disturbed: gpu:0000:28:00.0")).unwrap();
    assert!(seen.ends_with("98 % of its time, during the test"), "{seen}");
    machine.set_driver(&machine_with_user());
    let second = job.start(1, "", &[]);
    let rest = std::thread::spawn(move || lines.for_each(drop));
    wait_for_result(first).assert_row(3, "inconclusive disturbed node", "python3 (pid 4711, user ann");
    wait_for_result(second).assert_row(3, "inconclusive disturbed node", "python3 (pid 4711, user ann");
    rest.join().unwrap();
}

/// A multi-node job, with all nodes on this machine.
struct Job<'a> {
    bench: &'a Bench,
    nodes: usize,
    address: String,
}

impl<'a> Job<'a> {
    fn of(bench: &'a Bench, nodes: usize) -> Self {
        let port = doctor_testbed::ports::reserve_one().unwrap();
        Self { bench, nodes, address: format!("127.0.0.1:{port}") }
    }

    fn command(&self, rank: usize, faults: &str, settings: &[&str]) -> Command {
        let mut command = self.bench.command(faults, &[&["mode=nodes"][..], settings].concat());
        command.env("DOCTOR_RENDEZVOUS", &self.address).env("DOCTOR_NODES", self.nodes.to_string());
        command.env("DOCTOR_RANK", rank.to_string()).env("DOCTOR_RENDEZVOUS_SECRET", SECRET);
        command.env("DOCTOR_FAKE_NVIDIA_NODE", rank.to_string());
        command
    }

    fn start(&self, rank: usize, faults: &str, settings: &[&str]) -> Child {
        self.command(rank, faults, settings).spawn().unwrap()
    }

    /// Starts the nodes in reverse order: the first may be the last to start.
    fn run(&self, faults: &str, settings: &[&str]) -> Vec<TestResult> {
        let children: Vec<_> = (0..self.nodes).rev().map(|rank| self.start(rank, faults, settings)).collect();
        children.into_iter().rev().map(wait_for_result).collect()
    }
}

fn wait_for_result(child: Child) -> TestResult {
    TestResult::of(&child.wait_with_output().unwrap())
}

#[test]
fn nodes_reduce_together_and_each_has_its_own_verdict() {
    let bench = Bench::new();
    for result in Job::of(&bench, 3).run("", &[]) {
        result.assert_row(0, "pass within-limits node", "");
    }
    // Peer access within a node and sockets between nodes: a fallback, whichever node it is on.
    for result in Job::of(&bench, 2).run("socket", &[]) {
        result.assert_row(3, "inconclusive failed node", "through sockets (NET/Socket)");
    }
}

#[test]
fn srun_and_an_indexed_job_each_set_the_rank() {
    let bench = Bench::new();
    let job = Job::of(&bench, 2);
    let mut slurm = job.command(1, "", &[]);
    slurm.env_remove("DOCTOR_RANK").env_remove("DOCTOR_NODES");
    slurm.env("SLURM_PROCID", "1").env("SLURM_NTASKS", "2").env("SLURM_STEP_NODELIST", "localhost");
    let mut indexed = job.command(0, "", &[]);
    indexed.env_remove("DOCTOR_RANK").env("JOB_COMPLETION_INDEX", "0");
    for child in [slurm.spawn().unwrap(), indexed.spawn().unwrap()] {
        wait_for_result(child).assert_row(0, "pass within-limits node", "");
    }
    let mut without_rank = bench.command("", &["mode=nodes"]);
    TestResult::of(&without_rank.output().unwrap()).assert_row(3, "inconclusive failed node", "DOCTOR_RANK");
}

#[test]
fn a_node_that_never_joins_is_named_on_all_others() {
    let bench = Bench::new();
    let job = Job::of(&bench, 3);
    let settings = ["gather=4s", "names=gpu[07-09]"];
    let (first, last) = (job.start(0, "", &settings), job.start(2, "", &settings));
    wait_for_result(first).assert_row(
        3,
        "inconclusive timed-out node",
        "rank 1 (gpu08) did not join within 4s; 2 of 3 nodes joined",
    );
    wait_for_result(last).assert_row(3, "inconclusive failed node", "rank 1 (gpu08) did not join within 4s");
    let unaccompanied = Job::of(&bench, 2).start(1, "", &["gather=1s"]);
    wait_for_result(unaccompanied).assert_row(3, "inconclusive timed-out node", "was not reached within 1s");
}

#[test]
fn a_node_with_another_secret_or_of_another_job_is_rejected() {
    let bench = Bench::new();
    let job = Job::of(&bench, 2);
    let mut unauthenticated = job.command(1, "", &["gather=2s"]);
    let unauthenticated =
        unauthenticated.env("DOCTOR_RENDEZVOUS_SECRET", "not the secret of this job").spawn().unwrap();
    let first = job.start(0, "", &["gather=5s"]);
    wait_for_result(unauthenticated).assert_row(
        3,
        "inconclusive timed-out node",
        "is the secret the same on both nodes?",
    );
    wait_for_result(first).assert_row(3, "inconclusive timed-out node", "rank 1 did not join");
    let job = Job::of(&bench, 2);
    let mut other_job = job.command(1, "", &[]);
    let (other_job, first) = (other_job.env("DOCTOR_NODES", "3").spawn().unwrap(), job.start(0, "", &["gather=5s"]));
    wait_for_result(other_job).assert_row(3, "inconclusive failed node", "expects 2 nodes, this node expects 3");
    wait_for_result(first).assert_row(3, "inconclusive timed-out node", "rank 1 did not join");
}

#[test]
fn a_fault_is_reported_on_its_own_node_only() {
    let bench = Bench::new();
    // Ranks 2 and 3 belong to the second node.
    let results = Job::of(&bench, 2).run("share:3:7", &[]);
    results[0].assert_row(3, "inconclusive failed node", "the contribution of rank 3 is missing, on node");
    results[1].assert_row(2, "fail collective-wrong gpu:0000:28:00.0", "the contribution of rank 3");
    let results = Job::of(&bench, 2).run("zero:2:7", &[]);
    results[0].assert_row(0, "pass within-limits node", "");
    results[1].assert_row(2, "fail collective-wrong gpu:0000:18:00.0", "1 of 4 GPUs");
    let results = Job::of(&bench, 2).run("crash:2", &[]);
    results[0].assert_row(3, "inconclusive failed node", "GPU 0000:18:00.0: its worker was killed by signal 6");
    assert_eq!(results[1].row, "inconclusive failed node");
    let results = Job::of(&bench, 2).run("hang:2", &["stall=1s"]);
    results[0].assert_row(1, "fail collective-hung node", "did not complete within 1s");
}

#[test]
fn a_node_that_dies_is_named_on_the_others() {
    let bench = Bench::new();
    let job = Job::of(&bench, 2);
    let (first, mut second) = (job.start(0, "slow:0:20", &[]), job.start(1, "slow:0:20", &[]));
    let started = Instant::now();
    // Its worker exists once it has joined.
    while workers_of(second.id()).is_empty() && started.elapsed() < Duration::from_secs(120) {
        std::thread::sleep(Duration::from_millis(5));
    }
    let workers = workers_of(second.id());
    assert!(!workers.is_empty(), "it had begun");
    second.kill().unwrap();
    second.wait().unwrap();
    wait_for_result(first).assert_row(3, "inconclusive failed node", "rank 1 (");
    let workers_ended =
        || workers.iter().all(|pid| !Path::new(&format!("/proc/{pid}/cmdline")).exists() || has_exited(*pid));
    while !workers_ended() && started.elapsed() < DEAD {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(workers_ended(), "what it had started is gone with it");
}

#[test]
fn the_other_nodes_end_as_soon_as_the_first_one_is_lost() {
    let bench = Bench::new();
    let job = Job::of(&bench, 2);
    let (mut first, second) = (job.start(0, "hang:1", &["stall=10m"]), job.start(1, "hang:1", &["stall=10m"]));
    let started = Instant::now();
    while workers_of(second.id()).is_empty() && started.elapsed() < Duration::from_secs(120) {
        std::thread::sleep(Duration::from_millis(5));
    }
    first.kill().unwrap();
    first.wait().unwrap();
    let killed = Instant::now();
    wait_for_result(second).assert_row(3, "inconclusive failed node", "lost the connection to the first node");
    assert!(killed.elapsed() < DEAD, "{:?}", killed.elapsed());
}

/// Descendants of this process that are a test's worker.
fn workers_of(root: u32) -> Vec<u32> {
    let stat = |pid: u32| fs::read_to_string(format!("/proc/{pid}/stat")).ok();
    let parent = |pid: u32| stat(pid)?.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse::<u32>().ok();
    let below = |mut pid: u32| {
        while let Some(above) = parent(pid).filter(|above| *above > 1) {
            if above == root {
                return true;
            }
            pid = above;
        }
        false
    };
    let all = fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let is_worker = |pid: &u32| {
        fs::read(format!("/proc/{pid}/cmdline"))
            .is_ok_and(|line| line.windows(15).any(|part| part == b"collective-work"))
    };
    all.filter(is_worker).filter(|pid| below(*pid)).collect()
}

fn has_exited(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_none_or(|(_, rest)| rest.trim_start().starts_with('Z'))
}

#[test]
fn on_sigterm_the_test_and_its_workers_end_at_once() {
    let bench = Bench::new();
    let child = bench.command("hang:0", &["stall=10m"]).spawn().unwrap();
    let started = Instant::now();
    while workers_of(child.id()).is_empty() && started.elapsed() < Duration::from_secs(120) {
        std::thread::sleep(Duration::from_millis(5));
    }
    let workers = workers_of(child.id());
    assert!(!workers.is_empty(), "it had begun");
    kill_process(Pid::from_raw(child.id().cast_signed()).unwrap(), Signal::TERM).unwrap();
    let signalled = Instant::now();
    let output = child.wait_with_output().unwrap();
    assert!(signalled.elapsed() < DEAD, "{:?}", signalled.elapsed());
    assert_ne!(output.status.code(), Some(0), "{output:?}");
    while !workers.iter().all(|pid| has_exited(*pid)) && signalled.elapsed() < DEAD {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(workers.iter().all(|pid| has_exited(*pid)));
}

/// Runs a fake of NVIDIA's program.
fn nccl_tests(bench: &Bench, script: &str, settings: &[&str]) -> TestResult {
    let program = bench.folder.path().join("all_reduce_perf");
    fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let named = format!("nccl_tests=[\"{}\"]", program.display());
    bench.run("", &[&[named.as_str()][..], settings].concat())
}

#[test]
fn nccl_tests_runs_instead_if_the_site_configures_it() {
    let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/../checks/fixtures");
    let bench = Bench::new();
    let peers = format!("cat {fixtures}/nccl-log/2.21-peer.log >&2");
    for table in ["2.13-by-hand.txt", "2.10-by-hand.txt", "2.17-by-hand.json"] {
        let result = nccl_tests(&bench, &format!("{peers}; cat {fixtures}/nccl-tests/{table}"), &[]);
        result.assert_row(0, "pass within-limits node", "");
    }
    // The expected arguments: the sizes, verification, all GPUs.
    let with_expected_args = format!(
        "[ \"$*\" = '-b 1024 -e 16384 -f 4 -c 1 -g 2' ] && {peers} && cat {fixtures}/nccl-tests/2.13-by-hand.txt"
    );
    nccl_tests(&bench, &with_expected_args, &[]).assert_row(0, "pass within-limits node", "");
    let wrong_sums = format!("{peers}; cat {fixtures}/nccl-tests/wrong-by-hand.txt; exit 1");
    nccl_tests(&bench, &wrong_sums, &[]).assert_row(2, "fail collective-wrong node", "12 wrong elements");
    let through =
        |log: &str| format!("cat {fixtures}/nccl-log/{log} {fixtures}/nccl-tests/2.13-by-hand.txt | grep -v P2P");
    nccl_tests(&bench, &through("2.28-loopback.log"), &["mode=loopback"]).assert_row(0, "pass within-limits node", "");
    let sockets = nccl_tests(&bench, &through("2.28-socket.log"), &["mode=loopback"]);
    sockets.assert_row(3, "inconclusive failed node", "through sockets");
    nccl_tests(&bench, "echo 'no CUDA-capable device' >&2; exit 3", &[]).assert_row(
        3,
        "inconclusive failed node",
        "exit code 3",
    );
    nccl_tests(&bench, "exit 0", &[]).assert_row(3, "inconclusive failed node", "not the output of all_reduce_perf");
}
