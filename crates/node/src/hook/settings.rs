//! The hooks' settings file: Slurm passes hooks no arguments.
//!
//! Every setting has a default: a site with a controller and agents needs no file, and one without a controller writes
//! `standalone = true`.

use std::{
    io,
    path::{Path, PathBuf},
};

use doctor_core::{
    ids::{CheckId, NodeName},
    time::Span,
    toml_text::{self, TomlError},
};
use doctor_host::trusted_file;
use serde::{Deserialize, Serialize};

use super::HookKind;
use crate::agent;

/// Read if `--config` is not given and the file exists.
pub const DEFAULT_FILE: &str = "/etc/cluster-doctor/hook.toml";

/// All settings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// There is no controller: the hook drains its node itself.
    pub standalone: bool,
    /// With `standalone`: end a hook's own drain when its finding is gone.
    pub release: bool,
    /// Slurm's name of this node. Default: slurmd's SLURMD_NODENAME, then the agent's node name or, with `standalone`, the
    /// host name.
    pub node: Option<NodeName>,
    /// The agent's settings file: names the controller and the directory of the agent's verdict.
    pub agent: PathBuf,
    /// The hook's state directory.
    pub state: PathBuf,
    /// With `standalone`: the site's policy, the hardware profile, the root of the file system, and NVML. With a controller
    /// these come from the agent's settings.
    pub policy: Option<PathBuf>,
    pub profile: Option<PathBuf>,
    pub root: PathBuf,
    pub nvml: String,
    /// slurm.conf and the directory of scontrol, if they cannot be found through slurmd.
    pub slurm_conf: Option<PathBuf>,
    pub slurm_programs: Option<PathBuf>,
    /// A verdict up to this age is reused.
    pub fresh: Span,
    pub health: Health,
    pub prolog: Prolog,
    pub epilog: Epilog,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            standalone: false,
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
            // Both the agent and slurmd (at the usual HealthCheckInterval) run checks every five minutes.
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
    /// Time limit of the whole hook.
    pub limit: Span,
}

impl Default for Health {
    fn default() -> Self {
        // slurmd kills the program after 60 s, and MessageTimeout is 10 s.
        Self { limit: Span::from_secs(8) }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Prolog {
    /// Time limit of the whole hook: a job waits for it.
    pub limit: Span,
    /// Whether to keep jobs off a node with an isolating finding while the breaker permits it.
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
    /// Time limit of the whole hook: the node stays unavailable meanwhile.
    pub limit: Span,
    /// Run the deeper checks after a job that ended by one of these signals, or by a shell's exit code for one.
    pub signals: Vec<u8>,
    /// Run the deeper checks after a job that ended with one of these exit codes.
    pub exit_codes: Vec<u8>,
    /// The deeper checks. Empty: every check that does not occupy the node.
    pub deeper: Vec<CheckId>,
}

impl Default for Epilog {
    fn default() -> Self {
        // SIGILL, SIGABRT (CUDA and NCCL abort on an error), SIGBUS, SIGFPE, SIGSEGV. SIGTERM and SIGKILL come from the
        // user or the job's limit.
        Self { limit: Span::from_secs(30), signals: vec![4, 6, 7, 8, 11], exit_codes: Vec::new(), deeper: Vec::new() }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    #[error("cannot read {}", .path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{}: {source}", .path.display())]
    Bad { path: PathBuf, source: TomlError },
    #[error("{}: `{key}` is {given}; accepted: {least} to {most}", .path.display())]
    Limit { path: PathBuf, key: &'static str, given: Span, least: Span, most: Span },
}

/// A shorter limit ends before a driver has answered.
const SHORTEST: Span = Span::from_secs(1);
/// slurmd kills a HealthCheckProgram after 60 s, without any message.
const LONGEST_HEALTH: Span = Span::from_secs(55);
const LONGEST: Span = Span::minutes(10);

impl Settings {
    /// Reads the file, or returns the defaults if there is no default file.
    ///
    /// # Errors
    /// If the file cannot be read or is invalid, or if users other than root or our own could change it.
    pub fn load(file: Option<&Path>) -> Result<Self, SettingsError> {
        let path = file.unwrap_or(Path::new(DEFAULT_FILE));
        let text = match trusted_file::read_to_string(path) {
            Ok(text) => text,
            Err(error) if file.is_none() && error.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(source) => return Err(SettingsError::Read { path: path.to_owned(), source }),
        };
        let settings: Self =
            toml_text::read(&text, &[]).map_err(|source| SettingsError::Bad { path: path.to_owned(), source })?;
        settings.check(path)?;
        Ok(settings)
    }

    fn check(&self, path: &Path) -> Result<(), SettingsError> {
        for (key, given, max) in [
            ("health.limit", self.health.limit, LONGEST_HEALTH),
            ("prolog.limit", self.prolog.limit, LONGEST),
            ("epilog.limit", self.epilog.limit, LONGEST),
        ] {
            if given < SHORTEST || given > max {
                return Err(SettingsError::Limit { path: path.to_owned(), key, given, least: SHORTEST, most: max });
            }
        }
        Ok(())
    }

    pub const fn limit(&self, kind: HookKind) -> Span {
        match kind {
            HookKind::Health => self.health.limit,
            HookKind::Prolog => self.prolog.limit,
            HookKind::Epilog => self.epilog.limit,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, os::unix::fs::PermissionsExt};

    fn load(text: &str, mode: u32) -> Result<Settings, SettingsError> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("hook.toml");
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        Settings::load(Some(&path))
    }

    #[test]
    fn a_site_overrides_only_its_settings_and_no_hook_blocks_or_drains_by_default() {
        let settings = load("standalone = true\n[prolog]\nblock = true\n", 0o644).unwrap();
        let prolog = Prolog { block: true, ..Prolog::default() };
        assert_eq!(settings, Settings { standalone: true, prolog, ..Settings::default() });
        let defaults = Settings::default();
        assert!(!defaults.standalone && !defaults.release && !defaults.prolog.block);
    }

    #[test]
    fn a_mistake_is_reported_with_its_position_and_limits_stay_below_slurms() {
        let error = load("[prolog]\nblok = true\n", 0o644).unwrap_err().to_string();
        assert!(error.contains("line 2") && error.contains("block"), "{error}");
        let error = load("[health]\nlimit = \"2m\"\n", 0o644).unwrap_err().to_string();
        assert!(error.contains("`health.limit` is 2m") && error.contains("55s"), "{error}");
        let Err(SettingsError::Read { source, .. }) = load("", 0o666) else { panic!("all users may write to it") };
        assert!(trusted_file::refusal(&source).is_some(), "{source}");
        assert!(matches!(Settings::load(Some(Path::new("no/such/file"))), Err(SettingsError::Read { .. })));
    }
}
