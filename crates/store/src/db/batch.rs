//! Batches for PostgreSQL. Each column is one array in the server's binary format, so a batch of any length is one
//! statement; batches for different tables are merged into one statement.

use std::{error::Error, fmt::Write};

use tokio_postgres::types::{IsNull, ToSql, Type, private::BytesMut, to_sql_checked};

use super::{ColumnType, SqlValue, row::postgres_text};

/// A statement for many rows. It owns its values, so it can be sent later.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) sql: String,
    pub(super) columns: Vec<Column>,
    /// The tables it changes.
    tables: Vec<String>,
}

impl Batch {
    pub(super) fn new(sql: &str, kinds: &[ColumnType], rows: &[SqlValue<'_>]) -> Self {
        let columns =
            kinds.iter().enumerate().map(|(index, kind)| Column::gather(*kind, rows, index, kinds.len())).collect();
        Self { sql: sql.to_owned(), columns, tables: vec![table_of(sql).to_owned()] }
    }

    /// Returns the size of the values, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.columns.iter().map(|Column(array)| array.len()).sum()
    }

    /// Merges another batch into this one. Parts of one statement do not see each other's changes, so a batch that
    /// changes the same table is returned instead.
    pub(super) fn join(&mut self, other: Self) -> Option<Self> {
        if other.tables.iter().any(|table| self.tables.contains(table)) {
            return Some(other);
        }
        // `WITH a AS (…), b AS (…) c`: the previous last statement becomes a named part.
        let (parts, last) =
            self.sql.split_at(self.sql.rfind(PART_SEPARATOR).map_or(0, |index| index + PART_SEPARATOR.len()));
        let parts = if parts.is_empty() { "WITH " } else { parts.strip_suffix(PART_SEPARATOR).unwrap_or(parts) };
        let comma = if self.tables.len() == 1 { "" } else { ", " };
        let number = self.tables.len();
        let other_sql = renumbered(&other.sql, self.columns.len());
        self.sql = format!("{parts}{comma}part{number} AS ({last}){PART_SEPARATOR}{other_sql}");
        self.columns.extend(other.columns);
        self.tables.extend(other.tables);
        None
    }
}

/// Separates the named parts of a merged statement from its last one: no statement contains a newline otherwise.
const PART_SEPARATOR: &str = "\n";

/// Returns the table that a statement changes: the word after `INSERT INTO`, `UPDATE` or `DELETE FROM`.
fn table_of(sql: &str) -> &str {
    let mut words = sql.split_ascii_whitespace();
    words.find(|word| !matches!(*word, "INSERT" | "INTO" | "UPDATE" | "DELETE" | "FROM")).unwrap_or_default()
}

/// Returns the statement with its placeholders shifted by `by`.
fn renumbered(sql: &str, by: usize) -> String {
    let mut parts = sql.split('$');
    let mut counted_on = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let digits = part.bytes().take_while(u8::is_ascii_digit).count();
        let (number, rest) = part.split_at(digits);
        let number = number.parse::<usize>().unwrap_or(0) + by;
        write!(counted_on, "${number}{rest}").expect("writing to a string does not fail");
    }
    counted_on
}

/// An array in wire format.
#[derive(Debug)]
pub(super) struct Column(Vec<u8>);

