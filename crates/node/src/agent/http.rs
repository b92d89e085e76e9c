//! A minimal HTTP/1.1 client: one POST with a deadline and a limited response, over TLS or plain. An agent on every node needs no
//! client library.

use std::{
    fmt,
    io::{self, Read, Write},
    net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs},
    str::FromStr,
    sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use doctor_checks::{
    drain_permit::PERMIT_HEADER,
    result_transport::{RESULTS_PATH, RUN_HEADER},
    site_profiles::{MAX_REPLY_BYTES, SiteProfiles},
};
use doctor_core::ids::{NodeName, RunId};

use rustls::{ClientConnection, StreamOwned};

use super::{tls::TlsClient, token::Token};

/// A response has one line of text, or the site's profiles; longer ones are rejected.
const MAX_RESPONSE_BYTES: usize = MAX_REPLY_BYTES + (64 << 10);

/// The endpoint's headers are a few hundred bytes.
const MAX_HEAD_BYTES: usize = 16 << 10;

/// How a TLS server answers a request that is not encrypted: the record type of an alert, and the first byte of its version.
const TLS_ALERT: [u8; 2] = [0x15, 0x03];

/// The controller's address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    encrypted: bool,
    host: String,
    port: u16,
    prefix: String,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not an address such as https://controller:7443")]
pub struct BadAddress(String);

impl FromStr for Address {
    type Err = BadAddress;

    fn from_str(text: &str) -> Result<Self, BadAddress> {
        let malformed = || BadAddress(text.to_owned());
        let (encrypted, rest) = match (text.strip_prefix("https://"), text.strip_prefix("http://")) {
            (Some(rest), _) => (true, rest),
            (None, Some(rest)) => (false, rest),
            (None, None) => return Err(malformed()),
        };
        let (authority, prefix) = rest.split_once('/').map_or((rest, ""), |(host, path)| (host, path));
        let (host, port) = match authority.rsplit_once(':') {
            Some((host, port)) if !port.contains(']') => (host, port.parse().map_err(|_| malformed())?),
            _ => (authority, if encrypted { 443 } else { 80 }),
        };
        let plain = |text: &str| text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'@');
        if host.is_empty() || !plain(authority) || !plain(prefix) {
            return Err(malformed());
        }
        let prefix = prefix.trim_end_matches('/');
        let prefix = if prefix.is_empty() { String::new() } else { format!("/{prefix}") };
        Ok(Self { encrypted, host: host.to_owned(), port, prefix })
    }
}

impl Address {
    pub const fn is_encrypted(&self) -> bool {
        self.encrypted
    }

    /// Whether the address is this machine, to which nothing crosses a network.
    pub fn is_loopback(&self) -> bool {
        let host = self.bare_host();
        host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
    }

    /// The host without the brackets of an IPv6 address.
    fn bare_host(&self) -> &str {
        self.host.trim_start_matches('[').trim_end_matches(']')
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.encrypted { "https" } else { "http" };
        write!(f, "{scheme}://{}:{}{}", self.host, self.port, self.prefix)
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

/// Sends one signed report, with the token that authenticates it if there is one. `tls` is set where the address is
/// encrypted. `limit` bounds the exchange; connecting to an address takes at most a quarter of it.
///
/// # Errors
/// If the controller does not respond in time or is not authenticated, or responds with something other than HTTP.
pub fn post(
    to: &Address,
    tls: Option<&TlsClient>,
    node: &NodeName,
    token: Option<&Token>,
    body: &[u8],
    limit: Duration,
) -> io::Result<Reply> {
    let vouched = token.map_or_else(String::new, |token| format!("Authorization: Bearer {}\r\n", token.text()));
    exchange((to, tls), "/api/v1/ingest", &format!("X-Doctor-Node: {node}\r\n{vouched}"), body, limit)
}

/// Sends the signed result document of a run. `limit` bounds the exchange as in [`post`].
///
/// # Errors
/// If the controller does not respond in time or is not authenticated, or responds with something other than HTTP.
pub fn post_result(
    to: &Address,
    tls: Option<&TlsClient>,
    (run, node): (RunId, &NodeName),
    body: &[u8],
    limit: Duration,
) -> io::Result<Reply> {
    exchange((to, tls), RESULTS_PATH, &format!("{RUN_HEADER}: {run}\r\nX-Doctor-Node: {node}\r\n"), body, limit)
}

fn exchange(
    (to, tls): (&Address, Option<&TlsClient>),
    path: &str,
    headers: &str,
    body: &[u8],
    limit: Duration,
) -> io::Result<Reply> {
    let deadline = Instant::now() + limit;
    let mut stream = Connection::open(to, tls, limit / 4, deadline)?;
    let head = format!(
        "POST {}{path} HTTP/1.1\r\nHost: {}:{}\r\n{headers}User-Agent: doctor-node/{}\r\n\
         Content-Type: application/octet-stream\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        to.prefix,
        to.host,
        to.port,
        env!("CARGO_PKG_VERSION"),
        body.len()
    );
    // The endpoint may reject a report before it has read all of it; its response counts then.
    let written = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body)).and_then(|()| stream.flush());
    let response = read_response(&mut stream);
    match (written, response) {
        (_, Ok(reply)) => Ok(reply),
        // What the server answered says more than that it stopped reading.
        (Err(_), Err(error)) if error.kind() == io::ErrorKind::InvalidData => Err(error),
        (Err(error), Err(_)) | (Ok(()), Err(error)) => Err(error),
    }
}

