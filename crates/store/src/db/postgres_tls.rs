//! TLS to PostgreSQL: the parameters of the store's URL, as libpq has them, and the connection.
//!
//! | `sslmode` | encrypted | authenticated |
//! |---|---|---|
//! | `disable` | no | no |
//! | `prefer` | if the server offers it | no |
//! | `require` | yes | no, unless `sslrootcert` is set: then as `verify-ca` |
//! | `verify-ca` | yes | a trusted authority issued the certificate |
//! | `verify-full` | yes | the same, and the certificate is for this host |
//!
//! `sslrootcert` is a PEM file, or `system`; without it the system's certificates are trusted. `sslcert` and `sslkey` are the client's
//! certificate. Files are read for each connection, so that renewed ones need no restart; connections are few and long.
//!
//! Without `sslmode`, a server on this machine is not asked for TLS, and any other must offer it (`require`). libpq's `prefer` would let
//! anyone on the network turn encryption off. `verify-full` would fail where the provider's authority is not among the system's, which
//! is usual for managed databases; sites are told to set it. Where the password is verified by SCRAM, channel binding
//! ([`server_end_point`]) also makes the server prove that it terminates this TLS connection itself.

use std::{
    fmt,
    future::Future,
    io,
    path::{Path, PathBuf},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use doctor_host::trusted_file;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject},
};
use sha2::{Digest, Sha256, Sha384, Sha512};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::{
    Config,
    config::{Host, SslMode},
    tls::{ChannelBinding, MakeTlsConnect, TlsConnect, TlsStream},
};
use tokio_rustls::{TlsConnector, client};

/// How far the server is authenticated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verification {
    None,
    Authority,
    AuthorityAndHost,
}

/// The values of `sslmode`. libpq's `allow` is missing: it tries without encryption first.
const MODES: [(&str, SslMode, Verification); 5] = [
    ("disable", SslMode::Disable, Verification::None),
    ("prefer", SslMode::Prefer, Verification::None),
    ("require", SslMode::Require, Verification::None),
    ("verify-ca", SslMode::Require, Verification::Authority),
    ("verify-full", SslMode::Require, Verification::AuthorityAndHost),
];

/// The value of `sslrootcert` that means the system's certificates.
const SYSTEM: &str = "system";

/// The parameters of a URL that concern TLS.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct TlsParameters {
    mode: Option<String>,
    root_certificate: Option<String>,
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
}

/// How to encrypt the connections of one store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PgTls {
    mode: SslMode,
    verification: Verification,
    /// `None`: the system's certificates.
    root_certificate: Option<PathBuf>,
    client: Option<(PathBuf, PathBuf)>,
}

impl TlsParameters {
    /// Takes the parameters out of a URL. Returns the rest, which the driver parses.
    pub(super) fn take(url: &str) -> (Self, String) {
        let Some((before, query)) = url.split_once('?') else { return (Self::default(), url.to_owned()) };
        let (mut taken, mut rest) = (Self::default(), Vec::new());
        for parameter in query.split('&') {
            let value = || Some(percent_decoded(parameter.split_once('=').map_or("", |(_, value)| value)));
            match parameter.split('=').next() {
                Some("sslmode") => taken.mode = value(),
                Some("sslrootcert") => taken.root_certificate = value(),
                Some("sslcert") => taken.certificate = value().map(PathBuf::from),
                Some("sslkey") => taken.key = value().map(PathBuf::from),
                _ => rest.push(parameter),
            }
        }
        let query = if rest.is_empty() { String::new() } else { format!("?{}", rest.join("&")) };
        (taken, before.to_owned() + &query)
    }

    /// Returns what these parameters mean for a server, or what would be accepted instead.
    pub(super) fn resolve(self, config: &Config) -> Result<PgTls, String> {
        let is_system = self.root_certificate.as_deref() == Some(SYSTEM);
        let default = match (is_system, is_local(config)) {
            // As libpq: who trusts all the system's authorities needs the host to be verified.
            (true, _) => "verify-full",
            (false, true) => "disable",
            (false, false) => "require",
        };
        let name = self.mode.as_deref().unwrap_or(default);
        let Some((_, mode, mut verification)) = MODES.into_iter().find(|(known, ..)| *known == name) else {
            let accepted: Vec<&str> = MODES.iter().map(|(name, ..)| *name).collect();
            return Err(format!("`sslmode` is `{name}`, expected one of {}", accepted.join(", ")));
        };
        if is_system && verification != Verification::AuthorityAndHost {
            return Err(format!("`sslrootcert=system` needs `sslmode=verify-full`, not `{name}`"));
        }
        if mode == SslMode::Require && self.root_certificate.is_some() && verification == Verification::None {
            verification = Verification::Authority;
        }
        let client = match (self.certificate, self.key) {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (None, None) => None,
            _ => return Err("`sslcert` and `sslkey` belong together: one is missing".to_owned()),
        };
        let root_certificate = self.root_certificate.filter(|_| !is_system).map(PathBuf::from);
        Ok(PgTls { mode, verification, root_certificate, client })
    }
}

