//! The result document: what a run leaves on the shared directory, signed with the run's one-time key. And the report
//! of a node's agent, which is made in the same way with the node's own key.
//!
//! On the wire it is one line with the MAC of everything after the first newline, then the JSON body. The body is
//! verified byte by byte as it was written: nothing is parsed that was not signed.

use hmac::{Hmac, KeyInit, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use doctor_core::{
    ids::{NodeName, RunId, TestId},
    node::Hardware,
    observation::{Event, Metric},
    time::Timestamp,
};

use crate::probe::{Probe, ProbeOutput};

/// Larger ones are refused before they are read. Evidence is capped well below this by the runner.
pub const MAX_DOCUMENT_BYTES: u64 = 16 << 20;

/// The raw results of a run on one node. No verdict: that is the controller's to find.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Document {
    pub run: RunId,
    pub node: NodeName,
    pub hardware: Hardware,
    /// By the node's clock.
    pub started: Timestamp,
    pub ended: Timestamp,
    pub tests: Vec<TestEvidence>,
}

/// What the probes of one test brought, in their order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TestEvidence {
    pub test: TestId,
    pub started: Timestamp,
    pub ended: Timestamp,
    pub probes: Vec<(Probe, ProbeOutput)>,
}

/// What a built-in test prints: numbers and events, already named. The shape is the same for all of them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measurements {
    #[serde(default)]
    pub metrics: Vec<Metric>,
    #[serde(default)]
    pub events: Vec<Event>,
}

/// A run's one-time key, known to the controller and handed to the job.
#[derive(Clone, PartialEq, Eq)]
pub struct RunKey([u8; 32]);

impl RunKey {
    pub const fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    pub fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    pub fn from_hex(text: &str) -> Option<Self> {
        let mut bytes = [0; 32];
        if text.len() != 64 || !text.is_ascii() {
            return None;
        }
        for (i, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[2 * i..2 * i + 2], 16).ok()?;
        }
        Some(Self(bytes))
    }

    fn mac(&self, body: &[u8]) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes a key of any length");
        mac.update(body);
        mac
    }
}

impl std::fmt::Debug for RunKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RunKey(…)")
    }
}

/// Why bytes are not the result of a run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadDocument {
    #[error("it is {bytes} bytes long, at most {MAX_DOCUMENT_BYTES} are read")]
    TooLong { bytes: u64 },
    #[error("it does not begin with `doctor-result-1 ` (of an agent: `doctor-report-1 `) and a signature")]
    NoSignature,
    #[error("its signature does not fit its run's key")]
    WrongSignature,
    #[error("its body is not a result: {0}")]
    Malformed(String),
}

const HEADER: &str = "doctor-result-1 ";
/// Another first word than a result's: the one never passes for the other, even under one key.
const REPORT_HEADER: &str = "doctor-report-1 ";

impl Document {
    /// The signed bytes to write.
    ///
    /// # Errors
    /// If a metric is not a number JSON can hold.
    pub fn sign(&self, key: &RunKey) -> Result<Vec<u8>, serde_json::Error> {
        Ok(seal(HEADER, &serde_json::to_vec(self)?, key))
    }

    /// Reads and verifies.
    ///
    /// # Errors
    /// For anything that was not signed, whole, with this key.
    pub fn open(bytes: &[u8], key: &RunKey) -> Result<Self, BadDocument> {
        unseal(HEADER, bytes, key)
    }
}

/// What a node's agent says without being asked: the newest evidence of each check whose answer has changed.
/// A check that is not in it has nothing new to say.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AgentReport {
    pub node: NodeName,
    pub hardware: Hardware,
    /// Grows with every report of this node, so that one that was kept and sent again is recognised.
    pub number: u64,
    /// By the node's clock.
    pub at: Timestamp,
    pub checks: Vec<TestEvidence>,
}

