//! The server under the API: connections, their limits, and TLS where it is wanted.

use std::{
    future::Future,
    io,
    net::{SocketAddr, TcpListener},
    path::PathBuf,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
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
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::Semaphore,
    time::{Sleep, sleep, timeout},
};

use super::Peer;

const CONNECTIONS: usize = 512;
const HEADERS: Duration = Duration::from_secs(10);
const MOST_HEADERS: usize = 64 << 10;
/// A connection that is older is closed; whoever listens to events connects again by itself.
const CONNECTION: Duration = Duration::from_secs(15 * 60);

/// Whoever takes nothing of what is sent for so long is not there any more.
const STALLED: Duration = Duration::from_secs(20);

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
                sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        // Answers are written at once, and small ones should not wait for more.
        let _as_it_is = stream.set_nodelay(true);
        let (told, tls) = (Told { router: router.clone(), peer: Peer(from.ip()) }, tls.clone());
        let stream = Patient::new(stream);
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

/// A connection that ends when the other side takes nothing of what is sent.
#[derive(Debug)]
struct Patient<S> {
    stream: S,
    within: Duration,
    /// Runs while something is to be sent and cannot.
    stalled: Option<Pin<Box<Sleep>>>,
}

impl<S> Patient<S> {
    const fn new(stream: S) -> Self {
        Self { stream, within: STALLED, stalled: None }
    }

    /// What came of sending, or that there was no progress for too long.
    fn judge<T>(&mut self, context: &mut Context<'_>, sent: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if sent.is_ready() {
            self.stalled = None;
            return sent;
        }
        let within = self.within;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(sleep(within)));
        stalled.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patient<S> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patient<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let sent = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.judge(context, sent)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let sent = Pin::new(&mut self.stream).poll_write_vectored(context, pieces);
        self.judge(context, sent)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let sent = Pin::new(&mut self.stream).poll_flush(context);
        self.judge(context, sent)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let sent = Pin::new(&mut self.stream).poll_shutdown(context);
        self.judge(context, sent)
    }
}

#[cfg(feature = "tls")]
pub(super) use with_tls::Tls;
#[cfg(not(feature = "tls"))]
pub(super) use without_tls::Tls;

#[cfg(not(feature = "tls"))]
mod without_tls {
    use tokio::net::TcpStream;

    use super::{Patient, TlsFiles, Told};

    /// This program was built without TLS.
    #[derive(Debug)]
    pub(in crate::web::api) enum Tls {}

    impl Tls {
        pub(in crate::web::api) fn open(_: &TlsFiles) -> Result<Self, String> {
            Err("this program was built without TLS: build it with `--features tls`, or let a proxy speak it"
                .to_owned())
        }

        #[expect(clippy::unused_async, reason = "it has the shape of the one that does something")]
        pub(super) async fn converse(&self, _: Patient<TcpStream>, _: Told) {
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

    use super::{HEADERS, Patient, TlsFiles, Told, converse};

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

        pub(super) async fn converse(&self, stream: Patient<TcpStream>, told: Told) {
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

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    #[test]
    fn who_takes_nothing_is_not_waited_for_and_who_is_slow_is() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let (near, mut far) = duplex(8);
            let mut sent = Patient { within: Duration::from_millis(20), ..Patient::new(near) };
            sent.write_all(b"12345678").await.unwrap();
            let stalled = sent.write_all(b"9").await;
            assert_eq!(stalled.unwrap_err().kind(), io::ErrorKind::TimedOut);
            // The time counts from the last byte that was taken, so it runs anew.
            let mut patient = Patient { within: Duration::from_secs(600), ..sent };
            patient.stalled = None;
            let reading = async {
                let mut taken = [0; 9];
                far.read_exact(&mut taken).await.map(|_| taken)
            };
            let (written, read) = futures_util::future::join(patient.write_all(b"9"), reading).await;
            written.unwrap();
            assert_eq!(&read.unwrap(), b"123456789");
        });
    }
}
