//! The cost of validation against what it found.

use doctor_core::{time::Span, view};
use serde_json::{Value, json};

use super::{
    endpoint::{JSON, RequestContext, Route},
    error::ApiError,
    nodes::SINCE,
    response_cache::CachePolicy,
    schema::{count, list, number, object, or_null, timestamp},
};
use crate::response::RawBody;

pub(super) const BUDGET: Route = Route {
    path: "/budget",
    name: "budget",
    summary: "Node-hours spent against faults found",
    description: "By day in UTC, for the last 30 days or from `since`, at most 400 days. A fault is a case with findings.",
    params: &[SINCE],
    cache_policy: CachePolicy::Briefly,
    response_schema: schema,
    content_type: JSON,
    handler: read,
};

const DEFAULT_PERIOD: Span = Span::days(30);
const MAX_PERIOD: Span = Span::days(400);

fn read(context: &RequestContext<'_>) -> Result<RawBody, ApiError> {
    let (facts, store) = (&context.fleet_view.facts, &context.store);
    let now = facts.now;
    let since = context.params.since("since", facts).unwrap_or_else(|| now.minus(DEFAULT_PERIOD));
    let since = since.max(now.minus(MAX_PERIOD)).min(now);
    // Daily values start at midnight.
    let from = since.minus(Span::days(1));
    let (spent, cases) = (store.node_time_by_day(from)?, store.case_spans(from)?);
    let limit = facts.snapshot.policy.limits.node_hours_per_day;
    RawBody::json(&view::budget(&spent, &cases, limit, (since, now)))
}

fn schema() -> Value {
    let day = object(json!({ "day": timestamp(), "node_hours": number(), "faults": count(), "closed": count() }));
    object(json!({
        "since": timestamp(),
        "until": timestamp(),
        "node_hours_per_day": or_null(number()),
        "node_hours": number(),
        "faults": count(),
        "node_hours_per_fault": or_null(number()),
        "days": list(day),
    }))
}
