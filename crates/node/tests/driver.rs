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

fn stand(machine: &FakeMachine) -> InstalledMachine {
    machine.install(Path::new(PROGRAM), library())
}

fn hangs_on_gpu_3() -> FakeMachine {
    FakeMachine::hgx_h100().with_new(LOADED, "GPU UUID: \t GPU-aaaa\n").gpu_hangs(3)
}

#[track_caller]
fn until(what: &str, reached: impl Fn() -> bool) {
    let begun = Instant::now();
    while !reached() {
        assert!(begun.elapsed() < IN_TIME, "timed out waiting for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn stat_of(pid: u32) -> Option<ProcStat> {
    ProcStat::parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// Live helpers that query the driver of this machine.
fn helpers(standing: &InstalledMachine) -> BTreeSet<u32> {
    let root = standing.path("root").display().to_string();
    let is_one = |pid: &u32| {
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let mut words = words.split(|byte| *byte == 0);
        words.clone().any(|word| word == DRIVER_ARGUMENT.as_bytes()) && words.any(|word| word == root.as_bytes())
    };
    let pids = fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(is_one).filter(|pid| stat_of(*pid).is_some_and(|stat| !stat.has_exited())).collect()
}

/// Processes of this program that have this machine in their arguments.
fn processes(standing: &InstalledMachine) -> Vec<String> {
    let folder = standing.path("").display().to_string();
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let words = entries.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
    let words = words.map(|words| String::from_utf8_lossy(&words).replace('\0', " "));
    words.filter(|words| words.contains(&folder) && words.contains("doctor-node")).collect()
}

fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), signal).unwrap();
}

/// A process that is killed at the end of the test.
struct Started(Child);

impl Started {
    fn new(command: &mut Command) -> Self {
        Self(command.stdin(Stdio::null()).spawn().unwrap())
    }

    /// Waits for its exit, and returns the time since `begun`.
    #[track_caller]
    fn ends(mut self, begun: Instant) -> (Option<i32>, Duration) {
        let mut status = None;
        while status.is_none() {
            assert!(begun.elapsed() < IN_TIME, "it does not end");
            std::thread::sleep(Duration::from_millis(10));
            status = self.0.try_wait().unwrap();
        }
        (status.unwrap().code(), begun.elapsed())
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        let _ended = self.0.kill().and_then(|()| self.0.wait());
    }
}

fn to_file(command: &mut Command, path: &Path) -> Started {
    let file = fs::File::create(path).unwrap();
    Started::new(command.stdout(file.try_clone().unwrap()).stderr(file))
}

fn hook(standing: &InstalledMachine, moment: &str, state: &str) -> Command {
    let settings = format!(
        "alone = true\nstate = {:?}\nroot = {:?}\nnvml = {:?}\npolicy = {:?}\n",
        standing.path(state),
        standing.path("root"),
        library(),
        standing.path("policy.toml")
    );
    let config = standing.path(&format!("{state}.toml"));
    fs::write(&config, settings).unwrap();
    let mut command = Command::new(PROGRAM);
    command.args(["hook", moment, "--config"]).arg(config).env("DOCTOR_FAKE_NVIDIA", standing.path("scene.toml"));
    command
}

fn job(standing: &InstalledMachine) -> Command {
    let mut command = Command::new(PROGRAM);
    command.args(["job", "--run", "r0000000000007", "--node", "n1", "--tests", "gpu-driver"]);
    command.arg("--log").arg(standing.path("job.log")).arg("--document").arg(standing.path("document"));
    command.arg("--root").arg(standing.path("root")).arg("--nvml").arg(library());
    command.arg("--state").arg(standing.path("job-state")).arg("--policy").arg(standing.path("policy.toml"));
    command.env("DOCTOR_FAKE_NVIDIA", standing.path("scene.toml")).env("DOCTOR_RUN_KEY", "ab".repeat(32));
    command
}

fn agent(standing: &InstalledMachine) -> Command {
    let credential = Credential {
        node: NodeName::new("n1").unwrap(),
        key: RunKey::new([1; 32]),
        controller: Some("http://127.0.0.1:9".to_owned()),
    };
    let mut command = standing.agent(&credential.text());
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command
}

