//! One request to a receiver, with a limit for all of it, and what its answer means for the message.

use std::{path::Path, sync::Arc};

use doctor_core::time::Span;
use ureq::{
    Agent, Body,
    http::Response,
    tls::{Certificate, RootCerts, TlsConfig},
};

use super::{NotSent, Retry, secret::host, trust};

/// What is read of an answer: enough to say what the receiver did not like.
const ANSWER: u64 = 4096;

#[derive(Debug)]
pub(crate) struct Client<'a> {
    limit: Span,
    ca: Option<&'a Path>,
}

impl<'a> Client<'a> {
    pub(crate) const fn new(limit: Span, ca: Option<&'a Path>) -> Self {
        Self { limit, ca }
    }

    /// Posts JSON. Any answer of 200 to 299 means that it has been taken.
    pub(crate) fn post(&self, url: &str, headers: &[(&str, &str)], body: &[u8]) -> Result<(), NotSent> {
        self.taken(url, headers, body).map(drop)
    }

    /// The same, for who wants to know what was said to it. What cannot be read is left out.
    pub(crate) fn ask(&self, url: &str, headers: &[(&str, &str)], body: &[u8]) -> Result<String, NotSent> {
        self.taken(url, headers, body).map(|mut answer| said(&mut answer))
    }

    fn taken(&self, url: &str, headers: &[(&str, &str)], body: &[u8]) -> Result<Response<Body>, NotSent> {
        let agent = self.agent(url)?;
        let mut request = agent.post(url).header("content-type", "application/json");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let mut answer = request.send(body).map_err(|error| self.no_answer(url, &error))?;
        let status = answer.status().as_u16();
        if (200..300).contains(&status) {
            return Ok(answer);
        }
        let after = answer.headers().get("retry-after").and_then(|value| value.to_str().ok()?.trim().parse().ok());
        Err(refused(host(url), status, after, &said(&mut answer)))
    }

    fn agent(&self, url: &str) -> Result<Agent, NotSent> {
        let builder = Agent::config_builder()
            .timeout_global(Some(self.limit.to_std()))
            .http_status_as_error(false)
            // A redirected POST is no POST any more.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("cluster-doctor/", env!("CARGO_PKG_VERSION")));
        let config = if url.starts_with("https://") {
            let roots = trust::roots(self.ca)?;
            let roots: Vec<Certificate<'static>> =
                roots.iter().map(|root| Certificate::from_der(root).to_owned()).collect();
            let tls = TlsConfig::builder().root_certs(RootCerts::Specific(Arc::new(roots))).build();
            builder.tls_config(tls).build()
        } else {
            builder.build()
        };
        Ok(config.into())
    }

    /// In our own words: a library's error may quote the address, which may be secret.
    fn no_answer(&self, url: &str, error: &ureq::Error) -> NotSent {
        let why = match error {
            ureq::Error::Timeout(_) => format!("did not answer within {}", self.limit),
            ureq::Error::HostNotFound => "is not a host that is known".to_owned(),
            ureq::Error::ConnectionFailed => "takes no connection".to_owned(),
            ureq::Error::Io(error) => format!("could not be spoken to: {error}"),
            ureq::Error::Rustls(error) => format!("is not believed: {error}"),
            ureq::Error::BadUri(_) | ureq::Error::Http(_) => "is not an address that can be used".to_owned(),
            _ => "could not be spoken to".to_owned(),
        };
        NotSent::later(format!("{} {why}", host(url)))
    }
}

fn said(answer: &mut Response<Body>) -> String {
    answer.body_mut().with_config().limit(ANSWER).read_to_string().unwrap_or_default()
}

/// A receiver that finds the message itself wrong will not find it right later. A wrong address or token can be mended.
fn refused(host: &str, status: u16, after: Option<u32>, said: &str) -> NotSent {
    let said: String = said.lines().next().unwrap_or_default().chars().filter(|c| !c.is_control()).take(120).collect();
    let said = if said.is_empty() { said } else { format!(": {said}") };
    let retry = match (status, after) {
        (400 | 413 | 422, _) => Retry::Never,
        (_, Some(seconds)) => Retry::After(Span::from_secs(i64::from(seconds))),
        (_, None) => Retry::Later,
    };
    NotSent { text: format!("{host} answered {status}{said}"), retry }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_be_mended_is_tried_again_and_a_message_that_is_wrong_is_not() {
        for status in [301, 401, 403, 404, 408, 429, 500, 503] {
            assert_eq!(refused("h", status, None, "").retry, Retry::Later, "{status}");
        }
        for status in [400, 413, 422] {
            assert_eq!(refused("h", status, Some(9), "").retry, Retry::Never, "{status}");
        }
        assert_eq!(refused("h", 429, Some(9), "").retry, Retry::After(Span::from_secs(9)));
        assert_eq!(refused("h", 500, None, "a\x1b[2J\nb").text, "h answered 500: a[2J");
    }
}
