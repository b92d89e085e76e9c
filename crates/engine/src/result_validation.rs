//! Validation and classification of all incoming results, in this order: verify, parse, classify.
//!
//! A document arrives through the shared directory, with a job's output, or is posted by the job. Nothing in it is
//! trusted before its signature matches the one-time key of an active run; then it must be for one of that run's nodes
//! and contain only requested tests. The controller derives the verdict from the raw evidence; a node's own verdict is
//! not used. What is posted was verified and parsed before it was queued, so the two halves can be called separately.

use std::collections::BTreeMap;

use doctor_checks::document::{AgentReport, Document, RunKey, TestEvidence};
use doctor_core::{
    classify::{self, Baselines, BootGrace, Classification, ExpectationSources},
    finding::{Finding, Verdict},
    ids::{NodeName, Sku, TestId},
    node::{Declared, Node},
    observation::AcknowledgedEvents,
    profile::Profile,
    reason::ReasonCode,
    run::{Outcome, Run},
    time::{Span, Timestamp},
};
use doctor_store::records::{AgentFindings, AgentResult, ClassifiedResult, ConfirmedRound, StoredRun};

use crate::{rejection::Rejection, settings::Settings};

/// Returns the baselines for a result of this node and test, dated by the node's clock.
pub type BaselineLoader<'a> = dyn FnMut(&NodeName, &TestEvidence) -> Baselines + 'a;

/// Returns baselines with only the time of the observation known.
pub fn without_baselines(_: &NodeName, evidence: &TestEvidence) -> Baselines {
    Baselines::at(evidence.ended)
}

/// Opens a run's document and classifies every test in it. Each node of a run is classified by its own machine type.
///
/// # Errors
/// With the reason for the rejection.
pub fn open_document<'a>(
    settings: &Settings,
    run: &StoredRun,
    bytes: Vec<u8>,
    received: Timestamp,
    known: impl Fn(&NodeName) -> KnownNode<'a>,
    baselines: &mut BaselineLoader<'_>,
) -> Result<ClassifiedResult, Rejection> {
    let document = Document::open(&bytes, &run.key)?;
    check_document(&run.run, &document)?;
    Ok(classify_document(settings, &run.run, (&document, bytes), received, known(&document.node), baselines))
}

/// Checks that a document is of this run: of one of its nodes, with requested tests only, each once.
///
/// # Errors
/// With the reason for the rejection.
pub fn check_document(run: &Run, document: &Document) -> Result<(), Rejection> {
    if document.run != run.id {
        return Err(Rejection::WrongRun(document.run));
    }
    if !run.nodes.contains(&document.node) {
        return Err(Rejection::WrongNode(document.node.clone()));
    }
    let mut seen: Vec<&TestId> = Vec::with_capacity(document.tests.len());
    for evidence in &document.tests {
        if !run.tests.contains(&evidence.test) {
            return Err(Rejection::UnexpectedTest(evidence.test.clone()));
        }
        if seen.contains(&&evidence.test) {
            return Err(Rejection::DuplicateTest(evidence.test.clone()));
        }
        seen.push(&evidence.test);
    }
    Ok(())
}

/// Classifies every test in a checked document, which is given parsed and as it was received.
pub fn classify_document(
    settings: &Settings,
    run: &Run,
    (document, bytes): (&Document, Vec<u8>),
    received: Timestamp,
    known: KnownNode<'_>,
    baselines: &mut BaselineLoader<'_>,
) -> ClassifiedResult {
    let complete = run.tests.iter().all(|test| document.tests.iter().any(|evidence| evidence.test == *test));
    let profile = settings.profiles.resolve(known.sku, document.machine.as_ref());
    let context = ClassifyContext { settings, profile, declared: known.declared, acknowledged: known.acknowledged };
    let classified = document.tests.iter().map(|evidence| {
        let baselines = baselines(&document.node, evidence);
        outcome(document, evidence, classify_evidence(context, evidence, &baselines, document.uptime), received)
    });
    let mut outcomes: Vec<Outcome> = classified.collect();
    if let Some(first) = outcomes.first_mut() {
        let test = first.test.clone();
        first.findings.extend(classify::check_clock(&test, run.planned, document.started, document.ended, received));
    }
    ClassifiedResult {
        run: document.run,
        node: document.node.clone(),
        outcomes,
        hardware: document.hardware.clone(),
        evidence: bytes,
        complete,
        received,
        policy_version: settings.policy.version,
        profile_version: profile.map(|profile| profile.version),
    }
}

fn outcome(
    document: &Document,
    evidence: &TestEvidence,
    classification: Classification,
    received: Timestamp,
) -> Outcome {
    Outcome {
        node: document.node.clone(),
        test: evidence.test.clone(),
        verdict: classification.verdict,
        reason: classification.reason,
        at: received,
        // By the node's own clock, which may run backwards: a duration is at least zero.
        duration: evidence.ended.since(evidence.started).min(Span::days(7)),
        findings: classification.findings,
    }
}

