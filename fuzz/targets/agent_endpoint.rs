//! The agent endpoint of the controller: bytes as any client on the network may send them.
//!
//! The server's own HTTP parser is in the path, as in production. Without the key of a node, every response is a
//! rejection or the page that reports whether this controller leads.

#![no_main]

use std::sync::LazyLock;

use doctor_api::fuzz_targets::FuzzAgentEndpoint;
use doctor_checks::document::RunKey;
use doctor_core::ids::NodeName;
use libfuzzer_sys::fuzz_target;

static ENDPOINT: LazyLock<FuzzAgentEndpoint> = LazyLock::new(|| {
    let node = NodeName::new("n1").expect("a fixed name");
    FuzzAgentEndpoint::new(&node, &RunKey::new([7; 32])).expect("a store in memory and a server on a socket")
});

fuzz_target!(|input: &[u8]| {
    let answer = ENDPOINT.exchange(input).expect("a connection to itself");
    assert!(answer.len() <= (input.len() + 1) * 512, "an answer much longer than its request");
    let Some(status) = answer.strip_prefix(b"HTTP/1.").and_then(|rest| rest.get(2..5)) else {
        assert!(answer.is_empty(), "what is answered is HTTP: {}", String::from_utf8_lossy(&answer));
        return;
    };
    let body_said = |words: &[u8]| answer.windows(words.len()).any(|window| window == words);
    assert!(!body_said(b"kept\n") && !body_said(b"heard\n"), "a report was taken without its signature");
    assert!(status[0] != b'5' || status == b"505", "{}", String::from_utf8_lossy(&answer));
});
