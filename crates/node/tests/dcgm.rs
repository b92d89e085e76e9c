//! The DCGM test on a simulated machine: the driver is the fake library, and each test writes its own `dcgmi` and
//! `nv-hostengine`. Their output has the format of DCGM 3 and 4, written by hand after its JSON writer; these tests
//! have never run with a real DCGM.

use std::{
    fmt::Write as _,
    fs,
    net::TcpListener,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::OnceLock,
    time::{Duration, Instant},
};

use doctor_checks::proc_stat::ProcStat;
use doctor_testbed::fake_machine::{FakeMachine, GPUS, InstalledMachine, fake_nvidia_library};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_doctor-node");

fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| fake_nvidia_library(Path::new(PROGRAM)))
}

fn wait_for<T>(what: &str, mut poll: impl FnMut() -> Option<T>) -> T {
    for _ in 0..2000 {
        if let Some(value) = poll() {
            return value;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("timed out waiting for {what}");
}

fn stat(pid: u32) -> Option<ProcStat> {
    ProcStat::parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?).filter(|stat| !stat.has_exited())
}

fn wait_for_exit(what: &str, pid: u32) {
    wait_for(&format!("{what} ({pid}) to go"), || stat(pid).is_none().then_some(()));
}

fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(i32::try_from(pid).unwrap()).unwrap(), signal).unwrap();
}

/// A machine with DCGM.
struct Testbed {
    machine: InstalledMachine,
    folder: TempDir,
    /// The listener of a running engine; `None` if none runs.
    listener: Option<TcpListener>,
    address: String,
    settings: Vec<String>,
}

impl Testbed {
    /// `dcgmi` runs this script in the fixture's directory. An engine is running.
    fn new(dcgmi: &str) -> Self {
        Self::on(&FakeMachine::hgx_h100(), dcgmi)
    }

    fn on(fake: &FakeMachine, dcgmi: &str) -> Self {
        let machine = fake.install(Path::new(PROGRAM), library());
        let folder = tempfile::tempdir().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        fs::create_dir(folder.path().join("bin")).unwrap();
        fs::create_dir(folder.path().join("tmp")).unwrap();
        let testbed = Self { machine, folder, listener: Some(listener), address, settings: Vec::new() };
        testbed.program("dcgmi", &format!("echo \"$*\" >> calls\n{dcgmi}"));
        testbed
    }

