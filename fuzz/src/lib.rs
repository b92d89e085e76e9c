//! Shared code of the fuzz targets: one input, and a choice of parsers for it.

pub mod outputs;

use std::{borrow::Cow, fmt, str::FromStr};

/// Returns the parser that the first byte selects, and its input. Counted from `a`, so that seeds are text as far as possible.
pub fn pick<'a, T>(parsers: &'a [T], data: &'a [u8]) -> Option<(&'a T, &'a [u8])> {
    let (first, rest) = data.split_first()?;
    Some((&parsers[usize::from(first.wrapping_sub(b'a')) % parsers.len()], rest))
}

/// Converts bytes to text as our readers do: invalid UTF-8 becomes the replacement character.
pub fn text(bytes: &[u8]) -> Cow<'_, str> {
    String::from_utf8_lossy(bytes)
}

/// Parses a text. An accepted value must be equal after it is written and parsed again.
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
            // Hostile input may be long, but the message must fit on a terminal line.
            assert!(!error.to_string().is_empty());
            None
        }
    }
}

/// Creates a directory for the files of one run. `scripts/fuzz.sh` places it in memory, because a million inputs would
/// wear out a disk, and removes it, because a fuzzed program ends without cleaning up.
///
/// # Panics
/// Panics if the machine has no temporary directory: fuzzing is impossible then.
pub fn scratch() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary directory can be made")
}
