//! The storage test on real mounts, healthy and faulty: each gets its verdict in time, and nothing is left behind.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::fs::PermissionsExt as _,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use doctor_checks::{Catalogue, Params, proc_stat::ProcStat};
use doctor_core::{
    classify::{Classification, classify},
    ids::CheckId,
    observation::Observation,
    policy::Policy,
};
use doctor_node::{
    runner::{LocalRunner, ProbeRunner},
    stop::Stop,
};
use rustix::{
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create},
    process::{Pid, Signal, kill_process},
};
use tempfile::TempDir;

/// Timeout that distinguishes a hang from slowness, even on a busy machine.
const DEAD: Duration = Duration::from_secs(240);
const PROGRAM: &str = env!("CARGO_BIN_EXE_doctor-node");

/// Small and short; the measurements do not matter here.
const SMALL: &str = "size = '32MiB'\npattern_time = '200ms'\n";

fn not_run(what: &str, reason: &str) {
    println!("NOT RUN: {what}: {reason}");
    assert!(std::env::var_os("CI").is_none(), "in CI this must run");
}

/// Returns the fixture's value, or reports that the test did not run.
macro_rules! fixture_or_skip {
    ($what:literal, $fixture:expr) => {
        match has_fio().and_then(|()| $fixture) {
            Ok(value) => value,
            Err(reason) => return not_run($what, &reason),
        }
    };
}

fn has_fio() -> Result<(), String> {
    run("fio", &["--version"]).map(drop)
}

fn run(program: &str, args: &[&str]) -> Result<Output, String> {
    match Command::new(program).args(args).output() {
        Ok(output) if output.status.success() => Ok(output),
        Ok(output) => Err(format!("{program}: {}", String::from_utf8_lossy(&output.stderr).trim())),
        Err(error) => Err(format!("{program}: {error}")),
    }
}

fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < DEAD, "timed out waiting for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A mount point with what is mounted on it; dropping it unmounts everything.
struct Mount {
    point: TempDir,
    /// What keeps it frozen or stopped.
    hang: Option<Hang>,
    server: Option<Child>,
    /// Removed after the mount.
    image: Option<tempfile::NamedTempFile>,
}

#[derive(Clone, Copy)]
enum Hang {
    Frozen,
    Stopped,
}

impl Mount {
    fn at(args: &[&str]) -> Result<Self, String> {
        let point = tempfile::tempdir().map_err(|error| error.to_string())?;
        run("mount", &[args, &[&point.path().display().to_string()]].concat())?;
        Ok(Self { point, hang: None, server: None, image: None })
    }

    /// ext4 on a loop device, with the image in `folder`.
    fn disk(folder: &Path, megabytes: u64) -> Result<Self, String> {
        let image = tempfile::NamedTempFile::new_in(folder).map_err(|error| error.to_string())?;
        image.as_file().set_len(megabytes << 20).map_err(|error| error.to_string())?;
        let file = image.path().display().to_string();
        run("mkfs.ext4", &["-q", "-F", "-O", "^has_journal", &file])?;
        let mut mount = Self::at(&["-o", "loop", &file])?;
        mount.image = Some(image);
        Ok(mount)
    }

    /// ext4 on a disk that fails beyond its first megabytes: its image is truncated and sealed against growth.
    fn failing_disk() -> Result<(Self, OwnedFd), String> {
        let image = memfd_create("disk", MemfdFlags::ALLOW_SEALING).map_err(|error| error.to_string())?;
        ftruncate(&image, 1 << 30).map_err(|error| error.to_string())?;
        let file = format!("/proc/{}/fd/{}", std::process::id(), image.as_raw_fd());
        run("mkfs.ext4", &["-q", "-F", "-O", "^has_journal", &file])?;
        let mount = Self::at(&["-o", "loop", &file])?;
        ftruncate(&image, 20 << 20).map_err(|error| error.to_string())?;
        fcntl_add_seals(&image, SealFlags::GROW).map_err(|error| error.to_string())?;
        Ok((mount, image))
    }

