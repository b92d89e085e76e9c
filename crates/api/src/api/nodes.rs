//! Nodes: the list, the details of one, and its timeline.

use std::collections::BTreeSet;

use doctor_checks::document::Document;
use doctor_core::{
    hostlist::LIVES,
    ids::{NodeName, PoolName, RunId},
    shown::{Shown, Status},
    snapshot::NodeRecord,
    view::{self, BootFacts, NodeRow, ResultFacts},
};
use doctor_engine::{
    agents::{AgentBrief, AgentState},
    picture,
};
use doctor_store::{Store, StoreError, records::HistoryFilter};
use serde::Serialize;
use serde_json::{Value, json};

use super::{
    answer::Lasts,
    asked::{Asked, Form, Param},
    endpoint::{JSON, Look, Page, Route},
    refusal::Refusal,
    schema::{
        advice, anything, count, flag, joined, life, list, moment, object, one_of, or_null, page, places, remedy, rung,
        severity, span, standing, step_kind, step_state, text, told_apart, used, verdict,
    },
    wish::{MOST_NAMES, selector},
};
use crate::response::Made;

/// Node selector, which other lists share.
pub(super) const SELECT: Param =
    Param::new("select", "nodes: node[01-64], pool=NAME, life=STATE, or a name with `*`", Form::Text);
pub(super) const POOL: Param = Param::new("pool", "only this pool", Form::Name);
pub(super) const LIFE: Param = Param::new("life", "only nodes in this state", Form::OneOf(&LIVES));
const HEALTH: Param = Param::new("health", "only nodes with this health", Form::OneOf(&["pass", "fail", "unknown"]));
pub(super) const LIMIT: Param = Param::new("limit", "maximum number of rows", Form::Count { most: 500, usual: 100 });
pub(super) const CURSOR: Param = Param::new("cursor", "`next` of the previous page", Form::Text);
pub(super) const NODE: Param = Param::new("node", "a node's name", Form::Name);
pub(super) const SINCE: Param = Param::new("since", "only since then: a duration such as 7d, or a time", Form::Past);

pub(super) const LIST: Route = Route {
    path: "/nodes",
    name: "nodes",
    summary: "Nodes by name",
    about: "Use, state and the last result of each test. Rows as in `doctor nodes --json`, with a summary of the agent.",
    params: &[SELECT, POOL, LIFE, HEALTH, LIMIT, CURSOR],
    lasts: Lasts::WithScene,
    answer: || page(node_row()),
    kind: JSON,
    read: list_nodes,
};

pub(super) const ONE: Route = Route {
    path: "/nodes/{node}",
    name: "node",
    summary: "Why a node is as it is",
    about: "State, marks, findings with rule and evidence, every test, why it is not being tested now, its case, the steps taken, \
            and what to do next. As `doctor why NODE --json`, with a summary of the agent.",
    params: &[NODE],
    lasts: Lasts::AMoment,
    answer: why_schema,
    kind: JSON,
    read: one_node,
};

pub(super) const TIMELINE: Route = Route {
    path: "/nodes/{node}/timeline",
    name: "nodeTimeline",
    summary: "What happened to a node, newest first",
    about: "Results of runs, boots, marks, repairs, operators' commands and the controller's decisions. At most `limit` of each kind.",
    params: &[NODE, SINCE, LIMIT],
    lasts: Lasts::AMoment,
    answer: || list(moment_row()),
    kind: JSON,
    read: timeline,
};

/// Returns a filter for nodes by `select`, `pool` and `life`.
pub(super) fn wanted(asked: &Asked) -> Result<impl Fn(&NodeRecord) -> bool + use<>, Refusal> {
    let select = asked.text("select").map(|text| selector(text, MOST_NAMES)).transpose();
    let select = select.map_err(|why| Refusal::BadParameter { name: "select", why })?;
    let pool: Option<PoolName> = asked.get("pool")?;
    let life = asked.text("life").map(str::to_owned);
    Ok(move |record: &NodeRecord| {
        let (name, of, word) = (&record.node.name, &record.node.pool, record.life.word());
        select.as_ref().is_none_or(|select| select.matches(name, of, word))
            && pool.as_ref().is_none_or(|pool| pool == of)
            && life.as_ref().is_none_or(|life| life == word)
    })
}

