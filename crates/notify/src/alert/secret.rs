//! References to addresses of receivers, which are read only when needed.
//!
//! The address of a chat's webhook is itself a secret. It is read when a message is sent, so that a replaced one takes effect
//! immediately, and appears in no log, error or printed configuration.

use std::path::Path;

use doctor_backend::secret::SecretSource;
use serde::{Deserialize, Serialize, Serializer};

use super::DeliveryError;

/// A URL, or the location of one.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(untagged, expecting = "a URL, or { file = \"…\" } or { env = \"…\" }")]
pub enum UrlSource {
    Plain(String),
    Secret(SecretSource),
}

/// Reads a secret for a delivery. It may be readable later.
pub(crate) fn read(secret: &SecretSource) -> Result<String, DeliveryError> {
    secret.read().map_err(|error| DeliveryError::later(error.to_string()))
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
            Self::Secret(secret) => read(secret),
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
}
