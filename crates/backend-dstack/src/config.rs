//! Settings of the dstack backend: the server, the project and the token, and how a run becomes a task.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use doctor_backend::ssh::{HostKeys, SshConfig};
use doctor_core::{ids::Sku, time::Span};
use serde::{Deserialize, Serialize};

/// Settings of the backend, `[backend.dstack]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DstackConfig {
    /// The server's URL, such as `https://dstack.example.com`.
    pub url: String,
    pub project: String,
    /// The environment variable with the token, unless `token_file` is set.
    pub token_variable: String,
    /// A file with the token. It is read for each request, so that the token may change while the service runs.
    pub token_file: Option<PathBuf>,
    /// A PEM file with the trusted certificates. Absent: those of the system.
    pub ca_file: Option<PathBuf>,
    /// The limit for one response of the server.
    pub deadline: Span,
    /// Only instances of these fleets. Empty: of all.
    pub fleets: Vec<String>,
    /// The machine type of a fleet's instances, if dstack does not report it: it calls every host of an SSH fleet `instance`.
    pub skus: BTreeMap<String, Sku>,
    /// An idle instance that dstack would terminate within this time is left alone.
    pub idle_margin: Span,
    /// How runs become tasks.
    pub task: Task,
    /// How the key of a run reaches its job.
    pub key: KeyDelivery,
    /// Whether instances of backend fleets may be deleted, so that dstack creates others.
    pub replace: bool,
    /// How to reach instances of a case on which dstack starts nothing. Absent: they are not reached.
    pub ssh: Option<SshFallbackConfig>,
}

/// SSH access to an instance, bypassing dstack.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SshFallbackConfig {
    /// The login user. Absent: the fleet's, then that of OpenSSH's configuration.
    pub user: Option<String>,
    pub port: Option<u16>,
    /// The private key file.
    pub key: Option<PathBuf>,
    /// The jump host.
    pub jump: Option<String>,
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
    /// Where `doctor-node` and runs are on a host, relative to the login user's home directory. On a local disk.
    pub remote: String,
    /// The prefix that makes the login user root. Empty: the login user is root.
    pub as_root: Vec<String>,
    /// The `doctor-node` program that is copied to hosts. Absent: `$DOCTOR_NODE`, then beside this program, then in `PATH`.
    pub doctor_node: Option<PathBuf>,
    /// Above this load per core (one-minute average) a host is in use.
    pub max_load_per_core: f64,
    /// While one of these files exists on a host, it is in use.
    pub locks: Vec<PathBuf>,
    /// Where the service keeps connection sockets, and the journal of runs and hosts. The path has to be short.
    pub state: PathBuf,
}

impl Default for SshFallbackConfig {
    fn default() -> Self {
        let ssh = SshConfig::default();
        Self {
            user: None,
            port: None,
            key: None,
            jump: None,
            ssh_config: None,
            known_hosts: None,
            host_keys: ssh.host_keys,
            connect: ssh.connect,
            deadline: ssh.deadline,
            remote: ssh.remote,
            as_root: ssh.as_root,
            doctor_node: None,
            max_load_per_core: ssh.max_load_per_core,
            locks: ssh.locks,
            state: ssh.state,
        }
    }
}

/// A placeholder: the SSH settings require a host, but the dstack server supplies the hosts.
const PLACEHOLDER: &str = "placeholder";

impl SshFallbackConfig {
    pub(super) fn to_ssh_config(&self) -> SshConfig {
        let fallback = self.clone();
        SshConfig {
            hosts: Some(PLACEHOLDER.to_owned()),
            ssh_config: fallback.ssh_config,
            known_hosts: fallback.known_hosts,
            host_keys: fallback.host_keys,
            connect: fallback.connect,
            deadline: fallback.deadline,
            remote: fallback.remote,
            as_root: fallback.as_root,
            doctor_node: fallback.doctor_node,
            max_load_per_core: fallback.max_load_per_core,
            locks: fallback.locks,
            state: fallback.state,
            ..SshConfig::default()
        }
    }

    fn check(&self) -> Result<(), DstackConfigError> {
        self.to_ssh_config().check().map_err(|error| DstackConfigError::Ssh(error.to_string()))?;
        for (key, word) in [("user", &self.user), ("jump", &self.jump)] {
            if let Some(word) = word.as_ref().filter(|word| !is_word(word)) {
                let text = format!("`{key}` is `{word}`, expected letters, digits and . _ - : @, without a leading -");
                return Err(DstackConfigError::Ssh(text));
            }
        }
        Ok(())
    }
}

