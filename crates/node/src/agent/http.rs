//! A minimal HTTP/1.1 client: one POST with a deadline and a limited response. An agent on every node needs no client
//! library, and the report carries its own signature.

use std::{
    fmt,
    io::{self, Read, Write},
    net::{TcpStream, ToSocketAddrs},
    str::FromStr,
    time::{Duration, Instant},
};

use doctor_checks::{
    drain_permit::PERMIT_HEADER,
    result_transport::{RESULTS_PATH, RUN_HEADER},
    site_profiles::{MAX_REPLY_BYTES, SiteProfiles},
};
use doctor_core::ids::{NodeName, RunId};

use super::token::Token;

/// A response has one line of text, or the site's profiles; longer ones are rejected.
const MAX_RESPONSE_BYTES: usize = MAX_REPLY_BYTES + (64 << 10);

/// The endpoint's headers are a few hundred bytes.
const MAX_HEAD_BYTES: usize = 16 << 10;

/// The controller's address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    host: String,
    port: u16,
    prefix: String,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadAddress {
    #[error(
        "`{0}`: https is not supported, because reports are signed with the node's key; use http://HOST:PORT, or a \
         tunnel"
    )]
    Tls(String),
    #[error("`{0}` is not an address such as http://controller:7443")]
    Malformed(String),
}

impl FromStr for Address {
    type Err = BadAddress;

    fn from_str(text: &str) -> Result<Self, BadAddress> {
        let malformed = || BadAddress::Malformed(text.to_owned());
        if text.starts_with("https://") {
            return Err(BadAddress::Tls(text.to_owned()));
        }
        let rest = text.strip_prefix("http://").ok_or_else(malformed)?;
        let (authority, prefix) = rest.split_once('/').map_or((rest, ""), |(host, path)| (host, path));
        let (host, port) = match authority.rsplit_once(':') {
            Some((host, port)) if !port.contains(']') => (host, port.parse().map_err(|_| malformed())?),
            _ => (authority, 80),
        };
        let plain = |text: &str| text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'@');
        if host.is_empty() || !plain(authority) || !plain(prefix) {
            return Err(malformed());
        }
        let prefix = prefix.trim_end_matches('/');
        let prefix = if prefix.is_empty() { String::new() } else { format!("/{prefix}") };
        Ok(Self { host: host.to_owned(), port, prefix })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}:{}{}", self.host, self.port, self.prefix)
    }
}

/// The controller's response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    pub status: u16,
    pub retry_after: Option<Duration>,
    /// One line.
    pub text: String,
    /// The drain permit, still sealed.
    pub permit: Option<String>,
    /// The site's profiles, still sealed.
    pub profiles: Option<String>,
}

impl Reply {
    /// Parses a complete response. `None` if it is not HTTP.
    pub fn read(response: &[u8]) -> Option<Self> {
        let text = String::from_utf8_lossy(response);
        let (head, body) = text.split_once("\r\n\r\n")?;
        let status = head.strip_prefix("HTTP/1.")?.split(' ').nth(1)?.get(..3)?.parse().ok()?;
        let retry_after = header(head, "retry-after").and_then(|seconds| seconds.parse().ok()).map(Duration::from_secs);
        let permit = header(head, PERMIT_HEADER).map(str::to_owned);
        let line = body.lines().next().unwrap_or_default();
        let profiles = SiteProfiles::is_reply(body).then(|| body.to_owned());
        let text = line.chars().filter(|c| !c.is_control()).take(300).collect();
        Some(Self { status, retry_after, text, permit, profiles })
    }
}

/// Sends one signed report, with the token that authenticates it if there is one. `limit` bounds the exchange;
/// connecting to an address takes at most a quarter of it.
///
/// # Errors
/// If the controller does not respond in time, or responds with something other than HTTP.
pub fn post(to: &Address, node: &NodeName, token: Option<&Token>, body: &[u8], limit: Duration) -> io::Result<Reply> {
    let vouched = token.map_or_else(String::new, |token| format!("Authorization: Bearer {}\r\n", token.text()));
    exchange(to, "/api/v1/ingest", &format!("X-Doctor-Node: {node}\r\n{vouched}"), body, limit)
}

/// Sends the signed result document of a run. `limit` bounds the exchange as in [`post`].
///
/// # Errors
/// If the controller does not respond in time, or responds with something other than HTTP.
pub fn post_result(to: &Address, run: RunId, node: &NodeName, body: &[u8], limit: Duration) -> io::Result<Reply> {
    exchange(to, RESULTS_PATH, &format!("{RUN_HEADER}: {run}\r\nX-Doctor-Node: {node}\r\n"), body, limit)
}

fn exchange(to: &Address, path: &str, headers: &str, body: &[u8], limit: Duration) -> io::Result<Reply> {
    let deadline = Instant::now() + limit;
    let mut stream = connect(to, limit / 4)?;
    stream.set_nodelay(true)?;
    let head = format!(
        "POST {}{path} HTTP/1.1\r\nHost: {}:{}\r\n{headers}User-Agent: doctor-node/{}\r\n\
         Content-Type: application/octet-stream\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        to.prefix,
        to.host,
        to.port,
        env!("CARGO_PKG_VERSION"),
        body.len()
    );
    stream.set_write_timeout(Some(left(deadline)?))?;
    // The endpoint may reject a report before it has read all of it; its response counts then.
    let written = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
    let response = read_response(&mut stream, deadline);
    match (written, response) {
        (_, Ok(reply)) => Ok(reply),
        (Err(error), Err(_)) | (Ok(()), Err(error)) => Err(error),
    }
}

