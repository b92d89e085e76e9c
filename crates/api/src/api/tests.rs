//! Tests: the list, and how the measurements of each are distributed over the fleet.
//!
//! Reading the measurements of thousands of nodes takes a while: a first response may be incomplete, and its field
//! `complete` is then false.

use doctor_core::{
    ids::{NodeName, TestId},
    view::{self, Spread},
};
use doctor_store::records::LatestRow;
use serde::Serialize;
use serde_json::{Value, json};

use super::{
    answer::Lasts,
    asked::{Form, Param},
    endpoint::{JSON, Look, Route},
    measurement_cache::OfTest,
    nodes::{POOL, SELECT, wanted},
    refusal::Refusal,
    schema::{count, flag, list, number, object, or_null, span, text},
    status::coverage_row,
};
use crate::response::Made;

pub(super) const TEST: Param = Param::new("test", "a test's name", Form::Name);

pub(super) const LIST: Route = Route {
    path: "/tests",
    name: "tests",
    summary: "All tests",
    about: "What each test shows, how long a result is valid, and how long a run takes.",
    params: &[],
    lasts: Lasts::WithScene,
    answer: || list(test_row()),
    kind: JSON,
    read: list_tests,
};

pub(super) const ONE: Route = Route {
    path: "/tests/{test}",
    name: "test",
    summary: "Distribution of a test's measurements over the fleet",
    about: "For each measurement one value per node: the median over its parts (GPUs, links, …) in the node's newest result. Outliers \
            are more than four times the usual distance from the median. `complete` is false while measurements of some nodes are \
            still being read; repeat the request.",
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
    /// Nodes with a result of this test, and how many measurements were read.
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

fn one_test(look: &Look<'_>) -> Result<Made, Refusal> {
    let test: TestId = look.asked.part("test")?;
    let (figures, progress) = looked_at(look, &test, spreads)?;
    let coverage = view::coverage(&look.scene.facts).into_iter().find(|row| row.test == test);
    let Progress { nodes, read } = progress;
    Made::json(&TestFigures { test, nodes, read, complete: read == nodes, coverage, figures })
}

/// Nodes with a result, and how many measurements were read.
#[derive(Debug, Clone, Copy)]
pub(super) struct Progress {
    pub(super) nodes: usize,
    pub(super) read: usize,
}

/// Calls `make` with the measurements of a test's newest results on the selected nodes, after reading new evidence.
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
    let (made, read) = look.hall.figures.look((&look.store, look.scene), test, &latest, make);
    Ok((made, Progress { nodes: latest.len(), read: read? }))
}

/// Returns how each measurement is distributed over the nodes of these results, by name.
fn spreads(of_test: &OfTest, latest: &[LatestRow]) -> Vec<FigureSpread> {
    let spread = |(place, (name, unit)): (usize, &(String, String))| {
        let values: Vec<(NodeName, f64)> =
            of_test.of_figure(place, latest).map(|(node, value)| (node.clone(), value)).collect();
        Some(FigureSpread { name: name.clone(), unit: unit.clone(), spread: Spread::of(&values)? })
    };
    let mut spreads: Vec<FigureSpread> = of_test.names().iter().enumerate().filter_map(spread).collect();
    spreads.sort_by(|a, b| a.name.cmp(&b.name));
    spreads
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
