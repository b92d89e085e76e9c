//! The signed documents of a node: the result of a run, signed with the run's one-time key, and the report of the
//! node's agent, signed with the node's key.
//!
//! On the wire, a document is one line with the MAC of everything after the first newline, then the JSON body. The MAC
//! is verified over the received bytes before anything is parsed.

use std::{collections::BTreeMap, fmt};

use hmac::{Hmac, KeyInit, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use doctor_core::{
    bounded_text::bound,
    hex,
    ids::{NodeName, RunId, TestId},
    node::Hardware,
    observation::{Event, Metric, ProbeFailure},
    sku_detection::MachineFacts,
    time::{Span, Timestamp},
};

use crate::probe::{Probe, ProbeOutput};

pub use crate::report_schema::{InvalidSchema, Schema, Versions};

/// The size limit of a document. Larger ones are rejected unread; the runner caps evidence well below this limit.
pub const MAX_DOCUMENT_BYTES: u64 = 16 << 20;

/// The raw results of a run on one node, without a verdict: the controller classifies them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Document {
    pub run: RunId,
    pub node: NodeName,
    pub hardware: Hardware,
    /// According to the node's clock.
    pub started: Timestamp,
    pub ended: Timestamp,
    pub tests: Vec<TestEvidence>,
    /// The machine's uptime when the first test began, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uptime: Option<Span>,
    /// By which the controller detects the machine type.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<MachineFacts>,
}

/// The outputs of one test's probes, in the order of the probes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TestEvidence {
    pub test: TestId,
    pub started: Timestamp,
    pub ended: Timestamp,
    pub probes: Vec<(Probe, ProbeOutput)>,
}

/// The output format of all built-in tests: named metrics and events.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measurements {
    #[serde(default)]
    pub metrics: Vec<Metric>,
    #[serde(default)]
    pub events: Vec<Event>,
    /// Parts that the test could not measure, in addition to those it could.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failures: Vec<ProbeFailure>,
}

/// A run's one-time key, known to the controller and passed to the job.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct RunKey([u8; 32]);

/// Domain separation: keys derived here from tokens differ from anything else derived from the same tokens.
const TOKEN_KEY_DOMAIN: [u8; 32] = *b"doctor-report: key from a token ";

impl RunKey {
    pub const fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Derives the key of an agent that authenticates with a token of its cluster. Reports thus have one format for
    /// both kinds of credentials, and recognising a token does not require storing it.
    pub fn from_token(token: &str) -> Self {
        Self(Self(TOKEN_KEY_DOMAIN).mac(token.as_bytes()).finalize().into_bytes().into())
    }

    pub fn to_hex(&self) -> String {
        hex::encode(&self.0)
    }

    /// Returns the shared secret of the nodes of a multi-node run. The key cannot be derived from it.
    pub fn rendezvous_secret(&self) -> String {
        Self(self.mac(b"rendezvous").finalize().into_bytes().into()).to_hex()
    }

    pub fn from_hex(text: &str) -> Option<Self> {
        hex::decode(text)?.try_into().ok().map(Self)
    }

    /// Returns the MAC of these bytes in hexadecimal.
    pub(crate) fn signature(&self, body: &[u8]) -> String {
        hex::encode(&self.mac(body).finalize().into_bytes())
    }

    /// Returns whether this is the MAC of these bytes. The comparison takes constant time.
    pub(crate) fn verify(&self, body: &[u8], signature: &str) -> bool {
        Self::from_hex(signature).is_some_and(|claimed| self.mac(body).verify_slice(&claimed.0).is_ok())
    }

    fn mac(&self, body: &[u8]) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC accepts a key of any length");
        mac.update(body);
        mac
    }
}

impl fmt::Debug for RunKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RunKey(…)")
    }
}

