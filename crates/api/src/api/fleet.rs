//! The fleet map: every node in compact form.

use serde_json::{Value, json};

use super::{
    answer::Lasts,
    endpoint::{JSON, Route},
    schema::{count, list, object, or_null, places, text},
};
use crate::response::Made;

pub(super) const MAP: Route = Route {
    path: "/map",
    name: "fleetMap",
    summary: "One short row per node",
    about: "Made for ten thousand nodes: `columns` says what stands where in a row, and a number is a place in the list of that \
            column (`pools`, `racks`, `skus`, `health`, `lives`, `uses`, `severities`). `validated` is the moment since which \
            everything that applies has been tested, in minutes since 1970; null: something never was. There is no present \
            moment in it: ask again with If-None-Match, and nothing is sent while nothing changes.",
    params: &[],
    lasts: Lasts::WithScene,
    answer: schema,
    kind: JSON,
    read: |look| Made::json(&look.scene.map),
};

fn schema() -> Value {
    let row = places(&[text(), or_null(count())], 9);
    object(json!({
        "columns": list(text()),
        "pools": list(text()),
        "racks": list(text()),
        "skus": list(text()),
        "health": list(text()),
        "lives": list(text()),
        "uses": list(text()),
        "severities": list(text()),
        "nodes": list(row),
    }))
}
