//! Transports a result document through a container's log and termination message, where job and controller share no
//! directory.
//!
//! The document is packed (deflate, then base64). The job prints it to the container's log between two marker lines
//! that nothing else in the log can contain, then writes it as the termination message, of which Kubernetes keeps 4096
//! bytes. If it does not fit there, the message holds the number of lines that the document has in the log. The log is
//! written first, so a message implies that the log is complete.
//!
//! Nothing here is trusted: an unpacked document is verified like any other, and unpacking stops at the size limit of a
//! document.

use base64::{Engine, engine::general_purpose::STANDARD};
use miniz_oxide::{deflate::compress_to_vec, inflate::decompress_to_vec_with_limit};

use crate::{
    document::MAX_DOCUMENT_BYTES,
    key_fingerprint::{BadFingerprint, KeyFingerprint},
};

/// Where a job posts its result document: a path of the agent endpoint, whose URL is in the job's environment, with its
/// keys ([`with_keys`]).
pub const RESULTS_PATH: &str = "/api/v1/results";
pub const URL_VARIABLE: &str = "DOCTOR_RESULTS_URL";
/// Between the URL and the fingerprints of the endpoint's keys.
const KEYS: char = '#';

/// Returns where a job posts its result, in one word: the URL, and the keys by which the job authenticates an encrypted
/// endpoint. The job has its own key from the same place, and trusts nothing else.
pub fn with_keys(url: &str, fingerprints: &[KeyFingerprint]) -> String {
    if fingerprints.is_empty() {
        return url.to_owned();
    }
    let keys: Vec<String> = fingerprints.iter().map(ToString::to_string).collect();
    format!("{url}{KEYS}{}", keys.join(","))
}

/// Splits what [`with_keys`] has joined.
///
/// # Errors
/// If there is something else than fingerprints.
pub fn split_keys(text: &str) -> Result<(&str, Vec<KeyFingerprint>), BadFingerprint> {
    let Some((url, keys)) = text.split_once(KEYS) else { return Ok((text, Vec::new())) };
    Ok((url, keys.split(',').map(str::parse).collect::<Result<_, _>>()?))
}

/// Header with the run's id, by which the key is found before the document is read.
pub const RUN_HEADER: &str = "x-doctor-run";

/// The bytes that Kubernetes keeps of a container's termination message.
pub const MESSAGE_BYTES: usize = 4096;

/// The limit of a packed document. Container logs are rotated at ten megabytes, so a longer document may be cut.
pub const MAX_PACKED: usize = 8 << 20;

/// Characters per line in the log. No container runtime splits lines of this length.
const LINE_CHARS: usize = 4000;

const BEGIN: &str = "-----BEGIN DOCTOR RESULT-----";
const END: &str = "-----END DOCTOR RESULT-----";
const INLINE_PREFIX: &str = "doctor-carried-1 ";
const IN_LOG_PREFIX: &str = "doctor-in-log-1 ";

/// The deflate level, of 0 to 10. Higher levels take much longer and save little.
const DEFLATE_LEVEL: u8 = 8;

/// A packed document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedDocument(String);

/// Why a document cannot be packed, found or unpacked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ResultTransportError {
    #[error("the packed result is {bytes} bytes; a job log carries at most {MAX_PACKED} bytes")]
    TooLong { bytes: usize },
    #[error("the container's termination message contains no result")]
    NoResultInMessage,
    #[error("the log contains no complete result: the log was truncated, or the job ended before it wrote one")]
    NoResultInLog,
    #[error("the packed result cannot be unpacked: {0}")]
    CannotUnpack(String),
}

/// The content of a container's termination message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TerminationMessage {
    Document(Vec<u8>),
    /// The document is in the log and takes this many lines, including both marker lines.
    InLog {
        lines: usize,
    },
}

impl PackedDocument {
    /// Packs a document.
    ///
    /// # Errors
    /// If the packed document exceeds [`MAX_PACKED`].
    pub fn pack(document: &[u8]) -> Result<Self, ResultTransportError> {
        let text = STANDARD.encode(compress_to_vec(document, DEFLATE_LEVEL));
        if text.len() > MAX_PACKED {
            return Err(ResultTransportError::TooLong { bytes: text.len() });
        }
        Ok(Self(text))
    }

    /// Returns the lines to print to the log, including both marker lines.
    pub fn to_log_lines(&self) -> String {
        let mut log = String::with_capacity(self.0.len() + self.0.len() / LINE_CHARS + 80);
        for line in self.lines() {
            log.push_str(line);
            log.push('\n');
        }
        log
    }

    fn lines(&self) -> impl Iterator<Item = &str> {
        // Base64 is ASCII, so it can be split at any byte.
        let body = self.0.as_bytes().chunks(LINE_CHARS).filter_map(|line| std::str::from_utf8(line).ok());
        [BEGIN].into_iter().chain(body).chain([END])
    }

    /// Returns the termination message: the document if it fits, otherwise its number of lines in the log.
    pub fn to_termination_message(&self) -> String {
        let message = format!("{INLINE_PREFIX}{}", self.0);
        if message.len() <= MESSAGE_BYTES { message } else { format!("{IN_LOG_PREFIX}{}", self.lines().count()) }
    }
}

/// Parses a container's termination message.
///
/// # Errors
/// If it contains no result, or was truncated.
pub fn parse_termination_message(message: &str) -> Result<TerminationMessage, ResultTransportError> {
    let message = message.trim();
    if let Some(packed) = message.strip_prefix(INLINE_PREFIX) {
        return unpack(packed.as_bytes()).map(TerminationMessage::Document);
    }
    let lines = message.strip_prefix(IN_LOG_PREFIX).and_then(|lines| lines.parse().ok());
    let most = MAX_PACKED / LINE_CHARS + 3;
    lines
        .filter(|lines| *lines <= most)
        .map(|lines| TerminationMessage::InLog { lines })
        .ok_or(ResultTransportError::NoResultInMessage)
}

