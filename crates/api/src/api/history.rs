//! Past results.

use doctor_core::{
    finding::Verdict,
    ids::{NodeName, RunId, TestId},
    time::Timestamp,
};
use doctor_store::records::{HistoryFilter, HistoryPlace, HistoryRow};
use serde_json::{Value, json};

use super::{
    answer::Lasts,
    asked::{Form, Param},
    endpoint::{JSON, Look, Page, Route},
    nodes::{CURSOR, LIMIT, NODE, SINCE},
    refusal::Refusal,
    schema::{flag, moment, object, or_null, page, severity, span, text, verdict},
};
use crate::response::Made;

pub(super) const LIST: Route = Route {
    path: "/history",
    name: "history",
    summary: "Past results, newest first",
    about: "As `doctor history --json`, in pages. A page of a selective search may have few rows or none and still have a `next`, \
            where the search continues.",
    params: &[
        NODE,
        Param::new("test", "only this test", Form::Name),
        Param::new("verdict", "only this verdict", Form::OneOf(&["pass", "fail", "inconclusive", "not-applicable"])),
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
    let (after, before) = match asked.text("cursor").map(Place::read).transpose()? {
        Some(Place::Row(row)) => (Some(row), None),
        Some(Place::Moment(moment)) => (None, Some(moment)),
        None => (None, None),
    };
    let filter = HistoryFilter {
        node: asked.get("node")?,
        test: asked.get("test")?,
        since: asked.since("since", &look.scene.facts),
        verdict,
        after,
        before,
        limit: Some(limit + 1),
    };
    let part = look.store.history_part(&filter)?;
    let mut page = Page::of(part.rows, limit, written_place);
    page.next = page.next.or_else(|| part.searched.map(|searched| searched.millis().to_string()));
    Made::json(&page)
}

/// Formats a cursor: time, run, node and test. The separator does not occur in the last three.
fn written_place(row: &HistoryRow) -> String {
    let HistoryPlace { at, run, node, test } = row.place();
    format!("{}~{}~{node}~{test}", at.millis(), run.map_or_else(String::new, |run| run.to_string()))
}

/// Start of a page: after a row, or at or before a time where the previous page stopped searching.
#[derive(Debug)]
enum Place {
    Row(HistoryPlace),
    Moment(Timestamp),
}

impl Place {
    fn read(text: &str) -> Result<Self, Refusal> {
        let bad = || Refusal::BadParameter { name: "cursor", why: "expected `next` of a previous page".to_owned() };
        let moment = |text: &str| text.parse().map(Timestamp::from_millis).map_err(|_| bad());
        let parts: Vec<&str> = text.split('~').collect();
        let (at, run, node, test) = match parts.as_slice() {
            [at] => return moment(at).map(Self::Moment),
            [at, run, node, test] => (at, run, node, test),
            _ => return Err(bad()),
        };
        let run: Option<RunId> = if run.is_empty() { None } else { Some(run.parse().map_err(|_| bad())?) };
        Ok(Self::Row(HistoryPlace {
            at: moment(at)?,
            run,
            node: NodeName::new(node).map_err(|_| bad())?,
            test: TestId::new(test).map_err(|_| bad())?,
        }))
    }
}

fn row() -> Value {
    object(json!({
        "node": text(), "test": text(), "at": moment(), "verdict": verdict(), "reason": text(),
        "severity": or_null(severity()), "run": or_null(text()), "took": span(), "untrusted": flag(),
    }))
}
