//! Alert delivery from the outbox of a real controller to a receiver that fails, hangs and recovers, while the
//! controller is killed in between.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
};

use doctor_backend::clock::{Clock, SystemClock};
use doctor_core::{
    alert::{Condition, Notification, ServiceNotification, Subject},
    time::Timestamp,
};
use doctor_notify::alert::signature;
use doctor_store::{Store, StoreUrl, outbox::MessageState, records::RoutedNote};

use crate::{
    this_machine::Service,
    workdir::{Workdir, wait_until},
};

/// How a receiver handles a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReceiverMode {
    /// Reads it and never answers.
    Hang,
    Fail,
    Accept,
}

/// A received request.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    mode: ReceiverMode,
    pub(crate) path: String,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body: serde_json::Value,
    pub(crate) raw: Vec<u8>,
}

/// A webhook receiver on loopback.
pub(crate) struct Receiver {
    pub(crate) port: u16,
    mode: Arc<Mutex<ReceiverMode>>,
    pub(crate) requests: Arc<Mutex<Vec<Request>>>,
}

impl Receiver {
    pub(crate) fn new(mode: ReceiverMode) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (mode, requests) = (Arc::new(Mutex::new(mode)), Arc::new(Mutex::new(Vec::new())));
        let (modes, requests_seen) = (Arc::clone(&mode), Arc::clone(&requests));
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (modes, requests_seen) = (Arc::clone(&modes), Arc::clone(&requests_seen));
                std::thread::spawn(move || serve(&stream, &modes, &requests_seen));
            }
        });
        Self { port, mode, requests }
    }

    pub(crate) fn set_mode(&self, mode: ReceiverMode) {
        *self.mode.lock().unwrap() = mode;
    }

    pub(crate) fn request_count(&self, mode: ReceiverMode) -> usize {
        self.requests.lock().unwrap().iter().filter(|request| request.mode == mode).count()
    }
}

fn serve(stream: &TcpStream, modes: &Mutex<ReceiverMode>, requests_seen: &Mutex<Vec<Request>>) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let (mut headers, mut first) = (BTreeMap::new(), String::new());
    if reader.read_line(&mut first).is_err() {
        return;
    }
    let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
    for line in reader.by_ref().lines().map_while(Result::ok).take_while(|line| !line.is_empty()) {
        if let Some((name, value)) = line.split_once(": ") {
            headers.insert(name.to_ascii_lowercase(), value.to_owned());
        }
    }
    let Some(length) = headers.get("content-length").and_then(|length| length.parse().ok()) else { return };
    let mut raw = vec![0; length];
    if reader.read_exact(&mut raw).is_err() {
        return;
    }
    let mode = *modes.lock().unwrap();
    let body = serde_json::from_slice(&raw).unwrap();
    requests_seen.lock().unwrap().push(Request { mode, path, headers, body, raw });
    let response = match mode {
        // Until the client closes the connection.
        ReceiverMode::Hang => return drop(reader.read_to_end(&mut Vec::new())),
        ReceiverMode::Fail => "HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
        ReceiverMode::Accept => "HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
    };
    // A controller killed in the meantime does not read the answer.
    let mut stream = stream;
    let _written = stream.write_all(response.as_bytes());
}

/// A cluster of one node on which no job is started, whose controller notifies a receiver.
fn setup(port: u16, extra: &str) -> (Workdir, Store) {
    let workdir = Workdir::local();
    workdir.write("busy", "");
    workdir.write("secret", "a shared secret\n");
    workdir.write("pager.url", &format!("http://127.0.0.1:{port}/hooks/not-to-be-told\n"));
    let alerts = format!(
        "cycle = \"1s\"\n[alerts]\ngroup_wait = \"1s\"\ngroup_interval = \"1s\"\ntimeout = \"1s\"\nretry = \"1s\"\n{extra}\n\
         [alerts.receivers.pager]\nwebhook = {{ url = {{ file = \"pager.url\" }}, secret = {{ file = \"secret\" }} }}\n[backend"
    );
    let config = workdir.read("doctor.toml").replace("[backend", &alerts);
    workdir.write("doctor.toml", &format!("{config}busy_file = \"busy\"\n"));
    let store = Store::open(&StoreUrl::Sqlite(workdir.path("doctor.db"))).unwrap();
    (workdir, store)
}

