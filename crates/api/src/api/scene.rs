//! The picture of the cluster that everybody is shown, made anew after each cycle, and what is different in it.
//!
//! A controller that leads makes it from what its engine has just seen. One that waits makes it from what the leader left in the
//! store, now and then: people may look at any of them.

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use doctor_core::{
    ids::{CaseId, NodeName, RunId},
    snapshot::NodeRecord,
    time::Span,
    view::{Facts, FleetMap, MapRow, fleet_map},
};
use doctor_engine::{
    agents::{self, AgentBrief},
    audience::{Audience, News as Heard},
    picture,
    settings::Settings,
    snapshot::{self, Cluster},
};
use doctor_store::StoreError;

use super::{Hall, news::Change};

/// A controller that does not lead looks into the store this often.
const STORE_EVERY: Duration = Duration::from_secs(15);
/// Pictures are made no faster: a burst of results would make one for each.
const APART: Duration = Duration::from_millis(300);

/// A picture that is older than this is said to be: cycles and looks into the store are closer together.
const OLD: Duration = Duration::from_secs(120);
/// The moment that an answer is of.
const OF: &str = "x-doctor-picture";
/// How old the picture is, where it is old.
const AGE: &str = "x-doctor-picture-age";

/// What is shown.
#[derive(Debug)]
pub(super) struct Scene {
    pub(super) number: u64,
    pub(super) facts: Facts,
    pub(super) settings: Settings,
    pub(super) map: FleetMap,
    pub(super) agents: BTreeMap<NodeName, AgentBrief>,
    /// What each thing comes down to, to tell what changed.
    marks: Marks,
    made: Instant,
}

#[derive(Debug, Default)]
struct Marks {
    nodes: BTreeMap<NodeName, u64>,
    runs: BTreeMap<RunId, u64>,
    cases: BTreeMap<CaseId, u64>,
    rest: u64,
}

impl Scene {
    pub(super) fn new(
        number: u64,
        facts: Facts,
        settings: Settings,
        agents: BTreeMap<NodeName, AgentBrief>,
        rack_before: Option<&str>,
    ) -> Self {
        let map = fleet_map(&facts, rack_before);
        let marks = Marks::of(&facts, &map, &agents);
        Self { number, facts, settings, map, agents, marks, made: Instant::now() }
    }

    /// How old it is, if no new one was made for longer than it should take.
    pub(super) fn old(&self) -> Option<Span> {
        let age = self.made.elapsed();
        (age > OLD).then(|| Span::from_secs(i64::try_from(age.as_secs()).unwrap_or(i64::MAX)))
    }

    /// Says on an answer of which moment it is, and that it is old if it is.
    pub(super) fn date(&self, headers: &mut HeaderMap) {
        let values = [(OF, Some(self.facts.now.to_string())), (AGE, self.old().map(|age| age.to_string()))];
        for (name, value) in values {
            let value = value.and_then(|value| HeaderValue::from_str(&value).ok());
            headers.extend(value.map(|value| (HeaderName::from_static(name), value)));
        }
    }

    /// What is different from an earlier one. `None`: nothing is known of an earlier one.
    pub(super) fn changes(&self, before: Option<&Self>) -> Vec<Change> {
        let Some(before) = before.map(|before| &before.marks) else { return vec![Change::Everything] };
        let now = &self.marks;
        let mut changes = Vec::new();
        changes.extend(some(differing(&before.nodes, &now.nodes)).map(Change::Nodes));
        changes.extend(some(differing(&before.runs, &now.runs)).map(Change::Runs));
        changes.extend(some(differing(&before.cases, &now.cases)).map(Change::Cases));
        changes.extend((before.rest != now.rest).then_some(Change::Status));
        changes.extend((!changes.is_empty()).then_some(Change::Plan));
        changes
    }
}

fn some<T>(items: Vec<T>) -> Option<Vec<T>> {
    (!items.is_empty()).then_some(items)
}

/// New, changed and gone ones.
fn differing<K: Ord + Clone>(before: &BTreeMap<K, u64>, now: &BTreeMap<K, u64>) -> Vec<K> {
    let changed = now.iter().filter(|(key, mark)| before.get(*key) != Some(*mark)).map(|(key, _)| key);
    let gone = before.keys().filter(|key| !now.contains_key(*key));
    changed.chain(gone).cloned().collect::<BTreeSet<K>>().into_iter().collect()
}

fn mark(parts: impl FnOnce(&mut DefaultHasher)) -> u64 {
    let mut hasher = DefaultHasher::new();
    parts(&mut hasher);
    hasher.finish()
}

impl Marks {
    fn of(facts: &Facts, map: &FleetMap, agents: &BTreeMap<NodeName, AgentBrief>) -> Self {
        let snapshot = &facts.snapshot;
        let records = facts.nodes().map(|(record, _)| record);
        let nodes = map.nodes.iter().zip(records).map(|(row, record)| {
            // That an agent was heard again a minute later is no change.
            let agent = agents.get(&row.node).map(|agent| (agent.state, &agent.program));
            (row.node.clone(), mark(|to| (node_mark(row, record), agent).hash(to)))
        });
        let runs = snapshot.runs.iter().map(|active| (active.run.id, mark(|to| said(to, &active.run.state))));
        let cases = snapshot.cases.iter().map(|case| (case.id, mark(|to| said(to, case))));
        let rest = mark(|to| {
            said(to, &(&snapshot.breaker, &snapshot.pauses, &snapshot.requests, snapshot.policy.version));
        });
        Self { nodes: nodes.collect(), runs: runs.collect(), cases: cases.collect(), rest }
    }
}

/// By how it is written for programmers: whatever differs there is worth a look.
fn said(to: &mut DefaultHasher, what: &impl std::fmt::Debug) {
    format!("{what:?}").hash(to);
}

fn node_mark(row: &MapRow, record: &NodeRecord) -> u64 {
    mark(|to| {
        row.hash(to);
        record.since.hash(to);
        record.case.hash(to);
        for known in &record.records {
            known.attempt().hash(to);
        }
        for open in &record.findings {
            (open.times, open.last_seen, open.first_seen).hash(to);
        }
        if !record.node.marks.ours.is_empty() || !record.node.marks.foreign.is_empty() {
            said(to, &record.node.marks);
        }
        said(to, &(&record.node.occupancy, &record.hold));
    })
}

/// Makes pictures until the audience is closed.
pub(super) fn watch(hall: &Arc<Hall>, audience: &Audience, settings: &Settings) {
    // Whether the engine of this process tells what it sees.
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
            // Cycles may be further apart than this, and who leads will tell. An engine that hangs leads only until its lease ends.
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

/// Whether somebody's lease goes on.
fn leads(hall: &Hall) -> Result<bool, StoreError> {
    Ok(hall.store.leader()?.is_some_and(|(_, until)| until > hall.clock.now()))
}

type Read = Result<(Facts, Settings), StoreError>;

/// What the leader left; if none has led yet, what is known without one.
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
            // Without the list of agents the rest is still to be shown; that the store fails is said next time.
            let agents = agents::briefs(&hall.store, &facts).unwrap_or_default();
            hall.show(facts, settings, agents);
        }
        Err(error) => {
            if !std::mem::replace(failing, true) {
                tracing::warn!(%error, "the picture of the cluster could not be made; the last one is shown");
            }
        }
    }
}
