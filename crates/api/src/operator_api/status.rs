//! The status of the cluster, coverage, and the policy in force.

use doctor_core::view::{self, AttentionItem, AttentionKind, OverallState, Urgency};
use doctor_engine::cluster_state;
use serde_json::{Value, json};

use super::{
    endpoint::{JSON, RequestContext, Route},
    error::ApiError,
    response_cache::CachePolicy,
    schema::{
        attention_kind, breaker_state, count, duration, flag, list, mode, node_state, number, object, or_null,
        overall_state, tagged_union, text, timestamp, tuple, urgency,
    },
};
use crate::response::RawBody;

pub(super) const STATUS: Route = Route {
    path: "/status",
    name: "status",
    summary: "Status of the cluster and of the controller",
    description: "What needs an operator, most urgent first, with the command that resolves or explains it; the leader, coverage, and whether the limits can hold the periods. As `doctor status --json`.",
    params: &[],
    cache_policy: CachePolicy::Briefly,
    response_schema: status_schema,
    content_type: JSON,
    handler: |context| {
        let facts = &context.fleet_view.facts;
        let mut status = view::status(facts, &cluster_state::status_ledger(&context.store, facts)?);
        if let Some(age) = context.fleet_view.stale_age() {
            let text = format!("the displayed cluster state is {age} old");
            let item = AttentionItem::new(AttentionKind::StateOld, Urgency::Critical, text);
            status.attention.insert(0, item.since(facts.now).next("doctor status"));
            status.state = OverallState::of(facts, &status.attention);
        }
        RawBody::json(&status)
    },
};

pub(super) const COVERAGE: Route = Route {
    path: "/coverage",
    name: "coverage",
    summary: "How much of the cluster each test covers",
    description: "For each regular test, the number of nodes by test status. The numbers add up to `nodes`.",
    params: &[],
    cache_policy: CachePolicy::UntilStateChanges,
    response_schema: || list(coverage_row()),
    content_type: JSON,
    handler: |context| RawBody::json(&view::coverage(&context.fleet_view.facts)),
};

pub(super) const POLICY: Route = Route {
    path: "/policy",
    name: "policy",
    summary: "The policy in force",
    description: "The leader's policy: limits, periods, the breaker, and what the controller may do without an operator.",
    params: &[],
    cache_policy: CachePolicy::UntilStateChanges,
    response_schema: || json!({ "type": "object" }),
    content_type: JSON,
    handler: read_policy,
};

fn read_policy(context: &RequestContext<'_>) -> Result<RawBody, ApiError> {
    RawBody::json(&*context.fleet_view.facts.snapshot.policy)
}

/// Schema of one test's coverage over all nodes.
pub(super) fn coverage_row() -> Value {
    object(json!({
        "test": text(),
        "suite": or_null(text()),
        "cutoff": duration(),
        "nodes": count(),
        "covered": count(),
        "percent": or_null(number()),
        "pass": count(),
        "fail": count(),
        "inconclusive": count(),
        "stale": count(),
        "never_tested": count(),
        "not_applicable": count(),
        "not_judged": count(),
    }))
}

/// Schema of one thing that needs an operator.
fn attention_item() -> Value {
    object(json!({
        "kind": attention_kind(),
        "urgency": urgency(),
        "nodes": list(text()),
        "since": or_null(timestamp()),
        "text": text(),
        "next": or_null(text()),
        "case": or_null(text()),
    }))
}

fn status_schema() -> Value {
    let leader = tagged_union(&[
        ("leads", json!({ "by": text(), "until": timestamp() })),
        ("lost", json!({ "by": text(), "since": timestamp() })),
        ("no-leader", json!({})),
    ]);
    let cycle = object(json!({
        "at": timestamp(), "duration": or_null(duration()), "actions": count(), "submitted": count(), "problem": or_null(text()),
    }));
    let nodes = object(json!({
        "total": count(), "free": count(), "busy": count(), "unknown": count(), "gone": count(), "overdue": count(),
        "states": list(tuple(&[node_state(), count()], 2)),
    }));
    let running = object(json!({ "planned": count(), "pending": count(), "running": count(), "limit": count() }));
    let breaker = object(json!({
        "state": breaker_state(), "since": or_null(timestamp()), "why": or_null(text()),
        "taken_out": list(tuple(&[text(), timestamp()], 2)), "nodes_per_hour": count(), "percent_of_pool": number(),
    }));
    let pause = object(json!({
        "pool": or_null(text()), "by": text(), "why": text(), "since": timestamp(), "until": or_null(timestamp()),
    }));
    let silent = object(json!({ "agents": count(), "silent": list(text()), "incident": flag() }));
    let pass = object(json!({
        "tests": list(text()), "period": duration(), "duration": duration(), "takes": or_null(duration()),
        "limited_by": text(),
    }));
    let capacity = object(json!({
        "nodes": count(), "jobs": count(), "node_hours_per_day": number(), "passes": list(pass),
        "shortfalls": list(text()),
    }));
    object(json!({
        "at": timestamp(),
        "state": overall_state(),
        "attention": list(attention_item()),
        "backend": or_null(text()),
        "mode": mode(),
        "leader": leader,
        "last_cycle": or_null(cycle),
        "observed_at": or_null(timestamp()),
        "nodes": nodes,
        "running": running,
        "breaker": breaker,
        "pauses": list(pause),
        "commands": count(),
        "silent": silent,
        "coverage": list(coverage_row()),
        "rejected": count(),
        "spent_today_hours": number(),
        "capacity": capacity,
    }))
}
