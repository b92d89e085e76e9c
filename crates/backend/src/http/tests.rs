//! The client against servers that respond correctly, wrongly, with too much, too late and not at all.

use std::{
    io::{BufRead as _, BufReader, Write},
    net::{TcpListener, TcpStream},
    os::unix::net::UnixListener,
    process::{Command, Stdio},
    sync::mpsc,
    thread,
    time::Instant,
};

use proptest::prelude::*;

use super::*;

const LONG: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(300);
const MOST: usize = 1 << 20;

/// Reads one request to the end of its body.
fn read_request(stream: impl io::Read) -> String {
    let mut reader = BufReader::new(stream);
    let (mut head, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).unwrap_or(0) == 0 || line == "\r\n" {
            break;
        }
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
        head += &line;
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    head + &String::from_utf8_lossy(&body)
}

/// Serves each connection with `serve`. Returns the URL and the request of the first connection.
fn served(serve: impl Fn(&mut TcpStream) + Send + 'static) -> (String, mpsc::Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (send, received) = mpsc::channel();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let _receiver_gone = send.send(read_request(&stream));
            serve(&mut stream);
        }
    });
    (url, received)
}

fn direct_client() -> Client {
    Client::new(&[], Proxy::Never)
}

fn get(client: &Client, url: &str, timeout: Duration) -> Result<(u16, Vec<u8>), HttpError> {
    let response = client.send(&Request { url, headers: &[], body: None, timeout })?;
    Ok((response.status, response.read(MOST)?))
}

/// Returns the client's result for a server that sends these bytes and closes the connection.
fn response_to(bytes: Vec<u8>) -> Result<(u16, Vec<u8>), HttpError> {
    let (url, _received) = served(move |stream| stream.write_all(&bytes).unwrap());
    get(&direct_client(), &url, LONG)
}

#[test]
fn a_response_is_read_completely_or_fails() {
    let with = |head: &str, body: &[u8]| [head.as_bytes(), b"\r\n\r\n", body].concat();
    let kind = |bytes: Vec<u8>| response_to(bytes).map_err(|error| (error.kind, error.was_sent()));
    let broken = Err((HttpErrorKind::NotHttp, true));
    assert_eq!(kind(with("HTTP/1.1 200 OK\r\nContent-Length: 2", b"ab")), Ok((200, b"ab".to_vec())));
    assert_eq!(kind(with("HTTP/1.1 200 OK\r\nContent-Length: 3", b"ab")), broken);
    assert_eq!(kind(with("HTTP/1.1 401 No", b"")), Ok((401, Vec::new())));
    let chunked = with("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked", b"2\r\nab\r\n1;x\r\nc\r\n0\r\n\r\n");
    assert_eq!(kind(chunked), Ok((200, b"abc".to_vec())));
    assert_eq!(kind(with("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked", b"9\r\nab\r\n")), broken);
    assert_eq!(kind(b"SSH-2.0-OpenSSH\r\n\r\n".to_vec()), broken);
    assert_eq!(kind(Vec::new()), broken);
}

#[test]
fn a_request_carries_its_headers_body_and_user_agent() {
    let (url, received) = served(|stream| stream.write_all(b"HTTP/1.1 204 No\r\n\r\n").unwrap());
    let url = format!("{url}/a/b?c=d");
    let request = Request { url: &url, headers: &[("X-Token", "Secret")], body: Some(b"{}"), timeout: LONG };
    assert_eq!(direct_client().send(&request).unwrap().status, 204);
    let received = received.recv_timeout(LONG).unwrap();
    assert!(received.starts_with("POST /a/b?c=d HTTP/1.1\r\n") && received.ends_with("{}"), "{received}");
    assert!(received.contains("x-token: Secret\r\n") && received.contains("user-agent: cluster-doctor/"), "{received}");
    for bad in [Request { url: "nowhere", ..request }, Request { headers: &[("X-Token", "a\nb")], ..request }] {
        let error = direct_client().send(&bad).unwrap_err();
        assert_eq!((error.kind, error.was_sent()), (HttpErrorKind::BadRequest, false), "{error}");
    }
}

