//! The namespaces of server and hosts: `world.sh`, which takes commands line by line and ends everything when its input ends.

use std::{
    fs::{self, File},
    io::{self, BufRead as _, BufReader, Write as _},
    net::TcpListener,
    os::{
        fd::{AsFd as _, AsRawFd as _},
        unix::process::CommandExt as _,
    },
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Stdio},
};

use rustix::io::{FdFlags, fcntl_setfd};

use super::{
    api::User,
    error::{DstackTestbedError, file_error},
};
use crate::kubernetes::{from_script, last_lines};

/// Stored in the folder, because a shell reads its script while it runs.
pub(super) const NAMESPACE_SCRIPT: &str = include_str!("world.sh");
pub(super) const SERVER_SCRIPT: &str = include_str!("server.py");

#[derive(Debug)]
pub(super) struct Supervisor {
    child: Child,
    answers: BufReader<ChildStdout>,
    log: PathBuf,
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        // The end of its input tells the supervisor to exit.
        drop(self.child.stdin.take());
        drop(self.child.wait());
    }
}

impl Supervisor {
    /// Returns a process in the network namespace: the supervisor's child.
    pub(super) fn inner_pid(&self) -> Option<u32> {
        let pid = self.child.id();
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
        children.split_whitespace().next()?.parse().ok()
    }

    pub(super) fn command(&mut self, command: &str, number: u8) -> Result<(), DstackTestbedError> {
        let program_error = |source| DstackTestbedError::Program { program: "world.sh", source };
        let input = self.child.stdin.as_mut().ok_or_else(|| program_error(io::ErrorKind::BrokenPipe.into()))?;
        writeln!(input, "{command} {number}").map_err(program_error)?;
        let mut done = String::new();
        self.answers.read_line(&mut done).map_err(program_error)?;
        if done.trim() == format!("{command} {number}") {
            return Ok(());
        }
        Err(DstackTestbedError::Supervisor { said: last_lines(&self.log) })
    }
}

/// Checks that this machine allows namespaces, and returns the folder of the server's programs.
pub(super) fn check_supported() -> Result<PathBuf, DstackTestbedError> {
    let no = |why: String| DstackTestbedError::Unsupported { why };
    if !rustix::process::geteuid().is_root() {
        return Err(no("root is required to create and enter namespaces".to_owned()));
    }
    for program in
        ["/usr/sbin/sshd", "/usr/bin/ssh", "/usr/bin/ssh-keygen", "/usr/bin/curl", "/usr/bin/python3", "/usr/sbin/ip"]
    {
        if !Path::new(program).exists() {
            return Err(no(format!("{program} is not installed; scripts/system.sh installs it")));
        }
    }
    let tried = Command::new("bash").args(["-c", NAMESPACE_SCRIPT, "bash", "try"]).output();
    let tried = tried.map_err(|source| DstackTestbedError::Program { program: "bash", source })?;
    if !tried.status.success() {
        return Err(no(String::from_utf8_lossy(&tried.stderr).trim().to_owned()));
    }
    from_script("scripts/dstack.sh", &[]).map_err(no)
}

/// Starts the namespaces and the server, which inherits the listening socket.
pub(super) fn start_supervisor(
    folder: &Path,
    hosts: u8,
    programs: &Path,
    listener: &TcpListener,
    admin: &User,
) -> Result<Supervisor, DstackTestbedError> {
    let log = folder.join("keeper.log");
    let errors = File::create(&log).map_err(file_error("creating", &log))?;
    let home = folder.join("server");
    fs::create_dir_all(&home).map_err(file_error("creating", &home))?;
    let socket = |flags| fcntl_setfd(listener.as_fd(), flags).map_err(|error| DstackTestbedError::Socket(error.into()));
    socket(FdFlags::empty())?;
    let spawned = Command::new("bash")
        .arg(folder.join("world.sh"))
        .arg("keep")
        .arg(folder)
        .arg(hosts.to_string())
        .env("DOCTOR_BED_PYTHON", programs.join("python"))
        .env("DOCTOR_BED_SOCKET", listener.as_fd().as_raw_fd().to_string())
        .envs(server_settings(&home, admin))
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(errors)
        .process_group(0)
        .spawn();
    socket(FdFlags::CLOEXEC)?;
    let mut child = spawned.map_err(|source| DstackTestbedError::Program { program: "bash", source })?;
    let Some(output) = child.stdout.take() else {
        return Err(DstackTestbedError::Supervisor { said: "it has no output".to_owned() });
    };
    let mut supervisor = Supervisor { child, answers: BufReader::new(output), log: log.clone() };
    let mut ready = String::new();
    // A failed read leaves an empty line, which is handled as no reply.
    let _read = supervisor.answers.read_line(&mut ready);
    if ready.trim() == "ready" {
        return Ok(supervisor);
    }
    drop(supervisor);
    Err(DstackTestbedError::Supervisor { said: last_lines(&log) })
}

/// Isolates the server from this machine: no home directory, no cloud credentials.
fn server_settings(home: &Path, admin: &User) -> [(&'static str, String); 9] {
    let home = home.display().to_string();
    [
        ("DSTACK_SERVER_DIR", home.clone()),
        ("HOME", home),
        ("DSTACK_SERVER_ADMIN_TOKEN", admin.token.clone()),
        ("DSTACK_DEFAULT_CREDS_DISABLED", "1".to_owned()),
        ("DSTACK_DO_NOT_UPDATE_DEFAULT_PROJECT", "1".to_owned()),
        ("DSTACK_SERVER_INSTANCE_HEALTH_MIN_COLLECT_INTERVAL_SECONDS", "1".to_owned()),
        // The default is three seconds, too short for a host that waits for a core.
        ("DSTACK_SERVER_SSH_CONNECT_TIMEOUT", "15".to_owned()),
        ("DSTACK_SHIM_DOWNLOAD_URL", "file:///run/bed/shim.py".to_owned()),
        ("DSTACK_RUNNER_DOWNLOAD_URL", "file:///run/bed/shim.py".to_owned()),
    ]
}

/// Returns a random token.
pub(super) fn token() -> String {
    let uuid = fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap_or_default();
    uuid.trim().to_owned()
}
