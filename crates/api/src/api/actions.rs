//! `POST /api/v1/actions/…`: operator commands, with confirmation.
//!
//! The first request returns the plan: what would happen, as text, and a confirmation that is valid for that plan, that
//! caller and ten minutes. The second request, with the confirmation, carries out the plan if it is still the same.
//! Every executed or rejected command is in the audit trail with caller, origin and plan.

use std::{net::IpAddr, sync::Arc, time::Duration};

use axum::{
    body::{Body, to_bytes},
    http::HeaderMap,
    response::{IntoResponse, Response},
};
use doctor_backend::clock::{Clock, SystemClock};
use doctor_core::{ids::NodeName, time::Timestamp, view::Facts};
use doctor_engine::{
    cluster_state,
    operator_commands::{CommandOrigin, PreparedCommand},
    snapshot::{self, ObservedCluster},
};
use doctor_store::{ApiCall, Store, StoreError, access::Role};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::time::{Instant, timeout};

use super::{
    action_request::{ActionKind, ActionRequest},
    audit_throttle::RejectionKind,
    auth::{Caller, check_cross_site},
    confirmations::CONFIRMATION_TTL,
    error::ApiError,
    limits::REQUEST_TIMEOUT,
    schema::{list, object, one_of, or_null, text, timestamp},
    state::ApiState,
};
use crate::response::{RawBody, SharedResponse};

/// Maximum size of a body.
pub(super) const MAX_BODY_BYTES: usize = 64 << 10;
/// Deadline for a body to arrive.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum length of a plan in the audit trail; a list of a thousand nodes is truncated.
const MAX_PLAN_LENGTH: usize = 4000;
/// Attempts to prepare a command when concurrent changes interfere.
const MAX_ATTEMPTS: usize = 3;
/// The response.
#[derive(Debug, Serialize)]
struct ActionResponse<'a> {
    action: &'static str,
    state: ActionState,
    /// One sentence: what would happen, or what happened.
    text: &'a str,
    changes: &'a [String],
    nodes: &'a [NodeName],
    by: &'a str,
    why: &'a str,
    at: Timestamp,
    /// Returned with the next request, it carries out this plan.
    confirm: Option<String>,
    expires: Option<Timestamp>,
    next: Option<&'a str>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum ActionState {
    Planned,
    Done,
}

pub(super) fn schema() -> Value {
    object(json!({
        "action": one_of(&ActionKind::ALL.map(ActionKind::name)),
        "state": one_of(&["planned", "done"]),
        "text": text(),
        "changes": list(text()),
        "nodes": list(text()),
        "by": text(),
        "why": text(),
        "at": timestamp(),
        "confirm": or_null(text()),
        "expires": or_null(timestamp()),
        "next": or_null(text()),
    }))
}

/// Handles one command request.
pub(super) async fn handle_action(
    hall: Arc<ApiState>,
    act: ActionKind,
    peer: IpAddr,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let caller = hall.auth.authenticate(peer, &headers).await;
    let asked = authorise_and_run(&hall, act, &caller, peer, &headers, body).await;
    let who = caller.as_ref().map_or("unknown client", |caller| &caller.name).to_owned();
    match asked {
        Ok(answer) => answer.respond_to(&headers),
        Err(refusal) => {
            let knock = if caller.is_ok_and(|caller| caller.authenticated) {
                RejectionKind::KnownCallerCommand
            } else {
                RejectionKind::UnknownClientCommand
            };
            if let Some(left_out) = hall.audit_throttle.allow(knock) {
                record_rejection(hall, act, who, peer, refusal.clone(), left_out).await;
            }
            refusal.into_response()
        }
    }
}

async fn authorise_and_run(
    hall: &Arc<ApiState>,
    act: ActionKind,
    caller: &Result<Caller, ApiError>,
    peer: IpAddr,
    headers: &HeaderMap,
    body: Body,
) -> Result<SharedResponse, ApiError> {
    let caller = caller.clone()?;
    check_cross_site(headers)?;
    if !caller.authenticated {
        return Err(ApiError::ReadOnly);
    }
    if caller.role < Role::Operator {
        return Err(ApiError::RoleRequired { is: caller.role, needed: Role::Operator });
    }
    let arrived = timeout(BODY_TIMEOUT, to_bytes(body, MAX_BODY_BYTES)).await.map_err(|_| ApiError::BodyTimeout)?;
    let bytes = arrived.map_err(|_| ApiError::BodyTooLong(MAX_BODY_BYTES))?;
    let (hall, origin) = (Arc::clone(hall), peer.to_string());
    let wish = ActionRequest::parse(act, &bytes)?;
    let (until, confirmed) = (Instant::now() + REQUEST_TIMEOUT, wish.confirm.is_some());
    let (actors, store) = (hall.workers.commands.clone(), hall.store.with_deadline(until.into_std()));
    let span = tracing::Span::current();
    let work = move || span.in_scope(|| prepare_and_run(&hall, &store, act, &wish, &caller, &origin));
    match actors.run(until, work).await {
        // The work continues, and its outcome is unknown.
        Err(ApiError::TimedOut) if confirmed => Err(ApiError::OutcomeUnknown),
        carried => carried?.map(SharedResponse::new),
    }
}

