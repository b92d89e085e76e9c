//! PostgreSQL sessions, for sites with several controllers. A session is one connection with its prepared statements.
//!
//! A round trip costs both sides more than the row it carries. A statement whose result the caller does not need is
//! queued in the session until the next query, and the queue is sent together with it: a batch of results takes two
//! round trips, whatever it writes. The server executes the statements in order. The first failure is the one reported,
//! and the server rejects all later statements until the end of the transaction. Each statement also costs the server a
//! reply, so consecutive ones that change different tables are merged into one.

use std::{
    borrow::Cow,
    collections::HashMap,
    future::{Future, poll_fn},
    pin::{Pin, pin},
    task::Poll,
    time::{Duration, Instant},
};

use futures_util::StreamExt;
use tokio::{runtime::Runtime, time::timeout_at};
use tokio_postgres::{Client, Config, Row, Statement, types::ToSql};

use super::{
    ColumnType, SqlValue,
    batch::{Batch, Column},
    postgres_error,
    postgres_limits::{SessionKind, connect_limit, set_client_limits, setup_statements},
    postgres_tls::{PgTls, TlsParameters},
};
use crate::error::{Result, StoreError};

/// Rows of a streamed result that are processed together.
const ROWS: usize = 512;
/// Limit on queued bytes: a store being restored can exceed memory.
const MAX_QUEUED_BYTES: usize = 8 << 20;
/// Time allowed beyond the deadline. The server cancels a statement at the deadline; this bounds the wait for a server
/// that does not even report it.
const GRACE: Duration = Duration::from_secs(1);

/// Where the server is, and how to connect to it.
pub(crate) struct PgServer {
    config: Config,
    tls: PgTls,
    /// Without the password, for errors.
    name: String,
}

/// Parses the URL.
pub(super) fn server(url: &str, redacted_url: &str) -> Result<PgServer> {
    let bad_url = |why: String| StoreError::BadUrl { text: redacted_url.to_owned(), why };
    let (tls, url) = TlsParameters::take(url);
    let mut config: Config = url.parse().map_err(|error: tokio_postgres::Error| {
        bad_url(std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string))
    })?;
    let tls = tls.resolve(&config).map_err(bad_url)?;
    config.ssl_mode(tls.mode());
    if config.get_application_name().is_none() {
        config.application_name("cluster-doctor");
    }
    set_client_limits(&mut config);
    Ok(PgServer { config, tls, name: redacted_url.to_owned() })
}

pub(crate) struct PgSession {
    /// Runs the connection, which makes progress only while a caller waits for a reply.
    runtime: Runtime,
    client: Client,
    prepared: HashMap<String, Statement>,
    /// Sent before the next query.
    queued: Vec<QueuedStatement>,
    /// Sent after `waiting`: contended rows are locked as late as possible.
    queued_last: Vec<QueuedStatement>,
    queued_bytes: usize,
    /// Results of announced queries of this transaction.
    prefetched: Vec<PrefetchedQuery>,
    /// The caller's deadline.
    pub(super) deadline: Option<Instant>,
    /// The server's state is unknown; the session cannot be used again.
    unusable: bool,
}

/// An announced query, with its rows once the server has replied.
struct PrefetchedQuery {
    sql: String,
    keys: Vec<i64>,
    rows: Vec<Row>,
}

/// A queued statement.
struct QueuedStatement {
    operation: &'static str,
    what: QueuedKind,
}

enum QueuedKind {
    Script(Cow<'static, str>),
    Batch(Batch),
    Prefetch { sql: String, keys: Vec<i64> },
}

/// The same with its prepared statement.
enum Ready {
    Script(Cow<'static, str>),
    Batch(Statement, Vec<Column>),
    Foreseen { statement: Statement, sql: String, keys: Vec<i64> },
}

/// When a queued statement runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SendOrder {
    InOrder,
    Last,
}

impl PgSession {
    pub(super) fn connect(server: &PgServer, kind: SessionKind) -> Result<Self> {
        Self::connect_until(server, kind, None)
    }

    pub(super) fn connect_until(server: &PgServer, kind: SessionKind, until: Option<Instant>) -> Result<Self> {
        Self::connect_within(server, kind, until, connect_limit(&server.config))
    }

