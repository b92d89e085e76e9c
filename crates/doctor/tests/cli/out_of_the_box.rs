//! The shipped policy and profiles, unchanged, on one machine: a healthy machine is validated, a bad one is found, and
//! after its repair it returns to service. A machine whose GPUs are all gone is never healthy.

use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::Path,
};

use doctor_testbed::fake_machine::{FakeMachine, GPUS, fake_nvidia_library};
use serde_json::Value;

use crate::{
    slurm_flows::rows,
    this_machine::Service,
    workdir::{Workdir, doctor_node, wait_until},
};

/// A service on this machine with the files of `doctor config init`; only paths and the busy limit are changed, and jobs do
/// not find fio: what the disk of a machine that runs tests delivers says nothing. `this_machine` tests it.
fn with_defaults() -> Workdir {
    let workdir = Workdir::new();
    fs::create_dir(workdir.path("data")).unwrap();
    workdir.expect(0, &["config", "init", "."]);
    let config = workdir.read("doctor.toml");
    let config = config.replace("sqlite:/var/lib/cluster-doctor/doctor.db", "doctor.db");
    let config =
        config.replace("\"/var/lib/cluster-doctor/data\"", "\"data\"").replace("cycle = \"30s\"", "cycle = \"1s\"");
    write_tools(&workdir);
    let text = format!("#!/bin/sh\nPATH={} exec {} \"$@\"\n", workdir.path("bin").display(), doctor_node().display());
    write_program(&workdir.path("without-fio"), &text);
    let local = "[backend.local]\nnode = \"here\"\nmax_load_per_core = 1000.0";
    let program = workdir.path("without-fio");
    workdir.write("doctor.toml", &format!("{config}\n{local}\ndoctor_node = \"{}\"\n", program.display()));
    workdir
}

/// Writes the programs that jobs on the stand-in machine find.
fn write_tools(workdir: &Workdir) {
    fs::create_dir_all(workdir.path("bin")).unwrap();
    fs::write(workdir.path("bin/perftest.txt"), PERFTEST_OUTPUT).unwrap();
    write_program(&workdir.path("bin/ib_write_bw"), PERFTEST);
    for name in ["sh", "cat", "dirname", "python3"] {
        let link = workdir.path("bin").join(name);
        if !link.exists() {
            symlink(Path::new("/usr/bin").join(name), link).unwrap();
        }
    }
}

/// Puts the stand-in machine in place of the one that jobs test.
pub(crate) fn replace_machine(workdir: &Workdir, machine: &FakeMachine) {
    let at = |name: &str| workdir.path(name);
    fs::create_dir(at("next")).unwrap();
    machine.write(&at("next"));
    fs::rename(at("next/nvml.toml"), at("nvml.toml")).unwrap();
    if at("machine").exists() {
        fs::rename(at("machine"), at("before")).unwrap();
    }
    fs::rename(at("next/root"), at("machine")).unwrap();
    for folder in ["next", "before"] {
        if at(folder).exists() {
            fs::remove_dir_all(at(folder)).unwrap();
        }
    }
}

/// The output of perftest for a port that moves 394.61 Gbit/s.
const PERFTEST_OUTPUT: &str = include_str!("../../../checks/fixtures/perftest/gbits-duration.txt");

/// perftest for the ports of the stand-in machine: as a server it listens, as a client it prints a recorded output.
const PERFTEST: &str = r#"#!/bin/sh
here=$(dirname "$0")
device=none port=0 peer=
while [ $# -gt 0 ]; do
  case $1 in
  -d) device=$2; shift 2 ;;
  -p) port=$2; shift 2 ;;
  127.0.0.1) peer=$1; shift ;;
  *) shift ;;
  esac
done
[ -e "$here/../machine/sys/class/infiniband/$device" ] || { echo " IB device $device not found" >&2; exit 1; }
[ -z "$peer" ] || exec cat "$here/perftest.txt"
exec python3 -c '
import socket, sys
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    server.accept()[0].close()
' "$port"
"#;

/// Writes a program that tests the stand-in machine instead of this one, and returns its path.
pub(crate) fn stand_in_program(workdir: &Workdir) -> std::path::PathBuf {
    let (program, library) = (doctor_node(), fake_nvidia_library(doctor_node()));
    let (library, home) = (library.display(), workdir.path(""));
    write_tools(workdir);
    let text = format!(
        "#!/bin/sh\nexport PATH={home}bin DOCTOR_ROOT={home}machine DOCTOR_NVML={library} DOCTOR_CUDA={library}\n\
         export DOCTOR_NCCL={library} DOCTOR_FAKE_NVIDIA={home}nvml.toml\nexec {program} \"$@\"\n",
        program = program.display(),
        home = home.display(),
    );
    let path = workdir.path("stand-in");
    write_program(&path, &text);
    path
}

