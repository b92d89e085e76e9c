//! Answers: made once for everybody who asks the same within a short while, in plain and in gzip form, with a tag by which
//! whoever has them already is told so.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use axum::{
    body::{Body, Bytes},
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::{gzip::gzip, refusal::Refusal};
use crate::{
    access::hex,
    scrub::{harmless, scrub_json},
};

/// Shorter ones are not worth packing.
const WORTH_PACKING: usize = 1024;
/// All kept answers together; beyond that they are made anew.
const MOST_BYTES: usize = 24 << 20;
const MOST_ANSWERS: usize = 1024;

/// An answer in the making.
#[derive(Debug)]
pub(in crate::web) struct Made {
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

    pub(in crate::web) fn text(kind: &'static str, text: String) -> Self {
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
pub(in crate::web) struct Answer {
    plain: Bytes,
    packed: Option<Bytes>,
    kind: &'static str,
    tag: HeaderValue,
    file: Option<HeaderValue>,
}

impl Answer {
    pub(in crate::web) fn new(made: Made) -> Self {
        let digest = Sha256::digest(&made.bytes);
        let tag = HeaderValue::from_str(&format!("\"{}\"", hex(&digest[..12])))
            .unwrap_or_else(|_| HeaderValue::from_static("\"\""));
        let packed = (made.bytes.len() >= WORTH_PACKING).then(|| Bytes::from(gzip(&made.bytes)));
        let named = |name: String| HeaderValue::from_str(&format!("attachment; filename=\"{name}\"")).ok();
        Self { plain: made.bytes.into(), packed, kind: made.kind, tag, file: made.file.and_then(named) }
    }

    fn bytes(&self) -> usize {
        self.plain.len() + self.packed.as_ref().map_or(0, Bytes::len)
    }

    /// As it is sent to somebody who asked with these headers.
    pub(in crate::web) fn to(&self, headers: &HeaderMap) -> Response {
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
            let mut response = Response::new(Body::from(body));
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
#[derive(Debug, Default)]
pub(super) struct Answers {
    shelf: Mutex<Shelf>,
}

#[derive(Debug, Default)]
struct Shelf {
    places: HashMap<String, Arc<Place>>,
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

    pub(super) fn place(&self, asked: &str) -> Arc<Place> {
        let mut shelf = self.lock();
        if let Some(place) = shelf.places.get(asked) {
            return Arc::clone(place);
        }
        if shelf.places.len() >= MOST_ANSWERS || shelf.bytes > MOST_BYTES {
            *shelf = Shelf::default();
        }
        let place = Arc::new(Place::default());
        shelf.places.insert(asked.to_owned(), Arc::clone(&place));
        place
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
        let answers = Answers::default();
        for n in 0..200 {
            let place = answers.place(&format!("/{n}"));
            let made = Made::text("text/plain", format!("{n}").repeat(200_000));
            answers.keep(&mut place.blocking_lock(), Answer::new(made), 1);
            assert!(answers.lock().bytes <= MOST_BYTES + (1 << 20), "{}", answers.lock().bytes);
        }
        let place = answers.place("/x");
        answers.keep(&mut place.blocking_lock(), Answer::new(Made::text("text/plain", String::new())), 1);
        let kept = answers.place("/x");
        let kept = kept.blocking_lock();
        let kept = kept.as_ref().unwrap();
        assert!(kept.is_fresh(1, Lasts::WithScene) && !kept.is_fresh(2, Lasts::WithScene));
    }
}
