//! One HTTP request to a receiver, with an overall timeout, and what the response means for the message.

use std::path::Path;

use doctor_backend::http::{self, HttpError, HttpErrorKind, HttpResponse, Proxy, Request};
use doctor_core::time::Span;

use super::{DeliveryError, Retry, secret::host, tls_roots};

/// Bytes read of a response: enough to report why the receiver rejected the message.
const MAX_RESPONSE: usize = 4096;

#[derive(Debug)]
pub(crate) struct Client<'a> {
    limit: Span,
    ca: Option<&'a Path>,
}

impl<'a> Client<'a> {
    pub(crate) const fn new(limit: Span, ca: Option<&'a Path>) -> Self {
        Self { limit, ca }
    }

    /// Posts JSON. Any status from 200 to 299 counts as accepted.
    pub(crate) fn post(&self, url: &str, headers: &[(&str, &str)], body: &[u8]) -> Result<(), DeliveryError> {
        self.exchange(url, headers, body).map(drop)
    }

    /// As [`Self::post`], returning the start of the response. Unreadable parts are left out.
    pub(crate) fn post_for_response(
        &self,
        url: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Result<String, DeliveryError> {
        self.exchange(url, headers, body).map(|response| response.read_prefix(MAX_RESPONSE))
    }

    fn exchange(&self, url: &str, headers: &[(&str, &str)], body: &[u8]) -> Result<HttpResponse, DeliveryError> {
        let roots = if url.starts_with("https://") { tls_roots::roots(self.ca)? } else { Vec::new() };
        let client = http::Client::new(&roots, Proxy::FromEnvironment);
        let headers = [&[("content-type", "application/json")][..], headers].concat();
        let request = Request { url, headers: &headers, body: Some(body), timeout: self.limit.to_std() };
        let response = client.send(&request).map_err(|error| self.request_error(url, &error))?;
        if (200..300).contains(&response.status) {
            return Ok(response);
        }
        let (status, after) = (response.status, response.retry_after);
        Err(status_error(host(url), status, after, &response.read_prefix(MAX_RESPONSE)))
    }

    fn request_error(&self, url: &str, error: &HttpError) -> DeliveryError {
        let why = match error.kind {
            HttpErrorKind::Timeout => format!("did not answer within {}", self.limit),
            HttpErrorKind::BadRequest => "is not a usable address".to_owned(),
            HttpErrorKind::Tls => format!("failed TLS verification: {error}"),
            HttpErrorKind::Connection | HttpErrorKind::NotHttp | HttpErrorKind::TooLong => {
                format!("did not complete the request: {error}")
            }
        };
        DeliveryError::later(format!("{} {why}", host(url)))
    }
}

/// Classifies an error status. A message that the receiver finds invalid will stay so; a wrong address or token can be
/// corrected.
fn status_error(host: &str, status: u16, retry_after: Option<u32>, text: &str) -> DeliveryError {
    let text: String = text.lines().next().unwrap_or_default().chars().filter(|c| !c.is_control()).take(120).collect();
    let text = if text.is_empty() { text } else { format!(": {text}") };
    let retry = match (status, retry_after) {
        (400 | 413 | 422, _) => Retry::Never,
        (_, Some(seconds)) => Retry::After(Span::from_secs(i64::from(seconds))),
        (_, None) => Retry::Later,
    };
    DeliveryError { text: format!("{host} answered {status}{text}"), retry }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn correctable_errors_are_retried_and_an_invalid_message_is_not() {
        for status in [301, 401, 403, 404, 408, 429, 500, 503] {
            assert_eq!(status_error("h", status, None, "").retry, Retry::Later, "{status}");
        }
        for status in [400, 413, 422] {
            assert_eq!(status_error("h", status, Some(9), "").retry, Retry::Never, "{status}");
        }
        assert_eq!(status_error("h", 429, Some(9), "").retry, Retry::After(Span::from_secs(9)));
        assert_eq!(status_error("h", 500, None, "a\x1b[2J\nb").text, "h answered 500: a[2J");
    }
}
