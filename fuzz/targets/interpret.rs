//! Every check interprets the output of a faulty machine.
//!
//! The first byte selects the check; the rest is split into one output for each of its probes. The interpretation must
//! not panic, must never be a measurement of nothing, and the check's own rules must not classify it as a pass without
//! a number or an event.

#![no_main]

use std::sync::LazyLock;

use doctor_checks::{CHECKS, Catalogue, Params, probe::ProbeOutput};
use doctor_core::{
    classify::classify,
    finding::Verdict,
    ids::CheckId,
    observation::Observation,
    policy::{Policy, Rule},
};
use doctor_fuzz::{outputs::output, pick};
use libfuzzer_sys::fuzz_target;

/// Separates the outputs of two probes.
const PROBE: u8 = 0xfd;

static RULES: LazyLock<Vec<Rule>> =
    LazyLock::new(|| Catalogue::built_in().rules(&Policy::built_in()).expect("the checks' own rules are tested"));

fuzz_target!(|data: &[u8]| {
    let Some((check, rest)) = pick(CHECKS, data) else { return };
    let params = Params::new();
    let mut parts = rest.split(|byte| *byte == PROBE);
    let wanted = (check.probes)(&params);
    let mut outputs: Vec<ProbeOutput> =
        wanted.iter().map(|probe| output(probe, parts.next().unwrap_or_default())).collect();
    if parts.next().is_some() {
        // An older agent may have run fewer probes.
        outputs.pop();
    }
    let id = CheckId::new(check.spec.id).expect("the checks' own names are tested");
    let observation = (check.interpret)(&params, &outputs);
    let judged = classify(&RULES, None, &id, &observation);
    match &observation {
        Observation::Measured { metrics, events, .. } => {
            assert!(!metrics.is_empty() || !events.is_empty(), "{id} measured nothing");
            assert!(metrics.iter().all(|metric| metric.value.is_finite()), "{id} measured what is no number");
        }
        Observation::NotApplicable(_) | Observation::Failed(_) => {
            assert_ne!(judged.verdict, Verdict::Pass, "{id} passed without measuring");
            assert!(judged.findings.is_empty());
        }
    }
    // If nothing could be read, nothing passes.
    if outputs.iter().all(|output| matches!(output, ProbeOutput::Failed(_))) {
        assert_ne!(judged.verdict, Verdict::Pass, "{id} passed although every probe failed");
    }
});
