//! The status of the cluster, coverage, and the policy in force.

use doctor_core::view;
use doctor_engine::picture;
use serde_json::{Value, json};

use super::{
    answer::Lasts,
    endpoint::{JSON, Look, Route},
    refusal::Refusal,
    schema::{
        breaker_state, count, flag, life, list, mode, moment, number, object, or_null, places, span, text, told_apart,
    },
};
use crate::response::Made;

pub(super) const STATUS: Route = Route {
    path: "/status",
    name: "status",
    summary: "Status of the cluster and of the controller",
    about: "The leader, problems, and coverage. As `doctor status --json`.",
    params: &[],
    lasts: Lasts::AMoment,
    answer: status_schema,
    kind: JSON,
    read: |look| {
        let facts = &look.scene.facts;
        let mut status = view::status(facts, &picture::ledger(&look.store, facts.now)?);
        status.troubles.extend(look.scene.old().map(|age| format!("the displayed cluster state is {age} old")));
        Made::json(&status)
    },
};

pub(super) const COVERAGE: Route = Route {
    path: "/coverage",
    name: "coverage",
    summary: "How much of the cluster each test covers",
    about: "For each regular test, the number of nodes by test status. The numbers add up to `nodes`.",
    params: &[],
    lasts: Lasts::WithScene,
    answer: || list(coverage_row()),
    kind: JSON,
    read: |look| Made::json(&view::coverage(&look.scene.facts)),
};

pub(super) const POLICY: Route = Route {
    path: "/policy",
    name: "policy",
    summary: "The policy in force",
    about: "The leader's policy: limits, periods, the breaker, and what the controller may do without an operator.",
    params: &[],
    lasts: Lasts::WithScene,
    answer: || json!({ "type": "object" }),
    kind: JSON,
    read: read_policy,
};

fn read_policy(look: &Look<'_>) -> Result<Made, Refusal> {
    Made::json(&*look.scene.facts.snapshot.policy)
}

/// Schema of one test's coverage over all nodes.
pub(super) fn coverage_row() -> Value {
    object(json!({
        "test": text(),
        "cutoff": span(),
        "nodes": count(),
        "covered": count(),
        "percent": or_null(number()),
        "pass": count(),
        "fail": count(),
        "inconclusive": count(),
        "stale": count(),
        "never_tested": count(),
        "not_applicable": count(),
    }))
}

fn status_schema() -> Value {
    let leader = told_apart(&[
        ("leads", json!({ "by": text(), "until": moment() })),
        ("lost", json!({ "by": text(), "since": moment() })),
        ("nobody", json!({})),
    ]);
    let cycle = object(json!({
        "at": moment(), "took": or_null(span()), "actions": count(), "submitted": count(), "trouble": or_null(text()),
    }));
    let nodes = object(json!({
        "total": count(), "free": count(), "busy": count(), "unknown": count(), "gone": count(), "overdue": count(),
        "lives": list(places(&[life(), count()], 2)),
    }));
    let running = object(json!({ "planned": count(), "pending": count(), "running": count(), "limit": count() }));
    let breaker = object(json!({
        "state": breaker_state(), "since": or_null(moment()), "why": or_null(text()),
        "taken_out": list(places(&[text(), moment()], 2)), "nodes_per_hour": count(), "percent_of_pool": number(),
    }));
    let pause = object(json!({
        "pool": or_null(text()), "by": text(), "why": text(), "since": moment(), "until": or_null(moment()),
    }));
    let silent = object(json!({ "agents": count(), "silent": list(text()), "incident": flag() }));
    object(json!({
        "at": moment(),
        "mode": mode(),
        "leader": leader,
        "last_cycle": or_null(cycle),
        "seen": or_null(moment()),
        "nodes": nodes,
        "running": running,
        "breaker": breaker,
        "pauses": list(pause),
        "requests": count(),
        "silent": silent,
        "coverage": list(coverage_row()),
        "rejected": count(),
        "spent_today_hours": number(),
        "troubles": list(text()),
    }))
}