    /// Connects until the caller's deadline, and no longer than `limit`.
    fn connect_within(server: &PgServer, kind: SessionKind, until: Option<Instant>, limit: Duration) -> Result<Self> {
        let end = Instant::now() + limit;
        let late = |operation| match until {
            Some(until) if until <= end => StoreError::DeadlineExceeded { operation },
            _ => {
                let why = format!("the server has not answered within {} s", limit.as_secs());
                StoreError::CannotOpen { path: server.name.clone(), why }
            }
        };
        let end = Some(until.map_or(end, |until| until.min(end)));
        let unusable = |why: String| StoreError::Tls { database: server.name.clone(), why };
        let connector = server.tls.connector().map_err(unusable)?;
        let no_runtime =
            |error: std::io::Error| StoreError::Refused { operation: "connecting", why: error.to_string() };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(no_runtime)?;
        let connected = wait(&runtime, end, server.config.connect(connector));
        let connected = connected.ok_or_else(|| late("connecting"))?;
        let (client, connection) = connected.map_err(postgres_error("connecting"))?;
        // Pending queries receive the error that ends the connection.
        runtime.spawn(async move { drop(connection.await) });
        let statements = setup_statements(&server.config, kind);
        let settings = client.batch_execute(&statements);
        let set = wait(&runtime, end, settings).ok_or_else(|| late("setting up"))?;
        set.map_err(postgres_error("setting up"))?;
        Ok(Self {
            runtime,
            client,
            prepared: HashMap::new(),
            queued: Vec::new(),
            queued_last: Vec::new(),
            queued_bytes: 0,
            prefetched: Vec::new(),
            deadline: until,
            unusable: false,
        })
    }

    pub(super) fn is_closed(&self) -> bool {
        self.unusable || self.client.is_closed()
    }

    /// Unwraps a reply. A missed deadline makes the session unusable.
    fn answered<T>(&mut self, operation: &'static str, answer: Option<T>) -> Result<T> {
        self.unusable |= answer.is_none();
        answer.ok_or(StoreError::DeadlineExceeded { operation })
    }

    /// Queues the start of a transaction; it is sent with the next query.
    pub(super) fn begin(&mut self, sql: Cow<'static, str>) {
        self.clear_queue();
        self.queued.push(QueuedStatement { operation: "beginning a transaction", what: QueuedKind::Script(sql) });
    }

    /// Rolls back a failed transaction. A session that cannot roll back is closed and replaced.
    pub(super) fn roll_back(&mut self) {
        if self.unusable {
            return;
        }
        self.clear_queue();
        if self.script("rolling back", "ROLLBACK").is_err() {
            self.prepared.clear();
        }
    }

    /// Discards everything queued by the previous transaction.
    fn clear_queue(&mut self) {
        self.queued.clear();
        self.queued_last.clear();
        self.queued_bytes = 0;
        self.prefetched.clear();
    }

    fn prepare(&mut self, operation: &'static str, sql: &str) -> Result<Statement> {
        if let Some(statement) = self.prepared.get(sql) {
            return Ok(statement.clone());
        }
        let prepared = wait(&self.runtime, self.deadline, self.client.prepare(sql));
        let statement = self.answered(operation, prepared)?.map_err(postgres_error(operation))?;
        self.prepared.insert(sql.to_owned(), statement.clone());
        Ok(statement)
    }

    /// Sends the queue and then a query, and waits for all replies.
    fn flush_and_query<T>(
        &mut self,
        operation: &'static str,
        question: impl AsyncFnOnce(&Client) -> std::result::Result<T, tokio_postgres::Error>,
    ) -> Result<T> {
        self.queued_bytes = 0;
        let mut ready = Vec::new();
        for waiting in merge_statements(std::mem::take(&mut self.queued))
            .into_iter()
            .chain(merge_statements(std::mem::take(&mut self.queued_last)))
        {
            let operation = waiting.operation;
            let one = match waiting.what {
                QueuedKind::Script(sql) => Ready::Script(sql),
                QueuedKind::Batch(Batch { sql, columns, .. }) => Ready::Batch(self.prepare(operation, &sql)?, columns),
                QueuedKind::Prefetch { sql, keys } => {
                    Ready::Foreseen { statement: self.prepare(operation, &sql)?, sql, keys }
                }
            };
            ready.push((operation, one));
        }
        let client = &self.client;
        let before: Vec<SendFuture<'_>> = ready
            .into_iter()
            .map(|(operation, one)| Box::pin(send(client, operation, one)) as SendFuture<'_>)
            .collect();
        let last = async { question(client).await.map_err(postgres_error(operation)) };
        let answers = wait(&self.runtime, self.deadline, send_in_order(before, last));
        let (foreseen, answer) = self.answered(operation, answers)??;
        self.prefetched.extend(foreseen);
        Ok(answer)
    }

    pub(super) fn script(&mut self, operation: &'static str, sql: &str) -> Result<()> {
        self.flush_and_query(operation, async |client| client.batch_execute(sql).await)
    }

    pub(super) fn execute(&mut self, operation: &'static str, sql: &str, vals: &[SqlValue<'_>]) -> Result<u64> {
        let statement = self.prepare(operation, sql)?;
        let params = params(vals);
        self.flush_and_query(operation, async |client| client.execute(&statement, &params).await)
    }

