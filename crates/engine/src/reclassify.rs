//! Reclassifies stored evidence with other rules and reports the differences. Nothing is changed.
//!
//! Each result is classified with what was known when it came in, so that a rule about peers or earlier results decides
//! as it would have then. Counts that the node and its peers are expected to have are those known now: earlier ones are
//! not stored.

use std::collections::{BTreeMap, BTreeSet};

use doctor_checks::document::Document;
use doctor_core::{
    classify::{BaselineNeeds, Classification},
    finding::{Severity, Verdict},
    ids::{NodeName, RunId, Sku, TestId},
    observation::AcknowledgedEvents,
    reason::ReasonCode,
    time::{Span, Timestamp},
};
use doctor_store::{
    Store, StoreError,
    records::{HistoryFilter, HistoryRow},
};
use serde::Serialize;

use crate::{
    baseline_reader::{BaselineQuery, BaselineReader},
    expectations::{NodesBySku, PeerAgreements},
    result_validation::{self, ClassifyContext},
    settings::Settings,
};

/// How far before the first result earlier ones are loaded, if rules refer to them.
const LOOKBACK: Span = Span::days(30);

/// Selects the results to reclassify.
#[derive(Debug, Clone)]
pub struct Scope {
    /// None: all.
    pub nodes: Option<BTreeSet<NodeName>>,
    pub since: Timestamp,
    /// The type of each machine, as of the last observation.
    pub types: BTreeMap<NodeName, Sku>,
}

/// The result of a reclassification.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Reclassification {
    /// Results that were reclassified.
    pub reclassified: u64,
    /// Of those, how many keep their verdict, reason and severity.
    pub unchanged: u64,
    /// Newest first.
    pub changed: Vec<Difference>,
    /// Results that could not be reclassified, by reason.
    pub skipped: BTreeMap<&'static str, u64>,
}

/// One result that would change.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Difference {
    pub node: NodeName,
    pub test: TestId,
    pub at: Timestamp,
    pub run: RunId,
    pub old: ReclassifiedResult,
    pub new: ReclassifiedResult,
    /// The evidence for the new verdict, for people.
    pub text: String,
}

/// A verdict with its reason and severity.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ReclassifiedResult {
    pub verdict: Verdict,
    pub reason: ReasonCode,
    pub severity: Option<Severity>,
}

impl ReclassifiedResult {
    fn from_classification(classification: &Classification) -> Self {
        let severity = classification.findings.iter().map(|finding| finding.severity).max();
        Self { verdict: classification.verdict, reason: classification.reason.clone(), severity }
    }
}

/// Reclassifies the stored results with these settings.
///
/// # Errors
/// If the store cannot be read.
pub fn reclassify(store: &Store, settings: &Settings, scope: &Scope) -> Result<Reclassification, StoreError> {
    let needs = BaselineNeeds::for_all_checks(&settings.rules);
    let lookback = if needs.is_empty() { Span::ZERO } else { LOOKBACK };
    let since = Some(scope.since.minus(lookback));
    let rows = store.history(&HistoryFilter { since, ..HistoryFilter::default() })?;
    let nodes_by_sku = || {
        let mut types = NodesBySku::new();
        for (node, sku) in &scope.types {
            types.entry(sku.clone()).or_default().push(node.clone());
        }
        types
    };
    let mut agreements = PeerAgreements::default();
    let reader = BaselineReader::new(store, settings, &mut agreements, nodes_by_sku).with_history(&rows);
    let acknowledged = store.acknowledged_events()?;
    let mut reclassifier = Reclassifier { settings, scope, reader, acknowledged, outcome: Reclassification::default() };
    // One document has the results of many tests: rows of one run and node are adjacent.
    let mut open: Option<(RunId, NodeName, Result<Document, &'static str>)> = None;
    let in_scope =
        |row: &&HistoryRow| row.at >= scope.since && scope.nodes.as_ref().is_none_or(|nodes| nodes.contains(&row.node));
    for row in rows.iter().filter(in_scope) {
        let Some(run) = row.run else {
            reclassifier.skip(if row.by_agent { "by-agent" } else { "imported" });
            continue;
        };
        let known = open.take().filter(|(open_run, node, _)| *open_run == run && *node == row.node);
        let (_, _, document) = match known {
            Some(known) => open.insert(known),
            None => open.insert((run, row.node.clone(), stored_document(store, run, &row.node)?)),
        };
        match document {
            Ok(document) => reclassifier.add(row, run, document)?,
            Err(why) => reclassifier.skip(why),
        }
    }
    Ok(reclassifier.outcome)
}

fn stored_document(store: &Store, run: RunId, node: &NodeName) -> Result<Result<Document, &'static str>, StoreError> {
    Ok(match store.evidence(run, node)? {
        None => Err("evidence-gone"),
        Some(row) if row.truncated => Err("evidence-cut"),
        Some(row) => Document::parse_stored(&row.bytes).map_err(|_| "evidence-unreadable"),
    })
}

/// A reclassification in progress.
struct Reclassifier<'a> {
    settings: &'a Settings,
    scope: &'a Scope,
    reader: BaselineReader<'a>,
    /// Events that are acknowledged by now.
    acknowledged: BTreeMap<NodeName, Vec<AcknowledgedEvents>>,
    outcome: Reclassification,
}

impl Reclassifier<'_> {
    fn skip(&mut self, why: &'static str) {
        *self.outcome.skipped.entry(why).or_default() += 1;
    }

    fn add(&mut self, row: &HistoryRow, run: RunId, document: &Document) -> Result<(), StoreError> {
        let Self { settings, scope, .. } = *self;
        let Some(evidence) = document.tests.iter().find(|evidence| evidence.test == row.test) else {
            self.skip("no-evidence-of-this-test");
            return Ok(());
        };
        if settings.catalogue.get(&row.test).is_none() {
            self.skip("unknown-check");
            return Ok(());
        }
        let sku = scope.types.get(&row.node);
        let baselines = self.reader.load(BaselineQuery { node: &row.node, sku, evidence, before: row.at })?;
        let profile = settings.profiles.resolve(sku, document.machine.as_ref());
        let classify = |acknowledged: &[AcknowledgedEvents]| {
            let classification = result_validation::classify_evidence(
                ClassifyContext { settings, profile, declared: None, acknowledged },
                evidence,
                &baselines,
                document.uptime,
            );
            (ReclassifiedResult::from_classification(&classification), classification.text)
        };
        let old = ReclassifiedResult { verdict: row.verdict, reason: row.reason.clone(), severity: row.severity };
        let (new, text) = classify(&[]);
        // The time of acknowledgement is not stored, so both are tried: with and without acknowledged events.
        let acknowledged = self.acknowledged.get(&row.node).map_or(&[][..], Vec::as_slice);
        self.outcome.reclassified += 1;
        if old == new || (!acknowledged.is_empty() && old == classify(acknowledged).0) {
            self.outcome.unchanged += 1;
            return Ok(());
        }
        let (node, test, at) = (row.node.clone(), row.test.clone(), row.at);
        self.outcome.changed.push(Difference { node, test, at, run, old, new, text });
        Ok(())
    }
}
