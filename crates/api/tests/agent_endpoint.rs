//! The agent endpoint without an engine: which messages it accepts, and how it rejects the others.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    sync::Arc,
    time::Duration,
};

use doctor_api::{
    AgentInbox, AgentListener, MetricsListener, ProcessMetrics, TokenReviewCache, metrics::MetricsSettings,
};
use doctor_backend::{
    ObservedNode,
    clock::{Clock, SystemClock},
    token_review::{ReviewFuture, TokenReviewError, TokenReviewer},
};
use doctor_checks::{
    Catalogue,
    document::{AgentReport, CheckRound, ConfirmedResults, DroppedReports, RunKey, Schema, Versions},
    drain_permit::DrainPermit,
    profiles,
    site_profiles::SiteProfiles,
};
use doctor_core::{
    ids::{NodeName, PoolName, TestId},
    node::{Marks, Node, Occupancy},
    plan::TakeOutPermit,
    policy::Policy,
    time::{Span, Timestamp},
};
use doctor_engine::{inbox::Inbox, settings::Settings, trigger::Trigger};
use doctor_store::{
    Store,
    records::{AgentAuth, AgentConfirmation, AgentKey},
};

struct Fixture {
    store: Store,
    listener: AgentListener,
    inbox: AgentInbox,
    trigger: Arc<Trigger>,
}

fn node(name: &str) -> NodeName {
    NodeName::new(name).unwrap()
}

fn key(name: &str) -> RunKey {
    RunKey::new([name.as_bytes()[1]; 32])
}

impl Fixture {
    /// `n1` and `n2` are enrolled, `n3` is revoked.
    fn new() -> Self {
        let store = Store::open_in_memory().unwrap();
        for name in ["n1", "n2", "n3"] {
            store.enroll_agent(&node(name), &key(name), "ann", "x", Timestamp::from_secs(1000)).unwrap();
        }
        store.revoke_agent(&node("n3"), "ann", "x", Timestamp::from_secs(1001)).unwrap();
        let trigger = Arc::new(Trigger::default());
        let at = "127.0.0.1:0".parse().unwrap();
        let (listener, inbox) = AgentListener::open(at, &store, Arc::new(SystemClock), Arc::clone(&trigger)).unwrap();
        Self { store, listener, inbox, trigger }
    }

    /// With a cluster that vouches for agents.
    fn with_token_reviews() -> Self {
        let mut fixture = Self::new();
        let (at, tokens) = ("127.0.0.1:0".parse().unwrap(), TokenReviewCache::new(Arc::new(Cluster), Span::minutes(1)));
        let opened = AgentListener::open_with(
            at,
            doctor_api::CONNECTIONS_PER_ADDRESS,
            &fixture.store,
            Arc::new(SystemClock),
            Arc::clone(&fixture.trigger),
            Some(tokens),
        );
        (fixture.listener, fixture.inbox) = opened.unwrap();
        fixture.listener.cycle_ended(true);
        fixture
    }

    #[track_caller]
    fn expect_with_token(&self, status: &str, name: &str, token: &str, report: &AgentReport) -> String {
        let body = report.sign(&RunKey::from_token(token)).unwrap();
        let head = head(name, body.len()).replace("\r\n\r\n", &format!("\r\nauthorization: Bearer {token}\r\n\r\n"));
        let response = exchange(self.listener.address(), &head, &body);
        assert!(response.starts_with(&format!("HTTP/1.1 {status} ")), "{response}");
        response
    }

    fn leading() -> Self {
        let fixture = Self::new();
        fixture.listener.cycle_ended(true);
        fixture
    }

    fn post(&self, name: &str, body: &[u8]) -> String {
        exchange(self.listener.address(), &head(name, body.len()), body)
    }

    #[track_caller]
    fn expect(&self, status: &str, name: &str, body: &[u8]) -> String {
        let response = self.post(name, body);
        assert!(response.starts_with(&format!("HTTP/1.1 {status} ")), "{response}");
        response
    }
}

/// A cluster whose token for the agent on a node is the node's name.
struct Cluster;

