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
    schema::{count, list, object, one_of, or_null, text, timestamp},
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
    /// More nodes than the circuit breaker would allow: what the limit is, and the number to be returned with `confirm`.
    limit: Option<&'a str>,
    confirm_nodes: Option<usize>,
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
        "limit": or_null(text()),
        "confirm_nodes": or_null(count()),
        "confirm": or_null(text()),
        "expires": or_null(timestamp()),
        "next": or_null(text()),
    }))
}

/// Handles one command request.
pub(super) async fn handle_action(
    state: Arc<ApiState>,
    action: ActionKind,
    peer: IpAddr,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let caller = state.auth.authenticate(peer, &headers).await;
    let result = authorise_and_run(&state, action, &caller, peer, &headers, body).await;
    let who = caller.as_ref().map_or("unknown client", |caller| &caller.name).to_owned();
    match result {
        Ok(response) => response.respond_to(&headers),
        Err(error) => {
            let kind = if caller.is_ok_and(|caller| caller.authenticated) {
                RejectionKind::KnownCallerCommand
            } else {
                RejectionKind::UnknownClientCommand
            };
            if let Some(omitted) = state.audit_throttle.allow(kind) {
                record_rejection(state, action, who, peer, error.clone(), omitted).await;
            }
            error.into_response()
        }
    }
}

async fn authorise_and_run(
    state: &Arc<ApiState>,
    action: ActionKind,
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
    let body_bytes = timeout(BODY_TIMEOUT, to_bytes(body, MAX_BODY_BYTES)).await.map_err(|_| ApiError::BodyTimeout)?;
    let bytes = body_bytes.map_err(|error| ApiError::of_body(&error, MAX_BODY_BYTES))?;
    let (state, origin) = (Arc::clone(state), peer.to_string());
    let request = ActionRequest::parse(action, &bytes)?;
    let (until, confirmed) = (Instant::now() + REQUEST_TIMEOUT, request.confirm.is_some());
    let (workers, store) = (state.workers.commands.clone(), state.store.with_deadline(until.into_std()));
    let span = tracing::Span::current();
    let work = move || span.in_scope(|| prepare_and_run(&state, &store, action, &request, &caller, &origin));
    match workers.run(until, work).await {
        // The work continues, and its outcome is unknown.
        Err(ApiError::TimedOut) if confirmed => Err(ApiError::OutcomeUnknown),
        result => result?.map(SharedResponse::new),
    }
}

/// Prepares a command, and carries it out if this exact plan was confirmed.
fn prepare_and_run(
    state: &ApiState,
    store: &Store,
    action: ActionKind,
    request: &ActionRequest,
    caller: &Caller,
    origin: &str,
) -> Result<RawBody, ApiError> {
    // A concurrent change invalidates the plan: preparing again yields the same plan or another.
    for _ in 0..MAX_ATTEMPTS {
        if let Some(body) = try_prepare_and_run(state, store, action, request, caller, origin)? {
            return Ok(body);
        }
    }
    Err(ApiError::Overloaded)
}

