//! The HTTP API: the views and commands of the command line, for programs and the dashboard.
//!
//! Reading. Responses are the views that the command line prints, over one cluster state that is rebuilt after each
//! cycle ([`fleet_view`]). A response is made once for all identical requests, in plain and gzip form ([`cached_response`]), so that
//! a hundred readers of ten thousand nodes cost what one does. All endpoints are in one table ([`routes`]), which the
//! server, the description ([`openapi`](self::openapi())) and the tests use.
//!
//! Acting. Commands are those of the command line ([`doctor_engine::operator_commands`]), shown for confirmation before they are
//! carried out and written to the audit trail ([`actions`]). Reading commands of the command line run here too, for clients without
//! access to the store ([`cli`]). Authentication and roles are in one place ([`auth`]).
//!
//! Everything has a limit: connections, headers, bodies, pages, time, cached memory.

mod action_request;
mod actions;
mod audit;
mod audit_throttle;
mod auth;
mod budget;
mod cases;
mod cli;
mod cli_handler;
mod config;
mod confirmations;
mod endpoint;
mod error;
mod events;
mod findings;
mod fleet;
mod fleet_view;
pub(super) mod fuzz_targets;
mod history;
mod json_response;
mod limits;
mod measurement_cache;
mod measurements;
mod nodes;
mod openapi;
mod params;
mod plan;
mod proxy_secret;
mod response_cache;
mod routes;
mod runs;
mod schema;
mod state;
mod status;
mod test_catalog;
mod view_refresh;
mod worker_pool;

use std::{
    io,
    net::{IpAddr, SocketAddr, TcpListener},
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};

use axum::{
    Router,
    extract::{FromRequestParts, MatchedPath, RawPathParams, Request},
    http::{HeaderMap, HeaderName, HeaderValue, header},
    middleware::{Next, from_fn, map_response},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use doctor_engine::{
    snapshot_feed::SnapshotFeed,
    spans::{self, span},
};
use doctor_store::{StoreError, access::Role};
use serde_json::json;
use tokio::{
    sync::oneshot,
    time::{Instant, timeout_at},
};
use tracing::{Instrument, field::Empty};

use self::{
    auth::Caller,
    endpoint::{RequestContext, Route},
    error::ApiError,
    events::AuthorisationCheck,
    fleet_view::FleetView,
    limits::REQUEST_TIMEOUT,
    params::RequestParams,
    proxy_secret::ProxySecret,
    routes::ROUTES,
    state::ApiState,
};
use super::{
    connections::{self, AcceptorSource, BodyDeadlines, ConnectionLimits, ListenerLimits, Peer},
    dashboard,
    response::{RawBody, SharedResponse},
    tls,
};

pub use super::tls::TlsFiles;

pub use self::{
    action_request::ActionKind,
    auth::Proxy,
    cli_handler::{CliCall, CliError, CliHandler, CliOutput},
    config::{InvalidWebConfig, WebConfig},
    openapi::{openapi, openapi_text},
    state::ApiDeps,
};

#[derive(Debug, thiserror::Error)]
pub enum ApiServerError {
    #[error("cannot listen on {at} for the API")]
    Listen { at: SocketAddr, source: io::Error },
    #[error("cannot start the API server")]
    Start(#[source] io::Error),
    #[error("the API cannot read the store")]
    Store(#[from] StoreError),
    #[error(
        "remote clients could read without authentication on {0}: create a token (`doctor token create NAME`), set [web.proxy], \
         or listen on 127.0.0.1"
    )]
    Unauthenticated(SocketAddr),
    #[error(
        "tokens would cross the network unencrypted on {0}: set [web.tls], use a proxy and set [web.proxy], listen on 127.0.0.1, or \
         set `plain = true` in [web] if the network is trusted"
    )]
    Unencrypted(SocketAddr),
    #[error("cannot use the certificate and key of [web.tls]: {0}")]
    Tls(String),
    #[error("cannot use `proxy.secret` of [web]: {0}")]
    ProxySecret(String),
}

const MAX_CONNECTIONS: usize = 512;

/// The API server. Dropping it closes the listener.
#[derive(Debug)]
pub struct ApiServer {
    addr: SocketAddr,
    snapshot_feed: Arc<SnapshotFeed>,
    close: Option<oneshot::Sender<()>>,
    threads: Vec<JoinHandle<()>>,
}

