//! Other sources about NVIDIA GPUs: `nvidia-smi` if the driver's library cannot be loaded, and DCGM if it is installed.
//! The real program uses fakes of both.

use std::{
    fs,
    net::TcpListener,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
    time::{Duration, Instant},
};

use doctor_testbed::fake_machine::{FakeMachine, InstalledMachine, fake_nvidia_library};
use serde_json::Value;
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_doctor-node");
const NO_LIBRARY: &str = "libdoctor-has-none.so.1";
/// From one H200; here it is the machine's first GPU.
const LOG: &str = include_str!("../../checks/fixtures/nvidia-smi/h200.xml");

fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| fake_nvidia_library(Path::new(PROGRAM)))
}

/// Returns `CHECK VERDICT REASON ENTITY` for each row.
fn rows(command: &mut Command) -> Vec<String> {
    let output = command.output().unwrap();
    let rows: Vec<Value> = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
    let field = |row: &Value, key: &str| row[key].as_str().unwrap_or("-").to_owned();
    rows.iter().map(|row| ["check", "verdict", "reason", "entity"].map(|key| field(row, key)).join(" ")).collect()
}

/// Runs checks on a machine without the library, with this script as `nvidia-smi`.
fn with_nvidia_smi(script: &str, checks: &[&str]) -> Vec<String> {
    let machine = FakeMachine::hgx_h100().install(Path::new(PROGRAM), Path::new(NO_LIBRARY));
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("nvidia-smi");
    fs::write(folder.path().join("log.xml"), LOG.replace("00000000:00:06.0", "00000000:18:00.0")).unwrap();
    fs::write(&program, format!("#!/bin/sh\ncd '{}'\n{script}\n", folder.path().display())).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:/usr/bin:/bin", folder.path().display());
    rows(machine.command(checks).arg("--json").env("PATH", path))
}

#[test]
fn without_the_library_nvidia_smi_is_read_and_missing_fields_are_not_a_pass() {
    let checks = ["gpu-driver", "gpu-row-remap", "gpu-ecc-volatile", "gpu-inforom", "nvlink-state"];
    let results = with_nvidia_smi("[ \"$*\" = '-q -x' ] && cat log.xml", &checks);
    let expected = [
        "gpu-driver pass within-limits node",
        "gpu-row-remap pass within-limits node",
        "gpu-ecc-volatile pass within-limits node",
        "gpu-inforom inconclusive failed node",
        "nvlink-state inconclusive failed node",
    ];
    assert_eq!(results, expected);
    let pending = "sed 's/<remapped_row_pending>No/<remapped_row_pending>Yes/' log.xml";
    let results = with_nvidia_smi(pending, &["gpu-row-remap"]);
    assert_eq!(results, ["gpu-row-remap fail row-remap-pending gpu:0000:18:00.0"]);
}

#[test]
fn without_complete_nvidia_smi_output_the_missing_library_is_reported() {
    for script in ["exit 9", "head -c 2000 log.xml", "echo 'No devices were found'; exit 6", "yes"] {
        let results = with_nvidia_smi(script, &["gpu-row-remap"]);
        assert_eq!(results, ["gpu-row-remap inconclusive missing node"], "{script}");
    }
}

/// A machine with DCGM, whose engine is the listener at the test's own address.
struct Engine {
    machine: InstalledMachine,
    folder: TempDir,
    listener: Option<TcpListener>,
}

impl Engine {
    fn new(text: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let policy = format!("[tests.dcgm-health.params]\naddress = \"{}\"\n", listener.local_addr().unwrap());
        let machine = FakeMachine::hgx_h100().policy(&policy).install(Path::new(PROGRAM), library());
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("dcgm.toml"), text).unwrap();
        Self { machine, folder, listener: Some(listener) }
    }

    fn run_check(&self, dcgm: &Path) -> Vec<String> {
        let mut command = self.machine.command(&["dcgm-health", "--json"]);
        rows(command.env("DOCTOR_DCGM", dcgm).env("DOCTOR_FAKE_NVIDIA_DCGM", self.folder.path().join("dcgm.toml")))
    }
}

const GPUS: &str = "gpus = [\"00000000:18:00.0\", \"00000000:28:00.0\"]\n";

fn incident(gpu: u32, error: u32) -> String {
    format!("[[incident]]\ngpu = {gpu}\nsystem = 16\nhealth = 20\nerror = {error}\ntext = \"something is wrong\"\n")
}

#[test]
fn health_watches_of_dcgm_3_and_4_are_findings_by_gpu_and_error() {
    for major in [3, 4] {
        let healthy = format!("major = {major}\nwatched = 467\n{GPUS}");
        assert_eq!(Engine::new(&healthy).run_check(library()), ["dcgm-health pass within-limits node"], "DCGM {major}");
        let with_incidents = format!("{healthy}{}{}", incident(1, 4), incident(0, 14));
        let results = Engine::new(&with_incidents).run_check(library());
        let expected =
            ["dcgm-health fail dcgm-isolate gpu:0000:28:00.0", "dcgm-health fail dcgm-triage gpu:0000:18:00.0"];
        assert_eq!(results, expected, "DCGM {major}");
    }
}

#[test]
fn disabled_watches_are_enabled_and_are_not_a_pass() {
    let engine = Engine::new(&format!("major = 4\nwatched = 0\n{GPUS}{}", incident(0, 4)));
    assert_eq!(engine.run_check(library()), ["dcgm-health inconclusive empty node"]);
    assert_eq!(engine.run_check(library()), ["dcgm-health fail dcgm-isolate gpu:0000:18:00.0"]);
}

#[test]
fn dcgm_that_is_not_installed_not_running_or_refuses_has_different_results() {
    let engine = Engine::new(&format!("major = 4\nwatched = 467\n{GPUS}"));
    assert_eq!(engine.run_check(Path::new(NO_LIBRARY)), ["dcgm-health not-applicable no-dcgm node"]);
    let refusing = Engine::new("major = 4\nconnect = -21\n");
    assert_eq!(refusing.run_check(library()), ["dcgm-health inconclusive failed node"]);
    let mut stopped = engine;
    drop(stopped.listener.take());
    assert_eq!(stopped.run_check(library()), ["dcgm-health not-applicable dcgm-not-running node"]);
}

#[test]
fn a_hung_dcgm_times_out() {
    let engine = Engine::new(&format!("major = 4\nwatched = 467\nhang = \"dcgmHealthCheck\"\n{GPUS}"));
    let started = Instant::now();
    let mut command = engine.machine.command(&["dcgm-health", "--json"]);
    command.env("DOCTOR_DCGM", library()).env("DOCTOR_FAKE_NVIDIA_DCGM", engine.folder.path().join("dcgm.toml"));
    assert_eq!(rows(&mut command), ["dcgm-health inconclusive timed-out node"]);
    assert!(started.elapsed() < Duration::from_secs(240), "it took {:?}", started.elapsed());
}
