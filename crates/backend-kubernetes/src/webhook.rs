//! Posts JSON to a site's own server.

use std::time::Duration;

use doctor_backend::{
    BackendError, Effect,
    http::{Client, Proxy, Request, TrustedRoots, roots},
};
use hyper::http::Uri;
use serde_json::Value;

/// The most characters of a rejection that are quoted, and the most bytes of it that are read.
const MAX_QUOTED_CHARS: usize = 300;
const MAX_RESPONSE_BYTES: usize = 4096;

/// Checks the URL, at startup rather than at the first use.
pub(super) fn check(url: &str) -> Result<Uri, String> {
    let accepted = "such as https://hooks.example.com/replace";
    let uri: Uri = url.parse().map_err(|error| format!("`{url}` is no URL {accepted}: {error}"))?;
    match (uri.scheme_str(), uri.authority()) {
        (Some("http" | "https"), Some(_)) => Ok(uri),
        _ => Err(format!("`{url}` is no URL {accepted}")),
    }
}

/// Posts JSON to the URL. Any status but 2xx is an error.
pub(super) fn call(
    operation: &'static str,
    url: &str,
    token: Option<&str>,
    body: &Value,
    within: Duration,
) -> Result<(), BackendError> {
    let fail = |text: String, effect| BackendError { operation, text, effect };
    let uri = check(url).map_err(|text| fail(text, Effect::NotAppliedPermanent))?;
    let server = uri.host().unwrap_or_default();
    let trusted = if uri.scheme_str() == Some("https") { roots(TrustedRoots::System) } else { Ok(Vec::new()) };
    let trusted = trusted.map_err(|error| fail(error.to_string(), Effect::NotAppliedRetry))?;
    let bearer = token.map(|token| format!("Bearer {token}"));
    let authorization = bearer.iter().map(|bearer| ("authorization", bearer.as_str()));
    let headers: Vec<(&str, &str)> = authorization.chain([("content-type", "application/json")]).collect();
    let body = body.to_string();
    let request = Request { url, headers: &headers, body: Some(body.as_bytes()), timeout: within };
    let answer = Client::new(&trusted, Proxy::Never)
        .send(&request)
        .map_err(|error| fail(format!("{server}: {error}"), error.effect(true)))?;
    let status = answer.status;
    let effect = match status {
        200..=299 => return Ok(()),
        425 | 429 | 503 => Effect::NotAppliedRetry,
        // The server rejected the request; a retry will not help.
        300..=407 | 409..=499 => Effect::NotAppliedPermanent,
        _ => Effect::Unknown,
    };
    let reply: String = answer.read_prefix(MAX_RESPONSE_BYTES).chars().take(MAX_QUOTED_CHARS).collect();
    Err(fail(format!("{server} answered with {status}: {reply}"), effect))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_url_is_rejected_with_an_example() {
        for bad in ["", "hooks.example.com/x", "ftp://x/y", "http://", "https:///replace", "a b"] {
            assert!(check(bad).unwrap_err().contains("such as https://"), "{bad}");
        }
        check("http://10.0.0.5:8080/replace?cluster=a").unwrap();
    }

    #[test]
    fn the_response_status_determines_whether_the_call_is_retried() {
        use Effect::{NotAppliedPermanent, NotAppliedRetry, Unknown};
        use std::{
            io::{Read as _, Write as _},
            net::TcpListener,
        };
        let long = Duration::from_secs(30);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/replace", listener.local_addr().unwrap());
        let called = |status: u16| {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let (mut stream, _) = listener.accept().unwrap();
                    let (mut request, mut part) = (String::new(), [0; 4096]);
                    while !request.ends_with("\r\n\r\n{}") {
                        let count = stream.read(&mut part).unwrap();
                        request += &String::from_utf8_lossy(&part[..count]);
                    }
                    assert!(request.contains("authorization: Bearer secret\r\n"), "{request}");
                    write!(stream, "HTTP/1.1 {status} X\r\ncontent-length: 4\r\n\r\nwhy?").unwrap();
                });
                call("replace", &url, Some("secret"), &serde_json::json!({}), long)
            })
        };
        assert_eq!(called(204), Ok(()));
        for (status, effect) in [
            (302, NotAppliedPermanent),
            (401, NotAppliedPermanent),
            (404, NotAppliedPermanent),
            (408, Unknown),
            (429, NotAppliedRetry),
            (500, Unknown),
            (503, NotAppliedRetry),
        ] {
            let error = called(status).unwrap_err();
            assert_eq!(error.effect, effect, "{error}");
            assert!(error.text.ends_with(&format!("answered with {status}: why?")), "{error}");
        }
        let refused = call("replace", "http://127.0.0.1:1/", None, &serde_json::json!({}), long).unwrap_err();
        assert_eq!(refused.effect, NotAppliedRetry, "{refused}");
    }
}
