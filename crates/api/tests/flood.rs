//! Floods: clients without credentials open hundreds of connections to one listener. It still answers other addresses, and so do
//! the other listeners. And slow clients: each is disconnected at its deadline.

use std::{
    io::{ErrorKind, Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    sync::Arc,
    time::{Duration, Instant},
};

use doctor_api::{
    AgentInbox, AgentListener, MetricsListener, ProbesListener, ProcessMetrics,
    metrics::MetricsSettings,
    operator_api::{ApiDeps, ApiServer, WebConfig},
};
use doctor_backend::{
    clock::{Clock, SystemClock},
    open_files,
};
use doctor_checks::{
    Catalogue,
    document::{AgentReport, RunKey, Schema, Versions},
};
use doctor_core::{ids::NodeName, policy::Policy, profile::Profiles, time::Timestamp};
use doctor_engine::settings::Settings;
use doctor_store::Store;

const CONNECTIONS: usize = 900;
const ATTACKER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 9);
const OTHERS: [Ipv4Addr; 2] = [Ipv4Addr::new(127, 0, 0, 1), Ipv4Addr::new(127, 0, 0, 2)];
/// An answer within this time was not waited for until the deadline of a client of the flood, of which the shortest is 5 s.
const AT_ONCE: Duration = Duration::from_secs(3);
/// A machine that is busy with other tests may miss it.
const ATTEMPTS: usize = 5;
/// Distinguishes a server that never disconnects from a slow machine.
const PATIENCE: Duration = Duration::from_secs(240);

/// All listeners of a controller that leads.
struct Controller {
    agents: AgentListener,
    _inbox: AgentInbox,
    api: ApiServer,
    probes: ProbesListener,
    metrics: MetricsListener,
}

fn at() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

impl Controller {
    fn start() -> Self {
        open_files::raise_limit();
        let store = Store::open_in_memory().unwrap();
        let node = NodeName::new("n1").unwrap();
        store.enroll_agent(&node, &RunKey::new([1; 32]), "ann", "x", Timestamp::from_secs(1000)).unwrap();
        let settings = || Settings::new(Policy::built_in(), Catalogue::built_in(), Profiles::default()).unwrap();
        let clock = Arc::new(SystemClock);
        let (agents, inbox) = AgentListener::open(at(), &store, clock.clone(), Arc::default()).unwrap();
        agents.cycle_ended(true);
        let deps = ApiDeps {
            store: store.clone(),
            clock: clock.clone(),
            cycle_trigger: Arc::default(),
            snapshot_feed: Arc::default(),
            share: None,
            settings: settings(),
            cli: None,
        };
        let metrics = MetricsSettings::default();
        Self {
            agents,
            _inbox: inbox,
            api: ApiServer::open(&WebConfig::listening_on(at()), deps).unwrap(),
            probes: ProbesListener::open(at(), store.clone()).unwrap(),
            metrics: MetricsListener::open(at(), metrics, store, clock, settings(), ProcessMetrics::default()).unwrap(),
        }
    }

    /// Returns each listener with a request that it answers to anyone, and the status.
    fn listeners(&self) -> [(&'static str, SocketAddr, &'static str, u16); 4] {
        [
            ("agents", self.agents.address(), "/api/v1/ingest", 405),
            ("API", self.api.address(), "/api/v1/whoami", 200),
            ("probes", self.probes.address(), "/healthz", 200),
            ("metrics", self.metrics.address(), "/metrics", 200),
        ]
    }
}

/// What the clients of a flood send before they fall silent.
#[derive(Debug, Clone, Copy)]
enum Flood {
    Nothing,
    HalfOfAHead,
    /// A request of an enrolled node's report whose body never comes.
    HeadOfAReport,
}

impl Flood {
    const ALL: [Self; 3] = [Self::Nothing, Self::HalfOfAHead, Self::HeadOfAReport];

    const fn bytes(self) -> &'static [u8] {
        match self {
            Self::Nothing => b"",
            Self::HalfOfAHead => b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx-a: ",
            Self::HeadOfAReport => {
                b"POST /api/v1/ingest HTTP/1.1\r\nhost: localhost\r\nx-doctor-node: n1\r\ncontent-length: 100000\r\n\r\n"
            }
        }
    }
}

/// Connects from an address of this machine.
fn connect(from: Ipv4Addr, to: SocketAddr) -> std::io::Result<TcpStream> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
    let stream = runtime.block_on(async {
        let socket = tokio::net::TcpSocket::new_v4()?;
        socket.bind((from, 0).into())?;
        tokio::time::timeout(PATIENCE, socket.connect(to)).await?
    })?;
    let stream = stream.into_std()?;
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Opens the connections of a flood. A connection that the listener refuses is part of it.
fn flood(to: SocketAddr, kind: Flood) -> Vec<TcpStream> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build().unwrap();
    let streams: Vec<tokio::net::TcpStream> = runtime.block_on(async {
        let mut streams = Vec::new();
        for _ in 0..CONNECTIONS {
            let socket = tokio::net::TcpSocket::new_v4().unwrap();
            socket.bind((ATTACKER, 0).into()).unwrap();
            // Where the queue of the listener is full, the kernel answers nothing.
            if let Ok(Ok(stream)) = tokio::time::timeout(Duration::from_millis(200), socket.connect(to)).await {
                streams.push(stream);
            } else if streams.len() > CONNECTIONS / 2 {
                break;
            }
        }
        streams
    });
    let mut streams: Vec<TcpStream> = streams.into_iter().map(|stream| stream.into_std().unwrap()).collect();
    for stream in &mut streams {
        // The listener may have closed it already.
        let _refused = stream.write_all(kind.bytes());
    }
    streams
}

