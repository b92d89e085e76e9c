//! Limits of a PostgreSQL session, set when it connects.
//!
//! A controller that is suspended inside a transaction (SIGSTOP, a frozen machine, a network that drops its packets) holds
//! its locks until the server ends the session. Without limits that is never, and neither a standby nor an operator's
//! command gets past it. Each limit is below the one that would have to end what it did not:
//!
//! | limit | value | reason |
//! |---|---|---|
//! | `idle_in_transaction_session_timeout` (writers) | 15 s | the client computes for milliseconds between two statements of a transaction; a quarter of the default lease, so that a frozen leader delays no takeover |
//! | `idle_in_transaction_session_timeout` (readers) | 5 min | no takeover waits for a reader, and one that copies the store works on what it has read; without a limit, one that is frozen would keep the server from removing old rows |
//! | `lock_timeout` | 30 s | longer than the one above, so that waiting for a frozen session succeeds |
//! | `statement_timeout` (writers) | 45 s | below the least stall limit of the control loop (60 s): a slow statement ends with an error that names it, not with the end of the process. Readers have none: a backup reads whole tables |
//! | `tcp_user_timeout` (server) | 30 s | ends a session whose client no longer reads while the server sends |
//! | `tcp_user_timeout`, keepalives (client) | 30 s | ends a call to a server that vanished |
//! | connecting (client) | `connect_timeout` and 10 s | a pooler may accept the socket and then be silent |
//! | renewal of the lease (client) | 60 s | longer than `statement_timeout`; for a pooler that becomes silent |
//!
//! A site sets other values in the URL of the store: server parameters by `options=-c%20lock_timeout%3D60s`, those of the
//! client by `tcp_user_timeout`, `keepalives_idle`, `keepalives_interval`, `keepalives_retries` and `connect_timeout`.

use std::{fmt::Write as _, time::Duration};

use tokio_postgres::Config;

/// What a session is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SessionKind {
    Writer,
    Reader,
}

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const NETWORK_TIMEOUT: Duration = Duration::from_secs(30);
/// Probes of an idle connection: it counts as lost after 15 + 3 × 5 seconds.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(15);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_RETRIES: u32 = 3;
/// How long TLS, authentication and the settings of a session may take after the socket is connected.
const SESSION_START: Duration = Duration::from_secs(10);
/// The most that `connect_timeout` can make of connecting. The clock has no moment that is arbitrarily far ahead.
const MAX_CONNECT: Duration = Duration::from_secs(3600);
/// How long the client waits for a renewal of the lease.
pub(super) const RENEWAL_LIMIT: Duration = Duration::from_secs(60);
/// What the client library assumes without a value in the URL.
const LIBRARY_KEEPALIVE_IDLE: Duration = Duration::from_secs(2 * 60 * 60);

/// Server parameters, their values in milliseconds, and the sessions that have them.
const SERVER_LIMITS: [(&str, u32, &[SessionKind]); 4] = [
    ("idle_in_transaction_session_timeout", 15_000, &[SessionKind::Writer]),
    ("idle_in_transaction_session_timeout", 300_000, &[SessionKind::Reader]),
    ("lock_timeout", 30_000, &[SessionKind::Writer, SessionKind::Reader]),
    ("statement_timeout", 45_000, &[SessionKind::Writer]),
];
/// Servers before version 12 do not have this one.
const SERVER_TCP_USER_TIMEOUT: (&str, u32) = ("tcp_user_timeout", 30_000);

/// Sets the limits of the client that the URL leaves open.
pub(super) fn set_client_limits(config: &mut Config) {
    if config.get_connect_timeout().is_none() {
        config.connect_timeout(CONNECT_TIMEOUT);
    }
    if config.get_tcp_user_timeout().is_none() {
        config.tcp_user_timeout(NETWORK_TIMEOUT);
    }
    if config.get_keepalives_idle() == LIBRARY_KEEPALIVE_IDLE {
        config.keepalives_idle(KEEPALIVE_IDLE);
    }
    if config.get_keepalives_interval().is_none() {
        config.keepalives_interval(KEEPALIVE_INTERVAL);
    }
    if config.get_keepalives_retries().is_none() {
        config.keepalives_retries(KEEPALIVE_RETRIES);
    }
}

/// Returns how long it may take in all to open a session.
pub(super) fn connect_limit(config: &Config) -> Duration {
    let hosts = config.get_hosts().len().max(config.get_hostaddrs().len()).max(1);
    let sockets = config.get_connect_timeout().copied().unwrap_or(CONNECT_TIMEOUT);
    let limit = sockets.saturating_mul(u32::try_from(hosts).unwrap_or(u32::MAX)).saturating_add(SESSION_START);
    limit.min(MAX_CONNECT)
}