/// One machine with all four commands in parallel: it takes as long as the slowest.
#[test]
fn a_gpu_that_hangs_is_named_by_every_command_and_holds_up_none() {
    let standing = stand(&hangs_on_gpu_3());
    let begun = Instant::now();
    let check = to_file(&mut standing.fast(), &standing.path("check.json"));
    let job = to_file(&mut job(&standing), &standing.path("job.out"));
    let agent = Started::new(&mut agent(&standing));
    let hooks = [("health", Duration::from_secs(8)), ("prolog", Duration::from_secs(5))];
    let hooks = hooks.map(|(moment, limit)| {
        let begun = Instant::now();
        (moment, limit, begun, to_file(&mut hook(&standing, moment, moment), &standing.path(&format!("{moment}.out"))))
    });

    for (moment, limit, begun, hook) in hooks {
        let (code, took) = hook.ends(begun);
        assert_eq!(code, Some(0), "{moment}");
        assert!(took < limit + Duration::from_secs(3), "{moment} took {took:?}");
        let said = fs::read_to_string(standing.path(moment).join("hook.log")).unwrap();
        assert!(said.contains(" inconclusive (") && said.contains(GPU_3), "{said}");
    }
    let (code, _) = check.ends(begun);
    let said = fs::read_to_string(standing.path("check.json")).unwrap();
    assert_eq!(code, Some(2), "{said}");
    let rows: Vec<serde_json::Value> = serde_json::from_str(&said).unwrap();
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

    let (code, _) = job.ends(begun);
    assert_eq!(code, Some(0));
    let log = fs::read_to_string(standing.path("job.log")).unwrap();
    assert!(log.contains("timed-out") && log.contains(GPU_3), "{log}");

    let verdict = || fs::read_to_string(standing.path("agent-state/verdict.json")).unwrap_or_default();
    until("the agent's verdict", || verdict().contains("driver-hung"));
    assert!(verdict().contains(GPU_3), "{}", verdict());
    signal(agent.0.id(), Signal::TERM);
    assert_eq!(agent.ends(begun).0, Some(0));
    until("all processes to be gone", || processes(&standing).is_empty());
}

#[test]
fn a_driver_that_hangs_when_it_is_opened_is_told_as_such() {
    let standing = stand(&FakeMachine::hgx_h100().driver_hangs("nvmlInitWithFlags"));
    let bench = Bench::new(&standing);
    let failure = bench.fails(&["uuid"]);
    assert_eq!(failure.kind, FailureKind::TimedOut);
    assert!(failure.text.contains("no answer within 4s while opening the driver"), "{failure:?}");
    assert!(helpers(&standing).is_empty());
}

/// The processes that cannot be killed are known to the whole process: the test that creates some runs while no other test
/// queries the driver.
static STUCK: RwLock<()> = RwLock::new(());

enum Turn {
    BesideOthers { _turn: RwLockReadGuard<'static, ()> },
    Alone { _turn: RwLockWriteGuard<'static, ()> },
}

/// A runner in this process. An environment variable names the scene file, and all tests of this process share it.
struct Bench<'a> {
    _turn: Turn,
    standing: &'a InstalledMachine,
    state: tempfile::TempDir,
    stop: Stop,
    helper: Arc<DriverHelper>,
    program: PathBuf,
}

impl<'a> Bench<'a> {
    fn new(standing: &'a InstalledMachine) -> Self {
        Self::at(Turn::BesideOthers { _turn: STUCK.read().unwrap_or_else(PoisonError::into_inner) }, standing)
    }

    fn alone(standing: &'a InstalledMachine) -> Self {
        Self::at(Turn::Alone { _turn: STUCK.write().unwrap_or_else(PoisonError::into_inner) }, standing)
    }

    fn at(turn: Turn, standing: &'a InstalledMachine) -> Self {
        let program = standing.path("helper");
        let text =
            format!("#!/bin/sh\nDOCTOR_FAKE_NVIDIA={} exec {PROGRAM} \"$@\"\n", standing.path("scene.toml").display());
        fs::write(&program, text).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let state = tempfile::tempdir().unwrap();
        Self { _turn: turn, standing, state, stop: Stop::never(), helper: Arc::default(), program }
    }

    fn asks(&self, fields: &[&str], limit: Duration) -> ProbeOutput {
        let runner = LocalRunner::new(self.standing.path("root"), &self.stop).helper(&self.program).library(library());
        let runner = runner.state(Some(self.state.path())).driver_helper(&self.helper).driver_limit(limit);
        let probe = Probe::gpu(fields);
        runner.prepare(std::slice::from_ref(&probe));
        runner.run(&probe)
    }

    #[track_caller]
    fn answers(&self, fields: &[&str]) -> GpuQueryResult {
        match self.asks(fields, IN_TIME) {
            ProbeOutput::Gpus(answer) => answer,
            other => panic!("{other:?}"),
        }
    }

