//! Resets the GPUs of this machine or reboots it; the controller repeats its request until it is done.
//!
//! The same request verifies that the machine is unused, right before it starts. `doctor-node repair` runs as a job of
//! its own ([`Jobs`]): it is started once per operation, outlives the connection, and records its outcome. A reboot is
//! done once the boot id differs from that of the request, and not before.

use std::{
    ffi::OsString,
    fs::{self, File},
    io,
    path::Path,
    process::Command,
};

use doctor_core::{
    ids::RunId,
    run::{JobEnd, ObservedJobState},
};
use doctor_host::{
    files,
    jobs::Jobs,
    occupancy::blocked_reason,
    process,
    protocol::{HostStatus, RepairKind, RepairProgress, RepairRequest, StatusQuery},
};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use super::{state_files, status, systemd_scope};
use crate::{clock::now, job::output::tail};

/// Bytes of a repair's output that are kept, from its end.
const MAX_OUTPUT_BYTES: u64 = 1024;

/// The boot in which a repair was requested.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RepairIntent {
    boot: String,
}

pub(super) fn repair(state: &Path, runs: &Jobs, request: &RepairRequest) -> io::Result<RepairProgress> {
    let repairs = state_files::repairs(state)?;
    // Held to the end, so that only one of two controllers starts it.
    let lock = File::options().create(true).append(true).open(state.join("repairs/lock"))?;
    flock(&lock, FlockOperation::LockExclusive)?;
    // The job's id is the operation's number; runs are in another directory.
    let id = RunId::from_number(request.op.number());
    let intent_file = repairs.run_directory(id).join("repair.json");
    let boot = process::boot_id();
    let intent = files::read::<RepairIntent>(&intent_file)?;
    if request.kind == RepairKind::Reboot && intent.as_ref().is_some_and(|intent| intent.boot != boot) {
        return Ok(RepairProgress::Done);
    }
    let observed = repairs.state(id, now())?;
    if observed != ObservedJobState::Absent {
        return repair_progress(request.kind, &observed, &repairs.run_directory(id));
    }
    let users = StatusQuery { runs: Vec::new(), ..request.status_query.clone() };
    if let Some(by) = in_use(status::collect_status(state, runs, &users)?, request) {
        return Ok(RepairProgress::InUse { by });
    }
    repairs.prune(now())?;
    fs::create_dir_all(repairs.run_directory(id))?;
    if intent.is_none() {
        files::create(&intent_file, &RepairIntent { boot: boot.clone() })?;
    }
    repairs.start(id, command(&repairs, id, request, &boot)?, now())?;
    Ok(RepairProgress::InProgress { text: format!("{} started", request.kind.as_str()) })
}

/// Returns who would lose work.
fn in_use(mut status: HostStatus, request: &RepairRequest) -> Option<String> {
    if let Some(run) = status.active_runs.first() {
        return Some(format!("run {run} is active"));
    }
    // A reboot is the remedy for our own unkillable process.
    if request.kind == RepairKind::Reboot {
        status.unkillable_pid = None;
    }
    blocked_reason(&status, request.max_load_per_core)
}

fn command(repairs: &Jobs, id: RunId, request: &RepairRequest, boot: &str) -> io::Result<Command> {
    let mut args: Vec<OsString> = vec![std::env::current_exe()?.into(), "repair".into(), request.kind.as_str().into()];
    if request.kind == RepairKind::Reboot {
        args.extend(["--boot".into(), boot.into()]);
    }
    args.extend(["--limit".into(), request.limit.to_string().into()]);
    args.extend(["--job-file".into(), repairs.job_file(id).into(), "--run".into(), id.to_string().into()]);
    args.push("--".into());
    args.extend(request.command.iter().map(OsString::from));
    let mut command = systemd_scope::command(&args, id);
    command.current_dir("/");
    Ok(command)
}

/// Derives the stage of a repair from its job. For a reboot only a failed command counts: the next boot shows whether
/// it happened, and a shutdown may end the job abnormally.
fn repair_progress(what: RepairKind, observed: &ObservedJobState, directory: &Path) -> io::Result<RepairProgress> {
    let under_way = |text: &str| RepairProgress::InProgress { text: text.to_owned() };
    let how = match observed {
        ObservedJobState::Ended { how, .. } => *how,
        ObservedJobState::Unknown { why: reason } => return Ok(under_way(reason)),
        ObservedJobState::Absent | ObservedJobState::Pending { .. } => return Ok(under_way("not started yet")),
        ObservedJobState::Running { .. } => return Ok(under_way("the command is running")),
    };
    let last_line = || -> io::Result<String> {
        let text = tail(&directory.join("output.txt"), MAX_OUTPUT_BYTES)?.unwrap_or_default();
        Ok(text.lines().rev().map(str::trim).find(|line| !line.is_empty()).unwrap_or("no output").to_owned())
    };
    Ok(match (what, how) {
        (RepairKind::Reset, JobEnd::Exited) => RepairProgress::Done,
        (RepairKind::Reboot, JobEnd::Exited) => under_way("the command succeeded, the machine has not rebooted yet"),
        (_, JobEnd::Failed) => RepairProgress::Failed { text: last_line()? },
        (RepairKind::Reboot, _) => {
            under_way(&format!("the command ended without a status, no reboot seen yet; output: {}", last_line()?))
        }
        (RepairKind::Reset, _) => {
            RepairProgress::Failed { text: format!("the command ended without a status; output: {}", last_line()?) }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use doctor_core::{ids::JobId, time::Timestamp};

    #[test]
    fn a_reset_is_done_when_its_command_succeeds_and_a_reboot_never_in_the_same_boot() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("output.txt"), "trying\nreset, but gpu-presence reports: 7 of 8\n\n").unwrap();
        let progress = |what, how| {
            let (job, at) = (JobId("x".to_owned()), Timestamp::from_secs(1));
            repair_progress(what, &ObservedJobState::Ended { job, started: None, at, how }, directory.path()).unwrap()
        };
        assert_eq!(progress(RepairKind::Reset, JobEnd::Exited), RepairProgress::Done);
        let text = "reset, but gpu-presence reports: 7 of 8".to_owned();
        assert_eq!(progress(RepairKind::Reset, JobEnd::Failed), RepairProgress::Failed { text: text.clone() });
        assert_eq!(progress(RepairKind::Reboot, JobEnd::Failed), RepairProgress::Failed { text });
        assert!(matches!(progress(RepairKind::Reset, JobEnd::Lost), RepairProgress::Failed { .. }));
        for how in [JobEnd::Exited, JobEnd::Lost, JobEnd::Killed] {
            assert!(matches!(progress(RepairKind::Reboot, how), RepairProgress::InProgress { .. }), "{how}");
        }
    }
}
