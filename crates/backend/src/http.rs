//! HTTP/1.1 as far as backends need it: one question, one connection, one whole answer within a time and a size limit.

use std::{
    io::{self, Read, Write},
    net::{TcpStream, ToSocketAddrs},
    time::{Duration, Instant},
};

/// Of what goes before an answer.
const LONGEST_HEAD: usize = 64 * 1024;

/// What is left of the time; none is an error.
pub fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// The first of the name's addresses that takes the connection. A host that is gone says nothing, so each is waited for.
pub fn connected(at: impl ToSocketAddrs, deadline: Instant) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in at.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, left(deadline)?) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Asks, and gives back all that came: an answer that is whole, one that was cut by its sender, or one byte more than `most`.
pub fn exchange<S: Read + Write>(
    stream: &mut S,
    question: &[u8],
    deadline: Instant,
    most: usize,
    wait_no_longer: impl Fn(&S, Duration) -> io::Result<()>,
) -> io::Result<Vec<u8>> {
    wait_no_longer(stream, left(deadline)?)?;
    stream.write_all(question)?;
    stream.flush()?;
    let (mut bytes, mut part) = (Vec::new(), vec![0; 64 * 1024]);
    loop {
        wait_no_longer(stream, left(deadline)?)?;
        match stream.read(&mut part)? {
            0 => return Ok(bytes),
            count => bytes.extend_from_slice(&part[..count]),
        }
        // One byte too many says that it was cut; whether an answer is whole is told by its length, before the connection ends.
        if bytes.len() > most || is_whole(&bytes) {
            return Ok(bytes);
        }
    }
}

/// Where the body begins, and how long the head says that it is.
fn parts(bytes: &[u8]) -> Option<(&str, usize)> {
    let end = bytes[..bytes.len().min(LONGEST_HEAD)].windows(4).position(|four| four == b"\r\n\r\n")?;
    Some((std::str::from_utf8(&bytes[..end]).ok()?, end + 4))
}

fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    let lines = head.split("\r\n").skip(1).filter_map(|line| line.split_once(':'));
    lines.filter(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim()).next()
}

fn is_whole(bytes: &[u8]) -> bool {
    let length = parts(bytes).and_then(|(head, at)| Some((header(head, "content-length")?.parse::<usize>().ok()?, at)));
    length.is_some_and(|(length, at)| bytes.len() - at >= length)
}

/// The status and the body of an answer.
pub fn answer(bytes: &[u8]) -> Option<(u16, Vec<u8>)> {
    let (head, at) = parts(bytes)?;
    let status = head.strip_prefix("HTTP/1.")?.split(' ').nth(1)?.parse().ok()?;
    let body = &bytes[at..];
    let chunked = header(head, "transfer-encoding").is_some_and(|coding| coding.eq_ignore_ascii_case("chunked"));
    let body = match header(head, "content-length").and_then(|length| length.parse::<usize>().ok()) {
        _ if chunked => unchunked(body)?,
        // Less than it promised is no answer.
        Some(length) => body.get(..length)?.to_vec(),
        None => body.to_vec(),
    };
    Some((status, body))
}

fn unchunked(mut body: &[u8]) -> Option<Vec<u8>> {
    let mut whole = Vec::new();
    loop {
        let line = body.windows(2).position(|two| two == b"\r\n")?;
        let digits = std::str::from_utf8(&body[..line]).ok()?.split(';').next()?.trim();
        let length = usize::from_str_radix(digits, 16).ok()?;
        body = &body[line + 2..];
        if length == 0 {
            return Some(whole);
        }
        whole.extend_from_slice(body.get(..length)?);
        body = body.get(length..)?.strip_prefix(b"\r\n")?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_answer_is_read_whole_or_not_at_all() {
        let with = |head: &str, body: &[u8]| [head.as_bytes(), b"\r\n\r\n", body].concat();
        assert_eq!(answer(&with("HTTP/1.1 200 OK\r\nContent-Length: 2", b"ab")), Some((200, b"ab".to_vec())));
        assert_eq!(answer(&with("HTTP/1.1 200 OK\r\nContent-Length: 3", b"ab")), None);
        assert_eq!(answer(&with("HTTP/1.1 401 No", b"")), Some((401, Vec::new())));
        let chunked = with("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked", b"2\r\nab\r\n1;x\r\nc\r\n0\r\n\r\n");
        assert_eq!(answer(&chunked), Some((200, b"abc".to_vec())));
        assert_eq!(answer(&with("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked", b"9\r\nab\r\n")), None);
        assert_eq!(answer(b"SSH-2.0-OpenSSH"), None);
    }

    proptest! {
        #[test]
        fn no_answer_is_too_strange(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = answer(&bytes);
            let _ = answer(&[b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", &bytes[..]].concat());
        }
    }
}
