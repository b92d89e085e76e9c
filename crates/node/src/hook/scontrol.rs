//! Runs scontrol to list nodes, and to drain and resume this one.

use std::{io, path::PathBuf, process::Command, time::Duration};

use doctor_core::ids::NodeName;

use super::{
    nodes::{self, Node},
    settings::Settings,
    slurm_env::SlurmEnv,
};
use crate::{
    runner::child::{self, ChildOutcome, Echo, Limits},
    stop::Stop,
};

/// Ten thousand nodes print about ten megabytes.
const MAX_OUTPUT_BYTES: usize = 256 << 20;
/// The caller has its own limit; this one is a fallback for a Slurm that does not respond at all.
const LONGEST: Duration = Duration::from_secs(60);
const KILL: Duration = Duration::from_millis(200);

#[derive(Debug, thiserror::Error)]
pub(super) enum SlurmError {
    #[error("scontrol is in none of {0}: set its directory as `slurm_programs`")]
    NoProgram(String),
    #[error("cannot start scontrol")]
    Start(#[source] io::Error),
    #[error("Slurm did not answer in time")]
    NoAnswer,
    #[error("scontrol failed: {0}")]
    Failed(String),
    #[error("cannot parse the node list of scontrol")]
    Unreadable,
}

pub(super) struct Slurm<'a> {
    folders: Vec<PathBuf>,
    conf: Option<PathBuf>,
    stop: &'a Stop,
}

impl<'a> Slurm<'a> {
    pub(super) fn find(settings: &Settings, slurm_env: &SlurmEnv, stop: &'a Stop) -> Self {
        Self { folders: slurm_env.programs(settings), conf: slurm_env.conf(settings), stop }
    }

    /// Returns every node that Slurm shows.
    pub(super) fn nodes(&self) -> Result<Vec<Node>, SlurmError> {
        // `--all` includes nodes of hidden partitions.
        let text = self.scontrol(&["--all", "--oneliner", "show", "node"])?;
        nodes::parse(&text).ok_or(SlurmError::Unreadable)
    }

    pub(super) fn drain(&self, node: &NodeName, reason: &str) -> Result<(), SlurmError> {
        let (name, reason) = (format!("nodename={node}"), format!("reason={reason}"));
        self.scontrol(&["update", &name, "state=drain", &reason]).map(|_| ())
    }

    /// Resumes the node. Newer versions keep the reason until the node has responded again.
    pub(super) fn resume(&self, node: &NodeName) -> Result<(), SlurmError> {
        self.scontrol(&["update", &format!("nodename={node}"), "state=resume"]).map(|_| ())
    }

    fn scontrol(&self, args: &[&str]) -> Result<String, SlurmError> {
        let program = self.folders.iter().map(|folder| folder.join("scontrol")).find(|path| path.is_file());
        let all = || self.folders.iter().map(|folder| folder.display().to_string()).collect::<Vec<_>>().join(", ");
        let program = program.ok_or_else(|| SlurmError::NoProgram(all()))?;
        let path = self.folders.iter().map(|folder| folder.display().to_string()).collect::<Vec<_>>().join(":");
        let mut command = Command::new(program);
        // scontrol prints times in the caller's time zone and format: fix both.
        command.args(args).env_clear().env("PATH", path).env("TZ", "UTC").env("LC_ALL", "C");
        command.envs(self.conf.iter().map(|conf| ("SLURM_CONF", conf)));
        let limits =
            Limits { timeout: LONGEST, max_stream_bytes: MAX_OUTPUT_BYTES, grace: Duration::ZERO, kill_grace: KILL };
        match child::run(&mut command, &limits, self.stop, Echo::default()).map_err(SlurmError::Start)? {
            ChildOutcome::Exited { status, stdout, .. } if status.success() => {
                Ok(String::from_utf8_lossy(&stdout).into_owned())
            }
            ChildOutcome::Exited { status, stdout, stderr } => {
                let output = [stderr, stdout].concat();
                let output = String::from_utf8_lossy(&output);
                let line = output.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default().trim();
                Err(SlurmError::Failed(if line.is_empty() { status.to_string() } else { line.to_owned() }))
            }
            ChildOutcome::TimedOut | ChildOutcome::Stopped(_) | ChildOutcome::Unkillable { .. } => {
                Err(SlurmError::NoAnswer)
            }
            ChildOutcome::TooLong => Err(SlurmError::Unreadable),
        }
    }
}
