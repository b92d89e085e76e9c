//! Traces of a real controller as a collector receives them, and a collector that hangs.

use std::{
    io::{Read, Write},
    net::TcpStream,
    time::Duration,
};

use serde_json::Value;

use crate::{
    alerts::{Receiver, ReceiverMode, free_port},
    metrics::scrape,
    this_machine::Service,
    workdir::{Workdir, wait_until},
};

/// A cluster of one node with an API, metrics and a collector.
fn setup(receiver: &Receiver, extra: &str) -> (Workdir, u16) {
    let (workdir, metrics) = (Workdir::local(), free_port());
    workdir.write("collector.url", &format!("http://127.0.0.1:{}/v1/traces?key=not-to-be-told\n", receiver.port));
    workdir.write("collector.token", "a-collectors-secret\n");
    let sections = format!(
        "cycle = \"1s\"\n[web]\nlisten = \"127.0.0.1:0\"\n[metrics]\nlisten = \"127.0.0.1:{metrics}\"\n[telemetry]\n\
         traces = {{ file = \"collector.url\" }}\ntoken = {{ file = \"collector.token\" }}\ntimeout = \"1s\"\n\
         resource = {{ \"k8s.cluster.name\" = \"a\" }}\n{extra}\n[backend"
    );
    workdir.write("doctor.toml", &workdir.read("doctor.toml").replace("[backend", &sections));
    (workdir, metrics)
}

/// Returns all received spans, in order.
fn spans(receiver: &Receiver) -> Vec<Value> {
    let requests = receiver.requests.lock().unwrap();
    let parts = requests.iter().flat_map(|request| request.body["resourceSpans"].as_array().unwrap().clone());
    parts.flat_map(|part| part["scopeSpans"][0]["spans"].as_array().unwrap().clone()).collect()
}

fn attribute(span: &Value, name: &str) -> Value {
    let all = span["attributes"].as_array().unwrap();
    let found = all.iter().find(|attribute| attribute["key"] == name);
    found.map_or(Value::Null, |attribute| attribute["value"].as_object().unwrap().values().next().unwrap().clone())
}

fn ask(address: &str, path: &str, headers: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    write!(stream, "GET /api/v1{path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}\r\n").unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    response.split(' ').nth(1).unwrap_or_default().to_owned()
}

pub(crate) fn address(service: &mut Service) -> String {
    let line = service.wait_for_line("API listening");
    line.split("at=").nth(1).unwrap().split_whitespace().next().unwrap().to_owned()
}

fn metric(port: u16, name: &str) -> Option<f64> {
    let text = scrape(port)?;
    text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
}

