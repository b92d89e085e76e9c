//! The control loop under calls that are slow or hang, wrong clocks, a full disk, and what an operator does about a lease.
//!
//! The cluster is the simulated one in a process of its own. Between it and a controller is a relay that can hold
//! answers back: it sends a space every moment, so that no timeout of the client ends the call, as a busy scheduler or a
//! file server does to calls that no timeout reaches.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use doctor_backend::clock::{Clock, SystemClock};
use doctor_core::{run::RunState, time::Span};
use doctor_store::{LeaseClock, Store, StoreUrl};
use doctor_testbed::skip::skip_without_program;

use crate::{
    simulated::serve_at,
    this_machine::Service,
    workdir::{Workdir, wait_until},
};

/// How the relay treats requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RelayMode {
    Forward,
    /// Each submission takes this long, unless the mode changes.
    SlowSubmissions(Duration),
    /// No request is answered.
    Hang,
}

/// The pause between two bytes of an answer that is held back.
const TRICKLE: Duration = Duration::from_millis(200);

struct Relay {
    mode: Arc<Mutex<RelayMode>>,
    submitted: Arc<AtomicUsize>,
    hanging: Arc<AtomicUsize>,
}

impl Relay {
    fn start(socket: &Path, cluster: PathBuf) -> Self {
        let listener = UnixListener::bind(socket).unwrap();
        let relay =
            Self { mode: Arc::new(Mutex::new(RelayMode::Forward)), submitted: Arc::default(), hanging: Arc::default() };
        let (mode, submitted, hanging) =
            (Arc::clone(&relay.mode), Arc::clone(&relay.submitted), Arc::clone(&relay.hanging));
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let (mode, submitted, hanging) = (Arc::clone(&mode), Arc::clone(&submitted), Arc::clone(&hanging));
                let cluster = UnixStream::connect(&cluster).unwrap();
                // Ends with the client or the cluster.
                std::thread::spawn(move || relay_calls(client, cluster, &mode, &submitted, &hanging));
            }
        });
        relay
    }

    fn set(&self, mode: RelayMode) {
        *self.mode.lock().unwrap() = mode;
    }
}

fn relay_calls(
    client: UnixStream,
    cluster: UnixStream,
    mode: &Mutex<RelayMode>,
    submitted: &AtomicUsize,
    hanging: &AtomicUsize,
) -> std::io::Result<()> {
    let (mut requests, mut answers) = (BufReader::new(client.try_clone()?), BufReader::new(cluster.try_clone()?));
    let (mut client, mut cluster) = (client, cluster);
    loop {
        let mut line = String::new();
        if requests.read_line(&mut line)? == 0 {
            return Ok(());
        }
        let is_submission = line.starts_with("{\"submit\"");
        let current = *mode.lock().unwrap();
        if current == RelayMode::Hang {
            hanging.fetch_add(1, Ordering::SeqCst);
            loop {
                client.write_all(b" ")?;
                std::thread::sleep(TRICKLE);
            }
        }
        if let (RelayMode::SlowSubmissions(delay), true) = (current, is_submission) {
            let began = Instant::now();
            while began.elapsed() < delay && *mode.lock().unwrap() == current {
                client.write_all(b" ")?;
                std::thread::sleep(TRICKLE);
            }
        }
        cluster.write_all(line.as_bytes())?;
        line.clear();
        if answers.read_line(&mut line)? == 0 {
            return Ok(());
        }
        submitted.fetch_add(usize::from(is_submission), Ordering::SeqCst);
        client.write_all(line.as_bytes())?;
    }
}

/// A minute of the cluster is a second: cycles start every second, and the lease lasts thirty.
const SPEED: &str = "60";
/// A submission that takes longer than the lease, and less than the 60 s without progress after which a loop counts as
/// stuck. On a slow machine both the renewal of the lease and the end of a submission may come 20 s late.
const SLOW: Duration = Duration::from_secs(40);

/// A directory with two configurations of one store: that of a controller behind a relay, and that of a standby which
/// reaches the cluster directly.
fn two_controllers() -> Workdir {
    let workdir = Workdir::new();
    std::fs::create_dir(workdir.path("data")).unwrap();
    workdir.write("policy.toml", "mode = \"act\"\n[limits]\njobs = 12\nper_share = 12\n");
    for (name, socket) in [("doctor.toml", "relay.sock"), ("standby.toml", "sim.sock")] {
        workdir.write(
            name,
            &format!(
                "store = \"doctor.db\"\ndata = \"data\"\npolicy = \"policy.toml\"\ncycle = \"1m\"\nlease = \"30m\"\nworkers = 4\n\
                 [backend.sim]\nsocket = \"{socket}\"\n"
            ),
        );
    }
    workdir
}

