//! The controller's HTTP client: one request over one connection, within a deadline for all of it and a size limit for the answer.
//!
//! Redirects are not followed and no connection is kept: an answer is of now, and goes to the address that was asked. An error says
//! whether the request may have been sent ([`HttpError::was_sent`]), so that a caller knows whether it may have taken effect. No
//! error quotes the URL, which may hold a secret.

mod tls_roots;
mod unix_socket;

use std::{
    io::{self, Read as _},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use rustls::pki_types::CertificateDer;
use ureq::{
    Agent, Body,
    http::Response,
    tls::{Certificate, RootCerts, TlsConfig},
    unversioned::{
        resolver::DefaultResolver,
        transport::{ConnectionDetails, Connector, DefaultConnector, Transport},
    },
};

use crate::Effect;
pub use tls_roots::{BadRoots, Trust, roots};
use unix_socket::UnixConnector;

/// Whether a proxy that the environment names is used (`HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY`, `NO_PROXY`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proxy {
    Never,
    FromEnvironment,
}

/// Sends requests. It may be used by several threads at once.
#[derive(Debug)]
pub struct Client {
    connector: Arc<dyn Connector<(), Out = Box<dyn Transport>>>,
    tls: TlsConfig,
    proxy: Proxy,
}

/// A request. With a body it is a POST, else a GET.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    pub url: &'a str,
    pub headers: &'a [(&'a str, &'a str)],
    pub body: Option<&'a [u8]>,
    /// For all of it: to resolve the name, connect, send, and read the answer to its end.
    pub within: Duration,
}

/// An answer, whatever its status. Its body has not been read yet.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    /// The seconds of the header `Retry-After`.
    pub retry_after: Option<u32>,
    response: Response<Body>,
    within: Duration,
}

/// Why there is no answer, or not all of it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct HttpError {
    pub kind: HttpErrorKind,
    sent: bool,
    text: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HttpErrorKind {
    /// The URL or a header cannot be used.
    BadRequest,
    /// The host is unknown or takes no connection, or the connection broke.
    Connection,
    /// TLS could not be agreed on, or the certificate is not trusted.
    Tls,
    /// The time was over.
    Timeout,
    /// The answer is longer than what is read.
    TooLong,
    /// The answer is not HTTP, or ends before its end.
    NotHttp,
}

impl HttpError {
    /// Whether any of the request may have reached the server. Connecting and TLS come before.
    pub const fn was_sent(&self) -> bool {
        self.sent
    }

    /// What may have happened. `changes`: the request was to change something.
    pub const fn effect(&self, changes: bool) -> Effect {
        if self.sent && changes { Effect::Unknown } else { Effect::NoneTryAgain }
    }

    fn of(error: &ureq::Error, sent: bool, within: Duration) -> Self {
        use HttpErrorKind::{BadRequest, Connection, NotHttp, Timeout, Tls};
        let (kind, text) = match error {
            ureq::Error::Timeout(_) => (Timeout, format!("no answer within {} s", within.as_secs_f64())),
            ureq::Error::HostNotFound => (Connection, "the host name has no address".to_owned()),
            ureq::Error::Io(error) if is_tls(error) => (Tls, error.to_string()),
            ureq::Error::Io(error) if sent && error.kind() == io::ErrorKind::UnexpectedEof => {
                (NotHttp, "the connection ended before the answer did".to_owned())
            }
            ureq::Error::Io(error) => (Connection, error.to_string()),
            ureq::Error::Rustls(error) => (Tls, error.to_string()),
            ureq::Error::Tls(_) | ureq::Error::TlsRequired => (Tls, "TLS cannot be used with this address".to_owned()),
            ureq::Error::BadUri(_) | ureq::Error::Http(_) => {
                (BadRequest, "the address or a header cannot be used".to_owned())
            }
            ureq::Error::Protocol(_) | ureq::Error::LargeResponseHeader(..) => {
                (NotHttp, "the answer is not HTTP".to_owned())
            }
            _ => (Connection, "no connection could be made".to_owned()),
        };
        Self { kind, sent, text }
    }
}

fn is_tls(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<rustls::Error>())
}

