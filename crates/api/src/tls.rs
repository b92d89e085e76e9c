//! TLS of the listeners: the current certificate, reloaded when its files change.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use doctor_backend::trusted_file;
use serde::{Deserialize, Serialize};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        ServerConfig,
        crypto::ring,
        pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    },
};

/// PEM files of a certificate chain and its key. They are reloaded when they change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsFiles {
    pub certificate: PathBuf,
    pub key: PathBuf,
    /// The state directory in which the controller has made them. Its owner may be the user of the service.
    #[serde(skip)]
    pub made_in: Option<PathBuf>,
}

impl TlsFiles {
    /// Files of the site.
    pub fn new(certificate: impl Into<PathBuf>, key: impl Into<PathBuf>) -> Self {
        Self { certificate: certificate.into(), key: key.into(), made_in: None }
    }
}

/// Minimum interval between checks of the files, which happen when a client connects.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// The current certificate, and the content it was loaded from.
pub(crate) struct Tls {
    files: TlsFiles,
    loaded: Mutex<LoadedCertificate>,
}

struct LoadedCertificate {
    acceptor: TlsAcceptor,
    contents: (Vec<u8>, Vec<u8>),
    checked: Instant,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls").field("files", &self.files).finish_non_exhaustive()
    }
}

impl Tls {
    pub(crate) fn open(files: &TlsFiles) -> Result<Self, String> {
        let contents = read_files(files)?;
        let acceptor = acceptor(&contents)?;
        let loaded = Mutex::new(LoadedCertificate { acceptor, contents, checked: Instant::now() });
        Ok(Self { files: files.clone(), loaded })
    }

    /// Returns the current acceptor. Changed files that are invalid leave the last valid one in use.
    pub(crate) fn acceptor(&self) -> TlsAcceptor {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if loaded.checked.elapsed() >= CHECK_INTERVAL {
            loaded.checked = Instant::now();
            match read_files(&self.files).and_then(|contents| {
                let changed = contents != loaded.contents;
                changed.then(|| acceptor(&contents).map(|acceptor| (acceptor, contents))).transpose()
            }) {
                Ok(None) => {}
                Ok(Some((acceptor, contents))) => {
                    (loaded.acceptor, loaded.contents) = (acceptor, contents);
                    tracing::info!("certificate reloaded");
                }
                Err(error) => tracing::warn!(%error, "cannot reload the certificate; the last valid one stays in use"),
            }
        }
        loaded.acceptor.clone()
    }
}

fn read_files(files: &TlsFiles) -> Result<(Vec<u8>, Vec<u8>), String> {
    let made_in = files.made_in.as_deref();
    Ok((read(&files.certificate, made_in)?, read(&files.key, made_in)?))
}

fn read(path: &Path, made_in: Option<&Path>) -> Result<Vec<u8>, String> {
    let bytes = match made_in {
        None => trusted_file::read(path),
        Some(state) => trusted_file::read_of_service(path, state),
    };
    bytes.map_err(|error| match trusted_file::refusal(&error).filter(|refused| refused.has_foreign_owner()) {
        // Another owner of the state directory would keep the service from it.
        Some(refused) if made_in.is_some() => format!(
            "cannot read {}: {} belongs to user {}: run this as that user or as root",
            path.display(),
            refused.component.display(),
            refused.owner
        ),
        _ => format!("cannot read {}: {error}", path.display()),
    })
}

fn acceptor((chain, key): &(Vec<u8>, Vec<u8>)) -> Result<TlsAcceptor, String> {
    let certificates: Result<Vec<CertificateDer<'static>>, _> = CertificateDer::pem_slice_iter(chain).collect();
    let certificates = certificates.map_err(|error| format!("the certificate is not valid PEM: {error}"))?;
    let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| format!("the key is not valid PEM: {error}"))?;
    // Explicit: a process-wide default provider could be set by another crate.
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_no_client_auth()
        .with_single_cert(certificates, key)
        .map_err(|error| error.to_string())?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}
