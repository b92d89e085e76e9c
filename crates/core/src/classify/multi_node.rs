//! The result of a single node in a test over several nodes.

use super::{Classification, ClassificationReason};
use crate::{finding::Verdict, ids::RuleId, policy::Rule, reason::ReasonCode};

/// Removes findings that apply to all nodes of the run, because they attribute the fault to none. If no other finding
/// remains, the verdict becomes inconclusive with the reason [`ClassificationReason::FailedTogether`]; the node's own measurements
/// count as usual.
pub fn remove_shared_findings(mut judgement: Classification, rules: &[Rule]) -> Classification {
    if judgement.verdict != Verdict::Fail {
        return judgement;
    }
    let of_all = |id: &RuleId| rules.iter().any(|rule| rule.of_all && rule.id == *id);
    judgement.findings.retain(|finding| !of_all(&finding.rule));
    match judgement.findings.first() {
        Some(worst) => Classification { reason: worst.reason.clone(), text: worst.text.clone(), ..judgement },
        None => Classification {
            verdict: Verdict::Inconclusive,
            reason: ReasonCode::fixed(ClassificationReason::FailedTogether.code()),
            text: format!("all nodes together: {}", judgement.text),
            findings: Vec::new(),
            not_judged: judgement.not_judged,
        },
    }
}
