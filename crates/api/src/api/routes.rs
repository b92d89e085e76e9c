//! Every place that can be read, in one table: the server, the description and the tests go by it.

use serde::Serialize;
use serde_json::Value;

use doctor_store::Store;

use super::{
    Hall,
    answer::{Lasts, Made},
    asked::{Asked, Param},
    audit, budget, cases, figures, findings, fleet, history, nodes, plan,
    refusal::Refusal,
    runs,
    scene::Scene,
    status, tests,
};

/// A place that can be read.
#[derive(Debug, Clone, Copy)]
pub(super) struct Route {
    /// Below `/api/v1`.
    pub(super) path: &'static str,
    /// What a program that is made from the description calls it.
    pub(super) name: &'static str,
    pub(super) summary: &'static str,
    pub(super) about: &'static str,
    pub(super) params: &'static [Param],
    pub(super) lasts: Lasts,
    /// The form of the answer, and its kind where that is not JSON.
    pub(super) answer: fn() -> Value,
    pub(super) kind: &'static str,
    pub(super) read: fn(&Look<'_>) -> Result<Made, Refusal>,
}

/// What an answer is made from.
pub(super) struct Look<'a> {
    pub(super) hall: &'a Hall,
    /// The store, for as long as whoever asks waits.
    pub(super) store: Store,
    pub(super) scene: &'a Scene,
    pub(super) asked: &'a Asked,
    pub(super) route: &'static Route,
}

impl Look<'_> {
    /// How many rows a page has.
    pub(super) fn limit(&self) -> u32 {
        self.asked.count(self.route.params)
    }
}

pub(super) const JSON: &str = "application/json";

/// A page of a list, and where the next one begins.
#[derive(Debug, Serialize)]
pub(super) struct Page<T> {
    pub(super) items: Vec<T>,
    pub(super) next: Option<String>,
}

impl<T> Page<T> {
    /// Of one more row than were asked for, if there are more.
    pub(super) fn of(mut rows: Vec<T>, limit: u32, place: impl FnOnce(&T) -> String) -> Self {
        let limit = limit as usize;
        let more = rows.len() > limit;
        rows.truncate(limit);
        let next = rows.last().filter(|_| more).map(place);
        Self { items: rows, next }
    }
}

pub(super) const ROUTES: [&Route; 22] = [
    &status::STATUS,
    &status::COVERAGE,
    &fleet::MAP,
    &nodes::LIST,
    &nodes::ONE,
    &nodes::TIMELINE,
    &figures::OF_NODE,
    &findings::LIST,
    &cases::LIST,
    &cases::ONE,
    &plan::PLAN,
    &runs::LIST,
    &runs::ONE,
    &runs::LOG,
    &runs::EVIDENCE,
    &history::LIST,
    &tests::LIST,
    &tests::ONE,
    &figures::VALUES,
    &budget::BUDGET,
    &audit::LIST,
    &status::POLICY,
];
