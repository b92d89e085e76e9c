//! Response bodies with an ETag. One body serves every client that sends the same request. It is kept compressed, and
//! decompressed piece by piece for a client that does not accept gzip. A client that takes too long to fetch a body is
//! disconnected.

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
use doctor_engine::gzip::{Gunzip, gzip};
use hyper::body::{Frame, SizeHint};
use sha2::{Digest, Sha256};
use tokio::sync::OwnedSemaphorePermit;

/// Shorter bodies are not compressed.
const MIN_GZIP_BYTES: usize = 1024;
/// Deadline for a client to fetch a body.
const SEND_TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes passed to the connection at a time.
const CHUNK_BYTES: usize = 64 << 10;

/// A body before it is compressed.
#[derive(Debug)]
pub(crate) struct RawBody {
    pub(crate) bytes: Vec<u8>,
    pub(crate) content_type: &'static str,
    /// File name, for a response that a browser should save and not display.
    pub(crate) file_name: Option<String>,
}

impl RawBody {
    pub(crate) fn text(kind: &'static str, text: String) -> Self {
        Self { bytes: text.into_bytes(), content_type: kind, file_name: None }
    }
}

/// A response that many clients may share.
#[derive(Debug, Clone)]
pub(crate) struct SharedResponse {
    body: StoredBody,
    content_type: &'static str,
    etag: HeaderValue,
    disposition: Option<HeaderValue>,
    /// Released with the last clone.
    memory_permit: Option<Arc<OwnedSemaphorePermit>>,
}

/// A body as it is kept.
#[derive(Debug, Clone)]
enum StoredBody {
    Plain(Bytes),
    Gzipped { bytes: Bytes, plain_length: usize },
}

impl StoredBody {
    fn new(plain: Vec<u8>) -> Self {
        if plain.len() < MIN_GZIP_BYTES {
            return Self::Plain(plain.into());
        }
        Self::Gzipped { bytes: gzip(&plain).into(), plain_length: plain.len() }
    }

    fn len(&self) -> usize {
        match self {
            Self::Plain(bytes) | Self::Gzipped { bytes, .. } => bytes.len(),
        }
    }
}

impl SharedResponse {
    /// Creates a response without a memory permit: it is small, or there is only one.
    pub(crate) fn new(body: RawBody) -> Self {
        let digest = Sha256::digest(&body.bytes);
        let etag = HeaderValue::from_str(&format!("\"{}\"", hex::encode(&digest[..12])))
            .unwrap_or_else(|_| HeaderValue::from_static("\"\""));
        let attachment = |name: String| HeaderValue::from_str(&format!("attachment; filename=\"{name}\"")).ok();
        Self {
            body: StoredBody::new(body.bytes),
            content_type: body.content_type,
            etag,
            disposition: body.file_name.and_then(attachment),
            memory_permit: None,
        }
    }

    /// Attaches a memory permit, which the response holds until its last clone is dropped.
    pub(crate) fn with_memory_permit(self, permit: OwnedSemaphorePermit) -> Self {
        Self { memory_permit: Some(Arc::new(permit)), ..self }
    }

    /// Returns the memory that the body uses.
    pub(crate) fn memory_size(&self) -> usize {
        self.body.len()
    }

