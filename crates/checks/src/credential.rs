//! The credential of a node's agent: its node, its key, and the controller's address and public key. `doctor agent enroll`
//! writes it, `doctor-node agent` reads it.

use doctor_core::{
    ids::NodeName,
    toml_text::{self, TomlError},
};
use serde::{Deserialize, Deserializer, de};

use crate::{document::RunKey, key_fingerprint::KeyFingerprint};

/// The credential with which one node's agent reports.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Credential {
    pub node: NodeName,
    #[serde(deserialize_with = "key")]
    pub key: RunKey,
    /// The controller's address, as `https://HOST:PORT`.
    pub controller: Option<String>,
    /// The public keys that the controller's certificate may have: the current one and, during a rotation, the next. Empty
    /// where a certificate authority vouches for the controller, or where reports are not encrypted.
    #[serde(default)]
    pub fingerprints: Vec<KeyFingerprint>,
}

/// Parses the key. The error does not quote the text, which is secret.
fn key<'de, D: Deserializer<'de>>(deserializer: D) -> Result<RunKey, D::Error> {
    let text = String::deserialize(deserializer)?;
    RunKey::from_hex(&text).ok_or_else(|| de::Error::custom("`key` is not 64 hexadecimal digits"))
}

impl Credential {
    /// Parses the credential file.
    ///
    /// # Errors
    /// If the file is malformed. The error has the line number and never contains the key.
    pub fn read(text: &str) -> Result<Self, TomlError> {
        // The parser's error quotes its line, which may contain the key.
        toml_text::read(text, &[]).map_err(|error: TomlError| {
            let line = error.line().map_or_else(String::new, |line| format!("line {line}: "));
            let expected =
                "expected `node`, `key`, `controller` and `fingerprints`, as `doctor agent enroll` writes them";
            TomlError::at(text, None, format!("{line}{expected}"))
        })
    }

    /// Returns the content of the credential file.
    pub fn text(&self) -> String {
        let quoted = |text: &str| toml::Value::String(text.to_owned()).to_string();
        let controller =
            self.controller.as_ref().map_or_else(String::new, |url| format!("controller = {}\n", quoted(url)));
        let fingerprints = match self.fingerprints.is_empty() {
            true => String::new(),
            false => {
                let all: Vec<String> = self.fingerprints.iter().map(|one| quoted(&one.to_string())).collect();
                format!("fingerprints = [{}]\n", all.join(", "))
            }
        };
        format!(
            "# This file authenticates the node's agent. Keep it readable by root only.\n\
             node = {}\nkey = {}\n{controller}{fingerprints}",
            quoted(self.node.as_str()),
            quoted(&self.key.to_hex())
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_credential_survives_a_round_trip_and_errors_do_not_show_the_key() {
        let credential = Credential {
            node: NodeName::new("n1").unwrap(),
            key: RunKey::new([0xab; 32]),
            controller: Some("https://ctl:7443".to_owned()),
            fingerprints: vec![KeyFingerprint::of(b"now"), KeyFingerprint::of(b"next")],
        };
        assert_eq!(Credential::read(&credential.text()).unwrap(), credential);
        let unpinned = Credential { fingerprints: Vec::new(), ..credential.clone() };
        assert_eq!(
            Credential::read(&unpinned.text()).unwrap(),
            unpinned,
            "a credential of an older version has no pins"
        );
        let bad = credential.text().replace("abab\"", "abab00\"");
        let error = Credential::read(&bad).unwrap_err().to_string();
        assert!(error.contains("line 3") && !error.contains("abab"), "{error}");
    }
}
