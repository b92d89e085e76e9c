//! The PID namespace of one Slurm (`keeper.sh`): starting, finding and ending daemons in it.
//!
//! Daemons are found by their command line, not by their parent: they detach from it, and a slurmd that a simulated
//! reboot has started was never our child.

use std::{
    fs::{self, File},
    io::{BufRead as _, BufReader},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Instant,
};

use rustix::process::{Pid, Signal, kill_process};

use super::{
    PATIENCE, PAUSE,
    error::{SlurmTestbedError, file_error},
};
use crate::kubernetes::last_lines;

/// Stored in the folder, because a shell reads its script while it runs.
const NAMESPACE_SCRIPT: &str = include_str!("keeper.sh");

/// Kills a program when the shell's input ends, which happens even if the process at the other end is killed.
const ATTACHED_SCRIPT: &str = r#""$@" </dev/null & read -r _; kill -KILL $!"#;

/// The program search path, in every root.
pub(super) const PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";

/// A daemon of Slurm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Daemon<'a> {
    /// munged, which authenticates the other daemons to each other.
    Munge,
    Controller,
    /// The slurmd of this node. Its jobs are separate processes.
    Node(&'a str),
    /// slurmrestd, if the layout has it.
    Rest,
}

impl std::fmt::Display for Daemon<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Munge => f.write_str("munged"),
            Self::Controller => f.write_str("slurmctld"),
            Self::Node(node) => write!(f, "slurmd of {node}"),
            Self::Rest => f.write_str("slurmrestd"),
        }
    }
}

impl Daemon<'_> {
    /// Returns whether a process with this command line is this daemon.
    fn is(self, args: &[&str]) -> bool {
        let Some(program) = args.first() else { return false };
        let program = program.rsplit('/').next().unwrap_or_default();
        match self {
            Self::Munge => program == "munged",
            // slurmctld's helper process, which runs scripts under another name, ends with it.
            Self::Controller => program == "slurmctld",
            Self::Node(node) => program == "slurmd" && args.windows(2).any(|pair| pair == ["-N", node]),
            Self::Rest => program == "slurmrestd",
        }
    }
}

#[derive(Debug)]
pub(super) struct Namespaces {
    folder: PathBuf,
    /// The first process of the namespace, the target of nsenter.
    init_pid: u32,
    supervisor: Child,
}

/// A program that is killed when this value is dropped.
#[derive(Debug)]
pub(super) struct AttachedProcess(Child);

impl Drop for AttachedProcess {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        drop(self.0.wait());
    }
}

impl Namespaces {
    /// Checks that this machine allows namespaces.
    pub(super) fn check_supported() -> Result<(), SlurmTestbedError> {
        let no = |why: String| SlurmTestbedError::Unsupported { why };
        if !rustix::process::geteuid().is_root() {
            return Err(no("root is required to create devices and enter namespaces".to_owned()));
        }
        let tried = Command::new("bash").args(["-c", NAMESPACE_SCRIPT, "bash", "try"]).output();
        let tried = tried.map_err(|source| no(format!("running bash: {source}")))?;
        if tried.status.success() {
            return Ok(());
        }
        Err(no(String::from_utf8_lossy(&tried.stderr).trim().to_owned()))
    }

