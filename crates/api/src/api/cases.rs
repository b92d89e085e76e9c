//! Cases: one fault of one machine each.

use doctor_core::{
    case::Case,
    ids::{CaseId, NodeName},
    snapshot::NodeRecord,
};
use serde_json::{Value, json};

use super::{
    answer::Lasts,
    asked::{Form, Param},
    endpoint::{JSON, Look, Page, Route},
    nodes::{CURSOR, LIMIT, SELECT, failed_work, wanted},
    refusal::Refusal,
    schema::{
        advice, anything, count, list, moment, object, object_without, one_of, or_null, page, remedy, rung, severity,
        step_kind, step_state, text, told_apart, verdict,
    },
};
use crate::response::Made;

pub(super) const LIST: Route = Route {
    path: "/cases",
    name: "cases",
    summary: "Cases, newest first",
    about: "From the first finding to return or replacement. As `doctor cases --json`.",
    params: &[
        SELECT,
        Param::new("state", "`open` (the default) or `all`", Form::OneOf(&["open", "all"])),
        LIMIT,
        CURSOR,
    ],
    lasts: Lasts::AMoment,
    answer: || page(case()),
    kind: JSON,
    read: list_cases,
};

pub(super) const ONE: Route = Route {
    path: "/cases/{case}",
    name: "case",
    summary: "One case",
    about: "With its findings and all steps taken.",
    params: &[Param::new("case", "a case's id", Form::Name)],
    lasts: Lasts::AMoment,
    answer: case,
    kind: JSON,
    read: one_case,
};

/// Batches of a page's size that are read for one page.
const HELPINGS: usize = 10;

fn list_cases(look: &Look<'_>) -> Result<Made, Refusal> {
    let (facts, store, asked, limit) = (&look.scene.facts, &look.store, look.asked, look.limit());
    let is_wanted = wanted(asked)?;
    let chosen = asked.text("select").is_some();
    let of_node =
        |node: &NodeName| !chosen || facts.node(node).is_some_and(|(record, _): (&NodeRecord, _)| is_wanted(record));
    let mut before: CaseId = asked.get("cursor")?.unwrap_or(CaseId::from_number(i64::MAX.cast_unsigned()));
    let open = asked.text("state") != Some("all");
    let most = limit as usize + 1;
    let mut found: Vec<Case> = Vec::new();
    // Without a filter one batch suffices; with one, more are read up to a limit, and the next page continues there.
    for _ in 0..HELPINGS {
        let helping = store.cases_before(before, open, limit.saturating_add(1))?;
        let ended = helping.len() < most;
        before = helping.last().map_or(before, |last| last.id);
        found.extend(helping.into_iter().filter(|case| of_node(&case.node)));
        if found.len() >= most || ended {
            found.truncate(most);
            return Made::told_by_nodes(&Page::of(found, limit, |case| case.id.to_string()));
        }
    }
    Made::told_by_nodes(&Page { items: found, next: Some(before.to_string()) })
}

fn one_case(look: &Look<'_>) -> Result<Made, Refusal> {
    let id: CaseId = look.asked.part("case")?;
    let known = "GET /api/v1/cases lists them".to_owned();
    let case = look.store.case(id)?;
    Made::told_by_nodes(&case.ok_or_else(|| Refusal::Unknown { what: "case", name: id.to_string(), known })?)
}

fn case() -> Value {
    let finding = object(json!({
        "check": text(), "entity": anything(), "verdict": verdict(), "severity": severity(), "remedy": remedy(),
        "reason": text(), "text": text(), "rule": text(), "evidence": anything(), "confirm": count(),
    }));
    let step = object(json!({
        "op": text(), "what": step_kind(), "rung": rung(), "state": step_state(), "at": moment(), "tries": count(),
        "text": text(),
    }));
    let state = told_apart(&[
        ("open", json!({})),
        ("closed", json!({ "at": moment(), "how": one_of(&["returned", "replaced", "withdrawn"]) })),
    ]);
    let fields = json!({
        "id": text(),
        "hardware": text(),
        "node": text(),
        "opened": moment(),
        "severity": severity(),
        "findings": list(finding),
        "rung": rung(),
        "steps": list(step),
        "state": state,
        "boot_id": or_null(text()),
        "advice": or_null(advice()),
        "failed_work": list(failed_work()),
    });
    object_without(fields, &["advice", "failed_work"])
}
