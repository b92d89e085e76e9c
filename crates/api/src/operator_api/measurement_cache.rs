//! Measurement cache: the median of each measurement of a few tests, by node.
//!
//! Measurements are read from the evidence of each node's newest result, which takes a while for thousands of nodes.
//! They are cached by run.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use doctor_checks::document::{Document, TestEvidence};
use doctor_core::{
    classify::median,
    ids::{NodeName, RunId, TestId},
    observation::Observation,
};
use doctor_engine::settings::Settings;
use doctor_store::{Store, StoreError, records::LatestRow};

use super::fleet_view::FleetView;

/// Cached measurements of a few tests.
#[derive(Debug, Default)]
pub(super) struct MeasurementCache(Mutex<VecDeque<(TestId, TestMeasurements)>>);

/// The median of each measurement, of each node's newest run.
#[derive(Debug, Default)]
pub(super) struct TestMeasurements {
    names: Vec<(String, String)>,
    /// In the order of `names`; NaN for one that the node does not have.
    nodes: BTreeMap<NodeName, (RunId, Vec<f64>)>,
}

/// Tests whose measurements are cached.
const MAX_TESTS: usize = 4;
/// Time limit for reading new evidence within one request.
const READ_TIME_LIMIT: Duration = Duration::from_millis(1500);

impl MeasurementCache {
    /// Reads the measurements of results that are not cached yet, for at most [`READ_TIME_LIMIT`], and calls `make` with all
    /// measurements of the test. Returns its value, and the number of results whose measurements are known.
    pub(super) fn with_measurements<T>(
        &self,
        (store, view): (&Store, &FleetView),
        test: &TestId,
        latest: &[LatestRow],
        make: impl FnOnce(&TestMeasurements, &[LatestRow]) -> T,
    ) -> (T, Result<usize, StoreError>) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut measurements = match known.iter().position(|(id, _)| id == test) {
            Some(index) => known.remove(index).map(|(_, measurements)| measurements).unwrap_or_default(),
            None => TestMeasurements::default(),
        };
        // Entries of removed nodes would accumulate.
        measurements.nodes.retain(|node, _| view.facts.node(node).is_some_and(|(_, here)| here));
        let read = measurements.read(store, &view.settings, test, latest);
        let value = make(&measurements, latest);
        known.push_front((test.clone(), measurements));
        known.truncate(MAX_TESTS);
        (value, read)
    }
}

/// Returns each measurement of a test by name and unit: the median over its parts.
pub(super) fn medians(settings: &Settings, evidence: &TestEvidence) -> BTreeMap<(String, String), f64> {
    let mut by_name: BTreeMap<(String, String), Vec<f64>> = BTreeMap::new();
    if let Some(check) = settings.catalogue.get(&evidence.test) {
        let params = settings.catalogue.params(&settings.policy, &evidence.test);
        if let Observation::Measured { metrics, .. } = check.observe(&params, evidence) {
            for metric in metrics {
                by_name.entry((metric.name, metric.unit.to_string())).or_default().push(metric.value);
            }
        }
    }
    by_name.into_iter().filter_map(|(name, all)| Some((name, median(&all)?))).collect()
}

impl TestMeasurements {
    /// Reads new evidence within the time limit. Returns how many of these results are known then.
    fn read(
        &mut self,
        store: &Store,
        settings: &Settings,
        test: &TestId,
        latest: &[LatestRow],
    ) -> Result<usize, StoreError> {
        let began = Instant::now();
        let mut known = 0;
        for row in latest {
            // An imported result has no evidence.
            let Some(run) = row.run else {
                known += 1;
                continue;
            };
            if self.nodes.get(&row.node).is_some_and(|(cached, _)| *cached == run) {
                known += 1;
            } else if began.elapsed() < READ_TIME_LIMIT {
                let values = self.values(store, settings, test, (run, &row.node))?;
                self.nodes.insert(row.node.clone(), (run, values));
                known += 1;
            }
        }
        Ok(known)
    }

    fn values(
        &mut self,
        store: &Store,
        settings: &Settings,
        test: &TestId,
        (run, node): (RunId, &NodeName),
    ) -> Result<Vec<f64>, StoreError> {
        let stored = store.evidence(run, node)?.filter(|stored| !stored.truncated);
        let document = stored.and_then(|stored| Document::parse_stored(&stored.bytes).ok());
        let evidence = document.iter().flat_map(|document| &document.tests).find(|evidence| evidence.test == *test);
        let Some(evidence) = evidence else { return Ok(Vec::new()) };
        let mut values = vec![f64::NAN; self.names.len()];
        for (name, value) in medians(settings, evidence) {
            let index = self.names.iter().position(|known| *known == name).unwrap_or_else(|| {
                self.names.push(name);
                values.push(f64::NAN);
                self.names.len() - 1
            });
            values[index] = value;
        }
        Ok(values)
    }

    /// Returns names and units, in order of appearance.
    pub(super) fn names(&self) -> &[(String, String)] {
        &self.names
    }

    /// Returns the values of the measurement at this index of [`names`](Self::names).
    pub(super) fn by_node<'a>(
        &'a self,
        index: usize,
        latest: &'a [LatestRow],
    ) -> impl Iterator<Item = (&'a NodeName, f64)> {
        let value = move |row: &'a LatestRow| Some((&row.node, *self.nodes.get(&row.node)?.1.get(index)?));
        latest.iter().filter_map(value)
    }
}