pub(super) fn unknown_node(name: &NodeName) -> Refusal {
    let known = "GET /api/v1/nodes lists them".to_owned();
    Refusal::Unknown { what: "node", name: name.to_string(), known }
}

fn list_nodes(look: &Look<'_>) -> Result<Made, Refusal> {
    let (facts, asked, limit) = (&look.scene.facts, look.asked, look.limit());
    let wanted = wanted(asked)?;
    let health: Option<Status> = asked.get("health")?;
    let after: Option<NodeName> = asked.get("cursor")?;
    let well = |record: &NodeRecord, here: bool| match (health, here) {
        (None, _) => true,
        (Some(health), true) => Shown::status_of(&facts.snapshot, record) == health,
        (Some(health), false) => health == Status::Unknown,
    };
    let rows = facts.nodes().filter(|(record, here)| {
        let name = &record.node.name;
        after.as_ref().is_none_or(|after| name > after) && wanted(record) && well(record, *here)
    });
    let rows: Vec<WithAgent<'_, NodeRow>> = rows
        .take(limit as usize + 1)
        .map(|(record, here)| with_agent(look, view::node_row(facts, record, here)))
        .collect();
    Made::json(&Page::of(rows, limit, |row| row.of.node.to_string()))
}

/// A value about a node, with its agent.
#[derive(Serialize)]
struct WithAgent<'a, T> {
    #[serde(flatten)]
    of: T,
    agent: Option<&'a AgentBrief>,
}

fn with_agent<'a>(look: &Look<'a>, of: NodeRow) -> WithAgent<'a, NodeRow> {
    WithAgent { agent: look.scene.agents.get(&of.node), of }
}

fn one_node(look: &Look<'_>) -> Result<Made, Refusal> {
    const AUDIT: u32 = 20;
    let node: NodeName = look.asked.part("node")?;
    let facts = &look.scene.facts;
    let kept = picture::kept(&look.store, facts, &node, AUDIT)?;
    let of = view::why(facts, &node, kept).ok_or_else(|| unknown_node(&node))?;
    Made::told_by_nodes(&WithAgent { of, agent: look.scene.agents.get(&node) })
}

fn timeline(look: &Look<'_>) -> Result<Made, Refusal> {
    let node: NodeName = look.asked.part("node")?;
    let (facts, store, limit) = (&look.scene.facts, &look.store, look.limit());
    facts.node(&node).ok_or_else(|| unknown_node(&node))?;
    let since = look.asked.since("since", facts);
    let kept = picture::kept(store, facts, &node, limit)?;
    let filter = HistoryFilter { node: Some(node.clone()), since, limit: Some(limit), ..HistoryFilter::default() };
    let results: Vec<ResultFacts> = store
        .history(&filter)?
        .into_iter()
        .map(|row| ResultFacts { at: row.at, run: row.run, test: row.test, verdict: row.verdict })
        .collect();
    let boots = boots(store, &node, &results)?;
    let mut moments = view::timeline(kept.audit, &results, boots);
    moments.retain(|moment| since.is_none_or(|since| moment.at >= since));
    Made::told_by_nodes(&moments)
}

/// Returns the boots that the evidence of these runs shows. Limited, because each document is decompressed.
fn boots(store: &Store, node: &NodeName, results: &[ResultFacts]) -> Result<Vec<BootFacts>, StoreError> {
    const MOST: usize = 50;
    let runs: BTreeSet<RunId> = results.iter().filter_map(|result| result.run).collect();
    let mut boots = Vec::new();
    for run in runs.into_iter().rev().take(MOST) {
        let kept = store.evidence(run, node)?.filter(|kept| !kept.truncated);
        let Some(document) = kept.and_then(|kept| Document::open_kept(&kept.bytes).ok()) else { continue };
        boots.extend(document.hardware.boot_id.map(|boot| BootFacts { seen: document.started, boot, up: document.up }));
    }
    Ok(boots)
}

