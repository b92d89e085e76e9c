//! A PostgreSQL database per test, on one server for the whole test process.

use std::sync::{
    OnceLock,
    atomic::{AtomicU32, Ordering},
};

use doctor_store::StoreUrl;

use doctor_testbed::postgres::{PostgresTestbedError, Server, Setup};

static SERVER: OnceLock<Result<Server, PostgresTestbedError>> = OnceLock::new();
static DATABASES: AtomicU32 = AtomicU32::new(0);

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
