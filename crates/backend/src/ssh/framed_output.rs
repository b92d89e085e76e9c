//! Extracts the output of a command on a host from everything else that arrives over the connection.
//!
//! The login may print a greeting, `ssh` may print errors at any time, and the exit code of `ssh` says nothing about the command
//! (255 may be its own, the command's, or a signal's). The host therefore prints an unguessable line before and after the output,
//! and the second one has the command's exit code. Without it the command has not ended, whatever `ssh` returns.
//!
//! After its first line the host waits for a start word, which the client sends when it has received that line. Without the first
//! line it is therefore certain that the command was not started, whatever happened to the connection.

use std::{fs::File, io::Write as _};

use crate::process::OutputListener;

/// How much of the text before the command is kept, in bytes.
const MAX_PREAMBLE: usize = 16 * 1024;

/// The start word that the host waits for.
pub(super) const START_WORD: &str = "go";

/// Parses one stream of a connection as it arrives. Keeps at most `most` bytes of the command's output.
#[derive(Debug)]
pub struct FramedOutput {
    /// The marker line before the output.
    begin: Vec<u8>,
    end: Vec<u8>,
    max_bytes: usize,
    /// Where the output is written instead of being kept in memory.
    file: Option<File>,
    /// Received bytes that are not yet classified.
    pending: Vec<u8>,
    position: ParsePosition,
    parsed: ParsedOutput,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ParsePosition {
    Before,
    InOutput,
    InEndMarker,
    After,
}

/// The parsed content of one stream.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ParsedOutput {
    /// Text before the command: greetings, and errors of `ssh`.
    pub preamble: Vec<u8>,
    pub started: bool,
    pub text: Vec<u8>,
    /// Bytes that were kept, in memory or in a file.
    pub output_bytes: usize,
    /// Why the file is incomplete.
    pub write_error: Option<String>,
    /// Bytes of output beyond the limit.
    pub dropped_bytes: u64,
    /// The command's exit code, if it has ended.
    pub code: Option<i32>,
}

impl FramedOutput {
    /// Creates a parser. `word` must be unguessable.
    pub fn new(word: &str, most: usize) -> Self {
        Self {
            begin: format!("{word} begin\n").into_bytes(),
            end: format!("\n{word} end ").into_bytes(),
            max_bytes: most,
            file: None,
            pending: Vec::new(),
            position: ParsePosition::Before,
            parsed: ParsedOutput::default(),
        }
    }

    /// Creates a parser that writes the command's output to a file.
    pub(super) fn into_file(word: &str, most: usize, file: File) -> Self {
        Self { file: Some(file), ..Self::new(word, most) }
    }

    /// Wraps a command for the shell with the marker lines on both streams; `$R` is the exit code. The command starts on [`START_WORD`].
    pub(super) fn wrap_command(word: &str, run: &str) -> String {
        format!(
            "echo {word} begin; echo {word} begin >&2; IFS= read -r G; [ \"$G\" = {START_WORD} ] || exit 0; {run}; R=$?; \
             printf \"\\n%s end %s\\n\" {word} $R; printf \"\\n%s end %s\\n\" {word} $R >&2; exit 0"
        )
    }

    /// Returns what was received so far.
    pub fn into_parsed(mut self) -> ParsedOutput {
        let rest = std::mem::take(&mut self.pending);
        match self.position {
            ParsePosition::Before => self.add_preamble(&rest),
            ParsePosition::InOutput => self.add_output(&rest),
            // A truncated end marker is not an exit code.
            ParsePosition::InEndMarker | ParsePosition::After => {}
        }
        self.parsed
    }

    fn add_preamble(&mut self, bytes: &[u8]) {
        let room = MAX_PREAMBLE.saturating_sub(self.parsed.preamble.len());
        self.parsed.preamble.extend(&bytes[..bytes.len().min(room)]);
    }

    fn add_output(&mut self, bytes: &[u8]) {
        let room = self.max_bytes.saturating_sub(self.parsed.output_bytes);
        let retained = bytes.len().min(room);
        match &mut self.file {
            None => self.parsed.text.extend(&bytes[..retained]),
            Some(file) if self.parsed.write_error.is_none() => {
                self.parsed.write_error = file.write_all(&bytes[..retained]).err().map(|error| error.to_string());
            }
            Some(_) => {}
        }
        self.parsed.output_bytes += retained;
        self.parsed.dropped_bytes += (bytes.len() - retained) as u64;
    }

