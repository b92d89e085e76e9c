//! A private Slurm cluster: munged, slurmctld and several slurmds as Debian packages them, on loopback, with GPUs that
//! are device files without hardware. Jobs really run, as processes of this machine.
//!
//! ```no_run
//! use doctor_testbed::slurm::{Daemon, Layout, Slurm};
//!
//! let slurm = Slurm::start(&Layout::default())?;                     // node1 to node4, eight GPUs each, all idle
//! let job = slurm.submit(&["--exclusive", "--gres=gpu:8", "--wrap=sleep 60"])?;
//! slurm.wait_for_job(job, "RUNNING")?;
//! slurm.kill(Daemon::Node("node1"))?;
//! slurm.wait_for_node("node1", "down", |state| state.starts_with("DOWN"))?;
//! slurm.restart(Daemon::Node("node1"))?;
//! # Ok::<(), doctor_testbed::slurm::SlurmTestbedError>(())
//! ```
//!
//! It needs root and starts in two seconds, so each test may have its own. Its processes, jobs included, and its files
//! are removed when the value is dropped and when this process exits, even if it is killed.

mod error;
mod files;
mod installation;
mod layout;
mod namespaces;
mod rest;

use std::{
    fs, io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
    sync::Mutex,
    time::{Duration, Instant},
};

use rustix::process::Signal;
use tempfile::TempDir;

pub use error::SlurmTestbedError;
use error::file_error;
use installation::Installation;
use layout::PathsAndPorts;
pub use layout::{Generation, HealthCheck, Layout, Partition, PowerSaving, Rest};
pub use namespaces::Daemon;
use namespaces::{AttachedProcess, Namespaces, PATH};

use crate::{kubernetes::last_lines, ports};

/// How long a step may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(240);

/// How long a new slurmctld may take to answer; a second or two is usual. Under load, one was seen to hang forever.
const FIRST_RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);

/// The polling interval.
const PAUSE: Duration = Duration::from_millis(50);

/// The number of attempts to start. One fails if another process takes a port between its selection and its use, or if
/// slurmctld does not answer.
const MAX_ATTEMPTS: usize = 3;

/// A running Slurm. Dropping it ends its processes, jobs included, and removes its files.
#[derive(Debug)]
pub struct Slurm {
    nodes: Vec<String>,
    layout: Layout,
    paths_and_ports: PathsAndPorts,
    programs: PathBuf,
    attached: Mutex<Option<AttachedProcess>>,
    namespaces: Namespaces,
    /// Declared last: the files are removed after the processes that use them. The supervisor also removes them, in case
    /// this process is killed.
    _folder: TempDir,
}

impl Slurm {
    /// Checks that this machine has what this release needs.
    ///
    /// # Errors
    /// Returns [`SlurmTestbedError::Unsupported`] with what is missing.
    pub fn can_start(generation: Generation) -> Result<(), SlurmTestbedError> {
        Namespaces::check_supported()?;
        Installation::find(generation).map(drop)
    }

    /// Starts a Slurm and waits until all nodes are idle.
    ///
    /// # Errors
    /// Returns [`SlurmTestbedError::Unsupported`] with what is missing, or another error if Slurm does not start.
    pub fn start(layout: &Layout) -> Result<Self, SlurmTestbedError> {
        Namespaces::check_supported()?;
        let system = Installation::find(layout.generation)?;
        let mut tries = 1;
        loop {
            let started = Self::start_once(layout, &system);
            let retry = match &started {
                Err(SlurmTestbedError::NotStarted { said: output, .. }) => output.contains("Address already in use"),
                Err(silent @ SlurmTestbedError::NoResponse { .. }) => {
                    eprintln!("{silent}");
                    true
                }
                _ => false,
            };
            if !retry || tries == MAX_ATTEMPTS {
                return started;
            }
            tries += 1;
        }
    }

    /// Returns the names of the nodes.
    pub fn nodes(&self) -> &[String] {
        &self.nodes
    }

    /// Returns the path of slurm.conf. Changes take effect after `scontrol reconfigure`.
    pub fn conf(&self) -> PathBuf {
        self.paths_and_ports.conf()
    }

