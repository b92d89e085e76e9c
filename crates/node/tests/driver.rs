//! A hung driver: every command answers in time and names the GPU, and no process is left behind. No command waits for
//! a helper that cannot be killed, and there are never more than two of them.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Arc, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
    time::{Duration, Instant},
};

use doctor_checks::{
    credential::Credential,
    document::RunKey,
    gpu::GpuQueryResult,
    probe::{Probe, ProbeOutput},
    proc_stat::ProcStat,
};
use doctor_core::{
    ids::NodeName,
    observation::{FailureKind, ProbeFailure},
};
use doctor_node::{
    runner::{DRIVER_ARGUMENT, DriverHelper, LocalRunner, ProbeRunner},
    stop::Stop,
};
use doctor_testbed::fake_machine::{FakeMachine, GPUS, InstalledMachine, fake_nvidia_library, gpu_bus};
use rustix::process::{Pid, Signal, kill_process};

const PROGRAM: &str = env!("CARGO_BIN_EXE_doctor-node");
/// The driver's default limit, doubled for a slow machine.
const IN_TIME: Duration = Duration::from_secs(60);
/// For a driver that never answers: long enough for any machine to reach the GPU that hangs.
const HANGS: Duration = Duration::from_secs(4);
const LOADED: &str = "/proc/driver/nvidia/gpus/0000:18:00.0/information";
const GPU_3: &str = "while querying GPU 3 (0000:48:00.0)";

fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| fake_nvidia_library(Path::new(PROGRAM)))
}

fn install(machine: &FakeMachine) -> InstalledMachine {
    machine.install(Path::new(PROGRAM), library())
}

fn hangs_on_gpu_3() -> FakeMachine {
    FakeMachine::hgx_h100().with_new(LOADED, "GPU UUID: \t GPU-aaaa\n").gpu_hangs(3)
}

#[track_caller]
fn wait_until(what: &str, reached: impl Fn() -> bool) {
    let started = Instant::now();
    while !reached() {
        assert!(started.elapsed() < IN_TIME, "timed out waiting for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn proc_stat(pid: u32) -> Option<ProcStat> {
    ProcStat::parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// Live helpers that query the driver of this machine.
fn helpers(machine: &InstalledMachine) -> BTreeSet<u32> {
    let root = machine.path("root").display().to_string();
    let is_helper = |pid: &u32| {
        let args = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let mut args = args.split(|byte| *byte == 0);
        args.clone().any(|arg| arg == DRIVER_ARGUMENT.as_bytes()) && args.any(|arg| arg == root.as_bytes())
    };
    let pids = fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(is_helper).filter(|pid| proc_stat(*pid).is_some_and(|stat| !stat.has_exited())).collect()
}

/// Processes of this program that have this machine in their arguments.
fn processes(machine: &InstalledMachine) -> Vec<String> {
    let directory = machine.path("").display().to_string();
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let command_line = entries.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
    let command_line = command_line.map(|command_line| String::from_utf8_lossy(&command_line).replace('\0', " "));
    command_line
        .filter(|command_line| command_line.contains(&directory) && command_line.contains("doctor-node"))
        .collect()
}

fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), signal).unwrap();
}

/// A process that is killed at the end of the test.
struct RunningCommand(Child);

impl RunningCommand {
    fn new(command: &mut Command) -> Self {
        Self(command.stdin(Stdio::null()).spawn().unwrap())
    }

    /// Waits for its exit, and returns the time since `started`.
    #[track_caller]
    fn wait_for_exit(mut self, started: Instant) -> (Option<i32>, Duration) {
        let mut status = None;
        while status.is_none() {
            assert!(started.elapsed() < IN_TIME, "it does not end");
            std::thread::sleep(Duration::from_millis(10));
            status = self.0.try_wait().unwrap();
        }
        (status.unwrap().code(), started.elapsed())
    }
}

impl Drop for RunningCommand {
    fn drop(&mut self) {
        let _ended = self.0.kill().and_then(|()| self.0.wait());
    }
}

fn to_file(command: &mut Command, path: &Path) -> RunningCommand {
    let file = fs::File::create(path).unwrap();
    RunningCommand::new(command.stdout(file.try_clone().unwrap()).stderr(file))
}