/// Returns whether `ssh` takes this as a plain name.
pub(super) fn is_word(text: &str) -> bool {
    let harmless = |c: char| c.is_ascii_alphanumeric() || "._-:@".contains(c);
    !text.is_empty() && !text.starts_with('-') && text.chars().all(harmless)
}

/// The task that a run becomes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Task {
    /// It must contain `doctor-node`.
    pub image: String,
    /// The user in the container. Without one, the server would query the image's registry for each run.
    pub user: String,
    pub privileged: bool,
    /// The command that starts `doctor-node` in the container.
    pub doctor_node: Vec<String>,
    /// Where `doctor-node` keeps state of the instance in the container; mount a volume there. Absent: nothing is kept.
    pub state: Option<PathBuf>,
    /// In dstack's notation: `/path/on/instance:/path/in/container`, or the name of a volume before the colon.
    pub volumes: Vec<String>,
}

/// How a run's key reaches its job.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KeyDelivery {
    /// As a secret of the project, until the job has started. The token's owner must be a manager or admin of the project.
    #[default]
    Secret,
    /// In the task's environment, which every member of the project can read.
    Environment,
}

impl Default for DstackConfig {
    fn default() -> Self {
        Self {
            url: "http://127.0.0.1:3000".to_owned(),
            project: "main".to_owned(),
            token_variable: "DSTACK_TOKEN".to_owned(),
            token_file: None,
            ca_file: None,
            deadline: Span::from_secs(20),
            fleets: Vec::new(),
            skus: BTreeMap::new(),
            idle_margin: Span::minutes(15),
            task: Task::default(),
            key: KeyDelivery::Secret,
            replace: false,
            ssh: None,
        }
    }
}

impl Default for Task {
    fn default() -> Self {
        Self {
            image: "cluster-doctor-node:latest".to_owned(),
            user: "root".to_owned(),
            privileged: false,
            doctor_node: vec!["doctor-node".to_owned()],
            state: None,
            volumes: Vec::new(),
        }
    }
}

/// Why the settings cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DstackConfigError {
    #[error(
        "`url` is `{0}`, expected http:// or https://, a host and perhaps a port, such as https://dstack.example.com"
    )]
    Url(String),
    #[error("`{key}` is `{name}`, expected letters, digits, - and _")]
    Name { key: &'static str, name: String },
    #[error("`deadline` is {0}, expected 1s or more")]
    Deadline(Span),
    #[error("`task.doctor_node` is empty, expected the words that start the program, such as [\"doctor-node\"]")]
    NoProgram,
    #[error("`task.{0}` is empty")]
    Empty(&'static str),
    #[error("`ssh`: {0}")]
    Ssh(String),
}

/// The parts of the server's URL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Endpoint {
    pub(super) tls: bool,
    pub(super) host: String,
    pub(super) port: u16,
    /// The prefix of every path.
    pub(super) path_prefix: String,
}

impl Endpoint {
    fn parse(url: &str) -> Option<Self> {
        let (secure, rest) = match url.strip_prefix("https://") {
            Some(rest) => (true, rest),
            None => (false, url.strip_prefix("http://")?),
        };
        let (authority, before) = rest.split_once('/').unwrap_or((rest, ""));
        let (host, port) = match authority.rsplit_once(':') {
            // In a bracketed address, the last colon may be part of it.
            Some((host, port)) if !port.ends_with(']') => (host, port.parse().ok()?),
            _ => (authority, if secure { 443 } else { 80 }),
        };
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let harmless = |text: &str, more: &str| text.chars().all(|c| c.is_ascii_alphanumeric() || more.contains(c));
        let before = before.trim_end_matches('/');
        (!host.is_empty() && harmless(host, ".-_:") && harmless(before, ".-_/")).then(|| Self {
            tls: secure,
            host: host.to_owned(),
            port,
            path_prefix: if before.is_empty() { String::new() } else { format!("/{before}") },
        })
    }
}

impl DstackConfig {
    pub(super) fn endpoint(&self) -> Result<Endpoint, DstackConfigError> {
        Endpoint::parse(&self.url).ok_or_else(|| DstackConfigError::Url(self.url.clone()))
    }

