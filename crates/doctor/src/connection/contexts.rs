//! The contexts file: the controllers that a person works with, by name, and the one in use.
//!
//! It is written by hand, except for the line `current`, which `doctor context use` sets.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Read as _},
    path::{Path, PathBuf},
};

use doctor_backend::trusted_file;
use doctor_core::toml_text::{self, TomlError};
use serde::Deserialize;

use super::server::ServerSettings;

/// The maximum size of the file.
const MAX_BYTES: u64 = 1 << 20;

/// Why the contexts file cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ContextsError {
    #[error("{operation} {}", path.display())]
    File { operation: &'static str, path: PathBuf, source: io::Error },
    #[error("{}, {error}", path.display())]
    Invalid { path: PathBuf, error: TomlError },
    #[error("no context `{name}` in {}", path.display())]
    Unknown { name: String, path: PathBuf, known: String },
    /// Options that exclude each other.
    #[error("{0}")]
    Contradiction(&'static str),
    #[error("no home directory for the contexts file: set HOME or XDG_CONFIG_HOME")]
    NoHome,
}

/// The content of the file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ContextsFile {
    /// The context that commands use without an option.
    pub current: Option<String>,
    #[serde(default)]
    pub contexts: BTreeMap<String, ContextEntry>,
}

/// A controller.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ContextEntry {
    pub server: String,
    /// Relative to the directory of the contexts file, as `ca_file`.
    token_file: Option<PathBuf>,
    ca_file: Option<PathBuf>,
    /// Permits the token to cross the network unencrypted.
    #[serde(default)]
    plain: bool,
}

/// Returns the path of the contexts file.
pub(crate) fn contexts_path(env: impl Fn(&str) -> Option<String>) -> Result<PathBuf, ContextsError> {
    let set = |name: &str| env(name).filter(|value| value.starts_with('/')).map(PathBuf::from);
    let config = set("XDG_CONFIG_HOME").or_else(|| set("HOME").map(|home| home.join(".config")));
    Ok(config.ok_or(ContextsError::NoHome)?.join("cluster-doctor/contexts.toml"))
}

impl ContextsFile {
    /// Reads the file. `None`: there is none.
    pub(crate) fn load(path: &Path) -> Result<Option<Self>, ContextsError> {
        let Some(text) = read(path)? else { return Ok(None) };
        Self::parse(path, &text).map(Some)
    }

    fn parse(path: &Path, text: &str) -> Result<Self, ContextsError> {
        let invalid = |error| ContextsError::Invalid { path: path.to_owned(), error };
        toml_text::read(text, &[]).map_err(invalid)
    }

    fn entry(&self, path: &Path, name: &str) -> Result<&ContextEntry, ContextsError> {
        self.contexts.get(name).ok_or_else(|| {
            let known: Vec<&str> = self.contexts.keys().map(String::as_str).collect();
            let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            ContextsError::Unknown { name: name.to_owned(), path: path.to_owned(), known }
        })
    }

    /// Returns the settings of a context.
    pub(crate) fn settings(&self, path: &Path, name: &str) -> Result<ServerSettings, ContextsError> {
        let entry = self.entry(path, name)?;
        let directory = path.parent().unwrap_or(Path::new(""));
        let resolved = |file: &Option<PathBuf>| file.as_ref().map(|file| directory.join(file));
        Ok(ServerSettings {
            url: entry.server.clone(),
            token_file: resolved(&entry.token_file),
            ca_file: resolved(&entry.ca_file),
            plain: entry.plain,
            context: Some(name.to_owned()),
            is_explicit: false,
        })
    }

    /// Sets the context in use, or none, and leaves the rest of the file as it is.
    pub(crate) fn set_current(path: &Path, name: Option<&str>) -> Result<(), ContextsError> {
        let text = read(path)?.unwrap_or_default();
        let file = Self::parse(path, &text)?;
        if let Some(name) = name {
            file.entry(path, name)?;
        }
        let changed = with_current(&text, name);
        let failed = |source| ContextsError::File { operation: "writing", path: path.to_owned(), source };
        let temporary = path.with_extension("toml.tmp");
        fs::write(&temporary, changed).and_then(|()| fs::rename(&temporary, path)).map_err(failed)
    }
}

