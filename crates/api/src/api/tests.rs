//! Tests: which there are, and how the figures of each are spread over the fleet.
//!
//! Figures are read from the evidence of each node's newest result, which takes a while for thousands of nodes. What was read once
//! is remembered by its run; a first answer may come before all were read, and says so.

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
    view::{self, Spread},
};
use doctor_engine::settings::Settings;
use doctor_store::{Store, StoreError, records::LatestRow};
use serde::Serialize;
use serde_json::{Value, json};

use super::{
    answer::{Lasts, Made},
    asked::{Form, Param},
    nodes::{POOL, SELECT, wanted},
    refusal::Refusal,
    routes::{JSON, Look, Route},
    schema::{count, flag, list, number, object, or_null, span, text},
    status::coverage_row,
};

pub(super) const TEST: Param = Param::new("test", "a test's name", Form::Name);

pub(super) const LIST: Route = Route {
    path: "/tests",
    name: "tests",
    summary: "The tests there are",
    about: "What is tested here, how long a result is good for, and how long a run takes.",
    params: &[],
    lasts: Lasts::WithScene,
    answer: || list(test_row()),
    kind: JSON,
    read: list_tests,
};

pub(super) const ONE: Route = Route {
    path: "/tests/{test}",
    name: "test",
    summary: "How a test's figures are spread over the fleet",
    about: "Of each figure, one value per node: the median over its parts (GPUs, links, …) in the node's newest result. Outliers \
            are named: more than four times the usual distance from the median. `complete` is false while figures of some nodes \
            are still being read; ask again.",
    params: &[TEST, SELECT, POOL],
    lasts: Lasts::AMoment,
    answer: spread_schema,
    kind: JSON,
    read: one_test,
};

#[derive(Debug, Serialize)]
struct TestRow<'a> {
    test: &'a TestId,
    title: &'a str,
    routine: bool,
    together: bool,
    exclusive: bool,
    cutoff: doctor_core::time::Span,
    usual: doctor_core::time::Span,
    limit: doctor_core::time::Span,
}

fn list_tests(look: &Look<'_>) -> Result<Made, Refusal> {
    let catalogue = &look.scene.settings.catalogue;
    let rows = look.scene.facts.snapshot.tests.iter().map(|test| TestRow {
        test: &test.id,
        title: catalogue.get(&test.id).map_or("", |check| check.spec.title),
        routine: test.routine,
        together: test.together,
        exclusive: test.exclusive,
        cutoff: test.cutoff,
        usual: test.usual,
        limit: test.limit,
    });
    Made::json(&rows.collect::<Vec<_>>())
}

#[derive(Debug, Serialize)]
struct TestFigures {
    test: TestId,
    /// Nodes with a result of it, and of how many of them the figures were read.
    nodes: usize,
    read: usize,
    complete: bool,
    coverage: Option<view::CoverageRow>,
    figures: Vec<FigureSpread>,
}

#[derive(Debug, Serialize)]
struct FigureSpread {
    name: String,
    unit: String,
    spread: Spread,
}

/// What is known of the figures of a few tests.
#[derive(Debug, Default)]
pub(super) struct Figures(Mutex<VecDeque<(TestId, OfTest)>>);

/// The median of each figure, of the newest run of each node.
#[derive(Debug, Default)]
pub(super) struct OfTest {
    names: Vec<(String, String)>,
    /// By figure, in the order of `names`; one that the node does not have is not a number.
    nodes: BTreeMap<NodeName, (RunId, Vec<f64>)>,
}

/// Tests whose figures are remembered.
const REMEMBERED: usize = 4;
/// For reading what is new, in one answer.
const PATIENCE: Duration = Duration::from_millis(1500);

fn one_test(look: &Look<'_>) -> Result<Made, Refusal> {
    let test: TestId = look.asked.part("test")?;
    let (figures, progress) = looked_at(look, &test, OfTest::spreads)?;
    let coverage = view::coverage(&look.scene.facts).into_iter().find(|row| row.test == test);
    let Progress { nodes, read } = progress;
    Made::json(&TestFigures { test, nodes, read, complete: read == nodes, coverage, figures })
}

/// Nodes with a result, and of how many of them the figures were read.
#[derive(Debug, Clone, Copy)]
pub(super) struct Progress {
    pub(super) nodes: usize,
    pub(super) read: usize,
}

