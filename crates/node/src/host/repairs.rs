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

pub(super) fn repair(state: &Path, runs: &Jobs, order: &RepairRequest) -> io::Result<RepairProgress> {
    let repairs = state_files::repairs(state)?;
    // Held to the end, so that only one of two controllers starts it.
    let lock = File::options().create(true).append(true).open(state.join("repairs/lock"))?;
    flock(&lock, FlockOperation::LockExclusive)?;
    // The job's id is the operation's number; runs are in another directory.
    let id = RunId::from_number(order.op.number());
    let asked = repairs.run_directory(id).join("asked.json");
    let boot = process::boot_id();
    let begun = files::read::<RepairIntent>(&asked)?;
    if order.what == RepairKind::Reboot && begun.as_ref().is_some_and(|asked| asked.boot != boot) {
        return Ok(RepairProgress::Done);
    }
    let seen = repairs.state(id, now())?;
    if seen != ObservedJobState::Absent {
        return repair_progress(order.what, &seen, &repairs.run_directory(id));
    }
    let users = StatusQuery { runs: Vec::new(), ..order.users.clone() };
    if let Some(by) = in_use(status::collect_status(state, runs, &users)?, order) {
        return Ok(RepairProgress::InUse { by });
    }
    repairs.prune(now())?;
    fs::create_dir_all(repairs.run_directory(id))?;
    if begun.is_none() {
        files::create(&asked, &RepairIntent { boot: boot.clone() })?;
    }
    repairs.start(id, command(&repairs, id, order, &boot)?, now())?;
    Ok(RepairProgress::UnderWay { text: format!("{} started", order.what.as_str()) })
}

/// Returns who would lose work.
fn in_use(mut look: HostStatus, order: &RepairRequest) -> Option<String> {
    if let Some(run) = look.under_way.first() {
        return Some(format!("run {run} is active"));
    }
    // A reboot is the remedy for our own unkillable process.
    if order.what == RepairKind::Reboot {
        look.abandoned = None;
    }
    blocked_reason(&look, order.max_load_per_core)
}

fn command(repairs: &Jobs, id: RunId, order: &RepairRequest, boot: &str) -> io::Result<Command> {
    let mut words: Vec<OsString> = vec![std::env::current_exe()?.into(), "repair".into(), order.what.as_str().into()];
    if order.what == RepairKind::Reboot {
        words.extend(["--boot".into(), boot.into()]);
    }
    words.extend(["--limit".into(), order.limit.to_string().into()]);
    words.extend(["--job-file".into(), repairs.job_file(id).into(), "--run".into(), id.to_string().into()]);
    words.push("--".into());
    words.extend(order.command.iter().map(OsString::from));
    let mut command = systemd_scope::command(&words, id);
    command.current_dir("/");
    Ok(command)
}

/// Derives the stage of a repair from its job. For a reboot only a failed command counts: the next boot shows whether
/// it happened, and a shutdown may end the job abnormally.
fn repair_progress(what: RepairKind, seen: &ObservedJobState, place: &Path) -> io::Result<RepairProgress> {
    let under_way = |text: &str| RepairProgress::UnderWay { text: text.to_owned() };
    let how = match seen {
        ObservedJobState::Ended { how, .. } => *how,
        ObservedJobState::Unknown { why } => return Ok(under_way(why)),
        ObservedJobState::Absent | ObservedJobState::Pending { .. } => return Ok(under_way("not started yet")),
        ObservedJobState::Running { .. } => return Ok(under_way("the command is running")),
    };
    let words = || -> io::Result<String> {
        let text = tail(&place.join("output.txt"), MAX_OUTPUT_BYTES)?.unwrap_or_default();
        Ok(text.lines().rev().map(str::trim).find(|line| !line.is_empty()).unwrap_or("no output").to_owned())
    };
    Ok(match (what, how) {
        (RepairKind::Reset, JobEnd::Exited) => RepairProgress::Done,
        (RepairKind::Reboot, JobEnd::Exited) => under_way("the command succeeded, the machine has not rebooted yet"),
        (_, JobEnd::Failed) => RepairProgress::Failed { text: words()? },
        (RepairKind::Reboot, _) => {
            under_way(&format!("the command ended without a status, no reboot seen yet; output: {}", words()?))
        }
        (RepairKind::Reset, _) => {
            RepairProgress::Failed { text: format!("the command ended without a status; output: {}", words()?) }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use doctor_core::{ids::JobId, time::Timestamp};

    #[test]
    fn a_reset_is_done_when_its_command_helped_and_a_reboot_never_in_the_same_boot() {
        let place = tempfile::tempdir().unwrap();
        fs::write(place.path().join("output.txt"), "trying\nreset, but gpu-presence reports: 7 of 8\n\n").unwrap();
        let said = |what, how| {
            let (job, at) = (JobId("x".to_owned()), Timestamp::from_secs(1));
            repair_progress(what, &ObservedJobState::Ended { job, started: None, at, how }, place.path()).unwrap()
        };
        assert_eq!(said(RepairKind::Reset, JobEnd::Exited), RepairProgress::Done);
        let text = "reset, but gpu-presence reports: 7 of 8".to_owned();
        assert_eq!(said(RepairKind::Reset, JobEnd::Failed), RepairProgress::Failed { text: text.clone() });
        assert_eq!(said(RepairKind::Reboot, JobEnd::Failed), RepairProgress::Failed { text });
        assert!(matches!(said(RepairKind::Reset, JobEnd::Lost), RepairProgress::Failed { .. }));
        for how in [JobEnd::Exited, JobEnd::Lost, JobEnd::Killed] {
            assert!(matches!(said(RepairKind::Reboot, how), RepairProgress::UnderWay { .. }), "{how}");
        }
    }
}
