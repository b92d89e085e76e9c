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

/// A request's digest, from [`RequestParams::key`](super::asked::Asked::key).
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
    pub(super) fn is_fresh(&self, scene: u64, lasts: CachePolicy) -> bool {
        self.view_number == scene && (lasts == CachePolicy::UntilStateChanges || self.created.elapsed() < BRIEF_TTL)
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
    pub(super) fn reserve(&self, made: RawBody) -> Result<SharedResponse, ApiError> {
        let answer = SharedResponse::new(made);
        let size = u32::try_from(answer.memory_size() / 1024 + 1).unwrap_or(u32::MAX);
        let room = || Arc::clone(&self.memory).try_acquire_many_owned(size);
        let room = room().or_else(|_| {
            *self.lock() = CacheEntries::default();
            room()
        });
        let room = room.map_err(|_| ApiError::Overloaded)?;
        Ok(answer.with_memory_permit(room))
    }

    pub(super) fn entry(&self, asked: RequestKey) -> Arc<CacheEntry> {
        let mut shelf = self.lock();
        if let Some(place) = shelf.by_request.get(&asked) {
            return Arc::clone(place);
        }
        if shelf.by_request.len() >= MAX_RESPONSES || shelf.bytes > MAX_BYTES {
            *shelf = CacheEntries::default();
        }
        let place = Arc::new(CacheEntry::default());
        shelf.by_request.insert(asked, Arc::clone(&place));
        place
    }

    /// Removes an outdated response.
    pub(super) fn evict(&self, place: &mut Option<CachedResponse>) {
        if let Some(old) = place.take() {
            let mut shelf = self.lock();
            shelf.bytes = shelf.bytes.saturating_sub(old.response.memory_size());
        }
    }

    /// Stores a response.
    pub(super) fn insert(&self, place: &mut Option<CachedResponse>, answer: SharedResponse, scene: u64) {
        let before = place.as_ref().map_or(0, |kept| kept.response.memory_size());
        let mut shelf = self.lock();
        shelf.bytes = shelf.bytes.saturating_sub(before) + answer.memory_size();
        *place = Some(CachedResponse { response: answer, view_number: scene, created: Instant::now() });
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderMap;

    use super::*;

    #[test]
    fn kept_answers_stay_within_their_room() {
        let answers = ResponseCache::new();
        for n in 0..200 {
            let place = answers.entry([n; 32]);
            let made = RawBody::text("text/plain", format!("{n}").repeat(200_000));
            answers.insert(&mut place.blocking_lock(), answers.reserve(made).unwrap(), 1);
            assert!(answers.lock().bytes <= MAX_BYTES + (1 << 20), "{}", answers.lock().bytes);
        }
        let place = answers.entry([0xff; 32]);
        answers.insert(
            &mut place.blocking_lock(),
            answers.reserve(RawBody::text("text/plain", String::new())).unwrap(),
            1,
        );
        let kept = answers.entry([0xff; 32]);
        let kept = kept.blocking_lock();
        let kept = kept.as_ref().unwrap();
        assert!(kept.is_fresh(1, CachePolicy::UntilStateChanges) && !kept.is_fresh(2, CachePolicy::UntilStateChanges));
    }

    #[test]
    fn unread_responses_stay_within_the_common_memory_limit() {
        let answers = ResponseCache::new();
        let made = || RawBody::text("text/plain", "x".repeat(4 << 20));
        let mut slow = Vec::new();
        let refused = loop {
            match answers.reserve(made()) {
                Ok(answer) => slow.push(answer.respond_to(&HeaderMap::new())),
                Err(refusal) => break refusal,
            }
            assert!(slow.len() <= MEMORY_LIMIT_KIB >> 12, "{} MiB are being sent", slow.len() * 4);
        };
        assert_eq!((refused, slow.len()), (ApiError::Overloaded, (MEMORY_LIMIT_KIB >> 12) - 1));
        slow.pop();
        assert!(answers.reserve(made()).is_ok(), "a response that was sent or abandoned releases its memory");
        let place = answers.entry([1; 32]);
        answers.insert(&mut place.blocking_lock(), answers.reserve(made()).unwrap(), 1);
        drop(place);
        assert!(answers.reserve(made()).is_ok(), "cached responses are evicted for new ones");
    }
}
