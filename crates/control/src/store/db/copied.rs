//! A long answer of whole numbers, as PostgreSQL copies it out in its binary form. To read it as rows of a question costs
//! several times as much: each row, and each value in it, has its own way through the client.

use super::Row;
use crate::store::error::{Result, StoreError};

/// What every binary copy begins with, before four bytes of flags and the length of an extension.
const SIGNATURE: &[u8] = b"PGCOPY\n\xff\r\n\0";

/// Hands each row to `visit`.
pub(super) fn each_row(copied: &[u8], mut visit: impl FnMut(&Row<'_>) -> Result<()>) -> Result<()> {
    let mut rest = Rest(copied.strip_prefix(SIGNATURE).ok_or_else(|| unreadable("it begins otherwise"))?);
    rest.take(4)?;
    let extension = usize::try_from(rest.number(4)?).map_err(|_| unreadable("its extension has no length"))?;
    rest.take(extension)?;
    let mut values: Vec<Option<i64>> = Vec::new();
    loop {
        // The end is told by a row of -1 values.
        let Ok(count) = usize::try_from(rest.number(2)?) else { return Ok(()) };
        values.clear();
        for _ in 0..count {
            // -1: no value.
            let value = match usize::try_from(rest.number(4)?) {
                Ok(length) => Some(rest.number(length)?),
                Err(_) => None,
            };
            values.push(value);
        }
        visit(&Row::Copied(&values))?;
    }
}

struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or_else(|| unreadable("it is cut off"))?;
        self.0 = rest;
        Ok(taken)
    }

    /// A number of two, four or eight bytes.
    fn number(&mut self, length: usize) -> Result<i64> {
        Ok(match *self.take(length)? {
            [a, b] => i64::from(i16::from_be_bytes([a, b])),
            [a, b, c, d] => i64::from(i32::from_be_bytes([a, b, c, d])),
            [a, b, c, d, e, f, g, h] => i64::from_be_bytes([a, b, c, d, e, f, g, h]),
            _ => return Err(unreadable("a value of it is no whole number")),
        })
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

    fn read(copied: &[u8]) -> Result<Vec<Vec<Option<i64>>>> {
        let mut rows = Vec::new();
        each_row(copied, |row| {
            rows.push(vec![row.opt_int(0)?, row.opt_int(1)?]);
            Ok(())
        })?;
        Ok(rows)
    }

    #[test]
    fn numbers_of_every_width_and_what_is_not_there_come_back() {
        let first = [&[0, 2][..], &[0, 0, 0, 2, 0xff, 0xfe], &[0, 0, 0, 4, 0, 0, 1, 0]].concat();
        let second = [&[0, 2][..], &[0, 0, 0, 8, 0, 0, 0, 1, 0, 0, 0, 0], &[0xff; 4]].concat();
        let copied = copy(&[&first[..], &second[..], &[0xff, 0xff]].concat());
        assert_eq!(read(&copied).unwrap(), [vec![Some(-2), Some(256)], vec![Some(1 << 32), None]]);
        assert_eq!(read(&copy(&[0xff, 0xff])).unwrap(), Vec::<Vec<_>>::new());
    }

    #[test]
    fn what_is_cut_or_no_copy_is_refused() {
        let whole = copy(&[0, 1, 0, 0, 0, 2, 0, 7, 0xff, 0xff]);
        for length in 0..whole.len() {
            assert!(each_row(&whole[..length], |_| Ok(())).is_err(), "{length}");
        }
        let three_bytes = copy(&[0, 1, 0, 0, 0, 3, 0, 7, 0, 0xff, 0xff]);
        assert!(each_row(&three_bytes, |_| Ok(())).is_err());
    }
}
