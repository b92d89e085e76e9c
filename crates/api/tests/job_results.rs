//! `POST /api/v1/results` without an engine: which result documents it accepts, and how it rejects the others.

use std::{
    collections::BTreeMap,
    io::{Read, Write},
    net::TcpStream,
    sync::Arc,
};

use doctor_api::{AgentInbox, AgentListener};
use doctor_backend::clock::{Clock, SystemClock};
use doctor_checks::document::{Document, RunKey, TestEvidence};
use doctor_core::{
    ids::{IdSource, NodeName, RunId, TestId},
    node::Hardware,
    plan::{Action, Conclusion},
    policy::Policy,
    reason::WithReason,
    run::{IncompleteReason, NonEmpty, Purpose, Run, RunState},
    time::{Span, Timestamp},
};
use doctor_engine::trigger::Trigger;
use doctor_store::{Lease, Store, records::CycleIntent};

struct Fixture {
    store: Store,
    lease: Lease,
    listener: AgentListener,
    trigger: Arc<Trigger>,
    ids: IdSource,
    _inbox: AgentInbox,
}

const KEY: RunKey = RunKey::new([5; 32]);

fn node(name: &str) -> NodeName {
    NodeName::new(name).unwrap()
}

fn test(name: &str) -> TestId {
    TestId::new(name).unwrap()
}

impl Fixture {
    fn new() -> Self {
        let store = Store::open_in_memory().unwrap();
        let trigger = Arc::new(Trigger::default());
        let lease = store.acquire("tests", SystemClock.now(), Span::days(1)).unwrap();
        let at = "127.0.0.1:0".parse().unwrap();
        let (listener, inbox) = AgentListener::open(at, &store, Arc::new(SystemClock), Arc::clone(&trigger)).unwrap();
        Self { store, lease, listener, trigger, ids: IdSource::new(3), _inbox: inbox }
    }

    fn commit(&self, action: Action) {
        let keys: BTreeMap<RunId, RunKey> = match &action {
            Action::Submit(run) => [(run.id, KEY)].into(),
            _ => BTreeMap::new(),
        };
        let intent = CycleIntent {
            at: SystemClock.now(),
            actions: &[WithReason::new(action, "due", "x")],
            keys: &keys,
            attributed_findings: &[],
            changed_reasons: &[],
            policy_version: 1,
            retry: &Policy::built_in().retry,
            notifications: &[],
        };
        self.store.commit(&self.lease, &intent).unwrap();
    }

    /// Plans a run of the test `memory` on these nodes.
    fn plan(&mut self, nodes: &[&str]) -> RunId {
        self.ids.set_time(SystemClock.now());
        let run = Run {
            id: self.ids.run(),
            nodes: NonEmpty::new(nodes.iter().map(|name| node(name)).collect()).unwrap(),
            tests: NonEmpty::one(test("memory")),
            state: RunState::Planned,
            purpose: WithReason::new(Purpose::Validation, "due", "never tested"),
            case: None,
            planned: SystemClock.now(),
            limit: Span::minutes(30),
        };
        let id = run.id;
        self.commit(Action::Submit(run));
        id
    }

    fn post_with(&self, headers: &str, body: &[u8]) -> String {
        let mut stream = TcpStream::connect(self.listener.address()).unwrap();
        let head = format!("POST /api/v1/results HTTP/1.1\r\nhost: x\r\n{headers}connection: close\r\n\r\n");
        // The endpoint may answer and close before it has read all of it.
        let _cut = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
        let mut response = Vec::new();
        let _reset = stream.read_to_end(&mut response);
        String::from_utf8(response).unwrap()
    }

    fn post(&self, run: RunId, name: &str, body: &[u8]) -> String {
        let length = body.len();
        self.post_with(&format!("x-doctor-run: {run}\r\nx-doctor-node: {name}\r\ncontent-length: {length}\r\n"), body)
    }

    #[track_caller]
    fn expect(&self, status: &str, run: RunId, name: &str, body: &[u8], text: &str) {
        let response = self.post(run, name, body);
        assert!(response.starts_with(&format!("HTTP/1.1 {status} ")) && response.contains(text), "{response}");
    }
}

fn document(run: RunId, name: &str, tests: &[&str]) -> Document {
    let at = Timestamp::from_secs(1_794_700_800);
    let evidence = |name: &&str| TestEvidence { test: test(name), started: at, ended: at, probes: Vec::new() };
    Document {
        run,
        node: node(name),
        hardware: Hardware::default(),
        started: at,
        ended: at,
        tests: tests.iter().map(evidence).collect(),
        uptime: None,
        machine: None,
    }
}

