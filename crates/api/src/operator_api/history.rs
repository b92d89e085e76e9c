//! Past results.

use doctor_core::{
    finding::Verdict,
    ids::{NodeName, RunId, TestId},
    time::Timestamp,
};
use doctor_store::records::{HistoryCursor, HistoryFilter, HistoryRow};
use serde_json::{Value, json};

use super::{
    endpoint::{JSON, Page, RequestContext, Route},
    error::ApiError,
    nodes::{CURSOR, LIMIT, NODE, SINCE},
    params::{Param, ParamSyntax},
    response_cache::CachePolicy,
    schema::{duration, flag, object, or_null, page, severity, text, timestamp, verdict},
};
use crate::response::RawBody;

pub(super) const LIST: Route = Route {
    path: "/history",
    name: "history",
    summary: "Past results, newest first",
    description: "As `doctor history --json`, in pages. A page of a selective search may have few rows or none and still have a `next`, \
            where the search continues.",
    params: &[
        NODE,
        Param::new("test", "only this test", ParamSyntax::Name),
        Param::new(
            "verdict",
            "only this verdict",
            ParamSyntax::OneOf(&["pass", "fail", "inconclusive", "not-applicable"]),
        ),
        SINCE,
        LIMIT,
        CURSOR,
    ],
    cache_policy: CachePolicy::Briefly,
    response_schema: || page(row_schema()),
    content_type: JSON,
    handler: read,
};

fn read(context: &RequestContext<'_>) -> Result<RawBody, ApiError> {
    let (params, limit) = (context.params, context.page_size());
    let verdict: Option<Verdict> = params.get("verdict")?;
    let (after, before) = match params.text("cursor").map(PageCursor::decode).transpose()? {
        Some(PageCursor::AfterRow(row)) => (Some(row), None),
        Some(PageCursor::AtOrBefore(moment)) => (None, Some(moment)),
        None => (None, None),
    };
    let filter = HistoryFilter {
        node: params.get("node")?,
        test: params.get("test")?,
        since: params.since("since", &context.fleet_view.facts),
        verdict,
        after,
        before,
        limit: Some(limit + 1),
    };
    let found = context.store.history_page(&filter)?;
    let mut page = Page::from_rows(found.rows, limit, encode_cursor);
    page.next = page.next.or_else(|| found.searched_back_to.map(|searched| searched.millis().to_string()));
    RawBody::json(&page)
}

/// Formats a cursor: time, run, node and test. The separator does not occur in the last three.
fn encode_cursor(row: &HistoryRow) -> String {
    let HistoryCursor { at, run, node, test } = row.cursor();
    format!("{}~{}~{node}~{test}", at.millis(), run.map_or_else(String::new, |run| run.to_string()))
}

/// Start of a page: after a row, or at or before a time where the previous page stopped searching.
#[derive(Debug)]
enum PageCursor {
    AfterRow(HistoryCursor),
    AtOrBefore(Timestamp),
}

impl PageCursor {
    fn decode(text: &str) -> Result<Self, ApiError> {
        let bad = || ApiError::BadParameter { name: "cursor", why: "expected `next` of a previous page".to_owned() };
        let moment = |text: &str| text.parse().map(Timestamp::from_millis).map_err(|_| bad());
        let parts: Vec<&str> = text.split('~').collect();
        let (at, run, node, test) = match parts.as_slice() {
            [at] => return moment(at).map(Self::AtOrBefore),
            [at, run, node, test] => (at, run, node, test),
            _ => return Err(bad()),
        };
        let run: Option<RunId> = if run.is_empty() { None } else { Some(run.parse().map_err(|_| bad())?) };
        Ok(Self::AfterRow(HistoryCursor {
            at: moment(at)?,
            run,
            node: NodeName::new(node).map_err(|_| bad())?,
            test: TestId::new(test).map_err(|_| bad())?,
        }))
    }
}

fn row_schema() -> Value {
    object(json!({
        "node": text(), "test": text(), "at": timestamp(), "verdict": verdict(), "reason": text(),
        "severity": or_null(severity()), "run": or_null(text()), "duration": duration(), "untrusted": flag(),
        "by_agent": flag(),
    }))
}
