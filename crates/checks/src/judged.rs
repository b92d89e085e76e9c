//! For tests of checks: what the default rules make of some output, in words that fit on a line.

use doctor_core::{classify::judge, ids::CheckId, policy::Policy, profile::Profile};

use crate::{
    Catalogue,
    probe::ProbeOutput,
    spec::{Check, Params},
};

/// `fail REASON SEVERITY ENTITY` for each finding, worst first; or one line `VERDICT REASON`.
pub(crate) fn judged(check: &Check, outputs: &[ProbeOutput]) -> Vec<String> {
    judged_with(check, &Params::new(), None, outputs)
}

pub(crate) fn judged_with(
    check: &Check,
    params: &Params,
    profile: Option<&Profile>,
    outputs: &[ProbeOutput],
) -> Vec<String> {
    let rules = Catalogue::new([*check]).rules(&Policy::standard()).unwrap();
    let id = CheckId::new(check.spec.id).unwrap();
    let judgement = judge(&rules, profile, &id, &(check.interpret)(params, outputs));
    if judgement.findings.is_empty() {
        return vec![format!("{} {}", judgement.verdict, judgement.reason)];
    }
    let line = |finding: &doctor_core::finding::Finding| {
        format!("{} {} {} {}", finding.verdict, finding.reason, finding.severity, finding.entity)
    };
    judgement.findings.iter().map(line).collect()
}
