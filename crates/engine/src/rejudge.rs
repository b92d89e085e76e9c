//! Reclassifies stored evidence with other rules and reports the differences. Nothing is changed.
//!
//! Each result is classified with what was known when it came in, so that a rule about peers or earlier results decides
//! as it would have then.

use std::collections::{BTreeMap, BTreeSet};

use doctor_checks::document::Document;
use doctor_core::{
    classify::{Judgement, Wanted},
    finding::{Severity, Verdict},
    ids::{NodeName, RunId, Sku, TestId},
    observation::Settled,
    reason::ReasonCode,
    time::{Span, Timestamp},
};
use doctor_store::{
    Store, StoreError,
    records::{HistoryFilter, HistoryRow},
};
use serde::Serialize;

use crate::{
    ingest::{self, By},
    past::{Of, PastReader},
    settings::Settings,
};

/// How far before the first result earlier ones are loaded, if rules refer to them.
const FURTHER_BACK: Span = Span::days(30);

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
pub struct Rejudged {
    /// Results that were reclassified.
    pub judged: u64,
    /// Of those, how many keep their verdict, reason and severity.
    pub same: u64,
    /// Newest first.
    pub differs: Vec<Difference>,
    /// Results that could not be reclassified, by reason.
    pub passed_over: BTreeMap<&'static str, u64>,
}

/// One result that would change.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Difference {
    pub node: NodeName,
    pub test: TestId,
    pub at: Timestamp,
    pub run: RunId,
    pub old: Said,
    pub new: Said,
    /// The evidence for the new verdict, for people.
    pub text: String,
}

/// A verdict with its reason and severity.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Said {
    pub verdict: Verdict,
    pub reason: ReasonCode,
    pub severity: Option<Severity>,
}

impl Said {
    fn of(judgement: &Judgement) -> Self {
        let severity = judgement.findings.iter().map(|finding| finding.severity).max();
        Self { verdict: judgement.verdict, reason: judgement.reason.clone(), severity }
    }
}

/// Reclassifies with these settings.
///
/// # Errors
/// If the store cannot be read.
pub fn rejudge(store: &Store, settings: &Settings, scope: &Scope) -> Result<Rejudged, StoreError> {
    let wanted = Wanted::of_all(&settings.rules);
    let back = if wanted.is_nothing() { Span::ZERO } else { FURTHER_BACK };
    let since = Some(scope.since.minus(back));
    let rows = store.history(&HistoryFilter { since, ..HistoryFilter::default() })?;
    let mut of_type: BTreeMap<Sku, Vec<NodeName>> = BTreeMap::new();
    for (node, sku) in &scope.types {
        of_type.entry(sku.clone()).or_default().push(node.clone());
    }
    let reader = PastReader::new(store, settings, of_type).with_history(&rows);
    let settled = store.settled_events()?;
    let mut judge = Judge { settings, scope, reader, settled, rejudged: Rejudged::default() };
    // One document has the results of many tests: rows of one run and node are adjacent.
    let mut open: Option<(RunId, NodeName, Result<Document, &'static str>)> = None;
    let in_scope =
        |row: &&HistoryRow| row.at >= scope.since && scope.nodes.as_ref().is_none_or(|nodes| nodes.contains(&row.node));
    for row in rows.iter().filter(in_scope) {
        let Some(run) = row.run else {
            judge.pass_over("imported");
            continue;
        };
        let known = open.take().filter(|(of, node, _)| *of == run && *node == row.node);
        let (_, _, document) = match known {
            Some(known) => open.insert(known),
            None => open.insert((run, row.node.clone(), kept(store, run, &row.node)?)),
        };
        match document {
            Ok(document) => judge.add(row, run, document)?,
            Err(why) => judge.pass_over(why),
        }
    }
    Ok(judge.rejudged)
}

fn kept(store: &Store, run: RunId, node: &NodeName) -> Result<Result<Document, &'static str>, StoreError> {
    Ok(match store.evidence(run, node)? {
        None => Err("evidence-gone"),
        Some(row) if row.truncated => Err("evidence-cut"),
        Some(row) => Document::open_kept(&row.bytes).map_err(|_| "evidence-unreadable"),
    })
}

/// A reclassification in progress.
struct Judge<'a> {
    settings: &'a Settings,
    scope: &'a Scope,
    reader: PastReader<'a>,
    /// Events that are acknowledged by now.
    settled: BTreeMap<NodeName, Vec<Settled>>,
    rejudged: Rejudged,
}

impl Judge<'_> {
    fn pass_over(&mut self, why: &'static str) {
        *self.rejudged.passed_over.entry(why).or_default() += 1;
    }

    fn add(&mut self, row: &HistoryRow, run: RunId, document: &Document) -> Result<(), StoreError> {
        let Self { settings, scope, .. } = *self;
        let Some(evidence) = document.tests.iter().find(|evidence| evidence.test == row.test) else {
            self.pass_over("no-evidence-of-this-test");
            return Ok(());
        };
        if settings.catalogue.get(&row.test).is_none() {
            self.pass_over("unknown-check");
            return Ok(());
        }
        let sku = scope.types.get(&row.node);
        let past = self.reader.of(Of { node: &row.node, sku, test: &row.test, at: evidence.ended, before: row.at })?;
        let judge = |settled: &[Settled]| {
            let judgement = ingest::judge(By { settings, sku, settled }, evidence, &past, document.up);
            (Said::of(&judgement), judgement.text)
        };
        let old = Said { verdict: row.verdict, reason: row.reason.clone(), severity: row.severity };
        let (new, text) = judge(&[]);
        // The time of acknowledgement is not stored, so both are tried: with and without acknowledged events.
        let settled = self.settled.get(&row.node).map_or(&[][..], Vec::as_slice);
        self.rejudged.judged += 1;
        if old == new || (!settled.is_empty() && old == judge(settled).0) {
            self.rejudged.same += 1;
            return Ok(());
        }
        let (node, test, at) = (row.node.clone(), row.test.clone(), row.at);
        self.rejudged.differs.push(Difference { node, test, at, run, old, new, text });
        Ok(())
    }
}
