//! What a node's part in a test over several nodes says about that node.

use super::{JudgedWhy, Judgement};
use crate::{finding::Verdict, ids::RuleId, policy::Rule, reason::ReasonCode};

/// What is true of all nodes of a run accuses none of them. Where nothing else is wrong with this one, its result says only
/// that they failed together; what it measured of itself counts as ever.
pub fn of_several(mut judgement: Judgement, rules: &[Rule]) -> Judgement {
    if judgement.verdict != Verdict::Fail {
        return judgement;
    }
    let of_all = |id: &RuleId| rules.iter().any(|rule| rule.of_all && rule.id == *id);
    judgement.findings.retain(|finding| !of_all(&finding.rule));
    match judgement.findings.first() {
        Some(worst) => Judgement { reason: worst.reason.clone(), text: worst.text.clone(), ..judgement },
        None => Judgement {
            verdict: Verdict::Inconclusive,
            reason: ReasonCode::fixed(JudgedWhy::FailedTogether.code()),
            text: format!("all together: {}", judgement.text),
            findings: Vec::new(),
        },
    }
}
