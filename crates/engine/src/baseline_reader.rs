//! Baselines for classification: a node's own earlier results, the newest results of other nodes of its type, and the
//! counts that the node and its peers are known to have.
//!
//! Results are read from stored evidence, and only if a rule in force refers to them. Values are cached, so that a
//! hundred results in one cycle load their peers once. Evidence that was deleted or truncated, or is of a check that
//! reads other probes today, counts as unknown; nothing is guessed in its place. Counts: see [`crate::expectations`].

use std::collections::BTreeMap;

use doctor_checks::document::{Document, TestEvidence};
use doctor_core::{
    classify::{BaselineNeeds, Baselines, median},
    ids::{NodeName, RunId, Sku, TestId},
    observation::{Metric, Observation},
    time::Timestamp,
};
use doctor_store::{
    Lease, Store, StoreError,
    records::{HistoryFilter, HistoryRow, LatestRow},
};

use crate::{
    expectations::{ClusterTypes, ExpectationReader, Expectations, NodesBySku, PeerAgreements},
    settings::Settings,
};

/// By node: when results came in, with the run of each conclusive one; newest first.
type Results = BTreeMap<NodeName, Vec<(Timestamp, Option<RunId>)>>;

/// Metrics of one result; none if it can no longer be read.
type Values = Vec<Metric>;

/// Loads the baselines that rules refer to.
#[derive(Debug)]
pub struct BaselineReader<'a> {
    store: &'a Store,
    settings: &'a Settings,
    types: ClusterTypes<'a>,
    expectations: ExpectationReader<'a>,
    /// Counts in the results since the last call of [`Self::take_counts`].
    measured: Vec<(String, f64)>,
    /// By test and node: results, newest first. If it is given, the store's history is not queried.
    history: Option<BTreeMap<TestId, Results>>,
    latest: Option<Vec<LatestRow>>,
    cache: BTreeMap<(RunId, NodeName, TestId), Values>,
}

/// Identifies the result that is classified.
#[derive(Debug, Clone, Copy)]
pub struct BaselineQuery<'a> {
    pub node: &'a NodeName,
    /// The machine type: as the cluster declares it, or as it was detected.
    pub sku: Option<&'a Sku>,
    pub evidence: &'a TestEvidence,
    /// Only results from before this moment count: reclassifying a result uses what was known then.
    pub before: Timestamp,
}

impl<'a> BaselineReader<'a> {
    /// `nodes_by_sku` lists the nodes of each machine type, sorted by name; it is called when first needed.
    pub fn new(
        store: &'a Store,
        settings: &'a Settings,
        agreements: &'a mut PeerAgreements,
        nodes_by_sku: impl Fn() -> NodesBySku + 'a,
    ) -> Self {
        Self {
            store,
            settings,
            types: ClusterTypes::new(nodes_by_sku),
            expectations: ExpectationReader::new(store, agreements, settings.policy.repair.watch),
            measured: Vec::new(),
            history: None,
            latest: None,
            cache: BTreeMap::new(),
        }
    }

    /// Announces the nodes whose results are about to be classified, so that one query loads their counts.
    pub fn announce(&mut self, nodes: impl IntoIterator<Item = NodeName>) {
        self.expectations.announce(nodes);
    }

    /// Returns the counts in the results that were classified since the last call.
    pub fn take_counts(&mut self) -> Vec<(String, f64)> {
        std::mem::take(&mut self.measured)
    }