/// Prepares a command, and carries it out if this exact plan was confirmed.
fn prepare_and_run(
    hall: &ApiState,
    store: &Store,
    act: ActionKind,
    wish: &ActionRequest,
    caller: &Caller,
    origin: &str,
) -> Result<RawBody, ApiError> {
    // A concurrent change invalidates the plan: preparing again yields the same plan or another.
    for _ in 0..MAX_ATTEMPTS {
        if let Some(made) = try_prepare_and_run(hall, store, act, wish, caller, origin)? {
            return Ok(made);
        }
    }
    Err(ApiError::Overloaded)
}

/// Returns `None` if the state it was prepared on has changed before it was carried out.
fn try_prepare_and_run(
    hall: &ApiState,
    store: &Store,
    act: ActionKind,
    wish: &ActionRequest,
    caller: &Caller,
    origin: &str,
) -> Result<Option<RawBody>, ApiError> {
    let acting = &hall.confirmations;
    if let Some(confirm) = &wish.confirm {
        acting.check_unused(confirm)?;
    }
    let facts = current_facts(hall, store)?;
    let catalogue = Arc::clone(&hall.fleet_view().settings.catalogue);
    let prepared = wish.command(act, facts.now)?.prepare(&facts, &catalogue)?;
    let (by, why) = (&caller.name, &wish.why);
    // Wall-clock time, which may differ from the cluster's.
    let (now, at) = (SystemClock.now(), facts.now);
    let words = signed_bytes(act, wish, caller, &prepared);
    let said = |state, text, confirm: Option<(String, Timestamp)>, next| ActionResponse {
        action: act.name(),
        state,
        text,
        changes: &prepared.changes,
        nodes: &prepared.nodes,
        by,
        why,
        at,
        expires: confirm.as_ref().map(|(_, expires)| *expires),
        confirm: confirm.map(|(confirm, _)| confirm),
        next,
    };
    let planned = || {
        let expires = now.plus(CONFIRMATION_TTL);
        said(ActionState::Planned, prepared.plan.as_str(), Some((acting.issue(&words, expires), expires)), None)
    };
    let Some(confirm) = &wish.confirm else { return RawBody::json(&planned()).map(Some) };
    if !acting.is_valid(confirm, &words, now) {
        let plan = serde_json::to_value(planned()).map_err(|_| ApiError::StoreUnavailable)?;
        return Err(ApiError::PlanChanged(plan));
    }
    let signed = CommandOrigin { by: by.clone(), why: why.clone(), at };
    let node = if let [one] = prepared.nodes.as_slice() { Some(one.clone()) } else { None };
    let call = ApiCall {
        action: act.audit_name(),
        by: by.clone(),
        code: "done",
        text: why.clone(),
        origin: origin.to_owned(),
        plan: Some(plan_text(&prepared)),
        node,
    };
    acting.mark_used(confirm, now)?;
    // A confirmation whose plan was not carried out stays valid.
    match prepared.execute_for_call(&call, &hall.store, &signed).inspect_err(|_| acting.unmark_used(confirm)) {
        Ok(()) => {
            hall.cycle_trigger.fire();
            RawBody::json(&said(ActionState::Done, &prepared.done, None, Some(&prepared.next))).map(Some)
        }
        Err(StoreError::StateChanged { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Reads the current state from the store, as a command would: the served one may be a cycle old.
fn current_facts(hall: &ApiState, store: &Store) -> Result<Facts, ApiError> {
    let now = hall.clock.now();
    let (seen, cluster) = match snapshot::last_observed(store)? {
        Some((at, cluster)) => (Some(at), cluster),
        None => (None, ObservedCluster::unobserved(&hall.fleet_view().settings)),
    };
    let now = seen.map_or(now, |seen| now.max(seen));
    Ok(cluster_state::facts(store, seen, cluster, now)?)
}

/// Returns the bytes that a confirmation signs: who, what, why, and what was shown.
fn signed_bytes(act: ActionKind, wish: &ActionRequest, caller: &Caller, prepared: &PreparedCommand) -> Vec<u8> {
    let shown = (&prepared.changes, &prepared.nodes);
    let parts = (act.name(), &caller.name, wish.without_confirmation(), shown);
    // Text and numbers always serialise.
    serde_json::to_vec(&parts).unwrap_or_default()
}

fn plan_text(prepared: &PreparedCommand) -> String {
    let mut text = prepared.plan.clone();
    for (place, change) in prepared.changes.iter().enumerate() {
        if text.len() + change.len() > MAX_PLAN_LENGTH {
            text.push_str(&format!("\nand {} more", prepared.changes.len() - place));
            break;
        }
        text.push('\n');
        text.push_str(change);
    }
    text
}

async fn record_rejection(
    hall: Arc<ApiState>,
    act: ActionKind,
    by: String,
    peer: IpAddr,
    refusal: ApiError,
    left_out: u64,
) {
    tracing::info!(action = act.name(), %by, %peer, reason = %refusal, "API command rejected");
    let notes = hall.workers.audit.clone();
    let work = move || {
        let before = match left_out {
            0 => String::new(),
            more => format!(" (not recorded: {more} earlier rejections)"),
        };
        let call = ApiCall {
            action: "api-refused",
            by,
            code: refusal.code(),
            text: format!("{}: {refusal}{before}", act.name()),
            origin: peer.to_string(),
            plan: None,
            node: None,
        };
        if let Err(error) = hall.store.record_call(&call, hall.clock.now()) {
            tracing::warn!(%error, "cannot record a rejected command");
        }
    };
    // Recorded before the response, so that no caller can deny a rejection. A store that does not respond is not waited
    // for.
    if let Err(error) = notes.run(Instant::now() + REQUEST_TIMEOUT, work).await {
        tracing::warn!(%error, "cannot record a rejected command");
    }
}
