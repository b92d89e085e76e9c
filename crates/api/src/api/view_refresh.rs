//! Rebuilds the served cluster state after each cycle.
//!
//! The leader builds it from what its engine has just observed. A standby controller builds it periodically from what
//! the leader saved in the store: clients may use any of them.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use doctor_core::view::Facts;
use doctor_engine::{
    agents,
    audience::{Audience, News as Heard},
    picture,
    settings::Settings,
    snapshot::{self, Cluster},
};
use doctor_store::StoreError;

use super::state::Hall;

/// How often a standby controller reads the store.
const STORE_EVERY: Duration = Duration::from_secs(15);
/// Minimum interval: a burst of results would cause a rebuild for each.
const APART: Duration = Duration::from_millis(300);

/// Rebuilds the state until the feed is closed.
pub(super) fn watch(hall: &Arc<Hall>, audience: &Audience, settings: &Settings) {
    // Whether the engine of this process publishes what it observes.
    let mut told = false;
    let mut settings = settings.clone();
    let mut failing = false;
    show(hall, from_store(hall, &settings), &mut failing);
    loop {
        let made = match audience.wait(STORE_EVERY) {
            _ if audience.is_closed() => return,
            Some(Heard::Seen(seen)) => {
                told = true;
                settings = seen.settings.clone();
                picture::facts_of(&hall.store, *seen).map(|facts| (facts, settings.clone()))
            }
            Some(Heard::AskTheStore) => {
                told = false;
                from_store(hall, &settings)
            }
            // Cycles may be further apart than this, and the leader will publish. An engine that hangs leads only until
            // its lease expires.
            None if told => match leads(hall) {
                Ok(true) => continue,
                Ok(false) => from_store(hall, &settings),
                Err(error) => Err(error),
            },
            None => from_store(hall, &settings),
        };
        let began = Instant::now();
        show(hall, made, &mut failing);
        thread::sleep(APART.saturating_sub(began.elapsed()));
    }
}

/// Whether any controller holds the lease.
fn leads(hall: &Hall) -> Result<bool, StoreError> {
    Ok(hall.store.leader()?.is_some_and(|(_, until)| until > hall.clock.now()))
}

type Read = Result<(Facts, Settings), StoreError>;

/// Reads what the leader saved; without a leader so far, an unobserved cluster.
fn from_store(hall: &Hall, settings: &Settings) -> Read {
    let Some((at, cluster)) = snapshot::last_seen(&hall.store)? else {
        let unseen = Cluster::unseen(settings);
        let facts = picture::facts(&hall.store, None, unseen, hall.clock.now())?;
        return Ok((facts, settings.clone()));
    };
    let now = hall.clock.now().max(at);
    Ok((picture::facts(&hall.store, Some(at), cluster, now)?, settings.clone()))
}

fn show(hall: &Hall, read: Read, failing: &mut bool) {
    match read {
        Ok((facts, settings)) => {
            *failing = false;
            // The rest is shown without the list of agents; a failing store is reported next time.
            let agents = agents::briefs(&hall.store, &facts).unwrap_or_default();
            hall.show(facts, settings, agents);
        }
        Err(error) => {
            if !std::mem::replace(failing, true) {
                tracing::warn!(%error, "cannot rebuild the cluster state; the last one is served");
            }
        }
    }
}
