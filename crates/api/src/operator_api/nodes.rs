//! Nodes: the list, the details of one, and its timeline.

use std::collections::BTreeSet;

use doctor_checks::document::Document;
use doctor_core::{
    hostlist::NODE_STATES,
    ids::{NodeName, PoolName, RunId},
    node_status::{NodeHealth, NodeStatus},
    snapshot::NodeRecord,
    view::{self, BootFacts, NodeRow, ResultFacts},
};
use doctor_engine::{
    agents::{AgentBrief, AgentState},
    cluster_state,
};
use doctor_store::{Store, StoreError, records::HistoryFilter};
use serde::Serialize;
use serde_json::{Value, json};

use super::{
    action_request::{MAX_NODE_NAMES, parse_selector},
    endpoint::{JSON, Page, RequestContext, Route},
    error::ApiError,
    params::{Param, ParamSyntax, RequestParams},
    response_cache::CachePolicy,
    schema::{
        advice, any_value, count, duration, flag, list, merged, node_state, object, occupancy, one_of, or_null, page,
        remedy, repair_step, severity, step_kind, step_state, tagged_union, test_status, text, timestamp, tuple,
        verdict,
    },
};
use crate::response::RawBody;

/// Node selector, which other lists share.
pub(super) const SELECT: Param =
    Param::new("select", "nodes: node[01-64], pool=NAME, state=STATE, or a name with `*`", ParamSyntax::Text);
pub(super) const POOL: Param = Param::new("pool", "only this pool", ParamSyntax::Name);
pub(super) const STATE: Param = Param::new("state", "only nodes in this state", ParamSyntax::OneOf(&NODE_STATES));
const HEALTH: Param =
    Param::new("health", "only nodes with this health", ParamSyntax::OneOf(&["pass", "fail", "unknown"]));
pub(super) const LIMIT: Param =
    Param::new("limit", "maximum number of rows", ParamSyntax::Count { most: 500, usual: 100 });
pub(super) const CURSOR: Param = Param::new("cursor", "`next` of the previous page", ParamSyntax::Text);
pub(super) const NODE: Param = Param::new("node", "a node's name", ParamSyntax::Name);
pub(super) const SINCE: Param =
    Param::new("since", "only since then: a duration such as 7d, or a time", ParamSyntax::PastTime);

pub(super) const LIST: Route = Route {
    path: "/nodes",
    name: "nodes",
    summary: "Nodes by name",
    description: "Use, state and the last result of each test. Rows as in `doctor nodes --json`, with a summary of the agent.",
    params: &[SELECT, POOL, STATE, HEALTH, LIMIT, CURSOR],
    cache_policy: CachePolicy::UntilStateChanges,
    response_schema: || page(node_row()),
    content_type: JSON,
    handler: list_nodes,
};

pub(super) const ONE: Route = Route {
    path: "/nodes/{node}",
    name: "node",
    summary: "Why a node is as it is",
    description: "State, marks, findings with rule and evidence, every test, why it is not being tested now, its case, the steps taken, \
            and what to do next. As `doctor why NODE --json`, with a summary of the agent.",
    params: &[NODE],
    cache_policy: CachePolicy::Briefly,
    response_schema: why_schema,
    content_type: JSON,
    handler: one_node,
};

pub(super) const TIMELINE: Route = Route {
    path: "/nodes/{node}/timeline",
    name: "nodeTimeline",
    summary: "What happened to a node, newest first",
    description: "Results of runs, boots, marks, repairs, operators' commands and the controller's decisions. At most `limit` of each kind.",
    params: &[NODE, SINCE, LIMIT],
    cache_policy: CachePolicy::Briefly,
    response_schema: || list(timeline_row()),
    content_type: JSON,
    handler: timeline,
};

/// Returns a filter for nodes by `select`, `pool` and `life`.
pub(super) fn node_filter(params: &RequestParams) -> Result<impl Fn(&NodeRecord) -> bool + use<>, ApiError> {
    let select = params.text("select").map(|text| parse_selector(text, MAX_NODE_NAMES)).transpose();
    let select = select.map_err(|why| ApiError::BadParameter { name: "select", why })?;
    let pool: Option<PoolName> = params.get("pool")?;
    let state = params.text("state").map(str::to_owned);
    Ok(move |record: &NodeRecord| {
        let (name, node_pool, state_name) = (&record.node.name, &record.node.pool, record.state.as_str());
        select.as_ref().is_none_or(|select| select.matches(name, node_pool, state_name))
            && pool.as_ref().is_none_or(|pool| pool == node_pool)
            && state.as_ref().is_none_or(|state| state == state_name)
    })
}

