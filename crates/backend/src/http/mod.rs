//! The controller's HTTP client: one request per connection, a deadline for the whole exchange and a size limit for the response.
//!
//! It follows no redirects and keeps no connections: a response is current and comes from the requested address. An error reports
//! whether the request may have been sent ([`HttpError::was_sent`]), and so whether it may have taken effect. No error quotes the
//! URL, which may hold a secret.

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

use crate::{Effect, deadline};
pub use tls_roots::{BadRoots, TrustedRoots, roots};
use unix_socket::UnixConnector;

/// Whether to use a proxy named in the environment (`HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY`, `NO_PROXY`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proxy {
    Never,
    FromEnvironment,
}

/// Sends requests. Several threads may share it.
#[derive(Debug)]
pub struct Client {
    connector: Arc<dyn Connector<(), Out = Box<dyn Transport>>>,
    tls: TlsConfig,
    proxy: Proxy,
}

/// A request: a POST if it has a body, otherwise a GET.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    pub url: &'a str,
    pub headers: &'a [(&'a str, &'a str)],
    pub body: Option<&'a [u8]>,
    /// The limit for resolving the name, connecting, sending, and reading the response to its end. Within a call to a backend the
    /// request ends with the call ([`deadline`]).
    pub timeout: Duration,
}

/// A response of any status. Its body is not read yet.
#[derive(Debug)]
pub struct HttpResponse {
    pub status: u16,
    /// The header `Retry-After`, in seconds.
    pub retry_after: Option<u32>,
    response: Response<Body>,
    timeout: Duration,
}

/// Why there is no response, or only a part of it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct HttpError {
    pub kind: HttpErrorKind,
    sent: bool,
    text: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HttpErrorKind {
    /// The URL or a header is invalid.
    BadRequest,
    /// The host does not resolve or refuses the connection, or the connection broke.
    Connection,
    /// The TLS handshake failed, or the certificate is not trusted.
    Tls,
    /// The deadline passed.
    Timeout,
    /// The response exceeds the size limit.
    TooLong,
    /// The response is not HTTP, or is truncated.
    NotHttp,
}

impl HttpError {
    /// Returns whether any part of the request may have reached the server. Connecting and the TLS handshake come before.
    pub const fn was_sent(&self) -> bool {
        self.sent
    }

    /// Returns what may have happened. `changes`: the request was to change something.
    pub const fn effect(&self, changes: bool) -> Effect {
        if self.sent && changes { Effect::Unknown } else { Effect::NotAppliedRetry }
    }

    fn of(error: &ureq::Error, sent: bool, within: Duration) -> Self {
        use HttpErrorKind::{BadRequest, Connection, NotHttp, Timeout, Tls};
        let (kind, text) = match error {
            ureq::Error::Timeout(_) => (Timeout, format!("no answer within {} s", within.as_secs_f64())),
            ureq::Error::HostNotFound => (Connection, "the host name does not resolve".to_owned()),
            ureq::Error::Io(error) if is_tls(error) => (Tls, error.to_string()),
            ureq::Error::Io(error) if sent && error.kind() == io::ErrorKind::UnexpectedEof => {
                (NotHttp, "the connection closed before the response was complete".to_owned())
            }
            ureq::Error::Io(error) => (Connection, error.to_string()),
            ureq::Error::Rustls(error) => (Tls, error.to_string()),
            ureq::Error::Tls(_) | ureq::Error::TlsRequired => (Tls, "TLS cannot be used with this address".to_owned()),
            ureq::Error::BadUri(_) | ureq::Error::Http(_) => (BadRequest, "the URL or a header is invalid".to_owned()),
            ureq::Error::Protocol(_) | ureq::Error::LargeResponseHeader(..) => {
                (NotHttp, "the response is not HTTP".to_owned())
            }
            _ => (Connection, "the connection failed".to_owned()),
        };
        Self { kind, sent, text }
    }
}

fn is_tls(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<rustls::Error>())
}

