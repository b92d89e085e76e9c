//! A fleet without a scheduler: hosts reached over SSH, each a real sshd with its own processes, devices, home and boot id.
//!
//! Hosts can be made to hang, refuse connections, vanish, be slow, lose their connections and reboot. All processes end
//! when the value is dropped, even if the process that holds it is killed.

mod error;
mod host;
mod hung_hosts;
mod slow_proxy;

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use tempfile::TempDir;

pub use error::SshTestbedError;
pub use host::Host;
pub use hung_hosts::HungHosts;
pub use slow_proxy::SlowProxy;

use error::file_error;

/// Longer than any step takes on a machine that makes progress at all.
const PATIENCE: Duration = Duration::from_secs(240);
const PAUSE: Duration = Duration::from_millis(10);
/// The number of hosts that boot in parallel.
const MAX_CONCURRENT_BOOTS: usize = 4;

/// Hosts, one key that opens all of them, and their host keys.
#[derive(Debug)]
pub struct SshFleet {
    // Declared before the folder: processes end before their files are removed.
    hosts: Vec<Host>,
    folder: TempDir,
}

impl SshFleet {
    /// Boots hosts `host1`, `host2`, …
    ///
    /// # Errors
    /// Returns [`SshTestbedError::Unsupported`] with what is missing.
    pub fn start(hosts: u8) -> Result<Self, SshTestbedError> {
        host::check_supported()?;
        let temp_dir = std::env::temp_dir();
        let folder = tempfile::tempdir().map_err(file_error("creating a folder in", &temp_dir))?;
        keygen(&folder.path().join("id"))?;
        let hosts = boot(folder.path(), hosts)?;
        let fleet = Self { hosts, folder };
        fleet.write_file("known_hosts", &fleet.known_hosts()?)?;
        fleet.write_file("ssh_config", &fleet.config())?;
        fleet.write_file("hostfile", &fleet.hosts.iter().fold(String::new(), |text, host| text + &host.name + "\n"))?;
        Ok(fleet)
    }

    fn write_file(&self, name: &str, text: &str) -> Result<(), SshTestbedError> {
        let path = self.path(name);
        fs::write(&path, text).map_err(file_error("writing", &path))
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns the file for `ssh -F`, with the address of each host and the key.
    pub fn ssh_config(&self) -> PathBuf {
        self.path("ssh_config")
    }

    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    pub fn hosts_mut(&mut self) -> &mut [Host] {
        &mut self.hosts
    }

    /// Finds a host by name.
    ///
    /// # Errors
    /// Returns [`SshTestbedError::NoHost`] if there is none.
    pub fn host(&mut self, name: &str) -> Result<&mut Host, SshTestbedError> {
        let found = self.hosts.iter_mut().find(|host| host.name == name);
        found.ok_or_else(|| SshTestbedError::NoHost { host: name.to_owned() })
    }

    /// Returns an ssh command that verifies host keys and never prompts.
    pub fn ssh(&self, host: &str, command: &str) -> Command {
        let mut ssh = Command::new("ssh");
        ssh.arg("-F").arg(self.ssh_config()).args(["-o", "BatchMode=yes", "-o", "ConnectTimeout=5", host, command]);
        ssh
    }

    fn known_hosts(&self) -> Result<String, SshTestbedError> {
        let mut text = String::new();
        for host in &self.hosts {
            let path = host.folder.join("host_key.pub");
            let key = fs::read_to_string(&path).map_err(file_error("reading", &path))?;
            let key: Vec<&str> = key.split_ascii_whitespace().take(2).collect();
            // Writing to a string does not fail.
            let _written = writeln!(text, "[{}]:{} {}", host.at.ip(), host.at.port(), key.join(" "));
        }
        Ok(text)
    }

    fn config(&self) -> String {
        let mut text = String::new();
        for host in &self.hosts {
            let (ip, port) = (host.at.ip(), host.at.port());
            let _written = writeln!(text, "Host {}\n  HostName {ip}\n  Port {port}", host.name);
        }
        let folder = self.folder.path().display();
        let all = format!(
            "Host *\n  User root\n  IdentityFile {folder}/id\n  IdentitiesOnly yes\n  \
             UserKnownHostsFile {folder}/known_hosts\n  GlobalKnownHostsFile /dev/null\n  StrictHostKeyChecking yes\n"
        );
        text + &all
    }
}

/// Boots hosts in parallel, because booting is mostly waiting.
fn boot(testbed: &Path, hosts: u8) -> Result<Vec<Host>, SshTestbedError> {
    let numbers: Vec<u8> = (1..=hosts).collect();
    let mut booted = std::thread::scope(|scope| {
        let part = numbers.len().div_ceil(MAX_CONCURRENT_BOOTS).max(1);
        let boot = |number: &u8| Ok((*number, Host::new(testbed, &format!("host{number}"), *number)?));
        let boot_all = move |numbers: &[u8]| numbers.iter().map(boot).collect::<Result<Vec<_>, SshTestbedError>>();
        let threads: Vec<_> = numbers.chunks(part).map(|part| scope.spawn(move || boot_all(part))).collect();
        let mut booted = Vec::new();
        for thread in threads {
            booted.extend(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
        }
        Ok(booted)
    })?;
    booted.sort_by_key(|(number, _)| *number);
    Ok(booted.into_iter().map(|(_, host)| host).collect())
}

/// Creates a key pair without a passphrase.
fn keygen(path: &Path) -> Result<(), SshTestbedError> {
    let program = "ssh-keygen";
    let output = Command::new(program).args(["-q", "-t", "ed25519", "-N", "", "-C", "bed", "-f"]).arg(path).output();
    let output = output.map_err(|source| SshTestbedError::Program { program, source })?;
    if output.status.success() {
        return Ok(());
    }
    Err(SshTestbedError::ProgramFailed { program, said: String::from_utf8_lossy(&output.stderr).trim().to_owned() })
}
