//! Which hosts, how they are reached, and what on them means that somebody uses them.

use std::{fs, path::PathBuf};

use doctor_core::{
    ids::{PoolName, Sku},
    time::Span,
};
use serde::{Deserialize, Serialize};

use super::hosts::{self, BadHosts, Host};

/// Settings of the backend, `[backend.ssh]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SshConfig {
    /// One host or range a line. It is read again for each look at the fleet.
    pub hostfile: Option<PathBuf>,
    /// The same, written here: `node[01-64]`, or lines of a host file.
    pub hosts: Option<String>,
    /// The pool that they are in.
    pub pool: PoolName,
    pub sku: Option<Sku>,
    /// For `ssh -F`. Absent: what OpenSSH reads by itself.
    pub ssh_config: Option<PathBuf>,
    /// The host keys that are believed. Absent: what OpenSSH reads by itself.
    pub known_hosts: Option<PathBuf>,
    /// What becomes of a host whose key nobody knows.
    pub host_keys: HostKeys,
    /// To be connected.
    pub connect: Span,
    /// For one answer of a host, from the connection on.
    pub deadline: Span,
    /// To carry `doctor-node` to a host, once for each version.
    pub copy: Span,
    /// So many hosts are asked at the same time.
    pub parallel: usize,
    /// Where `doctor-node`, runs and marks are on a host; relative to the home directory of who logs in. Each host
    /// has a folder of its own in it.
    pub remote: String,
    /// The words that make who logs in root, such as `["sudo", "-n"]`. Empty: root logs in.
    pub as_root: Vec<String>,
    /// The `doctor-node` program that is carried to hosts. Absent: `$DOCTOR_NODE`, then beside this program, then in `PATH`.
    pub doctor_node: Option<PathBuf>,
    /// The shared directory as hosts see it. Absent: there is none, and results are carried over SSH.
    pub share: Option<PathBuf>,
    /// Above this load per core (over one minute) a host without a run of ours is busy.
    pub max_load_per_core: f64,
    /// While one of these files exists on a host, it is busy: a user's or a site's way to keep us off.
    pub locks: Vec<PathBuf>,
    /// Programs that hold GPUs open without using them.
    pub bystanders: Vec<String>,
    /// A file on a host that tells who logs in that the host is marked, such as `/etc/motd.d/cluster-doctor`.
    pub motd: Option<PathBuf>,
    /// A command of the site's that closes a host to users; `{node}` and `{op}` are filled in. Empty: nobody does.
    pub cordon: Vec<String>,
    /// The one that opens it again.
    pub release: Vec<String>,
    /// How a host resets its GPUs and reboots, as words of a command there. Empty: it cannot.
    pub reset: Vec<String>,
    pub reboot: Vec<String>,
    /// Where the first host of a run over several listens for the others.
    pub rendezvous_port: u16,
    /// A cancelled job may take this long to write what it has before it is killed.
    pub grace: Span,
    /// Where this service keeps connections, and which run is on which host. Connections are sockets: the path has to be short.
    pub state: PathBuf,
}

/// Whom to believe.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HostKeys {
    /// Only hosts whose keys are known.
    #[default]
    Known,
    /// The key of a host that is seen for the first time is written down and believed from then on. One that changes is refused.
    Learn,
}

