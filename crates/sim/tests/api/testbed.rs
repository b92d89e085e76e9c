//! A controller on a simulated cluster with an API, and a client that sends exactly what a test specifies.

use std::{
    collections::BTreeMap,
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use doctor_api::operator_api::{ApiDeps, ApiServer, WebConfig};
use doctor_backend::clock::{Clock, SystemClock};
use doctor_core::{
    ids::NodeName,
    snapshot::CommandKind,
    time::{Span, Timestamp},
};
use doctor_engine::{share::Share, snapshot_feed::SnapshotFeed, trigger::Trigger};
use doctor_sim::{
    FaultKind, Incident, WorldConfig,
    harness::session::{Session, SessionConfig},
};
use doctor_store::{
    Store,
    access::{Role, TokenDigest, TokenRow},
};
use serde_json::Value;
use tempfile::TempDir;

/// The limit of a wait, long enough for a machine under load.
pub(crate) const PATIENCE: Duration = Duration::from_secs(240);

pub(crate) const VIEWER: &str = "doctor_token_viewer";
pub(crate) const OPERATOR: &str = "doctor_token_operator";

/// The API of a simulated cluster.
pub(crate) struct Testbed {
    pub(crate) web: ApiServer,
    pub(crate) store: Store,
    _share: TempDir,
}

/// A response.
#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body: Vec<u8>,
}

impl Response {
    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        let text = String::from_utf8_lossy(&self.body);
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {} {text}", self.status))
    }

    pub(crate) fn code(&self) -> String {
        self.json()["error"]["code"].as_str().unwrap_or_default().to_owned()
    }
}

#[track_caller]
pub(crate) fn until(what: &str, mut level: impl FnMut() -> bool) {
    let began = Instant::now();
    while !level() {
        assert!(began.elapsed() < PATIENCE, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Returns the API of a cluster of this many nodes after this many hours, and its session.
pub(crate) fn live(nodes: u32, hours: i64) -> (Testbed, Session) {
    played(nodes, hours, |_| {})
}

/// The same, with an action one hour before the end.
fn played(nodes: u32, hours: i64, happens: impl FnOnce(&Session)) -> (Testbed, Session) {
    let share = tempfile::tempdir().unwrap();
    let mut config = SessionConfig::new(WorldConfig::of(nodes).with_seed(7));
    config.world.share = Some(share.path().to_owned());
    config.share = Some(share.path().to_owned());
    let mut session = Session::new(config).unwrap();
    let end = session.now().plus(Span::hours(hours));
    session.run_until(end.minus(Span::hours(1)), |_, _| Ok(())).unwrap();
    happens(&session);
    session.run_until(end, |_, _| Ok(())).unwrap();
    let snapshot_feed = Arc::new(SnapshotFeed::default());
    let parts = ApiDeps {
        store: session.store().clone(),
        clock: session.clock(),
        cycle_trigger: Arc::new(Trigger::default()),
        snapshot_feed: Arc::clone(&snapshot_feed),
        share: Some(Share::open(share.path()).unwrap()),
        settings: session.settings().clone(),
        cli: None,
    };
    let web = ApiServer::open(&WebConfig::listening_on("127.0.0.1:0".parse().unwrap()), parts).unwrap();
    session.set_snapshot_feed(snapshot_feed);
    session.cycle().unwrap();
    let bed = Testbed { store: session.store().clone(), web, _share: share };
    // Before the first cluster state, the API lists the store's nodes as not observed. A test that continued from there
    // would miss the events between that list and the first state.
    until("the first cluster state", || {
        let nodes = bed.get("/nodes").json()["items"].clone();
        nodes
            .as_array()
            .is_some_and(|nodes| nodes.iter().any(|node| node["pool"].as_str().is_some_and(|pool| pool != "unknown")))
    });
    (bed, session)
}

/// Returns a bed that many tests read.
pub(crate) fn shared() -> &'static Testbed {
    static BED: OnceLock<Testbed> = OnceLock::new();
    BED.get_or_init(|| {
        let (bed, _) = played(24, 48, |session| {
            let node = |name: &str| NodeName::new(name).unwrap();
            let fault = Incident::Fault { node: node("node004"), kind: FaultKind::GpuOffBus };
            assert!(session.backend().world().inject(&fault));
            let command = CommandKind::Quarantine { node: node("node005"), evict: false };
            session.store().add_command(&command, "ann", "it smells", session.now()).unwrap();
        });
        bed
    })
}

impl Testbed {
    pub(crate) fn address(&self) -> SocketAddr {
        self.web.address()
    }

    /// Creates tokens, after which every request needs one.
    pub(crate) fn with_tokens(&self) {
        for (name, token, role) in [
            ("vi", VIEWER, Role::Viewer),
            ("op", OPERATOR, Role::Operator),
            ("old", "doctor_token_old", Role::Operator),
        ] {
            let created = SystemClock.now();
            let expires = (name == "old").then(|| Timestamp::from_secs(1000));
            let (name, digest) = (name.to_owned(), TokenDigest::of(token));
            let row = TokenRow { name, role, by: "ann".to_owned(), created, expires, revoked: None, digest };
            self.store.add_token(&row, "for tests").unwrap();
        }
        until("tokens are needed", || self.get("/whoami").status == 401);
    }

    pub(crate) fn get(&self, path: &str) -> Response {
        self.send("GET", path, &[], b"")
    }

    pub(crate) fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Response {
        let mut stream = TcpStream::connect(self.address()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut head = format!("{method} /api/v1{path} HTTP/1.1\r\nconnection: close\r\n");
        if !headers.iter().any(|(name, _)| *name == "host") {
            head += "host: localhost\r\n";
        }
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        head += &format!("content-length: {}\r\n\r\n", body.len());
        stream.write_all(head.as_bytes()).unwrap();
        // The server may close the connection of a rejected request before it is sent completely.
        let _result = stream.write_all(body);
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        parsed(&answer)
    }

    /// Sends an action as a program with this token would.
    pub(crate) fn act(&self, token: &str, action: &str, body: &Value) -> Response {
        let authorization = format!("Bearer {token}");
        let headers = [("authorization", authorization.as_str()), ("content-type", "application/json")];
        self.send("POST", &format!("/actions/{action}"), &headers, body.to_string().as_bytes())
    }
}

fn parsed(answer: &[u8]) -> Response {
    let end = answer.windows(4).position(|four| four == b"\r\n\r\n").unwrap_or_else(|| panic!("no head: {answer:?}"));
    let head = String::from_utf8_lossy(&answer[..end]).into_owned();
    let mut lines = head.lines();
    let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
    let headers =
        lines.filter_map(|line| line.split_once(": ")).map(|(name, value)| (name.to_owned(), value.to_owned()));
    Response { status, headers: headers.collect(), body: answer[end + 4..].to_vec() }
}