/// Returns the statements that set up a new session.
pub(super) fn setup_statements(config: &Config, kind: SessionKind) -> String {
    let given = given_parameters(config.get_options().unwrap_or_default());
    let is_open = |name: &str| !given.iter().any(|given| given == name);
    // Every statement looks rows up by key, so planning for specific values gains nothing.
    let mut sql = "SET plan_cache_mode TO force_generic_plan".to_owned();
    for (name, millis, _) in SERVER_LIMITS.iter().filter(|(name, _, kinds)| kinds.contains(&kind) && is_open(name)) {
        let _infallible = write!(sql, "; SET {name} TO {millis}");
    }
    let (name, millis) = SERVER_TCP_USER_TIMEOUT;
    if is_open(name) {
        let _infallible =
            write!(sql, "; SELECT set_config(name, '{millis}', false) FROM pg_settings WHERE name = '{name}'");
    }
    sql
}

/// Returns the names of the server parameters in `options`, each of which is `-c NAME=VALUE`, `-cNAME=VALUE` or
/// `--NAME=VALUE`. The server ignores case, and takes a dash for an underscore.
fn given_parameters(options: &str) -> Vec<String> {
    let names = options.split_whitespace().filter_map(|word| word.split_once('=')).map(|(name, _)| {
        let name = name.strip_prefix("--").or_else(|| name.strip_prefix("-c")).unwrap_or(name);
        name.to_ascii_lowercase().replace('-', "_")
    });
    names.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(url: &str) -> Config {
        let mut config: Config = url.parse().unwrap();
        set_client_limits(&mut config);
        config
    }

    #[test]
    fn limits_in_the_url_take_precedence() {
        let given = config(
            "postgres://d@h/d?options=-c%20lock_timeout%3D7s&tcp_user_timeout=9&keepalives_idle=8&connect_timeout=3",
        );
        let sql = setup_statements(&given, SessionKind::Writer);
        assert!(!sql.contains("SET lock_timeout"), "{sql}");
        assert!(sql.contains("SET idle_in_transaction_session_timeout TO 15000"), "{sql}");
        assert_eq!(given.get_tcp_user_timeout(), Some(&Duration::from_secs(9)));
        assert_eq!(given.get_keepalives_idle(), Duration::from_secs(8));
        assert_eq!(given.get_connect_timeout(), Some(&Duration::from_secs(3)));
    }

    #[test]
    fn a_parameter_in_the_url_is_compared_by_its_whole_name() {
        let other = config("postgres://d@h/d?options=-c%20deadlock_timeout%3D7s");
        assert!(setup_statements(&other, SessionKind::Writer).contains("SET lock_timeout TO 30000"));
        for given in ["-clock_timeout=7s", "--lock-timeout=7s", "-c%20work_mem=1MB%20-c%20Lock_Timeout=7s"] {
            let sql = setup_statements(&config(&format!("postgres://d@h/d?options={given}")), SessionKind::Writer);
            assert!(!sql.contains("SET lock_timeout"), "{given}: {sql}");
        }
    }

    #[test]
    fn a_reader_may_idle_in_a_transaction_for_longer_than_a_writer() {
        let plain = config("postgres://d@h/d");
        let idle = |kind| {
            let sql = setup_statements(&plain, kind);
            sql.split("; ").find(|set| set.contains("idle_in_transaction")).map(str::to_owned)
        };
        let set = |millis: u32| Some(format!("SET idle_in_transaction_session_timeout TO {millis}"));
        assert_eq!((idle(SessionKind::Writer), idle(SessionKind::Reader)), (set(15_000), set(300_000)));
    }

    #[test]
    fn opening_a_session_is_limited_beyond_the_limit_on_each_socket() {
        for (url, seconds) in [
            ("postgres://d@h/d", 20),
            ("postgres://d@h/d?connect_timeout=30", 40),
            ("postgres://d@h1,h2/d?connect_timeout=0", 30),
        ] {
            assert_eq!(connect_limit(&config(url)), Duration::from_secs(seconds), "{url}");
        }
    }

    #[test]
    fn only_writers_have_a_limit_on_statements() {
        let plain = config("postgres://d@h/d");
        assert!(setup_statements(&plain, SessionKind::Writer).contains("SET statement_timeout TO 45000"));
        assert!(!setup_statements(&plain, SessionKind::Reader).contains("statement_timeout TO"));
        assert_eq!(plain.get_keepalives_idle(), KEEPALIVE_IDLE);
    }
}
