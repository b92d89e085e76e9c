//! A minimal SMTP client that delivers one mail: STARTTLS or TLS, login, and an overall timeout.
//!
//! It is our own code and not a library: the libraries bring address parsers, pools and Unicode tables several times
//! larger than the rest of this crate's alerting, for a dialogue of ten lines.

use std::{
    io::{self, Read, Write},
    net::{TcpStream, ToSocketAddrs},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use base64::{Engine, engine::general_purpose::STANDARD};
use doctor_core::time::Span;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned, pki_types::ServerName};

use super::{DeliveryError, Email, Retry, Security, tls_roots};

/// Maximum size of a reply. Servers greet in twenty lines at most.
const MAX_REPLY_BYTES: usize = 16 << 10;

/// A server's reply: its code, and the text of the last line.
#[derive(Debug, Clone, PartialEq, Eq)]
struct SmtpReply {
    code: u16,
    text: String,
    /// All lines, for the server's capabilities.
    lines: Vec<String>,
}

enum Stream {
    Plain(TcpStream),
    Tls(Box<StreamOwned<ClientConnection, TcpStream>>),
}

impl Stream {
    const fn socket(&self) -> &TcpStream {
        match self {
            Self::Plain(socket) => socket,
            Self::Tls(stream) => &stream.sock,
        }
    }

    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.read(buffer),
            Self::Tls(stream) => stream.read(buffer),
        }
    }

    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Plain(socket) => socket.write_all(bytes),
            Self::Tls(stream) => stream.write_all(bytes).and_then(|()| stream.flush()),
        }
    }
}

/// An SMTP session.
struct SmtpSession<'a> {
    stream: Stream,
    server: &'a str,
    deadline: Instant,
}

/// Delivers a mail. The server has accepted it when it replies after the last byte.
pub(super) fn deliver(email: &Email, mail: &str, limit: Span, ca: Option<&Path>) -> Result<(), DeliveryError> {
    let password = email.password.as_ref().map(super::secret::read).transpose()?;
    let mut session = SmtpSession::open(&email.server, Instant::now() + limit.to_std())?;
    if email.security == Security::Tls {
        session = session.with_tls(ca)?;
    }
    session.expect("", 220)?;
    let mut capabilities = session.hello()?;
    if email.security == Security::Starttls {
        session.expect("STARTTLS", 220)?;
        session = session.with_tls(ca)?;
        // Capabilities announced in the clear do not count.
        capabilities = session.hello()?;
    }
    if let (Some(user), Some(password)) = (&email.user, &password) {
        session.authenticate(&capabilities, user, password)?;
    }
    session.expect(&format!("MAIL FROM:<{}>", email.from), 250)?;
    for to in &email.to {
        session.expect(&format!("RCPT TO:<{to}>"), 250)?;
    }
    session.expect("DATA", 354)?;
    // No line of our mails starts with a dot: the body is base64.
    session.expect(&format!("{mail}."), 250)?;
    // The mail is accepted; the reply to QUIT does not matter.
    let _result = session.expect("QUIT", 221);
    Ok(())
}

impl<'a> SmtpSession<'a> {
    fn open(server: &'a str, deadline: Instant) -> Result<Self, DeliveryError> {
        let unknown = |error| DeliveryError::later(format!("cannot resolve {server}: {error}"));
        let mut last = None;
        for address in server.to_socket_addrs().map_err(unknown)? {
            match TcpStream::connect_timeout(&address, remaining(deadline)) {
                Ok(socket) => return Ok(Self { stream: Stream::Plain(socket), server, deadline }),
                Err(error) => last = Some(error),
            }
        }
        let why = last.map_or_else(|| "it has no addresses".to_owned(), |error| error.to_string());
        Err(DeliveryError::later(format!("cannot connect to {server}: {why}")))
    }

