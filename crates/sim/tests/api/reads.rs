//! Reads of the API: every response has its described form, pages are complete, and unchanged content is not sent
//! again.

use std::{
    collections::BTreeSet,
    io::{BufRead, BufReader, Write},
    net::TcpStream,
};

use doctor_api::operator_api::openapi;
use doctor_core::{
    node::Hold,
    time::{Span, Timestamp},
};
use doctor_engine::redact::REMOVED;
use serde_json::Value;

use crate::{
    openapi_form::violations,
    testbed::{PATIENCE, Testbed, live, shared, until},
};

/// Returns a valid value for a path parameter.
fn sample(bed: &Testbed, part: &str) -> String {
    let first = |path: &str, field: &str| {
        let page = bed.get(path).json();
        page["items"][0][field].as_str().unwrap_or_else(|| panic!("{path} is empty: {page}")).to_owned()
    };
    match part {
        "node" => first("/history?verdict=pass&limit=1", "node"),
        "run" => first("/history?verdict=pass&limit=1", "run"),
        "case" => first("/cases?state=all", "id"),
        "test" => "dl".to_owned(),
        other => panic!("nothing is known for {{{other}}}"),
    }
}

fn filled(bed: &Testbed, path: &str) -> String {
    let parts = path.split('/').map(|part| match part.strip_prefix('{').and_then(|part| part.strip_suffix('}')) {
        Some(name) => sample(bed, name),
        None => part.to_owned(),
    });
    parts.collect::<Vec<_>>().join("/")
}

#[test]
fn every_path_returns_its_described_schema() {
    let bed = shared();
    let description = openapi();
    assert_eq!(bed.get("/openapi.json").json(), description);
    let mut seen = 0;
    for (path, item) in description["paths"].as_object().unwrap() {
        let Some(get) = item.get("get").filter(|_| !path.ends_with("/events")) else { continue };
        let path = filled(bed, path.strip_prefix("/api/v1").unwrap());
        let response = bed.get(&path);
        assert_eq!(response.status, 200, "{path}: {}", String::from_utf8_lossy(&response.body));
        let Some(schema) = get["responses"]["200"]["content"]["application/json"].get("schema") else { continue };
        let found = violations(&response.json(), schema, &path);
        assert!(found.is_empty(), "{found:#?}");
        for header in ["x-content-type-options", "content-security-policy", "referrer-policy", "cache-control"] {
            assert!(response.headers.contains_key(header), "{path}: {header}");
        }
        let misspelled = bed.get(&format!("{path}{}limt=3", if path.contains('?') { '&' } else { '?' }));
        assert_eq!((misspelled.status, misspelled.code()), (400, "unknown-parameter".to_owned()), "{path}");
        assert!(violations(&misspelled.json(), &description["components"]["schemas"]["Error"], &path).is_empty());
        seen += 1;
    }
    assert!(seen >= 20, "{seen}");
    assert!(!bed.get("/findings").json()["items"].as_array().unwrap().is_empty(), "there are findings");
}

