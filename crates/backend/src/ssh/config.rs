//! Settings of the SSH backend: the hosts, how to connect to them, and what makes them busy.

use std::path::PathBuf;

use doctor_core::{
    ids::{PoolName, Sku},
    time::Span,
};
use doctor_host::trusted_file;
use serde::{Deserialize, Serialize};

use super::hosts::{self, Host, HostFileError};

/// Settings of the backend, `[backend.ssh]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SshConfig {
    /// One host or range per line. Read again for each snapshot.
    pub hostfile: Option<PathBuf>,
    /// The same inline: `node[01-64]`, or lines of a host file.
    pub hosts: Option<String>,
    /// The pool of these hosts.
    pub pool: PoolName,
    pub sku: Option<Sku>,
    /// For `ssh -F`. Absent: OpenSSH's default.
    pub ssh_config: Option<PathBuf>,
    /// The trusted host keys. Absent: OpenSSH's default.
    pub known_hosts: Option<PathBuf>,
    /// What to do with a host whose key is unknown.
    pub host_keys: HostKeys,
    /// The limit for connecting.
    pub connect: Span,
    /// The limit for one answer of a host, after connecting.
    pub deadline: Span,
    /// The limit for copying `doctor-node` to a host, which is done once per version.
    pub copy: Span,
    /// How many hosts are queried concurrently.
    pub parallel: usize,
    /// Where `doctor-node`, runs and marks are on a host, relative to the login user's home directory. Each host has its own
    /// folder in it.
    pub remote: String,
    /// The prefix that makes the login user root, such as `["sudo", "-n"]`. Empty: the login user is root.
    pub as_root: Vec<String>,
    /// The `doctor-node` program that is copied to hosts. Absent: `$DOCTOR_NODE`, then beside this program, then in `PATH`.
    pub doctor_node: Option<PathBuf>,
    /// The shared directory's path on the hosts. Absent: there is none, and results are transported over SSH.
    pub share: Option<PathBuf>,
    /// Above this load per core (one-minute average) a host without a run of ours is busy.
    pub max_load_per_core: f64,
    /// While one of these files exists on a host, it is busy: users or the site create them to keep jobs off.
    pub locks: Vec<PathBuf>,
    /// Programs that hold GPUs open without using them.
    pub bystanders: Vec<String>,
    /// A file on a host that shows users at login that the host is marked, such as `/etc/motd.d/cluster-doctor`.
    pub motd: Option<PathBuf>,
    /// A site command that closes a host to users; `{node}` and `{op}` are filled in. Empty: hosts are not closed.
    pub cordon: Vec<String>,
    /// The site command that opens it again.
    pub release: Vec<String>,
    /// The commands on a host that reset its GPUs and reboot it. Empty: not possible.
    pub reset: Vec<String>,
    pub reboot: Vec<String>,
    /// The port on which the first host of a multi-node run listens for the others.
    pub rendezvous_port: u16,
    /// How long a cancelled job may take to write its results before it is killed.
    pub grace: Span,
    /// Where the service keeps connection sockets, and the journal of runs and hosts. Socket paths are limited, so it has to be
    /// short.
    pub state: PathBuf,
}

/// Which host keys are trusted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HostKeys {
    /// Only keys that are known already.
    #[default]
    Known,
    /// The key of a new host is recorded and trusted from then on. A changed key is refused.
    Learn,
}

impl HostKeys {
    /// Returns the value of OpenSSH's `StrictHostKeyChecking`.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Known => "yes",
            Self::Learn => "accept-new",
        }
    }
}

impl Default for SshConfig {
    fn default() -> Self {
        Self {
            hostfile: None,
            hosts: None,
            pool: PoolName::new("ssh").expect("a plain word is a pool name"),
            sku: None,
            ssh_config: None,
            known_hosts: None,
            host_keys: HostKeys::Known,
            connect: Span::from_secs(5),
            deadline: Span::from_secs(20),
            copy: Span::from_secs(120),
            parallel: 32,
            remote: ".cluster-doctor".to_owned(),
            as_root: Vec::new(),
            doctor_node: None,
            share: None,
            max_load_per_core: 0.7,
            locks: Vec::new(),
            bystanders: ["nvidia-persiste", "nv-hostengine", "dcgm-exporter", "nv-fabricmanage"]
                .map(str::to_owned)
                .to_vec(),
            motd: None,
            cordon: Vec::new(),
            release: Vec::new(),
            reset: ["nvidia-smi", "--gpu-reset"].map(str::to_owned).to_vec(),
            reboot: ["systemctl", "reboot"].map(str::to_owned).to_vec(),
            rendezvous_port: 29_481,
            grace: Span::from_secs(5),
            state: PathBuf::from("/var/lib/cluster-doctor/ssh"),
        }
    }
}

/// A socket's path may have 108 bytes; OpenSSH adds a name of 40 and, while creating the socket, 17 more.
const MAX_STATE_PATH: usize = 45;

