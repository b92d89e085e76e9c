//! `doctor-node repair` from its command line: once per boot, and done only if it helped.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::OnceLock,
};

use doctor_testbed::fake_machine::{FakeMachine, InstalledMachine, fake_nvidia_library};

const PROGRAM: &str = env!("CARGO_BIN_EXE_doctor-node");

fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| fake_nvidia_library(Path::new(PROGRAM)))
}

fn stand(machine: &FakeMachine) -> InstalledMachine {
    machine.install(Path::new(PROGRAM), library())
}

/// Resets the GPUs of a simulated machine by a command that does nothing.
fn reset(standing: &InstalledMachine, command: &str) -> Output {
    let mut repair = Command::new(PROGRAM);
    repair.args(["repair", "reset", "--nvml"]).arg(library()).arg("--root").arg(standing.path("root"));
    repair.args(["--", command]).env("DOCTOR_FAKE_NVIDIA", standing.path("scene.toml")).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[test]
fn a_reboot_is_told_once_in_the_boot_that_it_was_asked_for() {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let told = folder.path().join("told");
    let repair = |boot: &str, script: &str| {
        let mut command = Command::new(PROGRAM);
        command
            .args(["repair", "reboot", "--boot", boot, "--limit", "5s", "--", "sh", "-c", script])
            .env("TOLD", &told);
        command.output().unwrap()
    };
    let another = repair("00000000-0000-4000-8000-000000000000", "touch $TOLD");
    assert!(another.status.success() && said(&another).contains("already rebooted"), "{}", said(&another));
    assert!(!told.exists(), "it is another boot than the one that was to end");
    let this = repair(boot.trim(), "touch $TOLD");
    assert!(this.status.success() && told.exists(), "{}", said(&this));
    let failed = repair(boot.trim(), "echo 'not now' >&2; exit 4");
    assert_eq!(failed.status.code(), Some(1));
    assert!(said(&failed).contains("not now") && said(&failed).contains("exit status: 4"), "{}", said(&failed));
}

#[test]
fn a_command_that_does_not_end_is_ended() {
    let mut command = Command::new(PROGRAM);
    let hangs = command.args(["repair", "reboot", "--limit", "300ms", "--", "sleep", "600"]).output().unwrap();
    assert_eq!(hangs.status.code(), Some(1));
    assert!(said(&hangs).contains("did not end within"), "{}", said(&hangs));
}

#[test]
fn a_reset_counts_only_if_the_driver_asks_for_nothing_more() {
    let well = stand(&FakeMachine::hgx_h100());
    let done = reset(&well, "true");
    assert!(done.status.success() && said(&done).contains("requests no further recovery action"), "{}", said(&done));
    assert_eq!(reset(&well, "false").status.code(), Some(1));
    for machine in [FakeMachine::hgx_h100().gpu(3, "recovery_action", 1.0), FakeMachine::hgx_h100().gpu_lost(3, 16)] {
        let still = reset(&stand(&machine), "true");
        assert_eq!(still.status.code(), Some(1), "{}", said(&still));
        assert!(said(&still).contains("reset, but gpu-"), "{}", said(&still));
    }
}