/// Refuses settings with which remote clients could read without a token, or tokens could be read on the way.
fn check_access(
    config: &WebConfig,
    has_tokens: impl FnOnce() -> Result<bool, StoreError>,
) -> Result<(), ApiServerError> {
    let loopback = config.listen.ip().is_loopback();
    if !loopback && config.proxy.is_none() && !has_tokens()? {
        return Err(ApiServerError::Unauthenticated(config.listen));
    }
    if config.is_unencrypted() && !config.plain {
        return Err(ApiServerError::Unencrypted(config.listen));
    }
    Ok(())
}

impl ApiServer {
    /// Checks that the server could start: who may read, the certificate, and the address, which stays bound until the
    /// returned listener is dropped. `has_tokens`: whether the store has a token.
    ///
    /// # Errors
    /// Those of [`Self::open`].
    pub fn verify(config: &WebConfig, has_tokens: bool) -> Result<TcpListener, ApiServerError> {
        check_access(config, || Ok(has_tokens))?;
        read_proxy_secret(config)?;
        config.tls.as_ref().map(tls::Tls::open).transpose().map_err(ApiServerError::Tls)?;
        TcpListener::bind(config.listen).map_err(|source| ApiServerError::Listen { at: config.listen, source })
    }

    /// # Errors
    /// If the address cannot be bound, if remote clients could read without authentication, or if the store fails.
    pub fn open(config: &WebConfig, deps: ApiDeps) -> Result<Self, ApiServerError> {
        let has_tokens = || match deps.store.tokens() {
            // Unknown until this controller has migrated the store; without a token each request is refused.
            Err(error) if error.awaits_migration() => Ok(true),
            tokens => Ok(!tokens?.is_empty()),
        };
        check_access(config, has_tokens)?;
        if config.is_unencrypted() {
            tracing::warn!(listen = %config.listen, "tokens cross the network unencrypted (`plain = true` in [web])");
        }
        let tls = config.tls.as_ref().map(tls::Tls::open).transpose().map_err(ApiServerError::Tls)?;
        let tls = tls.map(|tls| -> AcceptorSource { Arc::new(move || tls.acceptor()) });
        let refused = |source| ApiServerError::Listen { at: config.listen, source };
        let listener = connections::bind(config.listen).map_err(refused)?;
        let at = listener.local_addr().map_err(refused)?;
        let limits = listener_limits(config);
        let (feed, settings) = (Arc::clone(&deps.snapshot_feed), deps.settings.clone());
        let state = Arc::new(api_state(config, deps)?);
        let (close, closed) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .max_blocking_threads(worker_pool::THREADS)
            .thread_name("doctor-web")
            .build()
            .map_err(ApiServerError::Start)?;
        let router = router(&state);
        let serving = move || {
            runtime.block_on(async {
                let serving = tokio::spawn(connections::serve("doctor-web", listener, router, tls, limits));
                // An error means that the sender was dropped, which also closes the server.
                let _closed = closed.await;
                serving.abort();
            });
            runtime.shutdown_timeout(Duration::from_secs(1));
        };
        let loop_feed = Arc::clone(&feed);
        let refresh = move || view_refresh::refresh_loop(&state, &loop_feed, &settings);
        let start =
            |name: &str, body: Box<dyn FnOnce() + Send>| thread::Builder::new().name(name.to_owned()).spawn(body);
        let threads = vec![
            start("doctor-view", Box::new(refresh)).map_err(ApiServerError::Start)?,
            start("doctor-web", Box::new(serving)).map_err(ApiServerError::Start)?,
        ];
        Ok(Self { addr: at, snapshot_feed: feed, close: Some(close), threads })
    }

    pub const fn address(&self) -> SocketAddr {
        self.addr
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.snapshot_feed.close();
        drop(self.close.take());
        for thread in self.threads.drain(..) {
            // The thread returns nothing.
            let _result = thread.join();
        }
    }
}

/// Returns the limits of the API's listener. An event stream is a connection for as long as a page is open.
fn listener_limits(config: &WebConfig) -> ListenerLimits {
    let shared_addresses = config.proxy.as_ref().map(|proxy| proxy.from.clone()).unwrap_or_default();
    ListenerLimits {
        connections: ConnectionLimits {
            total: MAX_CONNECTIONS,
            per_address: super::CONNECTIONS_PER_ADDRESS,
            shared_addresses,
        },
        head: Duration::from_secs(10),
        body: BodyDeadlines { piece: Duration::from_secs(5), whole: REQUEST_TIMEOUT },
        // Event clients reconnect by themselves.
        age: Duration::from_secs(15 * 60),
    }
}

fn read_proxy_secret(config: &WebConfig) -> Result<Option<ProxySecret>, ApiServerError> {
    let secret = config.proxy.as_ref().map(|proxy| ProxySecret::open(proxy.secret.as_ref()));
    secret.transpose().map_err(ApiServerError::ProxySecret)
}

