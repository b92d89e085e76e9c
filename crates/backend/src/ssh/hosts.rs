//! Parses host files: one host or range of hosts per line.
//!
//! ```text
//! # every line: [user@]HOSTS[:port] and, where OpenSSH's own configuration does not say it, how to get there
//! node[01-64]
//! admin@gpu1:2222 jump=gate.example.org key=/etc/cluster-doctor/id
//! login1 address=10.0.0.7 user=ubuntu
//! ```
//!
//! `slots=` and `max_slots=` of MPI host files are ignored.

use std::{collections::BTreeMap, path::PathBuf};

use doctor_core::{
    hostlist::{self, HostlistError},
    ids::NodeName,
};

/// A host and its connection settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    pub name: NodeName,
    /// Absent: the address that its name resolves to.
    pub address: Option<String>,
    pub user: Option<String>,
    pub port: Option<u16>,
    /// The jump host.
    pub jump: Option<String>,
    pub key: Option<PathBuf>,
}

/// Why a list of hosts cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HostFileError {
    #[error("line {line}: {source}")]
    Names { line: usize, source: HostlistError },
    #[error("line {line}: `{word}` is not a setting; use user=, port=, jump=, key= or address=")]
    Setting { line: usize, word: String },
    #[error("line {line}: `{word}` is not a port; use 1 to 65535")]
    Port { line: usize, word: String },
    #[error("line {line}: `{word}` cannot be passed to ssh; use letters, digits and . _ - : @ /, without a leading -")]
    Word { line: usize, word: String },
    #[error("line {line}: one address for {hosts} hosts; write one line per host")]
    OneAddress { line: usize, hosts: usize },
    #[error("line {line}: {name} is already in line {before}")]
    Duplicate { line: usize, name: NodeName, before: usize },
    #[error("it names no host; write one host or range per line, such as node[01-64]")]
    Empty,
}

/// Parses a host file, in its order.
///
/// # Errors
/// With the line and what would be accepted.
pub fn parse(text: &str) -> Result<Vec<Host>, HostFileError> {
    let mut hosts = Vec::new();
    let mut lines = BTreeMap::new();
    for (line, written) in (1..).zip(text.lines()) {
        let written = written.split('#').next().unwrap_or_default().trim();
        if written.is_empty() {
            continue;
        }
        for host in parse_line(line, written)? {
            if let Some(before) = lines.insert(host.name.clone(), line) {
                return Err(HostFileError::Duplicate { line, name: host.name, before });
            }
            if hosts.len() == hostlist::MAX_NODES {
                return Err(HostFileError::Names { line, source: HostlistError::TooMany(hostlist::MAX_NODES) });
            }
            hosts.push(host);
        }
    }
    if hosts.is_empty() { Err(HostFileError::Empty) } else { Ok(hosts) }
}

fn parse_line(line: usize, written: &str) -> Result<Vec<Host>, HostFileError> {
    let mut fields = written.split_whitespace();
    let first = fields.next().unwrap_or_default();
    let (mut user, rest) = match first.split_once('@') {
        Some((user, rest)) => (Some(plain(line, user)?), rest),
        None => (None, first),
    };
    let (names, mut port) = match rest.rsplit_once(':') {
        Some((names, digits)) => (names, Some(port_of(line, digits)?)),
        None => (rest, None),
    };
    let (mut address, mut jump, mut key) = (None, None, None);
    for field in fields {
        let setting = || HostFileError::Setting { line, word: field.chars().take(64).collect() };
        match field.split_once('=').ok_or_else(setting)? {
            ("user", value) => user = Some(plain(line, value)?),
            ("port", value) => port = Some(port_of(line, value)?),
            ("jump", value) => jump = Some(plain(line, value)?),
            ("key", value) => key = Some(PathBuf::from(plain(line, value)?)),
            ("address", value) => address = Some(plain(line, value)?),
            ("slots" | "max_slots" | "max-slots", _) => {}
            _ => return Err(setting()),
        }
    }
    let names = hostlist::parse(names).map_err(|source| HostFileError::Names { line, source })?;
    if address.is_some() && names.len() > 1 {
        return Err(HostFileError::OneAddress { line, hosts: names.len() });
    }
    let host = |name: NodeName| {
        plain(line, name.as_str())?;
        let (address, user, jump, key) = (address.clone(), user.clone(), jump.clone(), key.clone());
        Ok(Host { name, address, user, port, jump, key })
    };
    names.into_iter().map(host).collect()
}

