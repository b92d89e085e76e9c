//! Result documents come from nodes, and nodes are not trusted.
//!
//! Random bytes never get past the signature, so the input is tried twice: as it is, and as a body signed with a key
//! that the reader knows. What opens must be safe to build a path from and must say the same after a second trip.

#![no_main]

use doctor_checks::document::{Document, RunKey};
use hmac::{Hmac, KeyInit, Mac};
use libfuzzer_sys::fuzz_target;
use sha2::Sha256;

const KEY: [u8; 32] = [7; 32];

fn signed(body: &[u8]) -> Vec<u8> {
    let mut mac = Hmac::<Sha256>::new_from_slice(&KEY).expect("HMAC takes a key of any length");
    mac.update(body);
    let signature: String = mac.finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    [b"doctor-result-1 ", signature.as_bytes(), b"\n", body].concat()
}

fuzz_target!(|data: &[u8]| {
    let key = RunKey::new(KEY);
    assert!(Document::open(data, &key).is_err(), "nobody guesses a signature");
    let Ok(document) = Document::open(&signed(data), &key) else { return };

    let name = document.node.as_str();
    assert!(!name.contains('/') && !name.contains("..") && !name.is_empty());
    for evidence in &document.tests {
        assert!(!evidence.test.as_str().contains('/'));
    }
    let again = document.sign(&key).expect("what was read from JSON can be written as JSON");
    assert_eq!(Document::open(&again, &key).as_ref(), Ok(&document));
});