/// Returns `None` if the state it was prepared on has changed before it was carried out.
fn try_prepare_and_run(
    state: &ApiState,
    store: &Store,
    action: ActionKind,
    request: &ActionRequest,
    caller: &Caller,
    origin: &str,
) -> Result<Option<RawBody>, ApiError> {
    let confirmations = &state.confirmations;
    if let Some(confirm) = &request.confirm {
        confirmations.check_unused(confirm)?;
    }
    let facts = current_facts(state, store)?;
    let catalogue = Arc::clone(&state.fleet_view().settings.catalogue);
    let prepared = request.command(action, facts.now)?.prepare(&facts, &catalogue)?;
    let (by, why) = (&caller.name, &request.why);
    // Wall-clock time, which may differ from the cluster's.
    let (now, at) = (SystemClock.now(), facts.now);
    let message = signed_bytes(action, request, caller, &prepared);
    let over_limit = prepared.over_limit.as_ref();
    let response = |action_state, text, confirm: Option<(String, Timestamp)>, next| ActionResponse {
        action: action.name(),
        state: action_state,
        text,
        changes: &prepared.changes,
        nodes: &prepared.nodes,
        by,
        why,
        at,
        limit: over_limit.map(|limit| limit.text.as_str()),
        confirm_nodes: over_limit.map(|limit| limit.nodes),
        expires: confirm.as_ref().map(|(_, expires)| *expires),
        confirm: confirm.map(|(confirm, _)| confirm),
        next,
    };
    let planned = || {
        let expires = now.plus(CONFIRMATION_TTL);
        response(
            ActionState::Planned,
            prepared.plan.as_str(),
            Some((confirmations.issue(&message, expires), expires)),
            None,
        )
    };
    let Some(confirm) = &request.confirm else { return RawBody::json(&planned()).map(Some) };
    if !confirmations.is_valid(confirm, &message, now) {
        let plan = serde_json::to_value(planned()).map_err(|_| ApiError::StoreUnavailable)?;
        return Err(ApiError::PlanChanged(plan));
    }
    if let Some(limit) = over_limit.filter(|limit| !limit.is_confirmed_by(request.confirm_nodes)) {
        return Err(ApiError::NumberNotConfirmed { limit: limit.text.clone(), nodes: limit.nodes });
    }
    // A number is a statement about the plan, below the limit too.
    let is_other = |number: &u64| usize::try_from(*number).ok() != Some(prepared.nodes.len());
    if let Some(number) = request.confirm_nodes.filter(|number| over_limit.is_none() && is_other(number)) {
        let limit = format!("`confirm_nodes` is {number}, and the plan has {}", prepared.nodes.len());
        return Err(ApiError::NumberNotConfirmed { limit, nodes: prepared.nodes.len() });
    }
    let command_origin = CommandOrigin { by: by.clone(), why: why.clone(), at };
    let node = if let [one] = prepared.nodes.as_slice() { Some(one.clone()) } else { None };
    let call = ApiCall {
        action: action.audit_name(),
        by: by.clone(),
        code: "done",
        text: why.clone(),
        origin: origin.to_owned(),
        plan: Some(plan_text(&prepared)),
        node,
    };
    confirmations.mark_used(confirm, now)?;
    // A confirmation whose plan was not carried out stays valid.
    match prepared
        .execute_for_call(&call, &state.store, &command_origin)
        .inspect_err(|_| confirmations.unmark_used(confirm))
    {
        Ok(()) => {
            state.cycle_trigger.fire();
            RawBody::json(&response(ActionState::Done, &prepared.done, None, Some(&prepared.next))).map(Some)
        }
        Err(StoreError::StateChanged { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Reads the current state from the store, as a command would: the served one may be a cycle old.
fn current_facts(state: &ApiState, store: &Store) -> Result<Facts, ApiError> {
    let now = state.clock.now();
    let (observed_at, cluster) = match snapshot::last_observed(store)? {
        Some((at, cluster)) => (Some(at), cluster),
        None => (None, ObservedCluster::unobserved(&state.fleet_view().settings)),
    };
    let now = observed_at.map_or(now, |observed_at| now.max(observed_at));
    Ok(cluster_state::facts(store, observed_at, cluster, now)?)
}

/// Returns the bytes that a confirmation signs: who, what, why, and what was shown.
fn signed_bytes(action: ActionKind, request: &ActionRequest, caller: &Caller, prepared: &PreparedCommand) -> Vec<u8> {
    let displayed = (&prepared.changes, &prepared.nodes);
    let parts = (action.name(), &caller.name, request.without_confirmation(), displayed);
    // Text and numbers always serialise.
    serde_json::to_vec(&parts).unwrap_or_default()
}

fn plan_text(prepared: &PreparedCommand) -> String {
    let mut text = prepared.plan.clone();
    for (index, change) in prepared.changes.iter().enumerate() {
        if text.len() + change.len() > MAX_PLAN_LENGTH {
            text.push_str(&format!("\nand {} more", prepared.changes.len() - index));
            break;
        }
        text.push('\n');
        text.push_str(change);
    }
    text
}

async fn record_rejection(
    state: Arc<ApiState>,
    action: ActionKind,
    by: String,
    peer: IpAddr,
    error: ApiError,
    omitted: u64,
) {
    tracing::info!(action = action.name(), %by, %peer, reason = %error, "API command rejected");
    let workers = state.workers.audit.clone();
    let work = move || {
        let before = match omitted {
            0 => String::new(),
            more => format!(" (not recorded: {more} earlier rejections)"),
        };
        let call = ApiCall {
            action: "api-refused",
            by,
            code: error.code(),
            text: format!("{}: {error}{before}", action.name()),
            origin: peer.to_string(),
            plan: None,
            node: None,
        };
        if let Err(error) = state.store.record_call(&call, state.clock.now()) {
            tracing::warn!(%error, "cannot record a rejected command");
        }
    };
    // Recorded before the response, so that no caller can deny a rejection. A store that does not respond is not waited
    // for.
    if let Err(error) = workers.run(Instant::now() + REQUEST_TIMEOUT, work).await {
        tracing::warn!(%error, "cannot record a rejected command");
    }
}
