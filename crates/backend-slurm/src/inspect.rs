//! `doctor config check --live` on Slurm: whether its commands respond, whether we have the required rights, and whether its
//! settings fit our hooks and the shared file system. Changes nothing.

mod settings;

use std::{
    path::Path,
    time::{Duration, Instant},
};

use doctor_backend::inspection::Inspected;

use super::{config::SlurmConfig, programs::Programs};
use settings::{Slow, Told};

/// The commands that the backend requires.
const NEEDED: [&str; 4] = ["scontrol", "squeue", "sbatch", "scancel"];
/// How many times the shared directory is timed; the slowest counts.
const TRIES: usize = 5;

/// Inspects the cluster. `share` is the directory into which jobs write their results.
pub fn inspect(config: &SlurmConfig, share: &Path) -> Vec<Inspected> {
    let programs = Programs::new(config);
    let mut found = vec![clients(&programs)];
    match programs.read("read Slurm's configuration", "scontrol", &["show", "config"]) {
        Ok(text) => {
            let told = Told::read(&text);
            found.push(Inspected::good("slurmctld", format!("answers; Slurm {}", told.version())));
            found.push(rights(&programs, &told));
            found.extend(told.judge(config, slowest(share)));
        }
        Err(error) => found.push(Inspected::bad(
            "slurmctld",
            error.text,
            "check that slurmctld and munge run, and that this machine has the cluster's slurm.conf and munge key",
        )),
    }
    found
}

fn clients(programs: &Programs) -> Inspected {
    let missing: Vec<String> = NEEDED
        .iter()
        .filter_map(|name| programs.read("read the version", name, &["--version"]).err().map(|error| error.text))
        .collect();
    match missing.first() {
        None => Inspected::good("slurm programs", format!("{} answer", NEEDED.join(", "))),
        Some(first) => Inspected::bad(
            "slurm programs",
            first.clone(),
            "install Slurm's client programs, or set `programs` under [backend.slurm] to their directory",
        ),
    }
}

/// Root, SlurmUser and, with accounting, operators may drain nodes.
fn rights(programs: &Programs, told: &Told) -> Inspected {
    const WHAT: &str = "rights";
    let me = rustix::process::geteuid().as_raw();
    if me == 0 || told.slurm_user() == Some(me) {
        return Inspected::good(WHAT, "this user may drain nodes and reserve them");
    }
    let remedy = "run the service as root or as Slurm's SlurmUser; with accounting: sacctmgr modify user NAME set adminlevel=Operator";
    let user = std::env::var("USER").unwrap_or_default();
    let asked = ["--noheader", "--parsable2", "show", "user", &user, "format=adminlevel"];
    match programs.read("read this user's rights", "sacctmgr", &asked) {
        Ok(level) if ["Operator", "Administrator"].contains(&level.trim()) => {
            Inspected::good(WHAT, format!("{user} is {} of this Slurm", level.trim()))
        }
        Ok(_) => Inspected::bad(WHAT, format!("{user} is not an operator of this Slurm"), remedy),
        Err(error) => {
            Inspected::unknown(WHAT, format!("the rights of user {me} are unknown: {}", error.text)).try_this(remedy)
        }
    }
}

/// Measures the slowest response of the shared directory.
fn slowest(share: &Path) -> Slow {
    let mut slowest = Duration::ZERO;
    for _ in 0..TRIES {
        let begun = Instant::now();
        // Only the time matters here; other problems of the directory are reported elsewhere.
        if std::fs::read_dir(share).is_err() {
            return Slow::Unknown;
        }
        slowest = slowest.max(begun.elapsed());
    }
    Slow::At(slowest)
}