/// Returns the last document in a log.
///
/// # Errors
/// If the log has no complete document, or it cannot be unpacked.
pub fn extract_from_log(log: &str) -> Result<Vec<u8>, ResultTransportError> {
    let (_, result) = split_log(log);
    let packed: String = result.ok_or(ResultTransportError::NoResultInLog)?.lines().collect();
    unpack(packed.as_bytes())
}

/// Splits a log into the human-readable text and the packed document after it.
pub fn split_log(log: &str) -> (&str, Option<&str>) {
    let Some((before, after)) =
        log.rsplit_once(BEGIN).filter(|(before, _)| before.is_empty() || before.ends_with('\n'))
    else {
        return (log, None);
    };
    (before, after.split_once(END).map(|(result, _)| result))
}

fn unpack(packed: &[u8]) -> Result<Vec<u8>, ResultTransportError> {
    if packed.len() > MAX_PACKED {
        return Err(ResultTransportError::TooLong { bytes: packed.len() });
    }
    let deflated = STANDARD.decode(packed).map_err(|error| ResultTransportError::CannotUnpack(error.to_string()))?;
    let most = usize::try_from(MAX_DOCUMENT_BYTES).unwrap_or(usize::MAX);
    decompress_to_vec_with_limit(&deflated, most).map_err(|error| ResultTransportError::CannotUnpack(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(bytes: usize) -> Vec<u8> {
        let mut state = 7_u64;
        let mut next = || {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            (state >> 56) as u8
        };
        (0..bytes).map(|_| next()).collect()
    }

    #[test]
    fn the_keys_of_an_endpoint_travel_with_its_url() {
        let keys = [KeyFingerprint::of(b"now"), KeyFingerprint::of(b"next")];
        for keys in [&keys[..], &keys[..1], &[]] {
            let text = with_keys("https://ctl:7443/doctor", keys);
            assert_eq!(split_keys(&text), Ok(("https://ctl:7443/doctor", keys.to_vec())), "{text}");
        }
        assert!(split_keys("https://ctl:7443#").is_err() && split_keys("https://ctl:7443#sha256:00").is_err());
    }

    #[test]
    fn a_small_document_is_in_the_message_and_in_the_log() {
        let document = b"doctor-result-1 abc\n{}".repeat(200);
        let packed = PackedDocument::pack(&document).unwrap();
        let message = packed.to_termination_message();
        assert!(message.len() <= MESSAGE_BYTES);
        assert_eq!(
            parse_termination_message(&format!("{message}\n")).unwrap(),
            TerminationMessage::Document(document.clone())
        );
        let log = format!("2026-11-15T08:00:00Z job: done\n{}", packed.to_log_lines());
        assert_eq!(extract_from_log(&log).unwrap(), document);
        assert_eq!(split_log(&log).0, "2026-11-15T08:00:00Z job: done\n");
    }

    #[test]
    fn a_large_document_is_in_the_log_and_the_message_says_how_many_lines_it_has() {
        let document = noise(20_000);
        let packed = PackedDocument::pack(&document).unwrap();
        let log = packed.to_log_lines();
        let message = parse_termination_message(&packed.to_termination_message()).unwrap();
        assert_eq!(message, TerminationMessage::InLog { lines: log.lines().count() });
        assert!(log.lines().all(|line| line.len() <= LINE_CHARS) && log.lines().count() > 5);
        assert_eq!(extract_from_log(&format!("before\n{log}after\n")).unwrap(), document);
    }

    #[test]
    fn a_truncated_message_or_log_is_rejected() {
        let packed = PackedDocument::pack(&noise(2000)).unwrap();
        let message = packed.to_termination_message();
        for cut in [1, 16, 17, 100, message.len() - 2] {
            assert!(parse_termination_message(&message[..cut]).is_err(), "{cut}");
        }
        let log = packed.to_log_lines();
        let end = log.len() - END.len() - 1;
        for cut in [0, 10, BEGIN.len() + 1, end - 10, end + 3] {
            assert!(extract_from_log(&log[..cut]).is_err(), "{cut}");
        }
        assert_eq!(
            extract_from_log(&log[20..]),
            Err(ResultTransportError::NoResultInLog),
            "the begin marker is cut off"
        );
        for other in ["", "OOMKilled", "doctor-in-log-1 many", "doctor-in-log-1 99999999"] {
            assert_eq!(parse_termination_message(other), Err(ResultTransportError::NoResultInMessage), "{other}");
        }
    }

    #[test]
    fn a_document_that_unpacks_beyond_the_limit_is_rejected() {
        let bomb = compress_to_vec(&vec![0; MAX_DOCUMENT_BYTES as usize + 1], 9);
        let message = format!("{INLINE_PREFIX}{}", STANDARD.encode(bomb));
        assert!(matches!(parse_termination_message(&message), Err(ResultTransportError::CannotUnpack(_))));
        assert!(matches!(PackedDocument::pack(&noise(MAX_PACKED)), Err(ResultTransportError::TooLong { .. })));
    }

    #[test]
    fn a_test_line_that_resembles_the_document_is_ignored() {
        let packed = PackedDocument::pack(b"one").unwrap().to_log_lines();
        let log = format!("2026-11-15T08:00:00Z dl: | {BEGIN}\n{packed}");
        assert_eq!(extract_from_log(&log).unwrap(), b"one");
        assert_eq!(
            extract_from_log(&format!("2026-11-15T08:00:00Z dl: | {BEGIN}\n")),
            Err(ResultTransportError::NoResultInLog)
        );
    }
}
