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

fn install(machine: &FakeMachine) -> InstalledMachine {
    machine.install(Path::new(PROGRAM), library())
}

/// Resets the GPUs of a simulated machine by a command that does nothing.
fn reset(machine: &InstalledMachine, command: &str) -> Output {
    let mut repair = Command::new(PROGRAM);
    repair.args(["repair", "reset", "--nvml"]).arg(library()).arg("--root").arg(machine.path("root"));
    repair.args(["--", command]).env("DOCTOR_FAKE_NVIDIA", machine.path("nvml.toml")).output().unwrap()
}

fn output_text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[test]
fn the_reboot_command_runs_only_in_the_boot_of_its_request() {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let marker = folder.path().join("told");
    let repair = |boot: &str, script: &str| {
        let mut command = Command::new(PROGRAM);
        command
            .args(["repair", "reboot", "--boot", boot, "--limit", "5s", "--", "sh", "-c", script])
            .env("TOLD", &marker);
        command.output().unwrap()
    };
    let other_boot = repair("00000000-0000-4000-8000-000000000000", "touch $TOLD");
    assert!(
        other_boot.status.success() && output_text(&other_boot).contains("already rebooted"),
        "{}",
        output_text(&other_boot)
    );
    assert!(!marker.exists(), "it is another boot than the one that was to end");
    let same_boot = repair(boot.trim(), "touch $TOLD");
    assert!(same_boot.status.success() && marker.exists(), "{}", output_text(&same_boot));
    let failed = repair(boot.trim(), "echo 'not now' >&2; exit 4");
    assert_eq!(failed.status.code(), Some(1));
    assert!(
        output_text(&failed).contains("not now") && output_text(&failed).contains("exit status: 4"),
        "{}",
        output_text(&failed)
    );
}

#[test]
fn a_command_that_does_not_end_is_killed() {
    let mut command = Command::new(PROGRAM);
    let output = command.args(["repair", "reboot", "--limit", "300ms", "--", "sleep", "600"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(output_text(&output).contains("did not end within"), "{}", output_text(&output));
}

#[test]
fn a_reset_succeeds_only_if_the_driver_requests_no_further_action() {
    let healthy = install(&FakeMachine::hgx_h100());
    let done = reset(&healthy, "true");
    assert!(
        done.status.success() && output_text(&done).contains("requests no further recovery action"),
        "{}",
        output_text(&done)
    );
    assert_eq!(reset(&healthy, "false").status.code(), Some(1));
    for machine in [FakeMachine::hgx_h100().gpu(3, "recovery_action", 1.0), FakeMachine::hgx_h100().gpu_lost(3, 16)] {
        let still = reset(&install(&machine), "true");
        assert_eq!(still.status.code(), Some(1), "{}", output_text(&still));
        assert!(output_text(&still).contains("reset, but gpu-"), "{}", output_text(&still));
    }
}