/// Queues a notification, as a cycle would.
fn queue_alert(store: &Store, what: usize) {
    let note = Notification { at: Timestamp::from_secs(1), subject: Subject::Test { by: format!("number {what}") } };
    let known = store.alert_conditions().unwrap();
    assert!(store.replace_conditions(&known, &known, &[RoutedNote { receiver: "pager".to_owned(), note }]).unwrap());
}

fn all_delivered(store: &Store) -> bool {
    let waiting = store.pending_alerts().unwrap();
    waiting.values().all(|waiting| waiting.notes + waiting.messages == 0)
}

#[test]
fn each_message_arrives_once_at_a_receiver_that_hangs_fails_and_comes_back_while_controllers_are_killed() {
    let receiver = Receiver::new(ReceiverMode::Hang);
    let (workdir, store) = setup(receiver.port, "");
    queue_alert(&store, 0);
    let controller = Service::start(&workdir);
    wait_until("a message that hangs", || receiver.request_count(ReceiverMode::Hang) > 0);
    // Each cycle renews the lease.
    let mut renewed = std::collections::BTreeSet::new();
    wait_until("cycles that go on while the receiver hangs", || {
        renewed.extend(store.leader().unwrap().map(|(_, until)| until));
        renewed.len() > 3
    });
    assert_eq!(receiver.request_count(ReceiverMode::Accept), 0);
    queue_alert(&store, 1);
    let hung = receiver.request_count(ReceiverMode::Hang);
    wait_until("it is tried again", || receiver.request_count(ReceiverMode::Hang) > hung);
    // Dropping it sends SIGKILL.
    drop(controller);
    receiver.set_mode(ReceiverMode::Fail);
    queue_alert(&store, 2);
    let controller = Service::start(&workdir);
    wait_until("a message that fails", || receiver.request_count(ReceiverMode::Fail) > 0);
    // SIGKILL again.
    drop(controller);
    receiver.set_mode(ReceiverMode::Accept);
    let controller = Service::start(&workdir);
    wait_until("everything arrives", || all_delivered(&store));
    controller.stop();

    let taken: Vec<Request> = receiver
        .requests
        .lock()
        .unwrap()
        .iter()
        .filter(|request| request.mode == ReceiverMode::Accept)
        .cloned()
        .collect();
    let mut keys: Vec<&str> = taken.iter().map(|request| request.body["key"].as_str().unwrap()).collect();
    let notes: Vec<String> = taken
        .iter()
        .flat_map(|request| request.body["notes"].as_array().unwrap().clone())
        .map(|note| note["by"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(notes, ["number 0", "number 1", "number 2"], "each once, in order");
    let all = keys.len();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), all, "keys are unique");
    let first_key = receiver.requests.lock().unwrap()[0].body["key"].clone();
    assert_eq!(taken[0].body["key"], first_key, "a retry sends the same message");
    for request in &taken {
        let expected = signature(b"a shared secret", &request.headers["x-doctor-timestamp"], &request.raw);
        assert_eq!(request.headers["x-doctor-signature"], expected);
    }
    let rows = store.alert_messages(10, true).unwrap();
    assert!(rows.iter().all(|row| row.state == MessageState::Delivered), "{rows:?}");
}

#[test]
fn an_opened_case_is_notified_with_its_reason_until_acknowledged() {
    let receiver = Receiver::new(ReceiverMode::Accept);
    let (workdir, store) = setup(receiver.port, "");
    let controller = Service::start(&workdir);
    wait_until("the first cycle", || store.cluster_state_time().unwrap().is_some());
    workdir.expect(0, &["quarantine", "here", "--why", "it smells", "--yes"]);
    let notes = || -> Vec<serde_json::Value> {
        let requests = receiver.requests.lock().unwrap();
        requests.iter().flat_map(|request| request.body["notes"].as_array().unwrap().clone()).collect()
    };
    wait_until("the notification of the case", || notes().iter().any(|note| note["about"] == "case"));
    let note = notes().into_iter().find(|note| note["about"] == "case").unwrap();
    assert_eq!((&note["node"], &note["changes"][0]["what"]), (&"here".into(), &"opened".into()), "{note}");
    assert!(note["changes"][0]["why"].as_str().unwrap().contains("it smells"), "{note}");
    assert_eq!(note["command"], "doctor why here");
    workdir.expect(0, &["cases", "ack", note["case"].as_str().unwrap(), "--yes"]).stdout_contains("Acknowledged.");
    assert_eq!(store.mutes().unwrap().len(), 1);
    controller.stop();
}

