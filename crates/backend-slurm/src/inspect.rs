//! `doctor config check --live` on Slurm: whether its commands respond, whether we have the required rights, and whether its
//! settings fit our hooks and the shared file system. Changes nothing.

mod settings;

use std::{
    path::Path,
    time::{Duration, Instant},
};

use doctor_backend::inspection::InspectionItem;

use super::{config::SlurmConfig, programs::Programs, verify::REQUIRED_PROGRAMS};
use settings::{ShareLatency, SlurmSettings};

/// How many times the shared directory is timed; the slowest counts.
const TRIES: usize = 5;

/// Inspects the cluster. `share` is the directory into which jobs write their results.
pub fn inspect(config: &SlurmConfig, share: &Path) -> Vec<InspectionItem> {
    let programs = Programs::new(config);
    let mut found = vec![inspect_programs(&programs)];
    match programs.read("read Slurm's configuration", "scontrol", &["show", "config"]) {
        Ok(text) => {
            let settings = SlurmSettings::parse(&text);
            found.push(InspectionItem::good("slurmctld", format!("answers; Slurm {}", settings.version())));
            found.push(inspect_rights(&programs, &settings));
            found.extend(settings.inspect(config, share_latency(share)));
        }
        Err(error) => found.push(InspectionItem::bad(
            "slurmctld",
            error.text,
            "check that slurmctld and munge run, and that this machine has the cluster's slurm.conf and munge key",
        )),
    }
    found
}

fn inspect_programs(programs: &Programs) -> InspectionItem {
    let missing: Vec<String> = REQUIRED_PROGRAMS
        .iter()
        .filter_map(|name| programs.read("read the version", name, &["--version"]).err().map(|error| error.text))
        .collect();
    match missing.first() {
        None => InspectionItem::good("slurm programs", format!("{} answer", REQUIRED_PROGRAMS.join(", "))),
        Some(first) => InspectionItem::bad(
            "slurm programs",
            first.clone(),
            "install Slurm's client programs, or set `programs` under [backend.slurm] to their directory",
        ),
    }
}

/// Root, SlurmUser and, with accounting, operators may drain nodes.
fn inspect_rights(programs: &Programs, settings: &SlurmSettings) -> InspectionItem {
    const WHAT: &str = "rights";
    let uid = rustix::process::geteuid().as_raw();
    if uid == 0 || settings.slurm_user() == Some(uid) {
        return InspectionItem::good(WHAT, "this user may drain nodes and reserve them");
    }
    let remedy = "run the service as root or as Slurm's SlurmUser; with accounting: sacctmgr modify user NAME set adminlevel=Operator";
    let user = std::env::var("USER").unwrap_or_default();
    let args = ["--noheader", "--parsable2", "show", "user", &user, "format=adminlevel"];
    match programs.read("read this user's rights", "sacctmgr", &args) {
        Ok(level) if ["Operator", "Administrator"].contains(&level.trim()) => {
            InspectionItem::good(WHAT, format!("{user} is {} of this Slurm", level.trim()))
        }
        Ok(_) => InspectionItem::bad(WHAT, format!("{user} is not an operator of this Slurm"), remedy),
        Err(error) => InspectionItem::unknown(WHAT, format!("the rights of user {uid} are unknown: {}", error.text))
            .with_remedy(remedy),
    }
}

/// Measures the slowest response of the shared directory.
fn share_latency(share: &Path) -> ShareLatency {
    let mut slowest = Duration::ZERO;
    for _ in 0..TRIES {
        let begun = Instant::now();
        // Only the time matters here; other problems of the directory are reported elsewhere.
        if std::fs::read_dir(share).is_err() {
            return ShareLatency::Unknown;
        }
        slowest = slowest.max(begun.elapsed());
    }
    ShareLatency::Measured(slowest)
}
