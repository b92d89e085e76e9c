//! The door for agents, with nobody behind it but the test: who is let in, and what the others are told.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    sync::Arc,
    time::{Duration, Instant},
};

use doctor_checks::document::{AgentReport, Dropped, RunKey, Schema, Versions};
use doctor_control::{
    clock::{Clock, SystemClock},
    cycle::Inbox,
    store::Store,
    wake::Wake,
    web::{Door, DoorInbox},
};
use doctor_core::{
    ids::NodeName,
    node::Hardware,
    time::{Span, Timestamp},
};

struct Bed {
    store: Store,
    door: Door,
    inbox: DoorInbox,
    wake: Arc<Wake>,
}

fn node(name: &str) -> NodeName {
    NodeName::new(name).unwrap()
}

fn key(name: &str) -> RunKey {
    RunKey::new([name.as_bytes()[1]; 32])
}

impl Bed {
    /// `n1` and `n2` are enrolled, `n3` was revoked.
    fn new() -> Self {
        let store = Store::open_in_memory().unwrap();
        for name in ["n1", "n2", "n3"] {
            store.enroll_agent(&node(name), &key(name), "ann", "x", Timestamp::from_secs(1000)).unwrap();
        }
        store.revoke_agent(&node("n3"), "ann", "x", Timestamp::from_secs(1001)).unwrap();
        let wake = Arc::new(Wake::default());
        let at = "127.0.0.1:0".parse().unwrap();
        let (door, inbox) = Door::open(at, &store, Arc::new(SystemClock), Arc::clone(&wake)).unwrap();
        Self { store, door, inbox, wake }
    }

    fn leading() -> Self {
        let bed = Self::new();
        bed.door.cycle_ended(true);
        bed
    }

    fn post(&self, name: &str, body: &[u8]) -> String {
        exchange(self.door.address(), &head(name, body.len()), body)
    }

    #[track_caller]
    fn expect(&self, status: &str, name: &str, body: &[u8]) -> String {
        let answer = self.post(name, body);
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
        answer
    }
}

fn head(name: &str, length: usize) -> String {
    format!(
        "POST /api/v1/ingest HTTP/1.1\r\nhost: x\r\nx-doctor-node: {name}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n"
    )
}

fn exchange(to: SocketAddr, head: &str, body: &[u8]) -> String {
    let mut stream = TcpStream::connect(to).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream.write_all(head.as_bytes()).unwrap();
    // A door may refuse before it has read everything.
    let _read = stream.write_all(body);
    let mut answer = Vec::new();
    let _reset = stream.read_to_end(&mut answer);
    String::from_utf8(answer).unwrap()
}

fn heartbeat(name: &str, number: u64) -> AgentReport {
    AgentReport {
        up: None,
        node: node(name),
        hardware: Hardware::default(),
        number,
        at: Timestamp::from_secs(2000 + number as i64),
        checks: Vec::new(),
        versions: Versions { program: "0.1.0".to_owned(), schema: Schema::KNOWN, policy: 1 },
        dropped: None,
    }
}

/// One that the engine has to keep.
fn report(name: &str, number: u64) -> AgentReport {
    let at = Timestamp::from_secs(2000);
    AgentReport {
        up: None,
        dropped: Some(Dropped { reports: 1, checks: [].into(), from: at, to: at }),
        ..heartbeat(name, number)
    }
}

fn signed(report: &AgentReport, by: &str) -> Vec<u8> {
    report.sign(&key(by)).unwrap()
}

#[test]
fn who_is_not_enrolled_or_was_revoked_is_sent_away_before_anything_is_read() {
    let bed = Bed::leading();
    assert!(bed.expect("401", "n9", b"x").contains("`doctor agent enroll n9`"));
    assert!(bed.expect("401", "n3", &signed(&heartbeat("n3", 1), "n3")).contains("revoked"));
    bed.expect("400", "not a name", b"x");
    let no_length = "POST /api/v1/ingest HTTP/1.1\r\nhost: x\r\nx-doctor-node: n1\r\nconnection: close\r\n\r\n";
    assert!(exchange(bed.door.address(), no_length, b"").starts_with("HTTP/1.1 411"));
    // Refused by its announced length alone: not a byte of it is sent.
    assert!(exchange(bed.door.address(), &head("n1", 16 << 21), b"").starts_with("HTTP/1.1 413"));
}

#[test]
fn no_node_speaks_for_another() {
    let mut bed = Bed::leading();
    bed.expect("403", "n2", &signed(&report("n2", 1), "n1"));
    bed.expect("403", "n2", &signed(&report("n1", 1), "n1"));
    assert!(bed.expect("403", "n1", &signed(&report("n2", 1), "n1")).contains("does not bear the signature"));
    bed.expect("403", "n1", b"doctor-report-1 nonsense");
    let mut changed = signed(&report("n1", 1), "n1");
    *changed.last_mut().unwrap() ^= 1;
    bed.expect("403", "n1", &changed);
    assert!(bed.inbox.waiting().is_empty(), "nothing of this came near the engine");
    assert!(bed.inbox.take_heard(SystemClock.now().plus(Span::hours(1))).is_empty(), "and nobody was heard");
}

