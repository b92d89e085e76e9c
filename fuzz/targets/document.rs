//! Result documents and agent reports come from nodes, which are not trusted.
//!
//! Random bytes never pass the signature check, so the input is tried unchanged, and as a body signed with a key that
//! the reader knows. An accepted document must be safe to build a path from, must survive another round trip, and must
//! not be classified as a pass without evidence.

#![no_main]

use std::sync::LazyLock;

use doctor_checks::{
    Catalogue,
    document::{AgentReport, Document, MAX_DOCUMENT_BYTES, RunKey, TestEvidence},
    profiles::built_in,
    result_transport::{self, PackedDocument, TerminationMessage},
};
use doctor_core::{classify::Baselines, finding::Verdict, observation::Observation, policy::Policy, time::Span};
use doctor_engine::{
    result_validation::{ClassifyContext, classify_evidence},
    settings::Settings,
};
use hmac::{Hmac, KeyInit, Mac};
use libfuzzer_sys::fuzz_target;
use sha2::Sha256;

const KEY: [u8; 32] = [7; 32];

static SETTINGS: LazyLock<Settings> = LazyLock::new(|| {
    Settings::new(Policy::built_in(), Catalogue::built_in(), built_in().profiles()).expect("the defaults go together")
});

fn signed(word: &str, body: &[u8]) -> Vec<u8> {
    let mut mac = Hmac::<Sha256>::new_from_slice(&KEY).expect("HMAC takes a key of any length");
    mac.update(body);
    let signature: String = mac.finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    [word.as_bytes(), b" ", signature.as_bytes(), b"\n", body].concat()
}

fn judged(evidence: &TestEvidence, up: Option<Span>) {
    assert!(!evidence.test.as_str().contains('/'));
    let by = ClassifyContext { settings: &SETTINGS, profile: None, declared: None, acknowledged: &[] };
    let judgement = classify_evidence(by, evidence, &Baselines::at(evidence.ended), up);
    let params = SETTINGS.catalogue.params(&SETTINGS.policy, &evidence.test);
    let seen = SETTINGS.catalogue.get(&evidence.test).map(|check| check.observe(&params, evidence));
    let measured = matches!(seen, Some(Observation::Measured { .. }));
    assert!(measured || judgement.verdict != Verdict::Pass, "{} passed without measuring", evidence.test);
}

fn result(key: &RunKey, body: &[u8]) {
    let bytes = signed("doctor-result-1", body);
    let Ok(document) = Document::open(&bytes, key) else { return };
    let name = document.node.as_str();
    assert!(!name.contains('/') && !name.contains("..") && !name.is_empty());
    let again = document.sign(key).expect("what was read from JSON can be written as JSON");
    assert_eq!(Document::open(&again, key).as_ref(), Ok(&document));
    assert_eq!(Document::parse_stored(&bytes).as_ref(), Ok(&document));
    assert!(AgentReport::open(&bytes, key).is_err(), "a result is no report");
    document.tests.iter().for_each(|evidence| judged(evidence, document.uptime));
}

/// The termination message and the log of a pod also come from the node.
fn unpacked(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let most = usize::try_from(MAX_DOCUMENT_BYTES).expect("it is a few megabytes");
    if let Ok(TerminationMessage::Document(document)) = result_transport::parse_termination_message(&text) {
        assert!(document.len() <= most);
    }
    assert!(result_transport::extract_from_log(&text).map_or(0, |document| document.len()) <= most);
    if let Ok(packed) = PackedDocument::pack(data) {
        assert_eq!(
            result_transport::extract_from_log(&format!("{text}\n{}", packed.to_log_lines())).as_deref(),
            Ok(data)
        );
    }
}

fn report(key: &RunKey, body: &[u8]) {
    let bytes = signed("doctor-report-1", body);
    let Ok(report) = AgentReport::open(&bytes, key) else { return };
    let again = report.sign(key).expect("what was read from JSON can be written as JSON");
    assert_eq!(AgentReport::open(&again, key).as_ref(), Ok(&report));
    assert!(Document::open(&bytes, key).is_err(), "a report is no result");
    report.checks.iter().for_each(|evidence| judged(evidence, report.uptime));
}

fuzz_target!(|data: &[u8]| {
    let key = RunKey::new(KEY);
    assert!(Document::open(data, &key).is_err(), "a document without the key's signature was accepted");
    assert!(AgentReport::open(data, &key).is_err(), "a document without the key's signature was accepted");
    let _kept = Document::parse_stored(data);
    unpacked(data);
    result(&key, data);
    report(&key, data);
});