#[test]
fn the_bundle_of_a_case_is_an_archive_to_save() {
    let bed = shared();
    let case = sample(bed, "case");
    let response = bed.get(&format!("/cases/{case}/bundle"));
    assert_eq!((response.status, &response.body[..2]), (200, &[0x1f, 0x8b][..]));
    assert_eq!(response.headers["content-type"], "application/gzip");
    assert_eq!(response.headers["content-disposition"], format!("attachment; filename=\"case-{case}.tar.gz\""));
    let unknown = bed.get("/cases/c0000000000009/bundle");
    assert_eq!((unknown.status, unknown.code().as_str()), (404, "unknown"));
    // The session of this test has no command line.
    let json = [("content-type", "application/json")];
    let none = bed.send("POST", "/cli", &json, br#"{"args": ["status"]}"#);
    assert_eq!((none.status, none.code().as_str()), (404, "no-such-place"));
}

#[test]
fn unknown_paths_and_parameters_are_rejected_with_an_error_text() {
    let bed = shared();
    for (path, status, code) in [
        ("/nothing", 404, "no-such-place"),
        ("/nodes/node999", 404, "unknown"),
        ("/nodes/-x", 400, "bad-parameter"),
        ("/runs/r0000000000000", 404, "unknown"),
        ("/runs/xyz", 400, "bad-parameter"),
        ("/tests/none", 404, "unknown"),
        ("/nodes?select=rack=3", 400, "bad-parameter"),
        ("/nodes?limit=9999", 400, "bad-parameter"),
        ("/nodes?select=n%5B0-20000%5D", 400, "bad-parameter"),
        ("/cases?select=n%5B0-99999%5D", 400, "bad-parameter"),
        ("/history?cursor=1~2", 400, "bad-parameter"),
        ("/history?cursor=x", 400, "bad-parameter"),
        ("/history?since=yesterday", 400, "bad-parameter"),
    ] {
        let response = bed.get(path);
        assert_eq!((response.status, response.code().as_str()), (status, code), "{path}");
        assert!(!response.json()["error"]["text"].as_str().unwrap().is_empty());
    }
    let response = bed.send("DELETE", "/nodes", &[], b"");
    assert_eq!((response.status, response.code().as_str()), (405, "wrong-method"));
    assert!(response.headers.get("allow").is_some_and(|allow| allow.contains("GET")), "{:?}", response.headers);
    let page = bed.get("/");
    assert!(page.status == 200 && page.headers["content-type"].starts_with("text/html"));
}

/// Returns all rows of a list, page by page, each as text.
fn all_of(bed: &Testbed, path: &str, limit: u32) -> Vec<String> {
    let mut rows: Vec<String> = Vec::new();
    let mut cursor = String::new();
    for _ in 0..2000 {
        let sign = if path.contains('?') { '&' } else { '?' };
        let page = bed.get(&format!("{path}{sign}limit={limit}{cursor}")).json();
        let items = page["items"].as_array().unwrap_or_else(|| panic!("{path}: {page}"));
        rows.extend(items.iter().map(Value::to_string));
        let Some(next) = page["next"].as_str() else { return rows };
        assert_eq!(items.len(), limit as usize, "{path}: a page that is not full has no next one");
        cursor = format!("&cursor={next}");
    }
    panic!("{path} does not end");
}

#[test]
fn pages_of_a_list_add_up_to_the_list_without_duplicates() {
    let bed = shared();
    let node = sample(bed, "node");
    for path in [
        "/nodes".to_owned(),
        "/runs".to_owned(),
        "/audit".to_owned(),
        "/history".to_owned(),
        "/cases?state=all".to_owned(),
        "/findings".to_owned(),
        "/history?verdict=inconclusive".to_owned(),
        "/history?test=dl".to_owned(),
        format!("/history?node={node}"),
        format!("/history?node={node}&verdict=pass&test=dl"),
        format!("/runs?node={node}"),
        format!("/audit?node={node}"),
    ] {
        let all_rows = all_of(bed, &path, 500);
        assert_eq!(all_rows.iter().collect::<BTreeSet<_>>().len(), all_rows.len(), "{path} has a row twice");
        assert_eq!(all_of(bed, &path, 7), all_rows, "{path}");
    }
    let filter = |query: &str| all_of(bed, &format!("/history{query}"), 500).len();
    let verdicts =
        ["pass", "fail", "inconclusive", "not-applicable"].map(|verdict| filter(&format!("?verdict={verdict}")));
    assert_eq!(verdicts.iter().sum::<usize>(), filter(""), "{verdicts:?}");
    assert!(filter("") > 50, "there is something to page through");
}

#[test]
fn unchanged_content_is_not_sent_again_and_gzip_content_is_identical() {
    let bed = shared();
    let plain = bed.get("/map");
    let tag = &plain.headers["etag"];
    let again = bed.send("GET", "/map", &[("if-none-match", tag)], b"");
    assert_eq!((again.status, again.body.len()), (304, 0));
    let packed = bed.send("GET", "/map", &[("accept-encoding", "gzip")], b"");
    assert_eq!(packed.headers["content-encoding"], "gzip");
    let unpacked = miniz_oxide::inflate::decompress_to_vec(&packed.body[10..packed.body.len() - 8]).unwrap();
    assert_eq!(unpacked, plain.body);
    let head = bed.send("HEAD", "/map", &[], b"");
    assert_eq!((head.status, head.body.len()), (200, 0));
}

#[test]
fn the_map_agrees_with_the_list_for_each_node() {
    let bed = shared();
    let map = bed.get("/map").json();
    let list = bed.get("/nodes?limit=500").json();
    let (rows, items) = (map["nodes"].as_array().unwrap(), list["items"].as_array().unwrap());
    assert_eq!(rows.len(), items.len());
    for (row, item) in rows.iter().zip(items) {
        assert_eq!(row[0], item["node"]);
        let word = |list: &str, column: usize| map[list][row[column].as_u64().unwrap() as usize].clone();
        assert_eq!([word("states", 5), word("occupancies", 6)], [item["state"].clone(), item["occupancy"].clone()]);
    }
    let failing = bed.get("/nodes?health=fail&limit=500").json()["items"].as_array().unwrap().len();
    let fail = map["health"].as_array().unwrap().iter().position(|word| word == "fail").unwrap() as u64;
    assert_eq!(failing, rows.iter().filter(|row| row[4] == fail).count());
    let text = |list: &Value, index: &Value| list[index.as_u64().unwrap() as usize].as_str().unwrap().to_owned();
    let on_map = map["findings"].as_array().unwrap().iter().map(|entry| {
        let node = rows[entry[0].as_u64().unwrap() as usize][0].as_str().unwrap().to_owned();
        (node, text(&map["reasons"], &entry[1]), text(&map["checks"], &entry[2]))
    });
    let findings = bed.get("/findings?limit=500").json();
    let field = |row: &Value, name: &str| row[name].as_str().unwrap().to_owned();
    let listed = findings["items"].as_array().unwrap().iter();
    let listed: BTreeSet<_> =
        listed.map(|row| (field(row, "node"), field(row, "reason"), field(row, "check"))).collect();
    assert_eq!(on_map.collect::<BTreeSet<_>>(), listed);
    assert!(!listed.is_empty(), "a fault was injected");
}

#[test]
fn the_status_names_the_backend_so_that_a_simulated_cluster_is_recognisable() {
    assert_eq!(shared().get("/status").json()["backend"], "sim");
}

#[test]
fn logs_are_read_by_offset_and_evidence_omits_its_signature() {
    let bed = shared();
    let (run, node) = (sample(bed, "run"), sample(bed, "node"));
    let log = bed.get(&format!("/runs/{run}/log?node={node}")).json();
    let text = log["text"].as_str().unwrap();
    assert!(!text.is_empty() && log["ended"] == true, "{log}");
    let next = bed.get(&format!("/runs/{run}/log?node={node}&offset={}", log["next_offset"])).json();
    assert_eq!(next["text"], "");
    let evidence = bed.get(&format!("/runs/{run}/evidence/{node}"));
    assert!(evidence.headers["content-disposition"].starts_with("attachment"), "{:?}", evidence.headers);
    assert_eq!(evidence.json()["node"], node.as_str());
    assert!(!String::from_utf8_lossy(&evidence.body).contains("doctor-result-1"));
    assert_eq!(bed.get(&format!("/runs/{run}/evidence/other")).status, 404);
    assert!(!REMOVED.is_empty());
}

#[test]
fn changes_are_streamed_as_they_happen_and_replayed_after_a_reconnect() {
    let (bed, mut session) = live(6, 1);
    let listen = |last: Option<&str>| {
        let mut stream = TcpStream::connect(bed.address()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let last = last.map_or_else(String::new, |id| format!("last-event-id: {id}\r\n"));
        write!(stream, "GET /api/v1/events HTTP/1.1\r\nhost: localhost\r\n{last}\r\n").unwrap();
        BufReader::new(stream)
    };
    /// Returns the id and data of the next event with this name.
    fn next(stream: &mut BufReader<TcpStream>, name: &str) -> (String, String) {
        let (mut id, mut matches) = (String::new(), false);
        loop {
            let mut line = String::new();
            assert!(stream.read_line(&mut line).unwrap() > 0, "the stream ended before `{name}`");
            let line = line.trim_end();
            if let Some(text) = line.strip_prefix("id: ") {
                id = text.to_owned();
            } else if let Some(text) = line.strip_prefix("event: ") {
                matches = text == name;
            } else if let Some(data) = line.strip_prefix("data: ")
                && matches
            {
                return (id, data.to_owned());
            }
        }
    }
    let mut stream = listen(None);
    // The server listens once it has sent the greeting.
    let mut line = String::new();
    while !line.starts_with(": listening") {
        line.clear();
        assert!(stream.read_line(&mut line).unwrap() > 0);
    }
    let node = doctor_core::ids::NodeName::new("node003").unwrap();
    let hold = Hold { by: "ann".to_owned(), why: "<b>fan</b>".to_owned(), since: session.now(), until: None };
    bed.store.hold(&node, &hold).unwrap();
    session.cycle().unwrap();
    // An older cluster state may come first: the store's and the engine's are made one after the other.
    let (id, why) = loop {
        let (id, data) = next(&mut stream, "nodes");
        let why = bed.get("/nodes/node003");
        if data.contains("node003") && why.json()["hold"]["why"] == "<b>fan</b>" {
            break (id, why);
        }
    };
    assert_eq!(why.headers["content-type"], "application/json", "untrusted text is never a page");

    bed.store.unhold(&node, "ann", "done", Timestamp::from_secs(2_000_000_000)).unwrap();
    session.cycle().unwrap();
    let (later, _) = next(&mut stream, "nodes");
    drop(stream);
    let mut back = listen(Some(&id));
    assert_eq!(next(&mut back, "nodes").0, later, "what was missed comes first");
    assert_eq!(next(&mut listen(Some("other-7")), "everything").1, "{}");
}

#[test]
fn a_hung_engine_is_not_reported_as_leader_and_its_data_expires() {
    let (bed, session) = live(3, 24);
    let status = bed.get("/status").json();
    assert_eq!(status["leader"]["is"], "leads", "{status}");
    let before = bed.get("/coverage").headers["x-doctor-state-time"].clone();
    session.clock().sleep_until(session.now().plus(Span::days(60)));
    until("the loss of the leader is shown", || bed.get("/status").json()["leader"]["is"] == "lost");
    let later = bed.get("/coverage");
    assert!(later.headers["x-doctor-state-time"] > before, "{:?}", later.headers);
    let rows = later.json();
    assert!(rows.as_array().unwrap().iter().all(|row| row["pass"] == 0), "no data two months later: {rows}");
}
