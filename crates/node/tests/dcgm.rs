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

fn wait<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    for _ in 0..2000 {
        if let Some(seen) = look() {
            return seen;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("timed out waiting for {what}");
}

fn stat(pid: u32) -> Option<ProcStat> {
    ProcStat::parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?).filter(|stat| !stat.has_exited())
}

fn gone(what: &str, pid: u32) {
    wait(&format!("{what} ({pid}) to go"), || stat(pid).is_none().then_some(()));
}

fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(i32::try_from(pid).unwrap()).unwrap(), signal).unwrap();
}

/// A machine with DCGM.
struct Bed {
    standing: InstalledMachine,
    folder: TempDir,
    /// The listener of a running engine; `None` if none runs.
    listener: Option<TcpListener>,
    address: String,
    settings: Vec<String>,
}

impl Bed {
    /// `dcgmi` runs this script in the fixture's directory. An engine is running.
    fn new(dcgmi: &str) -> Self {
        Self::on(&FakeMachine::hgx_h100(), dcgmi)
    }

    fn on(machine: &FakeMachine, dcgmi: &str) -> Self {
        let standing = machine.install(Path::new(PROGRAM), library());
        let folder = tempfile::tempdir().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        fs::create_dir(folder.path().join("bin")).unwrap();
        fs::create_dir(folder.path().join("tmp")).unwrap();
        let bed = Self { standing, folder, listener: Some(listener), address, settings: Vec::new() };
        bed.program("dcgmi", &format!("echo \"$*\" >> calls\n{dcgmi}"));
        bed
    }