    /// Adds the counts of a result that is now stored. A rejected or repeated one changes nothing.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub fn add_counts(&mut self, node: &NodeName, counts: &[(String, f64)], now: Timestamp) -> Result<(), StoreError> {
        self.expectations.add(node, counts, now)
    }

    /// Writes the counts that have changed.
    ///
    /// # Errors
    /// If the store cannot be written.
    pub fn write_counts(&mut self, lease: &Lease, now: Timestamp) -> Result<(), StoreError> {
        self.expectations.write_changes(lease, now)
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
        let mut baselines = self.load_expectations(query)?;
        let needs = BaselineNeeds::for_check(&self.settings.rules, &query.evidence.test);
        if needs.own_results > 0 {
            self.add_own(&mut baselines, query, needs.own_results)?;
        }
        if let (false, Some(sku)) = (needs.peer_metrics.is_empty(), query.sku) {
            self.add_peers(&mut baselines, query, sku, &needs)?;
        }
        Ok(baselines)
    }

    /// Returns the time of a result and the counts that are expected in it, without earlier results: those of agents'
    /// reports are not stored. The counts are those known now, whatever `query.before` is: earlier ones are not stored.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub fn load_expectations(&mut self, query: BaselineQuery<'_>) -> Result<Baselines, StoreError> {
        let measured = self.counts_in(query.evidence);
        let Expectations { agreed, accepted } =
            self.expectations.expectations_for(query.node, query.sku, &self.types, &measured, query.before)?;
        // Old results are only classified again; their counts are known.
        if self.history.is_none() {
            self.measured.extend(measured);
        }
        Ok(Baselines { agreed, accepted, ..Baselines::at(query.evidence.ended) })
    }

    /// Returns the counts in a result, if its check has rules about counts.
    fn counts_in(&self, evidence: &TestEvidence) -> Vec<(String, f64)> {
        let rules = self.settings.rules_of(&evidence.test);
        if !BaselineNeeds::for_check(rules, &evidence.test).counts {
            return Vec::new();
        }
        let Some(observation) = observe(self.settings, evidence) else { return Vec::new() };
        Baselines::counts_in(rules, &evidence.test, &observation)
    }

    fn add_own(&mut self, baselines: &mut Baselines, query: BaselineQuery<'_>, most: u32) -> Result<(), StoreError> {
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        let runs: Vec<RunId> = match &self.history {
            Some(history) => {
                let results = history
                    .get(&query.evidence.test)
                    .and_then(|nodes| nodes.get(query.node))
                    .map_or(&[][..], Vec::as_slice);
                let before = results.iter().filter(|(at, _)| *at < query.before).take(search_depth(most));
                before.filter_map(|(_, run)| *run).take(most).collect()
            }
            None => self.own_runs(query, most)?,
        };
        for run in runs {
            for metric in self.values(run, query.node, &query.evidence.test)? {
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
                let nodes = history
                    .get(&query.evidence.test)
                    .into_iter()
                    .flatten()
                    .filter(|(node, _)| self.is_peer(query, sku, node));
                nodes.filter_map(|(node, results)| Some((before(results)?, node.clone()))).collect()
            }
            None => self.newest_of_peers(query, sku)?,
        };
        for (run, node) in newest {
            let metrics = self.values(run, &node, &query.evidence.test)?;
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
        let (node, test) = (Some(query.node.clone()), Some(query.evidence.test.clone()));
        let filter = HistoryFilter { node, test, limit: Some(limit), ..HistoryFilter::default() };
        let rows = self.store.history(&filter)?;
        let conclusive = rows.iter().filter(|row| row.at < query.before && row.verdict.is_conclusive());
        Ok(conclusive.filter_map(|row| row.run).take(most).collect())
    }

    fn newest_of_peers(&mut self, query: BaselineQuery<'_>, sku: &Sku) -> Result<Vec<(RunId, NodeName)>, StoreError> {
        if self.latest.is_none() {
            self.latest = Some(self.store.latest_all()?);
        }
        let rows = self.latest.iter().flatten().filter(|row| row.test == query.evidence.test && row.at < query.before);
        let peers = rows.filter(|row| row.verdict.is_conclusive() && self.is_peer(query, sku, &row.node));
        Ok(peers.filter_map(|row| Some((row.run?, row.node.clone()))).collect())
    }

    fn is_peer(&self, query: BaselineQuery<'_>, sku: &Sku, node: &NodeName) -> bool {
        node != query.node && self.types.nodes_by_sku().get(sku).is_some_and(|nodes| nodes.binary_search(node).is_ok())
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
    observe(settings, evidence).map_or_else(Vec::new, Observation::into_undisturbed_metrics)
}

/// Returns `None` for a check that this controller does not have.
fn observe(settings: &Settings, evidence: &TestEvidence) -> Option<Observation> {
    let check = settings.catalogue.get(&evidence.test)?;
    let params = settings.catalogue.params(&settings.policy, &evidence.test);
    Some(check.observe(&params, evidence))
}
