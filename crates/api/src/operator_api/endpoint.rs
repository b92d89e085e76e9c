//! Types of a readable endpoint: its entry in the route table, the input of its handler, and a page of a list.

use doctor_store::Store;
use serde::Serialize;
use serde_json::Value;

use super::{
    error::ApiError,
    fleet_view::FleetView,
    params::{Param, RequestParams},
    response_cache::CachePolicy,
    state::ApiState,
};
use crate::response::RawBody;

/// A readable endpoint.
#[derive(Debug, Clone, Copy)]
pub(super) struct Route {
    /// Relative to `/api/v1`.
    pub(super) path: &'static str,
    /// Operation id, which generated clients use as the method name.
    pub(super) name: &'static str,
    pub(super) summary: &'static str,
    pub(super) description: &'static str,
    pub(super) params: &'static [Param],
    pub(super) cache_policy: CachePolicy,
    /// Schema of the response, and its content type where that is not JSON.
    pub(super) response_schema: fn() -> Value,
    pub(super) content_type: &'static str,
    pub(super) handler: fn(&RequestContext<'_>) -> Result<RawBody, ApiError>,
}

/// Input of a handler.
pub(super) struct RequestContext<'a> {
    pub(super) state: &'a ApiState,
    /// The store, with the request's deadline.
    pub(super) store: Store,
    pub(super) fleet_view: &'a FleetView,
    pub(super) params: &'a RequestParams,
    pub(super) route: &'static Route,
}

impl RequestContext<'_> {
    /// Returns the page size.
    pub(super) fn page_size(&self) -> u32 {
        self.params.page_size(self.route.params)
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
    pub(super) fn from_rows(mut rows: Vec<T>, limit: u32, cursor: impl FnOnce(&T) -> String) -> Self {
        let limit = limit as usize;
        let more = rows.len() > limit;
        rows.truncate(limit);
        let next = rows.last().filter(|_| more).map(cursor);
        Self { items: rows, next }
    }
}
