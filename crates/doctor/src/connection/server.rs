//! Requests to a controller's API, with a time limit and a size limit. A token appears in no message.

use std::{
    io::Read as _,
    net::IpAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use doctor_backend::{
    http::{self, BadRoots, Client, HttpError, HttpErrorKind, Proxy, Request, TrustedRoots},
    trusted_file,
};
use doctor_core::time::Timestamp;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;

use crate::{exit::Exit, output::sanitize};

/// The API answers within 12 seconds; the rest is for the network.
const TIMEOUT: Duration = Duration::from_secs(30);
/// A support bundle is the longest response.
const MAX_RESPONSE_BYTES: usize = 64 << 20;
const MAX_ERROR_BYTES: usize = 1 << 20;
const MAX_TOKEN_BYTES: u64 = 4 << 10;

/// A controller and how to reach it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ServerSettings {
    pub url: String,
    pub token_file: Option<PathBuf>,
    pub ca_file: Option<PathBuf>,
    /// Permits the token to cross the network unencrypted.
    pub plain: bool,
    /// The context that has these settings.
    pub context: Option<String>,
    /// Whether the command line or the environment names the controller. If not, the contexts file does.
    pub is_explicit: bool,
}

/// A controller's API.
pub(crate) struct Server {
    url: String,
    authorization: Option<String>,
    http: Client,
}

/// Why a controller did not do what a client asked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ServerError {
    #[error("`{0}` is not the address of a controller, such as https://doctor.example.com:7480")]
    BadUrl(String),
    #[error("reading the token in {}", path.display())]
    TokenFile { path: PathBuf, source: std::io::Error },
    #[error("{} holds no token", path.display())]
    NoToken { path: PathBuf },
    #[error("--ca-file")]
    CaFile(#[source] BadRoots),
    #[error("the token would cross the network to {0} unencrypted")]
    Unencrypted(String),
    #[error("cannot reach the controller at {url}")]
    Unreachable { url: String, source: HttpError },
    #[error("the controller at {url} did not answer; whether the command was carried out is unknown")]
    OutcomeUnknown { url: String, source: HttpError },
    #[error("the response of {url} is not that of a controller: {why}")]
    NotAController { url: String, why: String },
    #[error("the controller at {url} rejected the request: {text}")]
    SignIn { url: String, text: String },
    #[error("{text}")]
    Rejected { code: String, text: String, accepted: Option<String> },
    /// The nodes have changed since the plan was made. This is the current plan.
    #[error("the nodes have changed since the plan was made: review the new plan")]
    PlanChanged(Box<ActionReply>),
    #[error("the controller at {url} cannot answer now: {text}")]
    Busy { url: String, text: String },
}

/// The response to an action: its plan, or its result.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(crate) struct ActionReply {
    pub text: String,
    pub changes: Vec<String>,
    #[serde(default)]
    pub nodes: Vec<String>,
    pub by: String,
    pub why: String,
    pub at: Timestamp,
    /// What the circuit breaker would allow, if the plan names more nodes; and the number that confirms it.
    #[serde(default)]
    pub limit: Option<String>,
    #[serde(default)]
    pub confirm_nodes: Option<usize>,
    /// Carries out this plan.
    pub confirm: Option<String>,
    pub next: Option<String>,
}

#[derive(Debug, Deserialize)]
struct ErrorReply {
    error: ErrorBody,
}

#[derive(Debug, Deserialize)]
struct ErrorBody {
    code: String,
    text: String,
    accepted: Option<String>,
    plan: Option<Value>,
}

impl ServerError {
    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::BadUrl(_) | Self::Unencrypted(_) => Exit::Usage,
            Self::Rejected { code, .. } if matches!(code.as_str(), "replayed" | "refused") => Exit::ProblemsFound,
            Self::Rejected { code, .. } if code == "confirm-nodes" => Exit::NotConfirmed,
            Self::Rejected { .. } => Exit::Usage,
            Self::PlanChanged(_) => Exit::ProblemsFound,
            Self::TokenFile { .. }
            | Self::NoToken { .. }
            | Self::CaFile(_)
            | Self::Unreachable { .. }
            | Self::OutcomeUnknown { .. }
            | Self::NotAController { .. }
            | Self::SignIn { .. }
            | Self::Busy { .. } => Exit::Unreachable,
        }
    }

    pub(crate) fn hint(&self) -> Option<String> {
        Some(match self {
            Self::Unencrypted(_) => {
                "use https:// (`[web] tls`), a tunnel to 127.0.0.1, or a context with `plain = true` in a network that you trust"
                    .to_owned()
            }
            Self::Unreachable { source, .. } if source.kind == HttpErrorKind::Tls => {
                "`--ca-file FILE` names the certificate, or its authority, if the system does not trust it".to_owned()
            }
            Self::Unreachable { .. } => "`[web] listen` of the controller says where it answers".to_owned(),
            Self::OutcomeUnknown { .. } => "`doctor audit` shows whether it was carried out".to_owned(),
            Self::SignIn { .. } | Self::NoToken { .. } | Self::TokenFile { .. } => {
                "`doctor token create NAME --role viewer|operator` on the controller's machine prints a token; name a file with \
                 it by --token-file or in the context"
                    .to_owned()
            }
            Self::Rejected { code, .. } if code == "command-line" => {
                format!("this is doctor {}", env!("CARGO_PKG_VERSION"))
            }
            Self::Rejected { code, accepted: Some(accepted), .. } if code == "unknown" => format!("known: {accepted}"),
            Self::Rejected { accepted: Some(accepted), .. } => format!("accepted: {accepted}"),
            Self::NotAController { .. } => {
                format!("this is doctor {}; an older controller has no remote command line", env!("CARGO_PKG_VERSION"))
            }
            _ => return None,
        })
    }
}

