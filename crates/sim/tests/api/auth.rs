//! Authorisation: every path and every action, for every kind of client.

use std::io::{Read, Write};

use doctor_api::operator_api::openapi;

use serde_json::json;

use crate::testbed::{OPERATOR, Response, Testbed, VIEWER, live};

/// Returns the actions with a valid body for each.
fn actions() -> Vec<(String, serde_json::Value)> {
    let description = openapi();
    let paths = description["paths"].as_object().unwrap().iter();
    let names: Vec<String> =
        paths.filter_map(|(path, _)| Some(path.strip_prefix("/api/v1/actions/")?.to_owned())).collect();
    assert_eq!(names.len(), 10);
    let body = |name: &str| match name {
        "pause" | "resume" | "close-breaker" => json!({ "why": "x" }),
        "acknowledge" => json!({ "cases": ["1"], "why": "x" }),
        "snooze" => json!({ "cases": ["1"], "until": "4h", "why": "x" }),
        "repair" => json!({ "nodes": ["node001"], "step": "reboot", "why": "x" }),
        _ => json!({ "nodes": ["node001"], "why": "x" }),
    };
    names.into_iter().map(|name| (name.clone(), body(&name))).collect()
}

fn refused_lines(bed: &Testbed) -> usize {
    bed.store.audit(10_000, None).unwrap().iter().filter(|line| line.what == "api-refused").count()
}

#[test]
fn unauthenticated_viewer_and_forged_requests_are_rejected_and_audited_for_every_action() {
    let (bed, _session) = live(4, 1);
    bed.with_tokens();
    let before = bed.store.operator_changes().unwrap();
    let json = ("content-type", "application/json");
    let operator = format!("Bearer {OPERATOR}");
    let viewer = format!("Bearer {VIEWER}");
    let forged = [
        ("no token", vec![json], 401, "no-token"),
        ("a viewer", vec![json, ("authorization", viewer.as_str())], 403, "role"),
        ("an invented token", vec![json, ("authorization", "Bearer doctor_token_x")], 401, "bad-token"),
        ("an expired token", vec![json, ("authorization", "Bearer doctor_token_old")], 401, "bad-token"),
        ("another scheme", vec![json, ("authorization", "Basic b3A6b3A=")], 401, "no-token"),
        ("a name without a proxy", vec![json, ("x-forwarded-user", "op")], 401, "no-token"),
        (
            "a page of another site",
            vec![json, ("authorization", operator.as_str()), ("origin", "https://evil.example")],
            403,
            "cross-site",
        ),
        (
            "another site by its own word",
            vec![json, ("authorization", operator.as_str()), ("sec-fetch-site", "cross-site")],
            403,
            "cross-site",
        ),
        ("a form", vec![("content-type", "text/plain"), ("authorization", operator.as_str())], 415, "not-json"),
    ];
    let mut refused = 0;
    for (name, body) in actions() {
        for (who, headers, status, code) in &forged {
            let response = bed.send("POST", &format!("/actions/{name}"), headers, body.to_string().as_bytes());
            assert_eq!((response.status, response.code().as_str()), (*status, *code), "{who} asks for {name}");
            refused += 1;
        }
        let got = bed.send("GET", &format!("/actions/{name}"), &[("authorization", operator.as_str())], b"");
        assert_eq!(got.status, 405, "{name}");
    }
    assert_eq!(refused_lines(&bed), refused, "each is in the audit log");
    let line = bed.store.audit(1, None).unwrap().remove(0);
    assert_eq!((line.origin.as_deref(), line.code.as_str()), (Some("127.0.0.1"), "not-json"));
    assert_eq!(bed.store.operator_changes().unwrap(), before, "nothing was done");
}

