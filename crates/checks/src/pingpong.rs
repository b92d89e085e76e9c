//! Parses the output of libfabric's `fi_pingpong`: a header line, and a line for each message size.
//!
//! Numbers are abbreviated as in `1.5k` and `2m`, which are powers of 1024; `MB/sec` is 10^6 bytes. Messages go back
//! and forth, and both directions count.

/// The input limit; a run prints three kilobytes at most.
pub const MAX_PINGPONG_BYTES: usize = 256 << 10;

/// One result: that of the largest messages, if there are several sizes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PingpongResult {
    /// Bytes of one message.
    pub message: u64,
    pub bits_per_second: f64,
    /// The one-way latency, in seconds.
    pub seconds: f64,
}

/// Why there is no result.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PingpongError {
    #[error("fi_pingpong printed {0} bytes; the limit is {MAX_PINGPONG_BYTES} bytes")]
    TooLong(usize),
    #[error("fi_pingpong printed no columns `bytes`, `#sent`, `#ack`, `MB/sec` and `usec/xfer`")]
    NoColumns,
    #[error("fi_pingpong printed no result line")]
    NoRow,
    #[error("fi_pingpong transferred no data")]
    NoTraffic,
    #[error("fi_pingpong sent {sent} messages and received {returned} acknowledgements")]
    Lost { sent: u64, returned: u64 },
}

/// Parses the output.
///
/// # Errors
/// If it has no result.
pub fn parse(text: &str) -> Result<PingpongResult, PingpongError> {
    if text.len() > MAX_PINGPONG_BYTES {
        return Err(PingpongError::TooLong(text.len()));
    }
    let is_header = |line: &&str| line.split_ascii_whitespace().next() == Some("bytes");
    let mut lines = text.lines().skip_while(|line| !is_header(line));
    let columns = lines.next().and_then(Columns::parse).ok_or(PingpongError::NoColumns)?;
    let largest =
        lines.filter_map(|line| columns.row(line)).max_by_key(|row| row.message).ok_or(PingpongError::NoRow)?;
    match largest {
        Row { sent, acked: returned, .. } if returned < sent => Err(PingpongError::Lost { sent, returned }),
        Row { rate, .. } if rate <= 0.0 => Err(PingpongError::NoTraffic),
        Row { message, rate, micros, .. } => {
            Ok(PingpongResult { message, bits_per_second: rate * 8e6, seconds: micros / 1e6 })
        }
    }
}

/// The position of each number in a line.
struct Columns {
    bytes: usize,
    sent: usize,
    ack: usize,
    rate: usize,
    micros: usize,
}

struct Row {
    message: u64,
    sent: u64,
    acked: u64,
    rate: f64,
    micros: f64,
}

impl Columns {
    fn parse(header: &str) -> Option<Self> {
        let column = |name: &str| header.split_ascii_whitespace().position(|word| word == name);
        Some(Self {
            bytes: column("bytes")?,
            sent: column("#sent")?,
            ack: column("#ack")?,
            rate: column("MB/sec")?,
            micros: column("usec/xfer")?,
        })
    }

    fn row(&self, line: &str) -> Option<Row> {
        let cells: Vec<&str> = line.split_ascii_whitespace().collect();
        let cell = |column: usize| cells.get(column).copied();
        let rate = |column: usize| cell(column)?.parse::<f64>().ok().filter(|rate| rate.is_finite() && *rate >= 0.0);
        let sent = parse_short_number(cell(self.sent)?)?;
        Some(Row {
            message: parse_short_number(cell(self.bytes)?)?,
            sent,
            // A prefix `=` means that all were acknowledged.
            acked: match cell(self.ack)?.strip_prefix('=') {
                Some(_) => sent,
                None => parse_short_number(cell(self.ack)?)?,
            },
            rate: rate(self.rate)?,
            micros: rate(self.micros)?,
        })
    }
}

/// Parses `64`, `1.5k`, `2m`, `1g`.
fn parse_short_number(word: &str) -> Option<u64> {
    let (digits, factor) = match word.as_bytes().last()? {
        b'k' => (&word[..word.len() - 1], 1 << 10),
        b'm' => (&word[..word.len() - 1], 1 << 20),
        b'g' => (&word[..word.len() - 1], 1 << 30),
        _ => (word, 1),
    };
    let number = digits.parse::<f64>().ok().filter(|number| (0.0..1e9).contains(number))?;
    Some((number * f64::from(factor)) as u64)
}

