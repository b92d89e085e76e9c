//! The fingerprint of a server's public key: what an agent pins instead of trusting a certificate authority. It is written as
//! kubeadm writes those of authorities, `sha256:` and the SHA-256 of the key's SubjectPublicKeyInfo in hexadecimal.
//!
//! The key is pinned and not the certificate, so that a certificate that is renewed for the same key stays pinned.

use std::{fmt, str::FromStr};

use doctor_core::hex;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use sha2::{Digest, Sha256};

const PREFIX: &str = "sha256:";

/// The SHA-256 of a public key in its X.509 form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct KeyFingerprint([u8; 32]);

/// A text that is no fingerprint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a fingerprint, expected sha256: and 64 hexadecimal digits, as `doctor agent certificate` prints it"
)]
pub struct BadFingerprint(String);

impl KeyFingerprint {
    /// Returns the fingerprint of a SubjectPublicKeyInfo in DER.
    pub fn of(subject_public_key_info: &[u8]) -> Self {
        Self(Sha256::digest(subject_public_key_info).into())
    }
}

impl fmt::Display for KeyFingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}", hex::encode(&self.0))
    }
}

impl FromStr for KeyFingerprint {
    type Err = BadFingerprint;

    fn from_str(text: &str) -> Result<Self, BadFingerprint> {
        let digits = text.strip_prefix(PREFIX);
        let bytes = digits.and_then(hex::decode).and_then(|bytes| bytes.try_into().ok());
        bytes.map(Self).ok_or_else(|| BadFingerprint(text.chars().take(100).collect()))
    }
}

impl Serialize for KeyFingerprint {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for KeyFingerprint {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fingerprint_is_written_as_kubeadm_writes_it_and_nothing_else_is_accepted() {
        let fingerprint = KeyFingerprint::of(b"");
        let text = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!((fingerprint.to_string().as_str(), text.parse()), (text, Ok(fingerprint)));
        for bad in [
            "",
            "sha256:",
            &text[7..],
            &text[..70],
            "sha256:E3:B0",
            &text.replace("sha256", "sha1"),
            &format!("{text}00"),
        ] {
            let error = bad.parse::<KeyFingerprint>().unwrap_err().to_string();
            assert!(error.contains("64 hexadecimal digits"), "{error}");
        }
    }
}