impl std::fmt::Debug for Server {
    /// Without the token.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("url", &self.url).finish_non_exhaustive()
    }
}

impl Server {
    /// Prepares requests to a controller. Nothing is sent.
    pub(crate) fn open(settings: &ServerSettings) -> Result<Self, ServerError> {
        let url = settings.url.trim_end_matches('/').to_owned();
        let (is_encrypted, host) = host_of(&url).ok_or_else(|| ServerError::BadUrl(sanitize(&settings.url)))?;
        let authorization = settings.token_file.as_deref().map(read_token).transpose()?;
        if authorization.is_some() && !is_encrypted && !settings.plain && !is_loopback(host) {
            return Err(ServerError::Unencrypted(host.to_owned()));
        }
        let trust = settings.ca_file.as_deref().map_or(TrustedRoots::System, TrustedRoots::File);
        let roots = is_encrypted.then(|| http::roots(trust)).transpose().map_err(ServerError::CaFile)?;
        // A proxy of the environment does not lead to this machine.
        let proxy = if is_loopback(host) { Proxy::Never } else { Proxy::FromEnvironment };
        Ok(Self { url, authorization, http: Client::new(&roots.unwrap_or_default(), proxy) })
    }

    pub(crate) fn get(&self, path: &str) -> Result<Vec<u8>, ServerError> {
        self.request(path, None, false)
    }

    pub(crate) fn get_json<T: DeserializeOwned>(&self, path: &str) -> Result<T, ServerError> {
        self.parsed(&self.get(path)?)
    }

    /// Sends a request that changes nothing.
    pub(crate) fn post<T: DeserializeOwned>(&self, path: &str, body: &Value) -> Result<T, ServerError> {
        self.parsed(&self.request(path, Some(body), false)?)
    }

    /// Sends an action. With a confirmation, it is carried out.
    pub(crate) fn act(&self, path: &str, body: &Value) -> Result<ActionReply, ServerError> {
        let confirmed = body.get("confirm").is_some();
        self.parsed(&self.request(path, Some(body), confirmed)?)
    }

    fn parsed<T: DeserializeOwned>(&self, bytes: &[u8]) -> Result<T, ServerError> {
        serde_json::from_slice(bytes).map_err(|error| self.not_a_controller(error.to_string()))
    }

    fn not_a_controller(&self, why: String) -> ServerError {
        ServerError::NotAController { url: self.url.clone(), why }
    }

    fn request(&self, path: &str, body: Option<&Value>, changes: bool) -> Result<Vec<u8>, ServerError> {
        let url = format!("{}/api/v1{path}", self.url);
        let mut headers = vec![("accept", "application/json, application/gzip"), ("content-type", "application/json")];
        headers.extend(self.authorization.as_deref().map(|value| ("authorization", value)));
        let body = body.map(Value::to_string);
        let request =
            Request { url: &url, headers: &headers, body: body.as_deref().map(str::as_bytes), timeout: TIMEOUT };
        let failed = |source: HttpError| match changes && source.was_sent() {
            true => ServerError::OutcomeUnknown { url: self.url.clone(), source },
            false => ServerError::Unreachable { url: self.url.clone(), source },
        };
        let response = self.http.send(&request).map_err(failed)?;
        match response.status {
            200 => response.read(MAX_RESPONSE_BYTES).map_err(failed),
            status => Err(self.rejection(status, &response.read_prefix(MAX_ERROR_BYTES))),
        }
    }

    /// Returns the error that a response reports.
    fn rejection(&self, status: u16, body: &str) -> ServerError {
        let url = self.url.clone();
        let Ok(ErrorReply { error }) = serde_json::from_str(body) else {
            return self.not_a_controller(format!("status {status}"));
        };
        let ErrorBody { code, text, accepted, plan } = error;
        let text = sanitize(&text);
        match (status, code.as_str(), plan) {
            (_, "other-plan", Some(plan)) => match serde_json::from_value(plan) {
                Ok(plan) => ServerError::PlanChanged(Box::new(plan)),
                Err(error) => self.not_a_controller(error.to_string()),
            },
            (401 | 403, ..) => ServerError::SignIn { url, text },
            (_, "no-such-place", _) => self.not_a_controller(text),
            (503 | 408 | 429, ..) => ServerError::Busy { url, text },
            // The words of the command line for the same mistake.
            (_, "unknown", _) => {
                let text = text.strip_prefix("unknown ").map_or_else(|| text.clone(), |rest| format!("no {rest}"));
                ServerError::Rejected { code, text, accepted: accepted.map(|accepted| sanitize(&accepted)) }
            }
            _ => ServerError::Rejected { code, text, accepted: accepted.map(|accepted| sanitize(&accepted)) },
        }
    }
}

