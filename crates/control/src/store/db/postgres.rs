//! PostgreSQL, for sites with several controllers. One session is one connection with its prepared statements.

use std::{collections::HashMap, sync::Arc};

use postgres::{
    Client, Config, NoTls, Statement, config::SslMode, error::SqlState, fallible_iterator::FallibleIterator,
    types::ToSql,
};

use super::{Access, Conn, Kind, Tx, Val, postgres_error};
use crate::store::{
    error::{Result, StoreError},
    names::Names,
};

/// How often a transaction is tried again that PostgreSQL ended because of another one.
const TRIES: u32 = 5;

/// Reads the URL and refuses what this build cannot honour: a wish for TLS must not be silently ignored.
pub(super) fn config(url: &str, shown: &str) -> Result<Config> {
    if ["sslmode=verify-ca", "sslmode=verify-full"].iter().any(|mode| url.contains(mode)) {
        return Err(StoreError::TlsNotSupported { database: shown.to_owned() });
    }
    let mut config: Config = url.parse().map_err(|error: postgres::Error| StoreError::BadUrl {
        text: shown.to_owned(),
        why: std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string),
    })?;
    if config.get_ssl_mode() == SslMode::Require {
        return Err(StoreError::TlsNotSupported { database: shown.to_owned() });
    }
    if config.get_application_name().is_none() {
        config.application_name("cluster-doctor");
    }
    if config.get_connect_timeout().is_none() {
        config.connect_timeout(std::time::Duration::from_secs(10));
    }
    Ok(config)
}

pub(in crate::store) struct PgSession {
    client: Client,
    prepared: HashMap<String, Statement>,
}

impl PgSession {
    pub(super) fn connect(config: &Config) -> Result<Self> {
        let client = config.connect(NoTls).map_err(postgres_error("connecting"))?;
        Ok(Self { client, prepared: HashMap::new() })
    }

    pub(super) fn is_closed(&self) -> bool {
        self.client.is_closed()
    }

    pub(super) fn transaction<T>(
        &mut self,
        access: Access,
        names: &mut Arc<Names>,
        body: &mut dyn FnMut(&mut Tx<'_>) -> Result<T>,
    ) -> Result<T> {
        let mut tries = 0;
        loop {
            tries += 1;
            match self.attempt(access, names, body) {
                Err(StoreError::Postgres { source, .. }) if tries < TRIES && ended_by_another(&source) => {}
                result => return result,
            }
        }
    }

    fn attempt<T>(
        &mut self,
        access: Access,
        names: &mut Arc<Names>,
        body: &mut dyn FnMut(&mut Tx<'_>) -> Result<T>,
    ) -> Result<T> {
        let begin = match access {
            Access::ReadOnce => return body(&mut Tx { conn: Conn::Postgres(self), names: Arc::clone(names) }),
            Access::Read => "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY",
            Access::Write | Access::WriteUnsynced | Access::WriteAlone => "BEGIN",
        };
        self.script("beginning a transaction", begin)?;
        let mut tx = Tx { conn: Conn::Postgres(self), names: Arc::clone(names) };
        let result = body(&mut tx);
        let known = Arc::clone(&tx.names);
        match result {
            Ok(value) => {
                self.script("committing", "COMMIT")?;
                *names = known;
                Ok(value)
            }
            Err(error) => {
                // The first error is the one to tell; a session that cannot even roll back is closed and replaced.
                if self.script("rolling back", "ROLLBACK").is_err() {
                    self.prepared.clear();
                }
                Err(error)
            }
        }
    }

    fn prepare(&mut self, operation: &'static str, sql: &str) -> Result<Statement> {
        if let Some(statement) = self.prepared.get(sql) {
            return Ok(statement.clone());
        }
        let statement = self.client.prepare(sql).map_err(postgres_error(operation))?;
        self.prepared.insert(sql.to_owned(), statement.clone());
        Ok(statement)
    }

    pub(super) fn script(&mut self, operation: &'static str, sql: &str) -> Result<()> {
        self.client.batch_execute(sql).map_err(postgres_error(operation))
    }

    pub(super) fn execute(&mut self, operation: &'static str, sql: &str, vals: &[Val<'_>]) -> Result<u64> {
        let statement = self.prepare(operation, sql)?;
        let params: Vec<&(dyn ToSql + Sync)> = vals.iter().map(|val| val as &(dyn ToSql + Sync)).collect();
        self.client.execute(&statement, &params).map_err(postgres_error(operation))
    }

    /// Hands rows out as they come, for answers that may be larger than memory.
    pub(super) fn stream(
        &mut self,
        operation: &'static str,
        sql: &str,
        vals: &[Val<'_>],
        mut visit: impl FnMut(&postgres::Row) -> Result<()>,
    ) -> Result<()> {
        let fail = postgres_error(operation);
        let statement = self.prepare(operation, sql)?;
        let mut rows = self.client.query_raw(&statement, vals.iter()).map_err(&fail)?;
        while let Some(row) = rows.next().map_err(&fail)? {
            visit(&row)?;
        }
        Ok(())
    }

    /// The whole answer at once: to wait for each row costs more than the row.
    pub(super) fn query(&mut self, operation: &'static str, sql: &str, vals: &[Val<'_>]) -> Result<Vec<postgres::Row>> {
        let params: Vec<&(dyn ToSql + Sync)> = vals.iter().map(|val| val as &(dyn ToSql + Sync)).collect();
        let statement = self.prepare(operation, sql)?;
        self.client.query(&statement, &params).map_err(postgres_error(operation))
    }

    pub(super) fn query_keys(
        &mut self,
        operation: &'static str,
        sql: &str,
        keys: &[i64],
    ) -> Result<Vec<postgres::Row>> {
        let statement = self.prepare(operation, sql)?;
        self.client.query(&statement, &[&keys]).map_err(postgres_error(operation))
    }

    /// Each column travels as one array, so that a batch of any length is one statement and one round trip.
    pub(super) fn execute_arrays(
        &mut self,
        operation: &'static str,
        sql: &str,
        kinds: &[Kind],
        rows: &[Val<'_>],
    ) -> Result<u64> {
        let columns: Vec<Column<'_>> = kinds
            .iter()
            .enumerate()
            .map(|(i, kind)| Column::gather(*kind, rows.iter().skip(i).step_by(kinds.len())))
            .collect();
        let params: Vec<&(dyn ToSql + Sync)> = columns.iter().map(Column::param).collect();
        let statement = self.prepare(operation, sql)?;
        self.client.execute(&statement, &params).map_err(postgres_error(operation))
    }
}

impl std::fmt::Debug for PgSession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PgSession").field("prepared", &self.prepared.len()).finish_non_exhaustive()
    }
}

