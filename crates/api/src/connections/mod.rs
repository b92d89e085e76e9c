//! The connections of all listeners: how many there may be, and how long a client may take.
//!
//! Agents, the API, the probes and the metrics each have a listener with its own thread and its own limits, so that a flood of one leaves
//! the others alone. A client has not proved who it is when it connects. Therefore one address has only a part of a listener's
//! connections, a connection without a request gives way to a new one ([`registry`]), and each step of a client has a deadline: the TLS
//! handshake and the head, each piece of a body and the whole body, the time between two requests, and the acceptance of what is sent
//! ([`slow_client`]).

mod registry;
mod slow_client;

use std::{convert::Infallible, future::Future, io, net::IpAddr, pin::Pin, sync::Arc, time::Duration};

use axum::{Router, body::Body, response::Response};
use futures_util::future::select;
use hyper::{Request, body::Incoming, server::conn::http1, service::Service};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
    time::{sleep, timeout},
};
use tokio_rustls::TlsAcceptor;

pub(crate) use self::{
    registry::{ConnectionLimits, ipv6_network},
    slow_client::{BodyDeadlines, did_not_arrive},
};

use self::{
    registry::{Admission, Admitted, Connection, Registry},
    slow_client::{RequestBody, ResponseBody, StallTimeout, TimedBody},
};

const MAX_HEADER_BYTES: usize = 64 << 10;
/// The pause after a connection could not be accepted, usually for want of file descriptors: connections that end free some.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What a listener permits its clients.
#[derive(Debug, Clone)]
pub(crate) struct ListenerLimits {
    pub(crate) connections: ConnectionLimits,
    /// For the TLS handshake, for the head of a request, and between two requests.
    pub(crate) head: Duration,
    pub(crate) body: BodyDeadlines,
    /// Maximum age of a connection.
    pub(crate) age: Duration,
}

/// Returns the certificate in use for a new connection.
pub(crate) type AcceptorSource = Arc<dyn Fn() -> TlsAcceptor + Send + Sync>;

/// The address of the client, which the server adds to each request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer(pub(crate) IpAddr);

/// Serves connections until the future is dropped. `name` is for the log.
pub(crate) async fn serve(
    name: &'static str,
    listener: std::net::TcpListener,
    router: Router,
    tls: Option<AcceptorSource>,
    limits: ListenerLimits,
) {
    let listener = match TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => {
            tracing::error!(name, %error, "listener failed to start");
            return;
        }
    };
    let router = TowerToHyperService::new(router);
    let registry = Arc::new(Registry::new(limits.connections.clone()));
    let limits = Arc::new(limits);
    loop {
        let (stream, peer) = match listener.accept().await {
            Ok((stream, peer)) => (stream, peer.ip()),
            Err(error) => {
                tracing::warn!(name, %error, "accept failed");
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        // A connection that is not admitted is closed by dropping it.
        let Some(admitted) = admit(&registry, peer).await else { continue };
        // Responses are written whole; small ones should not be delayed by Nagle's algorithm.
        let _ignored = stream.set_nodelay(true);
        let service = ConnectionService {
            router: router.clone(),
            peer: Peer(peer),
            connection: Arc::clone(&admitted.connection),
            body: limits.body,
        };
        let (limits, tls) = (Arc::clone(&limits), tls.clone());
        tokio::spawn(async move {
            let serving = Box::pin(serve_stream(StallTimeout::new(stream), tls, service, &limits));
            let displaced = Box::pin(admitted.connection.displaced());
            drop(select(serving, displaced).await);
            drop(admitted);
        });
    }
}

/// Admits a connection. While there are as many requests as there may be, it waits, and with it all that come after. Returns `None` if
/// its address has too many.
async fn admit(registry: &Arc<Registry>, peer: IpAddr) -> Option<Admitted> {
    loop {
        match registry.admit(peer) {
            Admission::Admitted(admitted) => return Some(admitted),
            Admission::AddressFull => return None,
            Admission::Full => registry.one_ended().await,
        }
    }
}

async fn serve_stream(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    tls: Option<AcceptorSource>,
    service: ConnectionService,
    limits: &ListenerLimits,
) {
    match tls {
        None => serve_http(stream, service, limits).await,
        // A client that does not finish the handshake gets no response.
        Some(acceptor) => match timeout(limits.head, acceptor().accept(stream)).await {
            Ok(Ok(stream)) => serve_http(stream, service, limits).await,
            // Debug only: any client can connect, and a line for each would let it fill the disk.
            Ok(Err(error)) => tracing::debug!(%error, "TLS handshake failed"),
            Err(_) => tracing::debug!("TLS handshake timed out"),
        },
    }
}

async fn serve_http(stream: impl AsyncRead + AsyncWrite + Unpin, service: ConnectionService, limits: &ListenerLimits) {
    // How a connection ends does not matter to the server: a client repeats what was not answered.
    let serving = http_builder(limits).serve_connection(TokioIo::new(stream), service);
    let _result = timeout(limits.age, serving).await;
}

fn http_builder(limits: &ListenerLimits) -> http1::Builder {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(limits.head).max_buf_size(MAX_HEADER_BYTES);
    http
}

/// Serves one connection outside of a listener, for the fuzz targets. Its client has closed the writing half already.
pub(crate) async fn serve_half_closed(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    router: TowerToHyperService<Router>,
    limits: &ListenerLimits,
) {
    let peer = IpAddr::from([127, 0, 0, 1]);
    let registry = Arc::new(Registry::new(limits.connections.clone()));
    let Admission::Admitted(admitted) = registry.admit(peer) else { return };
    let connection = Arc::clone(&admitted.connection);
    let service = ConnectionService { router, peer: Peer(peer), connection, body: limits.body };
    let serving = http_builder(limits).half_close(true).serve_connection(TokioIo::new(stream), service);
    let _result = timeout(limits.age, serving).await;
}

/// The router for one connection: adds the client's address, the deadlines of the body, and what counts as a request in progress.
#[derive(Debug, Clone)]
struct ConnectionService {
    router: TowerToHyperService<Router>,
    peer: Peer,
    connection: Arc<Connection>,
    body: BodyDeadlines,
}

impl Service<Request<Incoming>> for ConnectionService {
    type Response = Response;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

    fn call(&self, mut request: Request<Incoming>) -> Self::Future {
        let in_progress = self.connection.begin_request();
        request.extensions_mut().insert(self.peer);
        let deadlines = self.body;
        let request: Request<RequestBody> = request.map(|body| TimedBody::new(body, deadlines));
        let response = self.router.call(request);
        Box::pin(async move {
            let response = response.await?;
            Ok(response.map(|body| Body::new(ResponseBody { body, _request: in_progress })))
        })
    }
}

/// Binds an address, for [`serve`].
pub(crate) fn bind(at: std::net::SocketAddr) -> io::Result<std::net::TcpListener> {
    let listener = std::net::TcpListener::bind(at)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}
