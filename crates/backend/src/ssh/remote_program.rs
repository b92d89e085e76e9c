//! Queries hosts through `doctor-node`, and installs that program on them: once per version, under a name that contains its hash,
//! and atomically, so that no host runs an incomplete copy.

use std::{
    fs,
    path::PathBuf,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use crate::program;

use doctor_core::hex;
use doctor_host::protocol::{HELLO, HostRequest, HostResponse, parse_response};
use serde::Serialize;
use sha2::{Digest, Sha256};

use super::{config::SshConfig, hosts::Host, session::SshConnector};

/// Printed by a host that does not have the program yet.
const MISSING: &str = "doctor-node missing 1";
const INSTALLED: &str = "doctor-node installed 1";
/// Printed by a host that has it, followed by its path.
const PRESENT: &str = "doctor-node present 1";

/// The most lines that a login may print before the program's first line.
const MAX_PREAMBLE_LINES: usize = 200;

/// Why a host gave no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestError {
    /// The request was not sent: nothing has changed on the host.
    NotSent(String),
    /// The request was sent and may have taken effect.
    OutcomeUnknown(String),
}

impl RequestError {
    pub fn text(&self) -> &str {
        match self {
            Self::NotSent(text) | Self::OutcomeUnknown(text) => text,
        }
    }
}

/// A request as it is sent: the host parses it as a [`doctor_host::protocol::RequestFrame`].
#[derive(Serialize)]
struct NumberedRequest<'a> {
    number: u64,
    request: &'a HostRequest,
}

#[derive(Debug)]
pub struct HostRequester {
    connector: SshConnector,
    program: PathBuf,
    /// SHA-256 of the program, in hexadecimal.
    hash: String,
    remote: String,
    as_root: String,
    deadline: Duration,
    copy: Duration,
    numbers: AtomicU64,
}

impl HostRequester {
    /// Locates and hashes the program to install.
    ///
    /// # Errors
    /// If there is none, or it cannot be read.
    pub fn new(config: &SshConfig, sockets: Option<&std::path::Path>) -> Result<Self, String> {
        let program = program::find(config.doctor_node.as_deref())?;
        let bytes = fs::read(&program).map_err(|error| format!("{}: {error}", program.display()))?;
        let first = u64::from(std::process::id()) << 32;
        Ok(Self {
            connector: SshConnector::new(config, sockets),
            hash: hash(&bytes),
            program,
            remote: config.remote.clone(),
            as_root: config.as_root.join(" "),
            deadline: config.deadline.to_std(),
            copy: config.copy.to_std(),
            numbers: AtomicU64::new(first),
        })
    }

    /// Returns the address at which other hosts reach this one.
    pub fn address(&self, host: &Host) -> Result<String, String> {
        self.connector.address(host)
    }

    /// Sends a request to a host, after installing the program if it is missing. `extra_time` is added to the deadline.
    pub fn request(
        &self,
        host: &Host,
        request: &HostRequest,
        extra_time: Duration,
    ) -> Result<HostResponse, RequestError> {
        match self.try_request(host, request, extra_time)? {
            Some(response) => Ok(response),
            None => {
                self.install(host).map_err(RequestError::NotSent)?;
                let missing = || RequestError::NotSent("the installed program is missing".to_owned());
                self.try_request(host, request, extra_time)?.ok_or_else(missing)
            }
        }
    }

    /// Returns the path of the program on a host, after installing it if it is missing.
    pub fn ensure_installed(&self, host: &Host) -> Result<String, String> {
        match self.installed_path(host)? {
            Some(path) => Ok(path),
            None => {
                self.install(host)?;
                self.installed_path(host)?.ok_or_else(|| "the installed program is missing".to_owned())
            }
        }
    }