    /// Classifies the next piece. Returns whether more can be classified without more input.
    fn step(&mut self) -> bool {
        let mark = match self.position {
            ParsePosition::Before => &self.begin,
            ParsePosition::InOutput => &self.end,
            ParsePosition::InEndMarker => return self.read_code(),
            ParsePosition::After => {
                self.pending.clear();
                return false;
            }
        };
        let (found, length) = (find(&self.pending, mark), mark.len());
        // Without the marker, keep back only what may be its beginning.
        let upto = found.unwrap_or_else(|| self.pending.len().saturating_sub(length - 1));
        let consumed: Vec<u8> = self.pending.drain(..upto).collect();
        let inside = self.position == ParsePosition::InOutput;
        if inside {
            self.add_output(&consumed);
        } else {
            self.add_preamble(&consumed);
        }
        if found.is_some() {
            self.pending.drain(..length);
            self.position = if inside { ParsePosition::InEndMarker } else { ParsePosition::InOutput };
            self.parsed.started = true;
        }
        found.is_some()
    }

    fn read_code(&mut self) -> bool {
        /// More than any exit code needs.
        const LONGEST: usize = 8;
        let Some(end) = self.pending.iter().position(|byte| *byte == b'\n') else {
            if self.pending.len() > LONGEST {
                self.position = ParsePosition::After;
            }
            return false;
        };
        let digits = std::str::from_utf8(&self.pending[..end]).ok().filter(|digits| digits.len() <= LONGEST);
        self.parsed.code = digits.and_then(|digits| digits.parse().ok()).filter(|code| (0..=255).contains(code));
        self.position = ParsePosition::After;
        true
    }
}

impl OutputListener for FramedOutput {
    fn on_output(&mut self, part: &[u8]) {
        self.pending.extend(part);
        while self.step() {}
    }

    fn is_ready_for_input(&self) -> bool {
        self.position != ParsePosition::Before
    }

    fn is_finished(&self) -> bool {
        self.position == ParsePosition::After
    }
}

fn find(bytes: &[u8], mark: &[u8]) -> Option<usize> {
    bytes.windows(mark.len()).position(|window| window == mark)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const WORD: &str = "doctor-5eed";

    fn parse_chunks(text: &[u8], most: usize, piece: usize) -> ParsedOutput {
        let mut between = FramedOutput::new(WORD, most);
        text.chunks(piece.max(1)).for_each(|part| between.on_output(part));
        between.into_parsed()
    }

    fn framed(before: &str, inside: &str, code: &str) -> Vec<u8> {
        format!("{before}{WORD} begin\n{inside}\n{WORD} end {code}\n").into_bytes()
    }

    #[test]
    fn command_output_is_separated_from_surrounding_text() {
        let output = parse_chunks(&framed("Welcome!\n", "one\ntwo", "3"), 100, 7);
        assert_eq!(
            (output.preamble.as_slice(), output.text.as_slice(), output.code),
            (&b"Welcome!\n"[..], &b"one\ntwo"[..], Some(3))
        );
        let empty = parse_chunks(&framed("", "", "255"), 100, 100);
        assert_eq!((empty.text.len(), empty.code, empty.started), (0, Some(255), true));
    }

    #[test]
    fn without_the_end_line_the_command_has_not_ended() {
        let text = framed("", "well", "0");
        for cut in 1..text.len() {
            let output = parse_chunks(&text[..cut], 100, 5);
            assert_eq!(output.code, None, "{cut} bytes");
        }
        assert!(!parse_chunks(b"ssh: connect to host x port 22: Connection refused\n", 100, 9).started);
    }

    #[test]
    fn a_command_cannot_forge_its_exit_code() {
        let forged = framed("", "\ndoctor-0000 end 0\nfailing", "1");
        assert_eq!(parse_chunks(&forged, 100, 3).code, Some(1));
        for code in ["", "abc", "-1", "256", "99999999999", "0000000000000"] {
            assert_eq!(parse_chunks(&framed("", "x", code), 100, 3).code, None, "{code}");
        }
    }

    #[test]
    fn excess_output_is_counted_and_dropped_and_the_exit_code_is_still_read() {
        let output = parse_chunks(&framed("", &"x".repeat(1000), "0"), 64, 100);
        assert_eq!((output.text.len(), output.dropped_bytes, output.code), (64, 936, Some(0)));
        assert!(parse_chunks(&[b'n'; 100_000], 64, 4096).preamble.len() <= MAX_PREAMBLE);
    }

    proptest! {
        #[test]
        fn parsing_does_not_depend_on_chunks_and_respects_the_limit(
            before in "[a-c\n]{0,20}", inside in "([a-c\n]|doctor-5eed|begin|end| ){0,20}", piece in 1..40usize, code in 0..256i32,
        ) {
            let text = framed(&before, &inside, &code.to_string());
            let output = parse_chunks(&text, 10, piece);
            prop_assert_eq!(&output, &parse_chunks(&text, 10, text.len()));
            prop_assert!(output.text.len() <= 10);
            if !inside.contains(WORD) {
                prop_assert_eq!(output.code, Some(code));
                prop_assert_eq!(output.text.len() as u64 + output.dropped_bytes, inside.len() as u64);
            }
        }
    }
}
