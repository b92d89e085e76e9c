//! Authentication and authorisation.
//!
//! A client presents a token in the Authorization header, or a user name set by a proxy whose address the configuration
//! lists. While no token was ever created and no proxy is configured, local clients may read, if the Host header names
//! this machine: a page of another site whose name was made to resolve here sends its own host. There are no cookies,
//! so a browser lends no authority to another site; the identity that a proxy adds is protected by checking which
//! origin sends the request.

use std::{
    net::IpAddr,
    time::{Duration, Instant},
};

use doctor_backend::clock::{Clock, SystemClock};
use doctor_store::{
    Store,
    access::{Role, TokenRow, recognise},
};

use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use serde::{Deserialize, Serialize};
use tokio::{
    sync::Mutex,
    time::{Instant as Moment, timeout_at},
};

use super::{desk::Desk, refusal::Refusal};

/// Maximum time for which a revoked token is still accepted.
const REMEMBER: Duration = Duration::from_secs(1);
/// Deadline for reloading the tokens. It waits for no writer and no other request.
const READ_WITHIN: Duration = Duration::from_secs(5);
/// Maximum length of a user name from a proxy.
const LONGEST_NAME: usize = 128;

/// An authenticating reverse proxy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Proxy {
    /// Addresses from which the user name is trusted.
    pub from: Vec<IpAddr>,
    /// Header with the user name.
    #[serde(default = "usual_header")]
    pub header: String,
    /// Users with the operator role; all others are viewers.
    #[serde(default)]
    pub operators: Vec<String>,
}

fn usual_header() -> String {
    "x-forwarded-user".to_owned()
}

impl Proxy {
    /// Returns what is invalid, if anything.
    pub(super) fn trouble(&self) -> Option<&'static str> {
        match self.header.parse::<HeaderName>() {
            Ok(name) if name == header::AUTHORIZATION => Some("`proxy.header` cannot be Authorization"),
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
    pub(super) known: bool,
}

#[derive(Debug)]
pub(super) struct Guard {
    store: Store,
    proxy: Option<Proxy>,
    /// The API listens on loopback only.
    loopback: bool,
    tokens: Mutex<Option<(Instant, Vec<TokenRow>)>>,
    /// Worker that loads tokens.
    desk: Desk,
}

impl Guard {
    pub(super) fn new(store: Store, proxy: Option<Proxy>, loopback: bool) -> Self {
        Self { store, proxy, loopback, tokens: Mutex::default(), desk: Desk::new(1) }
    }

    /// Identifies a client by its address and headers.
    pub(super) async fn caller(&self, peer: IpAddr, headers: &HeaderMap) -> Result<Caller, Refusal> {
        if let Some(value) = headers.get(header::AUTHORIZATION) {
            return self.by_token(value).await;
        }
        if let Some(proxy) = &self.proxy
            && headers.contains_key(proxy.header.as_str())
        {
            return by_proxy(proxy, peer, headers);
        }
        let unauthenticated = self.loopback && self.proxy.is_none() && self.with_tokens(<[TokenRow]>::is_empty).await?;
        if !unauthenticated || !peer.is_loopback() {
            return Err(Refusal::NoToken);
        }
        let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
        if !is_this_machine(host) {
            return Err(Refusal::Host(host.chars().take(64).collect()));
        }
        Ok(Caller { name: "local client".to_owned(), role: Role::Viewer, known: false })
    }

    async fn by_token(&self, value: &HeaderValue) -> Result<Caller, Refusal> {
        let token = value.to_str().ok().and_then(|text| text.strip_prefix("Bearer ")).ok_or(Refusal::NoToken)?;
        let now = SystemClock.now();
        let found = self.with_tokens(|tokens| {
            recognise(tokens, token, now).map(|row| Caller { name: row.name.clone(), role: row.role, known: true })
        });
        found.await?.ok_or(Refusal::BadToken)
    }

