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
    orders::{Prepared, Signature},
    picture,
    snapshot::{self, Cluster},
};
use doctor_store::{ApiCall, Store, StoreError, access::Role};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::time::{Instant, timeout};

use super::{
    confirmations::CONFIRM_WITHIN,
    guard::{Caller, may_change},
    limits::REQUEST_TIMEOUT,
    noted::Knock,
    refusal::Refusal,
    schema::{list, moment, object, one_of, or_null, text},
    state::Hall,
    wish::{Act, Wish},
};
use crate::response::{Answer, Made};

/// Maximum size of a body.
pub(super) const MOST_BODY: usize = 64 << 10;
/// Deadline for a body to arrive.
const BODY: Duration = Duration::from_secs(10);
/// Maximum length of a plan in the audit trail; a list of a thousand nodes is truncated.
const MOST_PLAN: usize = 4000;
/// Attempts to prepare a command when concurrent changes interfere.
const TRIES: usize = 3;
/// The response.
#[derive(Debug, Serialize)]
struct Said<'a> {
    action: &'static str,
    state: State,
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
enum State {
    Planned,
    Done,
}

pub(super) fn schema() -> Value {
    object(json!({
        "action": one_of(&Act::ALL.map(Act::name)),
        "state": one_of(&["planned", "done"]),
        "text": text(),
        "changes": list(text()),
        "nodes": list(text()),
        "by": text(),
        "why": text(),
        "at": moment(),
        "confirm": or_null(text()),
        "expires": or_null(moment()),
        "next": or_null(text()),
    }))
}

/// Handles one command request.
pub(super) async fn act(hall: Arc<Hall>, act: Act, peer: IpAddr, headers: HeaderMap, body: Body) -> Response {
    let caller = hall.guard.caller(peer, &headers).await;
    let asked = take(&hall, act, &caller, peer, &headers, body).await;
    let who = caller.as_ref().map_or("unknown client", |caller| &caller.name).to_owned();
    match asked {
        Ok(answer) => answer.to(&headers),
        Err(refusal) => {
            let knock = if caller.is_ok_and(|caller| caller.known) { Knock::Known } else { Knock::Stranger };
            if let Some(left_out) = hall.noted.may(knock) {
                note_refusal(hall, act, who, peer, refusal.clone(), left_out).await;
            }
            refusal.into_response()
        }
    }
}

async fn take(
    hall: &Arc<Hall>,
    act: Act,
    caller: &Result<Caller, Refusal>,
    peer: IpAddr,
    headers: &HeaderMap,
    body: Body,
) -> Result<Answer, Refusal> {
    let caller = caller.clone()?;
    may_change(headers)?;
    if !caller.known {
        return Err(Refusal::ReadOnly);
    }
    if caller.role < Role::Operator {
        return Err(Refusal::Role { is: caller.role, needed: Role::Operator });
    }
    let arrived = timeout(BODY, to_bytes(body, MOST_BODY)).await.map_err(|_| Refusal::Slow)?;
    let bytes = arrived.map_err(|_| Refusal::TooLong(MOST_BODY))?;
    let (hall, origin) = (Arc::clone(hall), peer.to_string());
    let wish = Wish::read(act, &bytes)?;
    let (until, confirmed) = (Instant::now() + REQUEST_TIMEOUT, wish.confirm.is_some());
    let (actors, store) = (hall.desks.actors.clone(), hall.store.until(until.into_std()));
    let span = tracing::Span::current();
    let work = move || span.in_scope(|| carry(&hall, &store, act, &wish, &caller, &origin));
    match actors.work(until, work).await {
        // The work continues, and its outcome is unknown.
        Err(Refusal::Late) if confirmed => Err(Refusal::Unsure),
        carried => carried?.map(Answer::new),
    }
}

/// Prepares a command, and carries it out if this exact plan was confirmed.
fn carry(hall: &Hall, store: &Store, act: Act, wish: &Wish, caller: &Caller, origin: &str) -> Result<Made, Refusal> {
    // A concurrent change invalidates the plan: preparing again yields the same plan or another.
    for _ in 0..TRIES {
        if let Some(made) = carried(hall, store, act, wish, caller, origin)? {
            return Ok(made);
        }
    }
    Err(Refusal::Busy)
}

