//! Response bodies in plain and gzip form, with an ETag. One body serves every client that sends the same request. A
//! client that takes too long to fetch a body is disconnected.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use axum::{
    body::{Body, Bytes},
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use doctor_core::hex;
use doctor_engine::gzip::gzip;
use hyper::body::{Frame, SizeHint};
use sha2::{Digest, Sha256};
use tokio::sync::OwnedSemaphorePermit;

/// Shorter bodies are not compressed.
const WORTH_PACKING: usize = 1024;
/// Deadline for a client to fetch a body.
const FETCH: Duration = Duration::from_secs(60);
/// Bytes passed to the connection at a time.
const PIECE: usize = 64 << 10;

/// A body before it is compressed.
#[derive(Debug)]
pub(crate) struct Made {
    pub(crate) bytes: Vec<u8>,
    pub(crate) kind: &'static str,
    /// File name, for a response that a browser should save and not display.
    pub(crate) file: Option<String>,
}

impl Made {
    pub(crate) fn text(kind: &'static str, text: String) -> Self {
        Self { bytes: text.into_bytes(), kind, file: None }
    }
}

/// A response that many clients may share.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    plain: Bytes,
    packed: Option<Bytes>,
    kind: &'static str,
    tag: HeaderValue,
    file: Option<HeaderValue>,
    /// Released with the last clone.
    room: Option<Arc<OwnedSemaphorePermit>>,
}

impl Answer {
    /// Creates a response without a memory permit: it is small, or there is only one.
    pub(crate) fn new(made: Made) -> Self {
        let digest = Sha256::digest(&made.bytes);
        let tag = HeaderValue::from_str(&format!("\"{}\"", hex::encode(&digest[..12])))
            .unwrap_or_else(|_| HeaderValue::from_static("\"\""));
        let packed = (made.bytes.len() >= WORTH_PACKING).then(|| Bytes::from(gzip(&made.bytes)));
        let named = |name: String| HeaderValue::from_str(&format!("attachment; filename=\"{name}\"")).ok();
        Self { plain: made.bytes.into(), packed, kind: made.kind, tag, file: made.file.and_then(named), room: None }
    }

    /// Attaches a memory permit, which the response holds until its last clone is dropped.
    pub(crate) fn in_room(self, room: OwnedSemaphorePermit) -> Self {
        Self { room: Some(Arc::new(room)), ..self }
    }

    /// Returns the memory used by both forms.
    pub(crate) fn bytes(&self) -> usize {
        self.plain.len() + self.packed.as_ref().map_or(0, Bytes::len)
    }

    /// Returns the response to a request with these headers.
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

/// A body being sent.
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

/// Whether the client accepts gzip with a weight other than zero.
fn takes_gzip(accepted: &str) -> bool {
    accepted.split(',').any(|one| {
        let mut parts = one.split(';').map(str::trim);
        let named = parts.next().is_some_and(|name| name.eq_ignore_ascii_case("gzip") || name == "*");
        named && !parts.any(|weight| matches!(weight, "q=0" | "q=0.0" | "q=0.00" | "q=0.000"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_known_etag_gets_304_and_gzip_is_sent_where_accepted() {
        let text = "x".repeat(5000);
        let answer = Answer::new(Made::text("text/plain", text));
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
    fn a_body_is_sent_in_pieces_with_its_length_and_a_deadline() {
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
        assert!(matches!(next(&mut Body::new(late)), Poll::Ready(Some(Err(_)))), "a slow client is disconnected");
    }
}
