//! The section `[web]`: where the API listens, and which clients it accepts.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::{auth::Proxy, tls::TlsFiles};

/// Configuration of the API.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WebConfig {
    pub listen: SocketAddr,
    pub proxy: Option<Proxy>,
    pub tls: Option<TlsFiles>,
    /// Allows tokens to cross the network unencrypted.
    #[serde(default)]
    pub plain: bool,
    /// A node's rack is the part of its name before the last occurrence of this text.
    pub rack_before: Option<String>,
}

/// An invalid `[web]` section.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InvalidWebConfig(&'static str);

impl WebConfig {
    /// Returns a configuration for this address, usually loopback, with no other setting.
    pub const fn listening_on(listen: SocketAddr) -> Self {
        Self { listen, proxy: None, tls: None, plain: false, rack_before: None }
    }

    /// Whether tokens could be read by an eavesdropper on the network.
    pub const fn is_unencrypted(&self) -> bool {
        !self.listen.ip().is_loopback() && self.tls.is_none() && self.proxy.is_none()
    }

    /// # Errors
    /// If a setting is invalid.
    pub fn check(&self) -> Result<(), InvalidWebConfig> {
        let proxy = self.proxy.as_ref().and_then(Proxy::invalid_setting);
        let rack = self.rack_before.as_ref().filter(|mark| mark.is_empty());
        match proxy.or_else(|| rack.map(|_| "`rack_before` is empty: expected the text after the rack in a name")) {
            Some(problem) => Err(InvalidWebConfig(problem)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_remote_address_without_tls_and_without_a_proxy_is_unencrypted() {
        let on = |listen: &str| WebConfig::listening_on(listen.parse().unwrap());
        assert!(!on("127.0.0.1:1").is_unencrypted() && !on("[::1]:1").is_unencrypted());
        assert!(on("0.0.0.0:1").is_unencrypted() && on("10.0.0.1:1").is_unencrypted());
        let files = TlsFiles::new("a", "b");
        assert!(!WebConfig { tls: Some(files), ..on("0.0.0.0:1") }.is_unencrypted());
    }
}
