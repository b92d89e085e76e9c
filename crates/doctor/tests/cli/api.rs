//! The API of real processes: a demo that keeps running, and a controller with tokens.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::{Child, Stdio},
    time::Duration,
};

use crate::{
    this_machine::Service,
    workdir::{Workdir, wait_until},
};

/// A child process that is killed when the test ends.
pub(crate) struct KillOnDrop(pub(crate) Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        // It may have exited already.
        let _already_exited = self.0.kill();
        let _already_exited = self.0.wait();
    }
}

/// Returns the status and the body.
pub(crate) fn get(address: &str, path: &str, token: Option<&str>) -> (u16, serde_json::Value) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let token = token.map_or_else(String::new, |token| format!("authorization: Bearer {token}\r\n"));
    write!(stream, "GET /api/v1{path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{token}\r\n").unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    let (head, body) = response.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), serde_json::from_str(body).unwrap_or_default())
}

#[test]
fn the_demo_continues_behind_the_api() {
    let workdir = Workdir::new();
    let args =
        ["demo", "--nodes", "8", "--days", "1", "--serve", "--listen", "127.0.0.1:0", "--speed", "3600", "--json"];
    let mut child = workdir.command(&args).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let out = child.stdout.take().unwrap();
    let running = KillOnDrop(child);
    let mut printed = String::new();
    let url = BufReader::new(out).lines().map_while(Result::ok).find_map(|line| {
        printed.push_str(&line);
        Some(line.split_once("http://")?.1.split('/').next()?.to_owned())
    });
    let address = url.unwrap_or_else(|| panic!("the output has no URL: {printed}"));
    let at = || get(&address, "/status", None).1["at"].as_str().unwrap_or_default().to_owned();
    let first = at();
    wait_until("time goes on", || at() > first);
    let (status, nodes) = get(&address, "/nodes", None);
    assert_eq!((status, nodes["items"].as_array().map(Vec::len)), (200, Some(8)));
    drop(running);
}

#[test]
fn the_api_requires_a_token_and_the_cli_revokes_it() {
    let workdir = Workdir::local();
    let config = workdir.read("doctor.toml");
    let with = |listen: &str| {
        workdir.write("doctor.toml", &config.replace("[backend", &format!("[web]\nlisten = \"{listen}\"\n[backend")));
    };
    with("0.0.0.0:0");
    workdir.expect(4, &["serve", "--cycles", "1"]).stderr_contains("doctor token create");
    with("127.0.0.1:0");
    let created = workdir.json(&["token", "create", "ops", "--role", "operator", "--yes"]);
    let token = created["token"].as_str().unwrap();
    with("0.0.0.0:0");
    workdir.expect(4, &["serve", "--cycles", "1"]).stderr_contains("plain = true");
    with("127.0.0.1:0");
    workdir.expect(1, &["token", "create", "ops", "--yes"]).stderr_contains("another name");
    workdir.expect(2, &["token", "create", "a b", "--yes"]).stderr_contains("letters");
    assert!(!workdir.expect(0, &["token", "list", "--json"]).out.contains(token), "the token is shown once");
    let mut service = Service::start(&workdir);
    let line = service.wait_for_line("API listening");
    let address = line.split("at=").nth(1).unwrap().split_whitespace().next().unwrap().to_owned();
    wait_until("the node is shown", || get(&address, "/nodes/here", Some(token)).0 == 200);
    assert_eq!(get(&address, "/status", None).0, 401);
    workdir.expect(0, &["token", "revoke", "ops", "--why", "over", "--yes"]).stdout_contains("Revoked the token ops.");
    wait_until("it is refused", || get(&address, "/status", Some(token)).0 == 401);
    workdir.expect(0, &["token", "list"]).stdout_contains("revoked");
    workdir.expect(0, &["audit"]).stdout_contains("revoke-token").stdout_contains("add-token");
    assert_eq!(service.stop().0, Some(0));
}
