//! The fleet map: every node in compact form.

use serde_json::{Value, json};

use super::{
    endpoint::{JSON, Route},
    response_cache::CachePolicy,
    schema::{count, list, object, or_null, text, tuple},
};
use crate::response::RawBody;

pub(super) const MAP: Route = Route {
    path: "/map",
    name: "fleetMap",
    summary: "One compact row per node",
    description: "For ten thousand nodes: `columns` names the columns of a row, and a number is an index into the list of that column \
            (`pools`, `racks`, `skus`, `health`, `states`, `occupancies`, `severities`). An entry of `findings` has the indices of \
            a node, of a reason and of a check with an open finding. `validated` is the time since which all applicable \
            tests have results, in minutes since 1970; null: a test has never run. The response does not contain the current \
            time: with If-None-Match it is sent only after a change.",
    params: &[],
    cache_policy: CachePolicy::UntilStateChanges,
    response_schema: schema,
    content_type: JSON,
    handler: |context| RawBody::json(&context.fleet_view.map),
};

fn schema() -> Value {
    let row = tuple(&[text(), or_null(count())], 9);
    object(json!({
        "columns": list(text()),
        "pools": list(text()),
        "racks": list(text()),
        "skus": list(text()),
        "health": list(text()),
        "states": list(text()),
        "occupancies": list(text()),
        "severities": list(text()),
        "reasons": list(text()),
        "checks": list(text()),
        "nodes": list(row),
        "findings": list(tuple(&[count()], 3)),
    }))
}