impl HostKeys {
    /// As OpenSSH has it.
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

/// A socket's path may have 108 bytes; OpenSSH adds a name of 40 and, while it makes one, 17 more.
const LONGEST_STATE: usize = 45;

/// What is wrong with the settings.
#[derive(Debug, thiserror::Error)]
pub enum BadSettings {
    #[error("either `hostfile` or `hosts` names the hosts; one of the two is wanted")]
    NoHosts,
    #[error("`hosts`: {0}")]
    Hosts(#[source] BadHosts),
    #[error("the host file {}: {source}", path.display())]
    HostFile { path: PathBuf, source: BadHosts },
    #[error("reading the host file {}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error(
        "`{key}`: `{word}` would mean something else to a shell; use letters, digits and . _ - = /, and no - in front"
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
    #[error("`state` is {} and holds sockets: {LONGEST_STATE} bytes are the most it may have", .0.display())]
    LongState(PathBuf),
}

impl SshConfig {
    /// # Errors
    /// With what would be accepted. Files are not looked at.
    pub fn check(&self) -> Result<(), BadSettings> {
        if self.hostfile.is_some() == self.hosts.is_some() {
            return Err(BadSettings::NoHosts);
        }
        if let Some(text) = &self.hosts {
            hosts::parse(text).map_err(BadSettings::Hosts)?;
        }
        let words = self.as_root.iter().map(|word| ("as_root", word)).chain([("remote", &self.remote)]);
        for (key, word) in words {
            let harmless = |c: char| c.is_ascii_alphanumeric() || "._-=/".contains(c);
            let option = word.starts_with('-') && key == "remote";
            if word.is_empty() || option || !word.chars().all(harmless) {
                return Err(BadSettings::Word { key, word: word.clone() });
            }
        }
        if !(1..=1024).contains(&self.parallel) {
            return Err(BadSettings::Parallel(self.parallel));
        }
        let least = Span::from_secs(1);
        for (key, value) in [("connect", self.connect), ("deadline", self.deadline), ("copy", self.copy)] {
            if value < least {
                return Err(BadSettings::Short { key, value, least });
            }
        }
        if !(self.max_load_per_core >= 0.0 && self.max_load_per_core.is_finite()) {
            return Err(BadSettings::Load(self.max_load_per_core));
        }
        if self.rendezvous_port == 0 {
            return Err(BadSettings::Port);
        }
        if self.state.as_os_str().len() > LONGEST_STATE {
            return Err(BadSettings::LongState(self.state.clone()));
        }
        Ok(())
    }

    /// The hosts as they are written now.
    ///
    /// # Errors
    /// If the file cannot be read, or with the line that is wrong.
    pub fn read_hosts(&self) -> Result<Vec<Host>, BadSettings> {
        match (&self.hosts, &self.hostfile) {
            (Some(text), None) => hosts::parse(text).map_err(BadSettings::Hosts),
            (None, Some(path)) => {
                let text =
                    fs::read_to_string(path).map_err(|source| BadSettings::Read { path: path.clone(), source })?;
                hosts::parse(&text).map_err(|source| BadSettings::HostFile { path: path.clone(), source })
            }
            _ => Err(BadSettings::NoHosts),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(text: &str) -> String {
        match toml::from_str::<SshConfig>(text) {
            Ok(config) => config.check().map_or_else(|error| error.to_string(), |()| "well".to_owned()),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn a_list_of_hosts_is_enough() {
        assert_eq!(said("hosts = \"node[01-04]\"\n"), "well");
        assert_eq!(said("hostfile = \"/etc/hostfile\"\nas_root = [\"sudo\", \"-n\"]\n"), "well");
    }

    #[test]
    fn what_is_wrong_is_said_with_what_would_do() {
        for (text, expected) in [
            ("", "one of the two is wanted"),
            ("hosts = \"a\"\nhostfile = \"b\"\n", "one of the two is wanted"),
            ("hosts = \"node[1-\"\n", "`hosts`: line 1"),
            ("hosts = \"a\"\nremote = \"x; rm\"\n", "`remote`: `x; rm` would mean something else to a shell"),
            ("hosts = \"a\"\nremote = \"-x\"\n", "no - in front"),
            ("hosts = \"a\"\nparallel = 0\n", "expected 1 to 1024"),
            ("hosts = \"a\"\nconnect = \"10ms\"\n", "expected 1s or more"),
            ("hosts = \"a\"\nmax_load_per_core = -1.0\n", "0 or more"),
            ("hosts = \"a\"\nrendezvous_port = 0\n", "1 to 65535"),
            ("hosts = \"a\"\nhost_keys = \"any\"\n", "`known`"),
            ("hosts = \"a\"\nhostfiel = \"b\"\n", "hostfile"),
        ] {
            let error = said(text);
            assert!(error.contains(expected), "{text:?}: {error}");
        }
        let long = SshConfig { hosts: Some("a".to_owned()), state: "x".repeat(46).into(), ..SshConfig::default() };
        assert!(long.check().unwrap_err().to_string().contains("45 bytes"));
    }
}