    /// Streams rows to `visit`, for results that may exceed memory.
    pub(super) fn stream(
        &mut self,
        operation: &'static str,
        sql: &str,
        vals: &[SqlValue<'_>],
        visit: &mut dyn FnMut(&Row) -> Result<()>,
    ) -> Result<()> {
        let statement = self.prepare(operation, sql)?;
        let rows = self.flush_and_query(operation, async |client| client.query_raw(&statement, vals.iter()).await)?;
        let mut some = pin!(rows.ready_chunks(ROWS));
        loop {
            let next = wait(&self.runtime, self.deadline, some.next());
            let Some(rows) = self.answered(operation, next)? else { break };
            for row in rows {
                visit(&row.map_err(postgres_error(operation))?)?;
            }
        }
        Ok(())
    }

    /// Returns the whole result: waiting for each row costs more than the row.
    pub(super) fn query(&mut self, operation: &'static str, sql: &str, vals: &[SqlValue<'_>]) -> Result<Vec<Row>> {
        let statement = self.prepare(operation, sql)?;
        let params = params(vals);
        self.flush_and_query(operation, async |client| client.query(&statement, &params).await)
    }

    /// Streams the result of a query without parameters in the server's binary copy format.
    pub(super) fn copy_out(
        &mut self,
        operation: &'static str,
        sql: &str,
        visit: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let statement = self.prepare(operation, &format!("COPY ({sql}) TO STDOUT (FORMAT binary)"))?;
        self.flush_and_query(operation, async |client| {
            let mut pieces = pin!(client.copy_out(&statement).await?);
            let mut read = Ok(());
            // Drain the copy even after a parse error; the connection is unusable otherwise.
            while let Some(piece) = pieces.next().await {
                let piece = piece?;
                read = read.and_then(|()| visit(&piece));
            }
            Ok(read)
        })?
    }

    pub(super) fn query_keys(&mut self, operation: &'static str, sql: &str, keys: &[i64]) -> Result<Vec<Row>> {
        let same = |one: &PrefetchedQuery| one.sql == sql && one.keys == keys;
        if let Some(index) = self.prefetched.iter().position(same) {
            return Ok(self.prefetched.swap_remove(index).rows);
        }
        let statement = self.prepare(operation, sql)?;
        self.flush_and_query(operation, async |client| client.query(&statement, &[&keys]).await)
    }

    pub(super) fn prefetch_keys(&mut self, operation: &'static str, sql: &str, keys: &[i64]) {
        self.queued.push(QueuedStatement {
            operation,
            what: QueuedKind::Prefetch { sql: sql.to_owned(), keys: keys.to_vec() },
        });
    }