#[test]
fn an_undeliverable_message_is_listed_as_lost_and_no_secret_is_printed() {
    // No process listens on this port.
    let port = doctor_testbed::ports::reserve_one().unwrap();
    let (workdir, store) = setup(port, "give_up = \"2s\"");
    queue_alert(&store, 0);
    let mut controller = Service::start(&workdir);
    controller.wait_for_log("message lost");
    wait_until("the notification of the loss", || store.alert_messages(10, false).unwrap().len() > 1);
    let (_, log) = controller.stop();
    assert!(!log.contains("not-to-be-told") && log.contains(&format!("http://127.0.0.1:{port}")), "{log}");
    let output = workdir.expect(1, &["alert", "list"]);
    output.stdout_contains("lost").stdout_contains("pager").stdout_contains("given up after attempt");
    let output = workdir.expect(1, &["alert", "test"]);
    output.stdout_contains("pager: not delivered").stdout_contains("Connection refused");
    let config_shown = workdir.expect(0, &["config", "show"]);
    assert!(
        !config_shown.out.contains("not-to-be-told") && config_shown.out.contains("pager.url"),
        "{}",
        config_shown.out
    );
}

/// A child process that is killed when the test ends.
struct KillOnDrop(Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        // It may have exited already.
        let _already_exited = self.0.kill();
        let _already_exited = self.0.wait();
    }
}

pub(crate) fn free_port() -> u16 {
    doctor_testbed::ports::reserve_one().unwrap()
}

fn get(port: u16, path: &str) -> Option<serde_json::Value> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    write!(stream, "GET {path} HTTP/1.0\r\nhost: x\r\n\r\n").ok()?;
    let mut response = String::new();
    stream.read_to_string(&mut response).ok()?;
    serde_json::from_str(response.split_once("\r\n\r\n")?.1).ok()
}

/// Starts a real Alertmanager with this configuration, which the bed's controller notifies. `None`: it is not
/// installed.
fn alertmanager(workdir: &Workdir, config: &str) -> Option<(KillOnDrop, u16)> {
    let (port, cluster) = (free_port(), free_port());
    workdir.write("alertmanager.yml", config);
    let mut command = Command::new("prometheus-alertmanager");
    command.current_dir(workdir.path("")).args(["--config.file=alertmanager.yml", "--storage.path=alertmanager"]);
    command
        .arg(format!("--web.listen-address=127.0.0.1:{port}"))
        .arg(format!("--cluster.listen-address=127.0.0.1:{cluster}"));
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let Ok(child) = command.spawn() else {
        doctor_testbed::skip::skip_without_program("alerts", "there is no prometheus-alertmanager");
        return None;
    };
    let alertmanager = KillOnDrop(child);
    wait_until("an Alertmanager that answers", || get(port, "/api/v2/alerts").is_some());
    let config = workdir.read("doctor.toml");
    let (head, tail) = config.split_once("[alerts.receivers.pager]").unwrap();
    let (_, backend) = tail.split_once("[backend").unwrap();
    let receiver = format!("[alerts.receivers.am]\nalertmanager = {{ url = \"http://127.0.0.1:{port}/\" }}\n[backend");
    workdir.write("doctor.toml", &format!("{head}{receiver}{backend}"));
    workdir.expect(0, &["alert", "test"]).stdout_contains("am: delivered");
    Some((alertmanager, port))
}

#[test]
fn alertmanager_shows_an_open_breaker_and_its_resolution() {
    let (workdir, store) = setup(1, "");
    let config = "route:\n  receiver: none\nreceivers:\n  - name: none\n";
    let Some((_alertmanager, port)) = alertmanager(&workdir, config) else { return };
    let at = SystemClock.now();
    let open = ServiceNotification {
        condition: Condition::BreakerOpen,
        raised: true,
        since: at,
        text: "the breaker is open".to_owned(),
    };
    let note = Notification { at, subject: Subject::Service(open) };
    let known = BTreeMap::from([(Condition::BreakerOpen, at)]);
    let notes = [RoutedNote { receiver: "am".to_owned(), note }];
    assert!(store.replace_conditions(&BTreeMap::new(), &known, &notes).unwrap());
    let fires = || {
        let alerts = get(port, "/api/v2/alerts?filter=alertname%3DClusterDoctorService").unwrap_or_default();
        alerts
            .as_array()
            .is_some_and(|alerts| alerts.iter().any(|alert| alert["labels"]["condition"] == "breaker-open"))
    };
    let controller = Service::start(&workdir);
    // The store's breaker is closed: the controller detects that and resolves the alert.
    wait_until("the breaker's alert is over", || all_delivered(&store) && store.alert_conditions().unwrap().is_empty());
    wait_until("the Alertmanager knows", || !fires());
    controller.stop();
    let rows = store.alert_messages(10, true).unwrap();
    let notes: Vec<Notification> = rows.into_iter().rev().flat_map(|row| row.notes).collect();
    let raised: Vec<bool> = notes
        .iter()
        .filter_map(|note| match &note.subject {
            Subject::Service(service) => Some(service.raised),
            _ => None,
        })
        .collect();
    assert_eq!(raised, [true, false]);
}

