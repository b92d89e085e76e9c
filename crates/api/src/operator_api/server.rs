//! The HTTP server of the API: connections, their limits, and optional TLS.

use std::{
    future::Future,
    io,
    net::{IpAddr, SocketAddr, TcpListener},
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
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::Semaphore,
    time::{Sleep, sleep, timeout},
};

use super::tls::Tls;

const MAX_CONNECTIONS: usize = 512;
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);
const MAX_HEADER_BYTES: usize = 64 << 10;
/// Maximum age of a connection; event clients reconnect by themselves.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(15 * 60);

/// A client that accepts no data for this long is disconnected.
const STALL_TIMEOUT: Duration = Duration::from_secs(20);

pub(super) fn bind(at: SocketAddr) -> io::Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind(at)?;
    listener.set_nonblocking(true)?;
    let at = listener.local_addr()?;
    Ok((listener, at))
}

/// The address of the client, which the server adds to each request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Peer(pub(super) IpAddr);

/// The router, with the address of the client.
#[derive(Debug, Clone)]
struct PeerService {
    router: TowerToHyperService<Router>,
    peer: Peer,
}

impl Service<Request<Incoming>> for PeerService {
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
            tracing::error!(%error, "API listener failed to start");
            return;
        }
    };
    let router = TowerToHyperService::new(router);
    let (permits, tls) = (Arc::new(Semaphore::new(MAX_CONNECTIONS)), tls.map(Arc::new));
    loop {
        let Ok(permit) = Arc::clone(&permits).acquire_owned().await else { return };
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                // Usually out of file descriptors: active connections will free some.
                tracing::warn!(%error, "API: accept failed");
                sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        // Responses are written whole; small ones should not be delayed by Nagle's algorithm.
        let _ignored = stream.set_nodelay(true);
        let (service, tls) = (PeerService { router: router.clone(), peer: Peer(peer.ip()) }, tls.clone());
        let stream = StallTimeout::new(stream);
        tokio::spawn(async move {
            match tls {
                None => serve_connection(stream, service).await,
                // A client that does not finish the handshake gets no response.
                Some(tls) => {
                    if let Ok(Ok(stream)) = timeout(HEADER_TIMEOUT, tls.acceptor().accept(stream)).await {
                        serve_connection(stream, service).await;
                    }
                }
            }
            drop(permit);
        });
    }
}

async fn serve_connection(stream: impl AsyncRead + AsyncWrite + Unpin, service: PeerService) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT).max_buf_size(MAX_HEADER_BYTES);
    // How a connection ends does not matter to the server.
    let _result = timeout(CONNECTION_TIMEOUT, http.serve_connection(TokioIo::new(stream), service)).await;
}

/// A stream that fails when the client accepts no data.
#[derive(Debug)]
struct StallTimeout<S> {
    stream: S,
    within: Duration,
    /// Runs while data is pending and cannot be sent.
    stalled: Option<Pin<Box<Sleep>>>,
}

impl<S> StallTimeout<S> {
    const fn new(stream: S) -> Self {
        Self { stream, within: STALL_TIMEOUT, stalled: None }
    }

    /// Returns the result of a write, or a timeout if there was no progress for too long.
    fn check_stall<T>(&mut self, context: &mut Context<'_>, sent: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if sent.is_ready() {
            self.stalled = None;
            return sent;
        }
        let within = self.within;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(sleep(within)));
        stalled.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for StallTimeout<S> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for StallTimeout<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let sent = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.check_stall(context, sent)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let sent = Pin::new(&mut self.stream).poll_write_vectored(context, pieces);
        self.check_stall(context, sent)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let sent = Pin::new(&mut self.stream).poll_flush(context);
        self.check_stall(context, sent)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let sent = Pin::new(&mut self.stream).poll_shutdown(context);
        self.check_stall(context, sent)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    #[test]
    fn a_stalled_client_times_out_and_a_slow_one_does_not() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let (near, mut far) = duplex(8);
            let mut sent = StallTimeout { within: Duration::from_millis(20), ..StallTimeout::new(near) };
            sent.write_all(b"12345678").await.unwrap();
            let stalled = sent.write_all(b"9").await;
            assert_eq!(stalled.unwrap_err().kind(), io::ErrorKind::TimedOut);
            // The timeout counts from the last accepted byte, so it starts again.
            let mut patient = StallTimeout { within: Duration::from_secs(600), ..sent };
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