    /// Checks the settings without reading any file.
    ///
    /// # Errors
    /// With what would be accepted.
    pub fn check(&self) -> Result<(), DstackConfigError> {
        self.endpoint()?;
        let names = [("project", &self.project), ("token_variable", &self.token_variable)];
        let fleets = self.fleets.iter().map(|name| ("fleets", name));
        for (key, name) in names.into_iter().chain(fleets) {
            // A project's name is part of every request path.
            if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || "-_".contains(c)) {
                return Err(DstackConfigError::Name { key, name: name.clone() });
            }
        }
        if self.deadline < Span::from_secs(1) {
            return Err(DstackConfigError::Deadline(self.deadline));
        }
        if self.task.doctor_node.is_empty() {
            return Err(DstackConfigError::NoProgram);
        }
        for (key, text) in [("image", &self.task.image), ("user", &self.task.user)] {
            if text.is_empty() {
                return Err(DstackConfigError::Empty(key));
            }
        }
        self.ssh.as_ref().map_or(Ok(()), SshFallbackConfig::check)
    }

    /// Resolves relative paths against the directory of the settings.
    pub fn resolve_paths(&mut self, folder: &Path) {
        for path in [&mut self.token_file, &mut self.ca_file].into_iter().flatten() {
            *path = folder.join(&*path);
        }
        if let Some(ssh) = &mut self.ssh {
            let files = [&mut ssh.key, &mut ssh.ssh_config, &mut ssh.known_hosts, &mut ssh.doctor_node];
            for path in files.into_iter().flatten().chain([&mut ssh.state]) {
                *path = folder.join(&*path);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_result(text: &str) -> String {
        match toml::from_str::<DstackConfig>(text) {
            Ok(config) => config.check().map_or_else(|error| error.to_string(), |()| "well".to_owned()),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn errors_name_the_setting_and_the_remedy() {
        for (text, expected) in [
            ("", "well"),
            ("url = \"https://dstack.example.com/api-of-ours/\"\ntask = { image = \"x\" }\n", "well"),
            ("url = \"dstack.example.com\"\n", "such as https://dstack.example.com"),
            ("url = \"http://a b\"\n", "`url` is `http://a b`"),
            ("url = \"http://host:port\"\n", "`url` is"),
            ("project = \"a/b\"\n", "`project` is `a/b`, expected letters"),
            ("fleets = [\"\"]\n", "`fleets` is ``"),
            ("deadline = \"10ms\"\n", "expected 1s or more"),
            ("task = { doctor_node = [] }\n", "such as [\"doctor-node\"]"),
            ("task = { image = \"\" }\n", "`task.image` is empty"),
            ("key = \"plain\"\n", "`secret`"),
            ("[ssh]\nuser = \"ubuntu\"\nkey = \"id\"\njump = \"admin@gate:2222\"\n", "well"),
            ("[ssh]\nuser = \"-x\"\n", "`ssh`: `user` is `-x`, expected letters"),
            ("[ssh]\nremote = \"a b\"\n", "`ssh`: `remote`"),
            ("[ssh]\nhosts = \"a\"\n", "host_keys"),
            ("projekt = \"x\"\n", "project"),
        ] {
            let error = check_result(text);
            assert!(error.contains(expected), "{text:?}: {error}");
        }
    }

    #[test]
    fn a_url_is_parsed_into_its_parts() {
        let parsed = |url: &str| {
            Endpoint::parse(url).map(|endpoint| (endpoint.tls, endpoint.host, endpoint.port, endpoint.path_prefix))
        };
        let expected =
            |secure, host: &str, port, before: &str| Some((secure, host.to_owned(), port, before.to_owned()));
        assert_eq!(parsed("http://10.0.0.5:3000"), expected(false, "10.0.0.5", 3000, ""));
        assert_eq!(parsed("https://dstack.example.com/"), expected(true, "dstack.example.com", 443, ""));
        assert_eq!(parsed("https://x/a/b/"), expected(true, "x", 443, "/a/b"));
        assert_eq!(parsed("http://[::1]:3000"), expected(false, "::1", 3000, ""));
        assert_eq!(parsed("http://[::1]"), expected(false, "::1", 80, ""));
        assert_eq!(parsed("http://x/\r\nEvil: 1"), None);
    }
}