    fn installed_path(&self, host: &Host) -> Result<Option<String>, String> {
        let (folder, hash) = (folder(&self.remote), &self.hash);
        let script = format!(
            "{folder}; P=\"$D/bin/doctor-node-{hash}\"; if [ -x \"$P\" ]; then echo \"{PRESENT} $P\"; else echo {MISSING}; fi"
        );
        let session = self.connector.open_session(host, &script, self.deadline)?;
        for _ in 0..MAX_PREAMBLE_LINES {
            let output = session.read_line().map_err(|why| why.to_string())?;
            match String::from_utf8_lossy(&output).strip_prefix(PRESENT) {
                Some(path) => return Ok(Some(path.trim_start().to_owned())),
                None if output == MISSING.as_bytes() => return Ok(None),
                None => {}
            }
        }
        Err("too much output before the answer".to_owned())
    }

    /// Returns `None` if the program is missing.
    fn try_request(
        &self,
        host: &Host,
        request: &HostRequest,
        extra_time: Duration,
    ) -> Result<Option<HostResponse>, RequestError> {
        let (folder, as_root, hash) = (folder(&self.remote), &self.as_root, &self.hash);
        let script = format!(
            "{folder}; P=\"$D/bin/doctor-node-{hash}\"; \
             if [ -x \"$P\" ]; then exec {as_root} \"$P\" host --keep \"$D\"; fi; echo {MISSING}"
        );
        let mut session =
            self.connector.open_session(host, &script, self.deadline + extra_time).map_err(RequestError::NotSent)?;
        let mut noise = 0;
        loop {
            let greeting = session.read_line().map_err(|why| RequestError::NotSent(why.to_string()))?;
            match &*String::from_utf8_lossy(&greeting) {
                HELLO => break,
                MISSING => return Ok(None),
                _ if noise == MAX_PREAMBLE_LINES => {
                    return Err(RequestError::NotSent("too much output before the answer".to_owned()));
                }
                _ => noise += 1,
            }
        }
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        let numbered = NumberedRequest { number, request };
        let mut payload = serde_json::to_vec(&numbered).map_err(|error| RequestError::NotSent(error.to_string()))?;
        payload.push(b'\n');
        session.send_and_close(payload);
        let response = session
            .read_line()
            .map_err(|why| RequestError::OutcomeUnknown(format!("after the request was sent: {why}")))?;
        parse_response(&response, number).map(Some).map_err(RequestError::OutcomeUnknown)
    }

    fn install(&self, host: &Host) -> Result<(), String> {
        let bytes = fs::read(&self.program).map_err(|error| format!("{}: {error}", self.program.display()))?;
        if hash(&bytes) != self.hash {
            return Err(format!("{} has changed since this process started: start it again", self.program.display()));
        }
        let (folder, hash) = (folder(&self.remote), &self.hash);
        let temporary = format!("$D/bin/.{hash}.{}", self.numbers.fetch_add(1, Ordering::Relaxed));
        // Keep an existing program: hosts that share a home on NFS would lose it under their running jobs.
        let script = format!(
            "{folder}; umask 077; mkdir -p \"$D/bin\" && cat > \"{temporary}\" && \
             echo \"{hash}  {temporary}\" | sha256sum -c --status && chmod 700 \"{temporary}\" && \
             P=\"$D/bin/doctor-node-{hash}\" && {{ ln \"{temporary}\" \"$P\" 2>/dev/null || [ -x \"$P\" ] || mv -f \"{temporary}\" \"$P\"; }} && \
             echo {INSTALLED}; rm -f \"{temporary}\""
        );
        let failed = |why: String| format!("copying {} to the host failed: {why}", self.program.display());
        let mut line = self.connector.open_session(host, &script, self.copy).map_err(failed)?;
        line.send_and_close(bytes);
        for _ in 0..MAX_PREAMBLE_LINES {
            if line.read_line().map_err(|why| failed(why.to_string()))? == INSTALLED.as_bytes() {
                return Ok(());
            }
        }
        Err(failed("too much output before the answer".to_owned()))
    }
}

/// Returns the shell assignment of the program's folder on the host to `$D`.
pub fn folder(remote: &str) -> String {
    if remote.starts_with('/') { format!("D=\"{remote}\"") } else { format!("D=\"$HOME/{remote}\"") }
}

pub fn hash(bytes: &[u8]) -> String {
    hex::encode(&Sha256::digest(bytes))
}
