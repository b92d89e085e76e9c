//! A place for a run outside of the login that asked for it.
//!
//! A process that has left its session outlives the connection, but not a logind that ends everything of a user at logout
//! (`KillUserProcesses=yes`). Where systemd runs the machine, a run is therefore put into a scope of its own, which is nobody's
//! login, and which holds also what leaves the run's session. A scope and not a service: the run stays a child that inherits its
//! environment, which for a service anybody could ask systemd for.

use std::{
    env,
    ffi::{OsStr, OsString},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use doctor_core::ids::RunId;

use crate::{
    runner::child::{self, Echo, Limits},
    stop::Stop,
};

/// There while systemd is the machine's init, as sd_booted(3) has it.
const BOOTED: &str = "/run/systemd/system";
const PROGRAM: &str = "systemd-run";
/// What is left of a run that is being stopped has this long to end by itself.
const STOP: &str = "10s";
/// For systemd to take note.
const TAKES_NOTE: Duration = Duration::from_secs(5);
const KILL_GRACE: Duration = Duration::from_millis(200);
const MOST_WORDS: usize = 64 << 10;

/// The command for these words, in a scope where there can be one.
pub(super) fn command(words: &[OsString], run: RunId) -> Command {
    let outer = systemd_run().map(|program| scope(&program, run)).unwrap_or_default();
    let mut all = outer.iter().chain(words);
    let mut command = Command::new(all.next().map_or(OsStr::new(""), OsString::as_os_str));
    command.args(all);
    command
}

/// Ends what has left the session of a run that was cancelled. Without systemd nobody knows it. What was to be ended has ended
/// already; this is for what nobody else would find, so it may fail.
pub(super) fn stop(run: RunId) {
    if systemd_run().is_none() {
        return;
    }
    let mut systemctl = Command::new("systemctl");
    systemctl.args(["stop", "--no-block"]).arg(format!("{}*.scope", prefix(run)));
    let limits = Limits { timeout: TAKES_NOTE, stream: MOST_WORDS, grace: Duration::ZERO, kill_grace: KILL_GRACE };
    // Whatever comes of it, and what it says is not for the controller, whose our standard output is.
    let _noted = child::run(&mut systemctl, &limits, &Stop::never(), Echo::default());
}

/// Only root may make one beside the logins.
fn systemd_run() -> Option<PathBuf> {
    if !Path::new(BOOTED).is_dir() || !rustix::process::geteuid().is_root() {
        return None;
    }
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).map(|folder| folder.join(PROGRAM)).find(|program| program.is_file())
}

fn prefix(run: RunId) -> String {
    format!("cluster-doctor-{run}-")
}

/// Two that start the same run have a scope each, and the claim decides between them.
fn scope(program: &Path, run: RunId) -> Vec<OsString> {
    let mut words = vec![program.as_os_str().to_owned()];
    words.extend(["--scope", "--quiet", "--collect"].map(OsString::from));
    words.push(format!("--unit={}{}", prefix(run), std::process::id()).into());
    words.push(format!("--description=Cluster Doctor run {run}").into());
    words.push("--property=KillMode=control-group".into());
    words.push(format!("--property=TimeoutStopSec={STOP}").into());
    words.push("--".into());
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scope_is_named_after_its_run_and_ends_with_all_that_is_in_it() {
        let run = RunId::from_number(7);
        let words = scope(Path::new("/usr/bin/systemd-run"), run);
        let words: Vec<&str> = words.iter().filter_map(|word| word.to_str()).collect();
        let unit = format!("--unit=cluster-doctor-{run}-{}", std::process::id());
        assert_eq!(words[..5], ["/usr/bin/systemd-run", "--scope", "--quiet", "--collect", &unit]);
        assert_eq!(words.last(), Some(&"--"));
        assert!(words.contains(&"--property=KillMode=control-group"), "{words:?}");
    }
}
