//! The plan: what would happen next and why, and for every other node, why not.

use doctor_core::{
    ids::{IdSource, NodeName},
    plan,
    time::Timestamp,
    view::{self, PlanView},
};
use serde::Serialize;
use serde_json::{Value, json};

use super::{
    endpoint::{JSON, RequestContext, Route},
    error::ApiError,
    nodes::{POOL, SELECT, STATE, node_filter},
    response_cache::CachePolicy,
    schema::{list, object, or_null, text, timestamp},
};
use crate::response::RawBody;

pub(super) const PLAN: Route = Route {
    path: "/plan",
    name: "plan",
    summary: "What the next cycle would do",
    description: "Each action with its reason, and each skipped node with its reason. The plan is made for this response from the last \
            observed state of the cluster; nothing is carried out. As `doctor plan --json`; filters apply to skipped nodes.",
    params: &[SELECT, POOL, STATE],
    cache_policy: CachePolicy::UntilStateChanges,
    response_schema: schema,
    content_type: JSON,
    handler: read,
};

fn read(context: &RequestContext<'_>) -> Result<RawBody, ApiError> {
    let facts = &context.fleet_view.facts;
    let nodes = &facts.snapshot.nodes;
    let matches_filter = node_filter(context.params)?;
    // Most requests are for all nodes, and looking up ten thousand names takes longer than planning.
    let is_filtered = PLAN.params.iter().any(|filter| context.params.text(filter.name).is_some());
    let is_selected = |name: &NodeName| {
        let index = nodes.binary_search_by(|record| record.node.name.cmp(name));
        index.is_ok_and(|index| matches_filter(&nodes[index]))
    };
    // The ids of a plan that is not carried out need not be unique.
    let plan = plan::plan(&facts.snapshot, &mut IdSource::new(0));
    let view = view::plan_view(&plan, |name| !is_filtered || is_selected(name));
    RawBody::json(&PlanResponse { at: facts.now, view })
}

#[derive(Debug, Serialize)]
struct PlanResponse {
    at: Timestamp,
    #[serde(flatten)]
    view: PlanView,
}

fn schema() -> Value {
    let action = object(json!({
        "action": text(), "nodes": or_null(text()), "what": text(), "code": text(), "why": text(),
    }));
    let passed = object(json!({ "node": text(), "code": text(), "why": text() }));
    object(json!({ "at": timestamp(), "actions": list(action), "skipped": list(passed) }))
}
