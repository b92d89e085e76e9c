//! The one door for results: whatever comes in is verified, understood and judged here, in this order.
//!
//! A document reaches the door from the shared directory or with a job's output. Nothing of it is believed before its
//! signature fits the one-time key of a run that is active; then it must speak for one of that run's nodes and answer
//! only what was asked. The verdict is found here, from the raw evidence; the node's opinion is not asked for.

use std::collections::BTreeMap;

use doctor_checks::document::{AgentReport, Document, RunKey, TestEvidence};
use doctor_core::{
    classify::{self, Judgement, Past},
    finding::{Finding, Verdict},
    ids::{NodeName, Sku, TestId},
    observation::Settled,
    reason::ReasonCode,
    run::Outcome,
    time::{Span, Timestamp},
};
use doctor_store::records::{AgentFindings, JudgedResult, StoredRun};

use crate::{rejection::Rejection, settings::Settings};

/// What is known of the past of a result: of which node, which test, by the node's clock.
pub type PastOf<'a> = dyn FnMut(&NodeName, &TestEvidence) -> Past + 'a;

/// Where nothing of the past is known but when the look was.
pub fn no_past(_: &NodeName, evidence: &TestEvidence) -> Past {
    Past::at(evidence.ended)
}

/// Opens a run's document and judges every test in it.
///
/// # Errors
/// With the reason for turning it away.
pub fn open_document(
    settings: &Settings,
    run: &StoredRun,
    sku: Option<&Sku>,
    bytes: Vec<u8>,
    received: Timestamp,
    settled: impl Fn(&NodeName) -> Vec<Settled>,
    past: &mut PastOf<'_>,
) -> Result<JudgedResult, Rejection> {
    let document = Document::open(&bytes, &run.key)?;
    if document.run != run.run.id {
        return Err(Rejection::OtherRun(document.run));
    }
    if !run.run.nodes.contains(&document.node) {
        return Err(Rejection::OtherNode(document.node));
    }
    let mut seen: Vec<&TestId> = Vec::with_capacity(document.tests.len());
    for evidence in &document.tests {
        if !run.run.tests.contains(&evidence.test) {
            return Err(Rejection::UnaskedTest(evidence.test.clone()));
        }
        if seen.contains(&&evidence.test) {
            return Err(Rejection::TestTwice(evidence.test.clone()));
        }
        seen.push(&evidence.test);
    }
    let complete = run.run.tests.iter().all(|test| seen.contains(&test));
    let settled = settled(&document.node);
    let by = By { settings, sku, settled: &settled };
    let judged = document.tests.iter().map(|evidence| {
        let past = past(&document.node, evidence);
        outcome(&document, evidence, judge(by, evidence, &past, document.up), received)
    });
    let mut outcomes: Vec<Outcome> = judged.collect();
    if let Some(first) = outcomes.first_mut() {
        let asked = run.run.planned;
        let test = first.test.clone();
        first.findings.extend(classify::judge_clock(&test, asked, document.started, document.ended, received));
    }
    Ok(JudgedResult {
        run: document.run,
        node: document.node,
        outcomes,
        hardware: document.hardware,
        evidence: bytes,
        complete,
        received,
        policy_version: settings.policy.version,
        profile_version: settings.profiles.get(sku).map(|profile| profile.version),
    })
}

fn outcome(document: &Document, evidence: &TestEvidence, judgement: Judgement, received: Timestamp) -> Outcome {
    Outcome {
        node: document.node.clone(),
        test: evidence.test.clone(),
        verdict: judgement.verdict,
        reason: judgement.reason,
        at: received,
        // By the node's own clock, which may run backwards: a length is at least zero.
        took: evidence.ended.since(evidence.started).min(Span::days(7)),
        findings: judgement.findings,
    }
}

/// By what a node's evidence is judged.
#[derive(Debug, Clone, Copy)]
pub struct By<'a> {
    pub settings: &'a Settings,
    pub sku: Option<&'a Sku>,
    /// Events of this node that have had their answer: an old event never fails it twice.
    pub settled: &'a [Settled],
}

/// Interprets and judges the evidence of one check. `up` is how long its machine had been up.
pub fn judge(by: By<'_>, evidence: &TestEvidence, past: &Past, up: Option<Span>) -> Judgement {
    let By { settings, sku, settled } = by;
    let Some(check) = settings.catalogue.get(&evidence.test) else {
        return Judgement {
            verdict: Verdict::Inconclusive,
            reason: ReasonCode::fixed("unknown-check"),
            text: format!("this controller knows no check called {}", evidence.test),
            findings: Vec::new(),
        };
    };
    let params = settings.catalogue.params(&settings.policy, &evidence.test);
    let observation = check.observe(&params, evidence).less(&evidence.test, settled);
    let profile = settings.profiles.get(sku);
    let rules = settings.rules_of(&evidence.test);
    let mut judgement = classify::judge_with(rules, profile, past, &evidence.test, &observation);
    if settings.is_together(&evidence.test) {
        judgement = classify::of_several(judgement, rules);
    }
    classify::after_boot(judgement, up, settings.policy.agents.boot_grace)
}

/// Opens what an agent sent of its own accord. Its key is the node's.
///
/// # Errors
/// With the reason for turning it away.
pub fn open_report(
    by: By<'_>,
    node: &NodeName,
    key: &RunKey,
    bytes: &[u8],
    received: Timestamp,
) -> Result<AgentFindings, Rejection> {
    let report = AgentReport::open(bytes, key)?;
    if report.node != *node {
        return Err(Rejection::OtherNode(report.node));
    }
    let mut by_check: BTreeMap<TestId, Vec<Finding>> = BTreeMap::new();
    for evidence in &report.checks {
        // Reports of agents are not kept as evidence: their rules know the moment, and no earlier results.
        let judgement = judge(by, evidence, &Past::at(evidence.ended), report.up);
        // What says nothing clears nothing.
        if judgement.verdict.is_conclusive() {
            by_check.insert(evidence.test.clone(), judgement.findings);
        }
    }
    let AgentReport { node, hardware, number, at: sent, dropped, .. } = report;
    Ok(AgentFindings { node, number, sent, received, by_check, hardware, dropped })
}
