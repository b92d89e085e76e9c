//! Settings of the Slurm backend: access to Slurm, the nodes to manage, and how runs are submitted.

use std::{collections::BTreeMap, path::PathBuf};

use doctor_core::{ids::Sku, time::Span};
use serde::{Deserialize, Serialize};

/// Settings of the backend, `[backend.slurm]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SlurmConfig {
    /// The directory of `scontrol`, `squeue`, `sbatch` and `scancel`. Absent: in `PATH`.
    pub programs: Option<PathBuf>,
    /// Absent: `$SLURM_CONF`, or Slurm's default.
    pub slurm_conf: Option<PathBuf>,
    /// The limit for one command. If slurmctld is down, Slurm's commands wait 9 seconds.
    pub deadline: Span,
    /// Where nodes are read instead of from `scontrol`.
    pub rest: Option<Rest>,
    /// Only nodes of these partitions. Empty: of all.
    pub partitions: Vec<String>,
    /// Whether nodes without GPUs are ignored.
    pub gpus_only: bool,
    /// The machine types of nodes, by feature.
    pub skus: BTreeMap<String, Sku>,
    /// A node that power saving would power down within this time is left alone: a run would wake it for nothing.
    pub suspend_margin: Span,
    /// A node with a foreign reservation that begins within this time is left alone.
    pub reservation_margin: Span,
    /// The prefix of our drain reasons.
    pub prefix: String,
    /// The node field in which we record our state.
    pub notes: Notes,
    /// How runs are submitted.
    pub job: Submission,
    /// The shared directory's path on the nodes. Absent: `data` of the service.
    pub share: Option<PathBuf>,
    /// The path of `doctor-node` on the nodes.
    pub doctor_node: PathBuf,
    /// Where `doctor-node` keeps state on each node from one run to the next.
    pub node_state: PathBuf,
    /// The command that resets a node's GPUs. Empty: not possible.
    pub reset: Vec<String>,
    /// Whether nodes may be rebooted. slurm.conf must set `RebootProgram`.
    pub reboot: bool,
    /// A site command that replaces a machine; `{node}` and `{op}` are filled in. Empty: machines are not replaced.
    pub replace: Vec<String>,
    /// The Slurm state of a node that is found bad.
    pub out_as: OutAs,
    /// A feature that healthy nodes have, so that users can request them. Absent: none is written.
    pub validated_feature: Option<String>,
    /// Whether one word for a node's status (`pass`, `fail`, `unknown`) is kept in its note. Each change is a write to the node.
    pub status_note: bool,
}

/// Where nodes are read over HTTP.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rest {
    /// The socket of slurmrestd, or its address: `/run/slurmrestd.sock`, `127.0.0.1:6820`, `https://slurm.example:6820`.
    pub at: String,
    /// The certificates that an address with `https://` is verified with. Absent: the system's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca_file: Option<PathBuf>,
    /// The version of its API, such as `v0.0.42`.
    pub version: String,
    /// A file with a token. It is read for each request, because tokens expire. Absent: the socket authenticates the user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_file: Option<PathBuf>,
    /// The user name, if the token alone does not identify the user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
}

/// A node field that users may write too; a part of it is ours.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Notes {
    #[default]
    Extra,
    Comment,
}

impl Notes {
    pub(super) const fn key(self) -> &'static str {
        match self {
            Self::Extra => "Extra",
            Self::Comment => "Comment",
        }
    }
}

/// The Slurm state of a node that is found bad.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OutAs {
    /// Running jobs may end.
    #[default]
    Drain,
    /// The same, and shown as about to fail.
    Fail,
    /// Down. Set only while no job is on the node; otherwise it is drained.
    Down,
}

/// How a run is submitted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Submission {
    /// Absent: the first partition of the node that is up and allows the time.
    pub partition: Option<String>,
    pub account: Option<String>,
    /// The lowest one; preemptible if the site has that.
    pub qos: Option<String>,
    /// By how much the priority is lowered.
    pub nice: u32,
    /// Whether all GPUs of the node are requested.
    pub gres: bool,
    /// How long a cancelled job may take to write its result.
    pub grace: Span,
    /// Additional arguments of `sbatch`.
    pub arguments: Vec<String>,
}

impl Default for Submission {
    fn default() -> Self {
        Self {
            partition: None,
            account: None,
            qos: None,
            nice: 10_000,
            gres: true,
            grace: Span::from_secs(30),
            arguments: Vec::new(),
        }
    }
}