    /// Creates a namespace for processes whose files are all in `folder`, optionally with another root file system.
    pub(super) fn new(folder: &Path, root: Option<&Path>) -> Result<Self, SlurmTestbedError> {
        let script = folder.join("keeper.sh");
        fs::write(&script, NAMESPACE_SCRIPT).map_err(file_error("writing", &script))?;
        let log = folder.join("keeper.log");
        let errors = File::create(&log).map_err(file_error("creating", &log))?;
        let mut supervisor = Command::new("bash")
            .arg(&script)
            .arg("keep")
            .arg(folder)
            .args(root)
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors)
            .process_group(0)
            .spawn()
            .map_err(|source| SlurmTestbedError::Program { program: "bash".to_owned(), source })?;
        let mut ready = String::new();
        if let Some(output) = supervisor.stdout.take() {
            // A failed read leaves an empty line, which is handled as no reply.
            let _read = BufReader::new(output).read_line(&mut ready);
        }
        let first = ready.trim().strip_prefix("ready ").and_then(|pid| pid.parse().ok());
        let Some(first) = first else {
            let last_output = last_lines(&log);
            let _ended = supervisor.kill().and_then(|()| supervisor.wait());
            return Err(SlurmTestbedError::Supervisor { said: last_output });
        };
        Ok(Self { folder: folder.to_owned(), init_pid: first, supervisor })
    }

    /// Returns the nsenter command to put before a program so that it runs inside.
    pub(super) fn enter(&self) -> Vec<String> {
        ["nsenter", "--target", &self.init_pid.to_string(), "--mount", "--root"].map(str::to_owned).to_vec()
    }

    /// Runs a program that daemonises, and waits until it has.
    pub(super) fn start(&self, daemon: Daemon<'_>, args: &[String]) -> Result<(), SlurmTestbedError> {
        let log = self.folder.join("start.log");
        let ended = self
            .command_in(&["--pid"], args, &log)?
            .stdin(Stdio::null())
            .status()
            .map_err(|source| SlurmTestbedError::Program { program: args[0].clone(), source })?;
        if ended.success() {
            return Ok(());
        }
        Err(SlurmTestbedError::NotStarted { daemon: daemon.to_string(), said: last_lines(&log) })
    }

    /// Starts a program that does not daemonise, in this machine's PID namespace. It ends when the returned value is dropped.
    pub(super) fn attach(&self, args: &[String], log: &Path) -> Result<AttachedProcess, SlurmTestbedError> {
        let shell = ["sh", "-c", ATTACHED_SCRIPT, "sh"].map(str::to_owned);
        let mut command = self.command_in(&[], &[&shell, args].concat(), log)?;
        let shell = command.stdin(Stdio::piped()).process_group(0).spawn();
        shell.map(AttachedProcess).map_err(|source| SlurmTestbedError::Program { program: args[0].clone(), source })
    }

    /// Returns a command that sees the files of this Slurm's system, in these additional namespaces.
    fn command_in(&self, namespaces: &[&str], args: &[String], log: &Path) -> Result<Command, SlurmTestbedError> {
        let output = File::options().create(true).append(true).open(log).map_err(file_error("opening", log))?;
        let errors = output.try_clone().map_err(file_error("opening", log))?;
        let enter = self.enter();
        let mut command = Command::new(&enter[0]);
        command.args(&enter[1..]).args(namespaces).arg(format!("--wdns={}", self.folder.display())).args(args);
        command.env_clear().env("PATH", PATH).stdout(output).stderr(errors);
        Ok(command)
    }

    /// Returns the ids of a daemon's live processes.
    pub(super) fn pids(&self, daemon: Daemon<'_>) -> Vec<u32> {
        let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let folder = self.folder.to_string_lossy();
        pids.filter(|pid: &u32| {
            // A zombie has an empty command line.
            let Ok(line) = fs::read(format!("/proc/{pid}/cmdline")) else { return false };
            let line = String::from_utf8_lossy(&line);
            let args: Vec<&str> = line.split_terminator('\0').collect();
            // Every command line of this Slurm contains its folder, and no other process's does.
            daemon.is(&args) && args.iter().any(|arg| arg.contains(&*folder))
        })
        .collect()
    }

    /// Sends a signal to a daemon and waits until it is gone.
    pub(super) fn end(&self, daemon: Daemon<'_>, signal: Signal) -> Result<(), SlurmTestbedError> {
        let pids = self.pids(daemon);
        for pid in pids.iter().filter_map(|&pid| Pid::from_raw(i32::try_from(pid).ok()?)) {
            match kill_process(pid, signal) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                Err(source) => return Err(SlurmTestbedError::Stop { daemon: daemon.to_string(), source }),
            }
        }
        let began = Instant::now();
        while !pids.iter().all(|&pid| is_gone(pid)) || !self.pids(daemon).is_empty() {
            if began.elapsed() > PATIENCE {
                let what = format!("the end of {daemon}");
                return Err(SlurmTestbedError::Timeout { what, within: PATIENCE, last: "running".to_owned() });
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }
}

/// Returns whether a process has ended. Its main thread can be dead while other threads still hold its sockets.
fn is_gone(pid: u32) -> bool {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
    threads == 0 || threads == 1 && fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.is_empty())
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        // The end of its input tells the supervisor to clean up. It removes the files before it exits.
        drop(self.supervisor.stdin.take());
        drop(self.supervisor.wait());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_is_recognized_by_its_command_line() {
        let node1 = ["/usr/sbin/slurmd", "-N", "node1", "-f", "/bed/slurm.conf"];
        assert!(Daemon::Node("node1").is(&node1));
        assert!(!Daemon::Node("node10").is(&node1));
        assert!(!Daemon::Node("node1").is(&["slurmstepd: [4.batch]"]));
        assert!(Daemon::Controller.is(&["slurmctld", "-f", "/bed/slurm.conf"]));
        assert!(Daemon::Munge.is(&["munged", "--force"]));
        assert!(!Daemon::Munge.is(&[]));
    }
}
