//! A real node of a control plane: released builds of kubelet, containerd and runc in their own namespaces on this machine.
//!
//! ```no_run
//! use std::sync::Arc;
//! use doctor_testbed::kubernetes::{ControlPlane, real_node::RealNode};
//!
//! let plane = Arc::new(ControlPlane::start(&ControlPlane::programs()?)?);
//! let node = RealNode::start(&RealNode::programs()?, &plane, "real-1")?;
//! node.install("doctor".as_ref(), "doctor-node".as_ref())?;    // in our images, as deploy/image makes them
//! node.set_gpus(8)?;                                           // without any hardware
//! node.kill_kubelet()?;                                        // containers go on
//! node.start_kubelet()?;
//! # Ok::<(), doctor_testbed::kubernetes::KubernetesTestbedError>(())
//! ```
//!
//! It needs root. Processes and mounts are in namespaces that end with the process that started the node, even if it is
//! killed; a supervisor outside (`node.sh`) removes the rest. Containers see the node's own /run, /var/lib and /var/log and
//! this machine's files elsewhere, so a test's folder can be mounted under its own path.
//!
//! A link that only the two can reach connects node and control plane. The API server contacts the kubelet directly.
//! The kubelet reaches the API server, which listens only on loopback, through a relay at the host's end of the link ([`tcp_proxy`]).

mod settings;
mod tcp_proxy;

use std::{
    fs::{self, File},
    io::{BufRead as _, BufReader, Write as _},
    net::{IpAddr, Ipv4Addr},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{Receiver, channel},
    },
    time::Instant,
};

use serde_json::{Value, json};
use tempfile::TempDir;

use super::{
    ControlPlane, KubernetesTestbedError, NOT_RUN, PATIENCE, PAUSE, file_error, from_script, last_lines, last_reason,
    repository_file,
};
use tcp_proxy::TcpProxy;

/// Stored in the folder, because a shell reads its script while it runs.
const NODE_SCRIPT: &str = include_str!("node.sh");

/// The sandbox image that holds a pod's namespaces, as named by scripts/bed-images.sh.
const PAUSE_IMAGE: &str = "cluster-doctor-testbed-pause:latest";

/// The containerd namespace of the kubelet's images.
const IMAGE_NAMESPACE: &str = "k8s.io";

/// A ready node. Dropping it ends its processes.
#[derive(Debug)]
pub struct RealNode {
    name: String,
    plane: Arc<ControlPlane>,
    inner: Mutex<Supervisor>,
    proxy: TcpProxy,
    /// Declared last: the files are removed after the processes that use them. The supervisor also removes them, in case
    /// this process is killed.
    folder: TempDir,
}

#[derive(Debug)]
struct Supervisor {
    process: Child,
    commands: Option<ChildStdin>,
    answers: Receiver<String>,
    /// Output lines that were no reply.
    output: String,
}

/// The paths of the programs of a node.
#[derive(Debug, Clone)]
pub struct Programs {
    kubelet: PathBuf,
    plugins: PathBuf,
}

impl RealNode {
    /// Finds the programs of a node. Builds the kubelet if needed.
    ///
    /// # Errors
    /// Returns [`KubernetesTestbedError::NodeUnsupported`] with what is missing on this machine.
    pub fn programs() -> Result<Programs, KubernetesTestbedError> {
        let no = |why: String| KubernetesTestbedError::NodeUnsupported { why };
        if !rustix::process::geteuid().is_root() {
            return Err(no("a kubelet with containers needs root".to_owned()));
        }
        for program in ["containerd", "runc", "ctr", "ip", "nsenter", "unshare"] {
            if !on_path(program) {
                return Err(no(format!("{program} is not installed; scripts/system.sh installs it")));
            }
        }
        let plugins = ["/usr/lib/cni", "/opt/cni/bin"].map(PathBuf::from);
        let plugins = plugins.into_iter().find(|folder| folder.join("bridge").exists());
        let plugins = plugins.ok_or_else(|| no("containernetworking-plugins is not installed".to_owned()))?;
        if let Some(why) = unsupported_reason()? {
            return Err(no(why));
        }
        let kubelet = from_script("scripts/kubernetes.sh", &["kubelet"]).map_err(no)?;
        Ok(Programs { kubelet, plugins })
    }

