//! TLS to the controller. The agent has no default trust: either the certificates of a file vouch for the controller, with its name
//! and within its dates, or the controller's public key is pinned by its fingerprint.
//!
//! A pinned key identifies the controller as an SSH host key does. Name, dates and issuer of the certificate then add nothing and are
//! not examined: a self-made certificate is enough, and no agent falls silent on the day when it expires. The handshake proves that the
//! server holds the key.

use std::{
    fmt,
    io::{self, Read, Write},
    path::{Path, PathBuf},
    sync::Arc,
};

use doctor_checks::key_fingerprint::KeyFingerprint;
use doctor_host::trusted_file;
use rustls::{
    CertificateError, ClientConfig, ClientConnection, ConfigBuilder, DigitallySignedStruct, Error, OtherError,
    RootCertStore, SignatureScheme, StreamOwned, WantsVerifier,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{WebPkiSupportedAlgorithms, ring, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, UnixTime, pem::PemObject},
    server::ParsedCertificate,
};

/// Why the controller cannot be authenticated with these settings.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("cannot read the certificates in {}: {text}", .path.display())]
    Authorities { path: PathBuf, text: String },
    #[error("TLS cannot be set up")]
    Setup(#[from] Error),
}

/// How connections to the controller are encrypted, and how it is authenticated.
#[derive(Debug, Clone)]
pub struct TlsClient(Arc<ClientConfig>);

impl TlsClient {
    /// Trusts servers with a certificate that an authority in this PEM file has issued, or that is itself in the file.
    ///
    /// # Errors
    /// If the file cannot be read, or holds no usable certificate.
    pub fn with_authorities(path: &Path) -> Result<Self, TlsError> {
        let bad = |text: String| TlsError::Authorities { path: path.to_owned(), text };
        // Who can change the file can name an authority that vouches for any server.
        let text = trusted_file::read(path).map_err(|error| bad(error.to_string()))?;
        let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
        let mut roots = RootCertStore::empty();
        for certificate in read.map_err(|error| bad(error.to_string()))? {
            roots.add(certificate).map_err(|error| bad(error.to_string()))?;
        }
        if roots.is_empty() {
            return Err(bad("it contains no certificate".to_owned()));
        }
        Ok(Self(Arc::new(builder()?.with_root_certificates(roots).with_no_client_auth())))
    }

    /// Trusts servers that hold one of these keys.
    ///
    /// # Errors
    /// If the cryptography cannot be set up.
    pub fn with_pinned_keys(fingerprints: &[KeyFingerprint]) -> Result<Self, TlsError> {
        let algorithms = ring::default_provider().signature_verification_algorithms;
        let verifier = PinnedKeys { fingerprints: fingerprints.to_vec(), algorithms };
        let config = builder()?.dangerous().with_custom_certificate_verifier(Arc::new(verifier)).with_no_client_auth();
        Ok(Self(Arc::new(config)))
    }

    /// Wraps a connection. The handshake is part of the first write.
    pub(super) fn wrap<S: Read + Write>(&self, host: &str, stream: S) -> io::Result<StreamOwned<ClientConnection, S>> {
        let name = ServerName::try_from(host.to_owned())
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, format!("{host}: {error}")))?;
        let connection = ClientConnection::new(Arc::clone(&self.0), name)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        Ok(StreamOwned::new(connection, stream))
    }
}

fn builder() -> Result<ConfigBuilder<ClientConfig, WantsVerifier>, Error> {
    // Explicit: a process-wide default provider could be set by another crate.
    ClientConfig::builder_with_provider(Arc::new(ring::default_provider())).with_safe_default_protocol_versions()
}

/// Returns why an exchange failed, if it failed because of TLS and not of the network.
pub(super) fn tls_failure(error: &io::Error) -> Option<String> {
    Some(match error.get_ref()?.downcast_ref::<Error>()? {
        // rustls would print this one for debugging.
        Error::InvalidCertificate(CertificateError::Other(OtherError(why))) => why.to_string(),
        other => other.to_string(),
    })
}

/// Accepts servers by their key alone.
#[derive(Debug)]
struct PinnedKeys {
    fingerprints: Vec<KeyFingerprint>,
    algorithms: WebPkiSupportedAlgorithms,
}

/// The server holds a key that is not pinned.
#[derive(Debug)]
struct OtherKey(KeyFingerprint);

impl fmt::Display for OtherKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "its key {} is not pinned here; if `doctor agent certificate` prints this on the controller, add it to \
             `fingerprints` or enroll the node again, otherwise another server answers at this address",
            self.0
        )
    }
}

impl std::error::Error for OtherKey {}

impl ServerCertVerifier for PinnedKeys {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let key = KeyFingerprint::of(&ParsedCertificate::try_from(end_entity)?.subject_public_key_info());
        match self.fingerprints.contains(&key) {
            true => Ok(ServerCertVerified::assertion()),
            false => Err(CertificateError::Other(OtherError(Arc::new(OtherKey(key)))).into()),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, cert, signature, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, signature, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_certificates_is_an_error_that_names_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ca.pem");
        let error_for = |text: &str| {
            std::fs::write(&path, text).unwrap();
            TlsClient::with_authorities(&path).unwrap_err().to_string()
        };
        assert!(error_for("not PEM").ends_with("ca.pem: it contains no certificate"));
        assert!(error_for("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n").contains("ca.pem: "));
        std::fs::remove_file(&path).unwrap();
        assert!(TlsClient::with_authorities(&path).unwrap_err().to_string().contains("ca.pem: "));
    }
}