#[test]
fn a_newer_schema_is_refused_by_its_name() {
    let bed = Bed::leading();
    let mut newer = report("n1", 1);
    newer.versions.schema = Schema { major: 7, minor: 3 };
    assert!(bed.expect("409", "n1", &signed(&newer, "n1")).contains("schema 7.3"));
    newer.versions.schema = Schema::OLDEST;
    newer.dropped = None;
    bed.expect("200", "n1", &signed(&newer, "n1"));
}

#[test]
fn a_controller_that_does_not_lead_takes_nothing() {
    let bed = Bed::new();
    let answer = bed.expect("503", "n1", &signed(&heartbeat("n1", 1), "n1"));
    assert!(answer.contains("retry-after: "), "{answer}");
    bed.door.cycle_ended(true);
    bed.expect("200", "n1", &signed(&heartbeat("n1", 1), "n1"));
}

#[test]
fn a_report_is_answered_when_it_was_kept_and_wakes_whoever_keeps_it() {
    let mut bed = Bed::leading();
    let (to, body) = (bed.door.address(), signed(&report("n1", 1), "n1"));
    let agent = std::thread::spawn(move || exchange(to, &head("n1", body.len()), &body));
    assert!(bed.wake.wait(Duration::from_secs(20)), "nobody rang");
    let waiting = bed.inbox.waiting();
    assert_eq!((waiting.len(), waiting[0].node.clone()), (1, node("n1")));
    assert!(!agent.is_finished(), "it was answered before it was kept");
    // A cycle that does not know the cluster yet leaves it; the next one comes at once.
    bed.door.cycle_ended(true);
    assert!(bed.wake.wait(Duration::ZERO));
    let again: Vec<u64> = bed.inbox.waiting().iter().map(|message| message.number).collect();
    bed.inbox.acknowledge(&again);
    assert!(agent.join().unwrap().starts_with("HTTP/1.1 200 "));
    assert!(bed.inbox.waiting().is_empty());
}

#[test]
fn what_is_not_kept_in_time_is_to_be_sent_again() {
    let mut bed = Bed::leading();
    let began = Instant::now();
    let answer = bed.expect("503", "n1", &signed(&report("n1", 1), "n1"));
    assert!(began.elapsed() < Duration::from_secs(25) && answer.contains("retry-after"), "{answer}");
    assert!(bed.inbox.waiting().is_empty());
}

#[test]
fn heartbeats_are_heard_without_the_engine_and_an_old_one_proves_nothing() {
    let mut bed = Bed::leading();
    let enrolled = Some(Timestamp::from_secs(1000));
    assert_eq!(bed.inbox.heard(&node("n1")), enrolled, "it should have spoken since then");
    assert_eq!((bed.inbox.heard(&node("n3")), bed.inbox.heard(&node("n9"))), (None, None));
    bed.expect("200", "n1", &signed(&heartbeat("n1", 5), "n1"));
    let heard = bed.inbox.heard(&node("n1"));
    assert!(heard > enrolled);
    assert!(bed.inbox.waiting().is_empty());
    let later = SystemClock.now().plus(Span::hours(1));
    let lease = bed.store.acquire("test", SystemClock.now(), Span::hours(2)).unwrap();
    let noted = bed.inbox.take_heard(later);
    assert_eq!(noted.iter().map(|(node, heard)| (node.as_str(), heard.number)).collect::<Vec<_>>(), [("n1", 5)]);
    bed.store.note_agents(&lease, &noted).unwrap();
    assert!(bed.inbox.take_heard(later.plus(Span::from_secs(59))).is_empty(), "at most once a minute");

    // Somebody sends a copy of it: also to a controller that was started since.
    bed.expect("200", "n1", &signed(&heartbeat("n1", 5), "n1"));
    assert_eq!(bed.inbox.heard(&node("n1")), heard);
    let at = "127.0.0.1:0".parse().unwrap();
    let (door, inbox) = Door::open(at, &bed.store, Arc::new(SystemClock), Arc::default()).unwrap();
    door.cycle_ended(true);
    let body = signed(&heartbeat("n1", 5), "n1");
    assert!(exchange(door.address(), &head("n1", body.len()), &body).starts_with("HTTP/1.1 200 "));
    assert_eq!(inbox.heard(&node("n1")), heard);
}

#[test]
fn health_says_who_leads() {
    let bed = Bed::leading();
    let ask = "GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    assert!(exchange(bed.door.address(), ask, b"").ends_with("leading\n"));
}
