//! The certificates that TLS trusts: the system's, those of a file, or both.

use std::path::{Path, PathBuf};

use doctor_host::trusted_file;
use rustls::{
    RootCertStore,
    pki_types::{CertificateDer, pem::PemObject as _},
};

/// Which certificates are trusted. A file holds certificates in PEM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TrustedRoots<'a> {
    System,
    /// Those of the file instead of the system's.
    File(&'a Path),
    /// Those of the file in addition to the system's.
    SystemAndFile(&'a Path),
}

/// Why a certificate file cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{}: {text}", path.display())]
pub struct BadRoots {
    pub path: PathBuf,
    pub text: String,
}

/// Loads the certificates. A system may have none.
///
/// # Errors
/// If a file cannot be read, holds no certificate, or holds one that is not valid as a trust anchor.
pub fn roots(trust: TrustedRoots<'_>) -> Result<Vec<CertificateDer<'static>>, BadRoots> {
    // Unreadable certificates in the system's store are skipped.
    let machine = || rustls_native_certs::load_native_certs().certs;
    Ok(match trust {
        TrustedRoots::System => machine(),
        TrustedRoots::File(path) => of_file(path)?,
        TrustedRoots::SystemAndFile(path) => [machine(), of_file(path)?].concat(),
    })
}

fn of_file(path: &Path) -> Result<Vec<CertificateDer<'static>>, BadRoots> {
    let bad = |text: String| BadRoots { path: path.to_owned(), text };
    // Who can change the file can name an authority that vouches for any server.
    let text = trusted_file::read(path).map_err(|error| bad(error.to_string()))?;
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let certificates = certificates.map_err(|error| bad(error.to_string()))?;
    let mut store = RootCertStore::empty();
    for certificate in &certificates {
        store.add(certificate.clone()).map_err(|error| bad(error.to_string()))?;
    }
    if certificates.is_empty() { Err(bad("it contains no certificate".to_owned())) } else { Ok(certificates) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_certificates_is_an_error_that_names_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ca.pem");
        let error_for = |text: Option<&str>| {
            text.into_iter().for_each(|text| std::fs::write(&path, text).unwrap());
            let errors = [TrustedRoots::File(&path), TrustedRoots::SystemAndFile(&path)]
                .map(|trust| roots(trust).unwrap_err().to_string());
            assert_eq!(errors[0], errors[1]);
            assert!(errors[0].contains("ca.pem: "), "{}", errors[0]);
            errors[0].clone()
        };
        error_for(None);
        assert!(error_for(Some("not PEM")).ends_with("it contains no certificate"));
        error_for(Some("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"));
    }
}