/// Returns the status of the response, or `None` if there is none in time.
fn ask(from: Ipv4Addr, to: SocketAddr, path: &str, limit: Duration) -> Option<u16> {
    let began = Instant::now();
    let mut stream = connect(from, to).ok()?;
    write!(stream, "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").ok()?;
    stream.set_read_timeout(Some(limit.checked_sub(began.elapsed())?)).ok()?;
    let mut head = [0; 12];
    stream.read_exact(&mut head).ok()?;
    std::str::from_utf8(&head).ok()?.strip_prefix("HTTP/1.1 ")?.parse().ok()
}

#[test]
fn a_flood_of_one_listener_closes_none_of_them_to_other_addresses() {
    let controller = Controller::start();
    for (flooded, target, ..) in controller.listeners() {
        for kind in Flood::ALL {
            let unanswered = || -> Vec<String> {
                let held = flood(target, kind);
                let mut unanswered = Vec::new();
                for (name, to, path, status) in controller.listeners() {
                    for from in OTHERS {
                        let answer = ask(from, to, path, AT_ONCE);
                        if answer != Some(status) {
                            unanswered.push(format!("{name} to {from}: {answer:?}"));
                        }
                    }
                }
                drop(held);
                unanswered
            };
            let mut last = Vec::new();
            let answered = (0..ATTEMPTS).any(|_| {
                last = unanswered();
                last.is_empty()
            });
            assert!(answered, "{kind:?} to {flooded}: {last:?}");
        }
    }
}

/// Agents behind one gateway share an address with a client that only opens connections.
#[test]
fn silent_connections_give_way_to_requests_of_the_same_address() {
    let controller = Controller::start();
    for (name, to, path, status) in controller.listeners() {
        let answered = (0..ATTEMPTS).any(|_| {
            let _held = flood(to, Flood::Nothing);
            ask(ATTACKER, to, path, AT_ONCE) == Some(status)
        });
        assert!(answered, "{name}");
    }
}

#[test]
fn a_client_that_stops_before_the_end_of_its_request_is_disconnected() {
    let controller = Controller::start();
    let mut clients = Vec::new();
    for (name, to, ..) in controller.listeners() {
        for kind in Flood::ALL {
            let mut stream = connect(OTHERS[0], to).unwrap();
            stream.write_all(kind.bytes()).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            clients.push((name, kind, stream));
        }
    }
    // All of their deadlines run at the same time.
    for (name, kind, mut stream) in clients {
        let mut rest = Vec::new();
        // A reset ends the connection as well; a server that keeps it lets the read time out.
        let end = stream.read_to_end(&mut rest).map_err(|error| error.kind());
        let is_open = matches!(end, Err(ErrorKind::WouldBlock | ErrorKind::TimedOut));
        assert!(!is_open, "{kind:?} to {name}: {}", String::from_utf8_lossy(&rest));
    }
}

/// Posts a heartbeat of the enrolled node, and returns the status of the response.
fn post_heartbeat(from: Ipv4Addr, to: SocketAddr) -> Option<u16> {
    let versions = Versions { schema: Schema::CURRENT, ..Versions::default() };
    let report = AgentReport::heartbeat(NodeName::new("n1").unwrap(), 1, SystemClock.now(), versions);
    let body = report.sign(&RunKey::new([1; 32])).unwrap();
    let mut stream = connect(from, to).ok()?;
    let length = body.len();
    let head = format!(
        "POST /api/v1/ingest HTTP/1.1\r\nhost: x\r\nx-doctor-node: n1\r\ncontent-length: {length}\r\n\
         connection: close\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).ok()?;
    stream.write_all(&body).ok()?;
    status(&mut stream)
}

/// Reads the status of a response, for which there is no hurry.
fn status(stream: &mut TcpStream) -> Option<u16> {
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
    let mut head = [0; 12];
    stream.read_exact(&mut head).ok()?;
    std::str::from_utf8(&head).ok()?.strip_prefix("HTTP/1.1 ")?.parse().ok()
}

/// A client that announces long bodies and sends a byte of each gets memory for the bytes that it has sent.
#[test]
fn announced_bodies_of_one_address_do_not_keep_the_reports_of_others_out() {
    let controller = Controller::start();
    let to = controller.agents.address();
    let announce = || {
        let mut stream = connect(ATTACKER, to).unwrap();
        let head = "POST /api/v1/ingest HTTP/1.1\r\nhost: x\r\nx-doctor-node: n1\r\ncontent-length: 16777216\r\n\r\nd";
        stream.write_all(head.as_bytes()).unwrap();
        stream
    };
    let _held: Vec<TcpStream> = (0..100).map(|_| announce()).collect();
    assert_eq!(post_heartbeat(OTHERS[1], to), Some(200));
}

/// 400 would be final: the agent would count the report as lost.
#[test]
fn a_body_that_stops_on_its_way_is_answered_so_that_its_sender_repeats_it() {
    let controller = Controller::start();
    let mut stream = connect(OTHERS[0], controller.agents.address()).unwrap();
    stream.write_all(Flood::HeadOfAReport.bytes()).unwrap();
    stream.write_all(b"doctor-report-1 ").unwrap();
    assert_eq!(status(&mut stream), Some(408));
}
