//! Baselines for classification: a node's own earlier results, and the newest results of other nodes of its type.
//!
//! Both are read from stored evidence, and only if a rule in force refers to them. Values are cached, so that a hundred
//! results in one cycle load their peers once. Evidence that was deleted or truncated, or is of a check that reads
//! other probes today, counts as unknown; nothing is guessed in its place.

use std::collections::BTreeMap;

use doctor_checks::document::{Document, TestEvidence};
use doctor_core::{
    classify::{BaselineNeeds, Baselines, median},
    ids::{NodeName, RunId, Sku, TestId},
    observation::{Metric, Observation},
    time::Timestamp,
};
use doctor_store::{
    Store, StoreError,
    records::{HistoryFilter, HistoryRow, LatestRow},
};

use crate::settings::Settings;

/// By node: when results came in, with the run of each conclusive one; newest first.
type Results = BTreeMap<NodeName, Vec<(Timestamp, Option<RunId>)>>;

/// Metrics of one result; none if it can no longer be read.
type Values = Vec<Metric>;

/// Loads the baselines that rules refer to.
#[derive(Debug)]
pub struct BaselineReader<'a> {
    store: &'a Store,
    settings: &'a Settings,
    /// Nodes by type, as the cluster has them now.
    nodes_by_sku: BTreeMap<Sku, Vec<NodeName>>,
    /// By test and node: results, newest first. If it is given, the store's history is not queried.
    history: Option<BTreeMap<TestId, Results>>,
    latest: Option<Vec<LatestRow>>,
    cache: BTreeMap<(RunId, NodeName, TestId), Values>,
}

/// Identifies the result that is classified.
#[derive(Debug, Clone, Copy)]
pub struct BaselineQuery<'a> {
    pub node: &'a NodeName,
    pub sku: Option<&'a Sku>,
    pub test: &'a TestId,
    /// By the node's clock.
    pub at: Timestamp,
    /// Only results from before this moment count: reclassifying a result uses what was known then.
    pub before: Timestamp,
}

impl<'a> BaselineReader<'a> {
    /// `nodes_by_sku` lists the nodes of each type, sorted by name.
    pub fn new(store: &'a Store, settings: &'a Settings, nodes_by_sku: BTreeMap<Sku, Vec<NodeName>>) -> Self {
        Self { store, settings, nodes_by_sku, history: None, latest: None, cache: BTreeMap::new() }
    }

    /// Uses results that were already loaded: an old result must be compared with results of its time.
    #[must_use]
    pub fn with_history(mut self, rows: &[HistoryRow]) -> Self {
        let mut history: BTreeMap<TestId, Results> = BTreeMap::new();
        for row in rows {
            let results = history.entry(row.test.clone()).or_default().entry(row.node.clone()).or_default();
            results.push((row.at, row.run.filter(|_| row.verdict.is_conclusive())));
        }
        for results in history.values_mut().flat_map(BTreeMap::values_mut) {
            results.sort_unstable_by(|a, b| b.cmp(a));
        }
        self.history = Some(history);
        self
    }