/// Why bytes are not a valid document.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DocumentError {
    #[error("it is {bytes} bytes; the limit is {MAX_DOCUMENT_BYTES} bytes")]
    TooLong { bytes: u64 },
    #[error("it does not begin with `doctor-result-1 ` (agent reports: `doctor-report-1 `) and a signature")]
    MissingSignature,
    #[error("its signature does not match its run's key")]
    WrongSignature,
    #[error("its body is not a valid result: {0}")]
    Malformed(String),
    #[error("it has schema {found}, this controller accepts {older} and {known}: update the controller first")]
    NewerSchema { found: Schema, older: Schema, known: Schema },
    #[error("it has schema {found}, this controller accepts {older} and {known}: update the agent")]
    OlderSchema { found: Schema, older: Schema, known: Schema },
}

/// The longest version of a node's program that is kept.
const MAX_VERSION_BYTES: usize = 128;
/// The most checks in any list of a report: far more than an agent has. A longer list is rejected.
const MAX_CHECKS: usize = 4096;

const HEADER: &str = "doctor-result-1 ";
/// Differs from a result's header, so that neither can be used as the other, even under one key.
const REPORT_HEADER: &str = "doctor-report-1 ";

impl Document {
    /// Returns the signed document.
    ///
    /// # Errors
    /// If a metric is not a number that JSON can represent.
    pub fn sign(&self, key: &RunKey) -> Result<Vec<u8>, serde_json::Error> {
        Ok(seal(HEADER, &serde_json::to_vec(self)?, key))
    }

    /// Verifies and parses a document.
    ///
    /// # Errors
    /// If the bytes are not a complete document signed with this key.
    pub fn open(bytes: &[u8], key: &RunKey) -> Result<Self, DocumentError> {
        parse(verify_body(HEADER, bytes, key)?).map(Self::bounded)
    }

    /// Parses a stored document, which was verified on receipt. Its key no longer exists: it is deleted with the run.
    ///
    /// # Errors
    /// If the document is incomplete or malformed.
    pub fn parse_stored(bytes: &[u8]) -> Result<Self, DocumentError> {
        parse(stored_body(HEADER, bytes)?).map(Self::bounded)
    }

    fn bounded(mut self) -> Self {
        self.machine = self.machine.map(MachineFacts::bounded);
        self.hardware = self.hardware.bounded();
        self
    }
}

/// An agent's report: the newest evidence of each check whose output has changed. A check that is not included is
/// unchanged; a report without checks is a heartbeat.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AgentReport {
    pub node: NodeName,
    pub hardware: Hardware,
    /// Increases with every report of this node, so that a replayed report is recognised.
    pub sequence: u64,
    /// According to the node's clock.
    pub at: Timestamp,
    /// The machine's uptime at that time, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uptime: Option<Span>,
    pub checks: Vec<TestEvidence>,
    #[serde(default)]
    pub versions: Versions,
    /// Earlier reports that were dropped and will never arrive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dropped: Option<DroppedReports>,
    /// By which the controller detects the machine type. Absent in a heartbeat.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<MachineFacts>,
    /// How long the report waited on the node before it was sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waited: Option<Span>,
    /// Checks that ran since the last accepted message and gave the results that the controller has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub confirmed: Option<ConfirmedResults>,
    /// Digest of the site's profiles that the agent has. Absent: it does not want any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profiles: Option<String>,
}

/// Results that an agent has confirmed by running the checks again. Unchanged results are not sent again, so this is how
/// the controller knows that they are not old.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConfirmedResults {
    /// The last report with results. A controller that has not stored it has other results than those confirmed here.
    pub through: u64,
    pub rounds: Vec<CheckRound>,
}

/// Checks that an agent ran together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckRound {
    /// How long before the message was sent.
    pub age: Span,
    pub checks: Vec<TestId>,
}

impl ConfirmedResults {
    fn is_acceptable(&self) -> bool {
        self.rounds.iter().map(|round| round.checks.len().max(1)).sum::<usize>() <= MAX_CHECKS
    }
}

/// What an agent dropped while the controller accepted no reports.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DroppedReports {
    pub reports: u64,
    /// The number of dropped reports that included each check.
    pub checks: BTreeMap<TestId, u64>,
    /// The times of the first and the last dropped report, according to the node's clock.
    pub from: Timestamp,
    pub to: Timestamp,
}

