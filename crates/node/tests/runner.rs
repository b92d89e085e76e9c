//! The runner on this machine: limits hold, no process is left running, and nothing blocks it.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use doctor_checks::{
    probe::{Probe, ProbeOutput},
    proc_stat::ProcStat,
};
use doctor_core::{observation::FailureKind, time::Span};
use doctor_node::{
    runner::{LocalRunner, MAX_STREAM_BYTES, ProbeRunner},
    stop::Stop,
};

/// Timeout that distinguishes a hang from slowness, even on a busy machine.
const DEAD: Duration = Duration::from_secs(240);
const PROGRAM: &str = env!("CARGO_BIN_EXE_doctor-node");

fn run(probe: &Probe) -> ProbeOutput {
    run_below("/", probe)
}

fn run_below(root: impl Into<PathBuf>, probe: &Probe) -> ProbeOutput {
    LocalRunner::new(root, &Stop::never()).helper(PROGRAM).run(probe)
}

fn shell(script: &str, timeout: Span) -> Probe {
    Probe::Exec { program: "/bin/sh".into(), args: vec!["-c".into(), script.into()], timeout }
}

fn read(path: &str) -> Probe {
    Probe::Read { path: path.into() }
}

fn failure(output: &ProbeOutput) -> FailureKind {
    match output {
        ProbeOutput::Failed(failure) => failure.kind,
        other => panic!("{other:?}"),
    }
}

fn is_alive(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.trim()));
    stat.ok().and_then(|line| ProcStat::parse(&line)).is_some_and(|stat| !stat.has_exited())
}

fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < DEAD, "timed out waiting for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_program_returns_its_exit_code_and_both_streams() {
    let output = run(&shell("echo out; echo err >&2; exit 3", Span::from_secs(10)));
    assert_eq!(output, ProbeOutput::Ran { exit: Some(3), stdout: "out\n".into(), stderr: "err\n".into() });
    let killed = run(&shell("kill -9 $$", Span::from_secs(10)));
    assert!(matches!(killed, ProbeOutput::Ran { exit: None, .. }), "{killed:?}");
}

#[test]
fn at_its_time_limit_a_program_is_killed_with_its_children() {
    let directory = tempfile::tempdir().unwrap();
    let pids = directory.path().join("pids");
    let script = format!("sleep 600 & echo $! > {0}; sleep 600 & echo $! >> {0}; wait", pids.display());
    let started = Instant::now();
    assert_eq!(failure(&run(&shell(&script, Span::from_secs(10)))), FailureKind::TimedOut);
    assert!(started.elapsed() < DEAD, "{:?}", started.elapsed());
    let pids = fs::read_to_string(pids).unwrap();
    assert_eq!(pids.lines().count(), 2);
    wait_until("both to be gone", || !pids.lines().any(is_alive));
}

#[test]
fn processes_left_in_a_programs_group_are_killed_and_not_waited_for() {
    let started = Instant::now();
    // The background process holds both pipes open.
    let output = run(&shell("sleep 600 & echo $!", Span::minutes(10)));
    assert!(started.elapsed() < DEAD, "{:?}", started.elapsed());
    let ProbeOutput::Ran { exit: Some(0), stdout, .. } = output else { panic!("{output:?}") };
    wait_until("the one left behind to be gone", || !is_alive(&stdout));
}

#[test]
fn a_program_that_prints_without_end_is_stopped() {
    let started = Instant::now();
    for script in ["yes", "yes >&2"] {
        assert_eq!(failure(&run(&shell(script, Span::minutes(10)))), FailureKind::TooLong);
    }
    assert!(started.elapsed() < DEAD, "{:?}", started.elapsed());
    let at_limit = format!("head -c {MAX_STREAM_BYTES} /dev/zero");
    assert!(matches!(run(&shell(&at_limit, Span::from_secs(60))), ProbeOutput::Ran { exit: Some(0), .. }));
}

#[test]
fn the_time_limit_holds_for_a_program_that_closed_its_output() {
    let output = run(&shell("exec sleep 600 >&- 2>&-", Span::from_millis(300)));
    assert_eq!(failure(&output), FailureKind::TimedOut);
}

