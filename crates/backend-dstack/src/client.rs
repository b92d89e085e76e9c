//! Requests to the server: JSON over HTTP, with a token that appears in no message, a time limit and a size limit.

use std::{path::PathBuf, time::Duration};

use doctor_backend::{
    BackendError, Effect,
    http::{self, HttpError, HttpErrorKind, Proxy, Request, TrustedRoots},
    trusted_file,
};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;

use super::config::{DstackConfig, DstackConfigError, Endpoint};

/// The API version that this client uses. A server of another generation rejects it.
const VERSION: &str = "0.22.5";
/// Ten thousand instances are about ten megabytes.
const MAX_RESPONSE_BYTES: usize = 64 << 20;
/// The most characters of a rejection that are quoted, and the most bytes of it that are read.
const MAX_QUOTED_CHARS: usize = 300;
const MAX_ERROR_BYTES: usize = 64 << 10;

/// Whether a request changes anything, so that a lost response leaves its effect unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    Write,
}

#[derive(Debug)]
pub(super) struct Client {
    endpoint: Endpoint,
    token_file: Option<PathBuf>,
    token_variable: String,
    deadline: Duration,
    http: http::Client,
}

/// Why a request has no response.
#[derive(Debug, thiserror::Error)]
pub(super) enum DstackApiError {
    #[error("no token: {0}")]
    NoToken(String),
    #[error("connecting to {at}: {source}")]
    Connect { at: String, source: HttpError },
    #[error("request to {at} failed: {source}")]
    Request { at: String, source: HttpError },
    #[error("the response of {0} exceeds the size limit")]
    TooLong(String),
    #[error("{0} did not respond in HTTP")]
    InvalidHttp(String),
    #[error("unexpected response to {path}: {source}")]
    UnexpectedBody { path: String, source: serde_json::Error },
    #[error("{at} answered with {status}: {text}")]
    Rejected { at: String, status: u16, code: Option<String>, text: String },
}

impl DstackApiError {
    /// Returns whether the server reports that the resource does not exist.
    pub(super) fn is_not_found(&self) -> bool {
        matches!(self, Self::Rejected { code: Some(code), .. } if code == "resource_not_exists")
    }

    fn effect(&self, does: Access) -> Effect {
        let not_heard = match does {
            Access::Read => Effect::NotAppliedRetry,
            Access::Write => Effect::Unknown,
        };
        match self {
            Self::NoToken(_) | Self::Connect { .. } => Effect::NotAppliedRetry,
            Self::Rejected { status: 408 | 429, .. } => Effect::NotAppliedRetry,
            Self::Rejected { status: 400..=499, .. } => Effect::NotAppliedPermanent,
            Self::Request { .. }
            | Self::TooLong(_)
            | Self::InvalidHttp(_)
            | Self::UnexpectedBody { .. }
            | Self::Rejected { .. } => not_heard,
        }
    }

    pub(super) fn to_backend_error(&self, operation: &'static str, does: Access) -> BackendError {
        BackendError { operation, text: self.to_string(), effect: self.effect(does) }
    }
}

impl Client {
    pub(super) fn new(config: &DstackConfig) -> Result<Self, String> {
        let endpoint = config.endpoint().map_err(|error: DstackConfigError| error.to_string())?;
        let trust = config.ca_file.as_deref().map_or(TrustedRoots::System, TrustedRoots::File);
        let roots = endpoint.tls.then(|| http::roots(trust)).transpose();
        let roots = roots.map_err(|error| format!("`ca_file` {error}"))?.unwrap_or_default();
        Ok(Self {
            endpoint,
            token_file: config.token_file.clone(),
            token_variable: config.token_variable.clone(),
            deadline: config.deadline.to_std(),
            http: http::Client::new(&roots, Proxy::Never),
        })
    }

    /// Checks that a token is set. Whether the server accepts it is known only there.
    pub(super) fn check_token(&self) -> Result<(), String> {
        self.token().map(drop).map_err(|error| error.to_string())
    }

    fn token(&self) -> Result<String, DstackApiError> {
        let token = match &self.token_file {
            Some(path) => trusted_file::read_to_string(path)
                .map_err(|error| DstackApiError::NoToken(format!("`token_file` {}: {error}", path.display())))?,
            None => std::env::var(&self.token_variable).map_err(|_| {
                DstackApiError::NoToken(format!(
                    "set the environment variable {}, or `token_file`",
                    self.token_variable
                ))
            })?,
        };
        // A token is one word; a line break would begin another header.
        let token: String = token.trim().chars().filter(char::is_ascii_graphic).collect();
        if token.is_empty() { Err(DstackApiError::NoToken("the token is empty".to_owned())) } else { Ok(token) }
    }