/// What is known about a node besides its results.
#[derive(Debug, Clone, Copy, Default)]
pub struct KnownNode<'a> {
    /// The machine type, from the cluster's label or a setting.
    pub sku: Option<&'a Sku>,
    /// What the scheduler declares.
    pub declared: Option<&'a Declared>,
    /// Acknowledged events: an old event never fails the node twice.
    pub acknowledged: &'a [AcknowledgedEvents],
}

impl<'a> KnownNode<'a> {
    pub fn of(node: &'a Node, acknowledged: &'a [AcknowledgedEvents]) -> Self {
        Self { sku: node.sku.as_ref(), declared: node.declared.as_deref(), acknowledged }
    }
}

/// What a node's evidence is classified with.
#[derive(Debug, Clone, Copy)]
pub struct ClassifyContext<'a> {
    pub settings: &'a Settings,
    /// The profile of the machine's type or, if the type is unknown, of its chip.
    pub profile: Option<&'a Profile>,
    pub declared: Option<&'a Declared>,
    /// Acknowledged events of this node: an old event never fails it twice.
    pub acknowledged: &'a [AcknowledgedEvents],
}

/// Interprets and classifies the evidence of one check. `up` is the uptime of its machine.
pub fn classify_evidence(
    context: ClassifyContext<'_>,
    evidence: &TestEvidence,
    baselines: &Baselines,
    up: Option<Span>,
) -> Classification {
    let ClassifyContext { settings, profile, declared, acknowledged } = context;
    let Some(check) = settings.catalogue.get(&evidence.test) else {
        return Classification {
            verdict: Verdict::Inconclusive,
            reason: ReasonCode::fixed("unknown-check"),
            text: format!("this controller has no check {}", evidence.test),
            findings: Vec::new(),
            not_judged: Vec::new(),
        };
    };
    let params = settings.catalogue.params(&settings.policy, &evidence.test);
    let observation = check.observe(&params, evidence).without_acknowledged(&evidence.test, acknowledged);
    let rules = settings.rules_of(&evidence.test);
    let sources = ExpectationSources { profile, declared, baselines };
    let mut classification = classify::classify_with(rules, sources, &evidence.test, &observation);
    if settings.is_multi_node(&evidence.test) {
        classification = classify::remove_shared_findings(classification, rules);
    }
    let grace = settings.policy.agents.boot_grace;
    classify::apply_boot_grace(classification, BootGrace { up, grace, is_deep: check.spec.exclusive })
}

/// Opens an unsolicited report of an agent, signed with the node's key. Reports are not kept as evidence: their
/// baselines have the time and the expected counts, but no earlier results.
///
/// # Errors
/// With the reason for the rejection.
pub fn open_report(
    settings: &Settings,
    known: KnownNode<'_>,
    (node, key, bytes): (&NodeName, &RunKey, &[u8]),
    received: Timestamp,
    baselines: &mut BaselineLoader<'_>,
) -> Result<AgentFindings, Rejection> {
    let report = AgentReport::open(bytes, key)?;
    if report.node != *node {
        return Err(Rejection::WrongNode(report.node));
    }
    Ok(classify_report(settings, known, &report, received, baselines))
}

/// Classifies every check in a verified report, which was received at this time.
pub fn classify_report(
    settings: &Settings,
    known: KnownNode<'_>,
    report: &AgentReport,
    received: Timestamp,
    baselines: &mut BaselineLoader<'_>,
) -> AgentFindings {
    let profile = settings.profiles.resolve(known.sku, report.machine.as_ref());
    let context = ClassifyContext { settings, profile, declared: known.declared, acknowledged: known.acknowledged };
    let mut by_check: BTreeMap<TestId, Vec<Finding>> = BTreeMap::new();
    let mut results = BTreeMap::new();
    for evidence in &report.checks {
        let baselines = baselines(&report.node, evidence);
        let classification = classify_evidence(context, evidence, &baselines, report.uptime);
        // Agents run no test that needs the node for itself, and a node could name any number of unknown checks.
        if context.settings.catalogue.get(&evidence.test).is_some_and(|check| !check.spec.exclusive) {
            let severity = classification.findings.iter().map(|finding| finding.severity).max();
            let (verdict, reason) = (classification.verdict, classification.reason.clone());
            results.insert(evidence.test.clone(), AgentResult { verdict, severity, reason });
        }
        // An inconclusive result clears no finding.
        if classification.verdict.is_conclusive() {
            by_check.insert(evidence.test.clone(), classification.findings);
        }
    }
    let &AgentReport { ref node, ref hardware, sequence: number, at: sent, ref dropped, waited, ref confirmed, .. } =
        report;
    let waited = waited.unwrap_or_default();
    // What a report confirms is as of its own results.
    let confirmed =
        confirmed.clone().map_or_else(Vec::new, |confirmed| ConfirmedRound::from_message(confirmed, received));
    let (node, hardware, dropped) = (node.clone(), hardware.clone(), dropped.clone());
    AgentFindings { node, number, sent, received, waited, by_check, results, confirmed, hardware, dropped }
}