    /// Passes the tokens to `look`, reloading them when the cached ones are old.
    async fn with_tokens<T>(&self, look: impl FnOnce(&[TokenRow]) -> T) -> Result<T, Refusal> {
        let until = Moment::now() + READ_WITHIN;
        let mut known = timeout_at(until, self.tokens.lock()).await.map_err(|_| Refusal::Store)?;
        if let Some((read, rows)) = &*known
            && read.elapsed() < REMEMBER
        {
            return Ok(look(rows));
        }
        let store = self.store.until(until.into_std());
        let rows = self.desk.work(until, move || store.tokens()).await.map_err(|_| Refusal::Store)??;
        let answer = look(&rows);
        *known = Some((Instant::now(), rows));
        Ok(answer)
    }
}

fn by_proxy(proxy: &Proxy, peer: IpAddr, headers: &HeaderMap) -> Result<Caller, Refusal> {
    if !proxy.from.contains(&peer.to_canonical()) {
        return Err(Refusal::NotAProxy(peer.to_string()));
    }
    // A proxy that appends its header to one the client sent leaves both, and they cannot be distinguished.
    let mut said = headers.get_all(proxy.header.as_str()).iter();
    let (Some(value), None) = (said.next(), said.next()) else { return Err(Refusal::TwoNames) };
    let name = value.to_str().ok().map(str::trim).filter(|name| !name.is_empty() && name.len() <= LONGEST_NAME);
    let name = name.ok_or(Refusal::NoToken)?.to_owned();
    if name.contains(',') {
        return Err(Refusal::TwoNames);
    }
    let role = if proxy.operators.contains(&name) { Role::Operator } else { Role::Viewer };
    Ok(Caller { name, role, known: true })
}

/// `localhost`, `127.0.0.1:7480`, `[::1]`.
fn is_this_machine(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Protects against cross-site requests: a change must be JSON, which another site's form cannot send unasked, and must
/// not come from a page of another site.
pub(super) fn may_change(headers: &HeaderMap) -> Result<(), Refusal> {
    let text = |name: HeaderName| headers.get(name).map(|value| value.to_str().unwrap_or("?"));
    if text(HeaderName::from_static("sec-fetch-site")).is_some_and(|site| !matches!(site, "same-origin" | "none")) {
        return Err(Refusal::CrossSite);
    }
    if let Some(origin) = text(header::ORIGIN) {
        let authority = origin.split_once("://").map_or("", |(_, authority)| authority);
        if authority.is_empty() || text(header::HOST) != Some(authority) {
            return Err(Refusal::CrossSite);
        }
    }
    let kind = text(header::CONTENT_TYPE).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim();
    if kind.eq_ignore_ascii_case("application/json") { Ok(()) } else { Err(Refusal::NotJson) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_hosts_count_as_this_machine() {
        for host in ["localhost", "LOCALHOST:80", "127.0.0.1:7480", "[::1]:7480", "127.9.9.9"] {
            assert!(is_this_machine(host), "{host}");
        }
        for host in ["", "evil.example", "localhost.evil.example", "10.0.0.1", "[::2]", "127.0.0.1.evil.example"] {
            assert!(!is_this_machine(host), "{host}");
        }
    }

    #[test]
    fn a_page_of_another_site_changes_nothing() {
        let with = |headers: &[(&'static str, &str)]| {
            let mut map = HeaderMap::new();
            map.insert("host", "doctor:7480".parse().unwrap());
            map.insert("content-type", "application/json; charset=utf-8".parse().unwrap());
            for (name, value) in headers {
                map.insert(*name, value.parse().unwrap());
            }
            may_change(&map)
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
            assert_eq!(with(&[(name, value)]), Err(Refusal::CrossSite), "{value}");
        }
        assert_eq!(with(&[("content-type", "text/plain")]), Err(Refusal::NotJson));
    }

    #[test]
    fn a_user_name_is_accepted_only_from_a_listed_proxy() {
        let proxy = Proxy {
            from: vec!["10.0.0.5".parse().unwrap()],
            header: usual_header(),
            operators: vec!["ann".to_owned()],
        };
        let with = |peer: &str, names: &[&str]| {
            let mut headers = HeaderMap::new();
            for name in names {
                headers.append("x-forwarded-user", name.parse().unwrap());
            }
            by_proxy(&proxy, peer.parse().unwrap(), &headers)
        };
        let said = |peer: &str, name: &str| with(peer, &[name]);
        assert_eq!(said("10.0.0.5", "ann").unwrap().role, Role::Operator);
        assert_eq!(said("::ffff:10.0.0.5", "bob").unwrap().role, Role::Viewer);
        assert!(matches!(said("10.0.0.6", "ann"), Err(Refusal::NotAProxy(_))));
        assert_eq!(said("10.0.0.5", " "), Err(Refusal::NoToken));
        assert_eq!(with("10.0.0.5", &["ann", "bob"]), Err(Refusal::TwoNames), "the client's header and the proxy's");
        assert_eq!(said("10.0.0.5", "ann, bob"), Err(Refusal::TwoNames));
    }
}