/// Returns whether a URL is encrypted, and its host.
fn host_of(url: &str) -> Option<(bool, &str)> {
    let (is_encrypted, rest) = match (url.strip_prefix("https://"), url.strip_prefix("http://")) {
        (Some(rest), _) => (true, rest),
        (None, Some(rest)) => (false, rest),
        (None, None) => return None,
    };
    let authority = rest.split('/').next().unwrap_or_default();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | ':' | '[' | ']' | '_');
    let host = match authority.strip_prefix('[') {
        Some(address) => address.split_once(']')?.0,
        None => authority.split(':').next().unwrap_or_default(),
    };
    let is_address = !host.is_empty() && authority.chars().all(is_plain) && !url.contains(['?', '#']);
    (is_address && url.chars().all(|c| c.is_ascii_graphic())).then_some((is_encrypted, host))
}

fn is_loopback(host: &str) -> bool {
    host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Returns the value of the header with the token of a file.
fn read_token(path: &Path) -> Result<String, ServerError> {
    let failed = |source| ServerError::TokenFile { path: path.to_owned(), source };
    let mut text = String::new();
    trusted_file::open(path).and_then(|file| file.take(MAX_TOKEN_BYTES).read_to_string(&mut text)).map_err(failed)?;
    // A token is one word; a line break would begin another header.
    let token = text.trim();
    match !token.is_empty() && token.chars().all(|c| c.is_ascii_graphic()) {
        true => Ok(format!("Bearer {token}")),
        false => Err(ServerError::NoToken { path: path.to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn settings(url: &str, token_file: Option<PathBuf>) -> ServerSettings {
        ServerSettings {
            url: url.to_owned(),
            token_file,
            ca_file: None,
            plain: false,
            context: None,
            is_explicit: true,
        }
    }

    #[test]
    fn an_address_has_a_scheme_and_a_host() {
        assert_eq!(host_of("https://doctor:7480"), Some((true, "doctor")));
        assert_eq!(host_of("http://[::1]:7480/prefix"), Some((false, "::1")));
        for bad in
            ["", "doctor:7480", "ftp://x", "https://", "https://a b", "https://ann@host", "https://x?y", "http://[::1"]
        {
            assert_eq!(host_of(bad), None, "{bad}");
            assert!(matches!(Server::open(&settings(bad, None)), Err(ServerError::BadUrl(_))), "{bad}");
        }
    }

    #[test]
    fn a_token_is_sent_encrypted_or_to_this_machine_only() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        fs::write(&path, "doctor_token_x\n").unwrap();
        for url in ["http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1"] {
            Server::open(&settings(url, Some(path.clone()))).unwrap();
        }
        let error = Server::open(&settings("http://10.0.0.1:1", Some(path.clone()))).unwrap_err();
        assert!(matches!(error, ServerError::Unencrypted(_)) && error.hint().unwrap().contains("plain = true"));
        Server::open(&ServerSettings { plain: true, ..settings("http://10.0.0.1:1", Some(path.clone())) }).unwrap();
        Server::open(&settings("http://10.0.0.1:1", None)).unwrap();
        for bad in ["", "two words\n", "a\r\nx-evil: 1"] {
            fs::write(&path, bad).unwrap();
            let error = Server::open(&settings("http://127.0.0.1:1", Some(path.clone()))).unwrap_err();
            assert!(matches!(error, ServerError::NoToken { .. }), "{bad:?}: {error}");
        }
    }

    #[test]
    fn each_rejection_of_the_api_has_its_exit_code() {
        let server = Server::open(&settings("http://127.0.0.1:1", None)).unwrap();
        let body = |code: &str, text: &str| {
            serde_json::json!({ "error": { "code": code, "text": text, "accepted": "a, b", "plan": null } }).to_string()
        };
        for (status, code, text, exit, message) in [
            (401, "bad-token", "the token is unknown", Exit::Unreachable, "rejected the request: the token is unknown"),
            (403, "role", "operator is required", Exit::Unreachable, "operator is required"),
            (404, "unknown", "unknown node `x`", Exit::Usage, "no node `x`"),
            (400, "bad-order", "in the past", Exit::Usage, "in the past"),
            (404, "no-such-place", "no such endpoint", Exit::Unreachable, "not that of a controller"),
            (503, "busy", "overloaded", Exit::Unreachable, "cannot answer now: overloaded"),
            (400, "command-line", "\u{1b}[2Jx", Exit::Usage, "\u{fffd}[2Jx"),
        ] {
            let error = server.rejection(status, &body(code, text));
            assert_eq!(error.exit(), exit, "{code}");
            assert!(error.to_string().contains(message), "{code}: {error}");
        }
        assert!(server.rejection(401, &body("no-token", "x")).hint().unwrap().contains("doctor token create"));
        assert!(matches!(server.rejection(502, "<html>"), ServerError::NotAController { .. }));
    }
}