fn api_state(config: &WebConfig, deps: ApiDeps) -> Result<ApiState, ApiServerError> {
    let mut key = [0; 32];
    getrandom::fill(&mut key).map_err(|error| ApiServerError::Start(io::Error::other(error)))?;
    Ok(ApiState::new(
        config,
        read_proxy_secret(config)?,
        deps,
        key,
        ROUTES.iter().map(|route| route.name).chain([cli::NAME]),
    )?)
}

fn peer(request: &Request) -> IpAddr {
    // Without an address, a request does not count as local.
    request.extensions().get::<Peer>().map_or(IpAddr::from([0, 0, 0, 0]), |Peer(peer)| *peer)
}

fn router(state: &Arc<ApiState>) -> Router {
    let mut router = dashboard::routes();
    for route in ROUTES {
        let state = Arc::clone(state);
        let handler = move |request: Request| respond_cached(Arc::clone(&state), route, request);
        router = router.route(&format!("/api/v1{}", route.path), get(handler));
    }
    for action in ActionKind::ALL {
        let state = Arc::clone(state);
        let handler = move |request: Request| {
            let (state, from) = (Arc::clone(&state), peer(&request));
            let (parts, body) = request.into_parts();
            actions::handle_action(state, action, from, parts.headers, body)
        };
        router = router.route(&format!("/api/v1/actions/{}", action.name()), post(handler));
    }
    let cli_state = Arc::clone(state);
    let run_cli = move |request: Request| {
        let (state, from) = (Arc::clone(&cli_state), peer(&request));
        let (parts, body) = request.into_parts();
        cli::handle(state, from, parts.headers, body)
    };
    let events_state = Arc::clone(state);
    let with = |state: &Arc<ApiState>, handler: fn(&ApiState, &Caller, &Request) -> Result<Response, ApiError>| {
        let state = Arc::clone(state);
        get(move |request: Request| respond_uncached(Arc::clone(&state), handler, request))
    };
    router
        .route("/api/v1/events", get(move |request: Request| stream_events(Arc::clone(&events_state), request)))
        .route("/api/v1/cli", post(run_cli))
        .route("/api/v1/whoami", with(state, whoami))
        .route("/api/v1/openapi.json", with(state, |_, _, request| respond(RawBody::json(&openapi())?, request)))
        .route(
            "/api/v1/",
            with(state, |_, _, request| {
                respond(RawBody::text("text/html; charset=utf-8", openapi::html_page()), request)
            }),
        )
        .fallback(|| async { ApiError::NotFound })
        .method_not_allowed_fallback(|request: Request| async move {
            ApiError::MethodNotAllowed { method: request.method().to_string() }
        })
        .layer(map_response(add_security_headers))
        .layer(from_fn(trace_request))
}

/// Returns the header `traceparent`, if there is exactly one.
fn traceparent(headers: &HeaderMap) -> Option<&str> {
    let mut values = headers.get_all("traceparent").iter();
    values.next().filter(|_| values.next().is_none())?.to_str().ok()
}

/// Wraps a request in a span of the trace that its `traceparent` names. The span has the matched route, because the
/// path may contain anything.
async fn trace_request(request: Request, next: Next) -> Response {
    if !request.uri().path().starts_with("/api/") {
        return next.run(request).await;
    }
    let route = request.extensions().get::<MatchedPath>().map_or("elsewhere", MatchedPath::as_str);
    let span = span!(
        "api",
        otel.name = %format_args!("{} {route}", request.method()),
        otel.kind = "server",
        http.request.method = %request.method(),
        http.route = route,
        http.response.status_code = Empty,
        traceparent = traceparent(request.headers()),
        failed = Empty
    );
    let response = next.run(request).instrument(span.clone()).await;
    let status = response.status();
    span.record("http.response.status_code", u64::from(status.as_u16()));
    if status.is_server_error() {
        spans::record_failure(&span, &status);
    }
    response
}

fn respond(body: RawBody, request: &Request) -> Result<Response, ApiError> {
    Ok(SharedResponse::new(body).respond_to(request.headers()))
}

fn whoami(_: &ApiState, caller: &Caller, request: &Request) -> Result<Response, ApiError> {
    let may_act = caller.authenticated && caller.role >= Role::Operator;
    let identity =
        json!({ "name": caller.name, "role": caller.role, "known": caller.authenticated, "may_act": may_act });
    respond(RawBody::json(&identity)?, request)
}

