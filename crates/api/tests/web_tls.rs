//! The API over TLS, as seen by curl: a client that trusts the certificate is served, and a new certificate is loaded
//! without a restart.

use std::{
    path::Path,
    process::Command,
    sync::Arc,
    time::{Duration, Instant},
};

use doctor_api::operator_api::{ApiDeps, ApiServer, TlsFiles, WebConfig};
use doctor_backend::clock::SystemClock;
use doctor_checks::Catalogue;
use doctor_core::{policy::Policy, profile::Profiles};
use doctor_engine::settings::Settings;
use doctor_store::Store;

/// Creates a certificate for localhost; returns `false` if this machine cannot.
fn certificate(folder: &Path, files: &TlsFiles) -> bool {
    let mut command = Command::new("openssl");
    command.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]);
    command.args(["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]).current_dir(folder);
    command.arg("-keyout").arg(&files.key).arg("-out").arg(&files.certificate);
    command.output().is_ok_and(|output| output.status.success())
}

/// Returns the response to a client that trusts this certificate.
fn get_whoami(trusted: &Path, port: u16, scheme: &str) -> Option<String> {
    let url = format!("{scheme}://localhost:{port}/api/v1/whoami");
    let output = Command::new("curl").args(["-sS", "-m", "10", "--cacert"]).arg(trusted).arg(url).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

fn deps() -> ApiDeps {
    let settings = Settings::new(Policy::built_in(), Catalogue::built_in(), Profiles::default()).unwrap();
    ApiDeps {
        store: Store::open_in_memory().unwrap(),
        clock: Arc::new(SystemClock),
        cycle_trigger: Arc::default(),
        snapshot_feed: Arc::default(),
        share: None,
        settings,
        cli: None,
    }
}

#[test]
fn a_client_that_trusts_the_certificate_is_served_and_a_new_one_is_loaded_at_run_time() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let files = TlsFiles::new(at("tls.crt"), at("tls.key"));
    let tools_available = certificate(folder.path(), &files) && Command::new("curl").arg("--version").output().is_ok();
    if !tools_available {
        assert!(std::env::var("CI").as_deref() != Ok("true"), "openssl and curl are needed");
        println!("NOT RUN: the API over TLS: openssl or curl is not installed");
        return;
    }
    let config = WebConfig { tls: Some(files.clone()), ..WebConfig::listening_on("127.0.0.1:0".parse().unwrap()) };
    let bad = TlsFiles::new(files.key.clone(), files.certificate.clone());
    let error = ApiServer::open(&WebConfig { tls: Some(bad), ..config.clone() }, deps()).unwrap_err().to_string();
    assert!(error.contains("[web.tls]"), "{error}");
    let server = ApiServer::open(&config, deps()).unwrap();
    let port = server.address().port();
    std::fs::copy(&files.certificate, at("first.crt")).unwrap();
    let response = get_whoami(&at("first.crt"), port, "https").expect("the API responds");
    assert!(response.contains("\"role\":\"viewer\""), "{response}");
    assert_eq!(get_whoami(&at("first.crt"), port, "http"), None, "plain HTTP gets no response");

    let second = TlsFiles::new(at("second.crt"), at("second.key"));
    assert!(certificate(folder.path(), &second));
    assert_eq!(get_whoami(&second.certificate, port, "https"), None, "the new certificate is not loaded yet");
    std::fs::rename(&second.key, &files.key).unwrap();
    std::fs::copy(&second.certificate, &files.certificate).unwrap();
    let began = Instant::now();
    while get_whoami(&second.certificate, port, "https").is_none() {
        assert!(began.elapsed() < Duration::from_secs(240), "the new certificate is not loaded");
        std::thread::sleep(Duration::from_millis(200));
    }
}
