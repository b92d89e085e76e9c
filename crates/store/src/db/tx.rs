//! A transaction in progress, through which all statements run.

use std::{collections::BTreeSet, sync::Arc};

use super::{ColumnType, Row, SendOrder, SqlValue, Visit, copy_reader::CopyReader, postgres::PgSession, sqlite_error};
use crate::{
    error::{Result, StoreError},
    id_cache::IdCache,
};

/// The connection a transaction runs on.
pub(crate) enum Conn<'a> {
    Sqlite(&'a rusqlite::Connection),
    Postgres(&'a mut PgSession),
}

/// A transaction and the names known to it. Names it adds are discarded if it fails.
pub(crate) struct Tx<'a> {
    pub(crate) conn: Conn<'a>,
    pub(crate) ids: Arc<IdCache>,
    /// The highest bundle id, set in a controller's write.
    pub(crate) last_pack: i64,
    /// The schema of the store, set by [`Tx::highest_ids`].
    pub(crate) schema: i64,
}

impl<'a> Tx<'a> {
    pub(crate) const fn new(conn: Conn<'a>, names: Arc<IdCache>) -> Self {
        Self { conn, ids: names, last_pack: 0, schema: 0 }
    }
}

impl Tx<'_> {
    pub(crate) const fn is_sqlite(&self) -> bool {
        matches!(self.conn, Conn::Sqlite(_))
    }

    /// Runs one statement and returns the number of rows changed.
    pub(crate) fn execute(&mut self, operation: &'static str, sql: &str, vals: &[SqlValue<'_>]) -> Result<u64> {
        match &mut self.conn {
            Conn::Sqlite(connection) => {
                let fail = sqlite_error(operation);
                let mut statement = connection.prepare_cached(&numbered(sql)).map_err(&fail)?;
                statement.execute(rusqlite::params_from_iter(vals)).map(|rows| rows as u64).map_err(&fail)
            }
            Conn::Postgres(session) => session.execute(operation, sql, vals),
        }
    }

    /// Runs several statements without parameters.
    pub(crate) fn script(&mut self, operation: &'static str, sql: &str) -> Result<()> {
        match &mut self.conn {
            Conn::Sqlite(connection) => connection.execute_batch(sql).map_err(sqlite_error(operation)),
            Conn::Postgres(session) => session.script(operation, sql),
        }
    }

    /// Lifts the server's limit on statements until the end of this transaction, for work on whole tables.
    pub(crate) fn lift_statement_timeout(&mut self) -> Result<()> {
        match &mut self.conn {
            Conn::Sqlite(_) => Ok(()),
            Conn::Postgres(session) => session.script("setting up", "SET LOCAL statement_timeout TO 0"),
        }
    }

    /// Lifts the server's limit on waiting for locks until the end of this transaction.
    pub(crate) fn lift_lock_timeout(&mut self) -> Result<()> {
        match &mut self.conn {
            Conn::Sqlite(_) => Ok(()),
            Conn::Postgres(session) => session.script("setting up", "SET LOCAL lock_timeout TO 0"),
        }
    }

    /// Passes rows to `visit` as they arrive: the result may exceed memory.
    pub(crate) fn rows(
        &mut self,
        operation: &'static str,
        sql: &str,
        vals: &[SqlValue<'_>],
        mut visit: impl FnMut(&Row<'_>) -> Result<()>,
    ) -> Result<()> {
        self.visit_rows(operation, sql, vals, &mut visit)
    }

    fn visit_rows(
        &mut self,
        operation: &'static str,
        sql: &str,
        vals: &[SqlValue<'_>],
        visit: Visit<'_>,
    ) -> Result<()> {
        match &mut self.conn {
            Conn::Sqlite(connection) => {
                let fail = sqlite_error(operation);
                #[cfg(test)]
                plans::record_plan(connection, &numbered(sql));
                let mut statement = connection.prepare_cached(&numbered(sql)).map_err(&fail)?;
                let mut rows = statement.query(rusqlite::params_from_iter(vals)).map_err(&fail)?;
                while let Some(row) = rows.next().map_err(&fail)? {
                    visit(&Row::Sqlite(row))?;
                }
                Ok(())
            }
            Conn::Postgres(session) => session.stream(operation, sql, vals, &mut |row| visit(&Row::Postgres(row))),
        }
    }

    /// Returns all rows of a result that fits in memory.
    pub(crate) fn all<T>(
        &mut self,
        operation: &'static str,
        sql: &str,
        vals: &[SqlValue<'_>],
        mut read: impl FnMut(&Row<'_>) -> Result<T>,
    ) -> Result<Vec<T>> {
        if let Conn::Postgres(session) = &mut self.conn {
            return session.query(operation, sql, vals)?.iter().map(|row| read(&Row::Postgres(row))).collect();
        }
        let mut found = Vec::new();
        self.rows(operation, sql, vals, |row| {
            found.push(read(row)?);
            Ok(())
        })?;
        Ok(found)
    }

    /// As [`Self::all`], for a long result of integers from a query without parameters.
    pub(crate) fn all_integers<T>(
        &mut self,
        operation: &'static str,
        sql: &str,
        mut read: impl FnMut(&Row<'_>) -> Result<T>,
    ) -> Result<Vec<T>> {
        let mut found = Vec::new();
        let mut add = |row: &Row<'_>| {
            found.push(read(row)?);
            Ok(())
        };
        match &mut self.conn {
            Conn::Sqlite(_) => self.rows(operation, sql, &[], add)?,
            Conn::Postgres(session) => {
                let mut copied = CopyReader::default();
                session.copy_out(operation, sql, &mut |piece| copied.feed(piece, &mut add))?;
                copied.finish()?;
            }
        }
        Ok(found)
    }

    /// Returns the first row, if any, of a short result.
    pub(crate) fn first<T>(
        &mut self,
        operation: &'static str,
        sql: &str,
        vals: &[SqlValue<'_>],
        mut read: impl FnMut(&Row<'_>) -> Result<T>,
    ) -> Result<Option<T>> {
        if let Conn::Postgres(session) = &mut self.conn {
            return session.query(operation, sql, vals)?.first().map(|row| read(&Row::Postgres(row))).transpose();
        }
        let mut found = None;
        self.rows(operation, sql, vals, |row| {
            if found.is_none() {
                found = Some(read(row)?);
            }
            Ok(())
        })?;
        Ok(found)
    }

    /// As [`Self::rows`], for a list of keys: the SQL contains `WHERE id IN {keys}`. Rows have no order, and rows of
    /// one key must not depend on other keys: SQLite runs one query per key, which is faster than building a table of
    /// keys per query; PostgreSQL runs one query in all.
    pub(crate) fn rows_by_key(
        &mut self,
        operation: &'static str,
        sql: &str,
        keys: &[i64],
        mut visit: impl FnMut(&Row<'_>) -> Result<()>,
    ) -> Result<()> {
        self.visit_rows_by_key(operation, sql, keys, &mut visit)
    }

    fn visit_rows_by_key(&mut self, operation: &'static str, sql: &str, keys: &[i64], visit: Visit<'_>) -> Result<()> {
        if keys.is_empty() {
            return Ok(());
        }
        match &mut self.conn {
            Conn::Sqlite(connection) => {
                let fail = sqlite_error(operation);
                let one = numbered(&sql.replace("IN {keys}", "= $1"));
                #[cfg(test)]
                plans::record_plan(connection, &one);
                let mut statement = connection.prepare_cached(&one).map_err(&fail)?;
                for key in keys.iter().collect::<BTreeSet<_>>() {
                    let mut rows = statement.query([key]).map_err(&fail)?;
                    while let Some(row) = rows.next().map_err(&fail)? {
                        visit(&Row::Sqlite(row))?;
                    }
                }
                Ok(())
            }
            Conn::Postgres(session) => session
                .query_keys(operation, &unnested(sql), keys)?
                .iter()
                .try_for_each(|row| visit(&Row::Postgres(row))),
        }
    }

    /// Announces a later call of [`Self::rows_by_key`]. PostgreSQL receives it with the next query, so that the rows are
    /// there then; SQLite has no round trip to save.
    pub(crate) fn prefetch(&mut self, operation: &'static str, sql: &str, keys: &[i64]) {
        if let Conn::Postgres(session) = &mut self.conn
            && !keys.is_empty()
        {
            session.prefetch_keys(operation, &unnested(sql), keys);
        }
    }

    /// Runs a statement for each of many rows: `sqlite` once per row with its values, `postgres` once with each column
    /// as an array. `rows` is flat, with `kinds.len()` values per row. PostgreSQL may receive it later, in order; an
    /// error then surfaces there.
    pub(crate) fn execute_each(
        &mut self,
        operation: &'static str,
        (sqlite, postgres): (&str, &str),
        kinds: &[ColumnType],
        rows: &[SqlValue<'_>],
    ) -> Result<()> {
        match &mut self.conn {
            _ if rows.is_empty() => Ok(()),
            Conn::Sqlite(connection) => for_each(connection, operation, sqlite, kinds, rows).map(drop),
            Conn::Postgres(session) => session.defer_arrays(operation, postgres, kinds, rows, SendOrder::InOrder),
        }
    }

    /// As [`Self::execute_each`], executed immediately. Returns the number of rows changed.
    pub(crate) fn execute_each_counted(
        &mut self,
        operation: &'static str,
        (sqlite, postgres): (&str, &str),
        kinds: &[ColumnType],
        rows: &[SqlValue<'_>],
    ) -> Result<u64> {
        match &mut self.conn {
            _ if rows.is_empty() => Ok(0),
            Conn::Sqlite(connection) => for_each(connection, operation, sqlite, kinds, rows),
            Conn::Postgres(session) => session.execute_arrays(operation, postgres, kinds, rows),
        }
    }

    /// Inserts many rows. `into` is `table (columns)`, `conflict` the clause for existing rows.
    pub(crate) fn insert_many(
        &mut self,
        operation: &'static str,
        into: &str,
        kinds: &[ColumnType],
        rows: &[SqlValue<'_>],
        conflict: &str,
    ) -> Result<()> {
        self.insert_rows(operation, into, kinds, rows, conflict, SendOrder::InOrder)
    }

    /// As [`Self::insert_many`], for rows that every transaction updates: they are locked only at its end, to keep others
    /// waiting as briefly as possible.
    pub(crate) fn upsert_contended(
        &mut self,
        operation: &'static str,
        into: &str,
        kinds: &[ColumnType],
        rows: &[SqlValue<'_>],
        conflict: &str,
    ) -> Result<()> {
        self.insert_rows(operation, into, kinds, rows, conflict, SendOrder::Last)
    }

    fn insert_rows(
        &mut self,
        operation: &'static str,
        into: &str,
        kinds: &[ColumnType],
        rows: &[SqlValue<'_>],
        conflict: &str,
        when: SendOrder,
    ) -> Result<()> {
        if rows.is_empty() {
            return Ok(());
        }
        let placeholders: Vec<String> = (1..=kinds.len()).map(|n| format!("${n}")).collect();
        match &mut self.conn {
            Conn::Sqlite(connection) => {
                let sql = format!("INSERT INTO {into} VALUES ({}) {conflict}", placeholders.join(","));
                for_each(connection, operation, &sql, kinds, rows).map(drop)
            }
            Conn::Postgres(session) => {
                let arrays: Vec<String> = placeholders
                    .iter()
                    .zip(kinds)
                    .map(|(placeholder, kind)| format!("{placeholder}::{}[]", kind.postgres()))
                    .collect();
                let sql = format!("INSERT INTO {into} SELECT * FROM UNNEST({}) {conflict}", arrays.join(","));
                session.defer_arrays(operation, &sql, kinds, rows, when)
            }
        }
    }

    /// Inserts a row and returns its id.
    pub(crate) fn insert(&mut self, operation: &'static str, sql: &str, vals: &[SqlValue<'_>]) -> Result<i64> {
        self.first(operation, &format!("{sql} RETURNING id"), vals, |row| row.int(0))?
            .ok_or_else(|| StoreError::Unreadable { what: "result", why: format!("{operation} returned no id") })
    }
}

fn for_each(
    connection: &rusqlite::Connection,
    operation: &'static str,
    sql: &str,
    kinds: &[ColumnType],
    rows: &[SqlValue<'_>],
) -> Result<u64> {
    let fail = sqlite_error(operation);
    let mut statement = connection.prepare_cached(&numbered(sql)).map_err(&fail)?;
    let mut changed = 0;
    for row in rows.chunks_exact(kinds.len()) {
        changed += statement.execute(rusqlite::params_from_iter(row)).map_err(&fail)? as u64;
    }
    Ok(changed)
}

impl ColumnType {
    const fn postgres(self) -> &'static str {
        match self {
            Self::Int => "int8",
            Self::Text => "text",
            Self::Blob => "bytea",
        }
    }
}

/// Rewrites the key list for PostgreSQL, which takes it as one array.
fn unnested(sql: &str) -> String {
    sql.replace("IN {keys}", "IN (SELECT unnest($1::int8[]))")
}

/// Rewrites placeholders for SQLite, which treats `$1` as a name and numbers names by appearance; `?1` is the first
/// value.
fn numbered(sql: &str) -> String {
    sql.replace('$', "?")
}

/// SQLite's query plans for the queries of a thread, for tests.
#[cfg(test)]
pub(crate) mod plans {
    use std::cell::RefCell;

    thread_local! {
        static RECORDED: RefCell<Option<Vec<String>>> = const { RefCell::new(None) };
    }

    pub(crate) fn record_plan(connection: &rusqlite::Connection, sql: &str) {
        RECORDED.with_borrow_mut(|recorded| {
            let Some(recorded) = recorded else { return };
            let mut statement = connection.prepare(&format!("EXPLAIN QUERY PLAN {sql}")).unwrap();
            let mut steps = statement.raw_query();
            while let Some(step) = steps.next().unwrap() {
                recorded.push(format!("{} -- {sql}", step.get::<_, String>(3).unwrap()));
            }
        });
    }

    /// Returns the plan steps of all queries that `ask` runs.
    pub(crate) fn record(ask: impl FnOnce()) -> Vec<String> {
        RECORDED.set(Some(Vec::new()));
        ask();
        RECORDED.take().unwrap_or_default()
    }
}
