//! What the targets share: one input, and several parsers that it may be for.

pub mod outputs;

use std::{borrow::Cow, fmt, str::FromStr};

/// The parser that the first byte picks, and the input for it. Counted from `a`, so that a seed is text as far as possible.
pub fn pick<'a, T>(parsers: &'a [T], data: &'a [u8]) -> Option<(&'a T, &'a [u8])> {
    let (first, rest) = data.split_first()?;
    Some((&parsers[usize::from(first.wrapping_sub(b'a')) % parsers.len()], rest))
}

/// Bytes as everything here reads text: what is no text becomes a sign that says so.
pub fn text(bytes: &[u8]) -> Cow<'_, str> {
    String::from_utf8_lossy(bytes)
}

/// What is accepted must say the same when it is written and read again.
pub fn round_trip<T>(text: &str) -> Option<T>
where
    T: FromStr + fmt::Display + fmt::Debug + PartialEq,
    T::Err: fmt::Display,
{
    match text.parse::<T>() {
        Ok(value) => {
            let written = value.to_string();
            match written.parse::<T>() {
                Ok(again) => assert_eq!(again, value, "{text:?} was written as {written:?}"),
                Err(error) => panic!("{text:?} was written as {written:?}: {error}"),
            }
            Some(value)
        }
        Err(error) => {
            // Hostile input may be long; what is said about it is for a line on a terminal.
            assert!(!error.to_string().is_empty());
            None
        }
    }
}

/// A directory for the files of one run. `scripts/fuzz.sh` has it in memory, because a million inputs would wear out a disk,
/// and removes it: a fuzzed program ends without tidying up.
///
/// # Panics
/// If the machine has no temporary directory; there is nothing to fuzz then.
pub fn scratch() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary directory can be made")
}
