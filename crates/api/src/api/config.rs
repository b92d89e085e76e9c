//! `[web]`: where the API answers, and for whom.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::{guard::Proxy, tls::TlsFiles};

/// Where and for whom.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WebConfig {
    pub listen: SocketAddr,
    pub proxy: Option<Proxy>,
    pub tls: Option<TlsFiles>,
    /// Tokens may cross the network in clear.
    #[serde(default)]
    pub plain: bool,
    /// The rack of a node is what stands in its name before the last of these.
    pub rack_before: Option<String>,
}

/// A `[web]` that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BadWebConfig(&'static str);

impl WebConfig {
    /// Only this machine can reach it there, and nothing else is set.
    pub const fn on(listen: SocketAddr) -> Self {
        Self { listen, proxy: None, tls: None, plain: false, rack_before: None }
    }

    /// Whether tokens could be read on their way by whoever sees the network.
    pub const fn is_in_clear(&self) -> bool {
        !self.listen.ip().is_loopback() && self.tls.is_none() && self.proxy.is_none()
    }

    /// # Errors
    /// If something in it cannot be used.
    pub fn check(&self) -> Result<(), BadWebConfig> {
        let proxy = self.proxy.as_ref().and_then(Proxy::trouble);
        let rack = self.rack_before.as_ref().filter(|mark| mark.is_empty());
        match proxy.or_else(|| rack.map(|_| "`rack_before` is empty: what stands in a name before its rack's end")) {
            Some(trouble) => Err(BadWebConfig(trouble)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_leaves_this_machine_without_tls_and_without_a_proxy_is_in_clear() {
        let on = |listen: &str| WebConfig::on(listen.parse().unwrap());
        assert!(!on("127.0.0.1:1").is_in_clear() && !on("[::1]:1").is_in_clear());
        assert!(on("0.0.0.0:1").is_in_clear() && on("10.0.0.1:1").is_in_clear());
        let files = TlsFiles { certificate: "a".into(), key: "b".into() };
        assert!(!WebConfig { tls: Some(files), ..on("0.0.0.0:1") }.is_in_clear());
    }
}
