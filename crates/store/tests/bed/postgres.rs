//! A PostgreSQL database per test, on one server for the whole test process.

use std::sync::{
    OnceLock,
    atomic::{AtomicU32, Ordering},
};

use doctor_store::StoreUrl;

use doctor_testbed::{
    certificates::{Authority, Validity},
    postgres::{PASSWORD, PostgresTestbedError, Server, ServerTls, Setup},
};

static SERVER: OnceLock<Result<Server, PostgresTestbedError>> = OnceLock::new();
static TLS_SERVER: OnceLock<Result<TlsServer, PostgresTestbedError>> = OnceLock::new();
static DATABASES: AtomicU32 = AtomicU32::new(0);

/// A server that requires TLS, and the certificate of its authority.
struct TlsServer {
    server: Server,
    authority: tempfile::NamedTempFile,
}

impl TlsServer {
    fn start() -> Result<Self, PostgresTestbedError> {
        let authority = Authority::new();
        let issued = authority.issue(&["localhost"], Validity::Now);
        let client_authority = authority.certificate.clone();
        let tls = ServerTls { certificate: issued.certificate, key: issued.key, client_authority };
        let server = Server::start(Setup { tls: Some(&tls), ..Setup::default() })?;
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &authority.certificate).unwrap();
        Ok(Self { server, authority: file })
    }
}

/// Creates an empty database on a server that requires TLS, and returns its URL with everything verified.
pub(crate) fn new_database_over_tls() -> Option<StoreUrl> {
    match TLS_SERVER.get_or_init(TlsServer::start) {
        Ok(TlsServer { server, authority }) => {
            let name = format!("test_{}", DATABASES.fetch_add(1, Ordering::Relaxed));
            let url = server.create_database(&name).unwrap();
            let url = url.replace("postgres@127.0.0.1", &format!("postgres:{PASSWORD}@localhost"));
            let authority = authority.path().display();
            let parameters = format!("sslmode=verify-full&sslrootcert={authority}&channel_binding=require");
            Some(format!("{url}?{parameters}").parse().unwrap())
        }
        Err(why) => {
            assert!(std::env::var("CI").as_deref() != Ok("true"), "CI must have PostgreSQL: {why}");
            println!("NOT RUN: postgres over TLS: {why}");
            None
        }
    }
}

/// Creates an empty database. Where there is no PostgreSQL, prints so and returns `None`; in CI that is a failure.
pub(crate) fn new_database() -> Option<StoreUrl> {
    match SERVER.get_or_init(|| Server::start(Setup::default())) {
        Ok(server) => {
            let name = format!("test_{}", DATABASES.fetch_add(1, Ordering::Relaxed));
            Some(server.create_database(&name).unwrap().parse().unwrap())
        }
        Err(why) => {
            assert!(std::env::var("CI").as_deref() != Ok("true"), "CI must have PostgreSQL: {why}");
            println!("NOT RUN: postgres: {why}");
            None
        }
    }
}
