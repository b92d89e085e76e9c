//! Reads PostgreSQL's binary `COPY` output of integers. Reading a long result as query rows costs several times as
//! much, because the client handles each row and value separately.

use super::{Row, Visit};
use crate::error::{Result, StoreError};

/// Start of every binary copy, followed by four bytes of flags and the length of a header extension.
const SIGNATURE: &[u8] = b"PGCOPY\n\xff\r\n\0";

/// An incremental reader: the server produces the next rows while it parses.
#[derive(Default)]
pub(super) struct CopyReader {
    position: CopyPosition,
    /// An incomplete row, whose end has not arrived yet.
    partial_row: Vec<u8>,
    values: Vec<Option<i64>>,
}

#[derive(Default, Clone, Copy, PartialEq, Eq)]
enum CopyPosition {
    #[default]
    Start,
    Rows,
    End,
}

impl CopyReader {
    /// Passes each complete row to `visit`.
    pub(super) fn feed(&mut self, piece: &[u8], visit: Visit<'_>) -> Result<()> {
        // The server sends a row per message today, but does not guarantee it.
        if self.partial_row.is_empty() {
            let left = self.read(piece, visit)?;
            self.partial_row.extend_from_slice(left);
        } else {
            let mut all = std::mem::take(&mut self.partial_row);
            all.extend_from_slice(piece);
            let left = self.read(&all, visit)?.len();
            all.drain(..all.len() - left);
            self.partial_row = all;
        }
        Ok(())
    }

    /// Fails unless the end marker was read.
    pub(super) fn finish(&self) -> Result<()> {
        if self.position == CopyPosition::End { Ok(()) } else { Err(unreadable("it is truncated")) }
    }

    /// Returns the incomplete rest.
    fn read<'a>(&mut self, mut text: &'a [u8], visit: Visit<'_>) -> Result<&'a [u8]> {
        loop {
            let mut rest = Rest(text);
            let parsed = match self.position {
                CopyPosition::Start => header(&mut rest)?.map(|()| CopyPosition::Rows),
                CopyPosition::Rows => row(&mut rest, &mut self.values)?,
                CopyPosition::End => None,
            };
            let Some(next) = parsed else { return Ok(text) };
            if self.position == CopyPosition::Rows && next == CopyPosition::Rows {
                visit(&Row::Copied(&self.values))?;
            }
            (self.position, text) = (next, rest.0);
        }
    }
}

/// Returns `None` if it is incomplete.
fn header(rest: &mut Rest<'_>) -> Result<Option<()>> {
    let Some(signature) = rest.take(SIGNATURE.len()) else { return Ok(None) };
    if signature != SIGNATURE {
        return Err(unreadable("it does not start with the signature of a binary copy"));
    }
    let (Some(_flags), Some(length)) = (rest.take(4), rest.number(4)?) else { return Ok(None) };
    let length = usize::try_from(length).map_err(|_| unreadable("the length of its header extension is negative"))?;
    Ok(rest.take(length).map(|_| ()))
}

/// Returns `None` if it is incomplete.
fn row(rest: &mut Rest<'_>, values: &mut Vec<Option<i64>>) -> Result<Option<CopyPosition>> {
    let Some(count) = rest.number(2)? else { return Ok(None) };
    // A count of -1 marks the end.
    let Ok(count) = usize::try_from(count) else { return Ok(Some(CopyPosition::End)) };
    values.clear();
    for _ in 0..count {
        let Some(length) = rest.number(4)? else { return Ok(None) };
        let value = match usize::try_from(length) {
            Ok(length) => match rest.number(length)? {
                Some(number) => Some(number),
                None => return Ok(None),
            },
            // A length of -1 is NULL.
            Err(_) => None,
        };
        values.push(value);
    }
    Ok(Some(CopyPosition::Rows))
}

struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }

    /// Reads an integer of two, four or eight bytes. Returns `None` if it is incomplete.
    fn number(&mut self, length: usize) -> Result<Option<i64>> {
        if !matches!(length, 2 | 4 | 8) {
            return Err(unreadable("a value is not an integer of 2, 4 or 8 bytes"));
        }
        Ok(self.take(length).map(|bytes| match *bytes {
            [a, b] => i64::from(i16::from_be_bytes([a, b])),
            [a, b, c, d] => i64::from(i32::from_be_bytes([a, b, c, d])),
            _ => bytes.iter().fold(0, |number, byte| number << 8 | i64::from(*byte)),
        }))
    }
}

fn unreadable(why: &str) -> StoreError {
    StoreError::Unreadable { what: "copy of a table", why: why.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copy(rows: &[u8]) -> Vec<u8> {
        [SIGNATURE, &[0; 4], &[0, 0, 0, 1, 77], rows].concat()
    }

    /// Reads the copy in pieces of this length.
    fn read(copied: &[u8], pieces: usize) -> Result<Vec<Vec<Option<i64>>>> {
        let (mut reader, mut rows) = (CopyReader::default(), Vec::new());
        for piece in copied.chunks(pieces) {
            reader.feed(piece, &mut |row| {
                rows.push(vec![row.opt_int(0)?, row.opt_int(1)?]);
                Ok(())
            })?;
        }
        reader.finish()?;
        Ok(rows)
    }

    #[test]
    fn integers_of_every_width_and_nulls_are_read_across_chunk_boundaries() {
        let first = [&[0, 2][..], &[0, 0, 0, 2, 0xff, 0xfe], &[0, 0, 0, 4, 0, 0, 1, 0]].concat();
        let second = [&[0, 2][..], &[0, 0, 0, 8, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0], &[0xff; 4]].concat();
        let copied = copy(&[&first[..], &second[..], &[0xff, 0xff]].concat());
        for pieces in 1..=copied.len() {
            let expected = [vec![Some(-2), Some(256)], vec![Some(-1 << 32), None]];
            assert_eq!(read(&copied, pieces).unwrap(), expected, "{pieces}");
        }
        assert_eq!(read(&copy(&[0xff, 0xff]), 7).unwrap(), Vec::<Vec<_>>::new());
    }

    #[test]
    fn truncated_or_foreign_copy_data_is_rejected() {
        let full = copy(&[0, 2, 0, 0, 0, 2, 0, 7, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]);
        read(&full, 5).unwrap();
        for length in 0..full.len() {
            assert!(read(&full[..length], 5).is_err(), "{length}");
        }
        let three_bytes = copy(&[0, 1, 0, 0, 0, 3, 0, 7, 0, 0xff, 0xff]);
        assert!(read(&three_bytes, 64).is_err());
        assert!(read(b"something else altogether", 64).is_err());
    }
}