pub(super) fn unknown_node(name: &NodeName) -> ApiError {
    let known = "GET /api/v1/nodes lists them".to_owned();
    ApiError::UnknownName { what: "node", name: name.to_string(), known }
}

fn list_nodes(context: &RequestContext<'_>) -> Result<RawBody, ApiError> {
    let (facts, params, limit) = (&context.fleet_view.facts, context.params, context.page_size());
    let matches_filter = node_filter(params)?;
    let health: Option<NodeHealth> = params.get("health")?;
    let after: Option<NodeName> = params.get("cursor")?;
    let matches_health = |record: &NodeRecord, in_cluster: bool| match (health, in_cluster) {
        (None, _) => true,
        (Some(health), true) => NodeStatus::health_of(&facts.snapshot, record) == health,
        (Some(health), false) => health == NodeHealth::Unknown,
    };
    let rows = facts.nodes().filter(|(record, in_cluster)| {
        let name = &record.node.name;
        after.as_ref().is_none_or(|after| name > after) && matches_filter(record) && matches_health(record, *in_cluster)
    });
    let rows: Vec<WithAgent<'_, NodeRow>> = rows
        .take(limit as usize + 1)
        .map(|(record, in_cluster)| with_agent(context, view::node_row(facts, record, in_cluster)))
        .collect();
    RawBody::json(&Page::from_rows(rows, limit, |row| row.inner.node.to_string()))
}

/// A value about a node, with its agent.
#[derive(Serialize)]
struct WithAgent<'a, T> {
    #[serde(flatten)]
    inner: T,
    agent: Option<&'a AgentBrief>,
}

fn with_agent<'a>(context: &RequestContext<'a>, row: NodeRow) -> WithAgent<'a, NodeRow> {
    WithAgent { agent: context.fleet_view.agents.get(&row.node), inner: row }
}

fn one_node(context: &RequestContext<'_>) -> Result<RawBody, ApiError> {
    const AUDIT: u32 = 20;
    let node: NodeName = context.params.path_segment("node")?;
    let facts = &context.fleet_view.facts;
    let details = cluster_state::node_details(&context.store, facts, &node, AUDIT)?;
    let why = view::why(facts, &node, details).ok_or_else(|| unknown_node(&node))?;
    RawBody::json_redacted(&WithAgent { inner: why, agent: context.fleet_view.agents.get(&node) })
}

fn timeline(context: &RequestContext<'_>) -> Result<RawBody, ApiError> {
    let node: NodeName = context.params.path_segment("node")?;
    let (facts, store, limit) = (&context.fleet_view.facts, &context.store, context.page_size());
    facts.node(&node).ok_or_else(|| unknown_node(&node))?;
    let since = context.params.since("since", facts);
    let details = cluster_state::node_details(store, facts, &node, limit)?;
    let filter = HistoryFilter { node: Some(node.clone()), since, limit: Some(limit), ..HistoryFilter::default() };
    let results: Vec<ResultFacts> = store
        .history(&filter)?
        .into_iter()
        .map(|row| ResultFacts { at: row.at, run: row.run, test: row.test, verdict: row.verdict })
        .collect();
    let boots = boots(store, &node, &results)?;
    let mut events = view::timeline(details.audit, &results, boots);
    events.retain(|event| since.is_none_or(|since| event.at >= since));
    RawBody::json_redacted(&events)
}

/// Returns the boots that the evidence of these runs shows. Limited, because each document is decompressed.
fn boots(store: &Store, node: &NodeName, results: &[ResultFacts]) -> Result<Vec<BootFacts>, StoreError> {
    const MOST: usize = 50;
    let runs: BTreeSet<RunId> = results.iter().filter_map(|result| result.run).collect();
    let mut boots = Vec::new();
    for run in runs.into_iter().rev().take(MOST) {
        let evidence = store.evidence(run, node)?.filter(|evidence| !evidence.truncated);
        let Some(document) = evidence.and_then(|evidence| Document::parse_stored(&evidence.bytes).ok()) else {
            continue;
        };
        boots.extend(document.hardware.boot_id.map(|boot| BootFacts {
            seen: document.started,
            boot,
            uptime: document.uptime,
        }));
    }
    Ok(boots)
}

fn active_run() -> Value {
    object(json!({
        "run": text(), "tests": list(text()), "state": one_of(&["planned", "pending", "running", "ended"]),
        "since": timestamp(), "because": text(),
    }))
}

