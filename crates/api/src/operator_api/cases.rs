//! Cases: one fault of one machine each.

use doctor_core::{
    case::{Case, Repair},
    ids::{CaseId, NodeName},
    snapshot::NodeRecord,
};
use doctor_engine::{
    share::Share,
    support_bundle::{self, BundleError},
};
use serde_json::{Value, json};

use super::{
    endpoint::{JSON, Page, RequestContext, Route},
    error::ApiError,
    nodes::{CURSOR, LIMIT, SELECT, job_failure, node_filter},
    params::{Param, ParamSyntax},
    response_cache::CachePolicy,
    schema::{
        advice, any_value, count, flag, list, object, object_with_optional, one_of, or_null, page, remedy, repair_step,
        severity, step_kind, step_state, tagged_union, text, timestamp, verdict,
    },
};
use crate::response::RawBody;

pub(super) const LIST: Route = Route {
    path: "/cases",
    name: "cases",
    summary: "Cases, newest first",
    description: "From the first finding to return or replacement. As `doctor cases --json`.",
    params: &[
        SELECT,
        Param::new("state", "`open` (the default) or `all`", ParamSyntax::OneOf(&["open", "all"])),
        LIMIT,
        CURSOR,
    ],
    cache_policy: CachePolicy::Briefly,
    response_schema: || page(case_schema()),
    content_type: JSON,
    handler: list_cases,
};

pub(super) const ONE: Route = Route {
    path: "/cases/{case}",
    name: "case",
    summary: "One case",
    description: "With its findings and all steps taken.",
    params: &[Param::new("case", "a case's id", ParamSyntax::Name)],
    cache_policy: CachePolicy::Briefly,
    response_schema: case_schema,
    content_type: JSON,
    handler: one_case,
};

pub(super) const BUNDLE: Route = Route {
    path: "/cases/{case}/bundle",
    name: "bundle",
    summary: "The support bundle of a case",
    description: "A .tar.gz for the vendor or the cloud provider, as `doctor bundle` writes it, without a new report of the node. Text \
            that looks like a secret is removed.",
    params: &[Param::new("case", "a case's id", ParamSyntax::Name)],
    cache_policy: CachePolicy::Briefly,
    response_schema: || json!({ "type": "string", "contentMediaType": GZIP }),
    content_type: GZIP,
    handler: bundle,
};

const GZIP: &str = "application/gzip";

/// Batches of a page's size that are read for one page.
const MAX_BATCHES: usize = 10;

fn list_cases(context: &RequestContext<'_>) -> Result<RawBody, ApiError> {
    let (facts, store, params, limit) =
        (&context.fleet_view.facts, &context.store, context.params, context.page_size());
    let matches_filter = node_filter(params)?;
    let has_selector = params.text("select").is_some();
    let node_matches = |node: &NodeName| {
        !has_selector || facts.node(node).is_some_and(|(record, _): (&NodeRecord, _)| matches_filter(record))
    };
    let mut before: CaseId = params.get("cursor")?.unwrap_or(CaseId::from_number(i64::MAX.cast_unsigned()));
    let open = params.text("state") != Some("all");
    let most = limit as usize + 1;
    let mut found: Vec<Case> = Vec::new();
    // Without a filter one batch suffices; with one, more are read up to a limit, and the next page continues there.
    for _ in 0..MAX_BATCHES {
        let batch = store.cases_before(before, open, limit.saturating_add(1))?;
        let ended = batch.len() < most;
        before = batch.last().map_or(before, |last| last.id);
        found.extend(batch.into_iter().filter(|case| node_matches(&case.node)));
        if found.len() >= most || ended {
            found.truncate(most);
            return RawBody::json_redacted(&Page::from_rows(found, limit, |case| case.id.to_string()));
        }
    }
    RawBody::json_redacted(&Page { items: found, next: Some(before.to_string()) })
}

fn one_case(context: &RequestContext<'_>) -> Result<RawBody, ApiError> {
    let id: CaseId = context.params.path_segment("case")?;
    RawBody::json_redacted(&context.store.case(id)?.ok_or_else(|| unknown_case(id))?)
}

fn unknown_case(id: CaseId) -> ApiError {
    let known = "those that `doctor cases --all` lists".to_owned();
    ApiError::UnknownName { what: "case", name: id.to_string(), known }
}

fn bundle(context: &RequestContext<'_>) -> Result<RawBody, ApiError> {
    let id: CaseId = context.params.path_segment("case")?;
    let from_node = Err("not requested (`doctor bundle --from-node`)".to_owned());
    // Without the shared directory the archive lacks logs but is still useful.
    let share = context.state.share.as_ref().filter(|share| share.check().is_ok());
    let bytes = support_bundle::archive(&context.store, share.map(Share::files), id, &from_node, Vec::new()).map_err(
        |error| match error {
            BundleError::NoCase(case) => unknown_case(case),
            BundleError::Store(error) => error.into(),
            error => {
                tracing::warn!(%error, case = %id, "API: cannot pack a support bundle");
                ApiError::StoreUnavailable
            }
        },
    )?;
    Ok(RawBody { bytes, content_type: GZIP, file_name: Some(format!("case-{id}.tar.gz")) })
}

fn case_schema() -> Value {
    let finding = object(json!({
        "check": text(), "entity": any_value(), "verdict": verdict(), "severity": severity(), "remedy": remedy(),
        "reason": text(), "text": text(), "rule": text(), "evidence": any_value(), "confirm": count(),
    }));
    let step = object(json!({
        "op": text(), "what": step_kind(), "repair_step": repair_step(), "state": step_state(), "at": timestamp(), "attempts": count(),
        "text": text(),
    }));
    let state = tagged_union(&[
        ("open", json!({})),
        ("closed", json!({ "at": timestamp(), "how": one_of(&["returned", "replaced", "withdrawn"]) })),
    ]);
    let repairs: Vec<&str> = Repair::ALL.iter().map(|repair| repair.code()).collect();
    let repair = json!({ "what": one_of(&repairs), "op": text(), "evict": flag(), "boot_id": text() });
    let repair = object_with_optional(repair, &["boot_id"]);
    let request = object_with_optional(json!({ "by": text(), "why": text(), "repair": repair }), &["repair"]);
    let fields = json!({
        "id": text(),
        "hardware": text(),
        "node": text(),
        "opened": timestamp(),
        "severity": severity(),
        "findings": list(finding),
        "repair_step": repair_step(),
        "steps": list(step),
        "state": state,
        "boot_id": or_null(text()),
        "advice": or_null(advice()),
        "job_failures": list(job_failure()),
        "request": request,
    });
    object_with_optional(fields, &["advice", "job_failures", "request"])
}
