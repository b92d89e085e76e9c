//! What judging may know of the past: a node's own earlier results, and the newest ones of others of its type.
//!
//! Both are read from the evidence that is kept, and only where a rule in force asks for them. What was read once is
//! remembered, so that a hundred results of one cycle ask for their peers once. Evidence that is gone, cut, or of a
//! check that reads other probes today is not known; nothing is guessed in its place.

use std::collections::BTreeMap;

use doctor_checks::document::{Document, TestEvidence};
use doctor_core::{
    classify::{Past, Wanted, median},
    finding::Verdict,
    ids::{NodeName, RunId, Sku, TestId},
    observation::{Metric, Observation},
    time::Timestamp,
};

use crate::{
    settings::Settings,
    store::{
        Store, StoreError,
        records::{HistoryFilter, LatestRow},
    },
};

/// Metrics of one result; none if it cannot be read any more.
type Values = Vec<Metric>;

/// Reads the past where rules ask for it.
#[derive(Debug)]
pub struct PastReader<'a> {
    store: &'a Store,
    settings: &'a Settings,
    /// Other nodes by their type, as the cluster has them now.
    of_type: BTreeMap<Sku, Vec<NodeName>>,
    latest: Option<Vec<LatestRow>>,
    read: BTreeMap<(RunId, NodeName, TestId), Values>,
}

/// Whose result is judged.
#[derive(Debug, Clone, Copy)]
pub struct Of<'a> {
    pub node: &'a NodeName,
    pub sku: Option<&'a Sku>,
    pub test: &'a TestId,
    /// By the node's clock.
    pub at: Timestamp,
    /// Only what came in before this: a result that is judged again knows no more than it did then.
    pub before: Timestamp,
}

impl<'a> PastReader<'a> {
    pub fn new(store: &'a Store, settings: &'a Settings, of_type: BTreeMap<Sku, Vec<NodeName>>) -> Self {
        Self { store, settings, of_type, latest: None, read: BTreeMap::new() }
    }

    /// All that the rules want to know for this result.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub fn of(&mut self, of: Of<'_>) -> Result<Past, StoreError> {
        let mut past = Past::at(of.at);
        let wanted = Wanted::of(&self.settings.rules, of.test);
        if wanted.own > 0 {
            self.add_own(&mut past, of, wanted.own)?;
        }
        if let (false, Some(sku)) = (wanted.peers.is_empty(), of.sku) {
            self.add_peers(&mut past, of, sku, &wanted)?;
        }
        Ok(past)
    }

    fn add_own(&mut self, past: &mut Past, of: Of<'_>, most: u32) -> Result<(), StoreError> {
        // Some of them say nothing, so a few more are looked at.
        let filter = HistoryFilter {
            node: Some(of.node.clone()),
            test: Some(of.test.clone()),
            limit: Some(most.saturating_mul(2)),
            ..HistoryFilter::default()
        };
        let rows = self.store.history(&filter)?;
        let runs =
            rows.iter().filter(|row| row.at < of.before && row.verdict.is_conclusive()).filter_map(|row| row.run);
        let runs: Vec<RunId> = runs.take(usize::try_from(most).unwrap_or(usize::MAX)).collect();
        for run in runs {
            for metric in self.values(run, of.node, of.test)? {
                past.own.entry((metric.name, metric.entity)).or_default().push(metric.value);
            }
        }
        Ok(())
    }

    fn add_peers(&mut self, past: &mut Past, of: Of<'_>, sku: &Sku, wanted: &Wanted) -> Result<(), StoreError> {
        if self.latest.is_none() {
            self.latest = Some(self.store.latest_all()?);
        }
        let others = self.of_type.get(sku).map_or(&[][..], Vec::as_slice);
        let newest: Vec<(RunId, NodeName)> = self
            .latest
            .iter()
            .flatten()
            .filter(|row| row.test == *of.test && row.node != *of.node && row.at < of.before)
            .filter(|row| {
                matches!(row.verdict, Verdict::Pass | Verdict::Fail) && others.binary_search(&row.node).is_ok()
            })
            .filter_map(|row| Some((row.run?, row.node.clone())))
            .collect();
        for (run, node) in newest {
            let metrics = self.values(run, &node, of.test)?;
            for name in &wanted.peers {
                let values: Vec<f64> =
                    metrics.iter().filter(|metric| metric.name == *name).map(|metric| metric.value).collect();
                if let Some(value) = median(&values) {
                    past.peers.entry(name.clone()).or_default().push(value);
                }
            }
        }
        Ok(())
    }

    fn values(&mut self, run: RunId, node: &NodeName, test: &TestId) -> Result<Values, StoreError> {
        let key = (run, node.clone(), test.clone());
        if let Some(known) = self.read.get(&key) {
            return Ok(known.clone());
        }
        let kept = self.store.evidence(run, node)?.filter(|row| !row.truncated);
        let document = kept.and_then(|row| Document::open_kept(&row.bytes).ok());
        let evidence = document.iter().flat_map(|document| &document.tests).find(|evidence| evidence.test == *test);
        let values = evidence.map_or_else(Vec::new, |evidence| metrics(self.settings, evidence));
        self.read.insert(key, values.clone());
        Ok(values)
    }
}

fn metrics(settings: &Settings, evidence: &TestEvidence) -> Values {
    let Some(check) = settings.catalogue.get(&evidence.test) else { return Vec::new() };
    let params = settings.catalogue.params(&settings.policy, &evidence.test);
    match check.observe(&params, evidence) {
        Observation::Measured { metrics, .. } => metrics,
        Observation::NotApplicable(_) | Observation::CouldNot(_) => Vec::new(),
    }
}