fn store(workdir: &Workdir) -> Store {
    Store::open(&StoreUrl::Sqlite(workdir.path("doctor.db"))).unwrap()
}

fn standby(workdir: &Workdir) -> Service {
    let mut standby = Service::spawn(workdir.command(&["serve", "--config", "standby.toml"]));
    standby.wait_for_log("another controller leads; this one waits");
    standby
}

#[test]
fn a_cycle_longer_than_the_lease_keeps_it_and_all_of_its_effects_happen() {
    let workdir = two_controllers();
    let _cluster = serve_at(&workdir, SPEED);
    let relay = Relay::start(&workdir.path("relay.sock"), workdir.path("sim.sock"));
    relay.set(RelayMode::SlowSubmissions(SLOW));
    let mut leader = Service::start(&workdir);
    leader.wait_for_log("started");
    wait_until("a leader", || {
        workdir.path("doctor.db").exists() && workdir.json(&["status"])["leader"]["is"] == "leads"
    });
    let store = store(&workdir);
    let first = store.lease_status(SystemClock.now()).unwrap().unwrap();
    let mut standby = standby(&workdir);
    wait_until("submissions that each take longer than the lease", || relay.submitted.load(Ordering::SeqCst) >= 2);
    let now = store.lease_status(SystemClock.now()).unwrap().unwrap();
    assert!(now.alive && now.fence == first.fence && now.holder == first.holder, "{first:?} {now:?}");
    wait_until("that each submission is recorded", || {
        let runs = store.last_runs(100).unwrap();
        runs.iter().filter(|record| !matches!(record.run.state, RunState::Planned)).count() >= 2
    });
    relay.set(RelayMode::Forward);
    let (code, log) = leader.stop();
    assert_eq!(code, Some(0), "{log}");
    assert!(!log.contains("lease lost") && !log.contains("lease expired"), "{log}");
    standby.wait_for_log("this controller leads now");
    assert_eq!(standby.stop().0, Some(0));
}

#[test]
fn a_controller_that_hangs_in_a_call_ends_by_itself_and_a_standby_leads() {
    let workdir = two_controllers();
    let _cluster = serve_at(&workdir, SPEED);
    let relay = Relay::start(&workdir.path("relay.sock"), workdir.path("sim.sock"));
    let mut leader = Service::start(&workdir);
    leader.wait_for_log("started");
    wait_until("a leader", || {
        workdir.path("doctor.db").exists() && workdir.json(&["status"])["leader"]["is"] == "leads"
    });
    let mut standby = standby(&workdir);
    relay.set(RelayMode::Hang);
    wait_until("a call that hangs", || relay.hanging.load(Ordering::SeqCst) > 0);
    let (code, log) = leader.wait();
    assert_eq!(code, Some(8), "{log}");
    assert!(log.contains("the control loop is stuck: no progress for"), "{log}");
    standby.wait_for_log("this controller leads now");
    assert_eq!(standby.stop().0, Some(0));
}

#[test]
fn sigterm_ends_a_controller_that_hangs_in_a_call() {
    let workdir = two_controllers();
    let _cluster = serve_at(&workdir, SPEED);
    let relay = Relay::start(&workdir.path("relay.sock"), workdir.path("sim.sock"));
    let mut leader = Service::start(&workdir);
    leader.wait_for_log("started");
    wait_until("a leader", || {
        workdir.path("doctor.db").exists() && workdir.json(&["status"])["leader"]["is"] == "leads"
    });
    relay.set(RelayMode::Hang);
    wait_until("a call that hangs", || relay.hanging.load(Ordering::SeqCst) > 0);
    let (code, log) = leader.stop();
    assert_eq!(code, Some(8), "{log}");
    assert!(log.contains("not stopped within 30 s of the signal"), "{log}");
    // The lease is left to run out: the call may still change the cluster.
    assert!(store(&workdir).lease_status(SystemClock.now()).unwrap().is_some());
}

/// This machine as the cluster, with a lease of two seconds.
fn small_service() -> Workdir {
    let workdir = Workdir::local();
    let config = workdir.read("doctor.toml").replace("[backend", "cycle = \"1s\"\nlease = \"2s\"\n[backend");
    workdir.write("doctor.toml", &config);
    workdir.expect(0, &["run", "--wait", "--timeout", "1m"]);
    workdir
}

