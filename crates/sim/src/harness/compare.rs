//! Compares policies on the same seeds: what each would have found, how fast, and at what cost to users.
//!
//! All policies run the same engine, tests and rules on the same faults and users (common random numbers). They differ
//! in what chooses the tests: our planner; the seed's method (nodes by their newest result of any test, oldest first,
//! all tests together, in batches that must finish first); no validation; or an oracle that knows the bad nodes and
//! tests them as soon as they are free.

use std::collections::BTreeSet;

use doctor_core::{
    ids::NodeName,
    snapshot::{CommandKind, Pause, TestRecord},
    time::{Span, Timestamp},
};
use doctor_store::{StoreError, records::StoredNode};
use serde::Serialize;

use super::{
    score::{Score, median, round},
    session::{Session, SessionConfig, SessionError},
};
use crate::WorldConfig;

/// What chooses the tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SelectionPolicy {
    /// No validation at all; agents still report.
    NoValidation,
    /// The seed's queue.
    Seed,
    Ours,
    Oracle,
}

impl SelectionPolicy {
    pub const ALL: &'static [Self] = &[Self::NoValidation, Self::Seed, Self::Ours, Self::Oracle];

    pub const fn word(self) -> &'static str {
        match self {
            Self::NoValidation => "no validation",
            Self::Seed => "seed (oldest first, all tests)",
            Self::Ours => "ours",
            Self::Oracle => "oracle",
        }
    }
}

/// The result of one policy over several seeds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    pub policy: SelectionPolicy,
    pub seeds: usize,
    pub faults: usize,
    pub found: usize,
    pub median_hours_to_detect: Option<f64>,
    /// For faults that only a test can detect.
    pub median_hours_to_detect_by_tests: Option<f64>,
    pub user_node_hours_lost: f64,
    pub validation_node_hours: f64,
    pub false_alarms: u32,
    pub user_jobs_disturbed: u64,
}

/// Plays every policy on every seed.
///
/// # Errors If a session cannot be created or its store fails.
pub fn compare(
    world: &WorldConfig,
    days: u32,
    seeds: &[u64],
    mut progress: impl FnMut(SelectionPolicy, u64),
) -> Result<Vec<Row>, SessionError> {
    let mut rows = Vec::new();
    for chooser in SelectionPolicy::ALL {
        let mut scores = Vec::new();
        for seed in seeds {
            progress(*chooser, *seed);
            scores.push(play(world.clone().with_seed(*seed), days, *chooser)?);
        }
        rows.push(row(*chooser, &scores));
    }
    Ok(rows)
}

/// Plays one policy on one seed.
///
/// # Errors If the session cannot be created or its store fails.
pub fn play(world: WorldConfig, days: u32, chooser: SelectionPolicy) -> Result<Score, SessionError> {
    let mut session = Session::new(SessionConfig::new(world))?;
    let until = session.backend().world().now().plus(Span::days(i64::from(days)));
    if chooser != SelectionPolicy::Ours {
        // A pause keeps our planner from starting validation; it still carries out requests.
        let why = "another policy chooses".to_owned();
        session.store().pause(&Pause { pool: None, by: "compare".into(), why, since: session.now(), until: None })?;
    }
    let mut queue = Requests::default();
    session.run_until(until, |session, _| {
        match chooser {
            SelectionPolicy::NoValidation | SelectionPolicy::Ours => {}
            SelectionPolicy::Seed => queue.seed(session)?,
            SelectionPolicy::Oracle => queue.oracle(session)?,
        }
        Ok(())
    })?;
    Score::of(&session)
}

/// Open requests of another chooser.
#[derive(Debug, Default)]
struct Requests {
    batch: Vec<(NodeName, Timestamp)>,
    requested: BTreeSet<(NodeName, Timestamp)>,
}

/// The seed's batch size and age threshold.
const BATCH: usize = 5;
const THRESHOLD: Span = Span::days(7);