/// Groups by name and node, and sends each change of a group immediately, including resolved alerts.
fn grouping(hook: u16) -> String {
    format!(
        "route:\n  receiver: hook\n  group_by: [alertname, node]\n  group_wait: 1s\n  group_interval: 1s\n  repeat_interval: 4h\n\
         receivers:\n  - name: hook\n    webhook_configs:\n      - url: http://127.0.0.1:{hook}/\n        send_resolved: true\n"
    )
}

#[test]
fn alertmanager_groups_a_case_by_labels_receives_it_once_across_restarts_and_its_resolution() {
    let (hook, (workdir, store)) = (Receiver::new(ReceiverMode::Accept), setup(1, ""));
    let Some((_alertmanager, port)) = alertmanager(&workdir, &grouping(hook.port)) else { return };
    workdir.policy("mode = \"act\"\n[allow]\nmark = true\ndrain = true\n[repair]\nrequalification = [\"memory\"]\n");
    let cases = || -> Vec<serde_json::Value> {
        let alerts = get(port, "/api/v2/alerts?filter=alertname%3DClusterDoctorCase").unwrap_or_default();
        alerts.as_array().cloned().unwrap_or_default()
    };
    // The Alertmanager's notices about the case with this status.
    let notes = |status: &str| -> Vec<serde_json::Value> {
        let requests = hook.requests.lock().unwrap();
        let notices = requests.iter().map(|request| &request.body).filter(|notice| notice["status"] == status);
        notices.filter(|notice| notice["groupLabels"]["alertname"] == "ClusterDoctorCase").cloned().collect()
    };
    let controller = Service::start(&workdir);
    wait_until("the first cycle", || store.cluster_state_time().unwrap().is_some());
    workdir.expect(0, &["quarantine", "here", "--why", "it smells", "--yes"]);
    wait_until("the case fires", || !notes("firing").is_empty());
    let [first] = &cases()[..] else { panic!("{:?}", cases()) };
    let case = workdir.json(&["cases"])[0]["id"].as_str().unwrap().to_owned();
    let severity = &first["labels"]["severity"];
    assert_eq!(
        (&first["labels"]["case"], &first["labels"]["node"]),
        (&case.as_str().into(), &"here".into()),
        "{first}"
    );
    assert!(["monitor", "reset", "reboot", "isolate"].iter().any(|word| severity == word), "{first}");
    assert!(first["annotations"]["description"].as_str().unwrap().contains("it smells"), "{first}");
    assert_eq!(first["annotations"]["command"], "doctor why here");
    let notice = notes("firing").remove(0);
    let group = serde_json::json!({ "alertname": "ClusterDoctorCase", "node": "here" });
    assert_eq!((&notice["groupLabels"], notice["alerts"].as_array().map(Vec::len)), (&group, Some(1)), "{notice}");
    assert_eq!(notice["commonLabels"]["case"], case.as_str(), "{notice}");

    // SIGKILL. Another controller sends the open case again, and it is the same alert.
    drop(controller);
    let controller = Service::start(&workdir);
    wait_until("the next notification", || {
        cases().first().is_some_and(|alert| alert["updatedAt"] != first["updatedAt"])
    });
    let [again] = &cases()[..] else { panic!("{:?}", cases()) };
    for field in ["fingerprint", "startsAt", "labels"] {
        assert_eq!(again[field], first[field], "{field}: {again}");
    }

    // The machine is no longer in use: it is requalified and returned to service.
    std::fs::remove_file(workdir.path("busy")).unwrap();
    workdir.expect(0, &["release", "here", "--why", "it does not", "--yes"]);
    wait_until("the case is closed", || workdir.json(&["cases"]).as_array().is_some_and(Vec::is_empty));
    wait_until("the notification", || !notes("resolved").is_empty());
    wait_until("nothing fires", || cases().is_empty());
    controller.stop();
    let (firing, resolved) = (notes("firing"), notes("resolved"));
    assert_eq!((firing.len(), resolved.len()), (1, 1), "each change once: {firing:?} {resolved:?}");
    let of = |notice: &serde_json::Value| (notice["groupLabels"].clone(), notice["alerts"][0]["fingerprint"].clone());
    assert_eq!(of(&resolved[0]), of(&firing[0]));
    assert!(all_delivered(&store));
}

