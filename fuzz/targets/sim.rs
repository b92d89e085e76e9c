//! The simulated cluster: the lines that it and a controller exchange, lines of scenarios, and its log of effects.
//!
//! A value that is parsed and written again parses as the same.

#![no_main]

use doctor_core::hostlist::MAX_NODES;
use doctor_fuzz::{pick, text};
use doctor_sim::{Incident, fuzz_targets};
use libfuzzer_sys::{Corpus, fuzz_target};

const PARSERS: &[fn(&[u8]) -> Corpus] = &[request, response, incident, effects];

fn request(line: &[u8]) -> Corpus {
    if let Some(again) = fuzz_targets::request(line) {
        assert_eq!(fuzz_targets::request(&again), Some(again));
    }
    Corpus::Keep
}

fn response(line: &[u8]) -> Corpus {
    if let Some(again) = fuzz_targets::response(line) {
        assert_eq!(fuzz_targets::response(&again), Some(again));
    }
    Corpus::Keep
}

fn incident(bytes: &[u8]) -> Corpus {
    let mut kept = Corpus::Keep;
    for line in text(bytes).lines().take(4) {
        if let Some(Incident::UserJob { nodes, .. }) = fuzz_targets::incident(line) {
            assert!(nodes.len() <= MAX_NODES);
            // Long lists are only slow: keep them out of the corpus.
            if nodes.len() > 2000 {
                kept = Corpus::Reject;
            }
        }
    }
    kept
}

fn effects(bytes: &[u8]) -> Corpus {
    let text = text(bytes);
    let Some(effects) = fuzz_targets::effects(&text) else { return Corpus::Keep };
    assert!(effects.len() <= text.lines().count());
    let written =
        effects.iter().map(|effect| serde_json::to_string(effect).expect("what was read can be written") + "\n");
    assert_eq!(fuzz_targets::effects(&written.collect::<String>()), Some(effects));
    Corpus::Keep
}

fuzz_target!(|data: &[u8]| -> Corpus { pick(PARSERS, data).map_or(Corpus::Keep, |(read, rest)| read(rest)) });
