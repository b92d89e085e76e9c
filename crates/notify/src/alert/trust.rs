//! Whose certificates are believed: the system's, and those that the configuration names.

use std::path::Path;

use rustls::pki_types::{CertificateDer, pem::PemObject};

use super::NotSent;

/// The certificates there are to believe in.
///
/// # Errors
/// If the file cannot be read, or there are none at all.
pub(super) fn roots(ca: Option<&Path>) -> Result<Vec<CertificateDer<'static>>, NotSent> {
    // A store of the system that is broken in part is used as far as it is good.
    let mut roots = rustls_native_certs::load_native_certs().certs;
    if let Some(path) = ca {
        let bad = |error| NotSent::later(format!("cannot read the certificates in {}: {error}", path.display()));
        let named: Result<Vec<_>, _> = CertificateDer::pem_file_iter(path).map_err(bad)?.collect();
        roots.extend(named.map_err(bad)?);
    }
    if roots.is_empty() {
        return Err(NotSent::later(
            "this system has no certificates to believe in: install them, or name some with `ca`",
        ));
    }
    Ok(roots)
}
