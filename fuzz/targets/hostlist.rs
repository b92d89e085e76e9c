//! Host lists come from command lines, and a short one may name a great many nodes.
//!
//! The result is bounded, has each name once, and its folded form means the same nodes.

#![no_main]

use std::collections::BTreeSet;

use doctor_core::{
    hostlist::{MAX_NODES, Selector, fold, parse},
    ids::NodeName,
};
use libfuzzer_sys::{Corpus, fuzz_target};

fuzz_target!(|text: &str| -> Corpus {
    let _ = text.parse::<Selector>();
    let Ok(names) = parse(text) else { return Corpus::Keep };
    assert!((1..=MAX_NODES).contains(&names.len()));
    // Long lists are only slow: keep them out of the corpus.
    if names.len() > 2000 {
        return Corpus::Reject;
    }
    let set: BTreeSet<&NodeName> = names.iter().collect();
    assert_eq!(set.len(), names.len());
    let folded = fold(&names);
    let again = parse(&folded).unwrap_or_else(|error| panic!("{folded:?}: {error}"));
    assert_eq!(again.iter().collect::<BTreeSet<_>>(), set);
    Corpus::Keep
});