impl DroppedReports {
    /// Adds one dropped report, or a sum of several.
    pub fn add(&mut self, other: &Self) {
        self.reports = self.reports.saturating_add(other.reports);
        for (check, times) in &other.checks {
            let known = self.checks.entry(check.clone()).or_default();
            *known = known.saturating_add(*times);
        }
        self.from = self.from.min(other.from);
        self.to = self.to.max(other.to);
    }
}

impl AgentReport {
    /// Returns the report signed with the key with which this node was enrolled.
    ///
    /// # Errors
    /// If a metric is not a number that JSON can represent.
    pub fn sign(&self, key: &RunKey) -> Result<Vec<u8>, serde_json::Error> {
        Ok(seal(REPORT_HEADER, &serde_json::to_vec(self)?, key))
    }

    /// Verifies and parses a report. The caller must compare its node with the owner of the key.
    ///
    /// # Errors
    /// If the bytes are not a complete report signed with this key, or have an unsupported schema version.
    pub fn open(bytes: &[u8], key: &RunKey) -> Result<Self, DocumentError> {
        Self::parse_body(verify_body(REPORT_HEADER, bytes, key)?)
    }

    /// Parses a stored report, which was verified on receipt.
    ///
    /// # Errors
    /// If the report is incomplete or malformed, or has an unsupported schema version.
    pub fn parse_stored(bytes: &[u8]) -> Result<Self, DocumentError> {
        Self::parse_body(stored_body(REPORT_HEADER, bytes)?)
    }

    fn parse_body(body: &[u8]) -> Result<Self, DocumentError> {
        #[derive(Default, Deserialize)]
        struct Envelope {
            #[serde(default)]
            versions: EnvelopeVersions,
        }
        #[derive(Default, Deserialize)]
        struct EnvelopeVersions {
            #[serde(default)]
            schema: Schema,
        }
        let parsed: Result<Self, DocumentError> = parse(body);
        // The fields of a newer schema would only be reported as unknown.
        let found = match &parsed {
            Ok(report) => report.versions.schema,
            Err(_) => parse::<Envelope>(body)?.versions.schema,
        };
        let (older, known) = (Schema::OLDEST, Schema::CURRENT);
        if found > known {
            return Err(DocumentError::NewerSchema { found, older, known });
        }
        if found < older {
            return Err(DocumentError::OlderSchema { found, older, known });
        }
        let mut report = parsed?;
        if !report.confirmed.as_ref().is_none_or(ConfirmedResults::is_acceptable) {
            return Err(DocumentError::Malformed("it confirms more results than there are checks".to_owned()));
        }
        let dropped = report.dropped.as_ref().map_or(0, |dropped| dropped.checks.len());
        if report.checks.len().max(dropped) > MAX_CHECKS {
            return Err(DocumentError::Malformed("it has results of more checks than there are".to_owned()));
        }
        report.machine = report.machine.map(MachineFacts::bounded);
        report.hardware = report.hardware.bounded();
        bound(&mut report.versions.program, MAX_VERSION_BYTES);
        Ok(report)
    }

    /// Returns a report without content.
    pub fn heartbeat(node: NodeName, sequence: u64, at: Timestamp, versions: Versions) -> Self {
        Self {
            node,
            hardware: Hardware::default(),
            sequence,
            at,
            uptime: None,
            checks: Vec::new(),
            versions,
            dropped: None,
            machine: None,
            waited: None,
            confirmed: None,
            profiles: None,
        }
    }

    /// Returns whether the report is only a heartbeat: it has nothing that the store must have before the answer.
    pub const fn is_heartbeat(&self) -> bool {
        self.checks.is_empty() && self.dropped.is_none()
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

/// Returns the body if it was signed with this key.
fn verify_body<'a>(header: &str, bytes: &'a [u8], key: &RunKey) -> Result<&'a [u8], DocumentError> {
    if bytes.len() as u64 > MAX_DOCUMENT_BYTES {
        return Err(DocumentError::TooLong { bytes: bytes.len() as u64 });
    }
    let rest = bytes.strip_prefix(header.as_bytes()).ok_or(DocumentError::MissingSignature)?;
    let (signature, body) = rest.split_at_checked(64).ok_or(DocumentError::MissingSignature)?;
    let body = body.strip_prefix(b"\n").ok_or(DocumentError::MissingSignature)?;
    let signature =
        std::str::from_utf8(signature).ok().and_then(RunKey::from_hex).ok_or(DocumentError::MissingSignature)?;
    // The library compares in constant time.
    key.mac(body).verify_slice(&signature.0).map_err(|_| DocumentError::WrongSignature)?;
    Ok(body)
}