    fn program(&self, name: &str, script: &str) {
        let file = self.file("bin").join(name);
        fs::write(&file, format!("#!/bin/sh\ncd '{}'\n{script}\n", self.folder.path().display())).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// No engine runs, but one can be started: this test program, as [`stand_in_for_the_host_engine`]. It has a worker
    /// that detaches itself.
    fn without_engine(mut self) -> Self {
        drop(self.listener.take());
        let test_program = std::env::current_exe().unwrap();
        let script = format!(
            "echo \"$*\" > arguments\nsetsid sleep 3600 &\necho $! > worker\necho $$ > engine\n\
             DOCTOR_FAKE_NVIDIA_ENGINE='{}' exec '{}' --exact stand_in_for_the_host_engine --nocapture",
            self.address,
            test_program.display()
        );
        self.program("nv-hostengine", &script);
        self
    }

    fn set(mut self, setting: &str) -> Self {
        self.settings.push(setting.to_owned());
        self
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn dcgmi_output(self, text: &str) -> Self {
        fs::write(self.file("answer.json"), text).unwrap();
        self
    }

    fn pid_in(&self, name: &str) -> Option<u32> {
        fs::read_to_string(self.file(name)).ok()?.trim().parse().ok()
    }

    fn calls(&self) -> String {
        fs::read_to_string(self.file("calls")).unwrap_or_default()
    }

    fn command(&self, level: u8) -> Command {
        let mut command = Command::new(PROGRAM);
        command.args(["test", "dcgm", "--json", "--level", &level.to_string()]);
        command.arg("--root").arg(self.machine.path("root")).arg("--nvml").arg(library());
        command.arg("--set").arg(format!("address={}", self.address));
        for setting in &self.settings {
            command.arg("--set").arg(setting);
        }
        command.env("DOCTOR_FAKE_NVIDIA", self.machine.path("nvml.toml")).env("TMPDIR", self.file("tmp"));
        command.env("PATH", format!("{}:/usr/bin:/bin", self.file("bin").display()));
        command
    }

    /// Returns `VERDICT REASON ENTITY TEXT` for each row, and the exit code.
    fn test(&self, level: u8) -> (Vec<String>, i32) {
        let output = self.command(level).output().unwrap();
        let rows: Vec<Value> = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
        let field = |row: &Value, key: &str| row[key].as_str().unwrap_or("-").to_owned();
        let line = |row: &Value| ["verdict", "reason", "entity", "text"].map(|key| field(row, key)).join(" ");
        (rows.iter().map(line).collect(), output.status.code().unwrap())
    }

    /// Returns the only row of a test without findings.
    fn expect_only_row(&self, level: u8, begins: &str) -> String {
        let (rows, code) = self.test(level);
        assert!(rows.len() == 1 && rows[0].starts_with(begins), "{rows:?} should begin with {begins}");
        assert_eq!(code, if begins.starts_with("pass") { 0 } else { 3 }, "{rows:?}");
        rows.into_iter().next().unwrap()
    }

    fn expect_no_leftovers(&self) {
        for name in ["engine", "worker", "dcgmi"] {
            if let Some(pid) = self.pid_in(name) {
                wait_for_exit(name, pid);
            }
        }
        let remaining = || fs::read_dir(self.file("tmp")).unwrap().count();
        wait_for("the engine's folder to go", || (remaining() == 0).then_some(()));
    }
}

/// DCGM 4's output for all GPUs, with these tests passed.
fn passed(tests: &[&str]) -> String {
    let results: Vec<_> = (0..GPUS)
        .map(|id| format!("{{\"entity_group\":\"GPU\",\"entity_group_id\":1,\"entity_id\":{id},\"status\":\"Pass\"}}"))
        .collect();
    let mut out = String::from("{\"DCGM Diagnostic\":{\"test_categories\":[{\"category\":\"Hardware\",\"tests\":[");
    for (n, test) in tests.iter().enumerate() {
        let comma = if n > 0 { "," } else { "" };
        let results = results.join(",");
        let _infallible = write!(
            out,
            "{comma}\n{{\"name\":\"{test}\",\"results\":[{results}],\"test_summary\":{{\"status\":\"Pass\"}}}}"
        );
    }
    out + "]}]},\"metadata\":{\"version\":\"4.1.0\"}}\n"
}

const LEVEL_2: [&str; 3] = ["software", "memory", "pcie"];

/// Not a test: the fake `nv-hostengine`. It listens and drops every connection.
#[test]
fn stand_in_for_the_host_engine() {
    let Ok(address) = std::env::var("DOCTOR_FAKE_NVIDIA_ENGINE") else { return };
    for connection in TcpListener::bind(address).unwrap().incoming() {
        drop(connection);
    }
}

#[test]
fn a_passing_machine_is_diagnosed_with_the_expected_arguments_and_its_engine_keeps_running() {
    let testbed =
        Testbed::new("cat answer.json").dcgmi_output(&passed(&LEVEL_2)).set("parameters=[\"pcie.test_pinned=false\"]");
    testbed.expect_only_row(2, "pass within-limits");
    assert_eq!(testbed.calls(), format!("diag --host {} -j -r 2 -p pcie.test_pinned=false\n", testbed.address));
    assert!(testbed.listener.is_some() && testbed.pid_in("engine").is_none());
    let deepest =
        ["software", "memory", "pcie", "diagnostic", "targeted_stress", "targeted_power", "memtest", "pulse_test"];
    let testbed =
        testbed.dcgmi_output(&passed(&deepest)).set("parameters=[\"memtest.test_duration=60\"]").set("skip=[\"eud\"]");
    testbed.expect_only_row(4, "pass within-limits");
    assert!(
        testbed.calls().ends_with(" -j -r 4 -p memtest.test_duration=60;eud.is_allowed=false\n"),
        "{}",
        testbed.calls()
    );
}

#[test]
fn failures_of_dcgm_3_and_4_are_findings_by_gpu_and_error() {
    for (fixture, expected, code) in [
        ("v4.1-fail.json", &["fail dcgm-52 gpu:0000:28:00.0", "fail dcgm-isolate gpu:0000:18:00.0"][..], 2),
        ("v3.3-fail.json", &["fail dcgm-30 gpu:0000:28:00.0", "fail dcgm-29 node"], 2),
        ("v3.1-fail.json", &["fail dcgm-unrated gpu:0000:18:00.0", "fail dcgm-unrated gpu:0000:28:00.0"], 2),
        ("text-around.json", &["fail dcgm-125 gpu:0000:18:00.0"], 2),
        ("iterations.json", &["fail dcgm-52 gpu:0000:28:00.0"], 2),
    ] {
        let path = format!("{}/../checks/fixtures/dcgm/{fixture}", env!("CARGO_MANIFEST_DIR"));
        let (rows, exit) =
            Testbed::new("cat answer.json; exit 226").dcgmi_output(&fs::read_to_string(path).unwrap()).test(2);
        let rows: Vec<_> = rows.iter().map(|row| row.split(' ').take(3).collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(
            (rows.as_slice(), exit),
            (&expected.iter().map(|row| (*row).to_owned()).collect::<Vec<_>>()[..], code)
        );
    }
}

#[test]
fn incomplete_dcgm_output_is_not_a_pass() {
    let complete = passed(&LEVEL_2);
    for (script, output, begins) in [
        ("cat answer.json; exit 205", complete.as_str(), "inconclusive failed node no test failed, but"),
        ("cat answer.json; kill -9 $$", &complete, "inconclusive killed node no test failed, but"),
        ("cat answer.json", &complete[..complete.len() / 2], "inconclusive unparseable"),
        ("exit 0", "", "inconclusive empty node dcgmi printed nothing"),
        ("echo 'Error: unable to establish a connection'; exit 1", "", "inconclusive failed"),
        ("cat answer.json", &passed(&["software", "memory"]), "inconclusive empty node pcie is part of this level"),
        (
            "sed 's/Pass/Skip/' answer.json",
            &complete,
            "inconclusive empty node DCGM skipped memory on gpu:0000:18:00.0",
        ),
        ("sed 's/Pass/Not Run/' answer.json", &complete, "inconclusive failed node software did not run"),
        ("yes", "", "inconclusive too-long"),
    ] {
        Testbed::new(script).dcgmi_output(output).expect_only_row(2, begins);
    }
    let (rows, code) = Testbed::new("sed '2s/Pass/Warn/' answer.json").dcgmi_output(&complete).test(2);
    assert!(rows[0].starts_with("fail dcgm-warned gpu:0000:18:00.0") && code == 1, "{rows:?}");
}

#[test]
fn gpus_in_use_or_with_mig_are_not_diagnosed_from_level_2_on() {
    let stat = "4711 (python3) S 1 900 900 0 -1 4194560 1 0 0 0 1 2 3 4 20 0 1 0 1000 3149824 384";
    let used = FakeMachine::hgx_h100().gpu(3, "process.0.pid", 4711.0).with_new("/proc/4711/stat", stat);
    let busy = Testbed::on(&used, "cat answer.json").dcgmi_output(&passed(&LEVEL_2));
    let row = busy.expect_only_row(2, "inconclusive disturbed");
    assert!(row.contains("`gpus-free`: gpu:0000:48:00.0 is used by python3 (pid 4711, "), "{row}");
    let with_mig = Testbed::on(&FakeMachine::hgx_h100().gpu(2, "mig.mode.current", 1.0), "cat answer.json");
    let with_mig = with_mig.dcgmi_output(&passed(&LEVEL_2));
    assert!(with_mig.expect_only_row(4, "inconclusive failed").contains("`mig-off`: gpu:0000:38:00.0 has MIG enabled"));
    assert_eq!(busy.calls() + &with_mig.calls(), "", "nothing was loaded");
    busy.expect_only_row(1, "pass within-limits");
    let unknown =
        Testbed::on(&FakeMachine::hgx_h100().gpu_lost(1, 15), "cat answer.json").dcgmi_output(&passed(&LEVEL_2));
    assert!(unknown.expect_only_row(2, "inconclusive failed").contains("unknown ("));
}

#[test]
fn an_engine_that_we_started_ends_with_the_test() {
    let testbed = Testbed::new("test -e engine && cat answer.json").dcgmi_output(&passed(&LEVEL_2)).without_engine();
    testbed.expect_only_row(2, "pass within-limits");
    let arguments = fs::read_to_string(testbed.file("arguments")).unwrap();
    let port = testbed.address.rsplit_once(':').unwrap().1;
    assert!(arguments.starts_with(&format!("-n -b 127.0.0.1 -p {port} -f ")), "{arguments}");
    testbed.expect_no_leftovers();
}

#[test]
fn without_an_engine_or_a_way_to_start_one_no_diagnosis_runs() {
    let mut none = Testbed::new("cat answer.json").dcgmi_output(&passed(&LEVEL_2));
    drop(none.listener.take());
    assert!(none.expect_only_row(2, "not-applicable no-dcgm").contains("nv-hostengine is not installed"));
    none.program("nv-hostengine", "echo 'Err: Failed to start DCGM Server: -7'; exit 255");
    assert!(none.expect_only_row(2, "inconclusive failed").contains("ended before it answered"));
    let stat = "900 (nv-hostengine) S 1 900 900 0 -1 4194560 1 0 0 0 1 2 3 4 20 0 1 0 1000 3149824 384";
    let elsewhere =
        Testbed::on(&FakeMachine::hgx_h100().with_new("/proc/900/stat", stat), "cat answer.json").without_engine();
    assert!(elsewhere.expect_only_row(2, "inconclusive failed").contains("runs as process 900"));
    assert_eq!(none.calls() + &elsewhere.calls(), "");
    let missing = Testbed::new("").set("program=dcgmi-missing");
    assert!(missing.expect_only_row(1, "not-applicable no-dcgm").contains("dcgmi-missing is not installed"));
}

#[test]
fn a_hung_diagnosis_gets_sigterm_and_is_then_killed_with_its_children() {
    let responsive = Testbed::new(POLITE);
    // Long enough for a shell to start on a busy machine.
    let responsive = responsive.set("timeout=15s").without_engine();
    assert!(responsive.expect_only_row(2, "inconclusive timed-out").contains("did not end within 15s"));
    assert!(responsive.file("asked").exists(), "it may have something to tidy up");
    responsive.expect_no_leftovers();
    let unresponsive = Testbed::new(DEAF).set("timeout=500ms");
    let started = Instant::now();
    unresponsive.expect_only_row(2, "inconclusive timed-out");
    assert!(started.elapsed() < Duration::from_secs(240), "{:?}", started.elapsed());
    unresponsive.expect_no_leftovers();
}

/// A `dcgmi` that hangs until SIGTERM.
const POLITE: &str = "trap 'echo yes > asked; kill $!; exit 3' TERM\nsleep 3600 & echo $$ > dcgmi; wait";
/// One that ignores SIGTERM.
const DEAF: &str = "trap '' TERM\nsleep 3600 & echo $! > worker; echo $$ > dcgmi; wait";

/// Starts a test that hangs in its diagnosis, and returns its process.
fn hanging(testbed: Testbed) -> (Testbed, Child, u32) {
    let mut command = testbed.command(2);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let dcgmi = wait_for("dcgmi to run", || testbed.pid_in("dcgmi"));
    let test = stat(dcgmi).unwrap().parent;
    (testbed, child, test)
}

#[test]
fn no_process_outlives_a_test_that_is_stopped_or_killed() {
    let (testbed, child, test) = hanging(Testbed::new(POLITE).without_engine());
    signal(child.id(), Signal::TERM);
    let output = child.wait_with_output().unwrap();
    assert!(String::from_utf8_lossy(&output.stdout).contains("killed"), "{output:?}");
    wait_for_exit("the test", test);
    testbed.expect_no_leftovers();
    assert!(testbed.file("asked").exists());

    let (testbed, child, test) = hanging(Testbed::new(POLITE).without_engine());
    signal(test, Signal::KILL);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    testbed.expect_no_leftovers();
    assert!(testbed.file("asked").exists(), "an engine of another owner would continue the diagnosis");

    let (testbed, mut child, test) = hanging(Testbed::new(POLITE).without_engine());
    child.kill().unwrap();
    child.wait().unwrap();
    wait_for_exit("the test", test);
    testbed.expect_no_leftovers();

    let (testbed, mut child, _) = hanging(Testbed::new(DEAF));
    signal(child.id(), Signal::TERM);
    child.wait().unwrap();
    testbed.expect_no_leftovers();
}

#[test]
fn only_the_dcgm_test_takes_a_level() {
    let output = Command::new(PROGRAM).args(["test", "storage", "--level", "2"]).output().unwrap();
    assert_eq!(output.status.code(), Some(3));
    assert!(String::from_utf8_lossy(&output.stderr).contains("--level is for the test `dcgm`"));
    let output = Command::new(PROGRAM).args(["test", "dcgm", "--level", "5"]).output().unwrap();
    assert_eq!(output.status.code(), Some(3));
}
