//! The store on a PostgreSQL server as clouds manage them: it accepts connections over TLS only, with a certificate of its own
//! authority.

use std::{fs, path::Path, sync::OnceLock};

use doctor_store::{Store, StoreUrl};
use doctor_testbed::{
    certificates::{Authority, Issued, Validity},
    postgres::{CERTIFIED, PASSWORD, PostgresTestbedError, Server, ServerTls, Setup},
};
use tempfile::TempDir;

/// A server whose certificate is for `localhost`, and not for the address 127.0.0.1.
struct ManagedServer {
    server: Server,
    folder: TempDir,
}

static SERVER: OnceLock<Result<ManagedServer, PostgresTestbedError>> = OnceLock::new();

impl ManagedServer {
    fn start() -> Result<Self, PostgresTestbedError> {
        let (authority, other) = (Authority::new(), Authority::new());
        let Issued { certificate, key } = authority.issue(&["localhost"], Validity::Now);
        let tls = ServerTls { certificate, key, client_authority: authority.certificate.clone() };
        let server = Server::start(Setup { tls: Some(&tls), ..Setup::default() })?;
        let client = authority.issue(&[CERTIFIED], Validity::Now);
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in [
            ("ca.pem", &authority.certificate),
            ("other-ca.pem", &other.certificate),
            ("client.crt", &client.certificate),
            ("client.key", &client.key),
        ] {
            fs::write(folder.path().join(name), text).unwrap();
        }
        Ok(Self { server, folder })
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    /// Returns the URL of a new database for this account and host, with these parameters.
    fn url(&self, name: &str, account: &str, host: &str, parameters: &str) -> StoreUrl {
        // Some of the names are words of SQL.
        let url = self.server.create_database(&format!("over_tls_{name}")).unwrap();
        let url = url.replace("postgres@127.0.0.1", &format!("{account}@{host}"));
        format!("{url}?{parameters}").parse().unwrap()
    }

    fn store(&self, name: &str, host: &str, parameters: &str) -> Result<Store, String> {
        Store::open(&self.url(name, &format!("postgres:{PASSWORD}"), host, parameters)).map_err(|error| chain(&error))
    }
}

/// Returns `None`, after printing so, where there is no PostgreSQL; in CI that is a failure.
fn managed_server() -> Option<&'static ManagedServer> {
    match SERVER.get_or_init(ManagedServer::start) {
        Ok(server) => Some(server),
        Err(why) => {
            assert!(std::env::var("CI").as_deref() != Ok("true"), "CI must have PostgreSQL: {why}");
            println!("NOT RUN: postgres over TLS: {why}");
            None
        }
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// A published copy of the store uses another connection, in the copy format; `verify` reads all tables.
fn works(store: &Store, folder: &Path, name: &str) {
    let now = doctor_core::time::Timestamp::from_secs(1_794_700_800);
    let lease = store.acquire("tests", now, doctor_core::time::Span::minutes(5)).unwrap();
    store.renew(&lease, now).unwrap();
    assert!(store.verify().unwrap().is_consistent());
    let dump = folder.join(format!("{name}.backup"));
    store.backup(&dump).unwrap();
    assert!(dump.exists());
}

#[test]
fn every_mode_that_its_certificate_allows_reaches_a_server_that_requires_tls() {
    let Some(managed) = managed_server() else { return };
    let (ca, other) = (managed.path("ca.pem"), managed.path("other-ca.pem"));
    let channel_binding = "channel_binding=require";
    for (name, host, parameters) in [
        ("full", "localhost", format!("sslmode=verify-full&sslrootcert={ca}&{channel_binding}")),
        ("authority", "127.0.0.1", format!("sslmode=verify-ca&sslrootcert={ca}&{channel_binding}")),
        ("required", "127.0.0.1", format!("sslmode=require&{channel_binding}")),
        ("required_ca", "127.0.0.1", format!("sslmode=require&sslrootcert={ca}")),
        ("preferred", "127.0.0.1", "sslmode=prefer".to_owned()),
    ] {
        let store = managed.store(name, host, &parameters).unwrap_or_else(|why| panic!("{parameters}: {why}"));
        works(&store, managed.folder.path(), name);
    }
    for (name, host, parameters, expected) in [
        ("other_ca", "localhost", format!("sslmode=verify-full&sslrootcert={other}"), "BadSignature"),
        ("other_ca2", "localhost", format!("sslmode=verify-ca&sslrootcert={other}"), "BadSignature"),
        ("other_ca3", "localhost", format!("sslmode=require&sslrootcert={other}"), "BadSignature"),
        ("by_system", "localhost", "sslrootcert=system".to_owned(), "UnknownIssuer"),
        ("other_host", "127.0.0.1", format!("sslmode=verify-full&sslrootcert={ca}"), "not valid for name"),
        ("plain", "127.0.0.1", "sslmode=disable".to_owned(), "no encryption"),
        // A server on this machine is not asked for TLS; this one requires it.
        ("default", "127.0.0.1", "connect_timeout=30".to_owned(), "no encryption"),
    ] {
        let error = managed.store(name, host, &parameters).map(drop).unwrap_err();
        assert!(error.contains(expected), "{parameters}: {error}");
    }
}

#[test]
fn a_client_certificate_replaces_the_password() {
    let Some(managed) = managed_server() else { return };
    let ca = managed.path("ca.pem");
    let (certificate, key) = (managed.path("client.crt"), managed.path("client.key"));
    let parameters = format!("sslmode=verify-full&sslrootcert={ca}&sslcert={certificate}&sslkey={key}");
    let store = Store::open(&managed.url("certified", CERTIFIED, "localhost", &parameters)).unwrap();
    works(&store, managed.folder.path(), "certified");
    let without = managed.url("uncertified", CERTIFIED, "localhost", &format!("sslmode=verify-full&sslrootcert={ca}"));
    let error = Store::open(&without).map(drop).unwrap_err();
    assert!(chain(&error).contains("certificate"), "{}", chain(&error));
}

#[test]
fn a_renewed_authority_is_trusted_without_a_restart() {
    let Some(managed) = managed_server() else { return };
    let path = managed.folder.path().join("renewed.pem");
    fs::copy(managed.path("other-ca.pem"), &path).unwrap();
    let url = managed.url(
        "renewed",
        &format!("postgres:{PASSWORD}"),
        "localhost",
        &format!("sslmode=verify-full&sslrootcert={}", path.display()),
    );
    // Both authorities have the same name.
    let error = chain(&Store::open(&url).map(drop).unwrap_err());
    assert!(error.contains("BadSignature"), "{error}");
    // Both, as during a change of the authority.
    let both = [managed.path("other-ca.pem"), managed.path("ca.pem")].map(|path| fs::read_to_string(path).unwrap());
    fs::write(&path, both.concat()).unwrap();
    let store = Store::open(&url).unwrap();
    works(&store, managed.folder.path(), "renewed");
}

#[test]
fn a_server_without_tls_is_refused_where_tls_is_required() {
    let Some(_) = managed_server() else { return };
    let server = Server::start(Setup::default()).unwrap();
    let url = server.create_database("plain").unwrap();
    for parameters in ["sslmode=require", "sslmode=verify-ca", "sslrootcert=system"] {
        let url: StoreUrl = format!("{url}?{parameters}").parse().unwrap();
        let error = chain(&Store::open(&url).map(drop).unwrap_err());
        assert!(error.contains("does not support TLS"), "{parameters}: {error}");
    }
    let url: StoreUrl = format!("{url}?sslmode=prefer").parse().unwrap();
    works(&Store::open(&url).unwrap(), tempfile::tempdir().unwrap().path(), "plain");
}