/// Why the settings cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SshConfigError {
    #[error("set exactly one of `hostfile` and `hosts`")]
    NoHosts,
    #[error("`hosts`: {0}")]
    Hosts(#[source] HostFileError),
    #[error("the host file {}: {source}", path.display())]
    HostFile { path: PathBuf, source: HostFileError },
    #[error("reading the host file {}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error(
        "`{key}`: `{word}` has a special meaning in a shell; use letters, digits and . _ - = /, without a leading -"
    )]
    Word { key: &'static str, word: String },
    #[error("`parallel` is {0}, expected 1 to 1024")]
    Parallel(usize),
    #[error("`{key}` is {value}, expected {least} or more")]
    Short { key: &'static str, value: Span, least: Span },
    #[error("`rendezvous_port` is 0, expected 1 to 65535")]
    Port,
    #[error("`max_load_per_core` is {0}, expected a load per core, 0 or more")]
    Load(f64),
    #[error("`state` is {}, expected at most {MAX_STATE_PATH} bytes: it holds sockets", .0.display())]
    LongState(PathBuf),
}

impl SshConfig {
    /// Checks the settings without reading any file.
    ///
    /// # Errors
    /// With what would be accepted.
    pub fn check(&self) -> Result<(), SshConfigError> {
        if self.hostfile.is_some() == self.hosts.is_some() {
            return Err(SshConfigError::NoHosts);
        }
        if let Some(text) = &self.hosts {
            hosts::parse(text).map_err(SshConfigError::Hosts)?;
        }
        let values = self.as_root.iter().map(|word| ("as_root", word)).chain([("remote", &self.remote)]);
        for (key, word) in values {
            let harmless = |c: char| c.is_ascii_alphanumeric() || "._-=/".contains(c);
            let option = word.starts_with('-') && key == "remote";
            if word.is_empty() || option || !word.chars().all(harmless) {
                return Err(SshConfigError::Word { key, word: word.clone() });
            }
        }
        if !(1..=1024).contains(&self.parallel) {
            return Err(SshConfigError::Parallel(self.parallel));
        }
        let least = Span::from_secs(1);
        for (key, value) in [("connect", self.connect), ("deadline", self.deadline), ("copy", self.copy)] {
            if value < least {
                return Err(SshConfigError::Short { key, value, least });
            }
        }
        if !(self.max_load_per_core >= 0.0 && self.max_load_per_core.is_finite()) {
            return Err(SshConfigError::Load(self.max_load_per_core));
        }
        if self.rendezvous_port == 0 {
            return Err(SshConfigError::Port);
        }
        if self.state.as_os_str().len() > MAX_STATE_PATH {
            return Err(SshConfigError::LongState(self.state.clone()));
        }
        Ok(())
    }

    /// Reads the current list of hosts.
    ///
    /// # Errors
    /// If the file cannot be read, or with the line that is wrong.
    pub fn read_hosts(&self) -> Result<Vec<Host>, SshConfigError> {
        match (&self.hosts, &self.hostfile) {
            (Some(text), None) => hosts::parse(text).map_err(SshConfigError::Hosts),
            (None, Some(path)) => {
                let text = trusted_file::read_to_string(path)
                    .map_err(|source| SshConfigError::Read { path: path.clone(), source })?;
                hosts::parse(&text).map_err(|source| SshConfigError::HostFile { path: path.clone(), source })
            }
            _ => Err(SshConfigError::NoHosts),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_result(text: &str) -> String {
        match toml::from_str::<SshConfig>(text) {
            Ok(config) => config.check().map_or_else(|error| error.to_string(), |()| "well".to_owned()),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn a_list_of_hosts_is_a_valid_configuration() {
        assert_eq!(check_result("hosts = \"node[01-04]\"\n"), "well");
        assert_eq!(check_result("hostfile = \"/etc/hostfile\"\nas_root = [\"sudo\", \"-n\"]\n"), "well");
    }

    #[test]
    fn errors_name_the_setting_and_the_remedy() {
        for (text, expected) in [
            ("", "exactly one of `hostfile` and `hosts`"),
            ("hosts = \"a\"\nhostfile = \"b\"\n", "exactly one of `hostfile` and `hosts`"),
            ("hosts = \"node[1-\"\n", "`hosts`: line 1"),
            ("hosts = \"a\"\nremote = \"x; rm\"\n", "`remote`: `x; rm` has a special meaning in a shell"),
            ("hosts = \"a\"\nremote = \"-x\"\n", "without a leading -"),
            ("hosts = \"a\"\nparallel = 0\n", "expected 1 to 1024"),
            ("hosts = \"a\"\nconnect = \"10ms\"\n", "expected 1s or more"),
            ("hosts = \"a\"\nmax_load_per_core = -1.0\n", "0 or more"),
            ("hosts = \"a\"\nrendezvous_port = 0\n", "1 to 65535"),
            ("hosts = \"a\"\nhost_keys = \"any\"\n", "`known`"),
            ("hosts = \"a\"\nhostfiel = \"b\"\n", "hostfile"),
        ] {
            let error = check_result(text);
            assert!(error.contains(expected), "{text:?}: {error}");
        }
        let long = SshConfig { hosts: Some("a".to_owned()), state: "x".repeat(46).into(), ..SshConfig::default() };
        assert!(long.check().unwrap_err().to_string().contains("45 bytes"));
    }
}
