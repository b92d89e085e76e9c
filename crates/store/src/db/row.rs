//! Parameter values and result rows, the same for both databases.

use std::borrow::Cow;

use doctor_core::{
    ids::{CaseId, RunId},
    time::{Span, Timestamp},
};
use tokio_postgres::types::{FromSql, IsNull, ToSql, Type, private::BytesMut, to_sql_checked};

use super::{postgres_error, sqlite_error};
use crate::error::{Result, StoreError};

/// A parameter of a statement.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum SqlValue<'a> {
    Null,
    Int(i64),
    Text(&'a str),
    Blob(&'a [u8]),
}

/// The type of a batch column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ColumnType {
    Int,
    Text,
    Blob,
}

/// `vals![a, b]` is a slice of [`SqlValue`]s converted from its arguments.
macro_rules! vals {
    ($($value:expr),* $(,)?) => { &[$($crate::db::SqlValue::from($value)),*][..] };
}
pub(crate) use vals;

impl From<i64> for SqlValue<'_> {
    fn from(number: i64) -> Self {
        Self::Int(number)
    }
}

impl From<u32> for SqlValue<'_> {
    fn from(number: u32) -> Self {
        Self::Int(i64::from(number))
    }
}

/// Ids and counters stay below 2^63; the same cast restores one that does not.
impl From<u64> for SqlValue<'_> {
    fn from(number: u64) -> Self {
        Self::Int(number.cast_signed())
    }
}

impl From<bool> for SqlValue<'_> {
    fn from(yes: bool) -> Self {
        Self::Int(i64::from(yes))
    }
}

impl From<Timestamp> for SqlValue<'_> {
    fn from(moment: Timestamp) -> Self {
        Self::Int(moment.millis())
    }
}

impl From<Span> for SqlValue<'_> {
    fn from(span: Span) -> Self {
        Self::Int(span.millis())
    }
}

impl From<RunId> for SqlValue<'_> {
    fn from(run: RunId) -> Self {
        Self::from(run.number())
    }
}

impl From<CaseId> for SqlValue<'_> {
    fn from(case: CaseId) -> Self {
        Self::from(case.number())
    }
}

impl<'a> From<&'a str> for SqlValue<'a> {
    fn from(text: &'a str) -> Self {
        Self::Text(text)
    }
}

impl<'a> From<&'a String> for SqlValue<'a> {
    fn from(text: &'a String) -> Self {
        Self::Text(text)
    }
}

impl<'a> From<&'a [u8]> for SqlValue<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self::Blob(bytes)
    }
}

impl<'a, T: Into<SqlValue<'a>>> From<Option<T>> for SqlValue<'a> {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Null, Into::into)
    }
}

impl rusqlite::ToSql for SqlValue<'_> {
    fn to_sql(&self) -> rusqlite::Result<rusqlite::types::ToSqlOutput<'_>> {
        use rusqlite::types::{ToSqlOutput, ValueRef};
        Ok(ToSqlOutput::Borrowed(match *self {
            SqlValue::Null => ValueRef::Null,
            SqlValue::Int(number) => ValueRef::Integer(number),
            SqlValue::Text(text) => ValueRef::Text(text.as_bytes()),
            SqlValue::Blob(bytes) => ValueRef::Blob(bytes),
        }))
    }
}

impl ToSql for SqlValue<'_> {
    /// Encodes an integer in the width of its column, as PostgreSQL requires.
    fn to_sql(
        &self,
        ty: &Type,
        out: &mut BytesMut,
    ) -> std::result::Result<IsNull, Box<dyn std::error::Error + Sync + Send>> {
        match *self {
            Self::Null => Ok(IsNull::Yes),
            Self::Int(number) if *ty == Type::INT4 => i32::try_from(number)?.to_sql(ty, out),
            Self::Int(number) if *ty == Type::INT2 => i16::try_from(number)?.to_sql(ty, out),
            Self::Int(number) => number.to_sql(ty, out),
            Self::Text(text) => postgres_text(text).to_sql(ty, out),
            Self::Blob(bytes) => bytes.to_sql(ty, out),
        }
    }

    fn accepts(_: &Type) -> bool {
        true
    }

    to_sql_checked!();
}

/// Returns the text as PostgreSQL can store it: it refuses NUL, which a node may have sent, and with it the transaction.
pub(super) fn postgres_text(text: &str) -> Cow<'_, str> {
    if text.contains('\0') { text.replace('\0', "\u{FFFD}").into() } else { text.into() }
}

/// An integer of any width.
struct AnyInt(i64);

impl<'a> FromSql<'a> for AnyInt {
    fn from_sql(ty: &Type, raw: &'a [u8]) -> std::result::Result<Self, Box<dyn std::error::Error + Sync + Send>> {
        Ok(Self(match *ty {
            Type::INT2 => i64::from(i16::from_sql(ty, raw)?),
            Type::INT4 => i64::from(i32::from_sql(ty, raw)?),
            _ => i64::from_sql(ty, raw)?,
        }))
    }

    fn accepts(ty: &Type) -> bool {
        matches!(*ty, Type::INT2 | Type::INT4 | Type::INT8)
    }
}

