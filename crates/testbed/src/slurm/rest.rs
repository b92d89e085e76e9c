//! slurmrestd, on a Unix socket for root or on loopback TCP for clients with a token.
//!
//! It asks the kernel for the peer of its socket and rejects processes that its own PID namespace does not contain. It
//! is therefore the one daemon outside that namespace, with a shell that ends it.

use std::{net::TcpStream, os::unix::net::UnixStream, path::PathBuf, sync::PoisonError};

use super::{
    Daemon, Generation, Slurm, SlurmTestbedError,
    error::file_error,
    layout::{PathsAndPorts, Rest},
};

/// slurmrestd serves only clients of its own user on its socket, and refuses to run as root by default. Here all are root.
const SECURITY_VARIABLE: &str = "SLURMRESTD_SECURITY=disable_user_check";

/// The output of slurmrestd, which has no log file.
pub(super) const LOG: &str = "rest.log";

impl Slurm {
    /// Returns the socket on which slurmrestd serves root, with [`Rest::Socket`].
    pub fn rest_socket(&self) -> PathBuf {
        self.paths_and_ports.rest_socket()
    }

    /// Returns the URL on which slurmrestd serves clients with a token, with [`Rest::Token`]: `http://127.0.0.1:PORT`.
    pub fn rest_url(&self) -> String {
        format!("http://127.0.0.1:{}", self.paths_and_ports.rest_port)
    }

    /// Creates a token for this user, valid for an hour.
    ///
    /// # Errors
    /// Fails if slurmctld issues none, as without [`Rest::Token`].
    pub fn token(&self, user: &str) -> Result<String, SlurmTestbedError> {
        let stdout = self.run("scontrol", &["token", &format!("username={user}"), "lifespan=3600"])?;
        Ok(stdout.strip_prefix("SLURM_JWT=").unwrap_or(&stdout).to_owned())
    }

    pub(super) fn attach_rest(&self) -> Result<(), SlurmTestbedError> {
        let Some(rest) = self.layout.rest else { return Err(SlurmTestbedError::NoRest) };
        let args = arguments(&self.paths_and_ports, self.layout.generation, rest);
        let attached = self.namespaces.attach(&args, &self.paths_and_ports.folder.join(LOG))?;
        // Drops, and thereby ends, the previous one.
        *self.attached.lock().unwrap_or_else(PoisonError::into_inner) = Some(attached);
        Ok(())
    }

    pub(super) fn start_rest(&self) -> Result<(), SlurmTestbedError> {
        self.attach_rest()?;
        let answers = || {
            let opened = match self.layout.rest {
                Some(Rest::Token) => TcpStream::connect(("127.0.0.1", self.paths_and_ports.rest_port)).map(drop),
                Some(Rest::Socket) | None => UnixStream::connect(self.rest_socket()).map(drop),
            };
            opened.map(|()| "open".to_owned()).map_err(file_error("connecting to", &self.rest_socket()))
        };
        // The process list cannot be used yet: the process may not have called exec.
        self.wait_for("slurmrestd listening", answers, |_| true).map_err(|_| SlurmTestbedError::NotStarted {
            daemon: Daemon::Rest.to_string(),
            said: self.log(Daemon::Rest),
        })
    }
}

/// Returns its command line.
fn arguments(paths_and_ports: &PathsAndPorts, generation: Generation, rest: Rest) -> Vec<String> {
    let conf = paths_and_ports.conf().display().to_string();
    // Without slurmdbd, the plugins that query it must not be loaded.
    let parts = match generation {
        Generation::Debian12 => "openapi/v0.0.38",
        Generation::Debian13 => "slurmctld",
    };
    let (speaks, knows, listens): (&[&str], _, _) = match rest {
        Rest::Socket => (&[], "rest_auth/local", format!("unix:{}", paths_and_ports.rest_socket().display())),
        Rest::Token => (&["SLURM_JWT=daemon"], "rest_auth/jwt", format!("127.0.0.1:{}", paths_and_ports.rest_port)),
    };
    let daemon = ["slurmrestd", "-f", &conf, "-a", knows, "-s", parts, &listens];
    [&["env", SECURITY_VARIABLE], speaks, &daemon].concat().into_iter().map(str::to_owned).collect()
}
