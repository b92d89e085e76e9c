//! A minimal HTTP client for the dstack server: one request per connection.

use std::{
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use serde_json::Value;

use super::error::DstackTestbedError;

/// How long a server that is starting, or that waits for a core, may take to reply.
const LIMIT: Duration = Duration::from_secs(300);

/// A user of the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    pub name: String,
    pub token: String,
}

/// Posts a request and returns the JSON reply.
pub(super) fn post(at: SocketAddr, token: &str, path: &str, body: &Value) -> Result<Value, DstackTestbedError> {
    let failed = |source| DstackTestbedError::Request { path: path.to_owned(), source };
    let (status, text) = exchange(at, token, path, &body.to_string()).map_err(failed)?;
    if status == 200 {
        return serde_json::from_str(&text).map_err(|error| failed(error.into()));
    }
    Err(DstackTestbedError::ErrorStatus { path: path.to_owned(), status, text })
}

fn exchange(at: SocketAddr, token: &str, path: &str, body: &str) -> io::Result<(u16, String)> {
    let mut stream = TcpStream::connect_timeout(&at, LIMIT)?;
    stream.set_read_timeout(Some(LIMIT))?;
    write!(
        stream,
        "POST {path} HTTP/1.0\r\nAuthorization: Bearer {token}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").ok_or(io::ErrorKind::UnexpectedEof)?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).ok_or(io::ErrorKind::InvalidData)?;
    Ok((status, body.to_owned()))
}