#[test]
fn a_lease_that_ends_next_year_is_taken_after_one_ttl() {
    let workdir = small_service();
    // The clock of its holder, a version that counted by its own, was a year ahead.
    let next_year = SystemClock.now().plus(Span::days(365));
    store(&workdir).acquire("elsewhere/x/1:1:1", next_year, Span::from_secs(3)).unwrap();
    workdir.expect(5, &["run"]).stderr_contains("another controller leads: elsewhere/x/1:1:1");
    wait_until("a takeover", || workdir.doctor(&["run"]).code == 0);
}

#[test]
fn an_operator_shows_the_lease_and_takes_it_from_a_controller_that_is_gone() {
    let workdir = small_service();
    workdir.expect(1, &["db", "lease", "show"]).stdout_contains("The lease is free: no controller leads.");
    workdir.expect(1, &["db", "lease", "take", "--why", "x", "--yes"]).stderr_contains("the lease is free");
    store(&workdir).acquire("elsewhere/x/1:1:1", LeaseClock::Database, Span::hours(1)).unwrap();
    workdir.expect(5, &["run"]);
    let shown = workdir.expect(0, &["db", "lease", "show"]);
    shown.stdout_contains("elsewhere/x/1:1:1 leads.").stdout_contains("Since: 20").stdout_contains("Until: 20");
    let json = workdir.json(&["db", "lease", "show"]);
    assert_eq!((&json["alive"], &json["ttl"], &json["free"]), (&true.into(), &"1h".into(), &false.into()), "{json}");
    let unconfirmed = workdir.expect(6, &["db", "lease", "take", "--why", "its machine burnt"]);
    unconfirmed.stderr_contains("Would take the lease from elsewhere/x/1:1:1");
    workdir.expect(5, &["run"]);
    let taken = workdir.expect(0, &["db", "lease", "take", "--why", "its machine burnt", "--yes"]);
    taken.stdout_contains("Took the lease from elsewhere/x/1:1:1.");
    workdir.expect(0, &["audit"]).stdout_contains("take-lease").stdout_contains("its machine burnt");
    workdir.expect(0, &["run"]);
}

/// Returns the status and the body of the controller's answer.
fn get(address: &str, path: &str) -> (String, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    let status = response.split(' ').nth(1).unwrap_or_default().to_owned();
    (status, response.lines().last().unwrap_or_default().to_owned())
}

#[test]
fn a_controller_whose_disk_is_full_is_alive_but_not_ready_and_says_why() {
    // A mount in a namespace of its own, which ends with the controller.
    let can_mount = Command::new("unshare").args(["-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]).output();
    if !can_mount.is_ok_and(|output| output.status.success()) {
        return skip_without_program("readiness on a full disk", "it needs the right to mount a file system");
    }
    let workdir = Workdir::local();
    std::fs::create_dir(workdir.path("small")).unwrap();
    let config = workdir.read("doctor.toml").replace("doctor.db", "small/doctor.db");
    let config =
        config.replace("[backend", "cycle = \"1s\"\nlease = \"5s\"\n[probes]\nlisten = \"127.0.0.1:0\"\n[backend");
    workdir.write("doctor.toml", &config);
    let serve = workdir.command(&["serve"]);
    let mut command = Command::new("unshare");
    command
        .args(["-m", "sh", "-c", "mount -t tmpfs -o size=8m tmpfs small && exec \"$0\" serve"])
        .arg(serve.get_program());
    command.current_dir(workdir.path("")).env_clear();
    command.envs(serve.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let mut service = Service::spawn(command);
    let line = service.wait_for_line("health probes listening");
    let address = line.rsplit_once("at=").unwrap().1.trim().to_owned();
    wait_until("readiness", || get(&address, "/readyz") == ("200".to_owned(), "ready".to_owned()));
    let small = PathBuf::from(format!("/proc/{}/root{}", service.pid(), workdir.path("small").display()));
    let mut filler = std::fs::File::create(small.join("filler")).unwrap();
    while filler.write_all(&[0; 4096]).is_ok() {}
    let full = ("503".to_owned(), "the store cannot be written: the disk is full".to_owned());
    wait_until("that it is not ready", || {
        // SQLite may have had room in its log.
        while filler.write_all(&[0; 512]).is_ok() {}
        get(&address, "/readyz") == full
    });
    assert_eq!(get(&address, "/healthz").0, "200", "a restart would not empty the disk");
    std::fs::remove_file(small.join("filler")).unwrap();
    drop(filler);
    wait_until("readiness again, without a restart", || get(&address, "/readyz").0 == "200");
    assert_eq!(service.stop().0, Some(0));
}
