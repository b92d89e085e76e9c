//! The section `[telemetry]` of the service's configuration: where traces go.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use doctor_core::time::Span;
use serde::{Deserialize, Serialize};

use crate::alert::{SecretSource, UrlSource};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TelemetrySettings {
    /// URL, with path, of an OTLP collector over HTTP. Without it, tracing is disabled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub traces: Option<UrlSource>,
    /// Sent as `authorization: Bearer …`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token: Option<SecretSource>,
    /// PEM file of CA certificates trusted in addition to the system's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca: Option<PathBuf>,
    /// Timeout of one request.
    pub timeout: Span,
    /// Maximum spans waiting for the collector; more are dropped.
    pub queue: usize,
    /// Resource attributes of all spans, such as the cluster's name.
    pub resource: BTreeMap<String, String>,
}

impl Default for TelemetrySettings {
    fn default() -> Self {
        Self {
            traces: None,
            token: None,
            ca: None,
            timeout: Span::from_secs(5),
            queue: 4096,
            resource: BTreeMap::new(),
        }
    }
}

/// An invalid `[telemetry]` section.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BadTelemetry(String);

/// Maximum length of a name or value in `resource`.
const MAX_ATTRIBUTE_BYTES: usize = 256;

impl TelemetrySettings {
    /// Resolves paths relative to the file that contains them.
    pub fn resolve(&mut self, base: &Path) {
        self.ca = self.ca.take().map(|path| base.join(path));
        self.token.iter_mut().for_each(|secret| secret.resolve(base));
        self.traces.iter_mut().for_each(|address| address.resolve(base));
    }

    /// # Errors
    /// If a setting is invalid, with what would be accepted.
    pub fn check(&self) -> Result<(), BadTelemetry> {
        let bad = |text: String| Err(BadTelemetry(text));
        if let Some(UrlSource::Plain(url)) = &self.traces
            && !url.starts_with("http://")
            && !url.starts_with("https://")
        {
            return bad(
                "`telemetry.traces` must begin with http:// or https://, such as \"http://collector:4318/v1/traces\""
                    .to_owned(),
            );
        }
        if self.timeout < Span::from_secs(1) || self.timeout > Span::minutes(1) {
            return bad(format!("`telemetry.timeout` is {}, expected 1s to 1m", self.timeout));
        }
        if !(16..=1_000_000).contains(&self.queue) {
            return bad(format!("`telemetry.queue` is {}, expected 16 to 1000000 spans", self.queue));
        }
        let long = |(name, value): &(&String, &String)| {
            name.is_empty() || name.len() > MAX_ATTRIBUTE_BYTES || value.len() > MAX_ATTRIBUTE_BYTES
        };
        if self.resource.len() > 32 || self.resource.iter().any(|pair| long(&pair)) {
            return bad(format!(
                "`telemetry.resource` accepts at most 32 names and values of at most {MAX_ATTRIBUTE_BYTES} bytes"
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_setting_is_rejected_with_the_accepted_values() {
        for (text, part) in [
            ("traces = \"collector:4318\"", "http:// or https://"),
            ("timeout = \"0s\"", "1s to 1m"),
            ("queue = 1", "16 to 1000000"),
            ("resource = { \"\" = \"x\" }", "at most 32"),
        ] {
            let settings: TelemetrySettings = toml::from_str(text).unwrap();
            let error = settings.check().unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
        assert!(toml::from_str::<TelemetrySettings>("trace = \"x\"").is_err(), "an unknown key");
        TelemetrySettings::default().check().unwrap();
    }
}