fn active_run() -> Value {
    object(json!({
        "run": text(), "tests": list(text()), "state": one_of(&["planned", "pending", "running", "ended"]),
        "since": moment(), "because": text(),
    }))
}

fn node_row() -> Value {
    object(json!({
        "node": text(),
        "pool": or_null(text()),
        "life": life(),
        "since": or_null(moment()),
        "used": used(),
        "used_text": or_null(text()),
        "tests": list(object(json!({ "test": text(), "standing": standing(), "at": or_null(moment()) }))),
        "findings": count(),
        "worst": or_null(severity()),
        "case": or_null(text()),
        "our_marks": list(text()),
        "foreign_marks": list(text()),
        "run": or_null(active_run()),
        "passed_over": or_null(object(json!({ "code": text(), "text": text(), "since": moment() }))),
        "agent": or_null(agent()),
    }))
}

fn agent() -> Value {
    object(json!({
        "state": one_of(&AgentState::ALL.map(AgentState::word)), "silent": flag(), "heard": or_null(moment()),
        "program": or_null(text()), "skew": list(text()),
    }))
}

/// Schema of an open finding.
pub(super) fn finding() -> Value {
    object(json!({
        "check": text(), "entity": text(), "verdict": verdict(), "severity": severity(), "remedy": remedy(),
        "reason": text(), "text": text(), "rule": text(), "evidence": text(), "run": or_null(text()),
        "first_seen": moment(), "last_seen": moment(), "times": count(), "confirm": count(), "confirmed": flag(),
    }))
}

/// Schema of a failed user job.
pub(super) fn failed_work() -> Value {
    object(json!({ "id": text(), "name": text(), "owner": text(), "at": moment(), "how": anything() }))
}

fn case_file() -> Value {
    let step = object(json!({
        "at": moment(), "what": step_kind(), "state": step_state(), "tries": count(), "text": text(),
    }));
    object(json!({
        "id": text(), "opened": moment(), "severity": severity(), "rung": rung(), "open": flag(),
        "waits_for_person": flag(), "advice": or_null(advice()), "failed_work": list(failed_work()),
        "steps": list(step),
    }))
}

fn why_schema() -> Value {
    let life_state = told_apart(&[
        ("in-service", json!({})),
        ("suspect", json!({})),
        ("quarantined", json!({})),
        ("repairing", json!({ "step": step_kind(), "tries": count() })),
        ("proving", json!({ "run": text() })),
        ("out", json!({})),
        ("held", json!({ "by": text() })),
    ]);
    let due = told_apart(&[
        ("now", json!({})),
        ("at", json!({ "at": moment() })),
        ("retry", json!({ "at": moment(), "misses": count() })),
    ]);
    let conclusive = places(&[verdict(), moment()], 2);
    let last = object(json!({
        "at": moment(), "verdict": verdict(), "reason": text(), "run": or_null(text()),
        "conclusive": or_null(conclusive), "misses": count(),
    }));
    let hold = object(json!({ "by": text(), "why": text(), "since": moment(), "until": or_null(moment()) }));
    let test_line = object(json!({
        "test": text(), "standing": standing(), "cutoff": span(), "last": or_null(last), "due": due,
    }));
    let audit = object(json!({
        "at": moment(), "by": text(), "what": text(), "code": text(), "text": text(), "run": or_null(text()),
    }));
    let rest = object(json!({
        "at": moment(),
        "headline": text(),
        "life_state": life_state,
        "hardware": or_null(text()),
        "hold": or_null(hold),
        "backoff": or_null(object(json!({ "until": moment(), "times": count() }))),
        "case_file": or_null(case_file()),
        "open_findings": list(finding()),
        "failed_work": list(failed_work()),
        "test_lines": list(test_line),
        "audit": list(audit),
        "next": list(text()),
    }));
    joined(&[node_row(), rest])
}

fn moment_row() -> Value {
    object(json!({
        "at": moment(), "kind": one_of(&["results", "boot", "act"]), "what": text(), "text": text(),
        "by": or_null(text()), "code": or_null(text()), "run": or_null(text()),
    }))
}
