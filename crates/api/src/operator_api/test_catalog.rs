//! Tests: the list, and how the measurements of each are distributed over the fleet.
//!
//! Reading the measurements of thousands of nodes takes a while: a first response may be incomplete, and its field
//! `complete` is then false.

use doctor_core::{
    ids::{NodeName, TestId},
    view::{self, Distribution},
};
use doctor_store::records::LatestRow;
use serde::Serialize;
use serde_json::{Value, json};

use super::{
    endpoint::{JSON, RequestContext, Route},
    error::ApiError,
    measurement_cache::TestMeasurements,
    nodes::{POOL, SELECT, node_filter},
    params::{Param, ParamSyntax},
    response_cache::CachePolicy,
    schema::{count, duration, flag, list, number, object, or_null, text},
    status::coverage_row,
};
use crate::response::RawBody;

pub(super) const TEST: Param = Param::new("test", "a test's name", ParamSyntax::Name);

pub(super) const LIST: Route = Route {
    path: "/tests",
    name: "tests",
    summary: "All tests",
    description: "What each test shows, how long a result is valid, and how long a run takes.",
    params: &[],
    cache_policy: CachePolicy::UntilStateChanges,
    response_schema: || list(test_row()),
    content_type: JSON,
    handler: list_tests,
};

pub(super) const ONE: Route = Route {
    path: "/tests/{test}",
    name: "test",
    summary: "Distribution of a test's measurements over the fleet",
    description: "For each measurement one value per node: the median over its parts (GPUs, links, …) in the node's newest result. Outliers \
            are more than four times the usual distance from the median. `complete` is false while measurements of some nodes are \
            still being read; repeat the request.",
    params: &[TEST, SELECT, POOL],
    cache_policy: CachePolicy::Briefly,
    response_schema: spread_schema,
    content_type: JSON,
    handler: one_test,
};

#[derive(Debug, Serialize)]
struct TestRow<'a> {
    test: &'a TestId,
    title: &'a str,
    routine: bool,
    multi_node: bool,
    exclusive: bool,
    cutoff: doctor_core::time::Span,
    typical_duration: doctor_core::time::Span,
    limit: doctor_core::time::Span,
}

fn list_tests(context: &RequestContext<'_>) -> Result<RawBody, ApiError> {
    let catalogue = &context.fleet_view.settings.catalogue;
    let rows = context.fleet_view.facts.snapshot.tests.iter().map(|test| TestRow {
        test: &test.id,
        title: catalogue.get(&test.id).map_or("", |check| check.spec.title),
        routine: test.routine,
        multi_node: test.multi_node,
        exclusive: test.exclusive,
        cutoff: test.cutoff,
        typical_duration: test.typical_duration,
        limit: test.limit,
    });
    RawBody::json(&rows.collect::<Vec<_>>())
}

#[derive(Debug, Serialize)]
struct TestDistribution {
    test: TestId,
    /// Nodes with a result of this test, and how many measurements were read.
    nodes: usize,
    read: usize,
    complete: bool,
    coverage: Option<view::CoverageRow>,
    measurements: Vec<MeasurementSpread>,
}

#[derive(Debug, Serialize)]
struct MeasurementSpread {
    name: String,
    unit: String,
    distribution: Distribution,
}

fn one_test(context: &RequestContext<'_>) -> Result<RawBody, ApiError> {
    let test: TestId = context.params.path_segment("test")?;
    let (figures, progress) = test_measurements(context, &test, spreads)?;
    let coverage = view::coverage(&context.fleet_view.facts).into_iter().find(|row| row.test == test);
    let Progress { nodes, read } = progress;
    RawBody::json(&TestDistribution { test, nodes, read, complete: read == nodes, coverage, measurements: figures })
}

/// Nodes with a result, and how many measurements were read.
#[derive(Debug, Clone, Copy)]
pub(super) struct Progress {
    pub(super) nodes: usize,
    pub(super) read: usize,
}

/// Calls `make` with the measurements of a test's newest results on the selected nodes, after reading new evidence.
pub(super) fn test_measurements<T>(
    context: &RequestContext<'_>,
    test: &TestId,
    make: impl FnOnce(&TestMeasurements, &[LatestRow]) -> T,
) -> Result<(T, Progress), ApiError> {
    let facts = &context.fleet_view.facts;
    if facts.snapshot.tests.iter().all(|known| known.id != *test) {
        let known = facts.snapshot.tests.iter().map(|test| test.id.as_str()).collect::<Vec<_>>().join(", ");
        return Err(ApiError::UnknownName { what: "test", name: test.to_string(), known });
    }
    let matches_filter = node_filter(context.params)?;
    let latest = context.store.latest_of_test(test)?;
    let in_cluster = |row: &LatestRow| {
        facts.node(&row.node).is_some_and(|(record, in_cluster)| in_cluster && matches_filter(record))
    };
    let latest: Vec<LatestRow> = latest.into_iter().filter(in_cluster).collect();
    let (value, read) =
        context.state.measurement_cache.with_measurements((&context.store, context.fleet_view), test, &latest, make);
    Ok((value, Progress { nodes: latest.len(), read: read? }))
}

/// Returns how each measurement is distributed over the nodes of these results, by name.
fn spreads(measurements: &TestMeasurements, latest: &[LatestRow]) -> Vec<MeasurementSpread> {
    let spread = |(index, (name, unit)): (usize, &(String, String))| {
        let values: Vec<(NodeName, f64)> =
            measurements.by_node(index, latest).map(|(node, value)| (node.clone(), value)).collect();
        Some(MeasurementSpread { name: name.clone(), unit: unit.clone(), distribution: Distribution::of(&values)? })
    };
    let mut spreads: Vec<MeasurementSpread> = measurements.names().iter().enumerate().filter_map(spread).collect();
    spreads.sort_by(|a, b| a.name.cmp(&b.name));
    spreads
}

fn test_row() -> Value {
    object(json!({
        "test": text(), "title": text(), "routine": flag(), "multi_node": flag(), "exclusive": flag(), "cutoff": duration(),
        "typical_duration": duration(), "limit": duration(),
    }))
}

fn spread_schema() -> Value {
    let outlier = object(json!({ "node": text(), "value": number(), "deviations": number() }));
    let spread = object(json!({
        "nodes": count(), "min": number(), "p5": number(), "p25": number(), "median": number(), "p75": number(),
        "p95": number(), "max": number(), "deviation": number(), "bars": list(count()), "outliers": list(outlier),
        "more_outliers": count(),
    }));
    object(json!({
        "test": text(),
        "nodes": count(),
        "read": count(),
        "complete": flag(),
        "coverage": or_null(coverage_row()),
        "measurements": list(object(json!({ "name": text(), "unit": text(), "distribution": spread }))),
    }))
}