    /// Switches to TLS and verifies the server's certificate.
    fn with_tls(self, ca: Option<&Path>) -> Result<Self, DeliveryError> {
        let bad = |why: String| DeliveryError::later(format!("TLS with {} failed: {why}", self.server));
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(tls_roots::roots(ca)?);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| bad(error.to_string()))?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let host = self.server.rsplit_once(':').map_or(self.server, |(host, _)| host);
        let name =
            ServerName::try_from(host.trim_matches(['[', ']']).to_owned()).map_err(|error| bad(error.to_string()))?;
        let client = ClientConnection::new(Arc::new(config), name).map_err(|error| bad(error.to_string()))?;
        let Stream::Plain(socket) = self.stream else { return Ok(self) };
        let mut stream = StreamOwned::new(client, socket);
        while stream.conn.is_handshaking() {
            set_timeouts(&stream.sock, self.deadline).map_err(|error| bad(error.to_string()))?;
            stream.conn.complete_io(&mut stream.sock).map_err(|error| bad(error.to_string()))?;
        }
        Ok(Self { stream: Stream::Tls(Box::new(stream)), server: self.server, deadline: self.deadline })
    }

    /// Returns the server's capabilities.
    fn hello(&mut self) -> Result<Vec<String>, DeliveryError> {
        Ok(self.expect("EHLO cluster-doctor", 250)?.lines)
    }

    fn authenticate(&mut self, capabilities: &[String], user: &str, password: &str) -> Result<(), DeliveryError> {
        let supports = |mechanism: &str| {
            let mechanisms = capabilities
                .iter()
                .filter_map(|line| line.to_ascii_uppercase().strip_prefix("AUTH").map(str::to_owned));
            mechanisms.into_iter().any(|mechanisms| mechanisms.split([' ', '=']).any(|one| one == mechanism))
        };
        if supports("PLAIN") {
            let secret = STANDARD.encode(format!("\0{user}\0{password}"));
            return self.command(&format!("AUTH PLAIN {secret}"), "AUTH PLAIN", 235).map(drop);
        }
        if supports("LOGIN") {
            self.expect("AUTH LOGIN", 334)?;
            self.command(&STANDARD.encode(user), "the name", 334)?;
            return self.command(&STANDARD.encode(password), "the password", 235).map(drop);
        }
        Err(DeliveryError::later(format!("{} offers neither AUTH PLAIN nor AUTH LOGIN", self.server)))
    }

    /// Sends a line (none, if empty) and expects this reply code.
    fn expect(&mut self, line: &str, code: u16) -> Result<SmtpReply, DeliveryError> {
        let verb = line.lines().next().unwrap_or_default();
        let verb = if verb.len() > 60 { "the mail" } else { verb };
        self.command(line, if verb.is_empty() { "the connection" } else { verb }, code)
    }

    /// As [`Self::expect`]; errors show `label` instead of the line.
    fn command(&mut self, line: &str, label: &str, code: u16) -> Result<SmtpReply, DeliveryError> {
        let broken = |error: io::Error| {
            let late = matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut);
            let why = if late { "did not answer in time".to_owned() } else { format!("failed ({error})") };
            DeliveryError::later(format!("{} {why} at {label}", self.server))
        };
        if !line.is_empty() {
            set_timeouts(self.stream.socket(), self.deadline)
                .and_then(|()| self.stream.write_all(format!("{line}\r\n").as_bytes()))
                .map_err(broken)?;
        }
        let reply = read_reply(&mut self.stream, self.deadline).map_err(broken)?;
        if reply.code == code || (code == 250 && reply.code == 251) {
            return Ok(reply);
        }
        let text: String = reply.text.chars().filter(|character| !character.is_control()).take(160).collect();
        // Only a reply to the mail itself is about its content: addresses and passwords can be corrected.
        let about_mail = label == "the mail" && (500..600).contains(&reply.code);
        let retry = if about_mail { Retry::Never } else { Retry::Later };
        Err(DeliveryError { text: format!("{} answered {} to {label}: {text}", self.server, reply.code), retry })
    }
}

fn remaining(deadline: Instant) -> Duration {
    // A timeout of zero would mean none.
    deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
}

fn set_timeouts(socket: &TcpStream, deadline: Instant) -> io::Result<()> {
    if Instant::now() >= deadline {
        return Err(io::ErrorKind::TimedOut.into());
    }
    socket.set_read_timeout(Some(remaining(deadline)))?;
    socket.set_write_timeout(Some(remaining(deadline)))
}

fn read_reply(stream: &mut Stream, deadline: Instant) -> io::Result<SmtpReply> {
    let mut read = Vec::new();
    let mut buffer = [0; 1024];
    loop {
        set_timeouts(stream.socket(), deadline)?;
        let count = stream.read(&mut buffer)?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        read.extend_from_slice(&buffer[..count]);
        match parse(&read) {
            Parsed::Complete(reply) => return Ok(reply),
            Parsed::Incomplete if read.len() < MAX_REPLY_BYTES => {}
            Parsed::Incomplete => return Err(io::Error::new(io::ErrorKind::InvalidData, "the reply is too long")),
            Parsed::Invalid => {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "not an SMTP reply"));
            }
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Parsed {
    Complete(SmtpReply),
    Incomplete,
    Invalid,
}

/// Parses a reply: each line is a code, `-` except on the last line, and text.
fn parse(bytes: &[u8]) -> Parsed {
    let mut lines = Vec::new();
    let mut rest = bytes;
    while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
        let line = String::from_utf8_lossy(&rest[..end]);
        let line = line.trim_end_matches('\r');
        let (Some(number), text) = (line.get(..3), line.get(4..).unwrap_or_default()) else { return Parsed::Invalid };
        let Some(code) = number.parse::<u16>().ok().filter(|code| (200..600).contains(code)) else {
            return Parsed::Invalid;
        };
        lines.push(text.to_owned());
        match line.as_bytes().get(3) {
            None | Some(b' ') => return Parsed::Complete(SmtpReply { code, text: text.to_owned(), lines }),
            Some(b'-') => rest = &rest[end + 1..],
            Some(_) => return Parsed::Invalid,
        }
    }
    Parsed::Incomplete
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_reply_of_several_lines_is_complete_with_its_last_line() {
        let hello = b"250-mail.example.org\r\n250-AUTH PLAIN LOGIN\r\n250 STARTTLS\r\n";
        let Parsed::Complete(reply) = parse(hello) else { panic!("{:?}", parse(hello)) };
        assert_eq!((reply.code, reply.lines.len(), reply.text.as_str()), (250, 3, "STARTTLS"));
        assert_eq!(parse(&hello[..hello.len() - 1]), Parsed::Incomplete);
        assert!(matches!(parse(b"250\r\n"), Parsed::Complete(_)));
        for bad in ["hello\n", "25\n", "250x\n", "999 no\n", "\n", "\u{e9}\u{e9} x\n"] {
            assert_eq!(parse(bad.as_bytes()), Parsed::Invalid, "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed_or_rejected(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            if let Parsed::Complete(reply) = parse(&bytes) {
                prop_assert!((200..600).contains(&reply.code));
            }
        }
    }
}
