//! A private Kubernetes control plane: released builds of etcd, API server, controller manager and scheduler on
//! loopback, with TLS and RBAC. All of it is real, the scheduler's preemption included.
//!
//! It has no nodes at first. `kubelet` (cargo feature `kubernetes`) simulates many nodes and their pods; `real` starts
//! one or two real nodes and needs root.
//!
//! ```no_run
//! use doctor_testbed::kubernetes::ControlPlane;
//!
//! let plane = ControlPlane::start(&ControlPlane::programs()?)?;
//! let admin = plane.admin();                                        // a kubeconfig
//! let agent = plane.kubeconfig_for_user("agent", &["readers"])?;    // another, with no rights but those you bind
//! plane.kill_apiserver()?;
//! plane.restart_apiserver()?;                                       // same address, same data
//! # Ok::<(), doctor_testbed::kubernetes::KubernetesTestbedError>(())
//! ```
//!
//! It starts in seconds and takes half a GiB: the tests of one file share it, each in its own namespace, and every
//! method takes `&self`. Its processes and files are removed when it is dropped and when this process exits, even if it is killed.

mod api_client;
mod audit;
mod certificate_authority;
mod component_args;
mod components;
mod daemons;
mod error;
mod etcd_data;
#[cfg(feature = "kubernetes")]
pub mod kubelet;
pub mod real_node;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::ports;
use api_client::ApiClient;
pub use api_client::ApiResponse;
pub use audit::AuditedRequest;
use certificate_authority::{CertificateAuthority, KeyPair};
use component_args::ControlPlaneConfig;
pub use components::Component;
use daemons::Daemons;
pub use error::KubernetesTestbedError;
use error::file_error;

/// How long a step of the start may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(300);

/// The polling interval.
const PAUSE: Duration = Duration::from_millis(100);

/// The number of log lines in an error.
const LAST_LINES: usize = 12;

/// The prefix of a script's last line if this machine lacks a prerequisite.
const NOT_RUN: &str = "not run: ";

/// The number of attempts to start. One fails if another process takes a port between its selection and its use.
const TRIES: usize = 3;

/// Options of a control plane.
#[derive(Debug, Clone, Copy)]
pub struct Setup<'a> {
    /// How long a node may miss heartbeats before it is unreachable. The default is a day: fake nodes send none.
    pub node_grace: Duration,
    /// Whether requests of service accounts are logged, for [`ControlPlane::audited_requests`].
    pub audit: bool,
    /// Initial data: a folder that [`ControlPlane::keep_data`] wrote. It is copied and not changed.
    pub data: Option<&'a Path>,
    /// Whether controller manager and scheduler run. Without them, objects change only by requests, and the service
    /// accounts that pods need are not created.
    pub controllers: bool,
    /// Whether the API server streams lists through watches (feature gate `WatchList`). Servers before 1.32 do not, by default.
    pub streaming_lists: bool,
}

impl Default for Setup<'_> {
    fn default() -> Self {
        let node_grace = Duration::from_secs(24 * 3600);
        Self { node_grace, data: None, controllers: true, audit: false, streaming_lists: true }
    }
}

/// A running control plane. Dropping it ends its processes and removes its files.
#[derive(Debug)]
pub struct ControlPlane {
    config: ControlPlaneConfig,
    client: ApiClient,
    admin: PathBuf,
    startup_time: Duration,
    inner: Mutex<Inner>,
    /// Declared last: the files are removed after the processes that use them.
    _folder: TempDir,
}

#[derive(Debug)]
struct Inner {
    daemons: Daemons,
    authority: CertificateAuthority,
    kubeconfigs: usize,
}