/// Why a run failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PingpongFailure {
    /// Messages did not arrive: the adapter returned one with an error.
    Traffic(String),
    /// Anything else: no device, no memory, no permission. It says nothing about the hardware.
    Other(String),
}

/// Finds the reason in the output of both sides. Only the client's message errors count: a server whose client went
/// away also reports a message error.
pub fn classify_failure(client: &str, server: &str) -> PingpongFailure {
    let line = |text: &str| text.trim().chars().take(200).collect::<String>();
    if let Some(text) = client.lines().find(|line| line.contains("cq_readerr")) {
        return PingpongFailure::Traffic(line(text));
    }
    let last = |output: &str| {
        // Skip a side's complaint about its lost peer: the peer's own output has the reason.
        let lines = output.lines().rev().filter(|line| !line.contains("remote connection closed"));
        lines.map(line).find(|line| !line.is_empty())
    };
    let of_client = || client.lines().rev().map(line).find(|line| !line.is_empty());
    let error = last(client).or_else(|| last(server)).or_else(of_client);
    PingpongFailure::Other(error.unwrap_or_else(|| "no output".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ONE: &str = include_str!("../fixtures/pingpong/tcp-1m.txt");
    const ALL: &str = include_str!("../fixtures/pingpong/tcp-all.txt");
    const CLIENT: &str = include_str!("../fixtures/pingpong/efa-bogus-client.txt");
    const SERVER: &str = include_str!("../fixtures/pingpong/efa-bogus-server.txt");
    const LOST: &str = include_str!("../fixtures/pingpong/tcp-lost-the-client.txt");

    #[test]
    fn captured_runs_are_parsed() {
        let PingpongResult { message, bits_per_second, seconds } = parse(ONE).unwrap();
        assert_eq!((message, bits_per_second.round(), (seconds * 1e9).round()), (1 << 20, 26_403_440_000.0, 317_710.0));
        let PingpongResult { message, bits_per_second, .. } = parse(ALL).unwrap();
        assert!(message == 6 << 20 && bits_per_second > 1e9, "the largest counts");
    }

    #[test]
    fn output_without_a_result_is_rejected() {
        assert_eq!(parse(""), Err(PingpongError::NoColumns));
        assert_eq!(parse(SERVER), Err(PingpongError::NoColumns));
        assert_eq!(parse(ONE.lines().next().unwrap()), Err(PingpongError::NoRow));
        assert_eq!(parse(&ONE.replace("=1k", "512")), Err(PingpongError::Lost { sent: 1024, returned: 512 }));
        assert_eq!(parse(&ONE.replace("3300.43", "0.00")), Err(PingpongError::NoTraffic));
        assert_eq!(parse(&ONE.replace("3300.43", "inf")), Err(PingpongError::NoRow));
        assert_eq!(parse(&"x".repeat(MAX_PINGPONG_BYTES + 1)), Err(PingpongError::TooLong(MAX_PINGPONG_BYTES + 1)));
    }

    #[test]
    fn only_lost_messages_are_attributed_to_the_hardware() {
        let PingpongFailure::Other(text) = classify_failure(CLIENT, SERVER) else { panic!("other") };
        assert_eq!(text, "fi_getinfo(): util/pingpong.c:1489, ret=-61 (No data available)");
        let PingpongFailure::Other(text) = classify_failure(CLIENT, "") else { panic!("other") };
        assert!(text.ends_with("remote connection closed"), "{text}");
        assert!(matches!(classify_failure(CLIENT, LOST), PingpongFailure::Other(_)), "the client disconnected");
        assert!(matches!(classify_failure(LOST, ""), PingpongFailure::Traffic(_)));
        assert_eq!(classify_failure("\n", ""), PingpongFailure::Other("no output".to_owned()));
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "(bytes #sent #ack total time MB/sec usec/xfer\n|[0-9kmg=. \n]|.){0,80}") {
            let _read = parse(&text);
            let _said = classify_failure(&text, &text);
        }
    }
}