/// A connection on which every read and write ends at the deadline.
enum Connection {
    Plain(DeadlineStream),
    Tls(Box<StreamOwned<ClientConnection, DeadlineStream>>),
}

impl Connection {
    fn open(to: &Address, tls: Option<&TlsClient>, connect_limit: Duration, deadline: Instant) -> io::Result<Self> {
        let open = || -> io::Result<DeadlineStream> {
            let tcp = connect(to, connect_limit, deadline)?;
            tcp.set_nodelay(true)?;
            Ok(DeadlineStream { tcp, deadline })
        };
        match (to.encrypted, tls) {
            (false, _) => Ok(Self::Plain(open()?)),
            (true, Some(tls)) => Ok(Self::Tls(Box::new(tls.wrap(to.bare_host(), open()?)?))),
            (true, None) => Err(io::Error::new(io::ErrorKind::InvalidInput, "no certificate or key is trusted")),
        }
    }
}

impl Read for Connection {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.read(buffer),
            Self::Tls(stream) => stream.read(buffer),
        }
    }
}

impl Write for Connection {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.write(bytes),
            Self::Tls(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(stream) => stream.flush(),
            Self::Tls(stream) => stream.flush(),
        }
    }
}

/// A socket with a deadline for everything together. TLS may read and write several times for one of our reads, so that a
/// timeout for each of them would let a slow server hold the sender.
struct DeadlineStream {
    tcp: TcpStream,
    deadline: Instant,
}

impl Read for DeadlineStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.tcp.set_read_timeout(Some(left(self.deadline)?))?;
        self.tcp.read(buffer)
    }
}

impl Write for DeadlineStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.tcp.set_write_timeout(Some(left(self.deadline)?))?;
        self.tcp.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.tcp.flush()
    }
}

fn connect(to: &Address, limit: Duration, deadline: Instant) -> io::Result<TcpStream> {
    let host = to.bare_host();
    let mut last = io::Error::new(io::ErrorKind::NotFound, format!("no address found for {host}"));
    for address in addresses(host, to.port, left(deadline)?, system_resolver)? {
        match TcpStream::connect_timeout(&address, limit.min(left(deadline)?)) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Lookups of names that have not ended.
static LOOKUPS: AtomicUsize = AtomicUsize::new(0);
/// More would pile up while no name server answers.
const MAX_LOOKUPS: usize = 8;

struct Lookup;

impl Drop for Lookup {
    fn drop(&mut self) {
        LOOKUPS.fetch_sub(1, Ordering::AcqRel);
    }
}

fn system_resolver(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    Ok((host, port).to_socket_addrs()?.collect())
}

/// Returns the addresses of a host. The system's resolver has no deadline: a lookup that is not over in time ends by itself.
fn addresses(
    host: &str,
    port: u16,
    limit: Duration,
    resolver: impl FnOnce(&str, u16) -> io::Result<Vec<SocketAddr>> + Send + 'static,
) -> io::Result<Vec<SocketAddr>> {
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(vec![(address, port).into()]);
    }
    let late = || io::Error::new(io::ErrorKind::TimedOut, format!("the name {host} was not resolved in time"));
    let before = LOOKUPS.fetch_add(1, Ordering::AcqRel);
    let lookup = Lookup;
    if before >= MAX_LOOKUPS {
        return Err(late());
    }
    let (sender, answer) = mpsc::channel();
    let name = host.to_owned();
    std::thread::Builder::new().name("doctor-resolve".to_owned()).spawn(move || {
        let _lookup = lookup;
        // The caller has given up if the answer is late.
        let _late = sender.send(resolver(&name, port));
    })?;
    answer.recv_timeout(limit).map_err(|_| late())?
}

fn left(deadline: Instant) -> io::Result<Duration> {
    let remaining = deadline.saturating_duration_since(Instant::now());
    if remaining.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(remaining) }
}