    /// Returns the folder of the client programs: `scontrol`, `squeue`, `sbatch`, …
    pub fn programs(&self) -> &Path {
        &self.programs
    }

    /// Returns the environment that makes programs use this Slurm: `SLURM_CONF`, and a `PATH` that starts with its programs.
    pub fn environment(&self) -> [(&'static str, String); 2] {
        let path = format!("{}:{PATH}", self.programs.display());
        [("SLURM_CONF", self.conf().display().to_string()), ("PATH", path)]
    }

    /// Returns the command of a client program.
    pub fn command(&self, name: &str) -> Command {
        let mut command = Command::new(self.programs.join(name));
        command.envs(self.environment());
        command
    }

    /// Runs a client program and returns its output.
    ///
    /// # Errors
    /// Returns its standard error if it fails.
    pub fn run(&self, name: &str, arguments: &[&str]) -> Result<String, SlurmTestbedError> {
        let ended = self.command(name).args(arguments).output();
        let ended = ended.map_err(|source| SlurmTestbedError::Program { program: name.to_owned(), source })?;
        if ended.status.success() {
            return Ok(String::from_utf8_lossy(&ended.stdout).trim().to_owned());
        }
        let command = format!("{name} {}", arguments.join(" "));
        Err(SlurmTestbedError::CommandFailed {
            command,
            said: String::from_utf8_lossy(&ended.stderr).trim().to_owned(),
        })
    }

    /// Submits a job with its output discarded and returns the job id.
    ///
    /// # Errors
    /// Fails if `sbatch` rejects the job.
    pub fn submit(&self, arguments: &[&str]) -> Result<u32, SlurmTestbedError> {
        let all: Vec<&str> = ["--parsable", "--output=/dev/null"].iter().chain(arguments).copied().collect();
        let stdout = self.run("sbatch", &all)?;
        stdout.parse().map_err(|_| SlurmTestbedError::CommandFailed {
            command: format!("sbatch {}", arguments.join(" ")),
            said: stdout,
        })
    }

    /// Returns the state of a node as `scontrol show node` prints it: `IDLE`, `ALLOCATED+DRAIN`, …
    ///
    /// # Errors
    /// Fails if slurmctld does not answer.
    pub fn node_state(&self, node: &str) -> Result<String, SlurmTestbedError> {
        self.run("scontrol", &["show", "node", "-o", node]).map(|output| field(&output, "State").to_owned())
    }

    /// Returns the state of a job: `PENDING`, `RUNNING`, `COMPLETED`, …
    ///
    /// # Errors
    /// Fails if slurmctld does not know the job, or no longer does.
    pub fn job_state(&self, job: u32) -> Result<String, SlurmTestbedError> {
        self.run("scontrol", &["show", "job", "-o", &job.to_string()])
            .map(|output| field(&output, "JobState").to_owned())
    }

    /// Waits until the state of a node satisfies `is`; `what` names it in the error.
    ///
    /// # Errors
    /// Returns the last state if that takes more than four minutes.
    pub fn wait_for_node(&self, node: &str, what: &str, is: impl Fn(&str) -> bool) -> Result<(), SlurmTestbedError> {
        self.wait_for(&format!("node {node} {what}"), || self.node_state(node), is)
    }

    /// Waits until a job is in this state.
    ///
    /// # Errors
    /// Returns the last state if that takes more than four minutes.
    pub fn wait_for_job(&self, job: u32, state: &str) -> Result<(), SlurmTestbedError> {
        self.wait_for(&format!("job {job} {state}"), || self.job_state(job), |now| now == state)
    }

    /// Polls `ask` until the reply satisfies `is`. A failed query is retried.
    ///
    /// # Errors
    /// Returns the last reply if that takes more than four minutes.
    pub fn wait_for(
        &self,
        what: &str,
        ask: impl Fn() -> Result<String, SlurmTestbedError>,
        is: impl Fn(&str) -> bool,
    ) -> Result<(), SlurmTestbedError> {
        wait_within(PATIENCE, what, ask, is)
    }

    /// Kills a daemon (SIGKILL) and waits until it is gone.
    ///
    /// Jobs of a node continue without its slurmd. slurmctld loses the state that it has not saved, which can be that
    /// of the last seconds.
    ///
    /// # Errors
    /// Fails if the daemon does not end.
    pub fn kill(&self, daemon: Daemon<'_>) -> Result<(), SlurmTestbedError> {
        self.namespaces.end(daemon, Signal::KILL)
    }

    /// Stops a daemon with SIGTERM, as a service manager would, and waits until it is gone. slurmctld saves its state first.
    ///
    /// # Errors
    /// Fails if the daemon does not end.
    pub fn stop(&self, daemon: Daemon<'_>) -> Result<(), SlurmTestbedError> {
        self.namespaces.end(daemon, Signal::TERM)
    }

    /// Starts a daemon that has ended, with its saved state. Does not wait until it answers.
    ///
    /// # Errors
    /// Fails if the daemon does not start.
    pub fn restart(&self, daemon: Daemon<'_>) -> Result<(), SlurmTestbedError> {
        let conf = self.conf().display().to_string();
        let args: Vec<String> = match daemon {
            Daemon::Munge => self.munge(),
            Daemon::Controller => vec!["slurmctld".into(), "-f".into(), conf],
            Daemon::Node(node) if self.nodes.iter().any(|known| known == node) => {
                vec!["slurmd".into(), "-N".into(), node.into(), "-f".into(), conf]
            }
            Daemon::Node(node) => return Err(SlurmTestbedError::NoNode { node: node.to_owned() }),
            Daemon::Rest => return self.attach_rest(),
        };
        self.namespaces.start(daemon, &args)
    }

    /// Returns the process ids of a daemon in this machine's PID namespace.
    pub fn pids(&self, daemon: Daemon<'_>) -> Vec<u32> {
        self.namespaces.pids(daemon)
    }

    /// Returns the end of a daemon's log.
    pub fn log(&self, daemon: Daemon<'_>) -> String {
        last_lines(&match daemon {
            Daemon::Munge => self.paths_and_ports.munge("log"),
            Daemon::Controller => self.paths_and_ports.folder.join("slurmctld.log"),
            Daemon::Node(node) => self.paths_and_ports.folder.join(format!("slurmd.{node}.log")),
            Daemon::Rest => self.paths_and_ports.folder.join(rest::LOG),
        })
    }

    /// Sets whether a node comes back after a reboot. By default every node does.
    ///
    /// # Errors
    /// Fails if the marker file cannot be changed.
    pub fn set_returns_from_reboot(&self, node: &str, returns: bool) -> Result<(), SlurmTestbedError> {
        let never = self.paths_and_ports.folder.join(format!("never.{node}"));
        let done = if returns { fs::remove_file(&never) } else { fs::write(&never, "") };
        match done {
            Err(error) if !(returns && error.kind() == io::ErrorKind::NotFound) => {
                Err(file_error("writing", &never)(error))
            }
            _ => Ok(()),
        }
    }

    /// Returns the nodes that Slurm has rebooted so far, in order.
    pub fn reboots(&self) -> Vec<String> {
        let text = fs::read_to_string(self.paths_and_ports.folder.join("reboots")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    fn start_once(layout: &Layout, system: &Installation) -> Result<Self, SlurmTestbedError> {
        let temporary = std::env::temp_dir();
        let folder = tempfile::Builder::new().prefix("doctor-slurm-").tempdir_in(&temporary);
        let folder = folder.map_err(file_error("creating a folder in", &temporary))?;
        // Other users than root have jobs too and need access to munge's socket in the folder.
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755))
            .map_err(file_error("opening", folder.path()))?;
        let mut ports =
            ports::reserve(2 + if layout.slurmds { layout.nodes } else { 0 }).map_err(SlurmTestbedError::Ports)?;
        let (controller_port, rest_port) = (ports.remove(0), ports.remove(0));
        let paths_and_ports =
            PathsAndPorts { folder: folder.path().to_owned(), controller_port, node_ports: ports, rest_port };
        files::write(layout, &paths_and_ports)?;
        let world = Namespaces::new(folder.path(), system.root.as_deref())?;
        let programs = system.client_programs(&paths_and_ports, &world)?;
        let nodes = layout.node_names().collect();
        let slurm = Self {
            nodes,
            layout: layout.clone(),
            paths_and_ports,
            programs,
            attached: Mutex::default(),
            namespaces: world,
            _folder: folder,
        };
        slurm.start_daemons()?;
        if layout.rest.is_some() {
            slurm.start_rest()?;
        }
        Ok(slurm)
    }

    fn start_daemons(&self) -> Result<(), SlurmTestbedError> {
        self.restart(Daemon::Munge)?;
        self.restart(Daemon::Controller)?;
        let ping = || self.run("scontrol", &["ping"]);
        match self.wait_while_running(Daemon::Controller, FIRST_RESPONSE_TIMEOUT, "an answer", ping, |_| true) {
            Err(SlurmTestbedError::Timeout { within, .. }) => {
                return Err(SlurmTestbedError::NoResponse { within, said: self.log(Daemon::Controller) });
            }
            done => done?,
        }
        if !self.layout.slurmds {
            return self.make_idle();
        }
        for node in &self.nodes {
            self.restart(Daemon::Node(node))?;
        }
        for node in &self.nodes {
            let state = || self.node_state(node);
            self.wait_while_running(Daemon::Node(node), PATIENCE, "idle", state, |state| state == "IDLE")?;
        }
        Ok(())
    }

    /// A node that never registered has no usable state until it is set down and resumed.
    fn make_idle(&self) -> Result<(), SlurmTestbedError> {
        let all = format!("nodename=node[1-{}]", self.nodes.len());
        self.run("scontrol", &["update", &all, "state=down", "reason=silent"])?;
        self.run("scontrol", &["update", &all, "state=resume"]).map(drop)
    }

    /// As [`Self::wait_for`], but fails immediately if the daemon has ended.
    fn wait_while_running(
        &self,
        daemon: Daemon<'_>,
        within: Duration,
        what: &str,
        ask: impl Fn() -> Result<String, SlurmTestbedError>,
        is: impl Fn(&str) -> bool,
    ) -> Result<(), SlurmTestbedError> {
        let ended = || self.pids(daemon).is_empty();
        let ask = || if ended() { Ok(String::new()) } else { ask() };
        wait_within(within, &format!("{daemon}: {what}"), ask, |answer| answer.is_empty() || is(answer))?;
        if ended() {
            return Err(SlurmTestbedError::NotStarted { daemon: daemon.to_string(), said: self.log(daemon) });
        }
        Ok(())
    }

    fn munge(&self) -> Vec<String> {
        let options = [
            ("key-file", "key"),
            ("socket", "socket"),
            ("pid-file", "pid"),
            ("log-file", "log"),
            ("seed-file", "seed"),
        ];
        let options =
            options.map(|(option, file)| format!("--{option}={}", self.paths_and_ports.munge(file).display()));
        ["munged".to_owned(), "--force".to_owned()].into_iter().chain(options).collect()
    }
}

fn wait_within(
    within: Duration,
    what: &str,
    ask: impl Fn() -> Result<String, SlurmTestbedError>,
    is: impl Fn(&str) -> bool,
) -> Result<(), SlurmTestbedError> {
    let began = Instant::now();
    loop {
        let answer = ask();
        if answer.as_deref().is_ok_and(&is) {
            return Ok(());
        }
        if began.elapsed() > within {
            let last = answer.unwrap_or_else(|error| error.to_string());
            return Err(SlurmTestbedError::Timeout { what: what.to_owned(), within, last });
        }
        std::thread::sleep(PAUSE);
    }
}

/// Returns the value after `name=` in a line of `scontrol show -o`, up to the next blank.
fn field<'a>(line: &'a str, name: &str) -> &'a str {
    let fields = line.split_ascii_whitespace().filter_map(|field| field.split_once('='));
    fields.into_iter().find(|(found, _)| *found == name).map_or("", |(_, value)| value)
}
