//! Every check reads what a sick machine brings.
//!
//! The first byte picks the check; the rest is cut into one output for each of its probes. Whatever it says must not
//! panic, must never be a measurement of nothing, and must be judged by the check's own rules without a pass that
//! rests on no number and no event.

#![no_main]

use std::sync::LazyLock;

use doctor_checks::{CHECKS, Catalogue, Params, probe::ProbeOutput};
use doctor_core::{
    classify::judge,
    finding::Verdict,
    ids::CheckId,
    observation::Observation,
    policy::{Policy, Rule},
};
use doctor_fuzz::{outputs::output, pick};
use libfuzzer_sys::fuzz_target;

/// Between the outputs of two probes.
const PROBE: u8 = 0xfd;

static RULES: LazyLock<Vec<Rule>> =
    LazyLock::new(|| Catalogue::built_in().rules(&Policy::standard()).expect("the checks' own rules are tested"));

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
    let judged = judge(&RULES, None, &id, &observation);
    match &observation {
        Observation::Measured { metrics, events, .. } => {
            assert!(!metrics.is_empty() || !events.is_empty(), "{id} measured nothing");
            assert!(metrics.iter().all(|metric| metric.value.is_finite()), "{id} measured what is no number");
        }
        Observation::NotApplicable(_) | Observation::CouldNot(_) => {
            assert_ne!(judged.verdict, Verdict::Pass, "{id} passed without measuring");
            assert!(judged.findings.is_empty());
        }
    }
    // Where nothing at all could be read, nothing is well.
    if outputs.iter().all(|output| matches!(output, ProbeOutput::Failed(_))) {
        assert_ne!(judged.verdict, Verdict::Pass, "{id} passed although every probe failed");
    }
});