fn connect(to: &Address, limit: Duration) -> io::Result<TcpStream> {
    let host = to.host.trim_start_matches('[').trim_end_matches(']');
    let mut last = io::Error::new(io::ErrorKind::NotFound, format!("no address found for {host}"));
    for address in (host, to.port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, limit) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn left(deadline: Instant) -> io::Result<Duration> {
    let remaining = deadline.saturating_duration_since(Instant::now());
    if remaining.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(remaining) }
}

fn read_response(stream: &mut TcpStream, deadline: Instant) -> io::Result<Reply> {
    let mut response = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        stream.set_read_timeout(Some(left(deadline)?))?;
        match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => response.extend(&buffer[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // The endpoint may reset the connection after its response if it did not read the whole body.
            Err(_) if is_complete(&response) => break,
            Err(error) => return Err(error),
        }
        if is_complete(&response) {
            break;
        }
        if response.len() > MAX_RESPONSE_BYTES {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the response is too long"));
        }
    }
    Reply::read(&response).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the response is not HTTP"))
}

/// Whether the response has reached its declared length. The body is not looked at, because this is called for each
/// piece of it.
pub fn is_complete(response: &[u8]) -> bool {
    let head = &response[..response.len().min(MAX_HEAD_BYTES)];
    let Some(end) = head.windows(4).position(|four| four == b"\r\n\r\n") else { return false };
    header(&String::from_utf8_lossy(&head[..end]), "content-length")
        .and_then(|length| length.parse().ok())
        .is_some_and(|length: usize| response.len() - end - 4 >= length)
}

fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    let mut fields = head.lines().skip(1).filter_map(|line| line.split_once(':'));
    fields.find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim())
}

#[cfg(test)]
mod tests {
    use super::*;
    use doctor_checks::document::RunKey;
    use std::net::TcpListener;

    #[test]
    fn addresses_are_parsed_and_https_is_rejected_with_a_hint() {
        for (text, host, port, prefix) in [
            ("http://ctl:7443", "ctl", 7443, ""),
            ("http://10.0.0.1", "10.0.0.1", 80, ""),
            ("http://[::1]:7443/", "[::1]", 7443, ""),
            ("http://[::1]", "[::1]", 80, ""),
            ("http://proxy/doctor/", "proxy", 80, "/doctor"),
        ] {
            let read: Address = text.parse().unwrap();
            assert_eq!((read.host.as_str(), read.port, read.prefix.as_str()), (host, port, prefix), "{text}");
        }
        assert!(matches!("https://ctl:7443".parse::<Address>(), Err(BadAddress::Tls(_))));
        for text in ["ctl:7443", "http://", "http://ctl:port", "http://u@ctl", "http://a b", "http://c\r\nX: y"] {
            assert!(matches!(text.parse::<Address>(), Err(BadAddress::Malformed(_))), "{text}");
        }
    }

    /// Answers one connection with these bytes and returns what it received.
    fn serve_once(response: &'static [u8]) -> (Address, std::thread::JoinHandle<Vec<u8>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
        let thread = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let (mut received, mut buffer) = (Vec::new(), [0; 1024]);
            while !received.ends_with(b"BODY") {
                let count = stream.read(&mut buffer).unwrap();
                received.extend(&buffer[..count]);
            }
            stream.write_all(response).unwrap();
            received
        });
        (address, thread)
    }

    fn send(to: &Address) -> io::Result<Reply> {
        post(to, &NodeName::new("n1").unwrap(), None, b"BODY", Duration::from_secs(5))
    }

    #[test]
    fn a_report_is_posted_with_its_node_and_the_response_is_parsed() {
        let (address, thread) =
            serve_once(b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 7\r\ncontent-length: 9\r\n\r\nlater on\n");
        let reply = send(&address).unwrap();
        let (retry_after, text) = (Some(Duration::from_secs(7)), "later on".to_owned());
        assert_eq!(reply, Reply { status: 503, retry_after, text, permit: None, profiles: None });
        let received = String::from_utf8(thread.join().unwrap()).unwrap();
        assert!(received.starts_with("POST /api/v1/ingest HTTP/1.1\r\n"), "{received}");
        assert!(
            received.contains("\r\nX-Doctor-Node: n1\r\n") && received.contains("\r\nContent-Length: 4\r\n"),
            "{received}"
        );
    }

    #[test]
    fn a_response_may_carry_a_mebibyte_of_profiles() {
        let (node, key) = (NodeName::new("n1").unwrap(), RunKey::new([1; 32]));
        let site = SiteProfiles::new(vec!["# ä \"\n".repeat(100_000)]).unwrap();
        let body = site.sign(&node, 7, &key).unwrap();
        let response = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        let (address, _thread) = serve_once(response.into_bytes().leak());
        let profiles = send(&address).unwrap().profiles.unwrap();
        assert_eq!(SiteProfiles::open(&profiles, &node, 7, &key), Some(site));
    }

    #[test]
    fn a_response_that_is_not_http_or_never_ends_is_an_error() {
        let (address, _thread) = serve_once(b"SSH-2.0-OpenSSH_9.6\r\n\r\n");
        assert_eq!(send(&address).unwrap_err().kind(), io::ErrorKind::InvalidData);
        let (address, _thread) = serve_once(b"");
        assert!(send(&address).is_err());
        let endless: &'static [u8] = vec![b'x'; MAX_RESPONSE_BYTES + 8192].leak();
        let (address, _thread) = serve_once(endless);
        assert!(send(&address).is_err());
    }
}
