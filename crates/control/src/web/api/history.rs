//! Past results.

use doctor_core::{
    finding::Verdict,
    ids::{NodeName, RunId, TestId},
    time::Timestamp,
};
use serde_json::{Value, json};

use super::{
    answer::{Lasts, Made},
    asked::{Form, Param},
    nodes::{CURSOR, LIMIT, NODE, SINCE},
    refusal::Refusal,
    routes::{JSON, Look, Page, Route},
    schema::{flag, moment, object, or_null, page, severity, span, text, verdict},
};
use crate::store::records::{HistoryFilter, HistoryPlace, HistoryRow};

pub(super) const LIST: Route = Route {
    path: "/history",
    name: "history",
    summary: "Past results, the newest first",
    about: "As `doctor history --json`, page by page.",
    params: &[
        NODE,
        Param::new("test", "only of this test", Form::Name),
        Param::new(
            "verdict",
            "only with this verdict",
            Form::OneOf(&["pass", "fail", "inconclusive", "not-applicable"]),
        ),
        SINCE,
        LIMIT,
        CURSOR,
    ],
    lasts: Lasts::AMoment,
    answer: || page(row()),
    kind: JSON,
    read,
};

fn read(look: &Look<'_>) -> Result<Made, Refusal> {
    let (asked, limit) = (look.asked, look.limit());
    let verdict: Option<Verdict> = asked.get("verdict")?;
    let filter = HistoryFilter {
        node: asked.get("node")?,
        test: asked.get("test")?,
        since: asked.since("since", &look.scene.facts),
        verdict,
        after: asked.text("cursor").map(read_place).transpose()?,
        limit: Some(limit + 1),
    };
    let rows = look.hall.store.history(&filter)?;
    Made::json(&Page::of(rows, limit, written_place))
}

/// Moment, run, node and test, as far as the last three have no such sign in them.
fn written_place(row: &HistoryRow) -> String {
    let HistoryPlace { at, run, node, test } = row.place();
    format!("{}~{}~{node}~{test}", at.millis(), run.map_or_else(String::new, |run| run.to_string()))
}

fn read_place(text: &str) -> Result<HistoryPlace, Refusal> {
    let bad = || Refusal::BadParameter { name: "cursor", why: "it is no `next` of a page of history".to_owned() };
    let parts: Vec<&str> = text.split('~').collect();
    let [at, run, node, test] = parts.as_slice() else { return Err(bad()) };
    let run: Option<RunId> = if run.is_empty() { None } else { Some(run.parse().map_err(|_| bad())?) };
    Ok(HistoryPlace {
        at: Timestamp::from_millis(at.parse().map_err(|_| bad())?),
        run,
        node: NodeName::new(node).map_err(|_| bad())?,
        test: TestId::new(test).map_err(|_| bad())?,
    })
}

fn row() -> Value {
    object(json!({
        "node": text(), "test": text(), "at": moment(), "verdict": verdict(), "reason": text(),
        "severity": or_null(severity()), "run": or_null(text()), "took": span(), "untrusted": flag(),
    }))
}