/// Returns `None` if the state it was prepared on has changed before it was carried out.
fn carried(
    hall: &Hall,
    store: &Store,
    act: Act,
    wish: &Wish,
    caller: &Caller,
    origin: &str,
) -> Result<Option<Made>, Refusal> {
    let acting = &hall.confirmations;
    if let Some(confirm) = &wish.confirm {
        acting.was_used(confirm)?;
    }
    let facts = facts_now(hall, store)?;
    let catalogue = Arc::clone(&hall.scene().settings.catalogue);
    let prepared = wish.order(act, facts.now)?.prepare(&facts, &catalogue)?;
    let (by, why) = (&caller.name, &wish.why);
    // Wall-clock time, which may differ from the cluster's.
    let (now, at) = (SystemClock.now(), facts.now);
    let words = words(act, wish, caller, &prepared);
    let said = |state, text, confirm: Option<(String, Timestamp)>, next| Said {
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
        let expires = now.plus(CONFIRM_WITHIN);
        said(State::Planned, prepared.plan.as_str(), Some((acting.make(&words, expires), expires)), None)
    };
    let Some(confirm) = &wish.confirm else { return Made::json(&planned()).map(Some) };
    if !acting.is_mine(confirm, &words, now) {
        let plan = serde_json::to_value(planned()).map_err(|_| Refusal::Store)?;
        return Err(Refusal::OtherPlan(plan));
    }
    let signed = Signature { by: by.clone(), why: why.clone(), at };
    let node = if let [one] = prepared.nodes.as_slice() { Some(one.clone()) } else { None };
    let call = ApiCall {
        what: act.audit(),
        by: by.clone(),
        code: "done",
        words: why.clone(),
        origin: origin.to_owned(),
        plan: Some(plan_text(&prepared)),
        node,
    };
    acting.use_up(confirm, now)?;
    // A confirmation whose plan was not carried out stays valid.
    match prepared.carry_out_for(&call, &hall.store, &signed).inspect_err(|_| acting.give_back(confirm)) {
        Ok(()) => {
            hall.wake.ring();
            Made::json(&said(State::Done, &prepared.done, None, Some(&prepared.next))).map(Some)
        }
        Err(StoreError::Changed { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Reads the current state from the store, as a command would: the served one may be a cycle old.
fn facts_now(hall: &Hall, store: &Store) -> Result<Facts, Refusal> {
    let now = hall.clock.now();
    let (seen, cluster) = match snapshot::last_seen(store)? {
        Some((at, cluster)) => (Some(at), cluster),
        None => (None, Cluster::unseen(&hall.scene().settings)),
    };
    let now = seen.map_or(now, |seen| now.max(seen));
    Ok(picture::facts(store, seen, cluster, now)?)
}

/// Returns the bytes that a confirmation signs: who, what, why, and what was shown.
fn words(act: Act, wish: &Wish, caller: &Caller, prepared: &Prepared) -> Vec<u8> {
    let shown = (&prepared.changes, &prepared.nodes);
    let parts = (act.name(), &caller.name, wish.asked(), shown);
    // Text and numbers always serialise.
    serde_json::to_vec(&parts).unwrap_or_default()
}

fn plan_text(prepared: &Prepared) -> String {
    let mut text = prepared.plan.clone();
    for (place, change) in prepared.changes.iter().enumerate() {
        if text.len() + change.len() > MOST_PLAN {
            text.push_str(&format!("\nand {} more", prepared.changes.len() - place));
            break;
        }
        text.push('\n');
        text.push_str(change);
    }
    text
}

async fn note_refusal(hall: Arc<Hall>, act: Act, by: String, peer: IpAddr, refusal: Refusal, left_out: u64) {
    tracing::info!(action = act.name(), %by, %peer, reason = %refusal, "API command rejected");
    let notes = hall.desks.notes.clone();
    let work = move || {
        let before = match left_out {
            0 => String::new(),
            more => format!(" (not recorded: {more} earlier rejections)"),
        };
        let call = ApiCall {
            what: "api-refused",
            by,
            code: refusal.code(),
            words: format!("{}: {refusal}{before}", act.name()),
            origin: peer.to_string(),
            plan: None,
            node: None,
        };
        if let Err(error) = hall.store.note_call(&call, hall.clock.now()) {
            tracing::warn!(%error, "cannot record a rejected command");
        }
    };
    // Recorded before the response, so that no caller can deny a rejection. A store that does not respond is not waited
    // for.
    if let Err(error) = notes.work(Instant::now() + REQUEST_TIMEOUT, work).await {
        tracing::warn!(%error, "cannot record a rejected command");
    }
}