impl Client {
    /// `roots` are the certificates that are trusted where a URL asks for TLS.
    pub fn new(roots: &[CertificateDer<'_>], proxy: Proxy) -> Self {
        let roots: Vec<Certificate<'static>> =
            roots.iter().map(|root| Certificate::from_der(root).to_owned()).collect();
        let tls = TlsConfig::builder().root_certs(RootCerts::Specific(Arc::new(roots))).build();
        Self { connector: Arc::new(DefaultConnector::new()), tls, proxy }
    }

    /// For a server that listens on a Unix socket. The host of a URL is not looked at, and is to be an address.
    pub fn over_socket(path: &Path) -> Self {
        let tls = TlsConfig::builder().root_certs(RootCerts::Specific(Arc::default())).build();
        Self { connector: Arc::new(UnixConnector::new(path)), tls, proxy: Proxy::Never }
    }

    /// Sends a request and reads the head of its answer.
    ///
    /// # Errors
    /// If there is none in time.
    pub fn send(&self, request: &Request<'_>) -> Result<Answer, HttpError> {
        let connected = Arc::new(AtomicBool::new(false));
        let agent = self.agent(request.within, &connected);
        let answer = match request.body {
            Some(body) => with_headers(agent.post(request.url), request.headers).send(body),
            None => with_headers(agent.get(request.url), request.headers).call(),
        };
        let response =
            answer.map_err(|error| HttpError::of(&error, connected.load(Ordering::Relaxed), request.within))?;
        let after = response.headers().get("retry-after").and_then(|value| value.to_str().ok()?.trim().parse().ok());
        Ok(Answer { status: response.status().as_u16(), retry_after: after, response, within: request.within })
    }

    /// For one request: `connected` tells how far that came.
    fn agent(&self, within: Duration, connected: &Arc<AtomicBool>) -> Agent {
        let builder = Agent::config_builder()
            .timeout_global(Some(within))
            .http_status_as_error(false)
            // A redirected POST is no POST any more, and its token is for this address.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .max_idle_connections(0)
            .user_agent(concat!("cluster-doctor/", env!("CARGO_PKG_VERSION")))
            .tls_config(self.tls.clone());
        let config = match self.proxy {
            Proxy::Never => builder.proxy(None).build(),
            Proxy::FromEnvironment => builder.build(),
        };
        let connector = Watched { inner: Arc::clone(&self.connector), connected: Arc::clone(connected) };
        Agent::with_parts(config, connector, DefaultResolver::default())
    }
}

fn with_headers<B>(mut request: ureq::RequestBuilder<B>, headers: &[(&str, &str)]) -> ureq::RequestBuilder<B> {
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request
}

impl Answer {
    /// All of the body.
    ///
    /// # Errors
    /// If it has more than `most` bytes, or its end does not come in time.
    pub fn read(mut self, most: usize) -> Result<Vec<u8>, HttpError> {
        let failed = |error: &ureq::Error| HttpError::of(error, true, self.within);
        // One more than that says that there is more.
        let limit = (most as u64).saturating_add(1);
        let mut bytes = Vec::new();
        let mut reader = self.response.body_mut().as_reader().take(limit);
        reader.read_to_end(&mut bytes).map_err(|error| failed(&error.into()))?;
        if bytes.len() > most {
            let text = format!("the answer has more than {most} bytes");
            return Err(HttpError { kind: HttpErrorKind::TooLong, sent: true, text });
        }
        Ok(bytes)
    }

    /// The beginning of the body, as far as it comes, for a message.
    pub fn beginning(mut self, most: usize) -> String {
        let mut bytes = Vec::new();
        // What was read until it broke is all there is.
        let _broken = self.response.body_mut().as_reader().take(most as u64).read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// Tells when a connection is made, TLS included: nothing of a request is sent before.
#[derive(Debug)]
struct Watched {
    inner: Arc<dyn Connector<(), Out = Box<dyn Transport>>>,
    connected: Arc<AtomicBool>,
}

impl Connector for Watched {
    type Out = Box<dyn Transport>;

    fn connect(&self, details: &ConnectionDetails<'_>, chained: Option<()>) -> Result<Option<Self::Out>, ureq::Error> {
        let transport = self.inner.connect(details, chained)?;
        self.connected.store(transport.is_some(), Ordering::Relaxed);
        Ok(transport)
    }
}

#[cfg(test)]
mod tests;
