//! Authentication and authorisation.
//!
//! A client presents a token in the Authorization header, or a user name set by a proxy whose address the configuration
//! lists and which shares a secret with us. While no token was ever created and no proxy is configured, local clients
//! may read, if the Host header names this machine: a page of another site whose name was made to resolve here sends its
//! own host. There are no cookies, so a browser lends no authority to another site; the identity that a proxy adds is
//! protected by checking which origin sends the request.

use std::{
    net::IpAddr,
    time::{Duration, Instant},
};

use doctor_backend::{
    clock::{Clock, SystemClock},
    secret::SecretSource,
};
use doctor_store::{
    Store,
    access::{Role, TokenRow, find_token},
};

use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use serde::{Deserialize, Serialize};
use tokio::{
    sync::Mutex,
    time::{Instant as Moment, timeout_at},
};

use super::{error::ApiError, proxy_secret::ProxySecret, worker_pool::WorkerPool};

/// Maximum time for which a revoked token is still accepted.
const TOKEN_CACHE_TTL: Duration = Duration::from_secs(1);
/// Deadline for reloading the tokens. It waits for no writer and no other request.
const TOKEN_READ_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum length of a user name from a proxy.
const MAX_USER_NAME: usize = 128;

/// An authenticating reverse proxy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Proxy {
    /// Addresses from which the user name is trusted.
    pub from: Vec<IpAddr>,
    /// What the proxy sends in `x-doctor-proxy-secret`: an address alone proves nothing. Required; `None` is refused with an
    /// explanation.
    #[serde(default)]
    pub secret: Option<SecretSource>,
    /// Header with the user name.
    #[serde(default = "usual_header")]
    pub header: String,
    /// Users with the operator role; all others are viewers.
    #[serde(default)]
    pub operators: Vec<String>,
}

/// Why a proxy without a secret is refused, and how to add one.
const NO_PROXY_SECRET: &str = "`proxy.secret` is missing: other processes have the proxy's address too. \
    Create a secret (`openssl rand -hex 32 > proxy.secret`), add `secret = { file = \"proxy.secret\" }` to `proxy`, and have the \
    proxy send it in the header X-Doctor-Proxy-Secret";

fn usual_header() -> String {
    "x-forwarded-user".to_owned()
}

impl Proxy {
    /// Returns what is invalid, if anything.
    pub(super) fn invalid_setting(&self) -> Option<&'static str> {
        match self.header.parse::<HeaderName>() {
            Ok(name) if name == header::AUTHORIZATION => Some("`proxy.header` cannot be Authorization"),
            Ok(name) if name == super::proxy_secret::HEADER => {
                Some("`proxy.header` cannot be the header of the secret")
            }
            Ok(_) if self.secret.is_none() => Some(NO_PROXY_SECRET),
            Ok(_) if self.from.is_empty() => Some("`proxy.from` lists no address: no user name would be accepted"),
            Ok(_) => None,
            Err(_) => Some("`proxy.header` is not a header name such as x-forwarded-user"),
        }
    }
}

/// An identified client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Caller {
    /// As written to the audit trail.
    pub(super) name: String,
    pub(super) role: Role,
    /// Whether the client was authenticated.
    pub(super) authenticated: bool,
}

#[derive(Debug)]
pub(super) struct Authenticator {
    store: Store,
    proxy: Option<(Proxy, ProxySecret)>,
    /// The API listens on loopback only.
    loopback: bool,
    tokens: Mutex<Option<(Instant, Vec<TokenRow>)>>,
    /// Worker that loads tokens.
    token_reader: WorkerPool,
}

impl Authenticator {
    pub(super) fn new(store: Store, proxy: Option<(Proxy, ProxySecret)>, loopback: bool) -> Self {
        Self { store, proxy, loopback, tokens: Mutex::default(), token_reader: WorkerPool::new(1) }
    }

