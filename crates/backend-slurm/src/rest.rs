//! Nodes as slurmrestd tells them, over its socket or its port. One question, one connection: an answer is of now.

use std::{
    io,
    os::unix::net::UnixStream,
    path::PathBuf,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use doctor_backend::http::{answer, connected, exchange, left};

use super::{
    config::Rest,
    json::{self, MOST_BYTES},
    nodes::NodeSeen,
};

#[derive(Debug, thiserror::Error)]
enum RestError {
    #[error("cannot read {}, which `rest.token_file` names", .0.display())]
    NoToken(PathBuf, #[source] io::Error),
    #[error("asking {0}")]
    Ask(String, #[source] io::Error),
    #[error("{0} answered with more than is read")]
    TooLong(String),
    #[error("{0} did not answer in HTTP")]
    NoHttp(String),
    #[error("{at} answered with {status}: {text}")]
    Status { at: String, status: u16, text: String },
    #[error(transparent)]
    Answer(#[from] json::BadAnswer),
}

/// Asks for all nodes.
///
/// # Errors
/// In words, as every failure here is one to try again.
pub(super) fn nodes(rest: &Rest, limit: Duration) -> Result<Vec<NodeSeen>, String> {
    ask(rest, limit).map_err(|error| {
        let mut text = error.to_string();
        let mut source = std::error::Error::source(&error);
        while let Some(cause) = source {
            text = format!("{text}: {cause}");
            source = cause.source();
        }
        text
    })
}

fn ask(rest: &Rest, limit: Duration) -> Result<Vec<NodeSeen>, RestError> {
    let mut head = format!("GET /slurm/{}/nodes HTTP/1.1\r\nHost: slurm\r\nConnection: close\r\n", rest.version);
    if let Some(path) = &rest.token_file {
        let token = std::fs::read_to_string(path).map_err(|error| RestError::NoToken(path.clone(), error))?;
        // A token is one word; anything else would be another header.
        let token: String = token.trim().chars().filter(char::is_ascii_graphic).collect();
        head += &format!("X-SLURM-USER-TOKEN: {token}\r\n");
    }
    if let Some(user) = &rest.user {
        head += &format!("X-SLURM-USER-NAME: {user}\r\n");
    }
    head += "\r\n";
    let failed = |error| RestError::Ask(rest.at.clone(), error);
    let deadline = Instant::now() + limit;
    let bytes = if rest.at.starts_with('/') {
        let mut stream = connected_here(&rest.at, deadline).map_err(failed)?;
        exchange(&mut stream, head.as_bytes(), deadline, MOST_BYTES, |stream, left| {
            stream.set_write_timeout(Some(left))?;
            stream.set_read_timeout(Some(left))
        })
    } else {
        let mut stream = connected(&rest.at, deadline).map_err(failed)?;
        exchange(&mut stream, head.as_bytes(), deadline, MOST_BYTES, |stream, left| {
            stream.set_write_timeout(Some(left))?;
            stream.set_read_timeout(Some(left))
        })
    }
    .map_err(failed)?;
    if bytes.len() > MOST_BYTES {
        return Err(RestError::TooLong(rest.at.clone()));
    }
    let (status, body) = answer(&bytes).ok_or_else(|| RestError::NoHttp(rest.at.clone()))?;
    if status != 200 {
        let text = String::from_utf8_lossy(&body).chars().take(200).collect();
        return Err(RestError::Status { at: rest.at.clone(), status, text });
    }
    Ok(json::parse(&body)?)
}

/// A server that takes no connections off its socket lets the next one wait without a limit; so it waits in a thread of its own.
fn connected_here(path: &str, deadline: Instant) -> io::Result<UnixStream> {
    let (send, connected) = mpsc::channel();
    let path = path.to_owned();
    thread::spawn(move || {
        // Nobody listens any more once the time was over.
        let _late = send.send(UnixStream::connect(path));
    });
    connected.recv_timeout(left(deadline)?).unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        io::{Read as _, Write as _},
        os::unix::net::UnixListener,
    };

    const NODES: &[u8] = include_bytes!("fixtures/24.11/slurmrestd-v0.0.42-nodes.json");

    /// Answers one question with this, and then stays silent.
    fn served(answer: Vec<u8>) -> (tempfile::TempDir, Rest) {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().join("s");
        let listener = UnixListener::bind(&at).unwrap();
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut asked = [0; 1024];
            let _ = stream.read(&mut asked);
            let _ = stream.write_all(&answer);
            thread::park();
        });
        let rest = Rest { at: at.display().to_string(), version: "v0.0.42".to_owned(), token_file: None, user: None };
        (folder, rest)
    }

    #[test]
    fn nodes_come_over_a_socket_and_a_silent_server_is_not_waited_for() {
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", NODES.len());
        let (_folder, rest) = served([head.as_bytes(), NODES].concat());
        assert_eq!(nodes(&rest, Duration::from_secs(20)).unwrap().len(), 4);
        let (_folder, rest) = served(Vec::new());
        assert!(nodes(&rest, Duration::from_millis(200)).unwrap_err().starts_with("asking "));
        let (_folder, rest) = served(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 4\r\n\r\nnope".to_vec());
        assert!(nodes(&rest, Duration::from_secs(20)).unwrap_err().ends_with("answered with 401: nope"));
    }
}