    #[track_caller]
    fn fails(&self, fields: &[&str]) -> ProbeFailure {
        match self.asks(fields, HANGS) {
            ProbeOutput::Failed(failure) => failure,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn one_helper_serves_all_questions_and_holds_nothing_between_them() {
    let standing = stand(&FakeMachine::hgx_h100());
    let bench = Bench::new(&standing);
    let answer = bench.answers(&["uuid", "p2p.*.nvlink", "temperature.gpu"]);
    assert_eq!(answer.gpus.len(), GPUS);
    let names: Vec<&str> = answer.gpus[1].fields.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!((names.len(), names[0], names[1], names[8]), (9, "uuid", "p2p.0.nvlink", "temperature.gpu"));
    let first = helpers(&standing);
    assert_eq!(first.len(), 1, "{first:?}");
    assert_eq!(bench.answers(&["serial"]).gpus[3].bus, gpu_bus(3));
    assert_eq!(helpers(&standing), first, "it is the same one");

    let pid = *first.first().unwrap();
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten() {
        let to = fs::read_link(entry.path()).unwrap();
        assert!(to == Path::new("/dev/null") || to.to_string_lossy().starts_with("pipe:"), "{}", to.display());
    }
    // An error of a driver that was not replaced under the helper is returned as it is, and the next query gets a new
    // answer.
    standing.replace(&FakeMachine::hgx_h100().driver_fails(9));
    assert_eq!(bench.answers(&["uuid"]).driver.unwrap_err().kind, FailureKind::Missing);
    standing.replace(&FakeMachine::hgx_h100());
    assert!(bench.answers(&["uuid"]).driver.is_ok());

    signal(pid, Signal::KILL);
    assert_eq!(bench.answers(&["uuid"]).gpus.len(), GPUS, "another one answers");
    assert!(!helpers(&standing).contains(&pid));
    drop(bench);
    assert!(helpers(&standing).is_empty(), "it ends with its owner");
}

#[test]
fn a_helper_whose_library_loses_descriptors_is_replaced_before_there_are_none_left() {
    let standing = stand(&FakeMachine::hgx_h100().driver_loses_descriptors(40));
    let bench = Bench::new(&standing);
    assert_eq!(bench.answers(&["uuid"]).gpus.len(), GPUS);
    let first = helpers(&standing);
    let mut all = first.clone();
    for _ in 0..6 {
        assert_eq!(bench.answers(&["uuid"]).gpus.len(), GPUS, "every question is answered");
        all.extend(helpers(&standing));
    }
    assert!(!helpers(&standing).is_superset(&first), "the first one has ended");
    assert!(all.len() >= 3 && helpers(&standing).len() <= 1, "{all:?}");
}

#[test]
fn a_helper_that_hangs_is_replaced_and_the_gpu_that_hangs_is_named_whoever_is_asked_about_it() {
    let standing = stand(&hangs_on_gpu_3());
    let bench = Bench::new(&standing);
    for fields in [&["uuid"][..], &["p2p.*.nvlink"], &["topology.*.level", "uuid"]] {
        let failure = bench.fails(fields);
        assert_eq!(failure.kind, FailureKind::TimedOut);
        assert!(failure.text.contains(GPU_3) && failure.text.contains("was killed"), "{failure:?}");
        assert!(helpers(&standing).is_empty());
    }
    standing.replace(&FakeMachine::hgx_h100());
    assert_eq!(bench.answers(&["uuid"]).gpus.len(), GPUS, "it answers again");
}

#[test]
fn a_helper_ends_when_its_parent_is_killed_also_if_it_hangs() {
    for (machine, hangs) in [(FakeMachine::hgx_h100(), false), (hangs_on_gpu_3(), true)] {
        let standing = stand(&machine);
        let agent = Started::new(&mut agent(&standing));
        let is_there = || {
            let ready = || standing.path("agent-state/verdict.json").exists();
            helpers(&standing).len() == 1 && (hangs || ready())
        };
        until("the agent's helper", is_there);
        signal(agent.0.id(), Signal::KILL);
        until("the helper to be gone", || helpers(&standing).is_empty());
        drop(agent);
    }
}

#[test]
fn the_helper_gets_no_key_of_the_run() {
    let standing = stand(&hangs_on_gpu_3());
    let job = to_file(&mut job(&standing), &standing.path("job.out"));
    until("the job's helper", || !helpers(&standing).is_empty());
    let pid = *helpers(&standing).first().unwrap();
    let environment = String::from_utf8_lossy(&fs::read(format!("/proc/{pid}/environ")).unwrap()).into_owned();
    assert!(environment.contains("DOCTOR_FAKE_NVIDIA="), "{environment}");
    assert!(!environment.contains("DOCTOR_RUN_KEY") && !environment.contains("abab"), "{environment}");
    signal(job.0.id(), Signal::TERM);
    let (code, _) = job.ends(Instant::now());
    assert_ne!(code, Some(0), "it was stopped by a signal");
    until("all processes to be gone", || processes(&standing).is_empty());
}

/// A file system whose writers are stuck in the kernel, where SIGKILL does not end them.
struct Frozen {
    mount: tempfile::TempDir,
    _image: tempfile::NamedTempFile,
    frozen: bool,
}

impl Frozen {
    fn make() -> Result<Self, String> {
        let run = |program: &str, args: &[&str]| match Command::new(program).args(args).output() {
            Ok(output) if output.status.success() => Ok(()),
            Ok(output) => Err(format!("{program}: {}", String::from_utf8_lossy(&output.stderr).trim())),
            Err(error) => Err(format!("{program}: {error}")),
        };
        let image = tempfile::NamedTempFile::new().map_err(|error| error.to_string())?;
        image.as_file().set_len(16 << 20).map_err(|error| error.to_string())?;
        let mount = tempfile::tempdir().map_err(|error| error.to_string())?;
        let (file, place) = (image.path().display().to_string(), mount.path().display().to_string());
        run("mkfs.ext4", &["-q", "-F", &file])?;
        run("mount", &["-o", "loop", &file, &place])?;
        let mut made = Self { mount, _image: image, frozen: false };
        run("fsfreeze", &["--freeze", &place])?;
        made.frozen = true;
        Ok(made)
    }

    fn thaw(&mut self) {
        if std::mem::take(&mut self.frozen) {
            let thawed = Command::new("fsfreeze").arg("--unfreeze").arg(self.mount.path()).status();
            assert!(thawed.is_ok_and(|status| status.success()), "the file system is still frozen");
        }
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        self.thaw();
        until("the mount to be free", || {
            Command::new("umount").arg(self.mount.path()).output().is_ok_and(|output| output.status.success())
        });
    }
}

#[test]
fn helpers_that_cannot_be_killed_are_at_most_two_and_are_told_until_they_are_gone() {
    let mut frozen = match Frozen::make() {
        Ok(frozen) => frozen,
        Err(why) => {
            println!("NOT RUN: a helper that cannot be killed: a frozen file system: {why}");
            assert!(std::env::var_os("CI").is_none(), "in CI this must run");
            return;
        }
    };
    let machine = FakeMachine::hgx_h100().with_new(LOADED, "GPU UUID: \t GPU-aaaa\n");
    let standing = stand(&machine.gpu_touches(3, &frozen.mount.path().join("file")));
    let bench = Bench::alone(&standing);
    let notes = || fs::read_dir(bench.state.path().join("abandoned")).map_or(0, Iterator::count);

    let failure = bench.fails(&["uuid"]);
    assert_eq!(failure.kind, FailureKind::Abandoned, "{failure:?}");
    assert!(failure.text.contains("1 helper process is stuck in the kernel"), "{failure:?}");
    assert_eq!((helpers(&standing).len(), notes()), (1, 1));
    let failure = bench.fails(&["uuid"]);
    assert!(failure.text.contains("2 helper processes are stuck in the kernel"), "{failure:?}");
    let stuck = helpers(&standing);
    assert_eq!((stuck.len(), notes()), (2, 2));
    for _further in 0..3 {
        let begun = Instant::now();
        let failure = bench.fails(&["serial"]);
        assert_eq!(failure.kind, FailureKind::Abandoned);
        assert!(begun.elapsed() < HANGS, "it was queried: {:?}", begun.elapsed());
        assert!(failure.text.contains("not queried: 2 helper processes are stuck"), "{failure:?}");
        assert_eq!(failure.text.matches(GPU_3).count(), 2, "{failure:?}");
        assert_eq!(failure.text.matches(" since 20").count(), 2, "{failure:?}");
        assert!(stuck.iter().all(|pid| failure.text.contains(&format!("process {pid} "))), "{failure:?}");
        assert_eq!(helpers(&standing), stuck, "a further one was started");
    }
    // Another process knows them from the directory, and the finding has all the details.
    let begun = Instant::now();
    let mut other = Command::new(PROGRAM);
    other.args(["check", "gpu-driver", "--json", "--root"]).arg(standing.path("root")).arg("--nvml").arg(library());
    other.arg("--state").arg(bench.state.path()).env("DOCTOR_FAKE_NVIDIA", standing.path("scene.toml"));
    let said = other.output().unwrap();
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    assert!(
        said.contains("driver-hung") && said.contains("2 helper processes are stuck") && said.contains(GPU_3),
        "{said}"
    );
    assert_eq!(helpers(&standing), stuck);

    frozen.thaw();
    until("the driver to answer again", || matches!(bench.asks(&["uuid"], IN_TIME), ProbeOutput::Gpus(_)));
    until("those that were stuck to be gone", || helpers(&standing).is_disjoint(&stuck));
    assert_eq!(bench.answers(&["uuid"]).gpus.len(), GPUS);
    assert_eq!((helpers(&standing).len(), notes()), (1, 0), "they are not forgotten");
    drop(bench);
    assert!(helpers(&standing).is_empty());
}