fn hook(machine: &InstalledMachine, kind: &str, state: &str) -> Command {
    let settings = format!(
        "standalone = true\nstate = {:?}\nroot = {:?}\nnvml = {:?}\npolicy = {:?}\n",
        machine.path(state),
        machine.path("root"),
        library(),
        machine.path("policy.toml")
    );
    let config = machine.path(&format!("{state}.toml"));
    fs::write(&config, settings).unwrap();
    let mut command = Command::new(PROGRAM);
    command.args(["hook", kind, "--config"]).arg(config).env("DOCTOR_FAKE_NVIDIA", machine.path("nvml.toml"));
    command
}

fn job(machine: &InstalledMachine) -> Command {
    let mut command = Command::new(PROGRAM);
    command.args(["job", "--run", "r0000000000007", "--node", "n1", "--tests", "gpu-driver"]);
    command.arg("--log").arg(machine.path("job.log")).arg("--document").arg(machine.path("document"));
    command.arg("--root").arg(machine.path("root")).arg("--nvml").arg(library());
    command.arg("--state").arg(machine.path("job-state")).arg("--policy").arg(machine.path("policy.toml"));
    command.env("DOCTOR_FAKE_NVIDIA", machine.path("nvml.toml")).env("DOCTOR_RUN_KEY", "ab".repeat(32));
    command
}

fn agent(machine: &InstalledMachine) -> Command {
    let credential = Credential {
        node: NodeName::new("n1").unwrap(),
        key: RunKey::new([1; 32]),
        controller: Some("http://127.0.0.1:9".to_owned()),
    };
    let mut command = machine.agent(&credential.text());
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command
}

/// One machine with all four commands in parallel: it takes as long as the slowest.
#[test]
fn every_command_names_a_hung_gpu_and_ends_in_time() {
    let machine = install(&hangs_on_gpu_3());
    let started = Instant::now();
    let check = to_file(&mut machine.fast(), &machine.path("check.json"));
    let job = to_file(&mut job(&machine), &machine.path("job.out"));
    let agent = RunningCommand::new(&mut agent(&machine));
    let hooks = [("health", Duration::from_secs(8)), ("prolog", Duration::from_secs(5))];
    let hooks = hooks.map(|(kind, limit)| {
        let started = Instant::now();
        (kind, limit, started, to_file(&mut hook(&machine, kind, kind), &machine.path(&format!("{kind}.out"))))
    });

    for (kind, limit, started, hook) in hooks {
        let (code, elapsed) = hook.wait_for_exit(started);
        assert_eq!(code, Some(0), "{kind}");
        assert!(elapsed < limit + Duration::from_secs(3), "{kind} took {elapsed:?}");
        let output = fs::read_to_string(machine.path(kind).join("hook.log")).unwrap();
        assert!(output.contains(" inconclusive (") && output.contains(GPU_3), "{output}");
    }
    let (code, _) = check.wait_for_exit(started);
    let output = fs::read_to_string(machine.path("check.json")).unwrap();
    assert_eq!(code, Some(2), "{output}");
    let rows: Vec<serde_json::Value> = serde_json::from_str(&output).unwrap();
    let driver = rows.iter().find(|row| row["check"] == "gpu-driver").unwrap();
    assert_eq!((&driver["verdict"], &driver["reason"]), (&"fail".into(), &"driver-hung".into()), "{driver}");
    assert!(driver["text"].as_str().unwrap().contains(GPU_3), "{driver}");
    let healthy =
        rows.iter().filter(|row| row["check"].as_str().unwrap().starts_with("gpu-") && row["verdict"] == "pass");
    let by_bus_or_log: Vec<_> = healthy.map(|row| row["check"].as_str().unwrap()).collect();
    assert!(
        !by_bus_or_log.contains(&"gpu-temperature") && !by_bus_or_log.contains(&"gpu-presence"),
        "{by_bus_or_log:?}"
    );

    let (code, _) = job.wait_for_exit(started);
    assert_eq!(code, Some(0));
    let log = fs::read_to_string(machine.path("job.log")).unwrap();
    assert!(log.contains("timed-out") && log.contains(GPU_3), "{log}");

    let verdict = || fs::read_to_string(machine.path("agent-state/verdict.json")).unwrap_or_default();
    wait_until("the agent's verdict", || verdict().contains("driver-hung"));
    assert!(verdict().contains(GPU_3), "{}", verdict());
    signal(agent.0.id(), Signal::TERM);
    assert_eq!(agent.wait_for_exit(started).0, Some(0));
    wait_until("all processes to be gone", || processes(&machine).is_empty());
}

