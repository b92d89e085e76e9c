//! Answers: made once for everybody who asks the same within a short while, in plain and in gzip form, with a tag by which
//! whoever has them already is told so.
//!
//! All of them together have so much room in memory, those on the shelf and those on their way to somebody: an answer gives its
//! room back when it is neither kept nor sent any more. Whoever takes too long to fetch one is not waited for.

use std::{
    collections::HashMap,
    io,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
    time::{Duration, Instant},
};

use doctor_engine::gzip::gzip;
use doctor_engine::scrub::{harmless, scrub_json};
use doctor_store::access::hex;

use axum::{
    body::{Body, Bytes},
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use hyper::body::{Frame, SizeHint};
use serde::Serialize;
use serde_json::Value;
use sha2::{Digest, Sha256};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::refusal::Refusal;

/// Shorter ones are not worth packing.
const WORTH_PACKING: usize = 1024;
/// All kept answers together; beyond that they are made anew.
const MOST_BYTES: usize = 16 << 20;
const MOST_ANSWERS: usize = 1024;
/// All answers there are, kept or on their way, in KiB.
const ROOM: usize = 48 << 10;
/// For fetching one.
const FETCH: Duration = Duration::from_secs(60);
/// Handed to the connection at a time.
const PIECE: usize = 64 << 10;

/// An answer in the making.
#[derive(Debug)]
pub(crate) struct Made {
    pub(super) bytes: Vec<u8>,
    pub(super) kind: &'static str,
    /// The name under which a browser keeps it, where it is to be kept and not shown.
    pub(super) file: Option<String>,
}

impl Made {
    pub(super) fn json(value: &impl Serialize) -> Result<Self, Refusal> {
        let bytes = serde_json::to_vec(value).map_err(|error| {
            tracing::error!(%error, "an answer could not be written as JSON");
            Refusal::Store
        })?;
        Ok(Self { bytes, kind: "application/json", file: None })
    }

    /// Of what has words of nodes in it, and those are not trusted: without what looks like a secret, without control characters.
    pub(super) fn told_by_nodes(value: &impl Serialize) -> Result<Self, Refusal> {
        let mut value = serde_json::to_value(value).map_err(|error| {
            tracing::error!(%error, "an answer could not be written as JSON");
            Refusal::Store
        })?;
        scrub_json(&mut value);
        make_harmless(&mut value);
        Self::json(&value)
    }

    pub(crate) fn text(kind: &'static str, text: String) -> Self {
        Self { bytes: text.into_bytes(), kind, file: None }
    }
}

fn make_harmless(value: &mut Value) {
    match value {
        Value::String(text) if text.contains(char::is_control) => *text = harmless(text),
        Value::Array(items) => items.iter_mut().for_each(make_harmless),
        Value::Object(fields) => fields.values_mut().for_each(make_harmless),
        _ => {}
    }
}

/// An answer that many may be given.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    plain: Bytes,
    packed: Option<Bytes>,
    kind: &'static str,
    tag: HeaderValue,
    file: Option<HeaderValue>,
    /// Given back with the last who has it.
    room: Option<Arc<OwnedSemaphorePermit>>,
}

impl Answer {
    /// One that takes no room from others: it is small, or there is only one.
    pub(crate) fn new(made: Made) -> Self {
        let digest = Sha256::digest(&made.bytes);
        let tag = HeaderValue::from_str(&format!("\"{}\"", hex(&digest[..12])))
            .unwrap_or_else(|_| HeaderValue::from_static("\"\""));
        let packed = (made.bytes.len() >= WORTH_PACKING).then(|| Bytes::from(gzip(&made.bytes)));
        let named = |name: String| HeaderValue::from_str(&format!("attachment; filename=\"{name}\"")).ok();
        Self { plain: made.bytes.into(), packed, kind: made.kind, tag, file: made.file.and_then(named), room: None }
    }

    fn bytes(&self) -> usize {
        self.plain.len() + self.packed.as_ref().map_or(0, Bytes::len)
    }