/// A mail server that requires STARTTLS and a password, and writes mails to a directory.
const MAIL_SERVER: &str = r#"
import os, ssl, sys
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult

class Keep:
    async def handle_DATA(self, server, session, envelope):
        draft = f"mail-{len(os.listdir('mails'))}"
        with open(draft, "wb") as file:
            file.write(("\n".join(envelope.rcpt_tos) + "\n\n").encode() + envelope.content)
        os.rename(draft, "mails/" + draft)
        return "250 taken"

def check(server, session, envelope, mechanism, data):
    return AuthResult(success=data.login == b"doctor" and data.password == b"a mail secret", handled=False)

context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain("cert.pem", "key.pem")
controller = Controller(Keep(), hostname="127.0.0.1", port=int(sys.argv[1]), tls_context=context,
                        require_starttls=True, auth_required=True, authenticator=check)
controller.start()
print("ready", flush=True)
sys.stdin.read()
"#;

#[test]
fn mail_uses_starttls_and_login_and_nothing_is_sent_to_an_untrusted_server() {
    let workdir = Workdir::new();
    workdir.write("server.py", MAIL_SERVER);
    std::fs::create_dir(workdir.path("mails")).unwrap();
    let certificates = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=site -keyout ca.key -out ca.pem && \
        openssl req -newkey rsa:2048 -nodes -subj /CN=localhost -keyout key.pem -out cert.csr && \
        echo subjectAltName=DNS:localhost > cert.ext && \
        openssl x509 -req -in cert.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile cert.ext -out cert.pem";
    let generated = Command::new("sh").current_dir(workdir.path("")).args(["-c", certificates]).output();
    let python = Command::new("/usr/bin/python3").args(["-c", "import aiosmtpd"]).output();
    if !generated.is_ok_and(|generated| generated.status.success())
        || !python.is_ok_and(|python| python.status.success())
    {
        return doctor_testbed::skip::skip_without_program(
            "alerts",
            "there is no openssl, or no aiosmtpd for /usr/bin/python3",
        );
    }
    let port = free_port();
    let mut command = Command::new("/usr/bin/python3");
    command.args(["server.py", &port.to_string()]).current_dir(workdir.path(""));
    // It exits when its standard input closes, and logs every client that rejects its certificate.
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut server = KillOnDrop(command.spawn().unwrap());
    let mut ready = String::new();
    BufReader::new(server.0.stdout.take().unwrap()).read_line(&mut ready).unwrap();
    assert_eq!(ready, "ready\n");

    let config = |alerts: &str, password: &str| {
        workdir.write("password", password);
        std::fs::create_dir_all(workdir.path("data")).unwrap();
        let text = format!(
            "store = \"doctor.db\"\ndata = \"data\"\n[alerts]\ntimeout = \"5s\"\n{alerts}\n[alerts.receivers.mail]\n\
             email = {{ server = \"localhost:{port}\", from = \"doctor@example.org\", to = [\"a@example.org\", \
             \"b@example.org\"], user = \"doctor\", password = {{ file = \"password\" }} }}\n"
        );
        workdir.write("doctor.toml", &text);
    };
    config("", "a mail secret");
    workdir.expect(1, &["alert", "test"]).stdout_contains("TLS with localhost").stdout_contains("failed");
    config("ca = \"ca.pem\"", "another");
    let output = workdir.expect(1, &["alert", "test"]);
    output.stdout_contains("answered 535 to AUTH PLAIN");
    assert!(!output.out.contains("another"), "{}", output.out);
    config("ca = \"ca.pem\"", "a mail secret");
    workdir.expect(0, &["alert", "test"]).stdout_contains("mail: delivered");
    let mails: Vec<String> = std::fs::read_dir(workdir.path("mails"))
        .unwrap()
        .map(|entry| std::fs::read_to_string(entry.unwrap().path()).unwrap())
        .collect();
    let [message] = &mails[..] else { panic!("{mails:?}") };
    assert!(message.starts_with("a@example.org\nb@example.org\n\n"), "{message}");
    assert!(message.contains("Subject: Cluster Doctor: test message by ann"), "{message}");
}