#[test]
fn cycles_calls_and_requests_reach_a_collector_with_parents_and_without_secrets() {
    let receiver = Receiver::new(ReceiverMode::Accept);
    let (workdir, metrics) = setup(&receiver, "");
    let token = workdir.json(&["token", "create", "ops", "--yes"])["token"].as_str().unwrap().to_owned();
    let mut service = Service::start(&workdir);
    let address = address(&mut service);
    let bearer = format!("authorization: Bearer {token}\r\n");
    let (trace, parent) = ("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7");
    let with = |flags: &str| format!("{bearer}traceparent: 00-{trace}-{parent}-{flags}\r\n");
    wait_until("the node is shown", || ask(&address, "/nodes/here", &bearer) == "200");
    assert_eq!(ask(&address, "/nodes/here", &with("01")), "200");
    // A caller that does not sample its trace is not recorded here either.
    assert_eq!(ask(&address, "/coverage", &with("00")), "200");
    assert_eq!(ask(&address, "/cases?state=a-secret-in-a-question", &bearer), "400");
    assert_eq!(ask(&address, "/plan", ""), "401");
    wait_until("a stored result, and the last request", || {
        let spans = spans(&receiver);
        let taken_in = spans.iter().any(|span| span["name"] == "ingest" && attribute(span, "results") != "0");
        taken_in && spans.iter().any(|span| span["name"] == "GET /api/v1/plan")
    });
    wait_until("they are counted", || {
        metric(metrics, "doctor_trace_spans_exported_total").is_some_and(|count| count > 10.0)
    });
    assert_eq!(metric(metrics, "doctor_trace_spans_dropped_total"), Some(0.0));
    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
    assert!(!log.contains("cycle{") && !log.contains("api{"), "log lines are as they were: {log}");

    let spans = spans(&receiver);
    let by_id = |id: &Value| spans.iter().find(|span| span["spanId"] == *id);
    for (name, above) in [
        ("observe", "cycle"),
        ("backend.snapshot", "observe"),
        ("backend.poll", "observe"),
        ("ingest", "observe"),
        ("plan", "cycle"),
        ("commit", "cycle"),
        ("act", "cycle"),
        ("backend.submit", "act"),
        ("publish", "cycle"),
        ("api.make", "GET /api/v1/nodes/{node}"),
    ] {
        let span = spans.iter().find(|span| span["name"] == name).unwrap_or_else(|| panic!("no {name} in {spans:?}"));
        let over = by_id(&span["parentSpanId"]).unwrap_or_else(|| panic!("no parent of {span}"));
        assert_eq!((&over["name"], &over["traceId"]), (&above.into(), &span["traceId"]), "{span}");
        let time = |span: &Value, name: &str| span[name].as_str().unwrap().parse::<u64>().unwrap();
        assert!(time(over, "startTimeUnixNano") <= time(span, "startTimeUnixNano"), "{span} {over}");
        assert!(time(span, "endTimeUnixNano") <= time(over, "endTimeUnixNano"), "{span} {over}");
    }
    let cycle = spans.iter().find(|span| span["name"] == "cycle").unwrap();
    assert_eq!((&cycle["parentSpanId"], attribute(cycle, "nodes")), (&Value::Null, "1".into()), "{cycle}");
    assert_eq!((attribute(cycle, "leads"), attribute(cycle, "backend")), (true.into(), "local".into()));
    let submit = spans.iter().find(|span| span["name"] == "backend.submit").unwrap();
    assert_eq!((&submit["kind"], attribute(submit, "node")), (&3.into(), "here".into()), "{submit}");
    let route_spans = |route: &'static str| spans.iter().filter(move |span| attribute(span, "http.route") == route);
    let request_span = route_spans("/api/v1/nodes/{node}").find(|span| span["traceId"] == trace).unwrap();
    assert_eq!((&request_span["parentSpanId"], &request_span["kind"]), (&parent.into(), &2.into()), "{request_span}");
    assert_eq!(attribute(request_span, "http.response.status_code"), "200");
    assert_eq!(route_spans("/api/v1/coverage").count(), 0, "unsampled requests are not recorded");
    let refused = route_spans("/api/v1/plan").next().unwrap();
    assert_eq!((attribute(refused, "http.response.status_code"), &refused["status"]), ("401".into(), &Value::Null));

    for request in receiver.requests.lock().unwrap().iter() {
        let text = String::from_utf8_lossy(&request.raw);
        for secret in [token.as_str(), "a-collectors-secret", "not-to-be-told", "a-secret-in-a-question"] {
            assert!(!text.contains(secret), "{secret} in {text}");
        }
        assert!(request.path.starts_with("/v1/traces"));
        assert_eq!(request.headers["authorization"], "Bearer a-collectors-secret");
        let about = request.body["resourceSpans"][0]["resource"]["attributes"].as_array().unwrap();
        let attribute_of =
            |key: &str| about.iter().find(|one| one["key"] == key).map(|one| &one["value"]["stringValue"]);
        assert_eq!(
            (attribute_of("service.name"), attribute_of("k8s.cluster.name")),
            (Some(&"cluster-doctor".into()), Some(&"a".into()))
        );
    }
    assert!(!log.contains("not-to-be-told"), "{log}");
}

#[test]
fn a_hung_collector_delays_nothing_drops_spans_and_is_used_again_when_it_recovers() {
    let receiver = Receiver::new(ReceiverMode::Hang);
    let (workdir, metrics) = setup(&receiver, "queue = 16");
    let mut service = Service::start(&workdir);
    let address = address(&mut service);
    wait_until("a post that hangs", || receiver.request_count(ReceiverMode::Hang) > 0);
    wait_until("cycles continue: a result exists", || {
        workdir.json(&["history"]).as_array().is_some_and(|rows| !rows.is_empty())
    });
    assert_eq!(ask(&address, "/nodes/here", ""), "200");
    wait_until("spans are dropped and counted", || {
        metric(metrics, "doctor_trace_spans_dropped_total").is_some_and(|count| count > 0.0)
    });
    service.wait_for_log("trace export failed error=http://127.0.0.1");
    receiver.set_mode(ReceiverMode::Accept);
    service.wait_for_log("trace export recovered");
    wait_until("spans arrive", || receiver.request_count(ReceiverMode::Accept) > 0);
    receiver.set_mode(ReceiverMode::Hang);
    let hung = receiver.request_count(ReceiverMode::Hang);
    wait_until("it hangs again", || receiver.request_count(ReceiverMode::Hang) > hung);
    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
    assert!(log.matches("trace export failed").count() <= 2, "logged once per outage: {log}");
}
