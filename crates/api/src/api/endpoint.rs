//! Types of a readable endpoint: its entry in the route table, the input of its handler, and a page of a list.

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

/// A readable endpoint.
#[derive(Debug, Clone, Copy)]
pub(super) struct Route {
    /// Relative to `/api/v1`.
    pub(super) path: &'static str,
    /// Operation id, which generated clients use as the method name.
    pub(super) name: &'static str,
    pub(super) summary: &'static str,
    pub(super) about: &'static str,
    pub(super) params: &'static [Param],
    pub(super) lasts: Lasts,
    /// Schema of the response, and its content type where that is not JSON.
    pub(super) answer: fn() -> Value,
    pub(super) kind: &'static str,
    pub(super) read: fn(&Look<'_>) -> Result<Made, Refusal>,
}

/// Input of a handler.
pub(super) struct Look<'a> {
    pub(super) hall: &'a Hall,
    /// The store, with the request's deadline.
    pub(super) store: Store,
    pub(super) scene: &'a Scene,
    pub(super) asked: &'a Asked,
    pub(super) route: &'static Route,
}

impl Look<'_> {
    /// Returns the page size.
    pub(super) fn limit(&self) -> u32 {
        self.asked.count(self.route.params)
    }
}

pub(super) const JSON: &str = "application/json";

/// A page of a list, and where the next one starts.
#[derive(Debug, Serialize)]
pub(super) struct Page<T> {
    pub(super) items: Vec<T>,
    pub(super) next: Option<String>,
}

impl<T> Page<T> {
    /// Builds a page from up to one row more than the limit, which shows whether there is a next page.
    pub(super) fn of(mut rows: Vec<T>, limit: u32, place: impl FnOnce(&T) -> String) -> Self {
        let limit = limit as usize;
        let more = rows.len() > limit;
        rows.truncate(limit);
        let next = rows.last().filter(|_| more).map(place);
        Self { items: rows, next }
    }
}
