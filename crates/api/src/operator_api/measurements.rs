//! Measurements of tests: one on every node, to colour the map, and all of one node over time.

use std::collections::{BTreeMap, BTreeSet};

use doctor_checks::document::Document;
use doctor_core::{
    ids::{NodeName, RunId, TestId},
    time::Timestamp,
};
use doctor_store::records::HistoryFilter;
use serde::Serialize;
use serde_json::{Value, json};

use super::{
    endpoint::{JSON, RequestContext, Route},
    error::ApiError,
    measurement_cache::medians,
    nodes::{NODE, POOL, SELECT, unknown_node},
    params::{Param, ParamSyntax},
    response_cache::CachePolicy,
    schema::{count, flag, list, number, object, or_null, text, timestamp},
    test_catalog::{Progress, TEST, test_measurements},
};
use crate::response::RawBody;

pub(super) const TEST_VALUES: Route = Route {
    path: "/tests/{test}/values",
    name: "testValues",
    summary: "One measurement of a test on every node",
    description: "The median over its parts (GPUs, links, …) in each node's newest result. `complete` is false while measurements of some \
            nodes are still being read; repeat the request.",
    params: &[
        TEST,
        Param::new("metric", "the measurement's name; default: the first one", ParamSyntax::Text),
        SELECT,
        POOL,
    ],
    cache_policy: CachePolicy::Briefly,
    response_schema: values_schema,
    content_type: JSON,
    handler: measurement_values,
};

pub(super) const NODE_MEASUREMENTS: Route = Route {
    path: "/nodes/{node}/measurements",
    name: "nodeMeasurements",
    summary: "Measurements of a node's tests, oldest first",
    description: "For each measurement of each test, the median over its parts in each of the node's latest results with stored evidence, \
            of at most 50 runs.",
    params: &[NODE],
    cache_policy: CachePolicy::Briefly,
    response_schema: history_schema,
    content_type: JSON,
    handler: node_measurements,
};

#[derive(Debug, Serialize)]
struct MeasurementValues {
    test: TestId,
    metric: Option<String>,
    unit: Option<String>,
    nodes: usize,
    read: usize,
    complete: bool,
    values: BTreeMap<NodeName, f64>,
}

fn measurement_values(context: &RequestContext<'_>) -> Result<RawBody, ApiError> {
    let test: TestId = context.params.path_segment("test")?;
    let requested = context.params.text("metric");
    let (found, Progress { nodes, read }) = test_measurements(context, &test, |measurements, latest| {
        let names = measurements.names();
        let index = match requested {
            Some(name) => names.iter().position(|(known, _)| known == name),
            None => (!names.is_empty()).then_some(0),
        };
        let known = || names.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ");
        match (index, requested) {
            (Some(index), _) => {
                let finite = measurements.by_node(index, latest).filter(|(_, value)| value.is_finite());
                Ok(Some((names[index].clone(), finite.map(|(node, value)| (node.clone(), value)).collect())))
            }
            (None, Some(name)) => {
                Err(ApiError::UnknownName { what: "measurement", name: name.to_owned(), known: known() })
            }
            (None, None) => Ok(None),
        }
    })?;
    let (name, values) = found?.unzip();
    let (figure, unit) = name.unzip();
    let values = values.unwrap_or_default();
    RawBody::json(&MeasurementValues { test, metric: figure, unit, nodes, read, complete: read == nodes, values })
}

#[derive(Debug, Serialize)]
struct TestHistory {
    test: TestId,
    measurements: Vec<MeasurementHistory>,
}

#[derive(Debug, Serialize)]
struct MeasurementHistory {
    name: String,
    unit: String,
    values: Vec<PastMeasurement>,
}

#[derive(Debug, Serialize)]
struct PastMeasurement {
    at: Timestamp,
    run: RunId,
    value: f64,
}

fn node_measurements(context: &RequestContext<'_>) -> Result<RawBody, ApiError> {
    /// Limited, because each document is decompressed.
    const RUNS: usize = 50;
    const RESULTS: u32 = 500;
    let node: NodeName = context.params.path_segment("node")?;
    let (facts, store) = (&context.fleet_view.facts, &context.store);
    facts.node(&node).ok_or_else(|| unknown_node(&node))?;
    let filter = HistoryFilter { node: Some(node.clone()), limit: Some(RESULTS), ..HistoryFilter::default() };
    let runs: BTreeSet<(Timestamp, RunId)> =
        store.history(&filter)?.into_iter().filter_map(|row| Some((row.at, row.run?))).collect();
    let mut seen = BTreeSet::new();
    let newest: Vec<(Timestamp, RunId)> =
        runs.into_iter().rev().filter(|(_, run)| seen.insert(*run)).take(RUNS).collect();
    let mut tests: BTreeMap<TestId, BTreeMap<(String, String), Vec<PastMeasurement>>> = BTreeMap::new();
    for (at, run) in newest.into_iter().rev() {
        let stored = store.evidence(run, &node)?.filter(|stored| !stored.truncated);
        let Some(document) = stored.and_then(|stored| Document::parse_stored(&stored.bytes).ok()) else { continue };
        for evidence in &document.tests {
            let figures = tests.entry(evidence.test.clone()).or_default();
            for (name, value) in medians(&context.fleet_view.settings, evidence) {
                if value.is_finite() {
                    figures.entry(name).or_default().push(PastMeasurement { at, run, value });
                }
            }
        }
    }
    let figure = |((name, unit), values)| MeasurementHistory { name, unit, values };
    let rows = tests
        .into_iter()
        .filter(|(_, figures)| !figures.is_empty())
        .map(|(test, figures)| TestHistory { test, measurements: figures.into_iter().map(figure).collect() });
    RawBody::json(&rows.collect::<Vec<_>>())
}

fn values_schema() -> Value {
    object(json!({
        "test": text(), "metric": or_null(text()), "unit": or_null(text()), "nodes": count(), "read": count(),
        "complete": flag(), "values": { "type": "object", "additionalProperties": number() },
    }))
}

fn history_schema() -> Value {
    let value = object(json!({ "at": timestamp(), "run": text(), "value": number() }));
    let figure = object(json!({ "name": text(), "unit": text(), "values": list(value) }));
    list(object(json!({ "test": text(), "measurements": list(figure) })))
}
