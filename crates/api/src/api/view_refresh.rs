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
    agents, cluster_state,
    settings::Settings,
    snapshot::{self, ObservedCluster},
    snapshot_feed::{FeedMessage as Heard, SnapshotFeed},
};
use doctor_store::StoreError;

use super::state::ApiState;

/// How often a standby controller reads the store.
const STORE_POLL_INTERVAL: Duration = Duration::from_secs(15);
/// Minimum interval: a burst of results would cause a rebuild for each.
const MIN_INTERVAL: Duration = Duration::from_millis(300);

/// Rebuilds the state until the feed is closed.
pub(super) fn refresh_loop(hall: &Arc<ApiState>, audience: &SnapshotFeed, settings: &Settings) {
    // Whether the engine of this process publishes what it observes.
    let mut told = false;
    let mut settings = settings.clone();
    let mut failing = false;
    publish(hall, from_store(hall, &settings), &mut failing);
    loop {
        let made = match audience.wait(STORE_POLL_INTERVAL) {
            _ if audience.is_closed() => return,
            Some(Heard::Snapshot(seen)) => {
                told = true;
                settings = seen.settings.clone();
                cluster_state::facts_from_snapshot(&hall.store, *seen).map(|facts| (facts, settings.clone()))
            }
            Some(Heard::ReadStore) => {
                told = false;
                from_store(hall, &settings)
            }
            // Cycles may be further apart than this, and the leader will publish. An engine that hangs leads only until
            // its lease expires.
            None if told => match has_leader(hall) {
                Ok(true) => continue,
                Ok(false) => from_store(hall, &settings),
                Err(error) => Err(error),
            },
            None => from_store(hall, &settings),
        };
        let began = Instant::now();
        publish(hall, made, &mut failing);
        thread::sleep(MIN_INTERVAL.saturating_sub(began.elapsed()));
    }
}

/// Whether any controller holds the lease.
fn has_leader(hall: &ApiState) -> Result<bool, StoreError> {
    Ok(hall.store.leader()?.is_some_and(|(_, until)| until > hall.clock.now()))
}

type StateResult = Result<(Facts, Settings), StoreError>;

/// Reads what the leader saved; without a leader so far, an unobserved cluster.
fn from_store(hall: &ApiState, settings: &Settings) -> StateResult {
    let Some((at, cluster)) = snapshot::last_observed(&hall.store)? else {
        let unseen = ObservedCluster::unobserved(settings);
        let facts = cluster_state::facts(&hall.store, None, unseen, hall.clock.now())?;
        return Ok((facts, settings.clone()));
    };
    let now = hall.clock.now().max(at);
    Ok((cluster_state::facts(&hall.store, Some(at), cluster, now)?, settings.clone()))
}

fn publish(hall: &ApiState, read: StateResult, failing: &mut bool) {
    match read {
        Ok((facts, settings)) => {
            *failing = false;
            // The rest is shown without the list of agents; a failing store is reported next time.
            let agents = agents::briefs(&hall.store, &facts).unwrap_or_default();
            hall.publish(facts, settings, agents);
        }
        Err(error) => {
            if !std::mem::replace(failing, true) {
                tracing::warn!(%error, "cannot rebuild the cluster state; the last one is served");
            }
        }
    }
}
