//! The world that server and hosts live in: `world.sh`, which is told what to do line by line and ends all of it when it is left alone.

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
    api::Person,
    error::{BedError, at},
};
use crate::kubernetes::{from_script, last_lines};

/// Lives in the folder, because the shell reads a script while it runs it.
pub(super) const KEEPER: &str = include_str!("world.sh");
pub(super) const SERVER: &str = include_str!("server.py");

#[derive(Debug)]
pub(super) struct Keeper {
    child: Child,
    answers: BufReader<ChildStdout>,
    log: PathBuf,
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // The end of its input is the order.
        drop(self.child.stdin.take());
        drop(self.child.wait());
    }
}

impl Keeper {
    /// A process in the world's network: what it started, which is in there itself.
    pub(super) fn inside(&self) -> Option<u32> {
        let keeper = self.child.id();
        let children = fs::read_to_string(format!("/proc/{keeper}/task/{keeper}/children")).ok()?;
        children.split_whitespace().next()?.parse().ok()
    }

    pub(super) fn order(&mut self, word: &str, number: u8) -> Result<(), BedError> {
        let gone = |source| BedError::Program { program: "world.sh", source };
        let input = self.child.stdin.as_mut().ok_or_else(|| gone(io::ErrorKind::BrokenPipe.into()))?;
        writeln!(input, "{word} {number}").map_err(gone)?;
        let mut done = String::new();
        self.answers.read_line(&mut done).map_err(gone)?;
        if done.trim() == format!("{word} {number}") {
            return Ok(());
        }
        Err(BedError::Keeper { said: last_lines(&self.log) })
    }
}

/// Whether this machine allows it, and where the server's programs are.
pub(super) fn try_one() -> Result<PathBuf, BedError> {
    let no = |why: String| BedError::NotThere { why };
    if !rustix::process::geteuid().is_root() {
        return Err(no("it needs root: namespaces are made and entered".to_owned()));
    }
    for program in
        ["/usr/sbin/sshd", "/usr/bin/ssh", "/usr/bin/ssh-keygen", "/usr/bin/curl", "/usr/bin/python3", "/usr/sbin/ip"]
    {
        if !Path::new(program).exists() {
            return Err(no(format!("{program} is not installed; scripts/system.sh brings it")));
        }
    }
    let tried = Command::new("bash").args(["-c", KEEPER, "bash", "try"]).output();
    let tried = tried.map_err(|source| BedError::Program { program: "bash", source })?;
    if !tried.status.success() {
        return Err(no(String::from_utf8_lossy(&tried.stderr).trim().to_owned()));
    }
    from_script("scripts/dstack.sh", &[]).map_err(no)
}

/// Starts the world. The listener is handed down, and forgotten here.
pub(super) fn keep(
    folder: &Path,
    hosts: u8,
    programs: &Path,
    listener: &TcpListener,
    admin: &Person,
) -> Result<Keeper, BedError> {
    let log = folder.join("keeper.log");
    let errors = File::create(&log).map_err(at("creating", &log))?;
    let home = folder.join("server");
    fs::create_dir_all(&home).map_err(at("creating", &home))?;
    let socket = |flags| fcntl_setfd(listener.as_fd(), flags).map_err(|error| BedError::Socket(error.into()));
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
    let mut child = spawned.map_err(|source| BedError::Program { program: "bash", source })?;
    let Some(output) = child.stdout.take() else {
        return Err(BedError::Keeper { said: "it has no output".to_owned() });
    };
    let mut keeper = Keeper { child, answers: BufReader::new(output), log: log.clone() };
    let mut ready = String::new();
    // What cannot be read is an empty line, which is not an answer.
    let _read = keeper.answers.read_line(&mut ready);
    if ready.trim() == "ready" {
        return Ok(keeper);
    }
    drop(keeper);
    Err(BedError::Keeper { said: last_lines(&log) })
}

/// Nothing of the machine that this runs on is the server's: no home, no account at a cloud.
fn server_settings(home: &Path, admin: &Person) -> [(&'static str, String); 9] {
    let home = home.display().to_string();
    [
        ("DSTACK_SERVER_DIR", home.clone()),
        ("HOME", home),
        ("DSTACK_SERVER_ADMIN_TOKEN", admin.token.clone()),
        ("DSTACK_DEFAULT_CREDS_DISABLED", "1".to_owned()),
        ("DSTACK_DO_NOT_UPDATE_DEFAULT_PROJECT", "1".to_owned()),
        ("DSTACK_SERVER_INSTANCE_HEALTH_MIN_COLLECT_INTERVAL_SECONDS", "1".to_owned()),
        // Three seconds, unless it is told otherwise: a host that waits for a core needs more.
        ("DSTACK_SERVER_SSH_CONNECT_TIMEOUT", "15".to_owned()),
        ("DSTACK_SHIM_DOWNLOAD_URL", "file:///run/bed/shim.py".to_owned()),
        ("DSTACK_RUNNER_DOWNLOAD_URL", "file:///run/bed/shim.py".to_owned()),
    ]
}

/// Nobody else's: a number that this machine has not given out yet.
pub(super) fn token() -> String {
    let uuid = fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap_or_default();
    uuid.trim().to_owned()
}