    /// As it is sent to somebody who asked with these headers.
    pub(crate) fn to(&self, headers: &HeaderMap) -> Response {
        let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
        let known = text(header::IF_NONE_MATCH).is_some_and(|tags| {
            let mut tags = tags.split(',').map(|tag| tag.trim().trim_start_matches("W/"));
            tags.any(|tag| tag == "*" || tag.as_bytes() == self.tag.as_bytes())
        });
        let mut response = if known {
            StatusCode::NOT_MODIFIED.into_response()
        } else {
            let accepts = text(header::ACCEPT_ENCODING).is_some_and(takes_gzip);
            let (body, encoding) = match &self.packed {
                Some(packed) if accepts => (packed.clone(), Some(HeaderValue::from_static("gzip"))),
                _ => (self.plain.clone(), None),
            };
            let sent = Sending { rest: body, until: Instant::now() + FETCH, _room: self.room.clone() };
            let mut response = Response::new(Body::new(sent));
            let out = response.headers_mut();
            out.insert(header::CONTENT_TYPE, HeaderValue::from_static(self.kind));
            out.extend(encoding.map(|encoding| (header::CONTENT_ENCODING, encoding)));
            out.extend(self.file.clone().map(|file| (header::CONTENT_DISPOSITION, file)));
            response
        };
        let out = response.headers_mut();
        out.insert(header::ETAG, self.tag.clone());
        out.insert(header::VARY, HeaderValue::from_static("accept-encoding, authorization"));
        out.insert(header::CACHE_CONTROL, HeaderValue::from_static("private, no-cache"));
        response
    }
}

/// The bytes of an answer on their way.
struct Sending {
    rest: Bytes,
    until: Instant,
    _room: Option<Arc<OwnedSemaphorePermit>>,
}

impl hyper::body::Body for Sending {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        if self.rest.is_empty() {
            return Poll::Ready(None);
        }
        if Instant::now() >= self.until {
            return Poll::Ready(Some(Err(io::ErrorKind::TimedOut.into())));
        }
        let piece = self.rest.len().min(PIECE);
        Poll::Ready(Some(Ok(Frame::data(self.rest.split_to(piece)))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.rest.len() as u64)
    }
}

/// `gzip` is among what the other side reads, and not with a weight of nothing.
fn takes_gzip(accepted: &str) -> bool {
    accepted.split(',').any(|one| {
        let mut parts = one.split(';').map(str::trim);
        let named = parts.next().is_some_and(|name| name.eq_ignore_ascii_case("gzip") || name == "*");
        named && !parts.any(|weight| matches!(weight, "q=0" | "q=0.0" | "q=0.00" | "q=0.000"))
    })
}

/// For how long an answer is everybody's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lasts {
    /// While the same picture of the cluster is shown.
    WithScene,
    /// The store may change at any time: for a moment.
    AMoment,
}

const MOMENT: Duration = Duration::from_secs(1);

/// Answers by what was asked.
#[derive(Debug)]
pub(super) struct Answers {
    shelf: Mutex<Shelf>,
    room: Arc<Semaphore>,
}

/// What was asked, as [`Asked::key`](super::asked::Asked::key) tells it.
type Key = [u8; 32];

#[derive(Debug, Default)]
struct Shelf {
    places: HashMap<Key, Arc<Place>>,
    bytes: usize,
}