    /// A file system that a process serves.
    fn served(below: &Path) -> Result<Self, String> {
        let point = tempfile::tempdir().map_err(|error| error.to_string())?;
        let server = Command::new("bindfs").arg("-f").arg(below).arg(point.path()).spawn();
        let server = server.map_err(|error| format!("bindfs: {error}"))?;
        let mut mount = Self { point, hang: None, server: Some(server), image: None };
        let started = Instant::now();
        while !mount.is_mounted() {
            let server_ended = mount.server.as_mut().is_some_and(|server| !matches!(server.try_wait(), Ok(None)));
            if server_ended || started.elapsed() > Duration::from_secs(10) {
                return Err("bindfs cannot mount; is there /dev/fuse?".to_owned());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(mount)
    }

    fn path(&self) -> &Path {
        self.point.path()
    }

    fn is_mounted(&self) -> bool {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        mounts.lines().any(|line| line.split(' ').nth(1) == self.path().to_str())
    }

    fn freeze(&mut self) -> Result<(), String> {
        run("fsfreeze", &["--freeze", &self.path().display().to_string()])?;
        self.hang = Some(Hang::Frozen);
        Ok(())
    }

    fn stop(&mut self) {
        let server = self.server.as_ref().unwrap();
        signal(server.id(), Signal::STOP);
        let is_stopped = || stat(server.id()).is_some_and(|stat| stat.state == 'T');
        wait_until("the server to stop", is_stopped);
        self.hang = Some(Hang::Stopped);
    }

    fn release(&mut self) {
        match self.hang.take() {
            None => {}
            Some(Hang::Frozen) => {
                run("fsfreeze", &["--unfreeze", &self.path().display().to_string()]).unwrap();
            }
            Some(Hang::Stopped) => signal(self.server.as_ref().unwrap().id(), Signal::CONT),
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        self.release();
        // Stuck processes may need a moment to end.
        let path = self.path().display().to_string();
        wait_until("the mount to be free", || !self.is_mounted() || run("umount", &[&path]).is_ok());
        if let Some(server) = &mut self.server {
            server.wait().unwrap();
        }
        drop(self.image.take());
    }
}

fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(i32::try_from(pid).unwrap()).unwrap(), signal).unwrap();
}

fn stat(pid: u32) -> Option<ProcStat> {
    ProcStat::parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

fn name(pid: u32) -> String {
    fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim().to_owned()
}

/// A process whose first thread has ended still has the others.
fn threads(pid: u32) -> Vec<PathBuf> {
    fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

/// Live processes that work in or below this directory, or have it as an argument.
fn processes_on(path: &Path) -> Vec<u32> {
    let pids = fs::read_dir("/proc").unwrap().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let uses_directory = |pid: &u32| {
        let is_below = |thread: &PathBuf| fs::read_link(thread.join("cwd")).is_ok_and(|cwd| cwd.starts_with(path));
        let is_inside = threads(*pid).iter().any(is_below);
        // A server of the mount has it as an argument too.
        let command_line = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let has_argument = command_line.contains("__test") && command_line.contains(path.to_str().unwrap());
        (is_inside || has_argument) && stat(*pid).is_some_and(|stat| !stat.has_exited())
    };
    pids.filter(uses_directory).collect()
}

fn expect_no_leftovers(path: &Path) {
    wait_until("the processes to go", || processes_on(path).is_empty());
    let test_directory = path.join(".cluster-doctor");
    wait_until("the files to go", || !test_directory.exists());
}

/// A run of the test, as the runner does it.
struct Tested {
    observation: Observation,
    judgement: Classification,
    elapsed: Duration,
    log: String,
}

fn test(params: &str, state: Option<&Path>) -> Tested {
    let params: Params = toml::from_str(params).unwrap();
    let catalogue = Catalogue::built_in();
    let id = CheckId::new("storage").unwrap();
    let check = catalogue.get(&id).unwrap();
    let log = std::cell::RefCell::new(String::new());
    let log_line = |line: &str| {
        println!("| {line}");
        *log.borrow_mut() += &format!("{line}\n");
    };
    let (stop, started) = (Stop::never(), Instant::now());
    let runner = LocalRunner::new("/", &stop).helper(PROGRAM).state(state).echo(&log_line);
    let outputs: Vec<_> = (check.probes)(&params).iter().map(|probe| runner.run(probe)).collect();
    let elapsed = started.elapsed();
    let observation = (check.interpret)(&params, &outputs);
    let judgement = classify(&catalogue.rules(&Policy::built_in()).unwrap(), None, &id, &observation);
    println!("{}: {}", judgement.reason, judgement.text);
    drop(outputs);
    Tested { observation, judgement, elapsed, log: log.into_inner() }
}

impl Tested {
    /// Formats `VERDICT REASON`.
    fn verdict(&self) -> String {
        format!("{} {}", self.judgement.verdict, self.judgement.reason)
    }

    fn metric(&self, name: &str) -> Option<f64> {
        let Observation::Measured { metrics, .. } = &self.observation else { return None };
        metrics.iter().find(|metric| metric.name == name).map(|metric| metric.value)
    }
}

fn params_for(path: &Path) -> String {
    format!("mounts = ['{}']\n{SMALL}", path.display())
}

#[test]
fn a_disk_is_measured_in_every_pattern_and_verified() {
    fixture_or_skip!("fio", Ok(()));
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let tested = test(&format!("directories = ['{}']\n{SMALL}", directory.path().display()), None);
    assert_eq!(tested.verdict(), "pass within-limits");
    for pattern in ["iodepth_read_1file", "iodepth_write_1file", "numjobs_read_nfiles", "numjobs_write_nfiles"] {
        assert!(tested.metric(&format!("{pattern}_bw")).is_some_and(|rate| rate > 1e6), "{pattern}");
        assert!(tested.metric(&format!("{pattern}_p99")).is_some_and(|seconds| seconds > 0.0), "{pattern}");
    }
    for pattern in ["randread", "randwrite", "randrw"] {
        assert!(tested.metric(&format!("{pattern}_iops")).is_some_and(|rate| rate > 50.0), "{pattern}");
    }
    assert!(tested.metric("randrw_read_p999").is_some() && tested.metric("randrw_write_p50").is_some());
    assert_eq!(tested.metric("storage_verified"), Some(f64::from(8 << 20)));
    assert!(tested.log.contains("iodepth_write_1file") && tested.log.contains("IOPS"), "{}", tested.log);
    expect_no_leftovers(directory.path());
}

#[test]
fn tmpfs_passes_and_a_file_system_without_direct_io_is_measured_as_such() {
    for (mount, direct) in [(&["-t", "tmpfs", "-o", "size=1g", "bed"][..], None), (&["-t", "ramfs", "bed"], Some(0.0))]
    {
        let mount = fixture_or_skip!("tmpfs", Mount::at(mount));
        let tested = test(&params_for(mount.path()), None);
        assert_eq!(tested.verdict(), "pass within-limits");
        // For tmpfs it depends on the kernel.
        assert!(direct.is_none() || tested.metric("storage_direct") == direct, "{:?}", tested.observation);
        expect_no_leftovers(mount.path());
    }
}

#[test]
fn a_full_disk_is_a_finding() {
    let mount = fixture_or_skip!("a full disk", Mount::disk(&std::env::temp_dir(), 64));
    fs::File::create(mount.path().join("data")).unwrap();
    let filled = run("fallocate", &["-l", "40M", &mount.path().join("data").display().to_string()]);
    filled.unwrap();
    let tested = test(&params_for(mount.path()), None);
    assert_eq!(tested.verdict(), "fail storage-no-space");
    expect_no_leftovers(mount.path());
    assert_eq!(fs::metadata(mount.path().join("data")).unwrap().len(), 40 << 20);
}

#[test]
fn a_read_only_mount_is_a_finding() {
    let mount = fixture_or_skip!("a read-only mount", Mount::at(&["-t", "tmpfs", "-o", "ro,size=1g", "bed"]));
    let tested = test(&params_for(mount.path()), None);
    assert_eq!(tested.verdict(), "fail storage-read-only");
    expect_no_leftovers(mount.path());
}

#[test]
fn a_disk_that_fails_beneath_its_file_system_is_a_finding() {
    let (mount, image) = fixture_or_skip!("a failing disk", Mount::failing_disk());
    let tested = test(&params_for(mount.path()), None);
    assert_eq!(tested.verdict(), "fail storage-io-error");
    wait_until("the processes to go", || processes_on(mount.path()).is_empty());
    drop(mount);
    drop(image);
}

#[test]
fn a_missing_mount_is_a_finding_and_the_disk_below_is_not_tested() {
    fixture_or_skip!("fio", Ok(()));
    let directory = tempfile::tempdir().unwrap();
    assert_eq!(test(&params_for(directory.path()), None).verdict(), "fail storage-missing");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn a_mount_that_does_not_respond_is_a_finding_within_the_timeout() {
    let below = tempfile::tempdir().unwrap();
    let mut mount = fixture_or_skip!("a mount served by a process", Mount::served(below.path()));
    mount.stop();
    let tested = test(&format!("{}stall = '1s'\n", params_for(mount.path())), None);
    assert_eq!(tested.verdict(), "fail storage-stalled");
    assert!(tested.elapsed < Duration::from_secs(30), "{:?}", tested.elapsed);
    mount.release();
    expect_no_leftovers(mount.path());
}

#[test]
fn a_mount_that_hangs_while_fio_writes_is_not_tested_again_until_it_responds() {
    let mut mount = fixture_or_skip!("a frozen file system", Mount::disk(&std::env::temp_dir(), 1024));
    let state = tempfile::tempdir().unwrap();
    // Long enough that a busy machine does not stall by itself before it is frozen.
    let params =
        format!("mounts = ['{}']\nsize = '32MiB'\npattern_time = '30s'\nstall = '10s'\n", mount.path().display());
    let mut node = start_test(&params, state.path());
    wait_for_fio(mount.path());
    if let Err(error) = mount.freeze() {
        return not_run("a frozen file system", &error);
    }
    let started = Instant::now();
    let output = node.wait_for_output();
    assert!(output.contains("storage-stalled") && output.contains("fio hangs in the kernel"), "{output}");
    assert!(started.elapsed() < DEAD, "{:?}", started.elapsed());
    let hanging = processes_on(mount.path());
    assert!(hanging.iter().any(|pid| name(*pid) == "fio"), "{hanging:?}");

    let (started, again) = (Instant::now(), start_test(&params, state.path()).wait_for_output());
    assert!(again.contains("storage-stalled") && again.contains("still hangs"), "{again}");
    assert!(started.elapsed() < DEAD, "{:?}", started.elapsed());
    assert_eq!(processes_on(mount.path()), hanging, "they pile up");

    mount.release();
    // The keeper removes the files at last.
    expect_no_leftovers(mount.path());
}

#[test]
fn a_frozen_file_system_is_a_finding_and_hung_processes_do_not_pile_up() {
    let mut mount = fixture_or_skip!("a frozen file system", Mount::disk(&std::env::temp_dir(), 1024));
    if let Err(error) = mount.freeze() {
        return not_run("a frozen file system", &error);
    }
    let state = tempfile::tempdir().unwrap();
    let params = format!("{}stall = '1s'\n", params_for(mount.path()));
    let tested = test(&params, Some(state.path()));
    assert_eq!(tested.verdict(), "fail storage-stalled");
    assert!(tested.elapsed < Duration::from_secs(30), "{:?}", tested.elapsed);
    assert_eq!(processes_on(mount.path()).len(), 1, "the one that cannot be killed");

    let again = test(&params.replace("stall = '1s'", "stall = '1m'"), Some(state.path()));
    assert_eq!(again.verdict(), "fail storage-stalled");
    assert!(again.judgement.text.contains("still hangs"), "{}", again.judgement.text);
    assert!(again.elapsed < Duration::from_secs(50), "it waits for what hangs: {:?}", again.elapsed);
    assert_eq!(processes_on(mount.path()).len(), 1, "they pile up");

    mount.release();
    wait_until("the processes to go", || processes_on(mount.path()).is_empty());
    let long = params_for(mount.path()).replace("200ms", "2m");
    let tested = test(&format!("{long}timeout = '15s'\n"), Some(state.path()));
    assert_eq!(tested.verdict(), "inconclusive timed-out", "it is tried again, and not for longer than it may");
    assert!(tested.log.contains("MiB free"), "{}", tested.log);
    expect_no_leftovers(mount.path());
}

/// A running `doctor-node test storage`.
struct Node {
    child: Child,
    _policy: TempDir,
}

fn start_test(params: &str, state: &Path) -> Node {
    start_test_with(params, state, std::env::var("PATH").unwrap().as_ref())
}

fn start_test_with(params: &str, state: &Path, path: &Path) -> Node {
    let policy = tempfile::tempdir().unwrap();
    let file = policy.path().join("policy.toml");
    fs::write(&file, format!("[tests.storage.params]\n{params}")).unwrap();
    let mut command = Command::new(PROGRAM);
    command.args(["test", "storage", "--json", "--policy"]).arg(&file).arg("--state").arg(state).env("PATH", path);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().unwrap();
    Node { child, _policy: policy }
}

impl Node {
    /// Returns its output.
    fn wait_for_output(&mut self) -> String {
        let lines = BufReader::new(self.child.stdout.take().unwrap());
        let lines: Vec<_> = lines.lines().map(Result::unwrap).collect();
        self.child.wait().unwrap();
        lines.join("\n")
    }

    /// Returns the pid of the test's own process.
    fn test_process(&self) -> u32 {
        let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", self.child.id())).unwrap_or_default();
        let mut children = children.split_ascii_whitespace().map(|pid| pid.parse().unwrap());
        children.find(|pid| is_running(*pid, "\0storage\0")).unwrap()
    }
}

fn is_running(pid: u32, argument: &str) -> bool {
    fs::read_to_string(format!("/proc/{pid}/cmdline")).is_ok_and(|command_line| command_line.contains(argument))
}

/// Starts a long test and waits until fio writes.
fn start_and_wait_for_fio(directory: &Path, state: &Path) -> Node {
    let params = format!("directories = ['{}']\nsize = '32MiB'\npattern_time = '30s'\n", directory.display());
    let node = start_test(&params, state);
    wait_for_fio(directory);
    node
}

fn wait_for_fio(directory: &Path) {
    wait_until("fio to write", || {
        let runs = fs::read_dir(directory.join(".cluster-doctor")).into_iter().flatten().flatten();
        runs.into_iter().any(|run| fs::metadata(run.path().join("one")).is_ok_and(|file| file.len() > 0))
    });
}

#[test]
fn on_sigterm_the_test_ends_within_two_seconds_and_removes_its_files() {
    fixture_or_skip!("fio", Ok(()));
    let time_to_stop = || {
        let (directory, state) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut node = start_and_wait_for_fio(directory.path(), state.path());
        let started = Instant::now();
        signal(node.child.id(), Signal::TERM);
        let (output, elapsed) = (node.wait_for_output(), started.elapsed());
        assert!(output.contains("inconclusive") && output.contains("stopped by a signal"), "{output}");
        expect_no_leftovers(directory.path());
        elapsed
    };
    // A busy machine may miss the limit a few times; a program that is too slow misses it every time.
    assert!((0..10).any(|_| time_to_stop() < Duration::from_secs(2)), "it never takes less than two seconds");
}

#[test]
fn killed_at_any_level_it_leaves_nothing() {
    fixture_or_skip!("fio", Ok(()));
    for of in [Node::test_process, |node: &Node| node.child.id()] {
        let (directory, state) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut node = start_and_wait_for_fio(directory.path(), state.path());
        signal(of(&node), Signal::KILL);
        node.wait_for_output();
        expect_no_leftovers(directory.path());
    }
}

#[test]
fn what_a_test_left_whose_every_process_was_killed_goes_with_the_next_one() {
    fixture_or_skip!("fio", Ok(()));
    let (directory, state) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut node = start_and_wait_for_fio(directory.path(), state.path());
    let all = [processes_on(directory.path()), vec![node.test_process(), node.child.id()]].concat();
    assert!(all.len() >= 4, "the test, its keeper, fio and the command: {all:?}");
    // Kill the keeper first, or it would clean up.
    let (keeper, others): (Vec<u32>, Vec<u32>) = all.into_iter().partition(|pid| is_running(*pid, "storage-keep"));
    for pid in keeper.into_iter().chain(others) {
        // Some end with their parents.
        let _killed = kill_process(Pid::from_raw(i32::try_from(pid).unwrap()).unwrap(), Signal::KILL);
    }
    node.wait_for_output();
    wait_until("all to be gone", || processes_on(directory.path()).is_empty());
    assert!(directory.path().join(".cluster-doctor").exists());
    let tested = test(&format!("directories = ['{}']\n{SMALL}", directory.path().display()), None);
    assert!(tested.log.contains("removed the files of 1 earlier tests"), "{}", tested.log);
    expect_no_leftovers(directory.path());
}

/// A directory with this script as `fio`, before the real one in `PATH`.
fn with_fio(script: &str) -> (TempDir, PathBuf) {
    let bin = tempfile::tempdir().unwrap();
    let fio = bin.path().join("fio");
    fs::write(&fio, script).unwrap();
    fs::set_permissions(&fio, fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", bin.path().display(), std::env::var("PATH").unwrap());
    (bin, PathBuf::from(path))
}

#[test]
fn a_corrupted_byte_is_found() {
    fixture_or_skip!("fio", Ok(()));
    let real = String::from_utf8(run("sh", &["-c", "command -v fio"]).unwrap().stdout).unwrap();
    // Writes as requested, then changes one byte on disk before it is read back.
    let script = format!(
        "#!/bin/sh\ncase \"$*\" in *--verify=*) {fio} \"$@\" --do_verify=0 >/dev/null\n\
         printf X | dd of=verify bs=1 seek=1500000 conv=notrunc status=none\nexec {fio} \"$@\" --verify_only;; esac\n\
         exec {fio} \"$@\"\n",
        fio = real.trim()
    );
    let (_bin, path) = with_fio(&script);
    let (directory, state) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let params = format!("directories = ['{}']\n{SMALL}", directory.path().display());
    let output = start_test_with(&params, state.path(), &path).wait_for_output();
    assert!(output.contains("storage-corrupt") && output.contains("isolate"), "{output}");
    expect_no_leftovers(directory.path());
}

#[test]
fn without_fio_the_test_does_not_apply_and_if_fio_fails_it_is_inconclusive() {
    let (directory, state, empty) =
        (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let params = format!("directories = ['{}']\n{SMALL}", directory.path().display());
    let mut without = start_test_with(&params, state.path(), empty.path());
    let output = without.wait_for_output();
    assert!(output.contains("\"not-applicable\"") && output.contains("fio is not installed"), "{output}");
    assert_eq!(without.child.wait().unwrap().code(), Some(3));

    let script =
        "#!/bin/sh\ncase \"$1\" in --version) echo fio-3.33;; --enghelp=*) ;; *) echo broken >&2; exit 1;; esac\n";
    let (_bin, path) = with_fio(script);
    let output = start_test_with(&params, state.path(), &path).wait_for_output();
    assert!(output.contains("\"inconclusive\"") && output.contains("exit code 1: broken"), "{output}");
    expect_no_leftovers(directory.path());
}
