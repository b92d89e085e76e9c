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
    snapshot_feed::{FeedMessage, SnapshotFeed},
};
use doctor_store::StoreError;

use super::state::ApiState;

/// How often a standby controller reads the store.
const STORE_POLL_INTERVAL: Duration = Duration::from_secs(15);
/// Minimum interval: a burst of results would cause a rebuild for each.
const MIN_INTERVAL: Duration = Duration::from_millis(300);

/// Rebuilds the state until the feed is closed.
pub(super) fn refresh_loop(state: &Arc<ApiState>, feed: &SnapshotFeed, settings: &Settings) {
    // Whether the engine of this process publishes what it observes.
    let mut engine_publishes = false;
    let mut settings = settings.clone();
    let mut failing = false;
    publish(state, from_store(state, &settings), &mut failing);
    loop {
        let result = match feed.wait(STORE_POLL_INTERVAL) {
            _ if feed.is_closed() => return,
            Some(FeedMessage::Snapshot(observed)) => {
                engine_publishes = true;
                settings = observed.settings.clone();
                cluster_state::facts_from_snapshot(&state.store, *observed).map(|facts| (facts, settings.clone()))
            }
            Some(FeedMessage::ReadStore) => {
                engine_publishes = false;
                from_store(state, &settings)
            }
            // Cycles may be further apart than this, and the leader will publish. An engine that hangs leads only until
            // its lease expires.
            None if engine_publishes => match has_leader(state) {
                Ok(true) => continue,
                Ok(false) => from_store(state, &settings),
                Err(error) => Err(error),
            },
            None => from_store(state, &settings),
        };
        let began = Instant::now();
        publish(state, result, &mut failing);
        thread::sleep(MIN_INTERVAL.saturating_sub(began.elapsed()));
    }
}

/// Whether any controller holds the lease.
fn has_leader(state: &ApiState) -> Result<bool, StoreError> {
    let now = state.clock.now();
    Ok(state.store.leader_at(now)?.is_some_and(|(_, until)| until > now))
}

type StateResult = Result<(Facts, Settings), StoreError>;

/// Reads what the leader saved; without a leader so far, an unobserved cluster.
fn from_store(state: &ApiState, settings: &Settings) -> StateResult {
    let Some((at, cluster)) = snapshot::last_observed(&state.store)? else {
        let unobserved = ObservedCluster::unobserved(settings);
        let facts = cluster_state::facts(&state.store, None, unobserved, state.clock.now())?;
        return Ok((facts, settings.clone()));
    };
    let now = state.clock.now().max(at);
    Ok((cluster_state::facts(&state.store, Some(at), cluster, now)?, settings.clone()))
}

fn publish(state: &ApiState, result: StateResult, failing: &mut bool) {
    match result {
        Ok((facts, settings)) => {
            *failing = false;
            // The rest is shown without the list of agents; a failing store is reported next time.
            let agents = agents::briefs(&state.store, &facts).unwrap_or_default();
            state.publish(facts, settings, agents);
        }
        Err(error) => {
            if !std::mem::replace(failing, true) {
                tracing::warn!(%error, "cannot rebuild the cluster state; the last one is served");
            }
        }
    }
}