impl TokenReviewer for Cluster {
    fn review(&self, token: String) -> ReviewFuture {
        Box::pin(async move {
            match token.as_str() {
                "away" => Err(TokenReviewError::Unavailable("connection refused".to_owned())),
                "old" => Err(TokenReviewError::Rejected("it has expired".to_owned())),
                name => Ok(node(name)),
            }
        })
    }
}

fn head(name: &str, length: usize) -> String {
    format!(
        "POST /api/v1/ingest HTTP/1.1\r\nhost: x\r\nx-doctor-node: {name}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n"
    )
}

fn exchange(to: SocketAddr, head: &str, body: &[u8]) -> String {
    let mut stream = TcpStream::connect(to).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(240))).unwrap();
    stream.write_all(head.as_bytes()).unwrap();
    // The endpoint may reject before it has read everything.
    let _read = stream.write_all(body);
    let mut response = Vec::new();
    let _reset = stream.read_to_end(&mut response);
    String::from_utf8(response).unwrap()
}

fn heartbeat(name: &str, number: u64) -> AgentReport {
    let versions = Versions { program: "0.1.0".to_owned(), schema: Schema::CURRENT, policy: 1, queued: 0 };
    AgentReport::heartbeat(node(name), number, Timestamp::from_secs(2000 + number as i64), versions)
}

/// A report that the engine has to store.
fn report(name: &str, number: u64) -> AgentReport {
    let at = Timestamp::from_secs(2000);
    AgentReport {
        dropped: Some(DroppedReports { reports: 1, checks: [].into(), from: at, to: at }),
        ..heartbeat(name, number)
    }
}

fn signed(report: &AgentReport, by: &str) -> Vec<u8> {
    report.sign(&key(by)).unwrap()
}

#[test]
fn an_agent_that_is_unknown_or_revoked_is_rejected_before_its_body_is_read() {
    let fixture = Fixture::leading();
    assert!(fixture.expect("401", "n9", b"x").contains("`doctor agent enroll n9`"));
    assert!(fixture.expect("401", "n3", &signed(&heartbeat("n3", 1), "n3")).contains("revoked"));
    fixture.expect("400", "not a name", b"x");
    let no_length = "POST /api/v1/ingest HTTP/1.1\r\nhost: x\r\nx-doctor-node: n1\r\nconnection: close\r\n\r\n";
    assert!(exchange(fixture.listener.address(), no_length, b"").starts_with("HTTP/1.1 411"));
    // Rejected by its announced length alone: no byte of it is sent.
    assert!(exchange(fixture.listener.address(), &head("n1", 16 << 21), b"").starts_with("HTTP/1.1 413"));
}

#[test]
fn no_node_speaks_for_another() {
    let mut fixture = Fixture::leading();
    assert!(fixture.expect("403", "n2", &signed(&report("n2", 1), "n1")).contains("the report is not signed by n2\n"));
    fixture.expect("403", "n2", &signed(&report("n1", 1), "n1"));
    let other = fixture.expect("403", "n1", &signed(&report("n2", 1), "n1"));
    assert!(other.contains("the report is about n2; n1 can report only about itself"), "{other}");
    fixture.expect("403", "n1", b"doctor-report-1 nonsense");
    let mut changed = signed(&report("n1", 1), "n1");
    *changed.last_mut().unwrap() ^= 1;
    fixture.expect("403", "n1", &changed);
    assert_eq!(fixture.store.queued_count().unwrap(), 0, "no message reached the queue");
    assert!(
        fixture.inbox.take_last_reports(SystemClock.now().plus(Span::hours(1))).is_empty(),
        "no contact was recorded"
    );
}

#[test]
fn a_newer_schema_is_rejected_with_its_version() {
    let fixture = Fixture::leading();
    let mut newer = report("n1", 1);
    newer.versions.schema = Schema { major: 7, minor: 3 };
    assert!(fixture.expect("409", "n1", &signed(&newer, "n1")).contains("schema 7.3"));
    newer.versions.schema = Schema::OLDEST;
    newer.dropped = None;
    fixture.expect("200", "n1", &signed(&newer, "n1"));
}