#[test]
fn a_missing_program_differs_from_one_without_permission() {
    let exec = |program: &str| Probe::Exec { program: program.into(), args: vec![], timeout: Span::from_secs(60) };
    assert_eq!(failure(&run(&exec("/no/such/program"))), FailureKind::Missing);
    assert_eq!(failure(&run(&exec("/etc/passwd"))), FailureKind::Denied);
    let builtin = Probe::Builtin { test: "nccl".into(), args: Vec::new(), timeout: Span::from_secs(60) };
    assert_eq!(failure(&run(&builtin)), FailureKind::Missing);
}

#[test]
fn files_are_read_below_the_root_and_up_to_a_limit() {
    let root = tempfile::tempdir().unwrap();
    let at = |path: &str| root.path().join(path);
    fs::create_dir_all(at("proc/sys")).unwrap();
    fs::create_dir_all(at("dev")).unwrap();
    fs::write(at("proc/meminfo"), "MemTotal: 1 kB\n").unwrap();
    fs::write(at("dev/kmsg"), "6,1,0,-;booted\n").unwrap();
    fs::write(at("long"), vec![b'x'; MAX_STREAM_BYTES + 1]).unwrap();
    let run = |probe: &Probe| run_below(root.path(), probe);
    assert_eq!(run(&read("/proc/meminfo")), ProbeOutput::Text("MemTotal: 1 kB\n".into()));
    assert_eq!(run(&Probe::Kmsg), ProbeOutput::Text("6,1,0,-;booted\n".into()));
    assert_eq!(run(&Probe::List { path: "/proc".into() }), ProbeOutput::Names(vec!["meminfo".into(), "sys".into()]));
    assert_eq!(failure(&run(&read("/long"))), FailureKind::TooLong);
    assert_eq!(failure(&run(&read("/absent"))), FailureKind::Missing);
    assert_eq!(failure(&run(&read("/proc"))), FailureKind::Failed);
}

#[test]
fn a_pipe_without_a_writer_does_not_block() {
    let root = tempfile::tempdir().unwrap();
    let status = Command::new("mkfifo").arg(root.path().join("pipe")).status().unwrap();
    assert!(status.success());
    let started = Instant::now();
    let output = run_below(root.path(), &read("/pipe"));
    assert!(matches!(output, ProbeOutput::Text(ref text) if text.is_empty()), "{output:?}");
    assert!(started.elapsed() < DEAD, "{:?}", started.elapsed());
}

#[test]
fn free_space_is_that_of_the_file_system() {
    let output = run(&Probe::StatFs { path: "/".into() });
    let ProbeOutput::StatFs(space) = output else { panic!("{output:?}") };
    assert!(space.size > 0 && space.available <= space.free && space.free <= space.size, "{space:?}");
    assert_eq!(failure(&run(&Probe::StatFs { path: "/no/such/mount".into() })), FailureKind::Missing);
}

#[test]
fn a_programs_lines_are_echoed_while_it_runs() {
    let echoed = std::cell::RefCell::new(Vec::new());
    let directory = tempfile::tempdir().unwrap();
    let first_is_seen = directory.path().join("seen");
    let echo = |line: &str| {
        echoed.borrow_mut().push(line.to_owned());
        fs::write(&first_is_seen, "").unwrap();
    };
    let stop = Stop::never();
    let runner = LocalRunner::new("/", &stop).helper(PROGRAM).echo(&echo);
    // It prints the second line only after the first was received.
    let script = format!("echo one; until [ -e {} ]; do sleep 0.05; done; printf two", first_is_seen.display());
    runner.run(&shell(&script, Span::minutes(2)));
    assert_eq!(*echoed.borrow(), ["one", "two"]);
}