impl Default for SlurmConfig {
    fn default() -> Self {
        Self {
            programs: None,
            slurm_conf: None,
            deadline: Span::from_secs(20),
            rest: None,
            partitions: Vec::new(),
            gpus_only: true,
            skus: BTreeMap::new(),
            suspend_margin: Span::minutes(5),
            reservation_margin: Span::hours(1),
            prefix: "doctor:".to_owned(),
            notes: Notes::Extra,
            job: Submission::default(),
            share: None,
            doctor_node: PathBuf::from("/usr/bin/doctor-node"),
            node_state: PathBuf::from("/var/lib/cluster-doctor/node"),
            reset: ["nvidia-smi", "--gpu-reset"].map(str::to_owned).to_vec(),
            reboot: true,
            replace: Vec::new(),
            out_as: OutAs::Drain,
            validated_feature: None,
            status_note: false,
        }
    }
}

/// The prefix of the names of our jobs, reservations and repairs.
pub(super) const JOB_PREFIX: &str = "doctor-";

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SlurmConfigError {
    #[error("`prefix` is `{0}`, expected a word that ends in a colon, such as `doctor:`")]
    Prefix(String),
    #[error("`validated_feature` is `{0}`, expected one word of letters, digits, `_`, `-`, `.` or `=`")]
    Feature(String),
    #[error("`rest.version` is `{0}`, expected a version such as `v0.0.42`")]
    RestVersion(String),
    #[error("`job.arguments` has `{0}`, which the controller sets")]
    Argument(String),
}

/// Options of `sbatch` that the backend sets itself.
const RESERVED_ARGUMENTS: [&str; 12] = [
    "--exclusive",
    "--nodelist",
    "--nodes",
    "--job-name",
    "--comment",
    "--reservation",
    "--array",
    "--requeue",
    "--output",
    "--wrap",
    "--parsable",
    "--test-only",
];

impl SlurmConfig {
    /// Checks what can be checked without a cluster.
    ///
    /// # Errors
    /// With the setting and its accepted values.
    pub fn check(&self) -> Result<(), SlurmConfigError> {
        let is_word = |text: &str, more: &str| {
            !text.is_empty() && text.len() <= 64 && text.chars().all(|c| c.is_ascii_alphanumeric() || more.contains(c))
        };
        if !self.prefix.strip_suffix(':').is_some_and(|word| is_word(word, "-_.")) {
            return Err(SlurmConfigError::Prefix(self.prefix.clone()));
        }
        if let Some(feature) = self.validated_feature.as_ref().filter(|feature| !is_word(feature, "_-.=")) {
            return Err(SlurmConfigError::Feature(feature.clone()));
        }
        if let Some(rest) = self.rest.as_ref().filter(|rest| !is_word(&rest.version, ".")) {
            return Err(SlurmConfigError::RestVersion(rest.version.clone()));
        }
        let is_reserved = |word: &&String| RESERVED_ARGUMENTS.contains(&word.split('=').next().unwrap_or_default());
        match self.job.arguments.iter().find(is_reserved) {
            Some(word) => Err(SlurmConfigError::Argument(word.clone())),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_is_optional_and_an_unknown_setting_is_named() {
        assert_eq!(toml::from_str::<SlurmConfig>("").unwrap(), SlurmConfig::default());
        let error = toml::from_str::<SlurmConfig>("prefiks = \"x\"\n").unwrap_err().to_string();
        assert!(error.contains("unknown field `prefiks`") && error.contains("line 1"), "{error}");
        SlurmConfig::default().check().unwrap();
    }

    #[test]
    fn invalid_settings_and_reserved_arguments_are_rejected() {
        let bad = |text: &str| toml::from_str::<SlurmConfig>(text).unwrap().check().unwrap_err().to_string();
        assert!(bad("prefix = \"\"\n").contains("such as `doctor:`"));
        assert!(bad("prefix = \"doctor\"\n").contains("ends in a colon"));
        assert!(bad("validated_feature = \"a,b\"\n").contains("one word"));
        assert!(bad("[job]\narguments = [\"--nodelist=x\"]\n").contains("--nodelist=x"));
        assert!(bad("rest = { at = \"/s\", version = \"v0/../x\" }\n").contains("v0.0.42"));
    }
}