#[test]
fn a_controller_that_does_not_lead_accepts_nothing() {
    let fixture = Fixture::new();
    let response = fixture.expect("503", "n1", &signed(&heartbeat("n1", 1), "n1"));
    assert!(response.contains("retry-after: "), "{response}");
    fixture.listener.cycle_ended(true);
    fixture.expect("200", "n1", &signed(&heartbeat("n1", 1), "n1"));
}

#[test]
fn a_report_is_answered_when_it_is_durable_and_wakes_the_engine() {
    let fixture = Fixture::leading();
    // No engine runs here: the answer does not depend on it.
    assert!(fixture.expect("200", "n1", &signed(&report("n1", 1), "n1")).ends_with("kept\n"));
    assert!(fixture.trigger.wait(Duration::from_secs(120)), "the engine was not woken");
    let waiting = fixture.store.queued_messages(None, 10).unwrap();
    assert_eq!((waiting.len(), waiting[0].node.clone(), waiting[0].run), (1, node("n1"), None));
    // A cycle that does not know the cluster yet leaves it; the next one follows immediately.
    fixture.listener.cycle_ended(true);
    assert!(fixture.trigger.wait(Duration::ZERO));
    fixture.store.queued_messages(None, 10).unwrap();
    fixture.listener.cycle_ended(true);
    assert!(!fixture.trigger.wait(Duration::ZERO), "two cycles have left it: it waits for the regular one");
}

#[test]
fn a_report_of_a_node_that_the_cluster_does_not_have_stays_on_the_node() {
    let mut fixture = Fixture::leading();
    let observed = |name: &str| {
        let node = Node {
            name: node(name),
            pool: PoolName::new("gpu").unwrap(),
            occupancy: Occupancy::Free,
            marks: Marks::default(),
            hardware: None,
            sku: None,
            declared: None,
            overrides: None,
        };
        ObservedNode { node: node.into(), agent_last_seen: None, jobs: Vec::new() }
    };
    fixture.inbox.set_nodes(&[observed("n1"), observed("n5")]);
    fixture.expect("200", "n1", &signed(&report("n1", 1), "n1"));
    assert!(fixture.trigger.wait(Duration::ZERO));
    let response = fixture.expect("503", "n2", &signed(&report("n2", 1), "n2"));
    assert!(response.contains("n2 was not a node of this cluster when it was last observed"), "{response}");
    assert!(response.contains("retry-after: ") && fixture.trigger.wait(Duration::ZERO), "the engine looks again");
    fixture.expect("200", "n2", &signed(&heartbeat("n2", 2), "n2"));
    fixture.inbox.set_nodes(&[observed("n1"), observed("n2")]);
    fixture.expect("200", "n2", &signed(&report("n2", 1), "n2"));
}

#[test]
fn too_many_reports_of_one_node_do_not_keep_others_out() {
    let fixture = Fixture::leading();
    let mut accepted = 0;
    let refused = loop {
        let response = fixture.post("n1", &signed(&report("n1", accepted + 1), "n1"));
        if !response.starts_with("HTTP/1.1 200 ") {
            break response;
        }
        accepted += 1;
    };
    assert!(refused.starts_with("HTTP/1.1 503 ") && refused.contains("too many reports of n1 wait"), "{refused}");
    assert!((2..100).contains(&accepted), "{accepted}");
    fixture.expect("200", "n2", &signed(&report("n2", 1), "n2"));
    assert_eq!(fixture.store.queued_count().unwrap(), accepted + 1, "nothing that was accepted is lost");
}