#[test]
fn every_path_requires_a_token_once_one_exists_and_a_revoked_token_is_invalid() {
    let (bed, _session) = live(3, 1);
    let get = |path: &str, token: Option<&str>| -> Response {
        let authorization = token.map(|token| format!("Bearer {token}"));
        let headers: Vec<(&str, &str)> = authorization.iter().map(|text| ("authorization", text.as_str())).collect();
        bed.send("GET", path, &headers, b"")
    };
    assert_eq!(get("/status", None).status, 200, "until then this machine may read");
    let evil = bed.send("GET", "/status", &[("host", "evil.example")], b"");
    assert_eq!((evil.status, evil.code().as_str()), (403, "wrong-host"), "but no page of a rebound name");
    let act = bed.send("POST", "/actions/pause", &[("content-type", "application/json")], b"{\"why\":\"x\"}");
    assert_eq!((act.status, act.code().as_str()), (403, "read-only"));
    assert_eq!(refused_lines(&bed), 1);

    bed.with_tokens();
    let description = openapi();
    for (path, item) in description["paths"].as_object().unwrap() {
        if item.get("get").is_some() {
            let path = path.strip_prefix("/api/v1").unwrap();
            assert_eq!(get(path, None).status, 401, "{path}");
            assert_eq!(get(path, Some("doctor_token_old")).status, 401, "{path}");
        }
    }
    for path in ["/", "/openapi.json"] {
        assert_eq!(get(path, None).status, 401, "{path}");
    }
    let who = get("/whoami", Some(VIEWER)).json();
    assert_eq!((who["name"].as_str(), who["may_act"].as_bool()), (Some("vi"), Some(false)));
    assert_eq!(get("/whoami", Some(OPERATOR)).json()["may_act"], true);
    bed.store.revoke_token("vi", "ann", "left", doctor_core::time::Timestamp::from_secs(1)).unwrap();
    crate::testbed::until("the revoked token is noticed", || get("/status", Some(VIEWER)).status == 401);
    bed.store.revoke_token("op", "ann", "left", doctor_core::time::Timestamp::from_secs(1)).unwrap();
    crate::testbed::until("the last one is noticed", || get("/status", Some(OPERATOR)).status == 401);
    assert_eq!(get("/status", None).status, 401, "that all were revoked opens nothing");
}

#[test]
fn bodies_that_are_too_long_or_invalid_are_rejected() {
    let (bed, _session) = live(3, 1);
    bed.with_tokens();
    for (body, status, code) in [
        (json!({ "nodes": ["node001"], "why": "x".repeat(501) }), 400, "bad-body"),
        (json!({ "nodes": ["node001"] }), 400, "bad-body"),
        (json!({ "nodes": ["node999"], "why": "x" }), 404, "unknown"),
        (json!({ "nodes": ["rack=3"], "why": "x" }), 400, "bad-body"),
        (json!({ "nodes": [], "why": "x" }), 400, "bad-body"),
        (json!({ "nodes": ["node001"], "why": "x", "until": "1999-01-01T00:00:00Z" }), 400, "bad-order"),
        (json!({ "nodes": ["n".repeat(70_000)], "why": "x" }), 413, "too-long"),
    ] {
        let response = bed.act(OPERATOR, "hold", &body);
        assert_eq!(
            (response.status, response.code().as_str()),
            (status, code),
            "{}",
            String::from_utf8_lossy(&response.body)
        );
    }
}

#[test]
fn a_stream_of_events_ends_when_its_token_is_revoked() {
    let (bed, _session) = live(3, 1);
    bed.with_tokens();
    let mut stream = std::net::TcpStream::connect(bed.address()).unwrap();
    stream.set_read_timeout(Some(std::time::Duration::from_secs(180))).unwrap();
    let request = format!(
        "GET /api/v1/events HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {VIEWER}\r\nconnection: close\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).unwrap();
    let mut received = Vec::new();
    let mut buffer = [0; 512];
    while !String::from_utf8_lossy(&received).contains(": listening") {
        let read = stream.read(&mut buffer).unwrap();
        assert!(read > 0, "{}", String::from_utf8_lossy(&received));
        received.extend_from_slice(&buffer[..read]);
    }
    bed.store.revoke_token("vi", "ann", "left", doctor_core::time::Timestamp::from_secs(1)).unwrap();
    stream.read_to_end(&mut received).expect("it ends");
    let received = String::from_utf8_lossy(&received);
    assert!(
        received.contains("event: dropped") && received.contains("authorisation was revoked or changed"),
        "{received}"
    );
}
