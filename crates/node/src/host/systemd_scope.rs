//! Runs jobs in a systemd scope outside of the SSH login that started them.
//!
//! A process in its own session outlives the connection, but not a logind that ends all processes of a user at logout
//! (`KillUserProcesses=yes`). Under systemd a run therefore gets its own scope, which belongs to no login and also
//! holds processes that leave the run's session. A scope and not a service: the run stays a child that inherits its
//! environment, while any user can query the environment of a service from systemd.

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

/// Exists while systemd is the init system, as in sd_booted(3).
const BOOTED: &str = "/run/systemd/system";
const PROGRAM: &str = "systemd-run";
/// Time for the rest of a stopped run to exit.
const STOP: &str = "10s";
/// Time for systemd to accept the request.
const SYSTEMCTL_TIMEOUT: Duration = Duration::from_secs(5);
const KILL_GRACE: Duration = Duration::from_millis(200);
const MAX_OUTPUT_BYTES: usize = 64 << 10;

/// Builds the command, in a scope if possible.
pub(super) fn command(args: &[OsString], run: RunId) -> Command {
    let outer = systemd_run().map(|program| scope(&program, run)).unwrap_or_default();
    let mut all = outer.iter().chain(args);
    let mut command = Command::new(all.next().map_or(OsStr::new(""), OsString::as_os_str));
    command.args(all);
    command
}

/// Ends processes that have left the session of a cancelled run. Without systemd they are unknown. The session itself
/// has been ended already, so this may fail.
pub(super) fn stop(run: RunId) {
    if systemd_run().is_none() {
        return;
    }
    let mut systemctl = Command::new("systemctl");
    systemctl.args(["stop", "--no-block"]).arg(format!("{}*.scope", prefix(run)));
    let limits = Limits {
        timeout: SYSTEMCTL_TIMEOUT,
        max_stream_bytes: MAX_OUTPUT_BYTES,
        grace: Duration::ZERO,
        kill_grace: KILL_GRACE,
    };
    // The result is irrelevant, and its output must not go to our standard output, which belongs to the controller.
    let _noted = child::run(&mut systemctl, &limits, &Stop::never(), Echo::default());
}

/// Returns the path of systemd-run. Only root can create a scope outside of logins.
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

/// Builds the arguments of systemd-run. Two starters of the same run have one scope each; the claim decides between
/// them.
fn scope(program: &Path, run: RunId) -> Vec<OsString> {
    let mut args = vec![program.as_os_str().to_owned()];
    args.extend(["--scope", "--quiet", "--collect"].map(OsString::from));
    args.push(format!("--unit={}{}", prefix(run), std::process::id()).into());
    args.push(format!("--description=Cluster Doctor run {run}").into());
    args.push("--property=KillMode=control-group".into());
    args.push(format!("--property=TimeoutStopSec={STOP}").into());
    args.push("--".into());
    args
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scope_is_named_after_its_run_and_ends_with_all_its_processes() {
        let run = RunId::from_number(7);
        let args = scope(Path::new("/usr/bin/systemd-run"), run);
        let args: Vec<&str> = args.iter().filter_map(|arg| arg.to_str()).collect();
        let unit = format!("--unit=cluster-doctor-{run}-{}", std::process::id());
        assert_eq!(args[..5], ["/usr/bin/systemd-run", "--scope", "--quiet", "--collect", &unit]);
        assert_eq!(args.last(), Some(&"--"));
        assert!(args.contains(&"--property=KillMode=control-group"), "{args:?}");
    }
}
