//! A PostgreSQL server from the distribution's packages with a temporary data directory and a free port on loopback.
//!
//! A watcher process stops the server and removes its files when this process exits, even if it is killed.

use std::{
    fs::{self, File},
    io,
    os::unix::{fs::chown, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::ports;

/// How long a server may take to answer or to stop on a busy machine.
const PATIENCE: Duration = Duration::from_secs(240);

/// Options of a server.
#[derive(Debug, Clone, Copy, Default)]
pub struct Setup<'a> {
    /// Whether a commit waits for the disk. Only measurements need this.
    pub durable: bool,
    /// Start from a copy of this data directory of a stopped server.
    pub data: Option<&'a Path>,
    /// Accept TCP connections over TLS only, and only with a password or a client certificate, as managed databases do.
    pub tls: Option<&'a ServerTls>,
}

/// The certificates of a server that requires TLS, in PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerTls {
    pub certificate: String,
    pub key: String,
    /// The authority of client certificates.
    pub client_authority: String,
}

/// The password of every account of a server that requires TLS. The account [`CERTIFIED`] needs a client certificate of this name.
pub const PASSWORD: &str = "a-password";
pub const CERTIFIED: &str = "certified";

/// Connections over the socket, by which the test administers the server, need no password.
const TLS_ONLY: &str = "local all all trust\n\
                        hostssl all certified 127.0.0.1/32 cert\n\
                        hostssl all all 127.0.0.1/32 scram-sha-256\n";

/// A running server. Dropping it stops it and removes its files.
#[derive(Debug)]
pub struct Server {
    port: u16,
    requires_tls: bool,
    folder: TempDir,
    process: Child,
    /// Holds the pipe whose end the watcher waits for.
    watcher: Child,
}