#[test]
fn waiting_reports_on_nodes_and_at_the_endpoint_are_exported_as_metrics() {
    let fixture = Fixture::leading();
    let policy = Policy::built_in();
    let catalogue = Catalogue::with_site_checks(&policy);
    let settings = Settings::new(policy, catalogue, profiles::built_in().profiles()).unwrap();
    let process_metrics = || ProcessMetrics { spool: Some(fixture.listener.spool()), traces: None };
    // A scrape is cached; a new listener computes it again.
    let scrape = || {
        let at = "127.0.0.1:0".parse().unwrap();
        let (clock, metrics) = (Arc::new(SystemClock), MetricsSettings::default());
        let metrics_listener =
            MetricsListener::open(at, metrics, fixture.store.clone(), clock, settings.clone(), process_metrics())
                .unwrap();
        exchange(metrics_listener.address(), "GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", b"")
    };
    let assert_waiting = |location: &str, count: u32| {
        let (text, line) = (scrape(), format!("doctor_spool_waiting{{place=\"{location}\"}} {count}\n"));
        assert!(text.contains(&line), "{line} is not in {text}");
    };
    let send_backlog = |name: &str, number: u64, waiting: u32| {
        let mut report = heartbeat(name, number);
        report.versions.queued = waiting;
        fixture.expect("200", name, &signed(&report, name));
    };
    ["nodes", "endpoint", "history"].iter().for_each(|location| assert_waiting(location, 0));
    send_backlog("n1", 1, 7);
    send_backlog("n2", 1, 4);
    assert_waiting("nodes", 11);
    send_backlog("n1", 2, 0);
    assert_waiting("nodes", 4);
    fixture.expect("200", "n1", &signed(&report("n1", 3), "n1"));
    assert_waiting("history", 1);
    assert_waiting("endpoint", 0);
}

#[test]
fn heartbeats_are_recorded_without_the_engine_and_a_replay_is_not() {
    let mut fixture = Fixture::leading();
    let enrolled = Some(Timestamp::from_secs(1000));
    assert_eq!(fixture.inbox.last_report(&node("n1")), enrolled, "an agent counts from its enrolment");
    assert_eq!((fixture.inbox.last_report(&node("n3")), fixture.inbox.last_report(&node("n9"))), (None, None));
    fixture.expect("200", "n1", &signed(&heartbeat("n1", 5), "n1"));
    let last_contact = fixture.inbox.last_report(&node("n1"));
    assert!(last_contact > enrolled);
    assert_eq!(fixture.store.queued_count().unwrap(), 0);
    let later = SystemClock.now().plus(Span::hours(1));
    let lease = fixture.store.acquire("test", SystemClock.now(), Span::hours(2)).unwrap();
    let contacts = fixture.inbox.take_last_reports(later);
    assert_eq!(contacts.iter().map(|(node, contact)| (node.as_str(), contact.number)).collect::<Vec<_>>(), [("n1", 5)]);
    fixture.store.record_agent_contacts(&lease, &contacts).unwrap();
    assert!(fixture.inbox.take_last_reports(later.plus(Span::from_secs(59))).is_empty(), "at most once a minute");

    // A client replays it, also to a controller started since.
    fixture.expect("200", "n1", &signed(&heartbeat("n1", 5), "n1"));
    assert_eq!(fixture.inbox.last_report(&node("n1")), last_contact);
    let at = "127.0.0.1:0".parse().unwrap();
    let (listener, inbox) = AgentListener::open(at, &fixture.store, Arc::new(SystemClock), Arc::default()).unwrap();
    listener.cycle_ended(true);
    let body = signed(&heartbeat("n1", 5), "n1");
    assert!(exchange(listener.address(), &head("n1", body.len()), &body).starts_with("HTTP/1.1 200 "));
    assert_eq!(inbox.last_report(&node("n1")), last_contact);
}

