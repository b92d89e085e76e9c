//! A private dstack: the real server in a namespace, with hosts that are namespaces with an sshd each.
//!
//! ```no_run
//! use doctor_testbed::dstack::{Dstack, Health};
//!
//! let dstack = Dstack::start(2)?;                                   // host1 and host2: instances bed-0 and bed-1, both idle
//! dstack.set_health(1, &Health::Failure("GPU 5 has a volatile DBE"))?;
//! dstack.wait_for_instance(1, "failing", |instance| instance["health_status"] == "failure")?;
//! # Ok::<(), doctor_testbed::dstack::DstackTestbedError>(())
//! ```
//!
//! All decisions of the server are real: states, scheduling, logs, health, events. The hosts are not: a small stand-in
//! for shim and runner (`shim.py`) starts jobs as plain processes and reads DCGM health from a file. Nothing here
//! therefore shows how Docker, images, GPUs or the real shim and runner behave. The server's intervals are shortened (`server.py`).
//!
//! It needs root. All processes end when the value is dropped and when this process exits, even if it is killed.

mod api;
mod error;
mod host;
mod namespaces;

use std::{
    fmt::Write as _,
    fs,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tempfile::TempDir;

pub use api::User;
pub use error::DstackTestbedError;
pub use host::Health;

use error::file_error;
use namespaces::{NAMESPACE_SCRIPT, SERVER_SCRIPT, Supervisor, check_supported, start_supervisor, token};

use crate::kubernetes::last_lines;

/// Python imports a thousand modules, on a machine that may be busy.
const PATIENCE: Duration = Duration::from_secs(300);
const PAUSE: Duration = Duration::from_millis(50);

/// The ProxyCommand by which `ssh` reaches a host from outside its network namespace.
const PROXY_SCRIPT: &str = include_str!("reach.py");

/// The default project of every server.
pub const PROJECT: &str = "main";
/// The fleet of the test bed's hosts.
pub const FLEET: &str = "bed";

/// The host that several runs may share, each with some of its blocks.
pub const BLOCK_HOST: u8 = 2;
/// The number of blocks, with one GPU each.
pub const BLOCKS: u8 = 8;

/// A running server with its hosts. Dropping it ends all processes.
#[derive(Debug)]
pub struct Dstack {
    at: SocketAddr,
    admin: User,
    user: User,
    hosts: u8,
    supervisor: Mutex<Supervisor>,
    /// Declared last: the files are removed after the processes that use them. The supervisor also removes them, in case
    /// this process is killed.
    folder: TempDir,
}

impl Dstack {
    /// Starts a server and waits until all hosts are idle instances.
    ///
    /// # Errors
    /// Returns [`DstackTestbedError::Unsupported`] with what is missing, or another error if the server does not start.
    pub fn start(hosts: u8) -> Result<Self, DstackTestbedError> {
        let programs = check_supported()?;
        let temp_dir = std::env::temp_dir();
        let folder = tempfile::Builder::new().prefix("doctor-dstack-").tempdir_in(&temp_dir);
        let folder = folder.map_err(file_error("creating a folder in", &temp_dir))?;
        let path = folder.path();
        host::keygen(&path.join("id"))?;
        for (name, text) in [("world.sh", NAMESPACE_SCRIPT), ("server.py", SERVER_SCRIPT)] {
            fs::write(path.join(name), text).map_err(file_error("writing", &path.join(name)))?;
        }
        for number in 1..=hosts {
            host::write_host_files(path, number)?;
        }
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(DstackTestbedError::Socket)?;
        let address = listener.local_addr().map_err(DstackTestbedError::Socket)?;
        let admin = User { name: "admin".to_owned(), token: token() };
        let supervisor = start_supervisor(path, hosts, &programs, &listener, &admin)?;
        drop(listener);
        let user = User { name: "alice".to_owned(), token: String::new() };
        let mut dstack = Self { at: address, admin, user, hosts, supervisor: Mutex::new(supervisor), folder };
        dstack.set_up_project()?;
        Ok(dstack)
    }

    fn set_up_project(&mut self) -> Result<(), DstackTestbedError> {
        self.wait_for("the server to answer", || self.post("/api/server/get_info", &json!({})), |_| true)?;
        let id = self.folder.path().join("id");
        let read = |path: PathBuf| fs::read_to_string(&path).map_err(file_error("reading", &path));
        let key = json!({ "public": read(id.with_extension("pub"))?, "private": read(id)? });
        let blocks = |n: u8| if n == BLOCK_HOST { BLOCKS } else { 1 };
        let host = |n: u8| json!({ "hostname": format!("10.98.{n}.2"), "blocks": blocks(n) });
        let hosts: Vec<Value> = (1..=self.hosts).map(host).collect();
        let fleet = json!({ "type": "fleet", "name": FLEET,
            "ssh_config": { "user": "root", "ssh_key": key, "hosts": hosts } });
        let spec = json!({ "configuration": fleet, "profile": { "name": "default" } });
        let plan = json!({ "plan": { "spec": spec, "current_resource": null }, "force": true });
        self.post(&in_project("fleets/apply"), &plan)?;
        self.user = self.create_user(&self.user.name)?;
        for number in 1..=self.hosts {
            self.wait_for_instance(number, "idle", |instance| instance["status"] == "idle")?;
        }
        Ok(())
    }

    /// Creates a user and adds it to the project.
    ///
    /// # Errors
    /// Fails if the server refuses.
    pub fn create_user(&self, name: &str) -> Result<User, DstackTestbedError> {
        self.post(
            "/api/users/create",
            &json!({ "username": name, "global_role": "user", "email": null, "active": true }),
        )?;
        let members = json!({ "members": [{ "username": name, "project_role": "user" }] });
        self.post("/api/projects/main/add_members", &members)?;
        let response = self.post("/api/users/get_user", &json!({ "username": name }))?;
        let token = response["creds"]["token"].as_str().unwrap_or_default().to_owned();
        Ok(User { name: name.to_owned(), token })
    }

    /// Returns the URL of the server.
    pub fn url(&self) -> String {
        format!("http://{}", self.at)
    }

    /// Returns the folder of its files, which exists as long as this value.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Returns the administrator.
    pub fn admin(&self) -> &User {
        &self.admin
    }

    /// Returns an ordinary user.
    pub fn user(&self) -> &User {
        &self.user
    }

    /// Returns the name of a host's instance. Hosts are counted from 1, instances from 0.
    pub fn instance_name(number: u8) -> String {
        format!("{FLEET}-{}", number - 1)
    }

    /// Sends a request as the administrator.
    ///
    /// # Errors
    /// Returns the reply if the request did not succeed.
    pub fn post(&self, path: &str, body: &Value) -> Result<Value, DstackTestbedError> {
        self.post_as(&self.admin, path, body)
    }

    /// Sends a request as this user.
    ///
    /// # Errors
    /// As [`Self::post`].
    pub fn post_as(&self, person: &User, path: &str, body: &Value) -> Result<Value, DstackTestbedError> {
        api::post(self.at, &person.token, path, body)
    }

    /// Returns the instance of a host, or null if the server has none.
    ///
    /// # Errors
    /// Fails if the server does not answer.
    pub fn instance(&self, number: u8) -> Result<Value, DstackTestbedError> {
        let fleets = self.post(&in_project("fleets/list"), &json!({}))?;
        let name = Self::instance_name(number);
        let all = fleets
            .as_array()
            .into_iter()
            .flatten()
            .flat_map(|fleet| fleet["instances"].as_array().into_iter().flatten());
        Ok(all.into_iter().find(|instance| instance["name"] == *name).cloned().unwrap_or_default())
    }

    /// Waits until the instance of a host satisfies `is`; `what` names it in the error.
    ///
    /// # Errors
    /// Returns its last state.
    pub fn wait_for_instance(
        &self,
        number: u8,
        what: &str,
        is: impl Fn(&Value) -> bool,
    ) -> Result<Value, DstackTestbedError> {
        self.wait_for(&format!("{} {what}", Self::instance_name(number)), || self.instance(number), is)
    }

    /// Waits until dstack reliably accepts work on a host again. After a link or a runner was lost, a health check that
    /// started before may still fail. The second one that succeeds after that started when the host was healthy.
    ///
    /// # Errors
    /// Returns its last state.
    pub fn wait_until_idle(&self, number: u8) -> Result<(), DstackTestbedError> {
        let free = |instance: &Value| instance["status"] == "idle" && instance["unreachable"] == false;
        let ask = json!({ "fleet_name": FLEET, "instance_num": number - 1, "limit": 1 });
        let last_check = || {
            let response = self.post(&in_project("instances/get_instance_health_checks"), &ask)?;
            Ok(response["health_checks"][0]["collected_at"].clone())
        };
        loop {
            self.wait_for_instance(number, "idle", free)?;
            for _ in 0..2 {
                let before = last_check()?;
                self.wait_for("another health check", last_check, |at| *at != before)?;
            }
            if free(&self.instance(number)?) {
                return Ok(());
            }
        }
    }

    /// Returns a run.
    ///
    /// # Errors
    /// Fails if the server does not answer or does not know the run.
    pub fn run(&self, name: &str) -> Result<Value, DstackTestbedError> {
        self.post(&in_project("runs/get"), &json!({ "run_name": name }))
    }

    /// Waits until a run has this status.
    ///
    /// # Errors
    /// Returns its last state.
    pub fn wait_for_run(&self, name: &str, status: &str) -> Result<Value, DstackTestbedError> {
        self.wait_for(&format!("run {name} {status}"), || self.run(name), |run| run["status"] == status)
    }

    /// Submits a user's task to the instance of a host, or without one to any that fits. `more` overrides its configuration.
    ///
    /// # Errors
    /// Fails if the server rejects the task.
    pub fn submit_as_user(
        &self,
        name: &str,
        number: Option<u8>,
        command: &str,
        more: &Value,
    ) -> Result<(), DstackTestbedError> {
        let mut task = json!({ "type": "task", "name": name, "image": "debian:12", "user": "root", "commands": [command],
            "creation_policy": "reuse", "fleets": [FLEET], "max_duration": "1h",
            "resources": { "gpu": "H100:8", "cpu": "x86:2.." } });
        if let Some(number) = number {
            task["instances"] = json!([Self::instance_name(number)]);
        }
        for (key, value) in more.as_object().into_iter().flatten() {
            task[key] = value.clone();
        }
        let spec = json!({ "run_name": name, "configuration": task, "profile": { "name": "default" } });
        let plan = json!({ "plan": { "run_spec": spec, "current_resource": null }, "force": false });
        self.post_as(&self.user, &in_project("runs/apply"), &plan).map(drop)
    }

    /// Stops a run of any user and waits until it has ended. The server may lose a stop that arrives while it processes
    /// the run, so the request is repeated.
    ///
    /// # Errors
    /// Fails if the server does not answer.
    pub fn stop_run(&self, name: &str) -> Result<(), DstackTestbedError> {
        let stop = || self.post(&in_project("runs/stop"), &json!({ "runs_names": [name], "abort": false }));
        let stop_and_read = || {
            let run = self.run(name)?;
            if ["pending", "submitted", "provisioning", "running"].iter().any(|status| run["status"] == *status) {
                stop()?;
            }
            Ok(run)
        };
        let ended = |run: &Value| ["done", "failed", "terminated"].iter().any(|status| run["status"] == *status);
        self.wait_for(&format!("the end of run {name}"), stop_and_read, ended).map(drop)
    }

    /// Cuts the link to a host: packets are lost and connections hang.
    ///
    /// # Errors
    /// Fails if the supervisor does not confirm.
    pub fn disconnect(&self, number: u8) -> Result<(), DstackTestbedError> {
        self.command("cut", number)
    }

    /// Restores the link to a host.
    ///
    /// # Errors
    /// Fails if the supervisor does not confirm.
    pub fn reconnect(&self, number: u8) -> Result<(), DstackTestbedError> {
        self.command("join", number)
    }

    /// Kills the runner of a host's newest job, and the job with it.
    ///
    /// # Errors
    /// Fails if the supervisor does not confirm.
    pub fn kill_runner(&self, number: u8) -> Result<(), DstackTestbedError> {
        self.command("lose", number)
    }

    /// Writes an OpenSSH configuration that reaches hosts from outside their namespace, bypassing dstack, with the server's key.
    ///
    /// # Errors
    /// Fails if a file cannot be written.
    pub fn ssh_config(&self) -> Result<PathBuf, DstackTestbedError> {
        let folder = self.folder.path();
        let inner_pid = self.supervisor.lock().unwrap_or_else(PoisonError::into_inner).inner_pid();
        let inner_pid =
            inner_pid.ok_or_else(|| DstackTestbedError::Supervisor { said: "it has no namespaces".to_owned() })?;
        let mut known = String::new();
        for number in 1..=self.hosts {
            let key = self.host(number).join("host_key.pub");
            let key = fs::read_to_string(&key).map_err(file_error("reading", &key))?;
            writeln!(known, "10.98.{number}.2 {}", key.trim()).expect("writing to a string cannot fail");
        }
        let (config, known_hosts) = (folder.join("ssh_config"), folder.join("known_hosts"));
        let reach = folder.join("reach.py");
        let text = format!(
            "Host *\n  User root\n  IdentityFile {}\n  IdentitiesOnly yes\n  UserKnownHostsFile {}\n  GlobalKnownHostsFile /dev/null\n  \
             ProxyUseFdpass yes\n  ProxyCommand nsenter --target {inner_pid} --net /usr/bin/python3 {} %h %p\n",
            folder.join("id").display(),
            known_hosts.display(),
            reach.display(),
        );
        fs::write(&reach, PROXY_SCRIPT).map_err(file_error("writing", &reach))?;
        fs::write(&known_hosts, known).map_err(file_error("writing", &known_hosts))?;
        fs::write(&config, text).map_err(file_error("writing", &config))?;
        Ok(config)
    }

    fn command(&self, command: &str, number: u8) -> Result<(), DstackTestbedError> {
        self.supervisor.lock().unwrap_or_else(PoisonError::into_inner).command(command, number)
    }

    fn host(&self, number: u8) -> PathBuf {
        self.folder.path().join(format!("host{number}"))
    }

    /// Sets the DCGM health of a host from now on.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub fn set_health(&self, number: u8, health: &Health<'_>) -> Result<(), DstackTestbedError> {
        host::set_health(&self.host(number), health)
    }

    /// Installs a program on all hosts, in the search path of their jobs.
    ///
    /// # Errors
    /// Fails if it cannot be copied.
    pub fn install(&self, program: &Path) -> Result<(), DstackTestbedError> {
        let name = program.file_name().unwrap_or_default();
        for number in 1..=self.hosts {
            let to = self.host(number).join("bin").join(name);
            fs::copy(program, &to).map_err(file_error("copying to", &to))?;
            fs::set_permissions(&to, fs::Permissions::from_mode(0o755)).map_err(file_error("opening", &to))?;
        }
        Ok(())
    }

    /// Returns the number of jobs of this run that were ever started on the hosts.
    pub fn jobs_started(&self, run: &str) -> usize {
        let started = |number| fs::read_to_string(self.host(number).join("home/.dstack/started")).unwrap_or_default();
        (1..=self.hosts).map(|number| started(number).lines().filter(|line| *line == run).count()).sum()
    }

    /// Returns the end of the server's log.
    pub fn log(&self) -> String {
        last_lines(&self.folder.path().join("server.log"))
    }

    /// Polls `ask` until the reply satisfies `is`. A failed query is retried.
    ///
    /// # Errors
    /// Returns the last reply.
    pub fn wait_for(
        &self,
        what: &str,
        ask: impl Fn() -> Result<Value, DstackTestbedError>,
        is: impl Fn(&Value) -> bool,
    ) -> Result<Value, DstackTestbedError> {
        let began = Instant::now();
        loop {
            match ask() {
                Ok(answer) if is(&answer) => return Ok(answer),
                answer if began.elapsed() > PATIENCE => {
                    let last = answer.map_or_else(|error| error.to_string(), |value| value.to_string());
                    let last = format!("{last}; the server's log ends with:\n{}", self.log());
                    return Err(DstackTestbedError::Timeout { what: what.to_owned(), within: PATIENCE, last });
                }
                _ => std::thread::sleep(PAUSE),
            }
        }
    }
}

/// Returns the API path of a resource in the project.
pub fn in_project(what: &str) -> String {
    format!("/api/project/{PROJECT}/{what}")
}