/// Streams events, for as long as the client is authorised.
async fn stream_events(state: Arc<ApiState>, request: Request) -> Response {
    let (from, headers) = (peer(&request), request.headers().clone());
    let params = RequestParams::parse(&[], std::iter::empty(), request.uri().query());
    let caller = state.auth.authenticate(from, &headers).await;
    let result = caller.and_then(|caller| {
        params?;
        let (check_state, last) = (Arc::clone(&state), headers.get("last-event-id").and_then(|id| id.to_str().ok()));
        let (expected, check_headers) = (caller.clone(), headers.clone());
        let is_authorised: AuthorisationCheck = Box::new(move || {
            let (check_state, expected, check_headers) =
                (Arc::clone(&check_state), expected.clone(), check_headers.clone());
            Box::pin(async move {
                check_state.auth.authenticate(from, &check_headers).await.is_ok_and(|current| current == expected)
            })
        });
        state.events.serve(last, &caller.name, is_authorised)
    });
    result.unwrap_or_else(|error| {
        state.audit_throttle.log_unknown_client(from, request.uri().path(), &error);
        error.into_response()
    })
}

/// Answers cheap requests that are specific to the caller and not cached.
async fn respond_uncached(
    state: Arc<ApiState>,
    handler: fn(&ApiState, &Caller, &Request) -> Result<Response, ApiError>,
    request: Request,
) -> Response {
    let from = peer(&request);
    let caller = state.auth.authenticate(from, request.headers()).await;
    let result = caller.and_then(|caller| {
        RequestParams::parse(&[], std::iter::empty(), request.uri().query())?;
        handler(&state, &caller, &request)
    });
    result.unwrap_or_else(|error| {
        state.audit_throttle.log_unknown_client(from, request.uri().path(), &error);
        error.into_response()
    })
}

/// Serves one endpoint of the table: from the cache, or made by the first request.
async fn respond_cached(state: Arc<ApiState>, route: &'static Route, request: Request) -> Response {
    let from = peer(&request);
    let (mut parts, _) = request.into_parts();
    let result = async {
        state.auth.authenticate(from, &parts.headers).await?;
        let path = RawPathParams::from_request_parts(&mut parts, &()).await.map_err(|_| ApiError::NotFound)?;
        let params = RequestParams::parse(route.params, path.iter(), parts.uri.query())?;
        cached_response(&state, route, params).await
    };
    match result.await {
        Ok((shared, view)) => {
            let mut response = shared.respond_to(&parts.headers);
            view.add_headers(response.headers_mut());
            response
        }
        Err(error) => {
            state.audit_throttle.log_unknown_client(from, parts.uri.path(), &error);
            error.into_response()
        }
    }
}

/// Returns the response, and the cluster state it was made from.
async fn cached_response(
    state: &Arc<ApiState>,
    route: &'static Route,
    params: RequestParams,
) -> Result<(SharedResponse, Arc<FleetView>), ApiError> {
    let until = Instant::now() + REQUEST_TIMEOUT;
    let entry = state.response_cache.entry(params.key(route.path));
    let mut cached = timeout_at(until, entry.lock()).await.map_err(|_| ApiError::Overloaded)?;
    let view = state.fleet_view();
    if let Some(cached) = cached.as_ref().filter(|cached| cached.is_fresh(view.number, route.cache_policy)) {
        return Ok((cached.response.clone(), view));
    }
    state.response_cache.evict(&mut cached);
    let (worker_state, worker_view) = (Arc::clone(state), Arc::clone(&view));
    let span = span!("api.make");
    let read = move || {
        let store = worker_state.store.with_deadline(until.into_std());
        let body = (route.handler)(&RequestContext {
            state: &worker_state,
            store,
            fleet_view: &worker_view,
            params: &params,
            route,
        })?;
        worker_state.response_cache.reserve(body)
    };
    let response =
        state.workers.run_read((route.name, route.cache_policy), until, move || span.in_scope(read)).await??;
    state.response_cache.insert(&mut cached, response.clone(), view.number);
    Ok((response, view))
}

/// Adds security headers to every response: no framing, no content sniffing, no referrer.
async fn add_security_headers(mut response: Response) -> Response {
    let headers = response.headers_mut();
    // The dashboard's page has its own policy.
    headers.entry(header::CONTENT_SECURITY_POLICY).or_insert(HeaderValue::from_static(
        "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    ));
    for (name, value) in [
        ("x-content-type-options", "nosniff"),
        ("referrer-policy", "no-referrer"),
        ("cross-origin-resource-policy", "same-origin"),
        ("x-frame-options", "DENY"),
    ] {
        headers.insert(HeaderName::from_static(name), HeaderValue::from_static(value));
    }
    headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    response
}