    /// Starts a node and waits until it is schedulable.
    ///
    /// # Errors
    /// Returns the end of the log of what failed.
    pub fn start(programs: &Programs, plane: &Arc<ControlPlane>, name: &str) -> Result<Self, KubernetesTestbedError> {
        let temporary = std::env::temp_dir();
        let folder = tempfile::Builder::new().prefix("doctor-node-").tempdir_in(&temporary);
        let folder = folder.map_err(file_error("creating a folder in", &temporary))?;
        let user = plane.lock().authority.user(&format!("system:node:{name}"), &["system:nodes"])?;
        settings::write(folder.path(), programs, plane.authority())?;
        let script = folder.path().join("node.sh");
        fs::write(&script, NODE_SCRIPT).map_err(file_error("writing", &script))?;
        let mut inner = Supervisor::start(&script, folder.path(), programs, name)?;
        let host: Option<Ipv4Addr> = inner.read_reply("address ").and_then(|address| address.parse().ok());
        let ended = |inner: &Supervisor| KubernetesTestbedError::NodeExited {
            node: name.to_owned(),
            said: inner.output.clone(),
        };
        let host = host.ok_or_else(|| ended(&inner))?;
        let proxy = TcpProxy::open(host, plane.client.port)?;
        settings::kubeconfig(folder.path(), &format!("https://{}", proxy.address()), plane.authority(), &user)?;
        let node = Self { name: name.to_owned(), folder, plane: Arc::clone(plane), inner: Mutex::new(inner), proxy };
        node.wait("containerd did not answer", || {
            node.ctr(&["version"]).status().is_ok_and(|status| status.success())
        })?;
        node.start_kubelet()?;
        Ok(node)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns this machine's address on the link. A server that the node is to reach listens there.
    pub fn host(&self) -> IpAddr {
        self.proxy.address().ip()
    }

    /// Returns the node's API object.
    ///
    /// # Errors
    /// Fails if the API server does not answer.
    pub fn object(&self) -> Result<Value, KubernetesTestbedError> {
        let answer = self.plane.request("GET", &format!("/api/v1/nodes/{}", self.name), None)?;
        Ok(serde_json::from_str(&answer.text).unwrap_or_default())
    }

    /// Imports the images of our pods: `cluster-doctor:latest` with this `doctor`, `cluster-doctor-node:latest` with
    /// this `doctor-node`.
    ///
    /// # Errors
    /// Returns [`KubernetesTestbedError::NodeUnsupported`] if this machine cannot build them.
    pub fn install(&self, doctor: &Path, doctor_node: &Path) -> Result<(), KubernetesTestbedError> {
        self.import("pause", None)?;
        self.import("controller", Some(doctor))?;
        self.import("node", Some(doctor_node))
    }

    /// Streams an image into containerd while it is built, without storing the archive.
    fn import(&self, kind: &'static str, program: Option<&Path>) -> Result<(), KubernetesTestbedError> {
        let script = repository_file("scripts/bed-images.sh");
        let log = self.folder.path().join("images.log");
        let log_file = File::create(&log).map_err(file_error("creating", &log))?;
        let mut build = Command::new(&script)
            .arg(kind)
            .args(program)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log_file)
            .spawn()
            .map_err(|source| KubernetesTestbedError::Program { program: script.clone(), source })?;
        let archive = build.stdout.take().map_or_else(Stdio::null, Stdio::from);
        let snapshotter = settings::snapshotter(self.folder.path());
        let mut import =
            self.ctr(&["--namespace", IMAGE_NAMESPACE, "images", "import", "--snapshotter", snapshotter, "-"]);
        let imported = import.stdin(archive).output();
        let imported = imported.map_err(|source| KubernetesTestbedError::Program { program: "ctr".into(), source })?;
        // Closes its copy of the pipe, or the script would never see the end.
        drop(import);
        let built = build.wait().map_err(|source| KubernetesTestbedError::Program { program: script, source })?;
        if built.success() && imported.status.success() {
            return Ok(());
        }
        let output = last_lines(&log);
        if output.lines().last().is_some_and(|line| line.starts_with(NOT_RUN)) {
            return Err(KubernetesTestbedError::NodeUnsupported { why: last_reason(&output) });
        }
        let stderr = String::from_utf8_lossy(&imported.stderr);
        Err(KubernetesTestbedError::Image { kind, said: format!("{}\n{output}", stderr.trim()) })
    }

    /// Reports GPUs in the node's status, as with a device plugin.
    ///
    /// # Errors
    /// Fails if the API server rejects the update.
    pub fn set_gpus(&self, count: u32) -> Result<(), KubernetesTestbedError> {
        let path = format!("/api/v1/nodes/{}/status", self.name);
        let gpus = json!({ "nvidia.com/gpu": count.to_string() });
        let status = json!({ "status": { "capacity": gpus, "allocatable": gpus } });
        let answer = self.plane.request("PATCH", &path, Some(&status))?;
        if answer.is_success() {
            return Ok(());
        }
        Err(KubernetesTestbedError::ErrorStatus {
            asked: format!("PATCH {path}"),
            status: answer.status,
            said: answer.text,
        })
    }

    /// Kills the kubelet, as a crash would. Containers continue.
    ///
    /// # Errors
    /// Fails if the node has ended.
    pub fn kill_kubelet(&self) -> Result<(), KubernetesTestbedError> {
        self.command("kill kubelet", "killed")
    }

    /// Starts or restarts the kubelet and waits until it reports the node as ready.
    ///
    /// # Errors
    /// Returns the end of its log.
    pub fn start_kubelet(&self) -> Result<(), KubernetesTestbedError> {
        let before = self.heartbeat();
        self.command("start kubelet", "started")?;
        self.wait("the kubelet did not report the node as ready", || {
            self.object().is_ok_and(|node| is_ready(&node)) && self.heartbeat() != before
        })
    }