/// A result row; columns count from 0.
pub(crate) enum Row<'a> {
    Sqlite(&'a rusqlite::Row<'a>),
    Postgres(&'a tokio_postgres::Row),
    /// A row of integers, see [`super::copy_reader`].
    Copied(&'a [Option<i64>]),
}

const READ: &str = "reading a column";

impl Row<'_> {
    pub(crate) fn int(&self, column: usize) -> Result<i64> {
        self.opt_int(column)?.ok_or_else(|| missing(column))
    }

    pub(crate) fn opt_int(&self, column: usize) -> Result<Option<i64>> {
        match self {
            Self::Sqlite(row) => row.get(column).map_err(sqlite_error(READ)),
            Self::Postgres(row) => {
                let value: Option<AnyInt> = row.try_get(column).map_err(postgres_error(READ))?;
                Ok(value.map(|AnyInt(number)| number))
            }
            Self::Copied(values) => values.get(column).copied().ok_or_else(|| missing(column)),
        }
    }

    pub(crate) fn text(&self, column: usize) -> Result<&str> {
        self.opt_text(column)?.ok_or_else(|| missing(column))
    }

    pub(crate) fn opt_text(&self, column: usize) -> Result<Option<&str>> {
        match self {
            Self::Sqlite(row) => {
                let value = row.get_ref(column).map_err(sqlite_error(READ))?;
                value.as_str_or_null().map_err(|error| unreadable("text", &error))
            }
            Self::Postgres(row) => row.try_get(column).map_err(postgres_error(READ)),
            Self::Copied(_) => Err(not_copied("text")),
        }
    }

    pub(crate) fn blob(&self, column: usize) -> Result<&[u8]> {
        match self {
            Self::Sqlite(row) => {
                let value = row.get_ref(column).map_err(sqlite_error(READ))?;
                value.as_blob().map_err(|error| unreadable("blob", &error))
            }
            Self::Postgres(row) => row.try_get(column).map_err(postgres_error(READ)),
            Self::Copied(_) => Err(not_copied("blob")),
        }
    }

    /// Reads a value of any type, for copying whole tables.
    pub(crate) fn any(&self, column: usize) -> Result<SqlValue<'_>> {
        match self {
            Self::Sqlite(row) => {
                use rusqlite::types::ValueRef;
                Ok(match row.get_ref(column).map_err(sqlite_error(READ))? {
                    ValueRef::Null => SqlValue::Null,
                    ValueRef::Integer(number) => SqlValue::Int(number),
                    ValueRef::Text(text) => {
                        SqlValue::Text(std::str::from_utf8(text).map_err(|error| unreadable("text", &error))?)
                    }
                    ValueRef::Blob(bytes) => SqlValue::Blob(bytes),
                    ValueRef::Real(_) => return Err(unreadable("number", &"a fraction in an integer column")),
                })
            }
            Self::Postgres(row) => match row.columns()[column].type_() {
                ty if AnyInt::accepts(ty) => Ok(self.opt_int(column)?.map_or(SqlValue::Null, SqlValue::Int)),
                &Type::BYTEA => {
                    let bytes: Option<&[u8]> = row.try_get(column).map_err(postgres_error(READ))?;
                    Ok(bytes.map_or(SqlValue::Null, SqlValue::Blob))
                }
                _ => Ok(self.opt_text(column)?.map_or(SqlValue::Null, SqlValue::Text)),
            },
            Self::Copied(_) => Ok(self.opt_int(column)?.map_or(SqlValue::Null, SqlValue::Int)),
        }
    }

    pub(crate) fn timestamp(&self, column: usize) -> Result<Timestamp> {
        self.int(column).map(Timestamp::from_millis)
    }

    pub(crate) fn opt_timestamp(&self, column: usize) -> Result<Option<Timestamp>> {
        Ok(self.opt_int(column)?.map(Timestamp::from_millis))
    }

    /// Reads a boolean, for which only PostgreSQL has a type.
    pub(crate) fn flag(&self, column: usize) -> Result<bool> {
        match self {
            Self::Sqlite(row) => row.get(column).map_err(sqlite_error(READ)),
            Self::Postgres(row) => row.try_get(column).map_err(postgres_error(READ)),
            Self::Copied(_) => Err(not_copied("flag")),
        }
    }

    /// Reads an unsigned number.
    pub(crate) fn unsigned(&self, column: usize) -> Result<u64> {
        self.int(column).map(i64::cast_unsigned)
    }

    pub(crate) fn count(&self, column: usize) -> Result<u32> {
        u32::try_from(self.int(column)?).map_err(|error| unreadable("count", &error))
    }

    pub(crate) fn run(&self, column: usize) -> Result<RunId> {
        self.unsigned(column).map(RunId::from_number)
    }

    pub(crate) fn opt_case(&self, column: usize) -> Result<Option<CaseId>> {
        Ok(self.opt_int(column)?.map(|number| CaseId::from_number(number.cast_unsigned())))
    }
}

fn missing(column: usize) -> StoreError {
    StoreError::Unreadable { what: "row", why: format!("column {column} is empty") }
}

fn not_copied(what: &'static str) -> StoreError {
    unreadable(what, &"only integers are read by COPY")
}

fn unreadable(what: &'static str, why: &dyn std::fmt::Display) -> StoreError {
    StoreError::Unreadable { what, why: why.to_string() }
}
