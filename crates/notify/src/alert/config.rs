//! The section `[alerts]` of the service's configuration: receivers, routes and retries.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use doctor_backend::secret::SecretSource;
use doctor_core::{
    alert::{ChangeKind, Route},
    finding::Severity,
    time::Span,
};
use serde::{Deserialize, Serialize};

use super::{
    secret::{self, UrlSource},
    tls_roots::roots,
};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AlertSettings {
    /// How long a message waits for further notes, so that related ones are sent together.
    pub group_wait: Span,
    /// Minimum interval between messages to a receiver.
    pub group_interval: Span,
    /// Timeout of one attempt.
    pub timeout: Span,
    /// Delay before the first retry; later delays grow.
    pub retry: Span,
    /// A message that is not delivered after this is given up and reported as lost.
    pub give_up: Span,
    /// Alert when the cluster has not been observed for this long.
    pub stale_after: Span,
    /// Alert when more results than this are rejected within ten minutes.
    pub rejected: u64,
    /// PEM file of CA certificates trusted in addition to the system's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca: Option<PathBuf>,
    pub receivers: BTreeMap<String, Receiver>,
}

impl Default for AlertSettings {
    fn default() -> Self {
        Self {
            group_wait: Span::from_secs(5),
            group_interval: Span::minutes(1),
            timeout: Span::from_secs(10),
            retry: Span::from_secs(5),
            give_up: Span::days(1),
            stale_after: Span::minutes(10),
            rejected: 10,
            ca: None,
            receivers: BTreeMap::new(),
        }
    }
}

/// A receiver: its route and its channel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "RawReceiver")]
pub struct Receiver {
    pub route: Route,
    pub channel: Channel,
}

/// The channel of a receiver.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Channel {
    /// JSON, signed if there is a secret.
    Webhook {
        url: UrlSource,
        secret: Option<SecretSource>,
    },
    /// A Slack webhook, or a compatible one (Mattermost, Rocket.Chat, Discord's `/slack`).
    Slack {
        url: UrlSource,
    },
    /// API version 2.
    Alertmanager {
        url: UrlSource,
        token: Option<SecretSource>,
    },
    Email(Email),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Email {
    /// HOST:PORT of a mail server.
    pub server: String,
    pub from: String,
    pub to: Vec<String>,
    #[serde(default)]
    pub security: Security,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub password: Option<SecretSource>,
}

/// Transport security of the connection to a mail server.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Security {
    /// Starts unencrypted and must switch to TLS before anything else is sent (port 587).
    #[default]
    Starttls,
    /// TLS from the first byte (port 465).
    Tls,
    /// Unencrypted: for a server on this machine. A password is not sent this way.
    None,
}

/// An invalid receiver.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BadReceiver(String);

