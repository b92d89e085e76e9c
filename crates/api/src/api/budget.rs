//! The cost of validation against what it found.

use doctor_core::{time::Span, view};
use serde_json::{Value, json};

use super::{
    answer::Lasts,
    endpoint::{JSON, Look, Route},
    nodes::SINCE,
    refusal::Refusal,
    schema::{count, list, moment, number, object, or_null},
};
use crate::response::Made;

pub(super) const BUDGET: Route = Route {
    path: "/budget",
    name: "budget",
    summary: "Node-hours spent against faults found",
    about: "By day in UTC, for the last 30 days or from `since`, at most 400 days. A fault is a case with findings.",
    params: &[SINCE],
    lasts: Lasts::AMoment,
    answer: schema,
    kind: JSON,
    read,
};

const USUAL: Span = Span::days(30);
const MOST: Span = Span::days(400);

fn read(look: &Look<'_>) -> Result<Made, Refusal> {
    let (facts, store) = (&look.scene.facts, &look.store);
    let now = facts.now;
    let since = look.asked.since("since", facts).unwrap_or_else(|| now.minus(USUAL));
    let since = since.max(now.minus(MOST)).min(now);
    // Daily values start at midnight.
    let from = since.minus(Span::days(1));
    let (spent, cases) = (store.spent_by_day(from)?, store.case_spans(from)?);
    let limit = facts.snapshot.policy.limits.node_hours_per_day;
    Made::json(&view::budget(&spent, &cases, limit, (since, now)))
}

fn schema() -> Value {
    let day = object(json!({ "day": moment(), "node_hours": number(), "faults": count(), "closed": count() }));
    object(json!({
        "since": moment(),
        "until": moment(),
        "node_hours_per_day": or_null(number()),
        "node_hours": number(),
        "faults": count(),
        "node_hours_per_fault": or_null(number()),
        "days": list(day),
    }))
}
