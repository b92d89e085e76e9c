//! The secret that an authenticating proxy sends beside the name of its user.
//!
//! The address alone does not prove that a request comes from the proxy: another process of its machine, a container that shares its
//! address, or another machine behind the same NAT gateway has it too. The secret is read again when its file changes, so that it can be
//! replaced without a restart.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use axum::http::HeaderMap;
use doctor_backend::secret::SecretSource;
use sha2::{Digest, Sha256};

/// The header with the secret.
pub(super) const HEADER: &str = "x-doctor-proxy-secret";
/// Minimum interval between reads, which happen when a request comes.
const READ_INTERVAL: Duration = Duration::from_secs(5);
/// Shorter ones could be guessed over the network.
const MIN_CHARACTERS: usize = 16;

#[derive(Debug)]
pub(super) struct ProxySecret {
    source: SecretSource,
    current: Mutex<CurrentSecret>,
}

struct CurrentSecret {
    digest: [u8; 32],
    read: Instant,
}

impl std::fmt::Debug for CurrentSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CurrentSecret").finish_non_exhaustive()
    }
}

impl ProxySecret {
    /// Reads the secret. `None`: the configuration has none.
    ///
    /// # Errors
    /// If it cannot be read or is too short.
    pub(super) fn open(source: Option<&SecretSource>) -> Result<Self, String> {
        let source = source.cloned().ok_or_else(|| "it is not set".to_owned())?;
        let current = Mutex::new(CurrentSecret { digest: read_digest(&source)?, read: Instant::now() });
        Ok(Self { source, current })
    }

    /// Whether a request has the secret, once.
    pub(super) fn is_sent_with(&self, headers: &HeaderMap) -> bool {
        let mut values = headers.get_all(HEADER).iter();
        let (Some(value), None) = (values.next(), values.next()) else { return false };
        // Digests are compared, so that the time of the comparison tells nothing of the secret.
        digest(value.as_bytes()) == self.current_digest()
    }

    /// Returns the digest of the current secret. A new one that cannot be used leaves the last one in force.
    fn current_digest(&self) -> [u8; 32] {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.read.elapsed() >= READ_INTERVAL {
            current.read = Instant::now();
            match read_digest(&self.source) {
                Ok(digest) => current.digest = digest,
                Err(error) => tracing::warn!(%error, "cannot read `proxy.secret`; the last one stays in use"),
            }
        }
        current.digest
    }
}

fn read_digest(source: &SecretSource) -> Result<[u8; 32], String> {
    let secret = source.read().map_err(|error| error.to_string())?;
    if secret.chars().count() < MIN_CHARACTERS {
        return Err(format!(
            "{source} has fewer than {MIN_CHARACTERS} characters: `openssl rand -hex 32` makes a good one"
        ));
    }
    Ok(digest(secret.as_bytes()))
}

fn digest(secret: &[u8]) -> [u8; 32] {
    Sha256::digest(secret).into()
}