/// Returns the body of a document that was verified on receipt.
fn stored_body<'a>(header: &str, bytes: &'a [u8]) -> Result<&'a [u8], DocumentError> {
    let rest = bytes.strip_prefix(header.as_bytes()).ok_or(DocumentError::MissingSignature)?;
    rest.get(65..).ok_or(DocumentError::MissingSignature)
}

fn parse<T: serde::de::DeserializeOwned>(body: &[u8]) -> Result<T, DocumentError> {
    serde_json::from_slice(body).map_err(|error| DocumentError::Malformed(error.to_string()))
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
            uptime: None,
            machine: None,
        }
    }

    #[test]
    fn a_signed_document_opens_only_with_its_key() {
        let key = RunKey::new([1; 32]);
        let bytes = document().sign(&key).unwrap();
        assert_eq!(Document::open(&bytes, &key).unwrap(), document());
        assert_eq!(Document::open(&bytes, &RunKey::new([2; 32])), Err(DocumentError::WrongSignature));
        assert_eq!(Document::parse_stored(&bytes).unwrap(), document());
        assert_eq!(Document::parse_stored(&bytes[..20]), Err(DocumentError::MissingSignature));
        assert_eq!(RunKey::from_hex(&key.to_hex().replacen('0', "+", 1)), None);
        assert_eq!(RunKey::from_hex(&key.to_hex()), Some(key));
    }

    #[test]
    fn a_changed_or_truncated_document_does_not_open() {
        let key = RunKey::new([1; 32]);
        let bytes = document().sign(&key).unwrap();
        for cut in 0..bytes.len() {
            assert!(Document::open(&bytes[..cut], &key).is_err(), "cut at {cut}");
        }
        for index in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[index] ^= 1;
            assert!(Document::open(&changed, &key).is_err(), "changed at {index}");
        }
    }

    fn report() -> AgentReport {
        let versions = Versions { program: "0.1.0".to_owned(), schema: Schema::CURRENT, policy: 4, queued: 0 };
        AgentReport::heartbeat(NodeName::new("n1").unwrap(), 3, Timestamp::from_secs(1), versions)
    }

    #[test]
    fn an_agent_report_does_not_open_as_a_result_even_with_the_same_key() {
        let key = RunKey::new([1; 32]);
        let bytes = report().sign(&key).unwrap();
        assert_eq!(AgentReport::open(&bytes, &key).unwrap(), report());
        assert_eq!(Document::open(&bytes, &key), Err(DocumentError::MissingSignature));
        assert_eq!(AgentReport::open(&bytes, &RunKey::new([2; 32])), Err(DocumentError::WrongSignature));
    }

    /// A report as JSON with another schema version and an unknown field.
    fn of_schema(schema: &str) -> Vec<u8> {
        let mut body = serde_json::to_value(report()).unwrap();
        body["versions"]["schema"] = schema.into();
        body["invented_later"] = true.into();
        seal(REPORT_HEADER, &serde_json::to_vec(&body).unwrap(), &RunKey::new([1; 32]))
    }

    #[test]
    fn a_newer_schema_is_refused_by_its_name_and_not_as_malformed() {
        let key = RunKey::new([1; 32]);
        for schema in ["1.3", "2.0", "10.1"] {
            let error = AgentReport::open(&of_schema(schema), &key).unwrap_err();
            assert!(matches!(error, DocumentError::NewerSchema { .. }), "{schema}: {error:?}");
            assert!(error.to_string().contains(&format!("schema {schema},")), "{error}");
        }
        for schema in ["0.9", "1.0"] {
            assert!(matches!(AgentReport::open(&of_schema(schema), &key), Err(DocumentError::OlderSchema { .. })));
        }
        for schema in ["1.1", "1.2"] {
            assert!(matches!(AgentReport::open(&of_schema(schema), &key), Err(DocumentError::Malformed(_))));
        }
    }

    #[test]
    fn a_report_with_the_previous_schema_is_accepted() {
        let key = RunKey::new([1; 32]);
        // As a program with schema 1.1 wrote it, by hand.
        let body = r#"{"node":"n1","hardware":{"gpu_uuids":[],"board_serial":null,"physical_host":null,"boot_id":null},
            "sequence":3,"at":"1970-01-01T00:00:01Z","checks":[],
            "versions":{"program":"0.1.0","schema":"1.1","policy":4,"queued":0}}"#;
        let opened = AgentReport::open(&seal(REPORT_HEADER, body.as_bytes(), &key), &key).unwrap();
        let versions = Versions { schema: Schema::OLDEST, ..report().versions };
        assert_eq!(opened, AgentReport { versions, ..report() });
        assert!(opened.is_heartbeat());
    }

    #[test]
    fn a_report_with_results_of_thousands_of_checks_is_malformed() {
        let (key, at) = (RunKey::new([1; 32]), Timestamp::from_secs(1));
        let test = |number: usize| TestId::new(&format!("check-{number}")).unwrap();
        let evidence = |number| TestEvidence { test: test(number), started: at, ended: at, probes: Vec::new() };
        for (count, is_accepted) in [(MAX_CHECKS, true), (MAX_CHECKS + 1, false)] {
            let checks = (0..count).map(|number| (test(number), 1)).collect();
            let dropped = Some(DroppedReports { reports: 1, checks, from: at, to: at });
            let checks = (0..count).map(evidence).collect();
            for sent in [AgentReport { dropped, ..report() }, AgentReport { checks, ..report() }] {
                match AgentReport::open(&sent.sign(&key).unwrap(), &key) {
                    Ok(opened) => assert!(is_accepted && opened == sent),
                    Err(error) => assert!(!is_accepted && matches!(error, DocumentError::Malformed(_)), "{error}"),
                }
            }
        }
    }

    #[test]
    fn a_report_carries_the_machines_facts_and_what_it_confirms_within_limits() {
        let key = RunKey::new([1; 32]);
        let checks = |count: usize| vec![TestId::new("memory").unwrap(); count];
        let confirmed = |count| ConfirmedResults {
            through: 2,
            rounds: vec![CheckRound { age: Span::from_millis(1500), checks: checks(count) }],
        };
        let gpu_names = vec!["x".repeat(300); 100];
        let machine = MachineFacts { gpu_names, ..MachineFacts::default() };
        let full = AgentReport {
            machine: Some(machine.clone()),
            waited: Some(Span::from_secs(90)),
            confirmed: Some(confirmed(80)),
            profiles: Some("abc".to_owned()),
            ..report()
        };
        let opened = AgentReport::open(&full.sign(&key).unwrap(), &key).unwrap();
        assert_eq!(opened, AgentReport { machine: Some(machine.clone().bounded()), ..full });
        assert!(opened.is_heartbeat(), "the endpoint answers it without the engine");
        let boot_id = Some(format!("boot\0{}", "x".repeat(1000)));
        let mut hostile = AgentReport { hardware: Hardware { boot_id, ..Hardware::default() }, ..report() };
        hostile.versions.program = "\0".repeat(1000);
        let opened = AgentReport::open(&hostile.sign(&key).unwrap(), &key).unwrap();
        let boot_id = opened.hardware.boot_id.unwrap();
        assert!(boot_id.starts_with("boot\u{FFFD}x") && boot_id.len() <= 256, "{boot_id}");
        assert!(opened.versions.program.len() <= 128 && !opened.versions.program.contains('\0'));
        let hostile = AgentReport { confirmed: Some(confirmed(5000)), ..report() };
        assert!(matches!(AgentReport::open(&hostile.sign(&key).unwrap(), &key), Err(DocumentError::Malformed(_))));
        let hostile = Document { machine: Some(machine.clone()), ..document() }.sign(&key).unwrap();
        for opened in [Document::open(&hostile, &key), Document::parse_stored(&hostile)] {
            assert_eq!(opened.unwrap().machine, Some(machine.clone().bounded()));
        }
    }
}
