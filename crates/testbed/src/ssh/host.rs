//! One sshd in its own namespaces: starting it, stopping its listener, cutting its connections, rebooting it, and
//! replacing it by a black hole.

use std::{
    fs::{self, File},
    io::{self, BufRead as _, BufReader},
    net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};

use super::{
    PATIENCE, PAUSE,
    error::{SshTestbedError, file_error},
    keygen,
};
use crate::kubernetes::last_lines;

/// Stored in the folder, because a shell reads its script while it runs.
const HOST_SCRIPT: &str = include_str!("host.sh");

/// A host with an sshd.
#[derive(Debug)]
pub struct Host {
    pub name: String,
    /// The address on which its sshd listens.
    pub at: SocketAddrV4,
    pub(super) folder: PathBuf,
    supervisor: Option<Child>,
    black_hole: Option<BlackHole>,
    boots: u32,
}

/// A listener with a full backlog that never accepts: the kernel drops new connections, as if the host were gone.
#[derive(Debug)]
struct BlackHole {
    _listener: TcpListener,
    _queue: Vec<TcpStream>,
}

/// A connection over loopback that is not established by then never will be.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(200);
/// More connections than a backlog of zero accepts.
const MAX_QUEUED: usize = 16;

impl BlackHole {
    fn at(address: SocketAddrV4) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        rustix::net::listen(&listener, 0)?;
        let mut queue = Vec::new();
        while let Ok(stream) = TcpStream::connect_timeout(&address.into(), CONNECT_TIMEOUT) {
            queue.push(stream);
            if queue.len() > MAX_QUEUED {
                return Err(io::Error::other("its queue does not fill"));
            }
        }
        Ok(Self { _listener: listener, _queue: queue })
    }
}

/// Checks that this machine can run such hosts.
pub(super) fn check_supported() -> Result<(), SshTestbedError> {
    let no = |why: String| SshTestbedError::Unsupported { why };
    if !rustix::process::geteuid().is_root() {
        return Err(no("root is required to create devices and enter namespaces".to_owned()));
    }
    for program in ["/usr/sbin/sshd", "/usr/bin/ssh", "/usr/bin/ssh-keygen"] {
        if !Path::new(program).exists() {
            return Err(no(format!("{program} is not installed; scripts/system.sh installs it")));
        }
    }
    let tried = Command::new("bash").args(["-c", HOST_SCRIPT, "bash", "try"]).output();
    let tried = tried.map_err(|source| SshTestbedError::Program { program: "bash", source })?;
    if tried.status.success() {
        return Ok(());
    }
    Err(no(String::from_utf8_lossy(&tried.stderr).trim().to_owned()))
}

impl Host {
    /// Creates the files of a host and boots it. `number` is the last byte of its address.
    pub(super) fn new(testbed: &Path, name: &str, number: u8) -> Result<Self, SshTestbedError> {
        let folder = testbed.join(name);
        let home = folder.join("home");
        fs::create_dir_all(&home).map_err(file_error("creating", &home))?;
        keygen(&folder.join("host_key"))?;
        let address = Ipv4Addr::new(127, 0, 1, number);
        let port = TcpListener::bind((address, 0)).and_then(|listener| listener.local_addr());
        let port = port.map_err(|source| SshTestbedError::Port { address: address.to_string(), source })?.port();
        let host = Self {
            name: name.to_owned(),
            at: SocketAddrV4::new(address, port),
            folder,
            supervisor: None,
            black_hole: None,
            boots: 0,
        };
        host.write_file("host.sh", HOST_SCRIPT)?;
        host.write_file("sshd_config", &host.config(testbed))?;
        host.set_load("0.10 0.10 0.10 1/84 7182\n")?;
        let mut host = host;
        host.boot()?;
        Ok(host)
    }

    fn config(&self, testbed: &Path) -> String {
        let (folder, testbed) = (self.folder.display(), testbed.display());
        format!(
            "ListenAddress {}\nPort {}\nHostKey {folder}/host_key\nAuthorizedKeysFile {testbed}/id.pub\nPidFile none\n\
             StrictModes no\nUsePAM no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n\
             PermitRootLogin prohibit-password\nMaxStartups 200\nMaxSessions 64\n",
            self.at.ip(),
            self.at.port()
        )
    }

    fn write_file(&self, name: &str, text: &str) -> Result<(), SshTestbedError> {
        let path = self.folder.join(name);
        fs::write(&path, text).map_err(file_error("writing", &path))
    }

    /// Sets the content of its /proc/loadavg, in place because the file is bind-mounted.
    pub fn set_load(&self, text: &str) -> Result<(), SshTestbedError> {
        self.write_file("loadavg", text)
    }

    /// Returns its home directory, as seen from outside.
    pub fn home(&self) -> PathBuf {
        self.folder.join("home")
    }