impl Column {
    /// Collects every `step`-th value, starting at `first`.
    fn gather(kind: ColumnType, rows: &[SqlValue<'_>], first: usize, step: usize) -> Self {
        let values = || rows.iter().skip(first).step_by(step);
        let length = values().map(|value| 4 + size(*value)).sum::<usize>();
        let mut array = Vec::with_capacity(20 + length);
        let has_null = values().any(|value| matches!(value, SqlValue::Null));
        // One dimension with lower bound 1.
        let head = [1, i32::from(has_null), oid(kind), number(values().count()), 1];
        array.extend(head.into_iter().flat_map(i32::to_be_bytes));
        for value in values() {
            let size = if matches!(value, SqlValue::Null) { -1 } else { number(size(*value)) };
            array.extend(size.to_be_bytes());
            match value {
                SqlValue::Null => {}
                SqlValue::Int(number) => array.extend(number.to_be_bytes()),
                SqlValue::Text(text) => array.extend(postgres_text(text).as_bytes()),
                SqlValue::Blob(bytes) => array.extend(*bytes),
            }
        }
        Self(array)
    }
}

fn size(value: SqlValue<'_>) -> usize {
    match value {
        SqlValue::Null => 0,
        SqlValue::Int(_) => 8,
        SqlValue::Text(text) => postgres_text(text).len(),
        SqlValue::Blob(bytes) => bytes.len(),
    }
}

/// Converts a count; a batch has far fewer than 2^31 elements, and the server rejects one that does not.
fn number(count: usize) -> i32 {
    i32::try_from(count).unwrap_or(i32::MAX)
}

/// Returns the server's OID of the element type.
fn oid(kind: ColumnType) -> i32 {
    let element = match kind {
        ColumnType::Int => Type::INT8,
        ColumnType::Text => Type::TEXT,
        ColumnType::Blob => Type::BYTEA,
    };
    element.oid().cast_signed()
}

impl ToSql for Column {
    fn to_sql(&self, _: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        out.extend_from_slice(&self.0);
        Ok(IsNull::No)
    }

    fn accepts(ty: &Type) -> bool {
        matches!(*ty, Type::INT8_ARRAY | Type::TEXT_ARRAY | Type::BYTEA_ARRAY)
    }

    to_sql_checked!();
}

#[cfg(test)]
mod tests {
    use tokio_postgres::types::FromSql;

    use super::*;

    #[test]
    fn batches_for_different_tables_become_one_statement_and_the_same_table_waits() {
        let one = |sql: &str| Batch::new(sql, &[ColumnType::Int], &[SqlValue::Int(1)]);
        let mut all = one("INSERT INTO a (x) SELECT * FROM UNNEST($1::int8[])");
        assert!(all.join(one("DELETE FROM b WHERE x = ANY ($1::int8[]) OR y = ANY ($1::int8[])")).is_none());
        assert!(all.join(one("UPDATE c SET x = 1 WHERE y = ANY ($1::int8[])")).is_none());
        assert_eq!(
            all.sql.replace(PART_SEPARATOR, " "),
            "WITH part1 AS (INSERT INTO a (x) SELECT * FROM UNNEST($1::int8[])), \
             part2 AS (DELETE FROM b WHERE x = ANY ($2::int8[]) OR y = ANY ($2::int8[])) \
             UPDATE c SET x = 1 WHERE y = ANY ($3::int8[])"
        );
        assert_eq!(all.columns.len(), 3);
        assert!(all.join(one("UPDATE b SET x = 2 WHERE y = ANY ($1::int8[])")).is_some());
    }

    #[test]
    fn an_array_is_read_as_it_was_gathered() {
        let rows = [
            SqlValue::Int(-7),
            SqlValue::Text("a"),
            SqlValue::Null,
            SqlValue::Null,
            SqlValue::Int(i64::MAX),
            SqlValue::Text("a\0b"),
        ];
        let Column(numbers) = Column::gather(ColumnType::Int, &rows, 0, 2);
        let numbers = Vec::<Option<i64>>::from_sql(&Type::INT8_ARRAY, &numbers).unwrap();
        assert_eq!(numbers, [Some(-7), None, Some(i64::MAX)]);
        let Column(texts) = Column::gather(ColumnType::Text, &rows, 1, 2);
        let texts = Vec::<Option<&str>>::from_sql(&Type::TEXT_ARRAY, &texts).unwrap();
        assert_eq!(texts, [Some("a"), None, Some("a\u{FFFD}b")]);
        let Column(blobs) = Column::gather(ColumnType::Blob, &[SqlValue::Blob(&[0, 255])], 0, 1);
        assert_eq!(Vec::<&[u8]>::from_sql(&Type::BYTEA_ARRAY, &blobs).unwrap(), [&[0, 255]]);
    }
}
