//! One client: a persistent connection, and the requests of a dashboard.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

/// The think time between two requests.
const PAUSE: Duration = Duration::from_millis(200);
const PATIENCE: Duration = Duration::from_secs(60);

/// One request.
#[derive(Debug, Clone, Copy)]
pub(super) struct TimedRequest {
    pub(super) took: Duration,
}

#[derive(Debug)]
pub(super) struct Reader {
    address: SocketAddr,
    number: usize,
    connection: Option<BufReader<TcpStream>>,
    /// ETags of responses already received.
    tags: BTreeMap<String, String>,
}

/// The relevant headers of a response, and its body.
pub(super) struct HttpResponse {
    pub(super) body: Vec<u8>,
    tag: Option<String>,
    keep_alive: bool,
}

impl Reader {
    pub(super) const fn new(address: SocketAddr, number: usize) -> Self {
        Self { address, number, connection: None, tags: BTreeMap::new() }
    }

    /// Sends requests in turn until `over` is set.
    pub(super) fn read_until(mut self, over: &AtomicBool) -> Result<Vec<TimedRequest>> {
        let mut requests = Vec::new();
        // Clients start at different positions.
        let mut turn = self.number;
        while !over.load(Ordering::Relaxed) {
            let path = self.path(turn);
            turn += 1;
            let began = Instant::now();
            self.get(&path, true).with_context(|| format!("reading {path}"))?;
            requests.push(TimedRequest { took: began.elapsed() });
            thread::sleep(PAUSE);
        }
        Ok(requests)
    }

    fn path(&self, turn: usize) -> String {
        let node = (self.number * 97 + turn * 13) % 10_000 + 1;
        match turn % 10 {
            0 | 5 => "/map".to_owned(),
            1 => "/status".to_owned(),
            2 => format!("/nodes?limit=100&cursor=node{node:05}"),
            3 => format!("/nodes/node{node:05}"),
            4 => "/cases".to_owned(),
            6 => "/history?limit=100".to_owned(),
            7 => "/findings".to_owned(),
            8 => "/plan".to_owned(),
            _ => "/coverage".to_owned(),
        }
    }

    /// Sends one request; `packed`: accept gzip.
    pub(super) fn get(&mut self, path: &str, packed: bool) -> Result<HttpResponse> {
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            None => {
                let stream = TcpStream::connect(self.address).context("connecting")?;
                stream.set_read_timeout(Some(PATIENCE)).context("setting a timeout")?;
                stream.set_nodelay(true).context("setting TCP_NODELAY")?;
                BufReader::new(stream)
            }
        };
        let mut head = format!("GET /api/v1{path} HTTP/1.1\r\nhost: localhost\r\n");
        if packed {
            head += "accept-encoding: gzip\r\n";
        }
        if let Some(tag) = self.tags.get(path) {
            head += &format!("if-none-match: {tag}\r\n");
        }
        head += "\r\n";
        connection.get_mut().write_all(head.as_bytes()).context("sending the request")?;
        let answer = read_answer(&mut connection)?;
        if let Some(tag) = answer.tag.clone().filter(|_| packed) {
            self.tags.insert(path.to_owned(), tag);
        }
        if answer.keep_alive {
            self.connection = Some(connection);
        }
        Ok(answer)
    }
}

fn read_answer(connection: &mut BufReader<TcpStream>) -> Result<HttpResponse> {
    let mut line = String::new();
    connection.read_line(&mut line).context("reading the status")?;
    let status: u16 =
        line.split(' ').nth(1).and_then(|word| word.parse().ok()).context("the response has no status")?;
    let (mut length, mut tag, mut stays) = (0, None, true);
    loop {
        line.clear();
        connection.read_line(&mut line).context("reading a header")?;
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        match name.to_ascii_lowercase().as_str() {
            "content-length" => length = value.parse().context("reading the length")?,
            "etag" => tag = Some(value.to_owned()),
            "connection" => stays = value != "close",
            "transfer-encoding" => bail!("a response without a length"),
            _ => {}
        }
    }
    let mut body = vec![0; length];
    connection.read_exact(&mut body).context("reading the body")?;
    ensure!(matches!(status, 200 | 304), "status {status}: {}", String::from_utf8_lossy(&body));
    Ok(HttpResponse { body, tag, keep_alive: stays })
}