    /// Posts a request and parses the response.
    pub(super) fn post<T: DeserializeOwned>(&self, path: &str, body: &Value) -> Result<T, DstackApiError> {
        let Endpoint { host, port, path_prefix: before, tls: secure } = &self.endpoint;
        let at = format!("{host}:{port}");
        let scheme = if *secure { "https" } else { "http" };
        let host = if host.contains(':') { format!("[{host}]") } else { host.clone() };
        let url = format!("{scheme}://{host}:{port}{before}{path}");
        let bearer = format!("Bearer {}", self.token()?);
        let headers = [
            ("Authorization", bearer.as_str()),
            ("X-API-VERSION", VERSION),
            ("Content-Type", "application/json"),
            ("Accept", "application/json"),
        ];
        let failed = |source: HttpError| {
            let at = at.clone();
            match source.kind {
                HttpErrorKind::TooLong => DstackApiError::TooLong(at),
                HttpErrorKind::NotHttp => DstackApiError::InvalidHttp(at),
                _ if source.was_sent() => DstackApiError::Request { at, source },
                _ => DstackApiError::Connect { at, source },
            }
        };
        let body = body.to_string();
        let request = Request { url: &url, headers: &headers, body: Some(body.as_bytes()), timeout: self.deadline };
        let response = self.http.send(&request).map_err(failed)?;
        let status = response.status;
        if status != 200 {
            let (code, text) = parse_error_body(response.read_prefix(MAX_ERROR_BYTES).as_bytes());
            return Err(DstackApiError::Rejected { at, status, code, text });
        }
        let body = response.read(MAX_RESPONSE_BYTES).map_err(failed)?;
        serde_json::from_slice(&body).map_err(|source| DstackApiError::UnexpectedBody { path: path.to_owned(), source })
    }
}

/// `{"detail": {"msg": …, "code": …}}`, or a list of them.
#[derive(Debug, Deserialize)]
struct ErrorBody {
    detail: Details,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Details {
    Many(Vec<Detail>),
    One(Detail),
    Text(String),
}

#[derive(Debug, Clone, Deserialize)]
struct Detail {
    msg: String,
    code: Option<String>,
}

/// Returns the code and the message of a rejection.
fn parse_error_body(body: &[u8]) -> (Option<String>, String) {
    let (code, text) = match serde_json::from_slice::<ErrorBody>(body).map(|refusal| refusal.detail) {
        Ok(Details::One(detail)) => (detail.code, detail.msg),
        Ok(Details::Many(details)) => {
            let messages: Vec<&str> = details.iter().map(|detail| detail.msg.as_str()).collect();
            (details.iter().find_map(|detail| detail.code.clone()), messages.join("; "))
        }
        Ok(Details::Text(text)) => (None, text),
        Err(_) => (None, String::from_utf8_lossy(body).into_owned()),
    };
    (code, text.chars().take(MAX_QUOTED_CHARS).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        io::{Read as _, Write as _},
        net::TcpListener,
        thread::JoinHandle,
    };

    /// Sends this response to one request, and returns the request.
    fn server(response: &'static str) -> (DstackConfig, JoinHandle<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/dstack", listener.local_addr().unwrap());
        let serving = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let (mut request, mut part) = (String::new(), [0; 4096]);
            while !request.ends_with("\r\n\r\nnull") {
                let count = stream.read(&mut part).unwrap();
                request += &String::from_utf8_lossy(&part[..count]);
            }
            stream.write_all(response.as_bytes()).unwrap();
            request
        });
        (DstackConfig { url, ..DstackConfig::default() }, serving)
    }

    fn with_token(mut config: DstackConfig) -> (tempfile::TempDir, Client) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        std::fs::write(&path, "secret-token\r\nX-Evil: 1\n").unwrap();
        config.token_file = Some(path);
        config.deadline = doctor_core::time::Span::from_secs(5);
        (folder, Client::new(&config).unwrap())
    }

    #[test]
    fn a_request_carries_the_sanitised_token_and_the_api_version() {
        let (config, serving) = server("HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n{\"a\":1}");
        let (_folder, client) = with_token(config);
        assert_eq!(client.post::<Value>("/api/x", &Value::Null).unwrap()["a"], 1);
        let request = serving.join().unwrap();
        assert!(request.starts_with("POST /dstack/api/x HTTP/1.1\r\n"), "{request}");
        assert!(request.contains("\r\nauthorization: Bearer secret-tokenX-Evil:1\r\n"), "{request}");
        assert!(request.contains("\r\nx-api-version: 0.22.5\r\n"));
    }

    #[test]
    fn every_error_has_an_effect() {
        use Effect::{NotAppliedPermanent, NotAppliedRetry, Unknown};
        let not_there =
            "HTTP/1.1 400 Bad\r\n\r\n{\"detail\":[{\"msg\":\"Run not found\",\"code\":\"resource_not_exists\"}]}";
        for (response, read, changed, expected) in [
            (not_there, NotAppliedPermanent, NotAppliedPermanent, "400: Run not found"),
            (
                "HTTP/1.1 403 No\r\n\r\n{\"detail\":{\"msg\":\"Invalid token\",\"code\":null}}",
                NotAppliedPermanent,
                NotAppliedPermanent,
                "Invalid token",
            ),
            ("HTTP/1.1 429 Slow\r\n\r\nlater", NotAppliedRetry, NotAppliedRetry, "429: later"),
            ("HTTP/1.1 500 Oops\r\n\r\nInternal", NotAppliedRetry, Unknown, "500: Internal"),
            ("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", NotAppliedRetry, Unknown, "did not respond in HTTP"),
            ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", NotAppliedRetry, Unknown, "unexpected response"),
        ] {
            let (config, serving) = server(response);
            let (_folder, client) = with_token(config);
            let failed = client.post::<std::collections::BTreeMap<String, u32>>("/x", &Value::Null).unwrap_err();
            serving.join().unwrap();
            assert_eq!((failed.effect(Access::Read), failed.effect(Access::Write)), (read, changed), "{failed}");
            assert!(failed.to_string().contains(expected), "{failed}");
            assert_eq!(failed.is_not_found(), response == not_there);
            assert!(!failed.to_string().contains("secret-token"));
        }
    }

    #[test]
    fn an_unreachable_server_and_a_missing_token_are_retried() {
        let (config, _serving) = server("");
        let closed = DstackConfig { url: "http://127.0.0.1:1".to_owned(), ..config.clone() };
        let (_folder, client) = with_token(closed);
        let failed = client.post::<Value>("/x", &Value::Null).unwrap_err();
        assert_eq!(failed.effect(Access::Write), Effect::NotAppliedRetry, "{failed}");
        let no_token = DstackConfig { token_variable: "DOCTOR_TEST_NO_SUCH_TOKEN".to_owned(), ..config };
        let failed = Client::new(&no_token).unwrap().post::<Value>("/x", &Value::Null).unwrap_err();
        assert!(failed.to_string().contains("DOCTOR_TEST_NO_SUCH_TOKEN"), "{failed}");
    }

    /// A server that responds to one request over TLS, with a self-signed certificate for `localhost`.
    const OVER_TLS: &str = r#"
