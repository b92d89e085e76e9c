//! All current findings.

use std::cmp::Reverse;

use doctor_core::hex;
use doctor_core::{
    finding::Severity,
    ids::{CheckId, NodeName},
    time::Timestamp,
    view::{self, FindingRow},
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{
    endpoint::{JSON, Page, RequestContext, Route},
    error::ApiError,
    nodes::{CURSOR, LIMIT, POOL, SELECT, STATE, finding, node_filter},
    params::{Param, ParamSyntax},
    response_cache::CachePolicy,
    schema::{merged, node_state, object, or_null, page, text},
};
use crate::response::RawBody;

pub(super) const LIST: Route = Route {
    path: "/findings",
    name: "findings",
    summary: "Open findings of all nodes",
    description: "Findings that are not cleared: most severe first, then oldest.",
    params: &[
        SELECT,
        POOL,
        STATE,
        Param::new("check", "only this check", ParamSyntax::Name),
        Param::new("severity", "only this severity", ParamSyntax::OneOf(&["monitor", "reset", "reboot", "isolate"])),
        LIMIT,
        CURSOR,
    ],
    cache_policy: CachePolicy::UntilStateChanges,
    response_schema: || page(row_schema()),
    content_type: JSON,
    handler: read,
};

fn read(context: &RequestContext<'_>) -> Result<RawBody, ApiError> {
    let (params, limit) = (context.params, context.page_size());
    let (check, severity): (Option<CheckId>, Option<Severity>) = (params.get("check")?, params.get("severity")?);
    let after = params.text("cursor").map(FindingCursor::decode).transpose()?;
    let rows = view::findings(&context.fleet_view.facts, node_filter(params)?).into_iter().filter(|row| {
        check.as_ref().is_none_or(|check| row.finding.check == *check)
            && severity.is_none_or(|severity| row.finding.severity == severity)
            && after.as_ref().is_none_or(|after| FindingCursor::of_row(row) > *after)
    });
    let rows: Vec<_> = rows.take(limit as usize + 1).collect();
    RawBody::json_redacted(&Page::from_rows(rows, limit, |row| FindingCursor::of_row(row).encode()))
}

/// Position of a finding in the list, independent of other findings, which may appear or clear before the next page is
/// requested. In the order of [`view::findings`].
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct FindingCursor(Reverse<Severity>, Timestamp, NodeName, CheckId, String);

impl FindingCursor {
    fn of_row(row: &FindingRow) -> Self {
        let finding = &row.finding;
        let (node, check, entity) = (row.node.clone(), finding.check.clone(), finding.entity.clone());
        Self(Reverse(finding.severity), finding.first_seen, node, check, entity)
    }

    fn encode(&self) -> String {
        // Strings and a time always serialise.
        hex::encode(&serde_json::to_vec(self).unwrap_or_default())
    }

    fn decode(cursor: &str) -> Result<Self, ApiError> {
        let bad = || ApiError::BadParameter { name: "cursor", why: "expected `next` of the previous page".to_owned() };
        serde_json::from_slice(&hex::decode(cursor).ok_or_else(bad)?).map_err(|_| bad())
    }
}

fn row_schema() -> Value {
    let node_fields =
        object(json!({ "node": text(), "pool": or_null(text()), "state": node_state(), "case": or_null(text()) }));
    merged(&[node_fields, finding()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_round_trips_and_sorts_as_its_finding() {
        let cursor = |severity, at, node: &str| {
            let (node, check) = (NodeName::new(node).unwrap(), CheckId::new("gpu-count").unwrap());
            FindingCursor(Reverse(severity), Timestamp::from_secs(at), node, check, "gpu 3 \"x\"".to_owned())
        };
        let first = cursor(Severity::Isolate, 9, "b");
        assert_eq!(FindingCursor::decode(&first.encode()), Ok(first.clone()));
        for later in
            [cursor(Severity::Monitor, 1, "a"), cursor(Severity::Isolate, 10, "a"), cursor(Severity::Isolate, 9, "c")]
        {
            assert!(later > first, "{later:?}");
        }
        for bad in ["0", "7", "zz", "ä", "7b7d"] {
            assert!(FindingCursor::decode(bad).is_err(), "{bad}");
        }
    }
}
