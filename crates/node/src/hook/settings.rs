//! What hooks are told, by a file: Slurm gives them no arguments.
//!
//! Everything has a default, so that a site with a controller and agents writes no file at all, and one without a controller
//! writes `alone = true`.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use doctor_core::{
    ids::{CheckId, NodeName},
    time::Span,
    toml_text::{self, BadText},
};
use serde::{Deserialize, Serialize};

use super::Moment;
use crate::agent;

/// Read where `--config` is not given and it is there.
pub const DEFAULT_FILE: &str = "/etc/cluster-doctor/hook.toml";

/// Everything that can be set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// There is no controller: the hook drains its node by itself.
    pub alone: bool,
    /// With `alone`: a drain of the hook's own ends when its finding is gone.
    pub release: bool,
    /// What Slurm calls this node. Else: what slurmd says, then the agent's credential, then the host's name.
    pub node: Option<NodeName>,
    /// The agent's settings: where the controller is, and where the agent keeps its verdict.
    pub agent: PathBuf,
    /// Where the hook remembers things.
    pub state: PathBuf,
    /// With `alone`: the site's policy, what the machine type should have, where the machine is seen, NVIDIA's library.
    /// With a controller the agent's settings say these.
    pub policy: Option<PathBuf>,
    pub profile: Option<PathBuf>,
    pub root: PathBuf,
    pub nvml: String,
    /// slurm.conf and the folder of scontrol, where slurmd does not lead to them.
    pub slurm_conf: Option<PathBuf>,
    pub slurm_programs: Option<PathBuf>,
    /// A verdict that is no older than this is used as it is.
    pub fresh: Span,
    pub health: Health,
    pub prolog: Prolog,
    pub epilog: Epilog,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            alone: false,
            release: false,
            node: None,
            agent: agent::config::DEFAULT_FILE.into(),
            state: "/var/lib/cluster-doctor/hook".into(),
            policy: None,
            profile: None,
            root: "/".into(),
            nvml: doctor_gpu::nvml::LIBRARY.to_owned(),
            slurm_conf: None,
            slurm_programs: None,
            // An agent looks every five minutes, and so does slurmd by the usual HealthCheckInterval.
            fresh: Span::minutes(6),
            health: Health::default(),
            prolog: Prolog::default(),
            epilog: Epilog::default(),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Health {
    /// For everything together.
    pub limit: Span,
}

impl Default for Health {
    fn default() -> Self {
        // slurmd ends the program after 60 s, and MessageTimeout is 10 s.
        Self { limit: Span::from_secs(8) }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Prolog {
    /// For everything together: a job waits for it.
    pub limit: Span,
    /// Whether a job is kept from a node with a finding that isolates it, while the breaker permits.
    pub block: bool,
}

impl Default for Prolog {
    fn default() -> Self {
        // BatchStartTimeout is 10 s.
        Self { limit: Span::from_secs(5), block: false }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Epilog {
    /// For everything together: the node is given to nobody else meanwhile.
    pub limit: Span,
    /// After a job that ended by one of these signals, or by a shell's exit code for one, the node is looked at more deeply.
    pub signals: Vec<u8>,
    /// After a job that ended with one of these exit codes, too.
    pub exit_codes: Vec<u8>,
    /// The checks of that deeper look. None: every check that does not occupy the node.
    pub deeper: Vec<CheckId>,
}

impl Default for Epilog {
    fn default() -> Self {
        // Ill, abrt (what CUDA and NCCL do on an error), bus, fpe, segv. Term and kill are a user's, or the job's limit.
        Self { limit: Span::from_secs(30), signals: vec![4, 6, 7, 8, 11], exit_codes: Vec::new(), deeper: Vec::new() }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    #[error("cannot read {}", .path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{}: {source}", .path.display())]
    Bad { path: PathBuf, source: BadText },
    #[error("{}: `{key}` is {given}; it may be from {least} to {most}", .path.display())]
    Limit { path: PathBuf, key: &'static str, given: Span, least: Span, most: Span },
    #[error(transparent)]
    NotOurs(#[from] agent::config::ConfigError),
}

/// Shorter ones end before a driver has answered.
const SHORTEST: Span = Span::from_secs(1);
/// slurmd kills a HealthCheckProgram after 60 s, and then nobody says anything.
const LONGEST_HEALTH: Span = Span::from_secs(55);
const LONGEST: Span = Span::minutes(10);

impl Settings {
    /// # Errors
    /// If the file cannot be read, says what is not understood, or could have been written by others than root.
    pub fn load(file: Option<&Path>) -> Result<Self, SettingsError> {
        let path = file.unwrap_or(Path::new(DEFAULT_FILE));
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if file.is_none() && error.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(source) => return Err(SettingsError::Read { path: path.to_owned(), source }),
        };
        agent::config::ours_alone(path)?;
        let settings: Self =
            toml_text::read(&text, &[]).map_err(|source| SettingsError::Bad { path: path.to_owned(), source })?;
        settings.check(path)?;
        Ok(settings)
    }

    fn check(&self, path: &Path) -> Result<(), SettingsError> {
        for (key, given, most) in [
            ("health.limit", self.health.limit, LONGEST_HEALTH),
            ("prolog.limit", self.prolog.limit, LONGEST),
            ("epilog.limit", self.epilog.limit, LONGEST),
        ] {
            if given < SHORTEST || given > most {
                return Err(SettingsError::Limit { path: path.to_owned(), key, given, least: SHORTEST, most });
            }
        }
        Ok(())
    }

    pub const fn limit(&self, moment: Moment) -> Span {
        match moment {
            Moment::Health => self.health.limit,
            Moment::Prolog => self.prolog.limit,
            Moment::Epilog => self.epilog.limit,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn load(text: &str, mode: u32) -> Result<Settings, SettingsError> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("hook.toml");
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        Settings::load(Some(&path))
    }

    #[test]
    fn a_site_says_only_what_it_changes_and_nothing_blocks_or_drains_by_default() {
        let settings = load("alone = true\n[prolog]\nblock = true\n", 0o644).unwrap();
        let prolog = Prolog { block: true, ..Prolog::default() };
        assert_eq!(settings, Settings { alone: true, prolog, ..Settings::default() });
        let usual = Settings::default();
        assert!(!usual.alone && !usual.release && !usual.prolog.block);
    }

    #[test]
    fn a_mistake_is_named_with_its_place_and_limits_stay_below_slurms() {
        let error = load("[prolog]\nblok = true\n", 0o644).unwrap_err().to_string();
        assert!(error.contains("line 2") && error.contains("block"), "{error}");
        let error = load("[health]\nlimit = \"2m\"\n", 0o644).unwrap_err().to_string();
        assert!(error.contains("`health.limit` is 2m") && error.contains("55s"), "{error}");
        assert!(matches!(load("", 0o666), Err(SettingsError::NotOurs(_))));
        assert!(matches!(Settings::load(Some(Path::new("no/such/file"))), Err(SettingsError::Read { .. })));
    }
}