impl Client {
    /// Creates a client that trusts the certificates `roots` for TLS URLs.
    pub fn new(roots: &[CertificateDer<'_>], proxy: Proxy) -> Self {
        let roots: Vec<Certificate<'static>> =
            roots.iter().map(|root| Certificate::from_der(root).to_owned()).collect();
        let tls = TlsConfig::builder().root_certs(RootCerts::Specific(Arc::new(roots))).build();
        Self { connector: Arc::new(DefaultConnector::new()), tls, proxy }
    }

    /// Creates a client for a server on a Unix socket. The host of a URL is ignored and must be an address.
    pub fn over_socket(path: &Path) -> Self {
        let tls = TlsConfig::builder().root_certs(RootCerts::Specific(Arc::default())).build();
        Self { connector: Arc::new(UnixConnector::new(path)), tls, proxy: Proxy::Never }
    }

    /// Sends a request and reads the head of the response.
    ///
    /// # Errors
    /// If no response begins before the deadline.
    pub fn send(&self, request: &Request<'_>) -> Result<HttpResponse, HttpError> {
        if deadline::is_over() {
            return Err(HttpError { kind: HttpErrorKind::Timeout, sent: false, text: deadline::TIME_IS_UP.to_owned() });
        }
        let timeout = deadline::time_left(request.timeout);
        let connected = Arc::new(AtomicBool::new(false));
        let agent = self.agent(timeout, &connected);
        let result = match request.body {
            Some(body) => with_headers(agent.post(request.url), request.headers).send(body),
            None => with_headers(agent.get(request.url), request.headers).call(),
        };
        let response = result.map_err(|error| HttpError::of(&error, connected.load(Ordering::Relaxed), timeout))?;
        let after = response.headers().get("retry-after").and_then(|value| value.to_str().ok()?.trim().parse().ok());
        Ok(HttpResponse { status: response.status().as_u16(), retry_after: after, response, timeout })
    }

    /// Builds the agent for one request, which sets `connected` once the connection is made.
    fn agent(&self, within: Duration, connected: &Arc<AtomicBool>) -> Agent {
        let builder = Agent::config_builder()
            .timeout_global(Some(within))
            .http_status_as_error(false)
            // ureq would redirect a POST as a GET, and its token is meant for this address only.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .max_idle_connections(0)
            .user_agent(concat!("cluster-doctor/", env!("CARGO_PKG_VERSION")))
            .tls_config(self.tls.clone());
        let config = match self.proxy {
            Proxy::Never => builder.proxy(None).build(),
            Proxy::FromEnvironment => builder.build(),
        };
        let connector = ConnectObserver { inner: Arc::clone(&self.connector), connected: Arc::clone(connected) };
        Agent::with_parts(config, connector, DefaultResolver::default())
    }
}

fn with_headers<B>(mut request: ureq::RequestBuilder<B>, headers: &[(&str, &str)]) -> ureq::RequestBuilder<B> {
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request
}

impl HttpResponse {
    /// Reads the whole body.
    ///
    /// # Errors
    /// If it has more than `max_bytes` bytes, or does not end before the deadline.
    pub fn read(mut self, max_bytes: usize) -> Result<Vec<u8>, HttpError> {
        let failed = |error: &ureq::Error| HttpError::of(error, true, self.timeout);
        // One byte more reveals that the body is too long.
        let limit = (max_bytes as u64).saturating_add(1);
        let mut bytes = Vec::new();
        let mut reader = self.response.body_mut().as_reader().take(limit);
        reader.read_to_end(&mut bytes).map_err(|error| failed(&error.into()))?;
        if bytes.len() > max_bytes {
            let text = format!("the response exceeds {max_bytes} bytes");
            return Err(HttpError { kind: HttpErrorKind::TooLong, sent: true, text });
        }
        Ok(bytes)
    }

    /// Reads at most `max_bytes` bytes of the body, or as many as arrive, for an error message.
    pub fn read_prefix(mut self, max_bytes: usize) -> String {
        let mut bytes = Vec::new();
        // If the stream breaks, the bytes read so far are the result.
        let _broken = self.response.body_mut().as_reader().take(max_bytes as u64).read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// Records when a connection is made, including TLS. No part of a request is sent before that.
#[derive(Debug)]
struct ConnectObserver {
    inner: Arc<dyn Connector<(), Out = Box<dyn Transport>>>,
    connected: Arc<AtomicBool>,
}

impl Connector for ConnectObserver {
    type Out = Box<dyn Transport>;

    fn connect(&self, details: &ConnectionDetails<'_>, chained: Option<()>) -> Result<Option<Self::Out>, ureq::Error> {
        let transport = self.inner.connect(details, chained)?;
        self.connected.store(transport.is_some(), Ordering::Relaxed);
        Ok(transport)
    }
}

#[cfg(test)]
mod tests;
