//! Parses the output of perftest's `ib_write_bw`, in the formats of the last ten years.
//!
//! One line names the columns and their unit, and each further line with numbers in them is a result; other lines are
//! ignored. `MB/sec` of old versions and `MiB/sec` of new ones are the same: 2^20 bytes. A run that printed no result
//! line has no result, whatever its exit code.

/// The input limit; a run prints two kilobytes.
pub const MAX_PERFTEST_BYTES: usize = 256 << 10;

/// One result: that of the largest messages, if there are several sizes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WriteBandwidth {
    /// Bytes of one message.
    pub message: u64,
    pub bits_per_second: f64,
}

/// Why there is no result.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PerftestError {
    #[error("ib_write_bw printed {0} bytes; the limit is {MAX_PERFTEST_BYTES} bytes")]
    TooLong(usize),
    #[error("ib_write_bw printed no column `BW average` in Gb/sec, MB/sec or MiB/sec")]
    NoColumns,
    #[error("ib_write_bw printed no result line")]
    NoRow,
    #[error("ib_write_bw transferred no data")]
    NoTraffic,
}

/// Parses the output.
///
/// # Errors
/// If it has no result.
pub fn parse(text: &str) -> Result<WriteBandwidth, PerftestError> {
    if text.len() > MAX_PERFTEST_BYTES {
        return Err(PerftestError::TooLong(text.len()));
    }
    let columns = text.lines().position(|line| line.trim_start().starts_with("#bytes"));
    let mut lines = text.lines().skip(columns.ok_or(PerftestError::NoColumns)?);
    let bits = lines.next().and_then(bits_in_unit).ok_or(PerftestError::NoColumns)?;
    let largest = lines.filter_map(row).max_by_key(|(message, _)| *message);
    let (message, average) = largest.ok_or(PerftestError::NoRow)?;
    if average <= 0.0 {
        return Err(PerftestError::NoTraffic);
    }
    Ok(WriteBandwidth { message, bits_per_second: average * bits })
}

/// Returns the bits per second of one unit.
fn bits_in_unit(header: &str) -> Option<f64> {
    let (_, after) = header.split_once("BW average[")?;
    match after.split_once(']')?.0 {
        "Gb/sec" => Some(1e9),
        "MB/sec" | "MiB/sec" => Some(8.0 * f64::from(1 << 20)),
        _ => None,
    }
}

/// Parses a line of message size, number of messages, peak and average; returns size and average.
fn row(line: &str) -> Option<(u64, f64)> {
    let mut fields = line.split_ascii_whitespace();
    let message = fields.next()?.parse().ok()?;
    let _messages: u64 = fields.next()?.parse().ok()?;
    let mut rate = || fields.next()?.parse::<f64>().ok().filter(|rate| rate.is_finite());
    let _peak = rate()?;
    Some((message, rate()?))
}

/// Why a run failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PerftestFailure {
    /// Messages did not arrive: the adapter returned one with an error.
    Traffic(String),
    /// Anything else: no device, no memory, no permission. It says nothing about the hardware.
    Other(String),
}

/// Finds the reason in both streams of the run and of its peer.
pub fn classify_failure(output: &str) -> PerftestFailure {
    let line = |text: &str| text.trim().chars().take(200).collect::<String>();
    let mut lines = output.lines().skip_while(|line| !line.contains("Completion with error"));
    if let Some(first) = lines.next() {
        let status = lines.next().filter(|line| line.contains("Failed status")).unwrap_or(first);
        let meaning = status.split_once("Failed status ").and_then(|(_, rest)| rest.split_once(':')?.0.parse().ok());
        let meaning = meaning.and_then(status_meaning).map_or_else(String::new, |word| format!(" ({word})"));
        return PerftestFailure::Traffic(format!("{}{meaning}", line(status)));
    }
    let last = output.lines().rev().find(|line| !line.trim().is_empty() && !line.trim_start().starts_with("---"));
    PerftestFailure::Other(last.map_or_else(|| "no output".to_owned(), line))
}

/// Numbers of verbs (`ibv_wc_status`) that may occur in a loopback.
const fn status_meaning(number: u32) -> Option<&'static str> {
    match number {
        1 => Some("wrong length"),
        2 => Some("queue pair error"),
        4 => Some("memory protection error"),
        5 => Some("flushed after another error"),
        8 => Some("the remote side rejected the request"),
        9 | 10 => Some("remote access or operation error"),
        11 => Some("the remote side aborted"),
        12 => Some("no acknowledgement after all retries"),
        13 => Some("the remote side was not ready"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GBITS: &str = include_str!("../fixtures/perftest/gbits-duration.txt");
    const MEBIBYTES: &str = include_str!("../fixtures/perftest/mib-iterations.txt");
    const ALL_SIZES: &str = include_str!("../fixtures/perftest/old-all-sizes.txt");
    const REFUSED: &str = include_str!("../fixtures/perftest/no-device.txt");
    const BROKEN: &str = include_str!("../fixtures/perftest/completion-error.txt");

    #[test]
    fn several_versions_are_parsed_with_their_units() {
        assert_eq!(parse(GBITS), Ok(WriteBandwidth { message: 8_388_608, bits_per_second: 394.61e9 }));
        let WriteBandwidth { message, bits_per_second } = parse(MEBIBYTES).unwrap();
        assert_eq!((message, (bits_per_second / 1e9).round()), (65_536, 93.0));
        let WriteBandwidth { message, bits_per_second } = parse(ALL_SIZES).unwrap();
        assert_eq!((message, (bits_per_second / 1e9).round()), (8_388_608, 202.0), "the largest counts");
    }

    #[test]
    fn output_without_a_result_is_rejected() {
        assert_eq!(parse(""), Err(PerftestError::NoColumns));
        assert_eq!(parse(REFUSED), Err(PerftestError::NoColumns));
        assert_eq!(parse(BROKEN), Err(PerftestError::NoRow));
        assert_eq!(parse(&GBITS.replace("Gb/sec", "furlongs")), Err(PerftestError::NoColumns));
        assert_eq!(parse(&GBITS.replace("394.61", "0.00")), Err(PerftestError::NoTraffic));
        assert_eq!(parse(&GBITS.replace("394.61", "nan")), Err(PerftestError::NoRow));
        assert_eq!(parse(&"x".repeat(MAX_PERFTEST_BYTES + 1)), Err(PerftestError::TooLong(MAX_PERFTEST_BYTES + 1)));
    }

    #[test]
    fn only_lost_messages_are_attributed_to_the_hardware() {
        let PerftestFailure::Traffic(text) = classify_failure(BROKEN) else { panic!("traffic") };
        assert_eq!(text, "Failed status 12: wr_id 0 syndrom 0x81 (no acknowledgement after all retries)");
        let PerftestFailure::Other(text) = classify_failure(REFUSED) else { panic!("other") };
        assert_eq!(text, "Unable to find the Infiniband/RoCE device");
        assert_eq!(classify_failure(" \n"), PerftestFailure::Other("no output".to_owned()));
        assert!(matches!(classify_failure("Couldn't allocate MR\nFailed to create MR\n"), PerftestFailure::Other(_)));
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "(#bytes|BW average\\[|Gb/sec\\]|Failed status |[0-9 .:\n]|.){0,80}") {
            let _read = parse(&text);
            let _said = classify_failure(&text);
        }
    }
}