    /// Returns the kubelet's log file.
    pub fn log(&self) -> PathBuf {
        self.folder.path().join("kubelet.log")
    }

    /// Returns the id of the supervisor process, which removes what no namespace contains.
    pub fn supervisor_pid(&self) -> u32 {
        self.lock().process.id()
    }

    /// Returns the time of the kubelet's last heartbeat.
    fn heartbeat(&self) -> Option<String> {
        let node = self.object().ok()?;
        ready(&node)?["lastHeartbeatTime"].as_str().map(str::to_owned)
    }

    fn ctr(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("ctr");
        command.arg("--address").arg(self.folder.path().join("run/containerd/containerd.sock")).args(arguments);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        command
    }

    fn command(&self, order: &str, answer: &str) -> Result<(), KubernetesTestbedError> {
        let mut inner = self.lock();
        let sent = inner.commands.as_mut().is_some_and(|orders| writeln!(orders, "{order}").is_ok());
        if sent && inner.read_reply(answer).is_some() {
            return Ok(());
        }
        Err(KubernetesTestbedError::NodeExited { node: self.name.clone(), said: inner.output.clone() })
    }

    fn wait(&self, what: &'static str, mut reached: impl FnMut() -> bool) -> Result<(), KubernetesTestbedError> {
        let began = Instant::now();
        while !reached() {
            let ended = self.lock().process.try_wait();
            if matches!(ended, Ok(Some(_))) {
                return Err(KubernetesTestbedError::NodeExited { node: self.name.clone(), said: self.last_output() });
            }
            if began.elapsed() > PATIENCE {
                return Err(KubernetesTestbedError::NodeTimeout {
                    node: self.name.clone(),
                    what,
                    said: self.last_output(),
                });
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Returns the end of each log of the node.
    fn last_output(&self) -> String {
        let logs = ["containerd.log", "kubelet.log"].map(|log| last_lines(&self.folder.path().join(log)));
        format!("{}{}", self.lock().output, logs.join("\n"))
    }

    fn lock(&self) -> MutexGuard<'_, Supervisor> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for RealNode {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The logs, which may explain the panic, are removed with the node.
            eprintln!("node {}: last output:\n{}", self.name, self.last_output());
        }
    }
}

impl Supervisor {
    fn start(script: &Path, folder: &Path, programs: &Programs, name: &str) -> Result<Self, KubernetesTestbedError> {
        let mut process = Command::new("bash")
            .arg(script)
            .arg("keep")
            .args([folder, &programs.kubelet])
            .arg(name)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            // A signal to this process's group must not reach the supervisor.
            .process_group(0)
            .spawn()
            .map_err(|source| KubernetesTestbedError::Program { program: "bash".into(), source })?;
        let (sender, answers) = channel();
        if let Some(output) = process.stdout.take() {
            std::thread::spawn(move || {
                BufReader::new(output).lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
            });
        }
        let commands = process.stdin.take();
        Ok(Self { process, commands, answers, output: String::new() })
    }

    /// Returns the rest of the next line with this prefix. Other lines are appended to `output`.
    fn read_reply(&mut self, begins: &str) -> Option<String> {
        loop {
            let line = self.answers.recv_timeout(PATIENCE).ok()?;
            if let Some(rest) = line.strip_prefix(begins) {
                return Some(rest.to_owned());
            }
            self.output += &(line + "\n");
        }
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        // The end of its input ends the node.
        drop(self.commands.take());
        drop(self.process.wait());
    }
}

fn ready(node: &Value) -> Option<&Value> {
    node["status"]["conditions"].as_array()?.iter().find(|condition| condition["type"] == "Ready")
}

/// Returns whether the node is schedulable. The controller manager removes a new node's taint a moment after it is ready.
fn is_ready(node: &Value) -> bool {
    let tainted = node["spec"]["taints"].as_array().is_some_and(|taints| {
        taints
            .iter()
            .any(|taint| taint["key"].as_str().is_some_and(|key| key.starts_with("node.kubernetes.io/not-ready")))
    });
    ready(node).is_some_and(|condition| condition["status"] == "True") && !tainted
}

/// Returns why a node cannot be created here: root in a container may lack privileges.
fn unsupported_reason() -> Result<Option<String>, KubernetesTestbedError> {
    let tried = Command::new("bash").args(["-c", NODE_SCRIPT, "node.sh", "try", "", "", ""]).output();
    let tried = tried.map_err(|source| KubernetesTestbedError::Program { program: "bash".into(), source })?;
    let stdout = String::from_utf8_lossy(&tried.stdout);
    let why = stdout.lines().last().unwrap_or("no output");
    Ok((!tried.status.success()).then(|| format!("root may not create namespaces and control groups here: {why}")))
}

fn on_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).exists())
}
