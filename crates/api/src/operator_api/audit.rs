//! The audit trail: who did what, when and why.

use serde_json::{Value, json};

use super::{
    endpoint::{JSON, Page, RequestContext, Route},
    error::ApiError,
    nodes::{CURSOR, LIMIT, NODE},
    response_cache::CachePolicy,
    schema::{object_with_optional, or_null, page, text, timestamp},
};
use crate::response::RawBody;

pub(super) const LIST: Route = Route {
    path: "/audit",
    name: "audit",
    summary: "Who did what, when and why, newest first",
    description: "Actions of the controller and of operators. Commands through this API have their origin and the plan that was shown; \
            rejected commands are included. As `doctor audit --json`.",
    params: &[NODE, LIMIT, CURSOR],
    cache_policy: CachePolicy::Briefly,
    response_schema: || page(row_schema()),
    content_type: JSON,
    handler: read,
};

fn read(context: &RequestContext<'_>) -> Result<RawBody, ApiError> {
    let (params, limit) = (context.params, context.page_size());
    let (before, node) = (params.get("cursor")?, params.get("node")?);
    let rows = context.store.audit_before(before, limit + 1, node.as_ref())?;
    let Page { items, next } = Page::from_rows(rows, limit, |(number, _)| number.to_string());
    let items = items.into_iter().map(|(_, row)| row).collect();
    RawBody::json_redacted(&Page { items, next })
}

fn row_schema() -> Value {
    let fields = json!({
        "at": timestamp(), "by": text(), "what": text(), "node": or_null(text()), "case": or_null(text()),
        "run": or_null(text()), "code": text(), "text": text(), "origin": text(), "plan": text(),
    });
    object_with_optional(fields, &["origin", "plan"])
}