    fn program(&self, name: &str, script: &str) {
        let file = self.at("bin").join(name);
        fs::write(&file, format!("#!/bin/sh\ncd '{}'\n{script}\n", self.folder.path().display())).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// No engine runs, but one can be started: this test program, as [`stand_in_for_the_host_engine`]. It has a worker
    /// that detaches itself.
    fn without_engine(mut self) -> Self {
        drop(self.listener.take());
        let us = std::env::current_exe().unwrap();
        let script = format!(
            "echo \"$*\" > arguments\nsetsid sleep 3600 &\necho $! > worker\necho $$ > engine\n\
             DOCTOR_FAKE_NVIDIA_ENGINE='{}' exec '{}' --exact stand_in_for_the_host_engine --nocapture",
            self.address,
            us.display()
        );
        self.program("nv-hostengine", &script);
        self
    }

    fn set(mut self, setting: &str) -> Self {
        self.settings.push(setting.to_owned());
        self
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn answer(self, text: &str) -> Self {
        fs::write(self.at("answer.json"), text).unwrap();
        self
    }

    fn number(&self, name: &str) -> Option<u32> {
        fs::read_to_string(self.at(name)).ok()?.trim().parse().ok()
    }

    fn calls(&self) -> String {
        fs::read_to_string(self.at("calls")).unwrap_or_default()
    }

    fn command(&self, level: u8) -> Command {
        let mut command = Command::new(PROGRAM);
        command.args(["test", "dcgm", "--json", "--level", &level.to_string()]);
        command.arg("--root").arg(self.standing.path("root")).arg("--nvml").arg(library());
        command.arg("--set").arg(format!("address={}", self.address));
        for setting in &self.settings {
            command.arg("--set").arg(setting);
        }
        command.env("DOCTOR_FAKE_NVIDIA", self.standing.path("scene.toml")).env("TMPDIR", self.at("tmp"));
        command.env("PATH", format!("{}:/usr/bin:/bin", self.at("bin").display()));
        command
    }

    /// Returns `VERDICT REASON ENTITY TEXT` for each row, and the exit code.
    fn test(&self, level: u8) -> (Vec<String>, i32) {
        let output = self.command(level).output().unwrap();
        let rows: Vec<Value> = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
        let word = |row: &Value, key: &str| row[key].as_str().unwrap_or("-").to_owned();
        let line = |row: &Value| ["verdict", "reason", "entity", "text"].map(|key| word(row, key)).join(" ");
        (rows.iter().map(line).collect(), output.status.code().unwrap())
    }

    /// Returns the only row of a test without findings.
    fn says(&self, level: u8, begins: &str) -> String {
        let (rows, code) = self.test(level);
        assert!(rows.len() == 1 && rows[0].starts_with(begins), "{rows:?} should begin with {begins}");
        assert_eq!(code, if begins.starts_with("pass") { 0 } else { 3 }, "{rows:?}");
        rows.into_iter().next().unwrap()
    }

    fn nothing_is_left(&self) {
        for what in ["engine", "worker", "dcgmi"] {
            if let Some(pid) = self.number(what) {
                gone(what, pid);
            }
        }
        let left = || fs::read_dir(self.at("tmp")).unwrap().count();
        wait("the engine's folder to go", || (left() == 0).then_some(()));
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
    for visitor in TcpListener::bind(address).unwrap().incoming() {
        drop(visitor);
    }
}

#[test]
fn a_machine_that_passes_is_asked_as_dcgm_wants_and_its_engine_stays() {
    let bed = Bed::new("cat answer.json").answer(&passed(&LEVEL_2)).set("parameters=[\"pcie.test_pinned=false\"]");
    bed.says(2, "pass within-limits");
    assert_eq!(bed.calls(), format!("diag --host {} -j -r 2 -p pcie.test_pinned=false\n", bed.address));
    assert!(bed.listener.is_some() && bed.number("engine").is_none());
    let deepest =
        ["software", "memory", "pcie", "diagnostic", "targeted_stress", "targeted_power", "memtest", "pulse_test"];
    let bed = bed.answer(&passed(&deepest)).set("parameters=[\"memtest.test_duration=60\"]").set("skip=[\"eud\"]");
    bed.says(4, "pass within-limits");
    assert!(bed.calls().ends_with(" -j -r 4 -p memtest.test_duration=60;eud.is_allowed=false\n"), "{}", bed.calls());
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
        let (rows, exit) = Bed::new("cat answer.json; exit 226").answer(&fs::read_to_string(path).unwrap()).test(2);
        let rows: Vec<_> = rows.iter().map(|row| row.split(' ').take(3).collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(
            (rows.as_slice(), exit),
            (&expected.iter().map(|row| (*row).to_owned()).collect::<Vec<_>>()[..], code)
        );
    }
}

#[test]
fn what_dcgm_did_not_say_in_full_has_not_passed() {
    let whole = passed(&LEVEL_2);
    for (script, answer, begins) in [
        ("cat answer.json; exit 205", whole.as_str(), "inconclusive failed node no test failed, but"),
        ("cat answer.json; kill -9 $$", &whole, "inconclusive killed node no test failed, but"),
        ("cat answer.json", &whole[..whole.len() / 2], "inconclusive unparseable"),
        ("exit 0", "", "inconclusive empty node dcgmi printed nothing"),
        ("echo 'Error: unable to establish a connection'; exit 1", "", "inconclusive failed"),
        ("cat answer.json", &passed(&["software", "memory"]), "inconclusive empty node pcie is part of this level"),
        ("sed 's/Pass/Skip/' answer.json", &whole, "inconclusive empty node DCGM skipped memory on gpu:0000:18:00.0"),
        ("sed 's/Pass/Not Run/' answer.json", &whole, "inconclusive failed node software did not run"),
        ("yes", "", "inconclusive too-long"),
    ] {
        Bed::new(script).answer(answer).says(2, begins);
    }
    let (rows, code) = Bed::new("sed '2s/Pass/Warn/' answer.json").answer(&whole).test(2);
    assert!(rows[0].starts_with("fail dcgm-warned gpu:0000:18:00.0") && code == 1, "{rows:?}");
}

#[test]
fn gpus_in_use_or_divided_are_not_diagnosed_from_level_2_on() {
    let us = f64::from(std::process::id());
    let busy =
        Bed::on(&FakeMachine::hgx_h100().gpu(3, "process.0.pid", us), "cat answer.json").answer(&passed(&LEVEL_2));
    let said = busy.says(2, "inconclusive failed");
    assert!(said.contains("`gpus-free`: gpu:0000:48:00.0 is used by process"), "{said}");
    let divided = Bed::on(&FakeMachine::hgx_h100().gpu(2, "mig.mode.current", 1.0), "cat answer.json");
    let divided = divided.answer(&passed(&LEVEL_2));
    assert!(divided.says(4, "inconclusive failed").contains("`mig-off`: gpu:0000:38:00.0 has MIG enabled"));
    assert_eq!(busy.calls() + &divided.calls(), "", "nothing was loaded");
    busy.says(1, "pass within-limits");
    let unknown = Bed::on(&FakeMachine::hgx_h100().gpu_lost(1, 15), "cat answer.json").answer(&passed(&LEVEL_2));
    assert!(unknown.says(2, "inconclusive failed").contains("unknown ("));
}

#[test]
fn an_engine_of_ours_lasts_as_long_as_the_test() {
    let bed = Bed::new("test -e engine && cat answer.json").answer(&passed(&LEVEL_2)).without_engine();
    bed.says(2, "pass within-limits");
    let arguments = fs::read_to_string(bed.at("arguments")).unwrap();
    let port = bed.address.rsplit_once(':').unwrap().1;
    assert!(arguments.starts_with(&format!("-n -b 127.0.0.1 -p {port} -f ")), "{arguments}");
    bed.nothing_is_left();
}

#[test]
fn without_an_engine_or_a_way_to_start_one_nothing_is_diagnosed() {
    let mut none = Bed::new("cat answer.json").answer(&passed(&LEVEL_2));
    drop(none.listener.take());
    assert!(none.says(2, "inconclusive missing").contains("nv-hostengine is not installed"));
    none.program("nv-hostengine", "echo 'Err: Failed to start DCGM Server: -7'; exit 255");
    assert!(none.says(2, "inconclusive failed").contains("ended before it answered"));
    let stat = "900 (nv-hostengine) S 1 900 900 0 -1 4194560 1 0 0 0 1 2 3 4 20 0 1 0 1000 3149824 384";
    let elsewhere =
        Bed::on(&FakeMachine::hgx_h100().with_new("/proc/900/stat", stat), "cat answer.json").without_engine();
    assert!(elsewhere.says(2, "inconclusive failed").contains("runs as process 900"));
    assert_eq!(none.calls() + &elsewhere.calls(), "");
    let missing = Bed::new("").set("program=dcgmi-missing");
    assert!(missing.says(1, "inconclusive missing").contains("dcgmi-missing is not installed"));
}

#[test]
fn a_diagnosis_that_hangs_is_told_to_stop_and_then_ended_with_all_it_started() {
    let polite = Bed::new(POLITE);
    // Long enough for a shell to start on a busy machine.
    let polite = polite.set("timeout=4s").without_engine();
    assert!(polite.says(2, "inconclusive timed-out").contains("did not end within 4s"));
    assert!(polite.at("asked").exists(), "it may have something to tidy up");
    polite.nothing_is_left();
    let deaf = Bed::new(DEAF).set("timeout=500ms");
    let begun = Instant::now();
    deaf.says(2, "inconclusive timed-out");
    assert!(begun.elapsed() < Duration::from_secs(240), "{:?}", begun.elapsed());
    deaf.nothing_is_left();
}

/// A `dcgmi` that hangs until SIGTERM.
const POLITE: &str = "trap 'echo yes > asked; kill $!; exit 3' TERM\nsleep 3600 & echo $$ > dcgmi; wait";
/// One that ignores SIGTERM.
const DEAF: &str = "trap '' TERM\nsleep 3600 & echo $! > worker; echo $$ > dcgmi; wait";

/// Starts a test that hangs in its diagnosis, and returns its process.
fn hanging(bed: Bed) -> (Bed, Child, u32) {
    let mut command = bed.command(2);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let dcgmi = wait("dcgmi to run", || bed.number("dcgmi"));
    let test = stat(dcgmi).unwrap().parent;
    (bed, child, test)
}

#[test]
fn nothing_outlives_a_test_that_is_stopped_or_killed() {
    let (bed, child, test) = hanging(Bed::new(POLITE).without_engine());
    signal(child.id(), Signal::TERM);
    let said = child.wait_with_output().unwrap();
    assert!(String::from_utf8_lossy(&said.stdout).contains("killed"), "{said:?}");
    gone("the test", test);
    bed.nothing_is_left();
    assert!(bed.at("asked").exists());

    let (bed, child, test) = hanging(Bed::new(POLITE).without_engine());
    signal(test, Signal::KILL);
    let said = child.wait_with_output().unwrap();
    assert_eq!(said.status.code(), Some(3), "{said:?}");
    bed.nothing_is_left();
    assert!(bed.at("asked").exists(), "an engine of another owner would continue the diagnosis");

    let (bed, mut child, test) = hanging(Bed::new(POLITE).without_engine());
    child.kill().unwrap();
    child.wait().unwrap();
    gone("the test", test);
    bed.nothing_is_left();

    let (bed, mut child, _) = hanging(Bed::new(DEAF));
    signal(child.id(), Signal::TERM);
    child.wait().unwrap();
    bed.nothing_is_left();
}

#[test]
fn a_level_is_for_dcgm_alone() {
    let output = Command::new(PROGRAM).args(["test", "storage", "--level", "2"]).output().unwrap();
    assert_eq!(output.status.code(), Some(3));
    assert!(String::from_utf8_lossy(&output.stderr).contains("--level is for the test `dcgm`"));
    let output = Command::new(PROGRAM).args(["test", "dcgm", "--level", "5"]).output().unwrap();
    assert_eq!(output.status.code(), Some(3));
}