/// Makes something of the figures of a test's newest results on the nodes that were asked for, after reading what is new.
pub(super) fn looked_at<T>(
    look: &Look<'_>,
    test: &TestId,
    make: impl FnOnce(&OfTest, &[LatestRow]) -> T,
) -> Result<(T, Progress), Refusal> {
    let facts = &look.scene.facts;
    if facts.snapshot.tests.iter().all(|known| known.id != *test) {
        let known = facts.snapshot.tests.iter().map(|test| test.id.as_str()).collect::<Vec<_>>().join(", ");
        return Err(Refusal::Unknown { what: "test", name: test.to_string(), known });
    }
    let is_wanted = wanted(look.asked)?;
    let latest = look.store.latest_of_test(test)?;
    let here = |row: &LatestRow| facts.node(&row.node).is_some_and(|(record, here)| here && is_wanted(record));
    let latest: Vec<LatestRow> = latest.into_iter().filter(here).collect();
    let mut known = look.hall.figures.0.lock().unwrap_or_else(PoisonError::into_inner);
    let mut of_test = match known.iter().position(|(id, _)| id == test) {
        Some(place) => known.remove(place).map(|(_, of)| of).unwrap_or_default(),
        None => OfTest::default(),
    };
    // What is remembered of nodes that are gone would only grow.
    of_test.nodes.retain(|node, _| facts.node(node).is_some_and(|(_, here)| here));
    let read = of_test.read(&look.store, &look.scene.settings, test, &latest);
    let made = make(&of_test, &latest);
    known.push_front((test.clone(), of_test));
    known.truncate(REMEMBERED);
    drop(known);
    Ok((made, Progress { nodes: latest.len(), read: read? }))
}

/// Each figure that a test measured, by name and unit: the median over its parts.
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

impl OfTest {
    /// Reads what is new, for a while. How many of these results are known then.
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
            // What was imported has no evidence, and nothing to read.
            let Some(run) = row.run else {
                known += 1;
                continue;
            };
            if self.nodes.get(&row.node).is_some_and(|(of, _)| *of == run) {
                known += 1;
            } else if began.elapsed() < PATIENCE {
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
        let kept = store.evidence(run, node)?.filter(|kept| !kept.truncated);
        let document = kept.and_then(|kept| Document::open_kept(&kept.bytes).ok());
        let evidence = document.iter().flat_map(|document| &document.tests).find(|evidence| evidence.test == *test);
        let Some(evidence) = evidence else { return Ok(Vec::new()) };
        let mut values = vec![f64::NAN; self.names.len()];
        for (name, value) in medians(settings, evidence) {
            let place = self.names.iter().position(|known| *known == name).unwrap_or_else(|| {
                self.names.push(name);
                values.push(f64::NAN);
                self.names.len() - 1
            });
            values[place] = value;
        }
        Ok(values)
    }

    /// Names and units, as they were met.
    pub(super) fn names(&self) -> &[(String, String)] {
        &self.names
    }

    /// The values of the figure in this place of [`names`](Self::names).
    pub(super) fn of_figure<'a>(
        &'a self,
        place: usize,
        latest: &'a [LatestRow],
    ) -> impl Iterator<Item = (&'a NodeName, f64)> {
        let value = move |row: &'a LatestRow| Some((&row.node, *self.nodes.get(&row.node)?.1.get(place)?));
        latest.iter().filter_map(value)
    }

    fn spreads(&self, latest: &[LatestRow]) -> Vec<FigureSpread> {
        let spread = |(place, (name, unit)): (usize, &(String, String))| {
            let values: Vec<(NodeName, f64)> =
                self.of_figure(place, latest).map(|(node, value)| (node.clone(), value)).collect();
            Some(FigureSpread { name: name.clone(), unit: unit.clone(), spread: Spread::of(&values)? })
        };
        let mut spreads: Vec<FigureSpread> = self.names.iter().enumerate().filter_map(spread).collect();
        spreads.sort_by(|a, b| a.name.cmp(&b.name));
        spreads
    }
}

fn test_row() -> Value {
    object(json!({
        "test": text(), "title": text(), "routine": flag(), "together": flag(), "exclusive": flag(), "cutoff": span(),
        "usual": span(), "limit": span(),
    }))
}

fn spread_schema() -> Value {
    let outlier = object(json!({ "node": text(), "value": number(), "deviations": number() }));
    let spread = object(json!({
        "nodes": count(), "least": number(), "p5": number(), "p25": number(), "median": number(), "p75": number(),
        "p95": number(), "most": number(), "deviation": number(), "bars": list(count()), "outliers": list(outlier),
        "more_outliers": count(),
    }));
    object(json!({
        "test": text(),
        "nodes": count(),
        "read": count(),
        "complete": flag(),
        "coverage": or_null(coverage_row()),
        "figures": list(object(json!({ "name": text(), "unit": text(), "spread": spread }))),
    }))
}