    /// Identifies a client by its address and headers.
    pub(super) async fn authenticate(&self, peer: IpAddr, headers: &HeaderMap) -> Result<Caller, ApiError> {
        if let Some(value) = headers.get(header::AUTHORIZATION) {
            return self.authenticate_token(value).await;
        }
        if let Some((proxy, secret)) = &self.proxy
            && headers.contains_key(proxy.header.as_str())
        {
            return authenticate_proxy(proxy, secret, peer, headers);
        }
        let unauthenticated = self.loopback && self.proxy.is_none() && self.with_tokens(<[TokenRow]>::is_empty).await?;
        if !unauthenticated || !peer.is_loopback() {
            return Err(ApiError::SignInRequired);
        }
        let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
        if !is_loopback_host(host) {
            return Err(ApiError::HostNotAllowed(host.chars().take(64).collect()));
        }
        Ok(Caller { name: "local client".to_owned(), role: Role::Viewer, authenticated: false })
    }

    async fn authenticate_token(&self, value: &HeaderValue) -> Result<Caller, ApiError> {
        let token =
            value.to_str().ok().and_then(|text| text.strip_prefix("Bearer ")).ok_or(ApiError::SignInRequired)?;
        let now = SystemClock.now();
        let found = self.with_tokens(|tokens| {
            find_token(tokens, token, now).map(|row| Caller {
                name: row.name.clone(),
                role: row.role,
                authenticated: true,
            })
        });
        found.await?.ok_or(ApiError::BadToken)
    }

    /// Passes the tokens to `inspect`, reloading them when the cached ones are old.
    async fn with_tokens<T>(&self, inspect: impl FnOnce(&[TokenRow]) -> T) -> Result<T, ApiError> {
        let until = Moment::now() + TOKEN_READ_TIMEOUT;
        let mut cached = timeout_at(until, self.tokens.lock()).await.map_err(|_| ApiError::StoreUnavailable)?;
        if let Some((read, rows)) = &*cached
            && read.elapsed() < TOKEN_CACHE_TTL
        {
            return Ok(inspect(rows));
        }
        let store = self.store.with_deadline(until.into_std());
        let rows =
            self.token_reader.run(until, move || store.tokens()).await.map_err(|_| ApiError::StoreUnavailable)??;
        let result = inspect(&rows);
        *cached = Some((Instant::now(), rows));
        Ok(result)
    }
}

fn authenticate_proxy(
    proxy: &Proxy,
    secret: &ProxySecret,
    peer: IpAddr,
    headers: &HeaderMap,
) -> Result<Caller, ApiError> {
    if !proxy.from.contains(&peer.to_canonical()) {
        return Err(ApiError::UntrustedProxy(peer.to_string()));
    }
    if !secret.is_sent_with(headers) {
        return Err(ApiError::BadProxySecret);
    }
    // A proxy that appends its header to one the client sent leaves both, and they cannot be distinguished.
    let mut values = headers.get_all(proxy.header.as_str()).iter();
    let (Some(value), None) = (values.next(), values.next()) else { return Err(ApiError::AmbiguousUser) };
    let name = value.to_str().ok().map(str::trim).filter(|name| !name.is_empty() && name.len() <= MAX_USER_NAME);
    let name = name.ok_or(ApiError::SignInRequired)?.to_owned();
    if name.contains(',') {
        return Err(ApiError::AmbiguousUser);
    }
    let role = if proxy.operators.contains(&name) { Role::Operator } else { Role::Viewer };
    Ok(Caller { name, role, authenticated: true })
}