impl AgentReport {
    /// The signed bytes to send, with the key that this node was enrolled with.
    ///
    /// # Errors
    /// If a metric is not a number JSON can hold.
    pub fn sign(&self, key: &RunKey) -> Result<Vec<u8>, serde_json::Error> {
        Ok(seal(REPORT_HEADER, &serde_json::to_vec(self)?, key))
    }

    /// Reads and verifies. The caller has still to compare the node with the one whose key this is.
    ///
    /// # Errors
    /// For anything that was not signed, whole, with this key.
    pub fn open(bytes: &[u8], key: &RunKey) -> Result<Self, BadDocument> {
        unseal(REPORT_HEADER, bytes, key)
    }
}

fn seal(header: &str, body: &[u8], key: &RunKey) -> Vec<u8> {
    let mac = key.mac(body).finalize().into_bytes();
    let mut bytes = Vec::with_capacity(header.len() + 65 + body.len());
    bytes.extend(header.as_bytes());
    for byte in mac {
        bytes.extend([byte >> 4, byte & 15].map(|digit| b"0123456789abcdef"[usize::from(digit)]));
    }
    bytes.push(b'\n');
    bytes.extend(body);
    bytes
}

fn unseal<T: serde::de::DeserializeOwned>(header: &str, bytes: &[u8], key: &RunKey) -> Result<T, BadDocument> {
    if bytes.len() as u64 > MAX_DOCUMENT_BYTES {
        return Err(BadDocument::TooLong { bytes: bytes.len() as u64 });
    }
    let rest = bytes.strip_prefix(header.as_bytes()).ok_or(BadDocument::NoSignature)?;
    let (signature, body) = rest.split_at_checked(64).ok_or(BadDocument::NoSignature)?;
    let body = body.strip_prefix(b"\n").ok_or(BadDocument::NoSignature)?;
    let signature = std::str::from_utf8(signature).ok().and_then(RunKey::from_hex).ok_or(BadDocument::NoSignature)?;
    // Compared in constant time by the library.
    key.mac(body).verify_slice(&signature.0).map_err(|_| BadDocument::WrongSignature)?;
    serde_json::from_slice(body).map_err(|error| BadDocument::Malformed(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document() -> Document {
        Document {
            run: RunId::from_number(7),
            node: NodeName::new("n1").unwrap(),
            hardware: Hardware::default(),
            started: Timestamp::from_secs(1),
            ended: Timestamp::from_secs(2),
            tests: vec![],
        }
    }

    #[test]
    fn a_signed_document_opens_with_its_key_only() {
        let key = RunKey::new([1; 32]);
        let bytes = document().sign(&key).unwrap();
        assert_eq!(Document::open(&bytes, &key).unwrap(), document());
        assert_eq!(Document::open(&bytes, &RunKey::new([2; 32])), Err(BadDocument::WrongSignature));
        assert_eq!(RunKey::from_hex(&key.to_hex()), Some(key));
    }

    #[test]
    fn a_changed_or_cut_document_does_not_open() {
        let key = RunKey::new([1; 32]);
        let bytes = document().sign(&key).unwrap();
        for cut in 0..bytes.len() {
            assert!(Document::open(&bytes[..cut], &key).is_err(), "cut at {cut}");
        }
        for place in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[place] ^= 1;
            assert!(Document::open(&changed, &key).is_err(), "changed at {place}");
        }
    }

    #[test]
    fn a_report_is_no_result_even_under_one_key() {
        let key = RunKey::new([1; 32]);
        let report = AgentReport {
            node: NodeName::new("n1").unwrap(),
            hardware: Hardware::default(),
            number: 3,
            at: Timestamp::from_secs(1),
            checks: vec![],
        };
        let bytes = report.sign(&key).unwrap();
        assert_eq!(AgentReport::open(&bytes, &key).unwrap(), report);
        assert_eq!(Document::open(&bytes, &key), Err(BadDocument::NoSignature));
        assert_eq!(AgentReport::open(&bytes, &RunKey::new([2; 32])), Err(BadDocument::WrongSignature));
    }
}