/// Returns whether all servers of a configuration are on this machine.
fn is_local(config: &Config) -> bool {
    let by_name = config.get_hosts().iter().all(|host| match host {
        Host::Unix(_) => true,
        Host::Tcp(name) => {
            name.eq_ignore_ascii_case("localhost")
                || name.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
        }
    });
    by_name && config.get_hostaddrs().iter().all(std::net::IpAddr::is_loopback)
}

/// Decodes `%XX`. Anything else is kept as it is.
fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let digits = after.get(..2).and_then(|digits| std::str::from_utf8(digits).ok());
        match digits.filter(|_| *first == b'%').and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &after[2..];
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

impl PgTls {
    /// The mode for the driver.
    pub(super) const fn mode(&self) -> SslMode {
        self.mode
    }

    /// Reads the certificates and prepares a connection.
    ///
    /// # Errors
    /// Which file cannot be used, and why.
    pub(super) fn connector(&self) -> Result<PgConnector, String> {
        if self.mode == SslMode::Disable {
            return Ok(PgConnector { config: None });
        }
        let provider = Arc::new(ring::default_provider());
        let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?;
        let builder = match self.verification {
            Verification::AuthorityAndHost => builder.with_root_certificates(self.roots()?),
            Verification::Authority | Verification::None => {
                let verifier = self.partial_verifier(provider)?;
                builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier))
            }
        };
        let mut config = match &self.client {
            None => builder.with_no_client_auth(),
            Some((certificate, key)) => {
                let chain = read_certificates("sslcert", certificate)?;
                let secret = PrivateKeyDer::from_pem_slice(&read_file("sslkey", key)?)
                    .map_err(|error| unusable("sslkey", key, &error))?;
                builder
                    .with_client_auth_cert(chain, secret)
                    .map_err(|error| unusable("sslcert", certificate, &error))?
            }
        };
        // PostgreSQL 17 requires it for direct TLS; older servers ignore it.
        config.alpn_protocols = vec![b"postgresql".to_vec()];
        Ok(PgConnector { config: Some(Arc::new(config)) })
    }

    fn partial_verifier(&self, provider: Arc<CryptoProvider>) -> Result<PartialVerifier, String> {
        let chain = match self.verification {
            Verification::None => None,
            Verification::Authority | Verification::AuthorityAndHost => {
                let roots = Arc::new(self.roots()?);
                let built = WebPkiServerVerifier::builder_with_provider(roots, Arc::clone(&provider)).build();
                Some(built.map_err(|error| error.to_string())?)
            }
        };
        Ok(PartialVerifier { chain, provider })
    }

    fn roots(&self) -> Result<RootCertStore, String> {
        let mut roots = RootCertStore::empty();
        match &self.root_certificate {
            Some(path) => {
                for certificate in read_certificates("sslrootcert", path)? {
                    roots.add(certificate).map_err(|error| unusable("sslrootcert", path, &error))?;
                }
                if roots.is_empty() {
                    return Err(unusable("sslrootcert", path, &"it contains no certificate"));
                }
            }
            None => {
                // Unreadable certificates in the system's store are skipped.
                roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
                if roots.is_empty() {
                    return Err(
                        "this system has no trusted CA certificates: install them, or set `sslrootcert`".to_owned()
                    );
                }
            }
        }
        Ok(roots)
    }
}

/// Reads a file that only root and the user of this program can change: who changes it chooses the server that is believed.
fn read_file(parameter: &str, path: &Path) -> Result<Vec<u8>, String> {
    trusted_file::read(path).map_err(|error| unusable(parameter, path, &error))
}

fn read_certificates(parameter: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let bytes = read_file(parameter, path)?;
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    read.map_err(|error| unusable(parameter, path, &error))
}

fn unusable(parameter: &str, path: &Path, error: &dyn fmt::Display) -> String {
    format!("`{parameter}` {}: {error}", path.display())
}

