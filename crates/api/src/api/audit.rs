//! The audit trail: who did what, when and why.

use serde_json::{Value, json};

use super::{
    answer::Lasts,
    endpoint::{JSON, Look, Page, Route},
    nodes::{CURSOR, LIMIT, NODE},
    refusal::Refusal,
    schema::{moment, object_without, or_null, page, text},
};
use crate::response::Made;

pub(super) const LIST: Route = Route {
    path: "/audit",
    name: "audit",
    summary: "Who did what, when and why, newest first",
    about: "Actions of the controller and of operators. Commands through this API have their origin and the plan that was shown; \
            rejected commands are included. As `doctor audit --json`.",
    params: &[NODE, LIMIT, CURSOR],
    lasts: Lasts::AMoment,
    answer: || page(row()),
    kind: JSON,
    read,
};

fn read(look: &Look<'_>) -> Result<Made, Refusal> {
    let (asked, limit) = (look.asked, look.limit());
    let (before, node) = (asked.get("cursor")?, asked.get("node")?);
    let rows = look.store.audit_before(before, limit + 1, node.as_ref())?;
    let Page { items, next } = Page::of(rows, limit, |(number, _)| number.to_string());
    let items = items.into_iter().map(|(_, row)| row).collect();
    Made::told_by_nodes(&Page { items, next })
}

fn row() -> Value {
    let fields = json!({
        "at": moment(), "by": text(), "what": text(), "node": or_null(text()), "case": or_null(text()),
        "run": or_null(text()), "code": text(), "text": text(), "origin": text(), "plan": text(),
    });
    object_without(fields, &["origin", "plan"])
}
