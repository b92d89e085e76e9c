//! The types of an endpoint that can be read: its entry in the route table, the input of its handler, and a page of a list.

use doctor_store::Store;
use serde::Serialize;
use serde_json::Value;

use super::{
    answer::Lasts,
    asked::{Asked, Param},
    refusal::Refusal,
    scene::Scene,
    state::Hall,
};
use crate::response::Made;

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
