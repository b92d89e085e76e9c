//! Response cache: identical requests within a short time share one response.
//!
//! A memory limit covers all responses, both cached and being sent: a response releases its share when it is neither.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use tokio::sync::Semaphore;

use super::error::ApiError;
use crate::response::{RawBody, SharedResponse};

/// Limits of the cache; beyond them responses are made again.
const MAX_BYTES: usize = 16 << 20;
const MAX_RESPONSES: usize = 1024;
/// Memory for all responses, cached or being sent, in KiB.
const MEMORY_LIMIT_KIB: usize = 48 << 10;
/// How long a response is served from the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CachePolicy {
    /// While the same cluster state is served.
    UntilStateChanges,
    /// Briefly, because the store may change at any time.
    Briefly,
}

const BRIEF_TTL: Duration = Duration::from_secs(1);

/// Cached responses by request.
#[derive(Debug)]
pub(super) struct ResponseCache {
    entries: Mutex<CacheEntries>,
    memory: Arc<Semaphore>,
}

/// A request's digest, from [`RequestParams::key`](super::params::RequestParams::key).
type RequestKey = [u8; 32];

#[derive(Debug, Default)]
struct CacheEntries {
    by_request: HashMap<RequestKey, Arc<CacheEntry>>,
    bytes: usize,
}

/// One entry of the cache. The request that makes the response holds the lock; other requests for the same wait for it.
pub(super) type CacheEntry = tokio::sync::Mutex<Option<CachedResponse>>;

#[derive(Debug)]
pub(super) struct CachedResponse {
    pub(super) response: SharedResponse,
    view_number: u64,
    created: Instant,
}

impl CachedResponse {
    pub(super) fn is_fresh(&self, view_number: u64, policy: CachePolicy) -> bool {
        self.view_number == view_number
            && (policy == CachePolicy::UntilStateChanges || self.created.elapsed() < BRIEF_TTL)
    }
}

impl ResponseCache {
    fn lock(&self) -> MutexGuard<'_, CacheEntries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn new() -> Self {
        Self { entries: Mutex::default(), memory: Arc::new(Semaphore::new(MEMORY_LIMIT_KIB)) }
    }

    /// Reserves memory for a response. Clears the cache if there is none; responses being sent keep theirs.
    pub(super) fn reserve(&self, body: RawBody) -> Result<SharedResponse, ApiError> {
        let response = SharedResponse::new(body);
        let size = u32::try_from(response.memory_size() / 1024 + 1).unwrap_or(u32::MAX);
        let permit = || Arc::clone(&self.memory).try_acquire_many_owned(size);
        let permit = permit().or_else(|_| {
            *self.lock() = CacheEntries::default();
            permit()
        });
        let permit = permit.map_err(|_| ApiError::Overloaded)?;
        Ok(response.with_memory_permit(permit))
    }

    pub(super) fn entry(&self, key: RequestKey) -> Arc<CacheEntry> {
        let mut entries = self.lock();
        if let Some(entry) = entries.by_request.get(&key) {
            return Arc::clone(entry);
        }
        if entries.by_request.len() >= MAX_RESPONSES || entries.bytes > MAX_BYTES {
            *entries = CacheEntries::default();
        }
        let entry = Arc::new(CacheEntry::default());
        entries.by_request.insert(key, Arc::clone(&entry));
        entry
    }

    /// Removes all responses: none is served again after the cluster state has changed. Requests that are waiting for a
    /// response still get it.
    pub(super) fn clear(&self) {
        *self.lock() = CacheEntries::default();
    }

    /// Removes an outdated response.
    pub(super) fn evict(&self, entry: &mut Option<CachedResponse>) {
        if let Some(old) = entry.take() {
            let mut entries = self.lock();
            entries.bytes = entries.bytes.saturating_sub(old.response.memory_size());
        }
    }

    /// Stores a response.
    pub(super) fn insert(&self, entry: &mut Option<CachedResponse>, response: SharedResponse, view_number: u64) {
        let old_size = entry.as_ref().map_or(0, |old| old.response.memory_size());
        let mut entries = self.lock();
        entries.bytes = entries.bytes.saturating_sub(old_size) + response.memory_size();
        *entry = Some(CachedResponse { response, view_number, created: Instant::now() });
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderMap;

    use super::*;

    /// Returns a body that takes as much memory compressed.
    fn incompressible(length: usize) -> RawBody {
        let mut state = 1_u32;
        let mut next = || {
            // xorshift
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            state.to_le_bytes()[0]
        };
        RawBody { bytes: (0..length).map(|_| next()).collect(), content_type: "text/plain", file_name: None }
    }

    #[test]
    fn cached_responses_stay_within_the_memory_limit() {
        let cache = ResponseCache::new();
        for n in 0..60 {
            let entry = cache.entry([n; 32]);
            let body = incompressible(400_000);
            cache.insert(&mut entry.blocking_lock(), cache.reserve(body).unwrap(), 1);
            assert!(cache.lock().bytes <= MAX_BYTES + (1 << 20), "{}", cache.lock().bytes);
        }
        let entry = cache.entry([0xff; 32]);
        cache.insert(&mut entry.blocking_lock(), cache.reserve(RawBody::text("text/plain", String::new())).unwrap(), 1);
        let cached = cache.entry([0xff; 32]);
        let cached = cached.blocking_lock();
        let cached = cached.as_ref().unwrap();
        assert!(
            cached.is_fresh(1, CachePolicy::UntilStateChanges) && !cached.is_fresh(2, CachePolicy::UntilStateChanges)
        );
    }

    #[test]
    fn unread_responses_stay_within_the_common_memory_limit() {
        let cache = ResponseCache::new();
        let body = || incompressible(4 << 20);
        let size_kib = SharedResponse::new(body()).memory_size() / 1024 + 1;
        let mut unread = Vec::new();
        let error = loop {
            match cache.reserve(body()) {
                Ok(response) => unread.push(response.respond_to(&HeaderMap::new())),
                Err(error) => break error,
            }
            assert!(unread.len() * size_kib <= MEMORY_LIMIT_KIB, "{} MiB are being sent", unread.len() * 4);
        };
        assert_eq!((error, unread.len()), (ApiError::Overloaded, MEMORY_LIMIT_KIB / size_kib));
        unread.pop();
        assert!(cache.reserve(body()).is_ok(), "a response that was sent or abandoned releases its memory");
        let entry = cache.entry([1; 32]);
        cache.insert(&mut entry.blocking_lock(), cache.reserve(body()).unwrap(), 1);
        drop(entry);
        assert!(cache.reserve(body()).is_ok(), "cached responses are evicted for new ones");
    }
}