#[test]
fn a_node_that_its_cluster_vouches_for_needs_no_enrolment_and_is_known_from_then_on() {
    let mut fixture = Fixture::with_token_reviews();
    fixture.expect_with_token("200", "n7", "n7", &heartbeat("n7", 5));
    let last_contact = fixture.inbox.last_report(&node("n7"));
    assert!(last_contact.is_some());
    let lease = fixture.store.acquire("test", SystemClock.now(), Span::hours(2)).unwrap();
    let contacts = fixture.inbox.take_last_reports(SystemClock.now());
    assert_eq!(contacts.iter().map(|(node, contact)| (node.as_str(), contact.number)).collect::<Vec<_>>(), [("n7", 5)]);
    fixture.store.record_agent_contacts(&lease, &contacts).unwrap();
    assert!(matches!(fixture.store.agent_key(&node("n7")).unwrap(), AgentKey::ClusterToken { last_contact: Some(_) }));
    let row = fixture.store.agents().unwrap().into_iter().find(|agent| agent.node == node("n7")).unwrap();
    assert_eq!((row.auth, row.revoked), (AgentAuth::Token, None));
    assert_eq!(fixture.store.audit(1, None).unwrap()[0].what, "introduce-agent");
    // A replay proves nothing about the present, and without a token the name is rejected.
    fixture.expect_with_token("200", "n7", "n7", &heartbeat("n7", 5));
    assert_eq!(fixture.inbox.last_report(&node("n7")), last_contact);
    fixture.expect("401", "n7", &heartbeat("n7", 6).sign(&RunKey::from_token("n7")).unwrap());
    // An enrolled agent may switch to tokens.
    fixture.expect_with_token("200", "n1", "n1", &heartbeat("n1", 1));
    fixture.expect("200", "n1", &signed(&heartbeat("n1", 2), "n1"));
}

#[test]
fn a_token_is_valid_for_its_own_node_while_the_cluster_confirms_it() {
    let mut fixture = Fixture::with_token_reviews();
    let error = fixture.expect_with_token("403", "n2", "n7", &report("n2", 1));
    assert!(error.contains("the token belongs to the agent on n7; it cannot report for n2"), "{error}");
    assert!(
        fixture
            .expect_with_token("403", "n7", "n7", &report("n2", 1))
            .contains("the report is about n2; n7 can report only")
    );
    assert!(fixture.expect_with_token("401", "n7", "old", &report("n7", 1)).contains("it has expired"));
    let later = fixture.expect_with_token("503", "n7", "away", &report("n7", 1));
    assert!(later.contains("retry-after") && later.contains("connection refused"), "{later}");
    // A report signed with another key than its token's.
    let body = signed(&report("n7", 1), "n1");
    let head = head("n7", body.len()).replace("\r\n\r\n", "\r\nauthorization: Bearer n7\r\n\r\n");
    assert!(exchange(fixture.listener.address(), &head, &body).starts_with("HTTP/1.1 403 "));
    fixture.expect_with_token("401", "n3", "n3", &report("n3", 1)).contains("revoked");
    assert_eq!(fixture.store.queued_count().unwrap(), 0);
    assert!(fixture.inbox.take_last_reports(SystemClock.now()).is_empty());
    assert!(
        Fixture::leading().expect_with_token("401", "n1", "n1", &report("n1", 1)).contains("tokens are not accepted")
    );
}

#[test]
fn an_agent_that_the_cluster_vouches_for_can_be_revoked() {
    let mut fixture = Fixture::with_token_reviews();
    fixture.expect_with_token("200", "n7", "n7", &heartbeat("n7", 1));
    fixture.inbox.take_last_reports(SystemClock.now());
    assert!(fixture.store.revoke_agent(&node("n7"), "ann", "taken over", SystemClock.now()).unwrap());
    assert!(fixture.expect_with_token("401", "n7", "n7", &heartbeat("n7", 2)).contains("revoked"));
    fixture.store.enroll_agent(&node("n7"), &key("n7"), "ann", "cleaned", SystemClock.now()).unwrap();
    fixture.expect_with_token("200", "n7", "n7", &heartbeat("n7", 3));
}

#[test]
fn agents_get_no_health_probes() {
    let fixture = Fixture::leading();
    let request = "GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    assert!(exchange(fixture.listener.address(), request, b"").starts_with("HTTP/1.1 404 "));
}