/// Where one answer lies. Whoever makes it holds the lock; the others who ask the same wait for it.
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

    /// An answer with room of its own. Where there is none, what is kept makes place; what is on its way cannot.
    pub(super) fn answer(&self, made: Made) -> Result<Answer, Refusal> {
        let answer = Answer::new(made);
        let size = u32::try_from(answer.bytes() / 1024 + 1).unwrap_or(u32::MAX);
        let room = || Arc::clone(&self.room).try_acquire_many_owned(size);
        let room = room().or_else(|_| {
            *self.lock() = Shelf::default();
            room()
        });
        let room = room.map_err(|_| Refusal::Busy)?;
        Ok(Answer { room: Some(Arc::new(room)), ..answer })
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

    /// Takes an answer away that is too old.
    pub(super) fn forget(&self, place: &mut Option<Kept>) {
        if let Some(old) = place.take() {
            let mut shelf = self.lock();
            shelf.bytes = shelf.bytes.saturating_sub(old.answer.bytes());
        }
    }

    /// Puts an answer where it belongs.
    pub(super) fn keep(&self, place: &mut Option<Kept>, answer: Answer, scene: u64) {
        let before = place.as_ref().map_or(0, |kept| kept.answer.bytes());
        let mut shelf = self.lock();
        shelf.bytes = shelf.bytes.saturating_sub(before) + answer.bytes();
        *place = Some(Kept { answer, scene, made: Instant::now() });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_has_an_answer_is_told_so_and_whoever_reads_gzip_gets_it() {
        let text = "x".repeat(5000);
        let answer = Answer::new(Made::json(&text).unwrap());
        let to = |headers: &[(&'static str, &str)]| {
            let mut map = HeaderMap::new();
            for (name, value) in headers {
                map.insert(*name, value.parse().unwrap());
            }
            answer.to(&map)
        };
        let plain = to(&[]);
        assert!(plain.status() == 200 && plain.headers().get(header::CONTENT_ENCODING).is_none());
        let tag = plain.headers()[header::ETAG].to_str().unwrap().to_owned();
        assert_eq!(to(&[("accept-encoding", "br, gzip")]).headers()[header::CONTENT_ENCODING], "gzip");
        assert!(to(&[("accept-encoding", "gzip;q=0")]).headers().get(header::CONTENT_ENCODING).is_none());
        assert_eq!(to(&[("if-none-match", &format!("\"a\", W/{tag}"))]).status(), 304);
        assert_eq!(to(&[("if-none-match", "\"a\"")]).status(), 200);
    }

    #[test]
    fn words_of_nodes_are_told_without_secrets_and_without_what_a_terminal_would_follow() {
        let told = serde_json::json!({ "text": "exit 1: token=hunter2 \u{1b}[2J", "times": 3 });
        let made = Made::told_by_nodes(&told).unwrap();
        let clean: Value = serde_json::from_slice(&made.bytes).unwrap();
        assert_eq!(clean, serde_json::json!({ "text": "exit 1: token=[removed] \u{fffd}[2J", "times": 3 }));
    }

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
    fn answers_that_nobody_fetches_have_no_more_room_than_all_have_together() {
        let answers = Answers::new();
        let made = || Made::text("text/plain", "x".repeat(4 << 20));
        let mut slow = Vec::new();
        let refused = loop {
            match answers.answer(made()) {
                Ok(answer) => slow.push(answer.to(&HeaderMap::new())),
                Err(refusal) => break refusal,
            }
            assert!(slow.len() <= ROOM >> 12, "{} MiB are on their way", slow.len() * 4);
        };
        assert_eq!((refused, slow.len()), (Refusal::Busy, (ROOM >> 12) - 1));
        slow.pop();
        assert!(answers.answer(made()).is_ok(), "what was fetched or given up has given its room back");
        let place = answers.place([1; 32]);
        answers.keep(&mut place.blocking_lock(), answers.answer(made()).unwrap(), 1);
        drop(place);
        assert!(answers.answer(made()).is_ok(), "what is only kept makes place");
    }

    #[test]
    fn an_answer_comes_in_pieces_with_its_length_and_not_for_ever() {
        let answer = Answer::new(Made::text("text/plain", "y".repeat(PIECE + 7)));
        let mut body = answer.to(&HeaderMap::new()).into_body();
        let next = |body: &mut Body| {
            let mut context = Context::from_waker(std::task::Waker::noop());
            hyper::body::Body::poll_frame(Pin::new(body), &mut context)
        };
        assert_eq!(hyper::body::Body::size_hint(&body).exact(), Some(PIECE as u64 + 7));
        for length in [PIECE, 7] {
            let Poll::Ready(Some(Ok(frame))) = next(&mut body) else { panic!("a piece") };
            assert_eq!(frame.into_data().unwrap().len(), length);
        }
        assert!(matches!(next(&mut body), Poll::Ready(None)));
        let late = Sending { rest: Bytes::from_static(b"z"), until: Instant::now(), _room: None };
        assert!(matches!(next(&mut Body::new(late)), Poll::Ready(Some(Err(_)))), "who is too slow is not waited for");
    }
}
