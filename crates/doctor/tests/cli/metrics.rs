//! Metrics of a real controller, checked with Prometheus' promtool.

use std::{
    io::{Read, Write},
    net::TcpStream,
    process::{Command, Stdio},
};

use doctor_api::metrics::FAMILIES;

use crate::{
    this_machine::Service,
    workdir::{Workdir, wait_until},
};

pub(crate) fn scrape(port: u16) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").ok()?;
    let mut response = String::new();
    stream.read_to_string(&mut response).ok()?;
    let (head, body) = response.split_once("\r\n\r\n")?;
    head.starts_with("HTTP/1.1 200").then(|| body.to_owned())
}

/// Returns the tool's complaints, empty if there are none. `None`: the tool is not installed.
fn promtool(args: &[&str], input: &str) -> Option<String> {
    let child =
        Command::new("promtool").args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = child.ok()?;
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    Some(if output.status.success() { String::new() } else { String::from_utf8(text).unwrap() })
}

fn deployed(name: &str) -> String {
    format!("{}/../../deploy/prometheus/{name}", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn metrics_match_their_declaration_and_prometheus_accepts_them() {
    let workdir = Workdir::local();
    let port = doctor_testbed::ports::reserve_one().unwrap();
    let metrics = format!("cycle = \"1s\"\n[metrics]\nlisten = \"127.0.0.1:{port}\"\nper_node = true\n[backend");
    workdir.write("busy", "");
    workdir
        .write("doctor.toml", &(workdir.read("doctor.toml").replace("[backend", &metrics) + "busy_file = \"busy\"\n"));
    let controller = Service::start(&workdir);
    let mut text = String::new();
    wait_until("a scrape after the first cycle", || {
        text = scrape(port).unwrap_or_default();
        text.contains("doctor_nodes{use=\"busy\"} 1\n")
    });
    for part in [
        "doctor_leader 1\n",
        "doctor_breaker_open 0\n",
        "doctor_test_nodes{test=\"memory\",status=\"never-tested\"} 1\n",
        "doctor_test_coverage_ratio{test=\"memory\"} 0\n",
        "doctor_node_out_of_service{node=\"here\",pool=\"local\"} 0\n",
        "doctor_cases_open{severity=\"isolate\"} 0\n",
        "doctor_runs_last_day{outcome=\"completed\"} 0\n",
        "doctor_spool_waiting{place=\"history\"} 0\n",
    ] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    let series = text.lines().filter(|line| !line.starts_with('#'));
    for line in series {
        let name = line.split(['{', ' ']).next().unwrap();
        assert!(FAMILIES.iter().any(|family| family.name == name), "{line}");
    }
    controller.stop();
    match promtool(&["check", "metrics"], &text) {
        Some(errors) => assert_eq!(errors, "", "{text}"),
        None => doctor_testbed::skip::skip_without_program("metrics", "there is no promtool"),
    }
}

#[test]
fn alert_rules_are_valid_and_fire_as_expected() {
    let check = promtool(&["check", "rules", &deployed("rules.yml")], "");
    match (check, promtool(&["test", "rules", &deployed("rules.test.yml")], "")) {
        (Some(check), Some(test)) => assert_eq!((check.as_str(), test.as_str()), ("", "")),
        _ => doctor_testbed::skip::skip_without_program("metrics", "there is no promtool"),
    }
}
