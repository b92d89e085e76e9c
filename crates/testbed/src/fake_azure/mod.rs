//! A fake Azure for the real `az`: a server plays the resource manager in a private network, and scale set instances
//! are sshd with their own files, in which run-command executes its scripts.
//!
//! It verifies the calls and their effect on the machines, not Azure: quotas, permissions and names are not checked,
//! and no operation takes time.

use std::{
    fs::{self, File},
    io::{BufRead as _, BufReader},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::{
    kubernetes::{from_script, last_lines},
    skip,
};

const NAMESPACE_SCRIPT: &str = include_str!("keep.sh");
const SERVER_SCRIPT: &str = include_str!("arm.py");
/// Registers the endpoint and logs in: one process for three calls of `az`, because each takes seconds to start.
const LOGIN: &str = "import sys
from azure.cli.core import get_default_cli
for words in (['cloud', 'register', '--name', 'bed', '--endpoint-resource-manager', 'https://127.0.0.1:5991/'],
              ['cloud', 'set', '--name', 'bed'], ['login', '--identity', '--output', 'none']):
    if get_default_cli().invoke(words) != 0:
        sys.exit('az ' + ' '.join(words))
";

#[derive(Debug, thiserror::Error)]
pub enum FakeAzureError {
    /// `az` is not on this machine and cannot be installed.
    #[error("{0}")]
    Unsupported(String),
    #[error("{0}")]
    Failed(String),
}

impl FakeAzureError {
    /// Reports by name and reason that a test did not run.
    ///
    /// # Panics
    /// Panics in CI, where a skipped test is a failure, and everywhere if the test bed fails.
    pub fn skip_tests(&self, what: &str) {
        skip::skip_tests(what, self, matches!(self, Self::Unsupported(_)));
    }
}

/// Returns the folder of `az` and its Python.
///
/// # Errors
/// Returns why they cannot be installed.
pub fn programs() -> Result<PathBuf, FakeAzureError> {
    from_script("scripts/azure.sh", &[]).map_err(FakeAzureError::Unsupported)
}

/// Isolates `az`: it finds no account of the developer and sends no telemetry.
pub fn isolate(command: &mut Command, folder: &Path) {
    command.env("AZURE_CONFIG_DIR", folder.join("az")).env("AZURE_CORE_COLLECT_TELEMETRY", "false");
    command.env("AZURE_CORE_SURVEY_MESSAGE", "false").env("AZURE_CORE_CHECK_FOR_UPDATES", "false");
}

/// An empty subscription. Dropping it ends all processes.
#[derive(Debug)]
pub struct FakeAzure {
    supervisor: Child,
    /// The first process inside, by its id outside.
    inner_pid: u32,
    programs: PathBuf,
    folder: TempDir,
}

impl FakeAzure {
    /// Starts the resource manager and logs in.
    ///
    /// # Errors
    /// Returns what is missing on this machine, or an error if it does not start.
    pub fn start() -> Result<Self, FakeAzureError> {
        check_supported()?;
        let programs = programs()?;
        let failed = |error: std::io::Error| FakeAzureError::Failed(format!("starting the fake Azure: {error}"));
        let folder = tempfile::tempdir().map_err(failed)?;
        fs::write(folder.path().join("arm.py"), SERVER_SCRIPT).map_err(failed)?;
        // Stored in the folder, because a shell reads its script while it runs.
        fs::write(folder.path().join("keep.sh"), NAMESPACE_SCRIPT).map_err(failed)?;
        certificate(folder.path())?;
        let log = folder.path().join("keep.log");
        let mut supervisor = Command::new("bash")
            .arg(folder.path().join("keep.sh"))
            .arg("keep")
            .arg(folder.path())
            .arg(programs.join("python"))
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(File::create(&log).map_err(failed)?)
            .process_group(0)
            .spawn()
            .map_err(failed)?;
        let mut ready = String::new();
        if let Some(output) = supervisor.stdout.take() {
            // A failed read leaves an empty line, which is handled as no reply.
            let _read = BufReader::new(output).read_line(&mut ready);
        }
        let inner_pid = child_of(supervisor.id()).and_then(child_of);
        let mut azure = Self { supervisor, inner_pid: inner_pid.unwrap_or_default(), programs, folder };
        if ready.trim() != "ready" || azure.inner_pid == 0 {
            azure.end();
            return Err(FakeAzureError::Failed(format!("the namespace exited at startup: {}", last_lines(&log))));
        }
        azure.log_in()?;
        Ok(azure)
    }

    fn log_in(&self) -> Result<(), FakeAzureError> {
        let login = self.command(&self.programs.join("python"), self.folder.path()).args(["-c", LOGIN]).output();
        let login = login.map_err(|error| FakeAzureError::Failed(format!("az login: {error}")))?;
        match login.status.success() {
            true => Ok(()),
            false => Err(FakeAzureError::Failed(format!("az login: {}", String::from_utf8_lossy(&login.stderr)))),
        }
    }

    /// Returns a command that runs inside, in this folder, with `az` logged in and without the caller's environment.
    pub fn command(&self, program: &Path, folder: &Path) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--target={}", self.inner_pid)).args(["--net", "--mount", "--pid"]);
        command.arg(format!("--wdns={}", folder.display())).arg("--").arg(program);
        command.env_clear().env("HOME", self.folder.path()).env("LC_ALL", "C.UTF-8");
        command.env("PATH", format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", self.programs.display()));
        command.env("REQUESTS_CA_BUNDLE", self.path("cert.pem"));
        isolate(&mut command, self.folder.path());
        command
    }

    /// Kills a process that [`Self::command`] started. nsenter stays outside and waits for its child inside.
    ///
    /// # Errors
    /// Fails if the process cannot be waited for.
    pub fn kill(started: &mut Child) -> std::io::Result<()> {
        let inner = child_of(started.id()).and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
        // The process may have ended already.
        let _gone = inner.map(|pid| kill_process(pid, Signal::KILL));
        started.wait().map(drop)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns the requests that change something, as method and URL, without the validation calls of `az`.
    pub fn changes(&self) -> Vec<String> {
        let log = fs::read_to_string(self.path("requests.log")).unwrap_or_default();
        let changes =
            |line: &&str| !line.starts_with("GET ") && !line.starts_with("HEAD ") && !line.contains("/validate ");
        log.lines().filter(changes).map(str::to_owned).collect()
    }

    fn end(&mut self) {
        // The end of its input tells the supervisor to exit.
        drop(self.supervisor.stdin.take());
        drop(self.supervisor.wait());
    }
}

impl Drop for FakeAzure {
    fn drop(&mut self) {
        self.end();
    }
}

fn check_supported() -> Result<(), FakeAzureError> {
    let no = |why: String| Err(FakeAzureError::Unsupported(why));
    if !rustix::process::geteuid().is_root() {
        return no("root is required to create namespaces and machines".to_owned());
    }
    for program in ["/usr/sbin/sshd", "/usr/bin/ssh", "/usr/bin/openssl"] {
        if !Path::new(program).exists() {
            return no(format!("{program} is not installed; scripts/system.sh installs it"));
        }
    }
    let tried = Command::new("bash").args(["-c", NAMESPACE_SCRIPT, "bash", "try"]).output();
    match tried {
        Ok(tried) if tried.status.success() => Ok(()),
        Ok(tried) => no(String::from_utf8_lossy(&tried.stderr).trim().to_owned()),
        Err(error) => no(format!("running bash: {error}")),
    }
}

/// `az` sends its token only over TLS.
fn certificate(folder: &Path) -> Result<(), FakeAzureError> {
    let args = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1";
    let mut command = Command::new("openssl");
    command.args(args.split(' ')).arg("-keyout").arg(folder.join("key.pem")).arg("-out").arg(folder.join("cert.pem"));
    match command.output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(FakeAzureError::Failed(format!("openssl: {}", String::from_utf8_lossy(&output.stderr)))),
        Err(error) => Err(FakeAzureError::Failed(format!("openssl: {error}"))),
    }
}

fn child_of(pid: u32) -> Option<u32> {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
    children.split_ascii_whitespace().next()?.parse().ok()
}