fn signed(run: RunId, name: &str) -> Vec<u8> {
    document(run, name, &["memory"]).sign(&KEY).unwrap()
}

#[test]
fn a_result_is_accepted_once_for_each_run_and_node_also_by_a_controller_that_does_not_lead() {
    let mut fixture = Fixture::new();
    let run = fixture.plan(&["n1", "n2"]);
    assert!(!fixture.trigger.wait(std::time::Duration::ZERO));
    fixture.expect("202", run, "n1", &signed(run, "n1"), "accepted\n");
    assert!(fixture.trigger.wait(std::time::Duration::ZERO), "the engine is woken");
    // A job that did not get the answer repeats it.
    fixture.expect("200", run, "n1", &signed(run, "n1"), "accepted before\n");
    fixture.expect("202", run, "n2", &signed(run, "n2"), "accepted\n");
    let waiting = fixture.store.queued_messages(None, 10).unwrap();
    assert_eq!(waiting.len(), 2);
    let contents = fixture.store.queued_contents(&waiting.iter().collect::<Vec<_>>()).unwrap();
    assert_eq!(contents[0].as_ref().unwrap().bytes, signed(run, "n1"));
}

#[test]
fn a_result_that_its_runs_key_did_not_sign_is_rejected() {
    let mut fixture = Fixture::new();
    let (run, other) = (fixture.plan(&["n1", "n2"]), fixture.plan(&["n3"]));
    let by_other = document(run, "n1", &["memory"]).sign(&RunKey::new([6; 32])).unwrap();
    fixture.expect("403", run, "n1", &by_other, &format!("not signed with the key of {run}"));
    fixture.expect("403", run, "n1", b"nonsense", "not signed");
    let mut changed = signed(run, "n1");
    *changed.last_mut().unwrap() ^= 1;
    fixture.expect("403", run, "n1", &changed, "not signed");
    // A node of the run under the name of another, and a document of another run.
    fixture.expect("403", run, "n2", &signed(run, "n1"), "it is for another node: n1");
    fixture.expect("403", run, "n1", &signed(other, "n1"), &format!("it is for run {other}"));
    fixture.expect("404", run, "n3", &signed(run, "n3"), &format!("there is no run {run} on n3"));
    assert_eq!(fixture.store.queued_count().unwrap(), 0);
}

#[test]
fn a_result_of_an_unknown_or_ended_run_is_rejected_before_its_body_is_read() {
    let mut fixture = Fixture::new();
    let run = fixture.plan(&["n1"]);
    let unknown = RunId::from_number(7);
    // Nothing of the body is sent.
    let head = |run: RunId| format!("x-doctor-run: {run}\r\nx-doctor-node: n1\r\ncontent-length: 1000\r\n");
    assert!(fixture.post_with(&head(unknown), b"").starts_with("HTTP/1.1 404 "));
    fixture.commit(Action::Conclude { run, end: Conclusion::Incomplete(IncompleteReason::JobLost) });
    let response = fixture.post_with(&head(run), b"");
    assert!(response.starts_with("HTTP/1.1 410 ") && response.contains(&format!("{run} has ended")), "{response}");
}

#[test]
fn a_document_that_its_run_did_not_ask_for_is_rejected_with_the_reason() {
    let mut fixture = Fixture::new();
    let run = fixture.plan(&["n1"]);
    let sign = |tests: &[&str]| document(run, "n1", tests).sign(&KEY).unwrap();
    fixture.expect("422", run, "n1", &sign(&["memory", "dl"]), "it contains test dl, which its run does not include");
    fixture.expect("422", run, "n1", &sign(&["memory", "memory"]), "it contains test memory twice");
    fixture.expect("202", run, "n1", &sign(&["memory"]), "accepted");
}

#[test]
fn a_malformed_request_is_rejected_with_the_reason() {
    let mut fixture = Fixture::new();
    let run = fixture.plan(&["n1"]);
    for (headers, status) in [
        ("content-length: 1\r\n".to_owned(), "400"),
        ("x-doctor-run: seven\r\nx-doctor-node: n1\r\ncontent-length: 1\r\n".to_owned(), "400"),
        (format!("x-doctor-run: {run}\r\nx-doctor-node: not a name\r\ncontent-length: 1\r\n"), "400"),
        (format!("x-doctor-run: {run}\r\nx-doctor-node: n1\r\n"), "411"),
        // By its announced length alone.
        (format!("x-doctor-run: {run}\r\nx-doctor-node: n1\r\ncontent-length: {}\r\n", 16 << 21), "413"),
    ] {
        let response = fixture.post_with(&headers, b"");
        assert!(response.starts_with(&format!("HTTP/1.1 {status} ")), "{headers}: {response}");
    }
}