enum Column<'a> {
    Ints(Vec<Option<i64>>),
    Texts(Vec<Option<&'a str>>),
    Blobs(Vec<Option<&'a [u8]>>),
}

impl<'a> Column<'a> {
    fn gather<'r>(kind: Kind, values: impl Iterator<Item = &'r Val<'a>>) -> Self
    where
        'a: 'r,
    {
        match kind {
            Kind::Int => {
                Self::Ints(values.map(|val| if let Val::Int(number) = val { Some(*number) } else { None }).collect())
            }
            Kind::Text => {
                Self::Texts(values.map(|val| if let Val::Text(text) = val { Some(*text) } else { None }).collect())
            }
            Kind::Blob => {
                Self::Blobs(values.map(|val| if let Val::Blob(bytes) = val { Some(*bytes) } else { None }).collect())
            }
        }
    }

    fn param(&self) -> &(dyn ToSql + Sync) {
        match self {
            Self::Ints(column) => column,
            Self::Texts(column) => column,
            Self::Blobs(column) => column,
        }
    }
}

/// Deadlocks and serialization failures say nothing but "try again".
fn ended_by_another(error: &postgres::Error) -> bool {
    error
        .code()
        .is_some_and(|code| *code == SqlState::T_R_SERIALIZATION_FAILURE || *code == SqlState::T_R_DEADLOCK_DETECTED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wish_for_tls_is_refused_and_not_ignored() {
        for mode in ["require", "verify-ca", "verify-full"] {
            let url = format!("postgres://doctor@db.example/doctor?sslmode={mode}");
            let error = config(&url, &url).unwrap_err();
            assert!(matches!(error, StoreError::TlsNotSupported { .. }), "{mode}: {error}");
        }
        assert!(config("postgres://doctor@db.example/doctor?sslmode=disable", "x").is_ok());
        let error = config("postgres://doctor@db.example/doctor?sslmode=maybe", "shown").unwrap_err().to_string();
        assert!(error.contains("shown"), "{error}");
    }
}
