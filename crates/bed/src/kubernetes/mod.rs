//! A Kubernetes control plane of one's own: etcd, API server, controller manager and scheduler as they are released, on
//! loopback, with TLS and RBAC on. There is no container runtime: nodes and what happens to pods on them are played by
//! `kubelet` (cargo feature `kubernetes`), everything else is the real thing, the scheduler's preemption included.
//!
//! ```no_run
//! use doctor_bed::kubernetes::ControlPlane;
//!
//! let plane = ControlPlane::start(&ControlPlane::programs()?)?;
//! let admin = plane.admin();                                        // a kubeconfig
//! let agent = plane.kubeconfig_for_user("agent", &["readers"])?;    // another, with no rights but those you bind
//! plane.kill_apiserver()?;
//! plane.restart_apiserver()?;                                       // same address, same data
//! # Ok::<(), doctor_bed::kubernetes::BedError>(())
//! ```
//!
//! It takes seconds and half a GiB to have one: tests of one file share it, each in a namespace of its own, and every method
//! takes `&self`. Its processes and files go when it is dropped, and when this process is gone, however it went.

mod authority;
mod daemons;
mod door;
#[cfg(feature = "kubernetes")]
pub mod kubelet;
mod parts;

use std::{
    fs, io,
    net::TcpListener,
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tempfile::TempDir;

use authority::{Authority, Pair};
use daemons::Daemons;
pub use door::Answer;
use door::Door;
pub use parts::Part;
use parts::Place;

/// How long a step of the start may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// How long between two looks at whether a step is done.
const PAUSE: Duration = Duration::from_millis(100);

/// How often another process may take a port between its choice and its use.
const TRIES: usize = 3;

/// How a control plane is to be.
#[derive(Debug, Clone, Copy)]
pub struct Setup {
    /// How long a node may be silent before it is held to be unreachable. As it comes, a day: nobody keeps fake nodes alive.
    pub node_grace: Duration,
}

impl Default for Setup {
    fn default() -> Self {
        Self { node_grace: Duration::from_secs(24 * 3600) }
    }
}

/// A running control plane. Dropping it ends its processes and removes its files.
#[derive(Debug)]
pub struct ControlPlane {
    place: Place,
    door: Door,
    admin: PathBuf,
    took: Duration,
    inner: Mutex<Inner>,
    /// Last: the files go after the processes that use them.
    _folder: TempDir,
}

#[derive(Debug)]
struct Inner {
    daemons: Daemons,
    authority: Authority,
    kubeconfigs: usize,
}

/// Who a kubeconfig speaks for.
enum Speaker<'a> {
    Certificate(&'a Pair),
    Token(&'a str),
}

/// Why there is no control plane to stand on, or why it did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum BedError {
    /// What this machine lacks, as scripts/kubernetes.sh says it.
    #[error("no control plane on this machine: {why}")]
    NotBuilt { why: String },
    #[error("{folder} has no {program}: name the folder that scripts/kubernetes.sh prints")]
    Missing { folder: PathBuf, program: &'static str },
    #[error("{operation} {path}")]
    File {
        operation: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("running {program}")]
    Program {
        program: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("openssl made no certificate (3.0 or newer is needed): {said}")]
    Certificate { said: String },
    #[error("looking for free ports on loopback")]
    Ports(#[source] io::Error),
    #[error("ending {part}")]
    Ending {
        part: Part,
        #[source]
        source: io::Error,
    },
    #[error("{part} does not run: it was killed and not restarted")]
    NotRunning { part: Part },
    #[error("{part} has ended; it said last:\n{said}")]
    Ended { part: Part, said: String },
    #[error("{what} within {} s, {part} said last:\n{said}", PATIENCE.as_secs())]
    Late { what: &'static str, part: Part, said: String },
    #[error("{asked} was not answered: {said}")]
    Unanswered { asked: String, said: String },
    #[error("{asked} was refused with {status}: {said}")]
    Refused { asked: String, status: u16, said: String },
}

impl BedError {
    /// Says that these tests could not run.
    ///
    /// # Panics
    /// In CI, where that is a failure; and anywhere if there is a control plane that does not do what it should.
    pub fn not_run(&self, what: &str) {
        let excused = matches!(self, Self::NotBuilt { .. }) && std::env::var("CI").as_deref() != Ok("true");
        assert!(excused, "{self}");
        println!("NOT RUN: {what}: {self}");
    }
}

fn at(operation: &'static str, path: &Path) -> impl Fn(io::Error) -> BedError {
    move |source| BedError::File { operation, path: path.to_owned(), source }
}

impl ControlPlane {
    /// The folder of the programs that this repository pins. Where they were never built, this builds them, which takes minutes.
    ///
    /// # Errors
    /// [`BedError::NotBuilt`] with what is missing on this machine.
    pub fn programs() -> Result<PathBuf, BedError> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/kubernetes.sh");
        let ended = Command::new(&script).output();
        let ended = ended.map_err(|source| BedError::Program { program: script, source })?;
        if ended.status.success() {
            return Ok(PathBuf::from(String::from_utf8_lossy(&ended.stdout).trim()));
        }
        let said = String::from_utf8_lossy(&ended.stderr);
        let why = said.lines().last().unwrap_or("scripts/kubernetes.sh said nothing");
        Err(BedError::NotBuilt { why: why.trim_start_matches("not run: ").to_owned() })
    }

    /// Starts a control plane from the programs of a folder and waits until it is ready and has its first service account.
    ///
    /// # Errors
    /// With what is missing, or with the end of the log of the process that failed.
    pub fn start(programs: &Path) -> Result<Self, BedError> {
        Self::start_with(programs, Setup::default())
    }

    /// As [`Self::start`], with something other than usual.
    ///
    /// # Errors
    /// With what is missing, or with the end of the log of the process that failed.
    pub fn start_with(programs: &Path, setup: Setup) -> Result<Self, BedError> {
        for part in Part::ALL {
            if !programs.join(part.program()).exists() {
                return Err(BedError::Missing { folder: programs.to_owned(), program: part.program() });
            }
        }
        let mut tries = 1;
        loop {
            match Self::start_once(programs, setup) {
                Err(BedError::Ended { said, .. }) if tries < TRIES && said.contains("address already in use") => {
                    tries += 1;
                }
                started => return started,
            }
        }
    }

    /// Where the API server is.
    pub fn url(&self) -> String {
        format!("https://127.0.0.1:{}", self.door.port)
    }

    /// The kubeconfig of a user who may do everything.
    pub fn admin(&self) -> &Path {
        &self.admin
    }

    /// The certificate of the authority that signed the API server's.
    pub fn authority(&self) -> &Path {
        &self.door.authority
    }

    /// How long it took to be ready.
    pub fn took(&self) -> Duration {
        self.took
    }

    /// A kubeconfig for this user in these groups: what it may do is what roles are bound to them.
    ///
    /// # Errors
    /// If the certificate cannot be made.
    pub fn kubeconfig_for_user(&self, name: &str, groups: &[&str]) -> Result<PathBuf, BedError> {
        let mut inner = self.lock();
        let pair = inner.authority.user(name, groups)?;
        self.place.kubeconfig(&inner.next_kubeconfig(), &self.url(), &Speaker::Certificate(&pair))
    }

    /// A kubeconfig with a token of a service account that exists, good for a day.
    ///
    /// # Errors
    /// If there is no such account.
    pub fn kubeconfig_for_service_account(&self, namespace: &str, name: &str) -> Result<PathBuf, BedError> {
        let path = format!("/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token");
        let asked = json!({
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": { "expirationSeconds": 86_400 },
        });
        let answer = self.request("POST", &path, Some(&asked))?;
        let given: Value = serde_json::from_str(&answer.text).unwrap_or_default();
        let Some(token) = given["status"]["token"].as_str().filter(|_| answer.is_success()) else {
            let asked = format!("POST {path}");
            return Err(BedError::Refused { asked, status: answer.status, said: answer.text });
        };
        self.place.kubeconfig(&self.lock().next_kubeconfig(), &self.url(), &Speaker::Token(token))
    }

    /// Asks the API server something as the user who may do everything; a body is JSON.
    ///
    /// # Errors
    /// If there is no answer. A refusal is an answer.
    pub fn request(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Answer, BedError> {
        self.door.ask(method, path, body)
    }

    /// Makes an object of a kind whose plural is a regular one.
    ///
    /// # Panics
    /// If it is not taken.
    pub fn make(&self, object: &Value) {
        let word = |key: &str| object[key].as_str().unwrap_or_default();
        let root = if word("apiVersion") == "v1" { "/api" } else { "/apis" };
        let namespace = object["metadata"]["namespace"].as_str();
        let namespace = namespace.map_or_else(String::new, |name| format!("/namespaces/{name}"));
        let kind = word("kind").to_ascii_lowercase();
        let plural = if kind.ends_with('s') { "es" } else { "s" };
        let path = format!("{root}/{}{namespace}/{kind}{plural}", word("apiVersion"));
        let answer = self.request("POST", &path, Some(object));
        assert!(answer.as_ref().is_ok_and(Answer::is_success), "{path}: {answer:?}");
    }

    /// Kills the API server, as a crash would: connections break, watches end, nothing answers at its address.
    ///
    /// # Errors
    /// If it cannot be ended.
    pub fn kill_apiserver(&self) -> Result<(), BedError> {
        self.lock().daemons.kill(Part::ApiServer)
    }

    /// Starts the API server again, at the same address and with the same data, and waits until it is ready.
    ///
    /// # Errors
    /// With the end of its log.
    pub fn restart_apiserver(&self) -> Result<(), BedError> {
        self.kill_apiserver()?;
        let mut inner = self.lock();
        inner.daemons.begin(Part::ApiServer, &self.place.programs, &self.place.arguments(Part::ApiServer))?;
        self.wait_until_ready(&mut inner.daemons)
    }

    /// The file in which a part's output is.
    pub fn log(&self, part: Part) -> PathBuf {
        self.lock().daemons.log(part)
    }

    /// The process of each part that runs.
    pub fn pids(&self) -> Vec<(Part, u32)> {
        self.lock().daemons.pids().collect()
    }

    fn start_once(programs: &Path, setup: Setup) -> Result<Self, BedError> {
        let began = Instant::now();
        let temporary = std::env::temp_dir();
        let folder = tempfile::Builder::new().prefix("doctor-kubernetes-").tempdir_in(&temporary);
        let folder = folder.map_err(at("creating a folder in", &temporary))?;
        let mut daemons = Daemons::new(folder.path())?;
        let mut authority = Authority::new(&folder.path().join("pki"))?;
        let [etcd_port, port] = free_ports().map_err(BedError::Ports)?;
        let place = Place {
            setup,
            programs: programs.to_owned(),
            folder: folder.path().to_owned(),
            etcd_port,
            port,
            server: authority.server()?,
            authority: authority.certificate().to_owned(),
            tokens: authority.token_key()?,
        };
        let url = format!("https://127.0.0.1:{port}");
        for part in [Part::ControllerManager, Part::Scheduler] {
            let pair = authority.user(&format!("system:{}", part.program()), &[])?;
            place.kubeconfig(part.program(), &url, &Speaker::Certificate(&pair))?;
        }
        let user = authority.user("bed-admin", &["system:masters"])?;
        let admin = place.kubeconfig("admin", &url, &Speaker::Certificate(&user))?;
        let door = Door { port, authority: place.authority.clone(), user };

        for part in [Part::Etcd, Part::ApiServer] {
            daemons.begin(part, programs, &place.arguments(part))?;
        }
        let inner = Mutex::new(Inner { daemons, authority, kubeconfigs: 0 });
        let mut plane = Self { place, door, admin, took: Duration::ZERO, inner, _folder: folder };
        plane.finish_start()?;
        plane.took = began.elapsed();
        Ok(plane)
    }

    /// What comes once the API server has been started: the parts that give up when it does not answer.
    fn finish_start(&self) -> Result<(), BedError> {
        let mut inner = self.lock();
        self.wait_until_ready(&mut inner.daemons)?;
        for part in [Part::ControllerManager, Part::Scheduler] {
            inner.daemons.begin(part, &self.place.programs, &self.place.arguments(part))?;
        }
        let account = "/api/v1/namespaces/default/serviceaccounts/default";
        self.wait_for(&mut inner.daemons, Part::ControllerManager, account, "no service account was made")
    }

    fn wait_until_ready(&self, daemons: &mut Daemons) -> Result<(), BedError> {
        self.wait_for(daemons, Part::ApiServer, "/readyz", "the API server was not ready")
    }

    /// Waits until the path is there; `part` is who must make it so.
    fn wait_for(&self, daemons: &mut Daemons, part: Part, path: &str, what: &'static str) -> Result<(), BedError> {
        let began = Instant::now();
        loop {
            for running in [Part::Etcd, Part::ApiServer, part] {
                daemons.check(running)?;
            }
            match self.door.ask("GET", path, None) {
                Ok(answer) if answer.is_success() => return Ok(()),
                // Before it listens there is no answer, and before it is ready there is a refusal.
                Ok(_) | Err(BedError::Unanswered { .. }) => {}
                Err(other) => return Err(other),
            }
            if began.elapsed() > PATIENCE {
                return Err(BedError::Late { what, part, said: daemons.last_lines(part) });
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A test that failed while it held this leaves nothing half done that the next one could not see.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn next_kubeconfig(&mut self) -> String {
        self.kubeconfigs += 1;
        format!("user-{}", self.kubeconfigs)
    }
}

impl Place {
    /// Writes a kubeconfig. It is JSON, which every reader of YAML reads.
    fn kubeconfig(&self, name: &str, url: &str, speaker: &Speaker<'_>) -> Result<PathBuf, BedError> {
        let user = match speaker {
            Speaker::Certificate(pair) => json!({ "client-certificate": pair.certificate, "client-key": pair.key }),
            Speaker::Token(token) => json!({ "token": token }),
        };
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{ "name": "bed", "cluster": { "server": url, "certificate-authority": self.authority } }],
            "users": [{ "name": name, "user": user }],
            "contexts": [{ "name": "bed", "context": { "cluster": "bed", "user": name } }],
            "current-context": "bed",
        });
        let path = self.kubeconfig_path(name);
        fs::write(&path, config.to_string()).map_err(at("writing", &path))?;
        Ok(path)
    }
}

/// Ports that are free now and differ from each other.
fn free_ports<const N: usize>() -> io::Result<[u16; N]> {
    let mut held = Vec::with_capacity(N);
    let mut ports = [0; N];
    for port in &mut ports {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        *port = listener.local_addr()?.port();
        held.push(listener);
    }
    Ok(ports)
}