import http.server, ssl, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.send_response(200)
        self.send_header("Content-Length", "7")
        self.end_headers()
        self.wfile.write(b'{"a":1}')
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Answer)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(sys.argv[1] + "/cert.pem", sys.argv[1] + "/key.pem")
server.socket = context.wrap_socket(server.socket, server_side=True)
print(server.server_port, flush=True)
server.serve_forever()
"#;

    #[test]
    fn the_token_is_sent_over_tls_only_to_a_server_with_a_trusted_certificate() {
        use std::{
            io::{BufRead as _, BufReader},
            process::{Command, Stdio},
        };
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).display().to_string();
        let (key, certificate) = (at("key.pem"), at("cert.pem"));
        let args = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost \
                     -addext subjectAltName=DNS:localhost -addext basicConstraints=critical,CA:false -keyout";
        let output = Command::new("openssl").args(args.split_whitespace()).args([&key, "-out", &certificate]).output();
        assert!(output.unwrap().status.success(), "openssl makes a certificate");
        let mut server = Command::new("python3")
            .args(["-c", OVER_TLS, &folder.path().display().to_string()])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut port = String::new();
        BufReader::new(server.stdout.take().unwrap()).read_line(&mut port).unwrap();
        let post = |host: &str, authorities: Option<&str>| {
            let url = format!("https://{host}:{}", port.trim());
            let config = DstackConfig { url, ca_file: authorities.map(Into::into), ..DstackConfig::default() };
            let (_folder, client) = with_token(config);
            client
                .post::<Value>("/x", &Value::Null)
                .map(|response| response["a"].clone())
                .map_err(|error| error.to_string())
        };
        let trusted = post("localhost", Some(&certificate));
        let (untrusted, misnamed) = (post("localhost", None), post("127.0.0.1", Some(&certificate)));
        server.kill().unwrap();
        server.wait().unwrap();
        assert_eq!(trusted, Ok(Value::from(1)));
        assert!(untrusted.as_ref().is_err_and(|error| error.contains("certificate")), "{untrusted:?}");
        assert!(misnamed.as_ref().is_err_and(|error| error.contains("certificate")), "{misnamed:?}");
    }
}
