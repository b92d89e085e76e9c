//! The configuration: one file for the service, one for the policy, one per machine type. [`LoadedConfig`] holds the complete
//! set for the engine; either all files load or none.

mod file;
mod loading;
mod source;

use std::{io, path::PathBuf, sync::LazyLock};

use doctor_checks::site_profiles::TooManyProfiles;
use doctor_core::{profile::UnknownBaseProfile, toml_text::TomlError};
use doctor_engine::settings::BadSettings;

use crate::backends;

pub(crate) use self::{
    file::{AgentEndpointConfig, Config},
    loading::{LoadedConfig, ReloadOutcome, profile_files},
    source::ConfigSource,
};

/// Returns the commented default configuration that `doctor config init` writes.
pub(crate) fn default_text() -> &'static str {
    static TEXT: LazyLock<String> = LazyLock::new(|| backends::default_text(include_str!("config/default.toml")));
    &TEXT
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigError {
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{}, {error}", path.display())]
    Invalid { path: PathBuf, error: TomlError },
    #[error("{}: inconsistent settings", path.display())]
    Settings { path: PathBuf, source: BadSettings },
    #[error("{}: inconsistent profiles", path.display())]
    Profiles { path: PathBuf, source: UnknownBaseProfile },
    #[error("{}: too many profiles", path.display())]
    ProfilesTooLong { path: PathBuf, source: TooManyProfiles },
    #[error("cannot create the state directory {}", path.display())]
    CreateStateDirectory { path: PathBuf, source: io::Error },
    #[error("no home directory for the state: set HOME or XDG_STATE_HOME, or pass --config FILE")]
    NoHome,
}
