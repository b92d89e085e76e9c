//! Single requests to the API server through the `openssl` program.
//!
//! The test bed itself makes only three requests (readiness, service account, token). A TLS library and an HTTP client
//! would be compiled for them into every test that needs only PostgreSQL.

use std::{
    io::Write as _,
    path::PathBuf,
    process::{Command, Stdio},
};

use serde_json::Value;

use super::{KubernetesTestbedError, certificate_authority::KeyPair};

/// The limit of one request in seconds, enforced by the `timeout` program.
const PATIENCE: &str = "10";

#[derive(Debug)]
pub(super) struct ApiClient {
    pub(super) port: u16,
    pub(super) authority: PathBuf,
    pub(super) user: KeyPair,
}

/// A reply of the API server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiResponse {
    pub status: u16,
    pub text: String,
}

impl ApiResponse {
    /// Parses an HTTP/1.0 response: not chunked, ended by the end of the connection.
    fn parse(bytes: &[u8]) -> Option<Self> {
        let answer = String::from_utf8_lossy(bytes);
        let (head, text) = answer.split_once("\r\n\r\n")?;
        let status = head.strip_prefix("HTTP/1.")?.split(' ').nth(1)?.parse().ok()?;
        Some(Self { status, text: text.to_owned() })
    }

    /// Returns whether the status is 2xx.
    pub fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }
}

impl ApiClient {
    pub(super) fn request(
        &self,
        method: &str,
        path: &str,
        body: Option<&Value>,
    ) -> Result<ApiResponse, KubernetesTestbedError> {
        let failed = |source| KubernetesTestbedError::Program { program: "openssl".into(), source };
        let mut asking = Command::new("timeout")
            .args([PATIENCE, "openssl", "s_client", "-quiet", "-verify_quiet", "-verify_return_error", "-connect"])
            .arg(format!("127.0.0.1:{}", self.port))
            .arg("-CAfile")
            .arg(&self.authority)
            .arg("-cert")
            .arg(&self.user.certificate)
            .arg("-key")
            .arg(&self.user.key)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let body = body.map(Value::to_string).unwrap_or_default();
        let kind = if method == "PATCH" { "application/merge-patch+json" } else { "application/json" };
        let request = format!(
            "{method} {path} HTTP/1.0\r\nHost: 127.0.0.1:{}\r\nContent-Type: {kind}\r\n\
             Content-Length: {}\r\n\r\n{body}",
            self.port,
            body.len()
        );
        if let Some(mut input) = asking.stdin.take() {
            // The write fails if no server listens; the program's own message is the better reason.
            drop(input.write_all(request.as_bytes()));
        }
        let ended = asking.wait_with_output().map_err(failed)?;
        ApiResponse::parse(&ended.stdout).ok_or_else(|| KubernetesTestbedError::NoResponse {
            asked: format!("{method} {path}"),
            said: String::from_utf8_lossy(&ended.stderr).trim().to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_response_has_its_status_and_its_text() {
        let read = ApiResponse::parse(b"HTTP/1.0 404 Not Found\r\nContent-Type: text/plain\r\n\r\nno such thing");
        assert_eq!(read, Some(ApiResponse { status: 404, text: "no such thing".to_owned() }));
        assert_eq!(ApiResponse::parse(b""), None);
        assert_eq!(ApiResponse::parse(b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n"), None);
    }
}