fn port_of(line: usize, text: &str) -> Result<u16, HostFileError> {
    let port = text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten();
    port.filter(|port| *port > 0).ok_or_else(|| HostFileError::Port { line, word: text.chars().take(64).collect() })
}

/// Accepts a word that neither `ssh` parses as an option nor a shell interprets.
fn plain(line: usize, text: &str) -> Result<String, HostFileError> {
    let harmless = |c: char| c.is_ascii_alphanumeric() || "._-:@/".contains(c);
    if text.is_empty() || text.starts_with('-') || !text.chars().all(harmless) {
        return Err(HostFileError::Word { line, word: text.chars().take(64).collect() });
    }
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn names(text: &str) -> Vec<String> {
        parse(text).unwrap().into_iter().map(|host| host.name.to_string()).collect()
    }

    #[test]
    fn hosts_are_one_per_line_or_in_ranges() {
        assert_eq!(names("n1\n\n# none\nn2 # a comment\n"), ["n1", "n2"]);
        assert_eq!(names("node[08-10] slots=8\r\n10.0.0.7\n"), ["node08", "node09", "node10", "10.0.0.7"]);
    }

    #[test]
    fn connection_options_follow_the_name() {
        let text = "admin@gpu1:2222 jump=me@gate:22 key=/etc/id\nlogin1 address=10.0.0.7 user=ubuntu port=22\n";
        let hosts = parse(text).unwrap();
        assert_eq!((hosts[0].user.as_deref(), hosts[0].port), (Some("admin"), Some(2222)));
        assert_eq!((hosts[0].jump.as_deref(), hosts[0].key.as_deref()), (Some("me@gate:22"), Some("/etc/id".as_ref())));
        assert_eq!((hosts[1].address.as_deref(), hosts[1].user.as_deref()), (Some("10.0.0.7"), Some("ubuntu")));
    }

    #[test]
    fn errors_name_the_line() {
        for (text, expected) in [
            ("", "names no host"),
            ("n1\nn[1-\n", "line 2: `n[1-` has an unmatched bracket"),
            ("n1 user\n", "line 1: `user` is not a setting; use user="),
            ("n1 colour=red\n", "`colour=red` is not a setting"),
            ("n1:0\n", "line 1: `0` is not a port"),
            ("n1 port=+7\n", "`+7` is not a port"),
            ("n1 jump=-oProxyCommand=x\n", "cannot be passed to ssh"),
            ("n1 user=$(id)\n", "cannot be passed to ssh"),
            ("n[1-2] address=10.0.0.1\n", "one address for 2 hosts"),
            ("n1\nn2\nn[1-3]\n", "line 3: n1 is already in line 1"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text:?}: {error}");
        }
    }

    proptest! {
        #[test]
        fn parsed_hosts_are_unique_and_never_look_like_ssh_options(
            text in "([a-c@:=\\[\\]0-9 #\n-]|jump=|port=|user=|key=){0,60}",
        ) {
            let Ok(hosts) = parse(&text) else { return Ok(()) };
            let mut names: Vec<_> = hosts.iter().map(|host| host.name.clone()).collect();
            names.sort();
            names.dedup();
            prop_assert_eq!(names.len(), hosts.len());
            for host in hosts {
                let values = [Some(host.name.to_string()), host.user, host.jump, host.address];
                prop_assert!(values.iter().flatten().all(|value| !value.starts_with('-') && !value.is_empty()));
            }
        }
    }
}