    /// Gives the host private, empty `/opt`, `/usr/local/bin` and `/var/log`, and reboots it. Returns their parent outside.
    ///
    /// # Errors
    /// Fails if the folders cannot be created or the host does not come back.
    pub fn private_folders(&mut self) -> Result<PathBuf, SshTestbedError> {
        let root = self.folder.join("root");
        for name in ["opt", "usr/local/bin", "var/log"] {
            let path = root.join(name);
            fs::create_dir_all(&path).map_err(file_error("creating", &path))?;
        }
        self.boot()?;
        Ok(root)
    }

    pub fn boot_id(&self) -> String {
        format!("00000000-0000-4000-8000-{:012}", self.boots)
    }

    /// Ends all processes of the host, if it is up, and boots it with a new boot id.
    pub fn boot(&mut self) -> Result<(), SshTestbedError> {
        self.stop();
        self.boots += 1;
        self.write_file("boot_id", &format!("{}\n", self.boot_id()))?;
        let log = self.folder.join("keeper.log");
        let errors = File::create(&log).map_err(file_error("creating", &log))?;
        let mut supervisor = Command::new("bash")
            .arg(self.folder.join("host.sh"))
            .arg("keep")
            .arg(&self.folder)
            .arg(&self.name)
            .arg(crate::programs::profile_folder())
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors)
            .process_group(0)
            .spawn()
            .map_err(|source| SshTestbedError::Program { program: "bash", source })?;
        let mut ready = String::new();
        if let Some(output) = supervisor.stdout.take() {
            // A failed read leaves an empty line, which is handled as no reply.
            let _read = BufReader::new(output).read_line(&mut ready);
        }
        self.supervisor = Some(supervisor);
        if ready.trim() != "ready" {
            self.stop();
            return Err(SshTestbedError::Supervisor { host: self.name.clone(), said: last_lines(&log) });
        }
        self.wait_until("the sshd to listen", |host| TcpStream::connect(host.at).is_ok())
    }

    /// Makes the host unreachable: connection attempts get no reply at all.
    pub fn black_hole(&mut self) -> Result<(), SshTestbedError> {
        self.stop();
        let hole =
            BlackHole::at(self.at).map_err(|source| SshTestbedError::Port { address: self.at.to_string(), source })?;
        self.black_hole = Some(hole);
        Ok(())
    }

    /// Stops the host: connections are refused.
    pub fn stop(&mut self) {
        self.black_hole = None;
        if let Some(mut supervisor) = self.supervisor.take() {
            // The end of its input tells the supervisor to exit.
            drop(supervisor.stdin.take());
            drop(supervisor.wait());
        }
    }

    /// Makes sshd hang: new connections are accepted without a banner, and existing ones continue.
    pub fn hang(&self) {
        self.listeners().into_iter().for_each(|pid| signal(pid, Signal::STOP));
    }

    pub fn unhang(&self) {
        self.listeners().into_iter().for_each(|pid| signal(pid, Signal::CONT));
    }

    /// Kills all existing connections. Processes started over them survive if they have left their session.
    pub fn cut_connections(&self) -> Result<(), SshTestbedError> {
        let listeners = self.listeners();
        let connections = || -> Vec<u32> {
            processes().filter(|pid| parent(*pid).is_some_and(|parent| listeners.contains(&parent))).collect()
        };
        connections().into_iter().for_each(|pid| signal(pid, Signal::KILL));
        self.wait_until("the connections to be cut", |_| connections().is_empty())
    }

    fn listeners(&self) -> Vec<u32> {
        let config = self.folder.join("sshd_config");
        let config = config.to_string_lossy();
        let is_one = |pid: &u32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).replace('\0', " ");
            line.contains("sshd") && line.contains(&*config)
        };
        processes().filter(is_one).collect()
    }

    fn wait_until(&self, what: &str, there: impl Fn(&Self) -> bool) -> Result<(), SshTestbedError> {
        let began = Instant::now();
        while !there(self) {
            if began.elapsed() > PATIENCE {
                return Err(SshTestbedError::Timeout { what: format!("{what} on {}", self.name), within: PATIENCE });
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Returns a relay to this host that delays each chunk of data by this long.
    pub fn slow_proxy(&self, by: Duration) -> Result<super::SlowProxy, SshTestbedError> {
        super::SlowProxy::new(self.at, by)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.stop();
    }
}

fn processes() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

fn parent(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    // A zombie has no connection any more.
    (fields.next()? != "Z").then(|| fields.next()?.parse().ok()).flatten()
}

fn signal(pid: u32, signal: Signal) {
    // The process may have ended in the meantime.
    let _gone = i32::try_from(pid).ok().and_then(Pid::from_raw).map(|pid| kill_process(pid, signal));
}
