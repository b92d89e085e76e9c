//! `doctor-node repair`: resets the GPUs or reboots this machine for the controller.
//!
//! The site configures the command. This module runs it once and verifies that it helped: a boot id that differs from
//! the request's means that the reboot has happened, and a reset counts only if the driver requests no further recovery
//! action.

use std::{
    os::unix::process::CommandExt,
    path::Path,
    process::{Command, ExitStatus, Stdio},
    time::Duration,
};

use anyhow::{Context, bail};
use doctor_core::{finding::Verdict, ids::CheckId, policy::Policy};
use doctor_host::trusted_file;

use crate::{
    check::{self, Suite},
    runner::{ProbeRunner, child},
};

/// Checks that detect a reset that did not help: every GPU must answer, and the driver must request no recovery.
const RESET_CHECKS: [&str; 2] = ["gpu-presence", "gpu-recovery-action"];
/// The kernel's boot id. A container sees the host's.
const BOOT: &str = "proc/sys/kernel/random/boot_id";
/// Time for a killed command to exit unless it is stuck in the kernel.
const KILL_GRACE: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum RepairAction {
    /// Reset all GPUs of this machine; none may be in use
    Reset,
    Reboot,
}

/// Runs the command unless it has been done already, verifies the effect, and returns a one-line summary.
///
/// # Errors
/// If the command failed, did not end in time, or did not help.
pub fn repair(
    what: RepairAction,
    boot: Option<&str>,
    command: &[String],
    limit: Duration,
    root: &Path,
    runner: &dyn ProbeRunner,
) -> anyhow::Result<String> {
    if let Some(before) = boot {
        let path = root.join(BOOT);
        let now = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        if now.trim() != before.trim() {
            return Ok(format!("already rebooted: the current boot is {}", now.trim()));
        }
    }
    let status = run(command, limit)?;
    if !status.success() {
        bail!("`{}` ended with {status}", command.join(" "));
    }
    match what {
        RepairAction::Reboot => Ok("reboot requested".to_owned()),
        RepairAction::Reset => verify_reset(runner),
    }
}

/// Runs the command to its end; it inherits our output. A stop request does not end it: a machine that shuts down
/// signals all processes, and the shutdown is the purpose. `limit` bounds the command.
fn run(command: &[String], limit: Duration) -> anyhow::Result<ExitStatus> {
    let (program, arguments) = command.split_first().context("the command is empty")?;
    let path = trusted_file::program(Path::new(program)).with_context(|| format!("cannot start {program}"))?;
    let mut child = Command::new(path)
        .args(arguments)
        .stdin(Stdio::null())
        .process_group(0)
        .spawn()
        .with_context(|| format!("cannot start {program}"))?;
    if child::exits_within(&child, limit) {
        return child.wait().context("cannot wait for the command");
    }
    let late = format!("`{}` did not end within {} s", command.join(" "), limit.as_secs());
    match child::end(&mut child, Duration::ZERO, KILL_GRACE) {
        None => bail!("{late}"),
        Some(pid) => bail!("{late}, and process {pid} cannot be killed and was left behind"),
    }
}

fn verify_reset(runner: &dyn ProbeRunner) -> anyhow::Result<String> {
    let names = RESET_CHECKS.map(CheckId::new).into_iter().collect::<Result<Vec<_>, _>>().context("bad check name")?;
    let results = check::check(&names, Suite::Quick, &Policy::built_in(), None, runner)?;
    for result in &results {
        match result.verdict {
            Verdict::Fail | Verdict::Inconclusive => {
                bail!("reset, but {} reports: {}", result.check, result.text)
            }
            // The driver is too old to report it: the command's success is all that is known.
            Verdict::NotApplicable => return Ok(format!("reset; effect unknown: {}", result.text)),
            Verdict::Pass => {}
        }
    }
    Ok("reset; the driver requests no further recovery action".to_owned())
}