    /// Returns the response to a request with these headers.
    pub(crate) fn respond_to(&self, headers: &HeaderMap) -> Response {
        let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
        let known = text(header::IF_NONE_MATCH).is_some_and(|tags| {
            let mut tags = tags.split(',').map(|tag| tag.trim().trim_start_matches("W/"));
            tags.any(|tag| tag == "*" || tag.as_bytes() == self.etag.as_bytes())
        });
        let mut response = if known {
            StatusCode::NOT_MODIFIED.into_response()
        } else {
            let accepts = text(header::ACCEPT_ENCODING).is_some_and(accepts_gzip);
            let (rest, encoding) = match &self.body {
                StoredBody::Plain(bytes) => (BodyRest::Ready(bytes.clone()), None),
                StoredBody::Gzipped { bytes, .. } if accepts => {
                    (BodyRest::Ready(bytes.clone()), Some(HeaderValue::from_static("gzip")))
                }
                StoredBody::Gzipped { bytes, plain_length } => {
                    (BodyRest::Compressed { reader: Gunzip::new(bytes.clone()), length: *plain_length }, None)
                }
            };
            let stream =
                BodyStream { rest, until: Instant::now() + SEND_TIMEOUT, _memory_permit: self.memory_permit.clone() };
            let mut response = Response::new(Body::new(stream));
            let out = response.headers_mut();
            out.insert(header::CONTENT_TYPE, HeaderValue::from_static(self.content_type));
            out.extend(encoding.map(|encoding| (header::CONTENT_ENCODING, encoding)));
            out.extend(self.disposition.clone().map(|file| (header::CONTENT_DISPOSITION, file)));
            response
        };
        let out = response.headers_mut();
        out.insert(header::ETAG, self.etag.clone());
        out.insert(header::VARY, HeaderValue::from_static("accept-encoding, authorization"));
        out.insert(header::CACHE_CONTROL, HeaderValue::from_static("private, no-cache"));
        response
    }
}

/// The bytes of a body that were not sent yet.
enum BodyRest {
    Ready(Bytes),
    /// To be decompressed into this many bytes.
    Compressed {
        reader: Gunzip<Bytes>,
        length: usize,
    },
}

impl BodyRest {
    const fn len(&self) -> usize {
        match self {
            Self::Ready(bytes) => bytes.len(),
            Self::Compressed { length, .. } => *length,
        }
    }

    fn next_piece(&mut self) -> Bytes {
        match self {
            Self::Ready(bytes) => bytes.split_to(bytes.len().min(CHUNK_BYTES)),
            Self::Compressed { reader, length } => {
                let piece = reader.next_piece((*length).min(CHUNK_BYTES));
                *length -= piece.len();
                piece.into()
            }
        }
    }
}

/// A body being sent.
struct BodyStream {
    rest: BodyRest,
    until: Instant,
    _memory_permit: Option<Arc<OwnedSemaphorePermit>>,
}

impl hyper::body::Body for BodyStream {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        if self.rest.len() == 0 {
            return Poll::Ready(None);
        }
        if Instant::now() >= self.until {
            return Poll::Ready(Some(Err(io::ErrorKind::TimedOut.into())));
        }
        Poll::Ready(Some(Ok(Frame::data(self.rest.next_piece()))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.len() == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.rest.len() as u64)
    }
}

/// Whether the client accepts gzip with a weight other than zero.
fn accepts_gzip(accepted: &str) -> bool {
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
        let response = SharedResponse::new(RawBody::text("text/plain", text));
        let to = |headers: &[(&'static str, &str)]| {
            let mut map = HeaderMap::new();
            for (name, value) in headers {
                map.insert(*name, value.parse().unwrap());
            }
            response.respond_to(&map)
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
        let text = "y".repeat(CHUNK_BYTES + 7);
        let response = SharedResponse::new(RawBody::text("text/plain", text.clone()));
        assert!(response.memory_size() < 1000, "only the compressed form is kept");
        let mut body = response.respond_to(&HeaderMap::new()).into_body();
        let next = |body: &mut Body| {
            let mut context = Context::from_waker(std::task::Waker::noop());
            hyper::body::Body::poll_frame(Pin::new(body), &mut context)
        };
        assert_eq!(hyper::body::Body::size_hint(&body).exact(), Some(CHUNK_BYTES as u64 + 7));
        let mut received = Vec::new();
        for length in [CHUNK_BYTES, 7] {
            let Poll::Ready(Some(Ok(frame))) = next(&mut body) else { panic!("a piece") };
            let piece = frame.into_data().unwrap();
            assert_eq!(piece.len(), length);
            received.extend(piece);
        }
        assert_eq!(received, text.as_bytes());
        assert!(matches!(next(&mut body), Poll::Ready(None)));
        let late =
            BodyStream { rest: BodyRest::Ready(Bytes::from_static(b"z")), until: Instant::now(), _memory_permit: None };
        assert!(matches!(next(&mut Body::new(late)), Poll::Ready(Some(Err(_)))), "a slow client is disconnected");
    }
}