#[test]
fn every_status_is_returned_and_redirects_are_not_followed() {
    for status in [301, 302, 307, 400, 401, 403, 404, 429, 500, 503] {
        let (url, received) = served(move |stream| {
            let head =
                format!("HTTP/1.1 {status} X\r\nLocation: /elsewhere\r\nRetry-After: 7\r\nContent-Length: 3\r\n\r\n");
            stream.write_all(&[head.as_bytes(), b"why"].concat()).unwrap();
        });
        let request = Request { url: &url, headers: &[], body: Some(b""), timeout: LONG };
        let response = direct_client().send(&request).unwrap();
        assert_eq!((response.status, response.retry_after), (status, Some(7)));
        assert_eq!(response.read_prefix(2), "wh");
        received.recv_timeout(LONG).unwrap();
        assert!(received.try_recv().is_err(), "{status} was followed");
    }
}

#[test]
fn a_request_to_a_hung_server_times_out_at_the_deadline() {
    let hangs: [&[u8]; 3] =
        [b"", b"HTTP/1.1 200 OK\r\nContent-Le", b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc"];
    for response in hangs {
        let (url, _received) = served(move |stream| {
            stream.write_all(response).unwrap();
            thread::park();
        });
        let began = Instant::now();
        let error = get(&direct_client(), &url, SHORT).unwrap_err();
        assert_eq!((error.kind, error.was_sent()), (HttpErrorKind::Timeout, true), "{error}");
        assert_eq!((error.effect(false), error.effect(true)), (Effect::NotAppliedRetry, Effect::Unknown));
        assert!(began.elapsed() < LONG);
    }
    // A slow trickle of bytes does not extend the deadline.
    let (url, _received) = served(|stream| {
        let _closed = stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n");
        while stream.write_all(b"x").is_ok() {
            thread::sleep(Duration::from_millis(10));
        }
    });
    let began = Instant::now();
    assert_eq!(get(&direct_client(), &url, SHORT).unwrap_err().kind, HttpErrorKind::Timeout);
    assert!(began.elapsed() < LONG);
}

#[test]
fn an_endless_response_is_cut_off() {
    for head in
        ["HTTP/1.1 200 OK\r\n\r\n", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "HTTP/1.1 200 OK\r\nA: "]
    {
        let (url, _received) = served(move |stream| {
            let part = [b"ffff\r\n", &vec![b'x'; 0xffff][..], b"\r\n"].concat();
            let _closed = stream.write_all(head.as_bytes());
            while stream.write_all(&part).is_ok() {}
        });
        let error = get(&direct_client(), &url, LONG).unwrap_err();
        let expected = if head.ends_with("A: ") { HttpErrorKind::NotHttp } else { HttpErrorKind::TooLong };
        assert_eq!((error.kind, error.was_sent()), (expected, true), "{error}");
    }
    let exact = [b"HTTP/1.1 200 OK\r\n\r\n", &vec![b'x'; MOST][..]].concat();
    assert_eq!(response_to(exact).unwrap().1.len(), MOST, "a response of the maximum length is read");
}

#[test]
fn without_a_connection_nothing_was_sent() {
    let error = get(&direct_client(), "http://127.0.0.1:1", LONG).unwrap_err();
    assert_eq!((error.kind, error.was_sent()), (HttpErrorKind::Connection, false), "{error}");
    assert_eq!(error.effect(true), Effect::NotAppliedRetry);
    let error = get(&direct_client(), "http://no-such-host.invalid", LONG).unwrap_err();
    assert!(!error.was_sent(), "{error}");
    // This server accepts connections and never performs the TLS handshake.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let error = get(&direct_client(), &format!("https://{}", listener.local_addr().unwrap()), SHORT).unwrap_err();
    assert_eq!((error.kind, error.was_sent()), (HttpErrorKind::Timeout, false), "{error}");
}

#[test]
fn the_environment_proxy_is_used_only_if_requested() {
    let proxy = |proxy| Client::new(&[], proxy).agent(LONG, &Arc::default()).config().proxy().cloned();
    assert!(proxy(Proxy::Never).is_none());
    assert_eq!(proxy(Proxy::FromEnvironment).is_some(), ureq::Proxy::try_from_env().is_some());
}

#[test]
fn requests_work_over_a_unix_socket() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().join("s");
    let listener = UnixListener::bind(&at).unwrap();
    let client = Client::over_socket(&at);
    let (stop, stopped) = mpsc::channel::<()>();
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let received = read_request(&stream);
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab").unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        read_request(&stream);
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\na").unwrap();
        let _over = stopped.recv();
        received
    });
    assert_eq!(get(&client, "http://127.0.0.1/nodes", LONG).unwrap(), (200, b"ab".to_vec()));
    let error = get(&client, "http://127.0.0.1/nodes", SHORT).unwrap_err();
    assert_eq!((error.kind, error.was_sent()), (HttpErrorKind::Timeout, true), "{error}");
    drop(stop);
    assert!(server.join().unwrap().starts_with("GET /nodes HTTP/1.1\r\n"));
    let error = get(&Client::over_socket(&folder.path().join("none")), "http://127.0.0.1/", LONG).unwrap_err();
    assert_eq!((error.kind, error.was_sent()), (HttpErrorKind::Connection, false), "{error}");
}

