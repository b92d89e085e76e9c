//! A test helper that applies a check's default rules to probe outputs and formats the result as lines.

use doctor_core::{classify::classify, ids::CheckId, policy::Policy, profile::Profile};

use crate::{
    Catalogue,
    probe::ProbeOutput,
    spec::{Check, Params},
};

/// Returns `fail REASON SEVERITY ENTITY` for each finding, worst first, or a single line `VERDICT REASON`.
pub(crate) fn classify_outputs(check: &Check, outputs: &[ProbeOutput]) -> Vec<String> {
    classify_outputs_with(check, &Params::new(), None, outputs)
}

pub(crate) fn classify_outputs_with(
    check: &Check,
    params: &Params,
    profile: Option<&Profile>,
    outputs: &[ProbeOutput],
) -> Vec<String> {
    let rules = Catalogue::new([*check]).rules(&Policy::built_in()).unwrap();
    let id = CheckId::new(check.spec.id).unwrap();
    let judgement = classify(&rules, profile, &id, &(check.interpret)(params, outputs));
    if judgement.findings.is_empty() {
        return vec![format!("{} {}", judgement.verdict, judgement.reason)];
    }
    let line = |finding: &doctor_core::finding::Finding| {
        format!("{} {} {} {}", finding.verdict, finding.reason, finding.severity, finding.entity)
    };
    judgement.findings.iter().map(line).collect()
}