#[test]
fn a_driver_that_hangs_on_open_is_reported_as_timed_out() {
    let machine = install(&FakeMachine::hgx_h100().driver_hangs("nvmlInitWithFlags"));
    let bench = Bench::new(&machine);
    let failure = bench.query_fails(&["uuid"]);
    assert_eq!(failure.kind, FailureKind::TimedOut);
    assert!(failure.text.contains("no answer within 4s while opening the driver"), "{failure:?}");
    assert!(helpers(&machine).is_empty());
}

/// The processes that cannot be killed are known to the whole process: the test that creates some runs while no other test
/// queries the driver.
static STUCK: RwLock<()> = RwLock::new(());

enum StuckLock {
    Shared { _turn: RwLockReadGuard<'static, ()> },
    Exclusive { _turn: RwLockWriteGuard<'static, ()> },
}

/// A runner in this process. An environment variable names the fixture file, and all tests of this process share it.
struct Bench<'a> {
    _turn: StuckLock,
    machine: &'a InstalledMachine,
    state: tempfile::TempDir,
    stop: Stop,
    helper: Arc<DriverHelper>,
    program: PathBuf,
}

impl<'a> Bench<'a> {
    fn new(machine: &'a InstalledMachine) -> Self {
        Self::at(StuckLock::Shared { _turn: STUCK.read().unwrap_or_else(PoisonError::into_inner) }, machine)
    }

    fn exclusive(machine: &'a InstalledMachine) -> Self {
        Self::at(StuckLock::Exclusive { _turn: STUCK.write().unwrap_or_else(PoisonError::into_inner) }, machine)
    }

    fn at(turn: StuckLock, machine: &'a InstalledMachine) -> Self {
        let program = machine.path("helper");
        let text =
            format!("#!/bin/sh\nDOCTOR_FAKE_NVIDIA={} exec {PROGRAM} \"$@\"\n", machine.path("nvml.toml").display());
        fs::write(&program, text).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let state = tempfile::tempdir().unwrap();
        Self { _turn: turn, machine, state, stop: Stop::never(), helper: Arc::default(), program }
    }

    fn query(&self, fields: &[&str], limit: Duration) -> ProbeOutput {
        let runner = LocalRunner::new(self.machine.path("root"), &self.stop).helper(&self.program).library(library());
        let runner = runner.state(Some(self.state.path())).driver_helper(&self.helper).driver_limit(limit);
        let probe = Probe::gpu(fields);
        runner.prepare(std::slice::from_ref(&probe));
        runner.run(&probe)
    }

    #[track_caller]
    fn query_ok(&self, fields: &[&str]) -> GpuQueryResult {
        match self.query(fields, IN_TIME) {
            ProbeOutput::Gpus(result) => result,
            other => panic!("{other:?}"),
        }
    }