fn node_row() -> Value {
    object(json!({
        "node": text(),
        "pool": or_null(text()),
        "state": node_state(),
        "since": or_null(timestamp()),
        "occupancy": occupancy(),
        "occupancy_text": or_null(text()),
        "tests": list(object(json!({ "test": text(), "status": test_status(), "at": or_null(timestamp()) }))),
        "findings": count(),
        "worst": or_null(severity()),
        "case": or_null(text()),
        "our_marks": list(text()),
        "foreign_marks": list(text()),
        "run": or_null(active_run()),
        "skipped": or_null(object(json!({ "code": text(), "text": text(), "since": timestamp() }))),
        "agent": or_null(agent()),
    }))
}

fn agent() -> Value {
    object(json!({
        "state": one_of(&AgentState::ALL.map(AgentState::word)), "silent": flag(), "last_contact": or_null(timestamp()),
        "program": or_null(text()), "skew": list(text()),
    }))
}

/// Schema of an open finding.
pub(super) fn finding() -> Value {
    object(json!({
        "check": text(), "entity": text(), "verdict": verdict(), "severity": severity(), "remedy": remedy(),
        "reason": text(), "text": text(), "rule": text(), "evidence": text(), "run": or_null(text()),
        "first_seen": timestamp(), "last_seen": timestamp(), "sightings": count(), "confirm": count(), "confirmed": flag(),
    }))
}

/// Schema of a failed user job.
pub(super) fn job_failure() -> Value {
    object(json!({ "id": text(), "name": text(), "owner": text(), "at": timestamp(), "how": any_value() }))
}

fn case_schema() -> Value {
    let step = object(json!({
        "at": timestamp(), "what": step_kind(), "state": step_state(), "attempts": count(), "text": text(),
    }));
    object(json!({
        "id": text(), "opened": timestamp(), "severity": severity(), "repair_step": repair_step(), "open": flag(),
        "waits_for_operator": flag(), "advice": or_null(advice()), "job_failures": list(job_failure()),
        "steps": list(step),
    }))
}

fn why_schema() -> Value {
    let state_union = tagged_union(&[
        ("in-service", json!({})),
        ("suspect", json!({})),
        ("quarantined", json!({})),
        ("repairing", json!({ "step": step_kind(), "attempts": count() })),
        ("requalifying", json!({ "run": or_null(text()) })),
        ("out", json!({})),
        ("held", json!({ "by": text() })),
    ]);
    let due = tagged_union(&[
        ("now", json!({})),
        ("at", json!({ "at": timestamp() })),
        ("retry", json!({ "at": timestamp(), "misses": count() })),
        ("by-agent", json!({})),
    ]);
    let conclusive = tuple(&[verdict(), timestamp()], 2);
    let last = object(json!({
        "at": timestamp(), "verdict": verdict(), "reason": text(), "run": or_null(text()),
        "conclusive": or_null(conclusive), "misses": count(),
    }));
    let hold = object(json!({ "by": text(), "why": text(), "since": timestamp(), "until": or_null(timestamp()) }));
    let test_line = object(json!({
        "test": text(), "suite": or_null(text()), "status": test_status(), "cutoff": duration(), "last": or_null(last), "due": due,
    }));
    let audit = object(json!({
        "at": timestamp(), "by": text(), "what": text(), "code": text(), "text": text(), "run": or_null(text()),
    }));
    let without_result = object(json!({
        "run": text(), "node": text(), "tests": list(text()), "state": one_of(&["incomplete", "not-started"]),
        "end": or_null(text()), "ended": timestamp(), "last_output": or_null(text()),
    }));
    let rest = object(json!({
        "at": timestamp(),
        "headline": text(),
        "state_detail": state_union,
        "hardware": or_null(text()),
        "hold": or_null(hold),
        "backoff": or_null(object(json!({ "until": timestamp(), "times": count() }))),
        "case_file": or_null(case_schema()),
        "open_findings": list(finding()),
        "job_failures": list(job_failure()),
        "test_lines": list(test_line),
        "audit": list(audit),
        "without_result": or_null(without_result),
        "next": list(text()),
    }));
    merged(&[node_row(), rest])
}

fn timeline_row() -> Value {
    object(json!({
        "at": timestamp(), "kind": one_of(&["results", "boot", "act"]), "what": text(), "text": text(),
        "by": or_null(text()), "code": or_null(text()), "run": or_null(text()),
    }))
}
