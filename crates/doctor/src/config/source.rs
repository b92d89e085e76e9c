//! Selects the configuration: the named file, else the first default path that exists, else the built-in configuration.
//!
//! The site's file comes before one in the current directory: an operator who runs a command in a directory of another user must not
//! get that user's configuration. Wherever the file is, it is refused when it is read if another user could change it
//! ([`doctor_backend::trusted_file`]). A file in the current directory that is refused is an error and is not skipped, since the
//! operator may rely on it.

use std::path::{Path, PathBuf};

use super::ConfigError;

/// The source of the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ConfigSource {
    File(PathBuf),
    /// No file was found: this machine is a cluster of one node, with all state below this directory.
    BuiltIn {
        state: PathBuf,
    },
}

/// Paths searched if no file is named.
const SEARCH_PATHS: [&str; 2] = ["/etc/cluster-doctor/doctor.toml", "doctor.toml"];

impl ConfigSource {
    /// Finds the configuration. `named` is `--config` or `$DOCTOR_CONFIG`. If that file does not exist, reading it
    /// fails later; no other file is used instead.
    pub(crate) fn find(named: Option<&Path>, env: impl Fn(&str) -> Option<String>) -> Result<Self, ConfigError> {
        if let Some(path) = named {
            return Ok(Self::File(path.to_owned()));
        }
        if let Some(path) = first_existing(SEARCH_PATHS.map(Path::new)) {
            return Ok(Self::File(path.to_owned()));
        }
        let set = |name: &str| env(name).filter(|value| value.starts_with('/')).map(PathBuf::from);
        let state = set("XDG_STATE_HOME").or_else(|| set("HOME").map(|home| home.join(".local/state")));
        Ok(Self::BuiltIn { state: state.ok_or(ConfigError::NoHome)?.join("cluster-doctor") })
    }
}

fn first_existing(paths: [&Path; 2]) -> Option<&Path> {
    paths.into_iter().find(|path| path.exists())
}

impl std::fmt::Display for ConfigSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::BuiltIn { .. } => f.write_str("the built-in configuration"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_named_file_wins_and_the_state_directory_is_the_default() {
        let env = |name: &str| (name == "HOME").then(|| "/home/ann".to_owned());
        let named = ConfigSource::find(Some(Path::new("/x/y.toml")), env).unwrap();
        assert_eq!(named, ConfigSource::File("/x/y.toml".into()));
        let none = ConfigSource::find(None, env).unwrap();
        assert_eq!(none, ConfigSource::BuiltIn { state: "/home/ann/.local/state/cluster-doctor".into() });
        let relative = |name: &str| (name == "XDG_STATE_HOME").then(|| "state".to_owned());
        assert!(matches!(ConfigSource::find(None, relative), Err(ConfigError::NoHome)));
    }

    #[test]
    fn the_sites_file_comes_before_one_in_the_current_directory() {
        let directory = tempfile::tempdir().unwrap();
        let [site, here] = ["site.toml", "here.toml"].map(|name| directory.path().join(name));
        assert_eq!(first_existing([&site, &here]), None);
        std::fs::write(&here, "").unwrap();
        assert_eq!(first_existing([&site, &here]), Some(&*here));
        std::fs::write(&site, "").unwrap();
        assert_eq!(first_existing([&site, &here]), Some(&*site));
        assert!(SEARCH_PATHS[0].starts_with("/etc/") && !SEARCH_PATHS[1].contains('/'));
    }
}
