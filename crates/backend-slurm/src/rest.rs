//! Reads nodes from slurmrestd, over its socket or its port. Each request has its own connection.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use doctor_backend::{
    http::{Client, HttpError, HttpErrorKind, Proxy, Request},
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
        (Client::over_socket(Path::new(&rest.at)), "127.0.0.1")
    } else {
        (Client::new(&[], Proxy::Never), rest.at.as_str())
    };
    let url = format!("http://{server}/slurm/{}/nodes", rest.version);
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
        let rest = Rest { at: at.display().to_string(), version: "v0.0.42".to_owned(), token_file: None, user: None };
        (folder, rest)
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
