//! slurmrestd: on a socket for this machine's users, and on loopback for whoever has a token.
//!
//! It asks the kernel who is at the other end of its socket, and believes no process that its own PID namespace does not have: it
//! is the one daemon outside of that, with a shell beside it that ends it.

use std::{net::TcpStream, os::unix::net::UnixStream, path::PathBuf, sync::PoisonError};

use super::{
    BedError, Daemon, Generation, Slurm,
    error::at,
    layout::{Place, Rest},
};

/// It answers on its socket only who is the same as itself, and refuses to be root unless told: here everybody is root.
const SECURITY: &str = "SLURMRESTD_SECURITY=disable_user_check";

/// What it says, for it has no log of its own.
pub(super) const LOG: &str = "rest.log";

impl Slurm {
    /// Where slurmrestd answers root, with [`Rest::Socket`].
    pub fn rest_socket(&self) -> PathBuf {
        self.place.rest_socket()
    }

    /// Where slurmrestd answers who has a token, with [`Rest::Token`]: `http://127.0.0.1:PORT`.
    pub fn rest_url(&self) -> String {
        format!("http://127.0.0.1:{}", self.place.rest_port)
    }

    /// A token by which its bearer is this user, for an hour.
    ///
    /// # Errors
    /// If the controller gives none, as without [`Rest::Token`].
    pub fn token(&self, user: &str) -> Result<String, BedError> {
        let said = self.run("scontrol", &["token", &format!("username={user}"), "lifespan=3600"])?;
        Ok(said.strip_prefix("SLURM_JWT=").unwrap_or(&said).to_owned())
    }

    pub(super) fn attach_rest(&self) -> Result<(), BedError> {
        let Some(rest) = self.layout.rest else { return Err(BedError::NoRest) };
        let words = words(&self.place, self.layout.generation, rest);
        let attached = self.world.attach(&words, &self.place.folder.join(LOG))?;
        // Who was here before has ended, or ends now.
        *self.attached.lock().unwrap_or_else(PoisonError::into_inner) = Some(attached);
        Ok(())
    }

    pub(super) fn begin_rest(&self) -> Result<(), BedError> {
        self.attach_rest()?;
        let answers = || {
            let opened = match self.layout.rest {
                Some(Rest::Token) => TcpStream::connect(("127.0.0.1", self.place.rest_port)).map(drop),
                Some(Rest::Socket) | None => UnixStream::connect(self.rest_socket()).map(drop),
            };
            opened.map(|()| "open".to_owned()).map_err(at("connecting to", &self.rest_socket()))
        };
        // Whether it runs cannot be asked yet: it may still be the program that is about to become it.
        self.wait_for("slurmrestd listening", answers, |_| true)
            .map_err(|_| BedError::NotStarted { daemon: Daemon::Rest.to_string(), said: self.log(Daemon::Rest) })
    }
}

/// How it is started.
fn words(place: &Place, generation: Generation, rest: Rest) -> Vec<String> {
    let conf = place.conf().display().to_string();
    // Without a database there must be none of the parts that ask one.
    let parts = match generation {
        Generation::Debian12 => "openapi/v0.0.38",
        Generation::Debian13 => "slurmctld",
    };
    let (speaks, knows, listens): (&[&str], _, _) = match rest {
        Rest::Socket => (&[], "rest_auth/local", format!("unix:{}", place.rest_socket().display())),
        Rest::Token => (&["SLURM_JWT=daemon"], "rest_auth/jwt", format!("127.0.0.1:{}", place.rest_port)),
    };
    let daemon = ["slurmrestd", "-f", &conf, "-a", knows, "-s", parts, &listens];
    [&["env", SECURITY], speaks, &daemon].concat().into_iter().map(str::to_owned).collect()
}