#[test]
fn the_time_limit_of_the_job_stops_a_probe() {
    let stop = Stop::never().after(Duration::from_millis(200));
    let runner = LocalRunner::new("/", &stop).helper(PROGRAM);
    let started = Instant::now();
    assert_eq!(failure(&runner.run(&shell("sleep 600", Span::from_secs(600)))), FailureKind::Killed);
    assert!(started.elapsed() < DEAD, "{:?}", started.elapsed());
    assert_eq!(failure(&runner.run(&read("/proc/meminfo"))), FailureKind::Killed, "nothing starts after that");
}

#[test]
fn a_program_does_not_get_the_run_key() {
    // In a separate process, so that this test's environment does not change.
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    fs::write(at("policy.toml"), "[tests.spy.params]\ncommand = [\"/usr/bin/env\"]\n").unwrap();
    let status = Command::new(PROGRAM)
        .args(["job", "--run", "r0000000000007", "--node", "n1", "--tests", "spy"])
        .args([Path::new("--log"), &at("log"), Path::new("--document"), &at("document")])
        .args([Path::new("--policy"), &at("policy.toml")])
        .env("DOCTOR_RUN_KEY", "ab".repeat(32))
        .status()
        .unwrap();
    assert!(status.success());
    let log = fs::read_to_string(at("log")).unwrap();
    assert!(log.contains("| LC_ALL=C"), "{log}");
    assert!(!log.contains("DOCTOR_RUN_KEY") && !log.contains("abab"), "{log}");
}

/// A small file system that can be frozen: a writer is then stuck in the kernel, and SIGKILL does not end it.
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

impl Drop for Frozen {
    fn drop(&mut self) {
        self.thaw();
        // The stuck writer may need a moment to end.
        wait_until("the mount to be free", || {
            Command::new("umount").arg(self.mount.path()).output().is_ok_and(|output| output.status.success())
        });
    }
}

#[test]
fn what_cannot_be_killed_is_left_behind_once_and_tried_again_when_it_is_free() {
    let mut frozen = match Frozen::make() {
        Ok(frozen) => frozen,
        Err(error) => {
            println!("NOT RUN: a frozen file system: {error}");
            assert!(std::env::var_os("CI").is_none(), "in CI this must run");
            return;
        }
    };
    let state = tempfile::tempdir().unwrap();
    let stop = Stop::never();
    let runner = LocalRunner::new("/", &stop).helper(PROGRAM).state(Some(state.path()));
    let touch = shell(&format!("touch {}/file", frozen.mount.path().display()), Span::from_millis(300));
    let started = Instant::now();
    assert_eq!(failure(&runner.run(&touch)), FailureKind::Abandoned);
    assert!(started.elapsed() < DEAD, "{:?}", started.elapsed());

    let does_not_wait = || {
        let started = Instant::now();
        assert_eq!(failure(&runner.run(&touch)), FailureKind::Abandoned);
        // Its own limit is 300 ms.
        started.elapsed() < Duration::from_millis(200)
    };
    assert!((0..20).any(|_| does_not_wait()), "each further attempt waits");
    assert_eq!(fs::read_dir(state.path().join("abandoned")).unwrap().count(), 1, "it piles up");

    // Another process knows it from the directory.
    let policy = state.path().join("policy.toml");
    let command = format!("command = [\"/bin/sh\", \"-c\", \"touch {}/file\"]", frozen.mount.path().display());
    fs::write(&policy, format!("[tests.stuck.params]\n{command}\ntimeout = \"300ms\"\n")).unwrap();
    let started = Instant::now();
    let other = Command::new(PROGRAM)
        .args(["check", "stuck", "--policy"])
        .arg(&policy)
        .arg("--state")
        .arg(state.path())
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&other.stdout);
    assert!(stdout.contains("still hangs from an earlier attempt"), "{stdout}");
    assert_eq!(other.status.code(), Some(3));
    assert!(started.elapsed() < DEAD, "{:?}", started.elapsed());

    frozen.thaw();
    wait_until("the probe to work again", || matches!(runner.run(&touch), ProbeOutput::Ran { exit: Some(0), .. }));
    assert_eq!(fs::read_dir(state.path().join("abandoned")).unwrap().count(), 0, "it is not forgotten");
}