    #[track_caller]
    fn query_fails(&self, fields: &[&str]) -> ProbeFailure {
        match self.query(fields, HANGS) {
            ProbeOutput::Failed(failure) => failure,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn one_helper_serves_all_queries_and_keeps_no_device_open_between_them() {
    let machine = install(&FakeMachine::hgx_h100());
    let bench = Bench::new(&machine);
    let answer = bench.query_ok(&["uuid", "p2p.*.nvlink", "temperature.gpu"]);
    assert_eq!(answer.gpus.len(), GPUS);
    let names: Vec<&str> = answer.gpus[1].fields.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!((names.len(), names[0], names[1], names[8]), (9, "uuid", "p2p.0.nvlink", "temperature.gpu"));
    let first = helpers(&machine);
    assert_eq!(first.len(), 1, "{first:?}");
    assert_eq!(bench.query_ok(&["serial"]).gpus[3].bus, gpu_bus(3));
    assert_eq!(helpers(&machine), first, "it is the same one");

    let pid = *first.first().unwrap();
    let folder = format!("/proc/{pid}/fd");
    for entry in fs::read_dir(&folder).unwrap().flatten() {
        // After an answer it counts its own descriptors, and closes the folder again.
        let Ok(to) = fs::read_link(entry.path()) else { continue };
        let is_harmless = to == Path::new("/dev/null") || to == Path::new(&folder);
        assert!(is_harmless || to.to_string_lossy().starts_with("pipe:"), "{}", to.display());
    }
    // An error of a driver that was not replaced under the helper is returned as it is, and the next query gets a new
    // answer.
    machine.replace(&FakeMachine::hgx_h100().driver_fails(9));
    assert_eq!(bench.query_ok(&["uuid"]).driver.unwrap_err().kind, FailureKind::Missing);
    machine.replace(&FakeMachine::hgx_h100());
    assert!(bench.query_ok(&["uuid"]).driver.is_ok());

    signal(pid, Signal::KILL);
    assert_eq!(bench.query_ok(&["uuid"]).gpus.len(), GPUS, "another one answers");
    assert!(!helpers(&machine).contains(&pid));
    drop(bench);
    assert!(helpers(&machine).is_empty(), "it ends with its owner");
}

#[test]
fn a_helper_that_leaks_descriptors_is_replaced_before_it_runs_out() {
    let machine = install(&FakeMachine::hgx_h100().driver_loses_descriptors(40));
    let bench = Bench::new(&machine);
    assert_eq!(bench.query_ok(&["uuid"]).gpus.len(), GPUS);
    let first = helpers(&machine);
    let mut all = first.clone();
    for _ in 0..6 {
        assert_eq!(bench.query_ok(&["uuid"]).gpus.len(), GPUS, "every question is answered");
        all.extend(helpers(&machine));
    }
    assert!(!helpers(&machine).is_superset(&first), "the first one has ended");
    assert!(all.len() >= 3 && helpers(&machine).len() <= 1, "{all:?}");
}

#[test]
fn a_hung_helper_is_replaced_and_every_query_names_the_hung_gpu() {
    let machine = install(&hangs_on_gpu_3());
    let bench = Bench::new(&machine);
    for fields in [&["uuid"][..], &["p2p.*.nvlink"], &["topology.*.level", "uuid"]] {
        let failure = bench.query_fails(fields);
        assert_eq!(failure.kind, FailureKind::TimedOut);
        assert!(failure.text.contains(GPU_3) && failure.text.contains("was killed"), "{failure:?}");
        assert!(helpers(&machine).is_empty());
    }
    machine.replace(&FakeMachine::hgx_h100());
    assert_eq!(bench.query_ok(&["uuid"]).gpus.len(), GPUS, "it answers again");
}

#[test]
fn a_helper_ends_when_its_parent_is_killed_even_if_it_hangs() {
    for (fake, hangs) in [(FakeMachine::hgx_h100(), false), (hangs_on_gpu_3(), true)] {
        let machine = install(&fake);
        let agent = RunningCommand::new(&mut agent(&machine));
        let is_there = || {
            let ready = || machine.path("agent-state/verdict.json").exists();
            helpers(&machine).len() == 1 && (hangs || ready())
        };
        wait_until("the agent's helper", is_there);
        signal(agent.0.id(), Signal::KILL);
        wait_until("the helper to be gone", || helpers(&machine).is_empty());
        drop(agent);
    }
}

#[test]
fn the_helper_does_not_get_the_run_key() {
    let machine = install(&hangs_on_gpu_3());
    let job = to_file(&mut job(&machine), &machine.path("job.out"));
    wait_until("the job's helper", || !helpers(&machine).is_empty());
    let pid = *helpers(&machine).first().unwrap();
    let environment = String::from_utf8_lossy(&fs::read(format!("/proc/{pid}/environ")).unwrap()).into_owned();
    assert!(environment.contains("DOCTOR_FAKE_NVIDIA="), "{environment}");
    assert!(!environment.contains("DOCTOR_RUN_KEY") && !environment.contains("abab"), "{environment}");
    signal(job.0.id(), Signal::TERM);
    let (code, _) = job.wait_for_exit(Instant::now());
    assert_ne!(code, Some(0), "it was stopped by a signal");
    wait_until("all processes to be gone", || processes(&machine).is_empty());
}

/// A file system whose writers are stuck in the kernel, where SIGKILL does not end them.
struct FrozenFileSystem {
    mount: tempfile::TempDir,
    _image: tempfile::NamedTempFile,
    frozen: bool,
}

impl FrozenFileSystem {
    fn make() -> Result<Self, String> {
        let run = |program: &str, args: &[&str]| match Command::new(program).args(args).output() {
            Ok(output) if output.status.success() => Ok(()),
            Ok(output) => Err(format!("{program}: {}", String::from_utf8_lossy(&output.stderr).trim())),
            Err(error) => Err(format!("{program}: {error}")),
        };
        let image = tempfile::NamedTempFile::new().map_err(|error| error.to_string())?;
        image.as_file().set_len(16 << 20).map_err(|error| error.to_string())?;
        let mount = tempfile::tempdir().map_err(|error| error.to_string())?;
        let (file, mount_point) = (image.path().display().to_string(), mount.path().display().to_string());
        run("mkfs.ext4", &["-q", "-F", &file])?;
        run("mount", &["-o", "loop", &file, &mount_point])?;
        let mut frozen_fs = Self { mount, _image: image, frozen: false };
        run("fsfreeze", &["--freeze", &mount_point])?;
        frozen_fs.frozen = true;
        Ok(frozen_fs)
    }

    fn thaw(&mut self) {
        if std::mem::take(&mut self.frozen) {
            let thawed = Command::new("fsfreeze").arg("--unfreeze").arg(self.mount.path()).status();
            assert!(thawed.is_ok_and(|status| status.success()), "the file system is still frozen");
        }
    }
}

impl Drop for FrozenFileSystem {
    fn drop(&mut self) {
        self.thaw();
        wait_until("the mount to be free", || {
            Command::new("umount").arg(self.mount.path()).output().is_ok_and(|output| output.status.success())
        });
    }
}

#[test]
fn at_most_two_unkillable_helpers_exist_and_they_are_reported_until_they_end() {
    let mut frozen = match FrozenFileSystem::make() {
        Ok(frozen) => frozen,
        Err(error) => {
            println!("NOT RUN: a helper that cannot be killed: a frozen file system: {error}");
            assert!(std::env::var_os("CI").is_none(), "in CI this must run");
            return;
        }
    };
    let fake = FakeMachine::hgx_h100().with_new(LOADED, "GPU UUID: \t GPU-aaaa\n");
    let machine = install(&fake.gpu_touches(3, &frozen.mount.path().join("file")));
    let bench = Bench::exclusive(&machine);
    let records = || fs::read_dir(bench.state.path().join("abandoned")).map_or(0, Iterator::count);

    let failure = bench.query_fails(&["uuid"]);
    assert_eq!(failure.kind, FailureKind::Abandoned, "{failure:?}");
    assert!(failure.text.contains("1 helper process is stuck in the kernel"), "{failure:?}");
    assert_eq!((helpers(&machine).len(), records()), (1, 1));
    let failure = bench.query_fails(&["uuid"]);
    assert!(failure.text.contains("2 helper processes are stuck in the kernel"), "{failure:?}");
    let stuck = helpers(&machine);
    assert_eq!((stuck.len(), records()), (2, 2));
    for _further in 0..3 {
        let started = Instant::now();
        let failure = bench.query_fails(&["serial"]);
        assert_eq!(failure.kind, FailureKind::Abandoned);
        assert!(started.elapsed() < HANGS, "it was queried: {:?}", started.elapsed());
        assert!(failure.text.contains("not queried: 2 helper processes are stuck"), "{failure:?}");
        assert_eq!(failure.text.matches(GPU_3).count(), 2, "{failure:?}");
        assert_eq!(failure.text.matches(" since 20").count(), 2, "{failure:?}");
        assert!(stuck.iter().all(|pid| failure.text.contains(&format!("process {pid} "))), "{failure:?}");
        assert_eq!(helpers(&machine), stuck, "a further one was started");
    }
    // Another process knows them from the directory, and the finding has all the details.
    let started = Instant::now();
    let mut other = Command::new(PROGRAM);
    other.args(["check", "gpu-driver", "--json", "--root"]).arg(machine.path("root")).arg("--nvml").arg(library());
    other.arg("--state").arg(bench.state.path()).env("DOCTOR_FAKE_NVIDIA", machine.path("nvml.toml"));
    let output = other.output().unwrap();
    let output = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
    assert!(
        output.contains("driver-hung") && output.contains("2 helper processes are stuck") && output.contains(GPU_3),
        "{output}"
    );
    assert_eq!(helpers(&machine), stuck);

    frozen.thaw();
    wait_until("the driver to answer again", || matches!(bench.query(&["uuid"], IN_TIME), ProbeOutput::Gpus(_)));
    wait_until("those that were stuck to be gone", || helpers(&machine).is_disjoint(&stuck));
    assert_eq!(bench.query_ok(&["uuid"]).gpus.len(), GPUS);
    assert_eq!((helpers(&machine).len(), records()), (1, 0), "they are not forgotten");
    drop(bench);
    assert!(helpers(&machine).is_empty());
}