fn read(path: &Path) -> Result<Option<String>, ContextsError> {
    let failed = |source| ContextsError::File { operation: "reading", path: path.to_owned(), source };
    let file = match trusted_file::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        // A home directory that others can change matters only if there is a file to read: root may act with the home
        // directory of a user.
        Err(error) if trusted_file::refusal(&error).is_some() && is_missing(path) => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    let mut text = String::new();
    file.take(MAX_BYTES).read_to_string(&mut text).map_err(failed)?;
    Ok(Some(text))
}

fn is_missing(path: &Path) -> bool {
    fs::symlink_metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// Returns the text with this value of `current`, which stands before the first table.
fn with_current(text: &str, name: Option<&str>) -> String {
    let line = name.map(|name| format!("current = {}\n", toml::Value::String(name.to_owned())));
    let tables = text.split_inclusive('\n').take_while(|line| !line.trim_start().starts_with('[')).count();
    let is_current =
        |line: &str| line.trim_start().strip_prefix("current").is_some_and(|rest| rest.trim_start().starts_with('='));
    let kept = text.split_inclusive('\n').enumerate().filter(|(index, line)| *index >= tables || !is_current(line));
    let rest: String = kept.map(|(_, line)| line).collect();
    line.unwrap_or_default() + &rest
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# mine\ncurrent = \"prod\"\n\n[contexts.prod]\nserver = \"https://a:7480\"\ntoken_file = \"prod.token\"\n\
                        [contexts.\"b.1\"]\nserver = \"http://127.0.0.1:1\"\nca_file = \"/etc/ca.pem\"\n";

    #[test]
    fn files_are_relative_to_the_contexts_file() {
        let path = Path::new("/home/ann/.config/cluster-doctor/contexts.toml");
        let file = ContextsFile::parse(path, TEXT).unwrap();
        let prod = file.settings(path, "prod").unwrap();
        assert_eq!(prod.token_file, Some("/home/ann/.config/cluster-doctor/prod.token".into()));
        assert_eq!((prod.url.as_str(), prod.context.as_deref()), ("https://a:7480", Some("prod")));
        assert_eq!(file.settings(path, "b.1").unwrap().ca_file, Some("/etc/ca.pem".into()));
        let error = file.settings(path, "c").unwrap_err();
        assert!(matches!(&error, ContextsError::Unknown { known, .. } if known == "b.1, prod"), "{error}");
        for (text, part) in [
            ("currant = \"x\"\n", "currant"),
            ("[contexts.a]\nserver = \"x\"\ntoken = \"y\"\n", "token"),
            ("[contexts.a]\n", "missing field `server`"),
        ] {
            let error = ContextsFile::parse(path, text).unwrap_err().to_string();
            assert!(error.contains(part) && error.contains("contexts.toml"), "{text}: {error}");
        }
    }

    #[test]
    fn the_current_context_is_set_and_the_rest_of_the_file_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("contexts.toml");
        fs::write(&path, TEXT).unwrap();
        ContextsFile::set_current(&path, Some("b.1")).unwrap();
        let rest = TEXT.replace("current = \"prod\"\n", "");
        assert_eq!(fs::read_to_string(&path).unwrap(), format!("current = \"b.1\"\n{rest}"));
        assert_eq!(ContextsFile::load(&path).unwrap().unwrap().current.as_deref(), Some("b.1"));
        assert!(matches!(ContextsFile::set_current(&path, Some("c")), Err(ContextsError::Unknown { .. })));
        ContextsFile::set_current(&path, None).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), rest);
        assert_eq!(ContextsFile::load(&folder.path().join("none.toml")).unwrap(), None);
    }

    #[test]
    fn the_file_is_below_the_home_directory_or_the_configured_one() {
        let home = contexts_path(|name| (name == "HOME").then(|| "/home/ann".to_owned())).unwrap();
        assert_eq!(home, Path::new("/home/ann/.config/cluster-doctor/contexts.toml"));
        let set = contexts_path(|name| (name == "XDG_CONFIG_HOME").then(|| "/c".to_owned())).unwrap();
        assert_eq!(set, Path::new("/c/cluster-doctor/contexts.toml"));
        assert!(matches!(contexts_path(|_| None), Err(ContextsError::NoHome)));
    }
}