#[test]
fn each_response_says_whether_the_breaker_permits_a_drain() {
    let fixture = Fixture::leading();
    let permit = |name: &str, number: u64| {
        let response = fixture.expect("200", name, &heartbeat(name, number).sign(&key(name)).unwrap());
        let value = response.lines().find_map(|line| line.strip_prefix("x-doctor-permit: ").map(str::to_owned))?;
        Some(DrainPermit::open(&value, &node(name), number, &key(name)).expect("the permit is signed for this report"))
    };
    assert_eq!(permit("n1", 1), None, "no cycle has ended yet");
    let every = Duration::from_secs(60);
    fixture.listener.set_drain_permits(Some(TakeOutPermit::AllExcept([node("n2")].into())), every);
    assert_eq!(permit("n1", 2), Some(DrainPermit { duration: Span::minutes(2) }));
    assert_eq!(permit("n2", 1), None, "the breaker's limit of its pool is reached");
    fixture.listener.set_drain_permits(Some(TakeOutPermit::NoNode), every);
    assert_eq!(permit("n1", 3), None, "the breaker opened");
    fixture.listener.set_drain_permits(Some(TakeOutPermit::AllExcept([].into())), every);
    assert!(permit("n1", 4).is_some());
    fixture.listener.set_drain_permits(None, every);
    assert_eq!(permit("n1", 5), None, "the store failed: unknown");
}

#[test]
fn results_that_a_heartbeat_confirms_are_handed_over_once_a_minute() {
    let mut fixture = Fixture::leading();
    let confirming = |number: u64, through: u64, age: Span| {
        let checks = vec![TestId::new("memory").unwrap()];
        let confirmed = Some(ConfirmedResults { through, rounds: vec![CheckRound { age, checks }] });
        signed(&AgentReport { confirmed, ..heartbeat("n1", number) }, "n1")
    };
    let began = SystemClock.now();
    fixture.expect("200", "n1", &confirming(5, 3, Span::minutes(2)));
    fixture.expect("200", "n1", &confirming(6, 4, Span::ZERO));
    // A client replays an old one.
    fixture.expect("200", "n1", &confirming(5, 3, Span::ZERO));
    fixture.expect("200", "n2", &signed(&heartbeat("n2", 1), "n2"));
    assert!(fixture.inbox.take_confirmations(SystemClock.now()).is_empty(), "not yet");
    let later = SystemClock.now().plus(Span::minutes(1));
    let confirmed = fixture.inbox.take_confirmations(later);
    let [AgentConfirmation { node: of, through: 4, rounds }] = &confirmed[..] else { panic!("{confirmed:?}") };
    assert_eq!((of, rounds.len()), (&node("n1"), 2));
    assert!(rounds[0].at < began && rounds[1].at >= began, "by the controller's clock: {rounds:?}");
    assert!(fixture.inbox.take_confirmations(later.plus(Span::minutes(1))).is_empty());
}

#[test]
fn an_agent_gets_the_sites_profiles_if_it_has_others() {
    let fixture = Fixture::leading();
    let ask = |name: &str, number: u64, profiles: Option<String>| {
        let report = AgentReport { profiles, ..heartbeat(name, number) };
        let response = fixture.expect("200", name, &signed(&report, name));
        let (_, body) = response.split_once("\r\n\r\n").unwrap();
        assert_eq!(SiteProfiles::is_reply(body), body != "heard\n", "{body}");
        SiteProfiles::open(body, &node(name), number, &key(name))
    };
    let none = SiteProfiles::default().digest();
    assert_eq!(ask("n1", 1, Some(none.clone())), None, "the site has none either");
    let site = SiteProfiles::new(vec!["sku = \"ours\"\nversion = 1\n".to_owned()]).unwrap();
    fixture.listener.set_site_profiles(site.clone());
    assert_eq!(ask("n1", 2, Some(none.clone())), Some(site.clone()));
    assert_eq!(ask("n2", 2, Some(none)), Some(site.clone()), "signed for each node");
    assert_eq!(ask("n1", 3, Some(site.digest())), None);
    assert_eq!(ask("n1", 4, None), None, "an agent of the previous schema");
    fixture.listener.set_site_profiles(SiteProfiles::default());
    assert_eq!(ask("n1", 5, Some(site.digest())), Some(SiteProfiles::default()), "they were removed");
}