fn write_program(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// A service that tests a stand-in machine with eight GPUs, with the shipped policy and profiles.
fn on_stand_in(machine: &FakeMachine) -> Workdir {
    let workdir = with_defaults();
    replace_machine(&workdir, machine);
    let program = stand_in_program(&workdir);
    let plain = workdir.path("without-fio").display().to_string();
    workdir.write("doctor.toml", &workdir.read("doctor.toml").replace(&plain, &program.display().to_string()));
    workdir
}

fn why(workdir: &Workdir) -> Value {
    workdir.why("here")
}

/// Returns the tests of the node with this status.
fn tests_with(why: &Value, status: &str) -> Vec<String> {
    let lines = why["test_lines"].as_array().into_iter().flatten().filter(|line| line["status"] == status);
    lines.map(|line| line["test"].as_str().unwrap_or_default().to_owned()).collect()
}

/// Returns the reasons of the open findings. The clock of the machine that runs this test may not be synchronised.
fn reasons(why: &Value) -> Vec<String> {
    let findings = why["open_findings"].as_array().into_iter().flatten();
    let reasons = findings.map(|finding| finding["reason"].as_str().unwrap_or_default().to_owned());
    reasons.filter(|reason| reason != "clock-not-kept").collect()
}

/// Asserts that every test that applies has passed, apart from this machine's clock.
#[track_caller]
fn assert_healthy(workdir: &Workdir) {
    let why = why(workdir);
    let headline = why["headline"].as_str().unwrap_or_default();
    for status in ["inconclusive", "never-tested", "stale"] {
        assert!(tests_with(&why, status).is_empty(), "{status}: {}", workdir.doctor(&["why", "here"]).out);
    }
    let failing = tests_with(&why, "fail");
    if failing.is_empty() {
        assert!(headline.contains("every test that applies has passed"), "{headline}");
    } else {
        assert_eq!(failing, ["time-sync"], "{headline}");
    }
    assert!(reasons(&why).is_empty(), "{:?}", reasons(&why));
}

/// Waits until no run is active and none is about to start.
fn wait_for_results(workdir: &Workdir) {
    wait_until("results of every test", || {
        let why = why(workdir);
        !why["test_lines"].as_array().is_none_or(Vec::is_empty) && tests_with(&why, "never-tested").is_empty()
    });
}

/// Waits until a released node is in service. After its requalification has begun, it must not be out again.
fn wait_for_return(workdir: &Workdir) {
    let mut begun = false;
    wait_until("its return", || {
        let state = workdir.json(&["nodes"])[0]["state"].as_str().unwrap_or_default().to_owned();
        begun |= state == "requalifying";
        assert!(!begun || state != "out", "{}", workdir.doctor(&["why", "here"]).out);
        state == "in-service" || state == "suspect"
    });
}

#[test]
fn a_machine_without_gpus_is_validated_and_returns_after_a_quarantine() {
    let workdir = with_defaults();
    let service = Service::start(&workdir);
    wait_for_results(&workdir);
    assert_healthy(&workdir);
    if !Path::new("/proc/driver/nvidia").exists() {
        let why = why(&workdir);
        assert!(!tests_with(&why, "not-applicable").is_empty());
        assert!(
            tests_with(&why, "not-judged").contains(&"cpu-count".to_owned()),
            "{:?}",
            tests_with(&why, "not-judged")
        );
        workdir.doctor(&["why", "here"]).stdout_contains("not judged (no-expectation): ");
        workdir.doctor(&["status"]).stdout_contains("not judged, because no profile has them");
    }
    workdir.expect(0, &["quarantine", "here", "--why", "a look at its fans", "--yes"]);
    wait_until("the quarantine", || workdir.json(&["nodes"])[0]["state"] == "quarantined");
    workdir.doctor(&["why", "here"]).stdout_contains("is out of service: taken out by ann: a look at its fans");
    workdir.expect(0, &["release", "here", "--why", "cleaned", "--yes"]);
    wait_for_return(&workdir);
    assert_healthy(&workdir);
    assert_eq!(service.stop().0, Some(0));
}

/// A fault that the stand-in machine can have: the severity and the reason of its finding, and the test that finds it.
struct Fault {
    severity: &'static str,
    reason: &'static str,
    test: &'static str,
    plant: fn(FakeMachine) -> FakeMachine,
}

const MONITOR: Fault = Fault {
    severity: "monitor",
    reason: "row-remap-many",
    test: "gpu-row-remap",
    plant: |machine| machine.gpu(7, "remapped_rows.uncorrectable", 600.0),
};
const RESET: Fault = Fault {
    severity: "reset",
    reason: "row-remap-pending",
    test: "gpu-row-remap",
    plant: |machine| machine.gpu(3, "remapped_rows.pending", 1.0),
};
const REBOOT: Fault =
    Fault { severity: "reboot", reason: "gpu-lost", test: "gpu-presence", plant: |machine| machine.gpu_lost(3, 15) };
const ISOLATE: Fault = Fault {
    severity: "isolate",
    reason: "product-wrong",
    test: "dl",
    plant: |machine| machine.gpu_fault(2, "wrong_product", "bf16 77 123 12"),
};

/// Waits until the planted fault has taken the node out of service, repairs it, and waits until the node has returned.
fn wait_for_finding_then_repair(workdir: &Workdir, fault: &Fault) {
    let Fault { severity, reason, .. } = *fault;
    wait_until(reason, || reasons(&why(workdir)).contains(&reason.to_owned()));
    let found = why(workdir)["open_findings"].as_array().unwrap().iter().find(|open| open["reason"] == reason).cloned();
    assert_eq!(found.unwrap()["severity"], severity);
    if severity == "monitor" {
        assert_ne!(workdir.json(&["nodes"])[0]["state"], "quarantined");
        workdir.expect(0, &["quarantine", "here", "--why", "a look at it", "--yes"]);
    }
    wait_until("the node to be out of service", || {
        let state = workdir.json(&["nodes"])[0]["state"].as_str().unwrap_or_default().to_owned();
        ["quarantined", "out"].contains(&state.as_str())
    });
    let passes = dl_passes(workdir);
    replace_machine(workdir, &FakeMachine::hgx_h100());
    workdir.expect(0, &["release", "here", "--why", "repaired", "--yes"]);
    wait_for_return(workdir);
    assert_healthy(workdir);
    assert!(dl_passes(workdir) > passes, "dl has run for the requalification");
}

fn dl_passes(workdir: &Workdir) -> usize {
    rows(workdir, "dl").iter().filter(|row| row["verdict"] == "pass").count()
}

fn plant_and_test(workdir: &Workdir, fault: &Fault) {
    replace_machine(workdir, &(fault.plant)(FakeMachine::hgx_h100()));
    workdir.expect(0, &["test", "here", "--test", fault.test, "--yes"]);
}

/// The weekly validation finds a wrong GPU by itself.
#[test]
fn a_machine_with_an_isolate_and_a_reboot_finding_returns_after_its_repair() {
    let workdir = on_stand_in(&(ISOLATE.plant)(FakeMachine::hgx_h100()));
    let service = Service::start(&workdir);
    wait_for_finding_then_repair(&workdir, &ISOLATE);
    plant_and_test(&workdir, &REBOOT);
    wait_for_finding_then_repair(&workdir, &REBOOT);
    assert_eq!(service.stop().0, Some(0));
}

#[test]
fn a_healthy_machine_is_validated_returns_after_repairs_and_is_not_healthy_without_its_gpus() {
    let workdir = on_stand_in(&FakeMachine::hgx_h100());
    let service = Service::start(&workdir);
    wait_for_results(&workdir);
    assert_healthy(&workdir);
    for fault in [&RESET, &MONITOR] {
        plant_and_test(&workdir, fault);
        wait_for_finding_then_repair(&workdir, fault);
    }
    replace_machine(&workdir, &without_gpus());
    workdir.expect(0, &["test", "here", "--test", "dl", "--test", "gpu-count", "--yes"]);
    wait_until_gpus_are_missed(&workdir, "here");
    assert_eq!(service.stop().0, Some(0));
}

/// Asserts that the node is not healthy, because the GPUs that it should have are missing.
pub(crate) fn wait_until_gpus_are_missed(workdir: &Workdir, node: &str) {
    wait_until("the result of dl", || {
        let why = workdir.why(node);
        let lines = why["test_lines"].as_array().cloned().unwrap_or_default();
        let line = lines.into_iter().find(|line| line["test"] == "dl");
        line.is_some_and(|line| line["status"] == "inconclusive" && line["last"]["reason"] == "hardware-missing")
    });
    let headline = workdir.why(node)["headline"].as_str().unwrap_or_default().to_owned();
    assert!(!headline.contains("every test that applies has passed"), "{headline}");
}

/// The machine without any of its GPUs.
pub(crate) fn without_gpus() -> FakeMachine {
    (0..GPUS).rev().fold(FakeMachine::hgx_h100(), FakeMachine::gpu_removed)
}