    /// Executes a batch, each column as one array. Returns the number of rows changed.
    pub(super) fn execute_arrays(
        &mut self,
        operation: &'static str,
        sql: &str,
        kinds: &[ColumnType],
        rows: &[SqlValue<'_>],
    ) -> Result<u64> {
        let statement = self.prepare(operation, sql)?;
        let Batch { columns, .. } = Batch::new(sql, kinds, rows);
        self.flush_and_query(operation, async |client| client.execute_raw(&statement, &columns).await)
    }

    /// As [`Self::execute_arrays`], without the row count: it is sent with the next query or the end of the
    /// transaction.
    pub(super) fn defer_arrays(
        &mut self,
        operation: &'static str,
        sql: &str,
        kinds: &[ColumnType],
        rows: &[SqlValue<'_>],
        when: SendOrder,
    ) -> Result<()> {
        let batch = Batch::new(sql, kinds, rows);
        self.queued_bytes += batch.bytes();
        let waiting = QueuedStatement { operation, what: QueuedKind::Batch(batch) };
        match when {
            SendOrder::InOrder => self.queued.push(waiting),
            SendOrder::Last => self.queued_last.push(waiting),
        }
        if self.queued_bytes < MAX_QUEUED_BYTES { Ok(()) } else { self.flush_and_query(operation, async |_| Ok(())) }
    }
}

/// Runs the future to completion. Returns `None` if it misses the deadline.
fn wait<T>(runtime: &Runtime, until: Option<Instant>, answer: impl Future<Output = T>) -> Option<T> {
    let mut came = None;
    drive(runtime, until, pin!(async { came = Some(answer.await) }));
    came
}

/// Not generic: the runtime's loop is long and would be compiled for every query type.
fn drive(runtime: &Runtime, until: Option<Instant>, work: Pin<&mut dyn Future<Output = ()>>) {
    match until {
        None => runtime.block_on(work),
        Some(until) => {
            let _in_time = runtime.block_on(async { timeout_at((until + GRACE).into(), work).await });
        }
    }
}

impl std::fmt::Debug for PgSession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PgSession").field("prepared", &self.prepared.len()).finish_non_exhaustive()
    }
}

fn params<'a>(vals: &'a [SqlValue<'_>]) -> Vec<&'a (dyn ToSql + Sync)> {
    vals.iter().map(|val| val as &(dyn ToSql + Sync)).collect()
}

/// Merges consecutive statements as far as they change different tables.
fn merge_statements(waiting: Vec<QueuedStatement>) -> Vec<QueuedStatement> {
    let mut merged: Vec<QueuedStatement> = Vec::with_capacity(waiting.len());
    for next in waiting {
        let rest = match (merged.last_mut(), next.what) {
            (Some(QueuedStatement { what: QueuedKind::Batch(last), .. }), QueuedKind::Batch(batch)) => {
                last.join(batch).map(QueuedKind::Batch)
            }
            (_, what) => Some(what),
        };
        merged.extend(rest.map(|what| QueuedStatement { operation: next.operation, what }));
    }
    merged
}

type SendFuture<'a> = Pin<Box<dyn Future<Output = Result<Option<PrefetchedQuery>>> + 'a>>;

async fn send(client: &Client, operation: &'static str, ready: Ready) -> Result<Option<PrefetchedQuery>> {
    let sent = match ready {
        Ready::Script(sql) => client.batch_execute(&sql).await.map(|()| None),
        Ready::Batch(statement, columns) => client.execute_raw(&statement, &columns).await.map(|_| None),
        Ready::Foreseen { statement, sql, keys } => {
            let rows = client.query(&statement, &[&keys]).await;
            rows.map(|rows| Some(PrefetchedQuery { sql, keys, rows }))
        }
    };
    sent.map_err(postgres_error(operation))
}

/// Runs all statements concurrently, sent in order: a query is sent when it is first polled. Returns the first error.
async fn send_in_order<T>(
    mut before: Vec<SendFuture<'_>>,
    last: impl Future<Output = Result<T>>,
) -> Result<(Vec<PrefetchedQuery>, T)> {
    let mut last = pin!(last);
    let mut answers: Vec<Option<Result<Option<PrefetchedQuery>>>> = before.iter().map(|_| None).collect();
    let mut answer = None;
    poll_fn(|context| {
        for (one, answer) in before.iter_mut().zip(&mut answers).filter(|(_, answer)| answer.is_none()) {
            if let Poll::Ready(ready) = one.as_mut().poll(context) {
                *answer = Some(ready);
            }
        }
        if answer.is_none()
            && let Poll::Ready(ready) = last.as_mut().poll(context)
        {
            answer = Some(ready);
        }
        if answers.iter().all(Option::is_some) && answer.is_some() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    let foreseen: Result<Vec<Option<PrefetchedQuery>>> = answers.into_iter().flatten().collect();
    let foreseen = foreseen?.into_iter().flatten().collect();
    Ok((foreseen, answer.expect("polled until ready")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_accepts_a_connection_and_is_silent_is_given_up() {
        // The kernel accepts for it.
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("postgres://doctor@{}/doctor?sslmode=disable", silent.local_addr().unwrap());
        let server = server(&url, "shown").unwrap();
        let connect =
            |until, limit| PgSession::connect_within(&server, SessionKind::Writer, until, limit).map(drop).unwrap_err();
        let error = connect(None, Duration::ZERO);
        assert!(matches!(&error, StoreError::CannotOpen { path, .. } if path == "shown"), "{error}");
        let error = connect(Some(Instant::now()), Duration::from_secs(3600));
        assert!(matches!(error, StoreError::DeadlineExceeded { .. }), "{error}");
    }

    #[test]
    fn a_url_is_parsed_with_its_tls_parameters_and_an_invalid_one_is_named() {
        let url = "postgres://doctor@db.example/doctor?sslmode=verify-full&sslrootcert=/ca.pem&connect_timeout=3";
        let server = server(url, "shown").unwrap();
        assert_eq!(server.config.get_ssl_mode(), tokio_postgres::config::SslMode::Require);
        assert_eq!(server.config.get_connect_timeout(), Some(&Duration::from_secs(3)));
        for bad in ["sslmode=maybe", "sslmod=require", "connect_timeout=x"] {
            let url = format!("postgres://doctor@db.example/doctor?{bad}");
            let error = super::server(&url, "shown").map(drop).unwrap_err().to_string();
            assert!(error.contains("`shown`"), "{error}");
        }
    }
}