/// The credential in a kubeconfig.
enum Credentials<'a> {
    Certificate(&'a KeyPair),
    Token(&'a str),
}

impl ControlPlane {
    /// Returns the folder of the programs in the version that this repository pins. Builds them if needed, which takes minutes.
    ///
    /// # Errors
    /// Returns [`KubernetesTestbedError::Unsupported`] with what is missing on this machine.
    pub fn programs() -> Result<PathBuf, KubernetesTestbedError> {
        from_script("scripts/kubernetes.sh", &[]).map_err(|why| KubernetesTestbedError::Unsupported { why })
    }

    /// Returns the folder with Volcano's controller, scheduler and CRDs, which `scripts/volcano.sh` builds or finds.
    ///
    /// # Errors
    /// Returns [`KubernetesTestbedError::Unsupported`] with what is missing on this machine.
    pub fn volcano() -> Result<PathBuf, KubernetesTestbedError> {
        from_script("scripts/volcano.sh", &[]).map_err(|why| KubernetesTestbedError::Unsupported { why })
    }

    /// Starts a control plane and waits until it is ready and has its first service account.
    ///
    /// # Errors
    /// Returns what is missing, or the end of the log of the process that failed.
    pub fn start(programs: &Path) -> Result<Self, KubernetesTestbedError> {
        Self::start_with(programs, Setup::default())
    }

    /// As [`Self::start`], with options.
    ///
    /// # Errors
    /// Returns what is missing, or the end of the log of the process that failed.
    pub fn start_with(programs: &Path, setup: Setup<'_>) -> Result<Self, KubernetesTestbedError> {
        for part in Component::ALL {
            if !programs.join(part.program()).exists() {
                return Err(KubernetesTestbedError::Missing { folder: programs.to_owned(), program: part.program() });
            }
        }
        let mut tries = 1;
        loop {
            match Self::start_once(programs, setup) {
                Err(KubernetesTestbedError::Exited { said: output, .. })
                    if tries < TRIES && output.contains("address already in use") =>
                {
                    tries += 1;
                }
                started => return started,
            }
        }
    }

    /// Returns the URL of the API server.
    pub fn url(&self) -> String {
        format!("https://127.0.0.1:{}", self.client.port)
    }

    /// Returns the kubeconfig of the cluster administrator.
    pub fn admin(&self) -> &Path {
        &self.admin
    }

    /// Returns the CA certificate that signed the API server's.
    pub fn authority(&self) -> &Path {
        &self.client.authority
    }

    /// Returns how long the start took.
    pub fn startup_time(&self) -> Duration {
        self.startup_time
    }

    /// Writes a kubeconfig for a user in these groups. Its permissions are those of the roles bound to them.
    ///
    /// # Errors
    /// Fails if the certificate cannot be created.
    pub fn kubeconfig_for_user(&self, name: &str, groups: &[&str]) -> Result<PathBuf, KubernetesTestbedError> {
        let mut inner = self.lock();
        let pair = inner.authority.user(name, groups)?;
        self.config.kubeconfig(&inner.next_kubeconfig(), &self.url(), &Credentials::Certificate(&pair))
    }

    /// Writes a kubeconfig with a token of an existing service account, valid for a day.
    ///
    /// # Errors
    /// Fails if the account does not exist.
    pub fn kubeconfig_for_service_account(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<PathBuf, KubernetesTestbedError> {
        let token = self.token(namespace, name, &json!({ "expirationSeconds": 86_400 }))?;
        self.config.kubeconfig(&self.lock().next_kubeconfig(), &self.url(), &Credentials::Token(&token))
    }

    /// Requests a token of an existing service account; `spec` is that of a TokenRequest.
    ///
    /// # Errors
    /// Fails if the request is rejected.
    pub fn token(&self, namespace: &str, account: &str, spec: &Value) -> Result<String, KubernetesTestbedError> {
        let path = format!("/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token");
        let token_request = json!({ "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec });
        let answer = self.request("POST", &path, Some(&token_request))?;
        let body: Value = serde_json::from_str(&answer.text).unwrap_or_default();
        match body["status"]["token"].as_str().filter(|_| answer.is_success()) {
            Some(token) => Ok(token.to_owned()),
            None => {
                let request = format!("POST {path}");
                Err(KubernetesTestbedError::ErrorStatus { asked: request, status: answer.status, said: answer.text })
            }
        }
    }

    /// Requests a token as the kubelet does for an existing pod, for this audience and ten minutes.
    ///
    /// # Errors
    /// Fails if the pod does not exist or does not run as this account.
    pub fn pod_token(
        &self,
        namespace: &str,
        account: &str,
        pod: &str,
        audience: &str,
    ) -> Result<String, KubernetesTestbedError> {
        let found = self.request("GET", &format!("/api/v1/namespaces/{namespace}/pods/{pod}"), None)?;
        let found: Value = serde_json::from_str(&found.text).unwrap_or_default();
        let bound = json!({ "kind": "Pod", "apiVersion": "v1", "name": pod, "uid": found["metadata"]["uid"] });
        let spec = json!({ "audiences": [audience], "expirationSeconds": 600, "boundObjectRef": bound });
        self.token(namespace, account, &spec)
    }

    /// Returns the requests of service accounts so far, if [`Setup::audit`] is set.
    ///
    /// # Errors
    /// Fails if there is no audit log.
    pub fn audited_requests(&self) -> Result<Vec<AuditedRequest>, KubernetesTestbedError> {
        audit::read(&self.config.audit_log())
    }

    /// Sends a request as the cluster administrator. The body is JSON.
    ///
    /// # Errors
    /// Fails if there is no reply. A rejection is a reply.
    pub fn request(
        &self,
        method: &str,
        path: &str,
        body: Option<&Value>,
    ) -> Result<ApiResponse, KubernetesTestbedError> {
        self.client.request(method, path, body)
    }

    /// Returns the collection path for an object, for kinds with a regular plural.
    pub fn api_path(object: &Value) -> String {
        let field = |key: &str| object[key].as_str().unwrap_or_default();
        let root = if field("apiVersion") == "v1" { "/api" } else { "/apis" };
        let namespace = object["metadata"]["namespace"].as_str();
        let namespace = namespace.map_or_else(String::new, |name| format!("/namespaces/{name}"));
        let kind = field("kind").to_ascii_lowercase();
        let plural = match kind.strip_suffix('y') {
            Some(stem) => format!("{stem}ies"),
            None if kind.ends_with('s') => format!("{kind}es"),
            None => format!("{kind}s"),
        };
        format!("{root}/{}{namespace}/{plural}", field("apiVersion"))
    }

    /// Creates an object of a kind with a regular plural.
    ///
    /// # Panics
    /// Panics if the API server rejects it.
    pub fn create(&self, object: &Value) {
        let path = Self::api_path(object);
        let answer = self.request("POST", &path, Some(object));
        assert!(answer.as_ref().is_ok_and(ApiResponse::is_success), "{path}: {answer:?}");
    }

    /// Kills the API server, as a crash would: connections break, watches end, its address refuses connections.
    ///
    /// # Errors
    /// Fails if it cannot be ended.
    pub fn kill_apiserver(&self) -> Result<(), KubernetesTestbedError> {
        self.lock().daemons.kill(Component::ApiServer)
    }

    /// Restarts the API server at the same address with the same data, and waits until it is ready.
    ///
    /// # Errors
    /// Returns the end of its log.
    pub fn restart_apiserver(&self) -> Result<(), KubernetesTestbedError> {
        self.kill_apiserver()?;
        let mut inner = self.lock();
        inner.daemons.start(
            Component::ApiServer,
            &self.config.programs,
            &self.config.arguments(Component::ApiServer),
        )?;
        self.wait_until_ready(&mut inner.daemons)
    }

    /// Returns the log file of a component.
    pub fn log(&self, part: Component) -> PathBuf {
        self.lock().daemons.log(part)
    }

    /// Returns the process id of each running component.
    pub fn pids(&self) -> Vec<(Component, u32)> {
        self.lock().daemons.pids().collect()
    }

    fn start_once(programs: &Path, setup: Setup<'_>) -> Result<Self, KubernetesTestbedError> {
        let began = Instant::now();
        let temporary = std::env::temp_dir();
        let folder = tempfile::Builder::new().prefix("doctor-kubernetes-").tempdir_in(&temporary);
        let folder = folder.map_err(file_error("creating a folder in", &temporary))?;
        if let Some(data) = setup.data {
            etcd_data::copy(data, &folder.path().join(etcd_data::FOLDER))?;
        }
        let mut daemons = Daemons::new(folder.path())?;
        let mut authority = CertificateAuthority::new(&folder.path().join("pki"))?;
        let reserve = || ports::reserve_one().map_err(KubernetesTestbedError::Ports);
        let (etcd_port, port) = (reserve()?, reserve()?);
        let config = ControlPlaneConfig {
            node_grace: setup.node_grace,
            audit: setup.audit,
            streaming_lists: setup.streaming_lists,
            programs: programs.to_owned(),
            folder: folder.path().to_owned(),
            etcd_port,
            port,
            server: authority.server()?,
            authority: authority.certificate().to_owned(),
            tokens: authority.token_key()?,
            kubelet_client: authority.user("bed-apiserver", &["system:masters"])?,
        };
        if setup.audit {
            audit::write_policy(&config.audit_policy())?;
        }
        let url = format!("https://127.0.0.1:{port}");
        for part in [Component::ControllerManager, Component::Scheduler] {
            let pair = authority.user(&format!("system:{}", part.program()), &[])?;
            config.kubeconfig(part.program(), &url, &Credentials::Certificate(&pair))?;
        }
        let user = authority.user("bed-admin", &["system:masters"])?;
        let admin = config.kubeconfig("admin", &url, &Credentials::Certificate(&user))?;
        let client = ApiClient { port, authority: config.authority.clone(), user };

        for part in [Component::Etcd, Component::ApiServer] {
            daemons.start(part, programs, &config.arguments(part))?;
        }
        let inner = Mutex::new(Inner { daemons, authority, kubeconfigs: 0 });
        let mut plane = Self { config, client, admin, startup_time: Duration::ZERO, inner, _folder: folder };
        plane.finish_start(setup.controllers)?;
        plane.startup_time = began.elapsed();
        Ok(plane)
    }

    /// Starts the components that would exit while the API server does not answer.
    fn finish_start(&self, controllers: bool) -> Result<(), KubernetesTestbedError> {
        let mut inner = self.lock();
        self.wait_until_ready(&mut inner.daemons)?;
        if !controllers {
            return Ok(());
        }
        for part in [Component::ControllerManager, Component::Scheduler] {
            inner.daemons.start(part, &self.config.programs, &self.config.arguments(part))?;
        }
        let account = "/api/v1/namespaces/default/serviceaccounts/default";
        self.wait_for(&mut inner.daemons, Component::ControllerManager, account, "no service account was created")
    }

    fn wait_until_ready(&self, daemons: &mut Daemons) -> Result<(), KubernetesTestbedError> {
        self.wait_for(daemons, Component::ApiServer, "/readyz", "the API server was not ready")
    }

    /// Waits until a GET of the path succeeds; `part` is the component responsible for it.
    fn wait_for(
        &self,
        daemons: &mut Daemons,
        part: Component,
        path: &str,
        what: &'static str,
    ) -> Result<(), KubernetesTestbedError> {
        let began = Instant::now();
        loop {
            for running in [Component::Etcd, Component::ApiServer, part] {
                daemons.check(running)?;
            }
            match self.client.request("GET", path, None) {
                Ok(answer) if answer.is_success() => return Ok(()),
                // Before the server listens there is no reply, and before it is ready it rejects requests.
                Ok(_) | Err(KubernetesTestbedError::NoResponse { .. }) => {}
                Err(other) => return Err(other),
            }
            if began.elapsed() > PATIENCE {
                return Err(KubernetesTestbedError::Timeout { what, part, said: daemons.last_lines(part) });
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // No operation leaves state half changed, so a test that panicked while it held the lock does no harm.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn repository_file(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// Runs a script of this repository and returns the path that it prints, or the last line of its standard error.
pub(crate) fn from_script(script: &str, arguments: &[&str]) -> Result<PathBuf, String> {
    let ended = Command::new(repository_file(script)).args(arguments).output();
    let ended = ended.map_err(|error| format!("running {script}: {error}"))?;
    if ended.status.success() {
        return Ok(PathBuf::from(String::from_utf8_lossy(&ended.stdout).trim()));
    }
    Err(last_reason(&String::from_utf8_lossy(&ended.stderr)))
}

/// Extracts the reason from the last line of a script's standard error.
fn last_reason(output: &str) -> String {
    output.lines().last().unwrap_or("no output").trim_start_matches(NOT_RUN).to_owned()
}

/// Returns the last lines of a log.
pub(crate) fn last_lines(log: &Path) -> String {
    let log = fs::read(log).unwrap_or_default();
    let log = String::from_utf8_lossy(&log);
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(LAST_LINES)..].join("\n")
}

impl Inner {
    fn next_kubeconfig(&mut self) -> String {
        self.kubeconfigs += 1;
        format!("user-{}", self.kubeconfigs)
    }
}

impl ControlPlaneConfig {
    /// Writes a kubeconfig as JSON, which is valid YAML.
    fn kubeconfig(
        &self,
        name: &str,
        url: &str,
        credentials: &Credentials<'_>,
    ) -> Result<PathBuf, KubernetesTestbedError> {
        let user = match credentials {
            Credentials::Certificate(pair) => json!({ "client-certificate": pair.certificate, "client-key": pair.key }),
            Credentials::Token(token) => json!({ "token": token }),
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
        fs::write(&path, config.to_string()).map_err(file_error("writing", &path))?;
        Ok(path)
    }
}
