//! A PostgreSQL server for one test process, from the distribution's binaries: own data directory, own port on
//! loopback, one database per test. A watcher outside the process stops it by its pid when the process is gone, however
//! it went.

use std::{
    fs,
    net::TcpListener,
    os::unix::fs::chown,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use doctor_control::store::StoreUrl;

static SERVER: OnceLock<Result<Server, String>> = OnceLock::new();
static DATABASES: AtomicU32 = AtomicU32::new(0);

/// How long a server may take to answer on a busy machine.
const START: Duration = Duration::from_secs(60);

#[derive(Debug)]
struct Server {
    port: u16,
    /// Held open: the watcher waits for its end.
    _watcher: Child,
}

/// A new, empty database. Where there is no PostgreSQL this says so and gives `None`; in CI that is a failure.
pub(crate) fn new_database() -> Option<StoreUrl> {
    match SERVER.get_or_init(start) {
        Ok(server) => Some(server.create_database()),
        Err(why) => {
            assert!(std::env::var("CI").as_deref() != Ok("true"), "CI must have PostgreSQL: {why}");
            println!("NOT RUN: postgres: {why}");
            None
        }
    }
}

impl Server {
    fn url(&self, database: &str) -> String {
        format!("postgres://postgres@127.0.0.1:{}/{database}", self.port)
    }

    fn create_database(&self) -> StoreUrl {
        let name = format!("test_{}", DATABASES.fetch_add(1, Ordering::Relaxed));
        let mut client = postgres::Client::connect(&self.url("postgres"), postgres::NoTls).unwrap();
        client.batch_execute(&format!("CREATE DATABASE {name}")).unwrap();
        self.url(&name).parse().unwrap()
    }
}

fn start() -> Result<Server, String> {
    let programs = programs().ok_or("no server is installed under /usr/lib/postgresql")?;
    let folder = tempfile::Builder::new().prefix("doctor-postgres-").tempdir().map_err(|e| e.to_string())?;
    let data = folder.path().join("data");
    fs::create_dir(&data).map_err(|error| error.to_string())?;
    let account = account();
    if let Some((user, group)) = account {
        for path in [folder.path(), &data] {
            chown(path, Some(user), Some(group)).map_err(|error| error.to_string())?;
        }
    }
    let mut initdb = as_account(account, &programs.join("initdb"));
    initdb.args(["--no-sync", "--auth=trust", "--username=postgres", "--encoding=UTF8", "--locale=C", "-D"]).arg(&data);
    let made = initdb.stdin(Stdio::null()).output().map_err(|error| format!("initdb: {error}"))?;
    if !made.status.success() {
        return Err(format!("initdb: {}", String::from_utf8_lossy(&made.stderr)));
    }
    let port = TcpListener::bind("127.0.0.1:0").and_then(|held| held.local_addr()).map_err(|e| e.to_string())?.port();
    let log = fs::File::create(folder.path().join("log")).map_err(|error| error.to_string())?;
    let server = as_account(account, &programs.join("postgres"))
        .arg("-D")
        .arg(&data)
        .arg("-k")
        .arg(folder.path())
        .args(["-h", "127.0.0.1", "-p", &port.to_string(), "-c", "fsync=off", "-c", "max_connections=200"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .map_err(|error| format!("postgres: {error}"))?;
    let watcher = watch(&server, folder.path())?;
    let _kept_until_the_watcher_removes_it = folder.keep();
    let server = Server { port, _watcher: watcher };
    wait_for(&server.url("postgres")).map(|()| server)
}

/// The newest installed server.
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

/// The server refuses to run as root; then its own account is used.
fn account() -> Option<(u32, u32)> {
    use std::os::unix::fs::MetadataExt;
    if fs::metadata("/proc/self").ok()?.uid() != 0 {
        return None;
    }
    let accounts = fs::read_to_string("/etc/passwd").ok()?;
    let line = accounts.lines().find(|line| line.starts_with("postgres:"))?;
    let mut fields = line.split(':').skip(2);
    Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
}

fn as_account(account: Option<(u32, u32)>, program: &Path) -> Command {
    use std::os::unix::process::CommandExt;
    let mut command = Command::new(program);
    if let Some((user, group)) = account {
        command.uid(user).gid(group);
    }
    command.current_dir("/");
    command
}

/// A shell that waits until this process is gone, then stops the server and removes its files.
fn watch(server: &Child, folder: &Path) -> Result<Child, String> {
    const SCRIPT: &str = "cat; kill -INT \"$1\"; n=0; \
                          while kill -0 \"$1\" 2>/dev/null && [ $n -lt 200 ]; do sleep 0.05; n=$((n+1)); done; rm -rf \"$2\"";
    Command::new("sh")
        .args(["-c", SCRIPT, "sh", &server.id().to_string()])
        .arg(folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| format!("sh: {error}"))
}

fn wait_for(url: &str) -> Result<(), String> {
    let began = Instant::now();
    loop {
        match postgres::Client::connect(url, postgres::NoTls) {
            Ok(_) => return Ok(()),
            Err(error) if began.elapsed() > START => return Err(format!("it does not answer: {error}")),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}