/// `localhost`, `127.0.0.1:7480`, `[::1]`.
fn is_loopback_host(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Protects against cross-site requests: a change must be JSON, which another site's form cannot send unasked, and must
/// not come from a page of another site.
pub(super) fn check_cross_site(headers: &HeaderMap) -> Result<(), ApiError> {
    let text = |name: HeaderName| headers.get(name).map(|value| value.to_str().unwrap_or("?"));
    if text(HeaderName::from_static("sec-fetch-site")).is_some_and(|site| !matches!(site, "same-origin" | "none")) {
        return Err(ApiError::CrossSite);
    }
    if let Some(origin) = text(header::ORIGIN) {
        let authority = origin.split_once("://").map_or("", |(_, authority)| authority);
        if authority.is_empty() || text(header::HOST) != Some(authority) {
            return Err(ApiError::CrossSite);
        }
    }
    let kind = text(header::CONTENT_TYPE).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim();
    if kind.eq_ignore_ascii_case("application/json") { Ok(()) } else { Err(ApiError::NotJson) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_hosts_count_as_this_machine() {
        for host in ["localhost", "LOCALHOST:80", "127.0.0.1:7480", "[::1]:7480", "127.9.9.9"] {
            assert!(is_loopback_host(host), "{host}");
        }
        for host in ["", "evil.example", "localhost.evil.example", "10.0.0.1", "[::2]", "127.0.0.1.evil.example"] {
            assert!(!is_loopback_host(host), "{host}");
        }
    }

    #[test]
    fn cross_site_requests_are_rejected() {
        let with = |headers: &[(&'static str, &str)]| {
            let mut map = HeaderMap::new();
            map.insert("host", "doctor:7480".parse().unwrap());
            map.insert("content-type", "application/json; charset=utf-8".parse().unwrap());
            for (name, value) in headers {
                map.insert(*name, value.parse().unwrap());
            }
            check_cross_site(&map)
        };
        assert_eq!(with(&[]), Ok(()));
        assert_eq!(with(&[("origin", "https://doctor:7480"), ("sec-fetch-site", "same-origin")]), Ok(()));
        for (name, value) in [
            ("origin", "https://evil.example"),
            ("origin", "null"),
            ("origin", "https://doctor"),
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-site", "same-site"),
        ] {
            assert_eq!(with(&[(name, value)]), Err(ApiError::CrossSite), "{value}");
        }
        assert_eq!(with(&[("content-type", "text/plain")]), Err(ApiError::NotJson));
    }

    #[test]
    fn a_user_name_is_accepted_only_from_a_listed_proxy_that_knows_the_secret() {
        const SECRET: &str = "0123456789abcdef";
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("proxy.secret");
        std::fs::write(&file, format!("{SECRET}\n")).unwrap();
        let mut proxy = Proxy {
            from: vec!["10.0.0.5".parse().unwrap()],
            secret: Some(SecretSource::File(file.clone())),
            header: usual_header(),
            operators: vec!["ann".to_owned()],
        };
        let secret = ProxySecret::open(proxy.secret.as_ref()).unwrap();
        let send = |peer: &str, names: &[&str], secrets: &[&str]| {
            let mut headers = HeaderMap::new();
            for name in names {
                headers.append("x-forwarded-user", name.parse().unwrap());
            }
            for sent in secrets {
                headers.append(super::super::proxy_secret::HEADER, sent.parse().unwrap());
            }
            authenticate_proxy(&proxy, &secret, peer.parse().unwrap(), &headers)
        };
        let with = |peer: &str, names: &[&str]| send(peer, names, &[SECRET]);
        let with_one = |peer: &str, name: &str| with(peer, &[name]);
        for secrets in [&[][..], &["0123456789abcdeF"], &[""], &[SECRET, SECRET]] {
            assert_eq!(send("10.0.0.5", &["ann"], secrets), Err(ApiError::BadProxySecret), "{secrets:?}");
        }
        assert_eq!(with_one("10.0.0.5", "ann").unwrap().role, Role::Operator);
        assert_eq!(with_one("::ffff:10.0.0.5", "bob").unwrap().role, Role::Viewer);
        assert!(matches!(with_one("10.0.0.6", "ann"), Err(ApiError::UntrustedProxy(_))));
        assert_eq!(with_one("10.0.0.5", " "), Err(ApiError::SignInRequired));
        assert_eq!(
            with("10.0.0.5", &["ann", "bob"]),
            Err(ApiError::AmbiguousUser),
            "the client's header and the proxy's"
        );
        assert_eq!(with_one("10.0.0.5", "ann, bob"), Err(ApiError::AmbiguousUser));
        assert_eq!(proxy.invalid_setting(), None);
        std::fs::write(&file, "short\n").unwrap();
        assert!(ProxySecret::open(proxy.secret.as_ref()).unwrap_err().contains("fewer than 16"));
        proxy.secret = None;
        assert!(proxy.invalid_setting().unwrap().contains("secret = { file = \"proxy.secret\" }"));
    }
}
