//! Trusted CA certificates: the system's, and those of the configuration.

use std::path::Path;

use doctor_backend::http::{self, TrustedRoots};
use rustls::pki_types::CertificateDer;

use super::DeliveryError;

/// Returns the trusted CA certificates.
///
/// # Errors
/// If the file cannot be read, or there are none at all.
pub(super) fn roots(ca: Option<&Path>) -> Result<Vec<CertificateDer<'static>>, DeliveryError> {
    let roots = http::roots(ca.map_or(TrustedRoots::System, TrustedRoots::SystemAndFile));
    let roots = roots.map_err(|error| DeliveryError::later(format!("cannot read the certificates in {error}")))?;
    if roots.is_empty() {
        return Err(DeliveryError::later("this system has no trusted CA certificates: install them, or set `ca`"));
    }
    Ok(roots)
}