#[test]
fn connecting_to_a_unix_socket_that_does_not_accept_times_out() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().join("s");
    let _listener = UnixListener::bind(&at).unwrap();
    // The kernel accepts connections until the backlog is full. The next `connect` then blocks until the listener is closed.
    let filled = at.clone();
    thread::spawn(move || {
        let mut waiting = Vec::new();
        while let Ok(stream) = std::os::unix::net::UnixStream::connect(&filled) {
            waiting.push(stream);
        }
    });
    let began = Instant::now();
    let full = loop {
        match get(&Client::over_socket(&at), "http://127.0.0.1/", SHORT).unwrap_err() {
            error if error.was_sent() => assert!(began.elapsed() < LONG, "the queue does not fill"),
            error => break error,
        }
    };
    assert_eq!(full.kind, HttpErrorKind::Timeout, "{full}");
}

/// Serves TLS with a self-signed certificate for `localhost`.
const OVER_TLS: &str = r#"
import http.server, ssl, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ab")
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Answer)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(sys.argv[1] + "/cert.pem", sys.argv[1] + "/key.pem")
server.socket = context.wrap_socket(server.socket, server_side=True)
print(server.server_port, flush=True)
server.serve_forever()
"#;

#[test]
fn nothing_is_sent_to_a_server_with_an_untrusted_or_mismatched_certificate() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let args = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost \
                 -addext subjectAltName=DNS:localhost -addext basicConstraints=critical,CA:false -keyout";
    let mut openssl = Command::new("openssl");
    let output = openssl.args(args.split_whitespace()).arg(at("key.pem")).arg("-out").arg(at("cert.pem")).output();
    assert!(output.unwrap().status.success(), "openssl makes a certificate");
    let mut python = Command::new("python3");
    python.args(["-c", OVER_TLS]).arg(folder.path()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut server = crate::process::ChildProcess::start(&mut python, crate::process::Group::Own).unwrap();
    let mut port = String::new();
    BufReader::new(server.take_stdout().unwrap()).read_line(&mut port).unwrap();
    let certificate = roots(TrustedRoots::File(&at("cert.pem"))).unwrap();
    let (trusting, untrusting) = (Client::new(&certificate, Proxy::Never), Client::new(&[], Proxy::Never));
    let fetch = |client: &Client, host: &str| get(client, &format!("https://{host}:{}", port.trim()), LONG);
    assert_eq!(fetch(&trusting, "localhost").unwrap(), (200, b"ab".to_vec()));
    for (client, host) in [(&untrusting, "localhost"), (&trusting, "127.0.0.1")] {
        let error = fetch(client, host).unwrap_err();
        assert_eq!((error.kind, error.was_sent()), (HttpErrorKind::Tls, false), "{error}");
        assert!(error.to_string().contains("certificate"), "{error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_response_is_parsed_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = response_to(bytes.clone());
        let _ = response_to([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", &bytes[..]].concat());
    }
}