/// A receiver as configured.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawReceiver {
    #[serde(default = "least")]
    severity: Severity,
    #[serde(default)]
    changes: Vec<ChangeKind>,
    #[serde(default = "yes")]
    service: bool,
    webhook: Option<RawWebhook>,
    slack: Option<RawSlack>,
    alertmanager: Option<RawAlertmanager>,
    email: Option<Email>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawWebhook {
    url: UrlSource,
    secret: Option<SecretSource>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawSlack {
    url: UrlSource,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawAlertmanager {
    url: UrlSource,
    token: Option<SecretSource>,
}

const fn least() -> Severity {
    Severity::Monitor
}

const fn yes() -> bool {
    true
}

impl TryFrom<RawReceiver> for Receiver {
    type Error = BadReceiver;

    fn try_from(raw: RawReceiver) -> Result<Self, BadReceiver> {
        let channels = [
            raw.webhook.map(|channel| Channel::Webhook { url: channel.url, secret: channel.secret }),
            raw.slack.map(|channel| Channel::Slack { url: channel.url }),
            raw.alertmanager.map(|channel| Channel::Alertmanager { url: channel.url, token: channel.token }),
            raw.email.map(Channel::Email),
        ];
        let mut channels = channels.into_iter().flatten();
        let (Some(channel), None) = (channels.next(), channels.next()) else {
            let text = "a receiver needs exactly one of `webhook`, `slack`, `alertmanager`, `email`";
            return Err(BadReceiver(text.to_owned()));
        };
        channel.check()?;
        let route = Route { severity: raw.severity, changes: raw.changes, service: raw.service };
        Ok(Self { route, channel })
    }
}

impl Channel {
    fn check(&self) -> Result<(), BadReceiver> {
        match self {
            Self::Webhook { url, .. } | Self::Slack { url } | Self::Alertmanager { url, .. } => match url {
                UrlSource::Plain(text) if !text.starts_with("https://") && !text.starts_with("http://") => {
                    Err(BadReceiver("`url` must begin with http:// or https://".to_owned()))
                }
                UrlSource::Plain(_) | UrlSource::Secret(_) => Ok(()),
            },
            Self::Email(email) => email.check(),
        }
    }

    /// Returns the secrets that a message needs.
    fn secrets(&self) -> Vec<&SecretSource> {
        let (url, secret) = match self {
            Self::Webhook { url, secret } | Self::Alertmanager { url, token: secret } => (Some(url), secret.as_ref()),
            Self::Slack { url } => (Some(url), None),
            Self::Email(email) => (None, email.password.as_ref()),
        };
        let url = match url {
            Some(UrlSource::Secret(secret)) => Some(secret),
            Some(UrlSource::Plain(_)) | None => None,
        };
        url.into_iter().chain(secret).collect()
    }

    /// Resolves paths relative to the file that contains them.
    fn resolve(&mut self, base: &Path) {
        match self {
            Self::Webhook { url, secret } | Self::Alertmanager { url, token: secret } => {
                url.resolve(base);
                secret.iter_mut().for_each(|secret| secret.resolve(base));
            }
            Self::Slack { url } => url.resolve(base),
            Self::Email(email) => email.password.iter_mut().for_each(|secret| secret.resolve(base)),
        }
    }
}

impl Email {
    fn check(&self) -> Result<(), BadReceiver> {
        let bad = |text: &str| Err(BadReceiver(text.to_owned()));
        let port = self.server.rsplit_once(':').and_then(|(host, port)| (!host.is_empty()).then_some(port));
        if port.is_none_or(|port| port.parse::<u16>().is_err()) {
            return bad("`server` must be HOST:PORT, such as \"smtp.example.org:587\"");
        }
        if self.to.is_empty() || self.to.len() > 100 {
            return bad("`to` must name 1 to 100 mailboxes");
        }
        if !self.to.iter().chain([&self.from]).all(|address| is_mailbox(address)) {
            return bad("`from` and `to` must be plain addresses, such as \"ops@example.org\"");
        }
        if self.user.is_some() != self.password.is_some() {
            return bad("`user` and `password` must be set together");
        }
        if self.password.is_some() && self.security == Security::None {
            return bad("a password is not sent unencrypted: set `security` to \"starttls\" or \"tls\"");
        }
        Ok(())
    }
}

/// Whether the address can be used in an SMTP command and a header without quoting.
fn is_mailbox(address: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_graphic() && !b"<>()[]\\,;:\"".contains(&byte);
    address.len() <= 254
        && address.bytes().all(plain)
        && address
            .split_once('@')
            .is_some_and(|(name, host)| !name.is_empty() && !host.is_empty() && !host.contains('@'))
}

impl AlertSettings {
    /// Returns the routes, for the engine.
    pub fn routes(&self) -> Vec<(String, Route)> {
        self.receivers.iter().map(|(name, receiver)| (name.clone(), receiver.route.clone())).collect()
    }

    /// Resolves paths relative to the file that contains them.
    pub fn resolve(&mut self, base: &Path) {
        self.ca = self.ca.take().map(|path| base.join(path));
        self.receivers.values_mut().for_each(|receiver| receiver.channel.resolve(base));
    }

    /// Returns what cannot be read now: secrets, and the file of certificates. Both are read when a message is sent, so
    /// alerts may work later.
    pub fn unreadable_files(&self) -> Vec<String> {
        let of = |(name, receiver): (&String, &Receiver)| -> Vec<String> {
            let secrets = receiver.channel.secrets().into_iter();
            let failures = secrets.filter_map(|source| secret::read(source).err());
            failures.map(|error| format!("alerts to {name} cannot be sent: {}", error.text)).collect()
        };
        let ca = self.ca.as_deref().and_then(|path| roots(Some(path)).err());
        let ca = ca.map(|error| format!("alerts cannot be sent: {}", error.text));
        ca.into_iter().chain(self.receivers.iter().flat_map(of)).collect()
    }

    /// Checks the settings as a whole.
    ///
    /// # Errors
    /// If a setting is invalid, with what would be accepted.
    pub fn check(&self) -> Result<(), BadReceiver> {
        let second = Span::from_secs(1);
        for (name, value) in [
            ("group_interval", self.group_interval),
            ("timeout", self.timeout),
            ("retry", self.retry),
            ("stale_after", self.stale_after),
        ] {
            if value < second {
                return Err(BadReceiver(format!("`alerts.{name}` is {value}, expected 1s or more")));
            }
        }
        if self.timeout > Span::minutes(5) {
            return Err(BadReceiver(format!("`alerts.timeout` is {}, expected 5m or less", self.timeout)));
        }
        if self.give_up < self.timeout {
            let (give_up, timeout) = (self.give_up, self.timeout);
            return Err(BadReceiver(format!(
                "`alerts.give_up` is {give_up}, expected at least `timeout`, which is {timeout}"
            )));
        }
        let plain = |name: &&String| {
            (1..=40).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
        };
        match self.receivers.keys().find(|name| !plain(name)) {
            Some(name) => Err(BadReceiver(format!(
                "`{}` cannot name a receiver: 1 to 40 letters, digits, `-` or `_`",
                name.chars().take(60).collect::<String>().escape_debug()
            ))),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<AlertSettings, String> {
        toml::from_str(text).map_err(|error| error.to_string())
    }

    #[test]
    fn secrets_that_cannot_be_read_are_named_with_their_receiver() {
        let text = "[receivers.chat]\nslack = { url = { file = \"/no/such/file\" } }\n[receivers.ops]\n\
                    webhook = { url = \"http://x\" }";
        let found = read(text).unwrap().unreadable_files();
        assert!(
            found.len() == 1 && found[0].starts_with("alerts to chat cannot be sent: cannot read /no/such/file"),
            "{found:?}"
        );
        let settings = AlertSettings { ca: Some("/no/such/ca.pem".into()), ..AlertSettings::default() };
        assert!(settings.unreadable_files()[0].contains("/no/such/ca.pem"));
    }

    #[test]
    fn a_receiver_has_exactly_one_channel_and_errors_name_the_accepted_values() {
        for (text, part) in [
            ("[receivers.a]\n", "one of `webhook`, `slack`, `alertmanager`, `email`"),
            ("[receivers.a]\nslack = { url = \"http://x\" }\nwebhook = { url = \"http://y\" }", "one of"),
            ("[receivers.a]\nslack = { url = \"x\" }", "http:// or https://"),
            ("[receivers.a]\nslack = { url = { fil = \"x\" } }", "{ env = "),
            ("[receivers.a]\nslack = { url = \"http://x\" }\nseverity = \"bad\"", "monitor, reset, reboot, isolate"),
            ("[receivers.a]\nslack = { url = \"http://x\" }\nchanges = [\"open\"]", "opened"),
            ("[receivers.a]\nemail = { server = \"x\", from = \"a@b\", to = [\"a@b\"] }", "HOST:PORT"),
            ("[receivers.a]\nemail = { server = \"x:25\", from = \"a@b\", to = [] }", "1 to 100"),
            ("[receivers.a]\nemail = { server = \"x:25\", from = \"a@b\", to = [\"a@b>\"] }", "plain addresses"),
            (
                "[receivers.a]\nemail = { server = \"x:25\", from = \"a@b\\r\\nRCPT\", to = [\"a@b\"] }",
                "plain addresses",
            ),
            (
                "[receivers.a]\nemail = { server = \"x:25\", from = \"a@b\", to = [\"a@b\"], user = \"u\" }",
                "must be set together",
            ),
            (
                "[receivers.a]\nemail = { server = \"x:25\", from = \"a@b\", to = [\"a@b\"], user = \"u\", \
                 password = { env = \"P\" }, security = \"none\" }",
                "not sent unencrypted",
            ),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn settings_outside_their_range_are_rejected() {
        for (text, part) in [
            ("group_interval = \"0s\"", "1s or more"),
            ("timeout = \"10m\"", "5m or less"),
            ("give_up = \"2s\"", "at least `timeout`"),
            ("[receivers.\"a b\"]\nslack = { url = \"http://x\" }", "cannot name a receiver"),
        ] {
            let error = read(text).unwrap().check().unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
        AlertSettings::default().check().unwrap();
    }
}
