//! References to addresses and secrets of receivers, which are read only when needed.
//!
//! The address of a chat's webhook is itself a secret. Secrets are read when a message is sent, so that a replaced one
//! takes effect immediately, and appear in no log, error or printed configuration.

use std::{
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize, Serializer};

use super::DeliveryError;

/// Location of a secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SecretSource {
    /// The first line of this file.
    File(PathBuf),
    /// The value of this environment variable.
    Env(String),
}

/// A URL, or the location of one.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(untagged, expecting = "a URL, or { file = \"…\" } or { env = \"…\" }")]
pub enum UrlSource {
    Plain(String),
    Secret(SecretSource),
}

/// Maximum length of a secret, which is one line.
const MAX_SECRET_BYTES: u64 = 8192;

impl SecretSource {
    pub(crate) fn resolve(&mut self, base: &Path) {
        if let Self::File(path) = self {
            *path = base.join(&*path);
        }
    }

    pub(crate) fn read(&self) -> Result<String, DeliveryError> {
        let text = match self {
            Self::File(path) => {
                let failed = |error| DeliveryError::later(format!("cannot read {}: {error}", path.display()));
                let mut text = String::new();
                File::open(path)
                    .and_then(|file| file.take(MAX_SECRET_BYTES).read_to_string(&mut text))
                    .map_err(failed)?;
                text
            }
            Self::Env(name) => std::env::var(name)
                .map_err(|_| DeliveryError::later(format!("${name} is not set, or is not valid UTF-8")))?,
        };
        let line = text.lines().next().unwrap_or_default().trim();
        if line.is_empty() {
            return Err(DeliveryError::later(format!("{self} is empty")));
        }
        Ok(line.to_owned())
    }
}

impl std::fmt::Display for SecretSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Env(name) => write!(f, "${name}"),
        }
    }
}

impl UrlSource {
    pub(crate) fn resolve(&mut self, base: &Path) {
        if let Self::Secret(secret) = self {
            secret.resolve(base);
        }
    }

    pub(crate) fn read(&self) -> Result<String, DeliveryError> {
        match self {
            Self::Plain(url) => Ok(url.clone()),
            Self::Secret(secret) => secret.read(),
        }
    }

    /// Returns the printable form: scheme and host only.
    fn redacted(&self) -> String {
        match self {
            Self::Plain(url) => host(url).to_owned(),
            Self::Secret(secret) => secret.to_string(),
        }
    }
}

/// Returns the scheme and host of a URL. The rest may be secret.
pub(super) fn host(url: &str) -> &str {
    let begin = url.find("://").map_or(0, |index| index + 3);
    let end = url[begin..].find(['/', '?', '#']).map_or(url.len(), |index| begin + index);
    // Credentials precede an `@`.
    match url[begin..end].rfind('@') {
        Some(at) => &url[begin + at + 1..end],
        None => &url[..end],
    }
}

impl std::fmt::Debug for UrlSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.redacted())
    }
}

impl Serialize for UrlSource {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.redacted())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_scheme_and_host_of_a_url_are_shown() {
        for (url, expected) in [
            ("https://hooks.slack.com/services/T0/B0/secret", "https://hooks.slack.com"),
            ("http://10.0.0.1:9093", "http://10.0.0.1:9093"),
            ("https://user:secret@host/x", "host"),
            ("https://host?token=secret", "https://host"),
            ("secret/path", "secret"),
        ] {
            let address = UrlSource::Plain(url.to_owned());
            assert_eq!(format!("{address:?}"), expected);
            assert_eq!(serde_json::to_value(&address).unwrap(), expected);
        }
    }

    #[test]
    fn a_secret_is_the_first_line_of_its_file_and_an_empty_one_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        std::fs::write(&path, "abc \nnot this\n").unwrap();
        assert_eq!(SecretSource::File(path.clone()).read().unwrap(), "abc");
        std::fs::write(&path, "\n").unwrap();
        assert!(SecretSource::File(path.clone()).read().unwrap_err().text.ends_with("is empty"));
        std::fs::remove_file(&path).unwrap();
        assert!(SecretSource::File(path).read().unwrap_err().text.contains("cannot read"));
    }
}
