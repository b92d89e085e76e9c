//! Response cache: identical requests within a short time share one response.
//!
//! A memory limit covers all responses, both cached and being sent: a response releases its share when it is neither.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use tokio::sync::Semaphore;

use super::refusal::Refusal;
use crate::response::{Answer, Made};

/// Limits of the cache; beyond them responses are made again.
const MOST_BYTES: usize = 16 << 20;
const MOST_ANSWERS: usize = 1024;
/// Memory for all responses, cached or being sent, in KiB.
const ROOM: usize = 48 << 10;
/// How long a response is served from the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lasts {
    /// While the same cluster state is served.
    WithScene,
    /// Briefly, because the store may change at any time.
    AMoment,
}

const MOMENT: Duration = Duration::from_secs(1);

/// Cached responses by request.
#[derive(Debug)]
pub(super) struct Answers {
    shelf: Mutex<Shelf>,
    room: Arc<Semaphore>,
}

/// A request's digest, from [`Asked::key`](super::asked::Asked::key).
type Key = [u8; 32];

#[derive(Debug, Default)]
struct Shelf {
    places: HashMap<Key, Arc<Place>>,
    bytes: usize,
}

/// One entry of the cache. The request that makes the response holds the lock; other requests for the same wait for it.
pub(super) type Place = tokio::sync::Mutex<Option<Kept>>;

#[derive(Debug)]
pub(super) struct Kept {
    pub(super) answer: Answer,
    scene: u64,
    made: Instant,
}

impl Kept {
    pub(super) fn is_fresh(&self, scene: u64, lasts: Lasts) -> bool {
        self.scene == scene && (lasts == Lasts::WithScene || self.made.elapsed() < MOMENT)
    }
}

impl Answers {
    fn lock(&self) -> MutexGuard<'_, Shelf> {
        self.shelf.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn new() -> Self {
        Self { shelf: Mutex::default(), room: Arc::new(Semaphore::new(ROOM)) }
    }

    /// Reserves memory for a response. Clears the cache if there is none; responses being sent keep theirs.
    pub(super) fn answer(&self, made: Made) -> Result<Answer, Refusal> {
        let answer = Answer::new(made);
        let size = u32::try_from(answer.bytes() / 1024 + 1).unwrap_or(u32::MAX);
        let room = || Arc::clone(&self.room).try_acquire_many_owned(size);
        let room = room().or_else(|_| {
            *self.lock() = Shelf::default();
            room()
        });
        let room = room.map_err(|_| Refusal::Busy)?;
        Ok(answer.in_room(room))
    }

    pub(super) fn place(&self, asked: Key) -> Arc<Place> {
        let mut shelf = self.lock();
        if let Some(place) = shelf.places.get(&asked) {
            return Arc::clone(place);
        }
        if shelf.places.len() >= MOST_ANSWERS || shelf.bytes > MOST_BYTES {
            *shelf = Shelf::default();
        }
        let place = Arc::new(Place::default());
        shelf.places.insert(asked, Arc::clone(&place));
        place
    }

    /// Removes an outdated response.
    pub(super) fn forget(&self, place: &mut Option<Kept>) {
        if let Some(old) = place.take() {
            let mut shelf = self.lock();
            shelf.bytes = shelf.bytes.saturating_sub(old.answer.bytes());
        }
    }

    /// Stores a response.
    pub(super) fn keep(&self, place: &mut Option<Kept>, answer: Answer, scene: u64) {
        let before = place.as_ref().map_or(0, |kept| kept.answer.bytes());
        let mut shelf = self.lock();
        shelf.bytes = shelf.bytes.saturating_sub(before) + answer.bytes();
        *place = Some(Kept { answer, scene, made: Instant::now() });
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderMap;

    use super::*;

    #[test]
    fn kept_answers_stay_within_their_room() {
        let answers = Answers::new();
        for n in 0..200 {
            let place = answers.place([n; 32]);
            let made = Made::text("text/plain", format!("{n}").repeat(200_000));
            answers.keep(&mut place.blocking_lock(), answers.answer(made).unwrap(), 1);
            assert!(answers.lock().bytes <= MOST_BYTES + (1 << 20), "{}", answers.lock().bytes);
        }
        let place = answers.place([0xff; 32]);
        answers.keep(&mut place.blocking_lock(), answers.answer(Made::text("text/plain", String::new())).unwrap(), 1);
        let kept = answers.place([0xff; 32]);
        let kept = kept.blocking_lock();
        let kept = kept.as_ref().unwrap();
        assert!(kept.is_fresh(1, Lasts::WithScene) && !kept.is_fresh(2, Lasts::WithScene));
    }

    #[test]
    fn unread_responses_stay_within_the_common_memory_limit() {
        let answers = Answers::new();
        let made = || Made::text("text/plain", "x".repeat(4 << 20));
        let mut slow = Vec::new();
        let refused = loop {
            match answers.answer(made()) {
                Ok(answer) => slow.push(answer.to(&HeaderMap::new())),
                Err(refusal) => break refusal,
            }
            assert!(slow.len() <= ROOM >> 12, "{} MiB are being sent", slow.len() * 4);
        };
        assert_eq!((refused, slow.len()), (Refusal::Busy, (ROOM >> 12) - 1));
        slow.pop();
        assert!(answers.answer(made()).is_ok(), "a response that was sent or abandoned releases its memory");
        let place = answers.place([1; 32]);
        answers.keep(&mut place.blocking_lock(), answers.answer(made()).unwrap(), 1);
        drop(place);
        assert!(answers.answer(made()).is_ok(), "cached responses are evicted for new ones");
    }
}