impl Requests {
    /// Requests tests on free nodes whose newest result of any test is old, oldest first, in batches that must finish
    /// first.
    fn seed(&mut self, session: &Session) -> Result<(), SessionError> {
        let now = session.now();
        let waiting = !session.store().active_runs()?.is_empty() || !session.store().open_commands()?.is_empty();
        // A node that was taken before its job started never gets a result; the seed's pending timeout drops it.
        self.batch.retain(|(_, requested_at)| now.since(*requested_at) < Span::minutes(5));
        if waiting || !self.batch.is_empty() {
            return Ok(());
        }
        let stored = session.store().load_nodes()?;
        let mut free: Vec<(Option<Timestamp>, NodeName)> = free_nodes(session)
            .into_iter()
            .map(|name| (stored.get(&name).and_then(newest), name))
            .filter(|(newest, _)| newest.is_none_or(|at| now.since(at) >= THRESHOLD))
            .collect();
        free.sort();
        for (_, name) in free.into_iter().take(BATCH) {
            request_tests(session, &name, now)?;
            self.batch.push((name, now));
        }
        Ok(())
    }

    /// Requests tests on bad nodes as soon as they are free; repeatedly, because our rules require a confirmed failure.
    fn oracle(&mut self, session: &Session) -> Result<(), SessionError> {
        let now = session.now();
        let free: BTreeSet<NodeName> = free_nodes(session).into_iter().collect();
        let busy: BTreeSet<NodeName> =
            session.store().active_runs()?.into_iter().map(|stored| stored.run.nodes.first().clone()).collect();
        let truth = session.backend().world().truth();
        let bad = truth.faults.into_iter().filter(|fault| fault.marked.is_none() && fault.cured.is_none());
        self.requested.retain(|(_, at)| now.since(*at) < Span::minutes(45));
        for fault in bad.filter(|fault| free.contains(&fault.node) && !busy.contains(&fault.node)) {
            if !self.requested.iter().any(|(node, _)| *node == fault.node) {
                request_tests(session, &fault.node, now)?;
                self.requested.insert((fault.node, now));
            }
        }
        Ok(())
    }
}

fn newest(node: &StoredNode) -> Option<Timestamp> {
    node.records.values().filter_map(TestRecord::attempt).max()
}

fn free_nodes(session: &Session) -> Vec<NodeName> {
    let seen = session.backend().world().snapshot().unwrap_or_default();
    let free = seen.into_iter().filter(|seen| {
        seen.node.occupancy.is_free()
            && seen.node.marks.ours.is_empty()
            && seen.node.marks.blocking_foreign_mark().is_none()
    });
    free.map(|seen| seen.node.name.clone()).collect()
}

fn request_tests(session: &Session, node: &NodeName, now: Timestamp) -> Result<(), StoreError> {
    let command = CommandKind::Test { node: node.clone(), tests: Vec::new(), run: None };
    session.store().add_command(&command, "compare", "chosen by another policy", now).map(drop)
}

fn row(policy: SelectionPolicy, scores: &[Score]) -> Row {
    let medians = |of: fn(&Score) -> Option<f64>| {
        let mut values: Vec<f64> = scores.iter().filter_map(of).collect();
        values.sort_by(f64::total_cmp);
        median(&values).map(round)
    };
    Row {
        policy,
        seeds: scores.len(),
        faults: scores.iter().map(|score| score.faults_injected).sum(),
        found: scores.iter().map(|score| score.faults_found).sum(),
        median_hours_to_detect: medians(|score| score.median_hours_to_detect),
        median_hours_to_detect_by_tests: medians(|score| score.median_hours_to_detect_by_tests),
        user_node_hours_lost: round(scores.iter().map(|score| score.user_node_hours_lost).sum()),
        validation_node_hours: round(scores.iter().map(|score| score.validation_node_hours).sum()),
        false_alarms: scores.iter().map(|score| score.false_alarms).sum(),
        user_jobs_disturbed: scores.iter().map(|score| score.user_jobs_disturbed).sum(),
    }
}
