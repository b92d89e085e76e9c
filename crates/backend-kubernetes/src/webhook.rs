//! A call to somebody else's server. The cluster's client does it too: it speaks HTTPS, and there is no second one to build.

use hyper::http::{Request, Uri};
use kube::Client;
use serde_json::Value;

/// Whether it can be called at all; said at the start and not when it is needed.
pub(super) fn check(url: &str) -> Result<Uri, String> {
    let accepted = "such as https://hooks.example.com/replace";
    let uri: Uri = url.parse().map_err(|error| format!("`{url}` is no URL {accepted}: {error}"))?;
    match (uri.scheme_str(), uri.authority()) {
        (Some("http" | "https"), Some(_)) => Ok(uri),
        _ => Err(format!("`{url}` is no URL {accepted}")),
    }
}

/// Posts JSON there. Anything but a 2xx is an error with its code.
pub(super) async fn call(url: &str, token: Option<String>, body: Value) -> Result<(), kube::Error> {
    let uri = check(url).map_err(|text| kube::Error::Service(text.into()))?;
    let path = uri.path_and_query().map_or("/", |path| path.as_str()).to_owned();
    let mut parts = uri.into_parts();
    parts.path_and_query = Some(hyper::http::uri::PathAndQuery::from_static("/"));
    let base = Uri::from_parts(parts).map_err(|error| kube::Error::Service(error.into()))?;
    let mut config = kube::Config::new(base);
    config.auth_info.token = token.map(Into::into);
    config.default_retry = false;
    let request = Request::post(path).header("content-type", "application/json").body(body.to_string().into_bytes());
    let request = request.map_err(kube::Error::HttpError)?;
    Client::try_from(config)?.request_text(request).await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_url_is_refused_with_an_example() {
        for bad in ["", "hooks.example.com/x", "ftp://x/y", "http://", "https:///replace", "a b"] {
            assert!(check(bad).unwrap_err().contains("such as https://"), "{bad}");
        }
        check("http://10.0.0.5:8080/replace?cluster=a").unwrap();
    }
}