fn read_response(stream: &mut Connection) -> io::Result<Reply> {
    let mut response = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => response.extend(&buffer[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // The endpoint may reset the connection after its response if it did not read the whole body.
            Err(_) if is_complete(&response) || response.starts_with(&TLS_ALERT) => break,
            Err(error) => return Err(error),
        }
        if is_complete(&response) {
            break;
        }
        if response.len() > MAX_RESPONSE_BYTES {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the response is too long"));
        }
    }
    let not_http = match response.starts_with(&TLS_ALERT) {
        true => "it expects TLS: use https://",
        false => "the response is not HTTP",
    };
    Reply::read(&response).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, not_http))
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
    fn addresses_are_parsed_and_rejected_with_an_example() {
        for (text, host, port, prefix) in [
            ("http://ctl:7443", "ctl", 7443, ""),
            ("https://ctl:7443", "ctl", 7443, ""),
            ("https://ctl/doctor", "ctl", 443, "/doctor"),
            ("http://10.0.0.1", "10.0.0.1", 80, ""),
            ("http://[::1]:7443/", "[::1]", 7443, ""),
            ("http://[::1]", "[::1]", 80, ""),
            ("http://proxy/doctor/", "proxy", 80, "/doctor"),
        ] {
            let read: Address = text.parse().unwrap();
            assert_eq!((read.host.as_str(), read.port, read.prefix.as_str()), (host, port, prefix), "{text}");
            assert_eq!(read.is_encrypted(), text.starts_with("https"), "{text}");
            assert_eq!(read.to_string().parse(), Ok(read), "{text}");
        }
        for (text, is_loopback) in [
            ("http://127.0.0.1:1", true),
            ("http://127.9.9.9:1", true),
            ("http://[::1]:1", true),
            ("http://LocalHost:1", true),
            ("http://10.0.0.1:1", false),
            ("http://localhost.example:1", false),
            ("http://127.0.0.1.example:1", false),
        ] {
            assert_eq!(text.parse::<Address>().unwrap().is_loopback(), is_loopback, "{text}");
        }
        for text in ["ctl:7443", "http://", "http://ctl:port", "http://u@ctl", "http://a b", "http://c\r\nX: y"] {
            let error = text.parse::<Address>().unwrap_err().to_string();
            assert!(error.contains("https://controller:7443"), "{error}");
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

    #[test]
    fn a_name_server_that_does_not_answer_holds_no_exchange_beyond_its_limit() {
        let (sender, hanging) = mpsc::channel::<()>();
        let hang = move |_: &str, _: u16| {
            let _ended = hanging.recv();
            Ok(Vec::new())
        };
        let error = addresses("ctl.example", 7443, Duration::from_millis(50), hang).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
        drop(sender);
        let known = |_: &str, port: u16| Ok(vec![SocketAddr::from(([10, 0, 0, 1], port))]);
        let found = addresses("ctl.example", 7443, Duration::from_secs(240), known).unwrap();
        assert_eq!(found, ["10.0.0.1:7443".parse().unwrap()]);
        let unused = |_: &str, _: u16| panic!("an address needs no resolver");
        assert_eq!(addresses("::1", 1, Duration::ZERO, unused).unwrap(), ["[::1]:1".parse().unwrap()]);
    }

    fn send(to: &Address) -> io::Result<Reply> {
        post(to, None, &NodeName::new("n1").unwrap(), None, b"BODY", Duration::from_secs(5))
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
        let (address, _thread) = serve_once(b"\x15\x03\x03\x00\x02\x02\x46");
        assert!(send(&address).unwrap_err().to_string().contains("use https://"));
        let encrypted: Address = address.to_string().replace("http:", "https:").parse().unwrap();
        assert_eq!(send(&encrypted).unwrap_err().kind(), io::ErrorKind::InvalidInput, "it is not sent unencrypted");
        let endless: &'static [u8] = vec![b'x'; MAX_RESPONSE_BYTES + 8192].leak();
        let (address, _thread) = serve_once(endless);
        assert!(send(&address).is_err());
    }
}