    /// Returns all baselines that the rules need for this result.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub fn load(&mut self, query: BaselineQuery<'_>) -> Result<Baselines, StoreError> {
        let mut baselines = Baselines::at(query.at);
        let needs = BaselineNeeds::for_check(&self.settings.rules, query.test);
        if needs.own_results > 0 {
            self.add_own(&mut baselines, query, needs.own_results)?;
        }
        if let (false, Some(sku)) = (needs.peer_metrics.is_empty(), query.sku) {
            self.add_peers(&mut baselines, query, sku, &needs)?;
        }
        Ok(baselines)
    }

    fn add_own(&mut self, baselines: &mut Baselines, query: BaselineQuery<'_>, most: u32) -> Result<(), StoreError> {
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        let runs: Vec<RunId> = match &self.history {
            Some(history) => {
                let results =
                    history.get(query.test).and_then(|nodes| nodes.get(query.node)).map_or(&[][..], Vec::as_slice);
                let before = results.iter().filter(|(at, _)| *at < query.before).take(search_depth(most));
                before.filter_map(|(_, run)| *run).take(most).collect()
            }
            None => self.own_runs(query, most)?,
        };
        for run in runs {
            for metric in self.values(run, query.node, query.test)? {
                baselines.own_values.entry((metric.name, metric.entity)).or_default().push(metric.value);
            }
        }
        Ok(())
    }

    fn add_peers(
        &mut self,
        baselines: &mut Baselines,
        query: BaselineQuery<'_>,
        sku: &Sku,
        needs: &BaselineNeeds,
    ) -> Result<(), StoreError> {
        let newest = match &self.history {
            Some(history) => {
                let before =
                    |results: &[(Timestamp, Option<RunId>)]| results.iter().find(|(at, _)| *at < query.before)?.1;
                let nodes =
                    history.get(query.test).into_iter().flatten().filter(|(node, _)| self.is_peer(query, sku, node));
                nodes.filter_map(|(node, results)| Some((before(results)?, node.clone()))).collect()
            }
            None => self.newest_of_peers(query, sku)?,
        };
        for (run, node) in newest {
            let metrics = self.values(run, &node, query.test)?;
            for name in &needs.peer_metrics {
                let values: Vec<f64> =
                    metrics.iter().filter(|metric| metric.name == *name).map(|metric| metric.value).collect();
                if let Some(value) = median(&values) {
                    baselines.peer_values.entry(name.clone()).or_default().push(value);
                }
            }
        }
        Ok(())
    }

    fn own_runs(&self, query: BaselineQuery<'_>, most: usize) -> Result<Vec<RunId>, StoreError> {
        let limit = u32::try_from(search_depth(most)).unwrap_or(u32::MAX);
        let (node, test) = (Some(query.node.clone()), Some(query.test.clone()));
        let filter = HistoryFilter { node, test, limit: Some(limit), ..HistoryFilter::default() };
        let rows = self.store.history(&filter)?;
        let conclusive = rows.iter().filter(|row| row.at < query.before && row.verdict.is_conclusive());
        Ok(conclusive.filter_map(|row| row.run).take(most).collect())
    }

    fn newest_of_peers(&mut self, query: BaselineQuery<'_>, sku: &Sku) -> Result<Vec<(RunId, NodeName)>, StoreError> {
        if self.latest.is_none() {
            self.latest = Some(self.store.latest_all()?);
        }
        let rows = self.latest.iter().flatten().filter(|row| row.test == *query.test && row.at < query.before);
        let peers = rows.filter(|row| row.verdict.is_conclusive() && self.is_peer(query, sku, &row.node));
        Ok(peers.filter_map(|row| Some((row.run?, row.node.clone()))).collect())
    }

    fn is_peer(&self, query: BaselineQuery<'_>, sku: &Sku, node: &NodeName) -> bool {
        node != query.node && self.nodes_by_sku.get(sku).is_some_and(|nodes| nodes.binary_search(node).is_ok())
    }

    fn values(&mut self, run: RunId, node: &NodeName, test: &TestId) -> Result<Values, StoreError> {
        let key = (run, node.clone(), test.clone());
        if let Some(known) = self.cache.get(&key) {
            return Ok(known.clone());
        }
        let stored = self.store.evidence(run, node)?.filter(|row| !row.truncated);
        let document = stored.and_then(|row| Document::parse_stored(&row.bytes).ok());
        let evidence = document.iter().flat_map(|document| &document.tests).find(|evidence| evidence.test == *test);
        let values = evidence.map_or_else(Vec::new, |evidence| metrics(self.settings, evidence));
        self.cache.insert(key, values.clone());
        Ok(values)
    }
}

/// Some results are inconclusive, so twice as many are examined.
const fn search_depth(most: usize) -> usize {
    most.saturating_mul(2)
}

fn metrics(settings: &Settings, evidence: &TestEvidence) -> Values {
    let Some(check) = settings.catalogue.get(&evidence.test) else { return Vec::new() };
    let params = settings.catalogue.params(&settings.policy, &evidence.test);
    match check.observe(&params, evidence) {
        Observation::Measured { metrics, .. } => metrics,
        Observation::NotApplicable(_) | Observation::Failed(_) => Vec::new(),
    }
}
