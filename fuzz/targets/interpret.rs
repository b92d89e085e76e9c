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
use libfuzzer_sys::fuzz_target;

static RULES: LazyLock<Vec<Rule>> =
    LazyLock::new(|| Catalogue::built_in().rules(&Policy::standard()).expect("the checks' own rules are tested"));

/// One output as a node might send it: the first byte of its share picks the kind.
fn output(bytes: &[u8]) -> ProbeOutput {
    let (kind, rest) = bytes.split_first().map_or((0, bytes), |(first, rest)| (*first, rest));
    let text = String::from_utf8_lossy(rest).into_owned();
    match kind % 4 {
        0 => ProbeOutput::Text(text),
        1 => ProbeOutput::Names(text.lines().map(str::to_owned).collect()),
        2 => ProbeOutput::Ran { exit: Some(i32::from(kind / 4)), stdout: text.clone(), stderr: text },
        // Any other kind, in the form in which it travels.
        _ => serde_json::from_slice(rest).unwrap_or(ProbeOutput::Text(text)),
    }
}

fuzz_target!(|data: &[u8]| {
    let Some((pick, rest)) = data.split_first() else { return };
    let check = &CHECKS[usize::from(*pick) % CHECKS.len()];
    let params = Params::new();
    let wanted = (check.probes)(&params).len().max(1);
    let share = rest.len().div_ceil(wanted).max(1);
    let mut outputs: Vec<ProbeOutput> = rest.chunks(share).map(output).collect();
    outputs.resize(wanted, ProbeOutput::Text(String::new()));

    let observation = (check.interpret)(&params, &outputs);
    if let Observation::Measured { metrics, events, .. } = &observation {
        assert!(!metrics.is_empty() || !events.is_empty(), "{} measured nothing", check.spec.id);
    }
    let id = CheckId::new(check.spec.id).expect("the checks' own names are tested");
    let judged = judge(&RULES, None, &id, &observation);
    if !matches!(observation, Observation::Measured { .. }) {
        assert_ne!(judged.verdict, Verdict::Pass, "{} passed without measuring", check.spec.id);
        assert!(judged.findings.is_empty());
    }
});