/// Why no server is available.
#[derive(Debug, thiserror::Error)]
pub enum PostgresTestbedError {
    #[error("no server is installed under /usr/lib/postgresql: install your distribution's postgresql package")]
    NotInstalled,
    #[error("PostgreSQL does not run as root and there is no account `postgres` to run it as")]
    NoAccount,
    #[error("{operation} {path}")]
    File {
        operation: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{program}: {why}")]
    Program { program: &'static str, why: String },
    #[error("the server on port {port} does not answer")]
    NoResponse {
        port: u16,
        #[source]
        source: postgres::Error,
    },
    #[error("{operation}")]
    Sql {
        operation: &'static str,
        #[source]
        source: postgres::Error,
    },
}

fn file_error(operation: &'static str, path: &Path) -> impl Fn(io::Error) -> PostgresTestbedError {
    move |source| PostgresTestbedError::File { operation, path: path.to_owned(), source }
}

impl Server {
    /// Checks that this machine has what a server needs.
    ///
    /// # Errors
    /// Returns what is missing.
    pub fn can_start() -> Result<(), PostgresTestbedError> {
        programs().ok_or(PostgresTestbedError::NotInstalled)?;
        Account::find().map(drop)
    }

    /// Starts a server and waits until it answers.
    ///
    /// # Errors
    /// Returns what is missing or what failed.
    pub fn start(setup: Setup<'_>) -> Result<Self, PostgresTestbedError> {
        let programs = programs().ok_or(PostgresTestbedError::NotInstalled)?;
        let account = Account::find()?;
        let temporary = std::env::temp_dir();
        let folder = tempfile::Builder::new().prefix("doctor-postgres-").tempdir_in(&temporary);
        let folder = folder.map_err(file_error("creating a folder in", &temporary))?;
        let data = folder.path().join("data");
        match setup.data {
            Some(saved) => copy_folder(saved, &data)?,
            None => fs::create_dir(&data).map_err(file_error("creating", &data))?,
        }
        account.chown_to(folder.path())?;
        if setup.data.is_none() {
            account.create_cluster(&programs, &data)?;
        }
        if let Some(tls) = setup.tls {
            require_tls(&data, tls)?;
            account.chown_to(&data)?;
        }
        let port = ports::reserve_one().map_err(file_error("looking for a free port on", Path::new("127.0.0.1")))?;
        let process = account.serve(&programs, folder.path(), port, &setup)?;
        let watcher = watch(&process, folder.path())?;
        let server = Self { port, requires_tls: setup.tls.is_some(), folder, process, watcher };
        server.wait_until_it_answers()?;
        if server.requires_tls {
            let accounts =
                format!("CREATE ROLE {CERTIFIED} SUPERUSER LOGIN; ALTER ROLE postgres PASSWORD '{PASSWORD}'");
            server.administer(&accounts)?;
        }
        Ok(server)
    }

    /// Returns the URL of a database over TCP.
    pub fn url(&self, database: &str) -> String {
        format!("postgres://postgres@127.0.0.1:{}/{database}", self.port)
    }

    /// Returns the URL of a database over the server's Unix socket, as a program on the same machine would use.
    pub fn socket_url(&self, database: &str) -> String {
        let folder = self.folder.path().display().to_string().replace('/', "%2F");
        format!("postgres://postgres@{folder}:{}/{database}", self.port)
    }

    /// Returns the id of the server's main process, the parent of the others.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Creates an empty database and returns its URL.
    ///
    /// # Errors
    /// Fails if a database of that name exists or the server is gone.
    pub fn create_database(&self, name: &str) -> Result<String, PostgresTestbedError> {
        self.administer(&format!("CREATE DATABASE {name}"))?;
        Ok(self.url(name))
    }

    /// Runs statements as an administrator.
    fn administer(&self, sql: &str) -> Result<(), PostgresTestbedError> {
        let failed = |operation| move |source| PostgresTestbedError::Sql { operation, source };
        let mut client = postgres::Client::connect(&self.own_url(), postgres::NoTls).map_err(failed("connecting"))?;
        client.batch_execute(sql).map_err(failed("administering the server"))
    }

    /// Returns the URL by which the test bed itself connects.
    fn own_url(&self) -> String {
        if self.requires_tls { self.socket_url("postgres") } else { self.url("postgres") }
    }

    /// Shuts the server down cleanly and copies its data directory to `target`, which must not exist yet.
    ///
    /// # Errors
    /// Fails if the server does not stop or its files cannot be copied.
    pub fn stop_and_keep(mut self, target: &Path) -> Result<(), PostgresTestbedError> {
        self.stop().map_err(file_error("stopping the server in", self.folder.path()))?;
        copy_folder(&self.folder.path().join("data"), target)
    }

    fn wait_until_it_answers(&self) -> Result<(), PostgresTestbedError> {
        let began = Instant::now();
        loop {
            match postgres::Client::connect(&self.own_url(), postgres::NoTls) {
                Ok(_) => return Ok(()),
                Err(source) if began.elapsed() > PATIENCE => {
                    return Err(PostgresTestbedError::NoResponse { port: self.port, source });
                }
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    /// Performs a fast shutdown: sessions are ended, all data is written.
    fn stop(&mut self) -> io::Result<()> {
        if self.process.try_wait()?.is_some() {
            return Ok(());
        }
        let pid = i32::try_from(self.process.id()).ok().and_then(Pid::from_raw);
        kill_process(pid.ok_or(io::ErrorKind::InvalidInput)?, Signal::INT)?;
        let began = Instant::now();
        while self.process.try_wait()?.is_none() {
            if began.elapsed() > PATIENCE {
                return Err(io::ErrorKind::TimedOut.into());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // If the server does not stop here, the watcher ends it when its input closes.
        drop(self.stop());
        drop(self.watcher.stdin.take());
        drop(self.watcher.wait());
    }
}

/// The account that the server runs as: PostgreSQL refuses to run as root.
#[derive(Debug, Clone, Copy)]
enum Account {
    Current,
    Other { user: u32, group: u32 },
}

impl Account {
    fn find() -> Result<Self, PostgresTestbedError> {
        if !rustix::process::geteuid().is_root() {
            return Ok(Self::Current);
        }
        let file = Path::new("/etc/passwd");
        let accounts = fs::read_to_string(file).map_err(file_error("reading", file))?;
        let line =
            accounts.lines().find(|line| line.starts_with("postgres:")).ok_or(PostgresTestbedError::NoAccount)?;
        let mut numbers = line.split(':').skip(2).map(str::parse);
        match (numbers.next(), numbers.next()) {
            (Some(Ok(user)), Some(Ok(group))) => Ok(Self::Other { user, group }),
            _ => Err(PostgresTestbedError::NoAccount),
        }
    }

    /// Gives a folder and its contents to this account.
    fn chown_to(self, path: &Path) -> Result<(), PostgresTestbedError> {
        let Self::Other { user, group } = self else { return Ok(()) };
        chown(path, Some(user), Some(group)).map_err(file_error("changing the owner of", path))?;
        if path.is_dir() {
            for entry in fs::read_dir(path).map_err(file_error("reading", path))? {
                self.chown_to(&entry.map_err(file_error("reading", path))?.path())?;
            }
        }
        Ok(())
    }

    fn command(self, program: &Path) -> Command {
        let mut command = Command::new(program);
        if let Self::Other { user, group } = self {
            command.uid(user).gid(group);
        }
        command.current_dir("/").stdin(Stdio::null());
        command
    }

    fn create_cluster(self, programs: &Path, data: &Path) -> Result<(), PostgresTestbedError> {
        let failed = |why| PostgresTestbedError::Program { program: "initdb", why };
        let output: Output = self
            .command(&programs.join("initdb"))
            .args(["--no-sync", "--auth=trust", "--username=postgres", "--encoding=UTF8", "--locale=C", "-D"])
            .arg(data)
            .output()
            .map_err(|error| failed(error.to_string()))?;
        if output.status.success() { Ok(()) } else { Err(failed(String::from_utf8_lossy(&output.stderr).into_owned())) }
    }

    fn serve(
        self,
        programs: &Path,
        folder: &Path,
        port: u16,
        setup: &Setup<'_>,
    ) -> Result<Child, PostgresTestbedError> {
        let log = folder.join("log");
        let log = File::create(&log).map_err(file_error("creating", &log))?;
        self.command(&programs.join("postgres"))
            .arg("-D")
            .arg(folder.join("data"))
            .arg("-k")
            .arg(folder)
            .args(["-h", "127.0.0.1", "-p", &port.to_string(), "-c", "max_connections=200"])
            .args(["-c", if setup.durable { "fsync=on" } else { "fsync=off" }])
            .args(["-c", if setup.tls.is_some() { "ssl=on" } else { "ssl=off" }])
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .map_err(|error| PostgresTestbedError::Program { program: "postgres", why: error.to_string() })
    }
}

/// Writes the certificates and the access rules of a server that requires TLS, under the names that it expects.
fn require_tls(data: &Path, tls: &ServerTls) -> Result<(), PostgresTestbedError> {
    use std::os::unix::fs::PermissionsExt;
    let files = [
        ("server.crt", tls.certificate.as_str()),
        ("server.key", &tls.key),
        ("clients.crt", &tls.client_authority),
        ("pg_hba.conf", TLS_ONLY),
        ("postgresql.auto.conf", "ssl_ca_file = 'clients.crt'\npassword_encryption = 'scram-sha-256'\n"),
    ];
    for (name, text) in files {
        let path = data.join(name);
        fs::write(&path, text).map_err(file_error("writing", &path))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).map_err(file_error("protecting", &path))?;
    }
    Ok(())
}

/// Returns the folder of the newest installed server.
fn programs() -> Option<PathBuf> {
    let mut versions: Vec<(u32, PathBuf)> = fs::read_dir("/usr/lib/postgresql")
        .ok()?
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let version = path.file_name()?.to_str()?.parse().ok()?;
            Some((version, path.join("bin")))
        })
        .filter(|(_, programs)| programs.join("postgres").exists())
        .collect();
    versions.sort();
    versions.pop().map(|(_, programs)| programs)
}

/// Starts a shell that waits until this process exits, then stops the server and removes its files.
fn watch(server: &Child, folder: &Path) -> Result<Child, PostgresTestbedError> {
    // A server that has stopped cleanly has removed its pid file, and its process id may have been reused since.
    const SCRIPT: &str = "cat; running() { [ -e \"$2/data/postmaster.pid\" ] && kill -0 \"$1\" 2>/dev/null; }; n=0; \
                          if running \"$@\"; then kill -INT \"$1\"; fi; \
                          while running \"$@\" && [ $n -lt 200 ]; do sleep 0.05; n=$((n+1)); done; rm -rf \"$2\"";
    Command::new("sh")
        .args(["-c", SCRIPT, "sh", &server.id().to_string()])
        .arg(folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| PostgresTestbedError::Program { program: "sh", why: error.to_string() })
}

/// Copies a data directory with mode 0700, which the server requires.
fn copy_folder(from: &Path, to: &Path) -> Result<(), PostgresTestbedError> {
    use std::os::unix::fs::DirBuilderExt;
    fs::DirBuilder::new().mode(0o700).create(to).map_err(file_error("creating", to))?;
    for entry in fs::read_dir(from).map_err(file_error("reading", from))? {
        let entry = entry.map_err(file_error("reading", from))?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        if entry.file_type().map_err(file_error("reading", &source))?.is_dir() {
            copy_folder(&source, &target)?;
        } else {
            fs::copy(&source, &target).map_err(file_error("copying", &source))?;
        }
    }
    Ok(())
}