/// Verifies less than the standard verifier: the chain without the host, or nothing but that the server holds the key of its
/// certificate.
#[derive(Debug)]
struct PartialVerifier {
    /// `None`: any certificate is accepted.
    chain: Option<Arc<WebPkiServerVerifier>>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for PartialVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let Some(chain) = &self.chain else { return Ok(ServerCertVerified::assertion()) };
        match chain.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now) {
            // The name is verified last: the rest is in order.
            Err(Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => Ok(ServerCertVerified::assertion()),
            result => result,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, cert, signature, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, signature, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Makes the TLS connections of one session. Without a configuration the driver never asks for one.
#[derive(Clone)]
pub(super) struct PgConnector {
    config: Option<Arc<ClientConfig>>,
}

/// The handshake with one host.
pub(super) struct PgHandshake {
    config: Option<Arc<ClientConfig>>,
    host: String,
}

/// An encrypted connection.
pub(super) struct PgTlsStream<S>(client::TlsStream<S>);

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> MakeTlsConnect<S> for PgConnector {
    type Stream = PgTlsStream<S>;
    type TlsConnect = PgHandshake;
    type Error = io::Error;

    fn make_tls_connect(&mut self, host: &str) -> io::Result<PgHandshake> {
        Ok(PgHandshake { config: self.config.clone(), host: host.to_owned() })
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> TlsConnect<S> for PgHandshake {
    type Stream = PgTlsStream<S>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<PgTlsStream<S>>> + Send>>;

    fn connect(self, stream: S) -> Self::Future {
        Box::pin(async move {
            let config = self.config.ok_or(io::ErrorKind::Unsupported)?;
            let name =
                ServerName::try_from(self.host).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
            TlsConnector::from(config).connect(name, stream).await.map(PgTlsStream)
        })
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for PgTlsStream<S> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, into)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for PgTlsStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> TlsStream for PgTlsStream<S> {
    fn channel_binding(&self) -> ChannelBinding {
        let (_, connection) = self.0.get_ref();
        let end_point = connection.peer_certificates().and_then(|chain| server_end_point(chain.first()?));
        end_point.map_or_else(ChannelBinding::none, ChannelBinding::tls_server_end_point)
    }
}

/// Returns the channel binding `tls-server-end-point` (RFC 5929): the hash of the server's certificate, by the hash function of its
/// signature. `None` where that has none: then the password is verified without channel binding.
fn server_end_point(certificate: &[u8]) -> Option<Vec<u8>> {
    // The object identifiers in DER, without tag and length. MD5 and SHA-1 are replaced by SHA-256.
    const RSA: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01];
    const ECDSA_SHA2: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 0x04, 0x03];
    let (family, last) = signature_algorithm(certificate)?.split_last().map(|(last, family)| (family, *last))?;
    match (family, last) {
        (RSA, 4 | 5 | 11) | (ECDSA_SHA2, 2) => Some(Sha256::digest(certificate).to_vec()),
        (RSA, 12) | (ECDSA_SHA2, 3) => Some(Sha384::digest(certificate).to_vec()),
        (RSA, 13) | (ECDSA_SHA2, 4) => Some(Sha512::digest(certificate).to_vec()),
        _ => None,
    }
}

/// Returns the object identifier of a certificate's signature algorithm: Certificate ::= SEQUENCE { tbsCertificate, SEQUENCE { OID, … },
/// signature }.
fn signature_algorithm(certificate: &[u8]) -> Option<&[u8]> {
    const SEQUENCE: u8 = 0x30;
    const OBJECT_IDENTIFIER: u8 = 0x06;
    let (certificate, _) = der_value(certificate, SEQUENCE)?;
    let (_, after) = der_value(certificate, SEQUENCE)?;
    let (algorithm, _) = der_value(after, SEQUENCE)?;
    der_value(algorithm, OBJECT_IDENTIFIER).map(|(identifier, _)| identifier)
}

/// Splits the first DER value with this tag off: its content and what follows it.
fn der_value(der: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    let (&[found, length], rest) = der.split_first_chunk::<2>()?;
    if found != tag {
        return None;
    }
    let (length, rest) = match length {
        0..=0x7f => (usize::from(length), rest),
        // The long form: this many bytes of length.
        0x81..=0x84 => {
            let (bytes, rest) = rest.split_at_checked(usize::from(length & 0x7f))?;
            (bytes.iter().fold(0, |length, byte| length << 8 | usize::from(*byte)), rest)
        }
        _ => return None,
    };
    rest.split_at_checked(length)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use proptest::prelude::*;

    use super::*;

    fn resolved(url: &str) -> Result<PgTls, String> {
        let (parameters, rest) = TlsParameters::take(url);
        assert!(!rest.contains("ssl"), "{rest}");
        parameters.resolve(&rest.parse().unwrap())
    }

    #[test]
    fn another_machine_must_offer_tls_and_this_one_is_not_asked() {
        for (url, mode) in [
            ("postgres://doctor@db.example/doctor", SslMode::Require),
            ("postgres://doctor@10.0.0.1/doctor", SslMode::Require),
            ("postgres://doctor@127.0.0.1,db.example/doctor", SslMode::Require),
            ("postgres://doctor@localhost/doctor?hostaddr=10.0.0.1", SslMode::Require),
            ("postgres://doctor@127.0.0.1:5433/doctor", SslMode::Disable),
            ("postgres://doctor@[::1]/doctor", SslMode::Disable),
            ("postgres://doctor@%2Frun%2Fpostgresql/doctor", SslMode::Disable),
            ("postgres://doctor@db.example/doctor?sslmode=disable", SslMode::Disable),
            ("postgres://doctor@db.example/doctor?sslmode=prefer&connect_timeout=3", SslMode::Prefer),
            ("postgres://doctor@localhost/doctor?sslmode=verify-full", SslMode::Require),
        ] {
            assert_eq!(resolved(url).unwrap().mode(), mode, "{url}");
        }
    }

    #[test]
    fn parameters_mean_what_they_mean_to_libpq() {
        let at = |query: &str| resolved(&format!("postgres://doctor@db.example/doctor?{query}"));
        let verification = |query: &str| at(query).unwrap().verification;
        assert_eq!(verification("sslmode=require"), Verification::None);
        assert_eq!(verification("sslmode=require&sslrootcert=/ca.pem"), Verification::Authority);
        assert_eq!(verification("sslmode=verify-ca"), Verification::Authority);
        assert_eq!(verification("sslrootcert=system"), Verification::AuthorityAndHost);
        let full =
            at("sslmode=verify-full&sslrootcert=%2Fetc%2Fca%20of%20db.pem&sslcert=/c.pem&sslkey=/k.pem").unwrap();
        assert_eq!(full.root_certificate, Some("/etc/ca of db.pem".into()));
        assert_eq!(full.client, Some(("/c.pem".into(), "/k.pem".into())));
        for (query, part) in [
            ("sslmode=maybe", "disable, prefer, require, verify-ca, verify-full"),
            ("sslmode=allow", "expected one of"),
            ("sslmode", "expected one of"),
            ("sslmode=require&sslrootcert=system", "verify-full"),
            ("sslcert=/c.pem", "belong together"),
        ] {
            let error = at(query).unwrap_err();
            assert!(error.contains(part), "{query}: {error}");
        }
    }

    #[test]
    fn a_file_that_cannot_be_used_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ca.pem");
        std::fs::write(&path, "not PEM").unwrap();
        let connector = |query: &str| {
            let tls = resolved(&format!("postgres://doctor@db.example/doctor?{query}")).unwrap();
            tls.connector().map(drop).unwrap_err()
        };
        let error = connector(&format!("sslmode=verify-full&sslrootcert={}", path.display()));
        assert!(error.contains("`sslrootcert`") && error.contains("ca.pem: it contains no certificate"), "{error}");
        let error = connector("sslmode=verify-ca&sslrootcert=/nowhere/ca.pem");
        assert!(error.contains("/nowhere/ca.pem: "), "{error}");
        let error = connector("sslmode=require&sslcert=/nowhere/c.pem&sslkey=/nowhere/k.pem");
        assert!(error.contains("`sslcert` /nowhere/c.pem: "), "{error}");
        // A user who can change the file could make this client trust another server.
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();
        let error = connector(&format!("sslmode=verify-full&sslrootcert={}", path.display()));
        assert!(error.contains("chmod go-w") && error.contains("ca.pem"), "{error}");
    }

    #[test]
    fn the_channel_binding_follows_the_certificates_signature() {
        // SEQUENCE { SEQUENCE { 200 bytes }, SEQUENCE { OID ecdsa-with-SHA384 }, BIT STRING }
        let certificate = |identifier: &[u8]| {
            let algorithm =
                [&[0x30, identifier.len() as u8 + 2, 0x06, identifier.len() as u8][..], identifier].concat();
            let content = [&[0x30, 0x81, 200][..], &[0; 200], &algorithm, &[0x03, 1, 0]].concat();
            [&[0x30, 0x81, content.len() as u8][..], &content].concat()
        };
        let ecdsa = |last| [0x2a, 0x86, 0x48, 0xce, 0x3d, 0x04, 0x03, last];
        for (last, length) in [(2, Some(32)), (3, Some(48)), (4, Some(64)), (9, None)] {
            assert_eq!(server_end_point(&certificate(&ecdsa(last))).map(|hash| hash.len()), length, "{last}");
        }
        let rsa = certificate(&[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01, 0x0b]);
        assert_eq!(server_end_point(&rsa), Some(Sha256::digest(&rsa).to_vec()));
        // Ed25519 has no hash function of its own.
        assert_eq!(server_end_point(&certificate(&[0x2b, 0x65, 0x70])), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = server_end_point(&bytes);
            let text = String::from_utf8_lossy(&bytes).into_owned();
            let _ = percent_decoded(&text);
            let _ = TlsParameters::take(&text);
        }
    }
}
