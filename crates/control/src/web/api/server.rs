//! The server under the API: connections, their limits, and TLS where it is wanted.

use std::{
    io,
    net::{SocketAddr, TcpListener},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use axum::{Router, body::Body};
use hyper::{Request, body::Incoming, server::conn::http1, service::Service};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::Semaphore,
    time::timeout,
};

use super::Peer;

const CONNECTIONS: usize = 512;
const HEADERS: Duration = Duration::from_secs(10);
const MOST_HEADERS: usize = 64 << 10;
/// A connection that is older is closed; whoever listens to events connects again by itself.
const CONNECTION: Duration = Duration::from_secs(15 * 60);

/// The files of a certificate chain and its key, in PEM. They are read again when they change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsFiles {
    pub certificate: PathBuf,
    pub key: PathBuf,
}

pub(super) fn bind(at: SocketAddr) -> io::Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind(at)?;
    listener.set_nonblocking(true)?;
    let at = listener.local_addr()?;
    Ok((listener, at))
}

/// The router, told from where each request comes.
#[derive(Debug, Clone)]
struct Told {
    router: TowerToHyperService<Router>,
    peer: Peer,
}

impl Service<Request<Incoming>> for Told {
    type Response = axum::response::Response<Body>;
    type Error = std::convert::Infallible;
    type Future = <TowerToHyperService<Router> as Service<Request<Incoming>>>::Future;

    fn call(&self, mut request: Request<Incoming>) -> Self::Future {
        request.extensions_mut().insert(self.peer);
        self.router.call(request)
    }
}

pub(super) async fn serve(listener: TcpListener, router: Router, tls: Option<Tls>) {
    let listener = match tokio::net::TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => {
            tracing::error!(%error, "the API cannot be opened");
            return;
        }
    };
    let router = TowerToHyperService::new(router);
    let (places, tls) = (Arc::new(Semaphore::new(CONNECTIONS)), tls.map(Arc::new));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        let (stream, from) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of descriptors, usually: those that are served give theirs back.
                tracing::warn!(%error, "a connection to the API could not be accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        // Answers are written at once, and small ones should not wait for more.
        let _as_it_is = stream.set_nodelay(true);
        let (told, tls) = (Told { router: router.clone(), peer: Peer(from.ip()) }, tls.clone());
        tokio::spawn(async move {
            match tls {
                None => converse(stream, told).await,
                Some(tls) => tls.converse(stream, told).await,
            }
            drop(place);
        });
    }
}

async fn converse(stream: impl AsyncRead + AsyncWrite + Unpin, told: Told) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEADERS).max_buf_size(MOST_HEADERS);
    // How a connection ends is the other side's business.
    let _over = timeout(CONNECTION, http.serve_connection(TokioIo::new(stream), told)).await;
}

#[cfg(feature = "tls")]
pub(super) use with_tls::Tls;
#[cfg(not(feature = "tls"))]
pub(super) use without_tls::Tls;

#[cfg(not(feature = "tls"))]
mod without_tls {
    use tokio::net::TcpStream;

    use super::{TlsFiles, Told};

    /// This program was built without TLS.
    #[derive(Debug)]
    pub(in crate::web::api) enum Tls {}

    impl Tls {
        pub(in crate::web::api) fn open(_: &TlsFiles) -> Result<Self, String> {
            Err("this program was built without TLS: build it with `--features tls`, or let a proxy speak it"
                .to_owned())
        }

        #[expect(clippy::unused_async, reason = "it has the shape of the one that does something")]
        pub(super) async fn converse(&self, _: TcpStream, _: Told) {
            match *self {}
        }
    }
}

#[cfg(feature = "tls")]
mod with_tls {
    use std::{
        fs, io,
        path::Path,
        sync::{Arc, Mutex, PoisonError},
        time::{Duration, Instant},
    };

    use tokio::{net::TcpStream, time::timeout};
    use tokio_rustls::{
        TlsAcceptor,
        rustls::{
            ServerConfig,
            crypto::ring,
            pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
        },
    };

    use super::{HEADERS, TlsFiles, Told, converse};

    /// How often the files are looked at, at most: when somebody connects.
    const LOOK_EVERY: Duration = Duration::from_secs(5);
    /// No chain or key is longer.
    const LONGEST: u64 = 1 << 20;

    /// The certificate in use, and what was read of it.
    pub(in crate::web::api) struct Tls {
        files: TlsFiles,
        used: Mutex<Used>,
    }

    struct Used {
        acceptor: TlsAcceptor,
        texts: (Vec<u8>, Vec<u8>),
        looked: Instant,
    }

    impl std::fmt::Debug for Tls {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.debug_struct("Tls").field("files", &self.files).finish_non_exhaustive()
        }
    }

    impl Tls {
        pub(in crate::web::api) fn open(files: &TlsFiles) -> Result<Self, String> {
            let texts = texts(files)?;
            let acceptor = acceptor(&texts)?;
            let used = Mutex::new(Used { acceptor, texts, looked: Instant::now() });
            Ok(Self { files: files.clone(), used })
        }

        /// The present one. Files that changed and cannot be used leave the last good one in force.
        fn acceptor(&self) -> TlsAcceptor {
            let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
            if used.looked.elapsed() >= LOOK_EVERY {
                used.looked = Instant::now();
                match texts(&self.files).and_then(|texts| {
                    let changed = texts != used.texts;
                    changed.then(|| acceptor(&texts).map(|acceptor| (acceptor, texts))).transpose()
                }) {
                    Ok(None) => {}
                    Ok(Some((acceptor, texts))) => {
                        (used.acceptor, used.texts) = (acceptor, texts);
                        tracing::info!("the changed certificate is in use");
                    }
                    Err(error) => tracing::warn!("the changed certificate is not used, the last good one is: {error}"),
                }
            }
            used.acceptor.clone()
        }

        pub(super) async fn converse(&self, stream: TcpStream, told: Told) {
            // Whoever does not get through has nothing to be told.
            if let Ok(Ok(stream)) = timeout(HEADERS, self.acceptor().accept(stream)).await {
                converse(stream, told).await;
            }
        }
    }

    fn texts(files: &TlsFiles) -> Result<(Vec<u8>, Vec<u8>), String> {
        Ok((read(&files.certificate)?, read(&files.key)?))
    }

    fn read(path: &Path) -> Result<Vec<u8>, String> {
        let fail = |error: io::Error| format!("reading {}: {error}", path.display());
        if fs::metadata(path).map_err(fail)?.len() > LONGEST {
            return Err(format!("{} is longer than {LONGEST} bytes", path.display()));
        }
        fs::read(path).map_err(fail)
    }

    fn acceptor((chain, key): &(Vec<u8>, Vec<u8>)) -> Result<TlsAcceptor, String> {
        let certificates: Result<Vec<CertificateDer<'static>>, _> = CertificateDer::pem_slice_iter(chain).collect();
        let certificates = certificates.map_err(|error| format!("the certificate is no PEM: {error}"))?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| format!("the key is no PEM: {error}"))?;
        // The provider is named: another one in this program would not be ours to choose.
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?
            .with_no_client_auth()
            .with_single_cert(certificates, key)
            .map_err(|error| error.to_string())?;
        Ok(TlsAcceptor::from(Arc::new(config)))
    }
}
