//! Reads nodes from slurmrestd, over its socket or its port. Each request has its own connection.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use doctor_backend::{
    http::{self, BadRoots, Client, HttpError, HttpErrorKind, Proxy, Request, TrustedRoots},
    trusted_file,
};

use super::{
    config::Rest,
    json::{self, MAX_RESPONSE_BYTES},
    nodes::SlurmNode,
};

/// The most bytes of an error response that are read.
const MAX_QUOTED_BYTES: usize = 4096;

#[derive(Debug, thiserror::Error)]
enum RestError {
    #[error("cannot read {} (`rest.token_file`)", .0.display())]
    NoToken(PathBuf, #[source] io::Error),
    #[error("`rest.ca_file`")]
    Authorities(#[from] BadRoots),
    #[error("request to {0} failed")]
    Request(String, #[source] HttpError),
    #[error("the response of {0} exceeds the size limit")]
    TooLong(String),
    #[error("{0} did not respond in HTTP")]
    InvalidHttp(String),
    #[error("{at} answered with {status}: {text}")]
    Status { at: String, status: u16, text: String },
    #[error(transparent)]
    Response(#[from] json::ResponseError),
}

/// Requests all nodes.
///
/// # Errors
/// As text, because every failure here is temporary.
pub(super) fn nodes(rest: &Rest, limit: Duration) -> Result<Vec<SlurmNode>, String> {
    request_nodes(rest, limit).map_err(|error| {
        let mut text = error.to_string();
        let mut source = std::error::Error::source(&error);
        while let Some(cause) = source {
            text = format!("{text}: {cause}");
            source = cause.source();
        }
        text
    })
}

fn request_nodes(rest: &Rest, limit: Duration) -> Result<Vec<SlurmNode>, RestError> {
    let token = match &rest.token_file {
        Some(path) => {
            let token = trusted_file::read_to_string(path).map_err(|error| RestError::NoToken(path.clone(), error))?;
            // A token is one word; a line break would begin another header.
            Some(token.trim().chars().filter(char::is_ascii_graphic).collect::<String>())
        }
        None => None,
    };
    let token = token.iter().map(|token| ("X-SLURM-USER-TOKEN", token.as_str()));
    let user = rest.user.iter().map(|user| ("X-SLURM-USER-NAME", user.as_str()));
    let headers: Vec<(&str, &str)> = token.chain(user).collect();
    let (client, server) = if rest.at.starts_with('/') {
        (Client::over_socket(Path::new(&rest.at)), "http://127.0.0.1".to_owned())
    } else if rest.at.starts_with("https://") {
        let trust = rest.ca_file.as_deref().map_or(TrustedRoots::System, TrustedRoots::File);
        (Client::new(&http::roots(trust)?, Proxy::Never), rest.at.trim_end_matches('/').to_owned())
    } else {
        (Client::new(&[], Proxy::Never), format!("http://{}", rest.at.trim_start_matches("http://")))
    };
    let url = format!("{server}/slurm/{}/nodes", rest.version);
    let failed = |error: HttpError| match error.kind {
        HttpErrorKind::TooLong => RestError::TooLong(rest.at.clone()),
        HttpErrorKind::NotHttp => RestError::InvalidHttp(rest.at.clone()),
        _ => RestError::Request(rest.at.clone(), error),
    };
    let request = Request { url: &url, headers: &headers, body: None, timeout: limit };
    let answer = client.send(&request).map_err(failed)?;
    let status = answer.status;
    if status != 200 {
        let text = answer.read_prefix(MAX_QUOTED_BYTES).chars().take(200).collect();
        return Err(RestError::Status { at: rest.at.clone(), status, text });
    }
    Ok(json::parse(&answer.read(MAX_RESPONSE_BYTES).map_err(failed)?)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        io::{Read as _, Write as _},
        os::unix::net::UnixListener,
        thread,
    };

    const NODES: &[u8] = include_bytes!("fixtures/24.11/slurmrestd-v0.0.42-nodes.json");

    /// Sends this response to one request, and then nothing more.
    fn served(answer: Vec<u8>) -> (tempfile::TempDir, Rest) {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().join("s");
        let listener = UnixListener::bind(&at).unwrap();
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 1024];
            let _ = stream.read(&mut request);
            let _ = stream.write_all(&answer);
            thread::park();
        });
        (folder, rest(at.display().to_string()))
    }

    fn rest(at: String) -> Rest {
        Rest { at, ca_file: None, version: "v0.0.42".to_owned(), token_file: None, user: None }
    }

    #[test]
    fn a_server_that_is_not_encrypted_gets_no_request_over_https() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let at = format!("https://{}", listener.local_addr().unwrap());
        let received = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut begin = [0; 64];
            let count = stream.read(&mut begin).unwrap();
            let _ = stream.write_all(b"HTTP/1.1 400 No\r\n\r\n");
            begin[..count].to_vec()
        });
        assert!(nodes(&rest(at), Duration::from_secs(20)).unwrap_err().starts_with("request to https://"));
        assert_eq!(received.join().unwrap()[0], 0x16, "a TLS handshake");
        let missing = Rest { ca_file: Some("/none/ca.pem".into()), ..rest("https://127.0.0.1:1".to_owned()) };
        assert!(nodes(&missing, Duration::from_secs(20)).unwrap_err().contains("/none/ca.pem"));
    }

    #[test]
    fn nodes_are_read_over_a_socket_and_a_silent_server_times_out() {
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", NODES.len());
        let (_folder, rest) = served([head.as_bytes(), NODES].concat());
        assert_eq!(nodes(&rest, Duration::from_secs(20)).unwrap().len(), 4);
        let (_folder, rest) = served(Vec::new());
        assert!(nodes(&rest, Duration::from_millis(200)).unwrap_err().starts_with("request to "));
        let (_folder, rest) = served(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 4\r\n\r\nnope".to_vec());
        assert!(nodes(&rest, Duration::from_secs(20)).unwrap_err().ends_with("answered with 401: nope"));
    }
}
