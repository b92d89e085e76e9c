//! The site's own webhook: JSON with all details, signed with a shared secret.
//!
//! The signature covers the send time, so that a recorded message cannot be replayed later as a new one. It is
//! `sha256=` and the HMAC-SHA-256 of `TIMESTAMP.BODY` in hexadecimal.

use doctor_core::{
    alert::{self, Notification},
    time::Timestamp,
};
use hmac::{Hmac, KeyInit, Mac};
use serde::Serialize;
use sha2::Sha256;

use super::{DeliveryError, Message, Retry, SecretSource, UrlSource, http::Client, secret::read};

/// Version of the document format. It increases with incompatible changes.
const VERSION: u32 = 1;

#[derive(Debug, Serialize)]
struct WebhookBody<'a> {
    version: u32,
    /// Identical at each attempt: a receiver may ignore a known key.
    key: &'a str,
    sent: Timestamp,
    composed: Timestamp,
    headline: String,
    lost_before: u64,
    notes: Vec<RenderedNote<'a>>,
}

#[derive(Debug, Serialize)]
struct RenderedNote<'a> {
    #[serde(flatten)]
    note: &'a Notification,
    text: String,
    command: String,
}

pub(super) fn send(
    url: &UrlSource,
    secret: Option<&SecretSource>,
    message: &Message<'_>,
    client: &Client<'_>,
) -> Result<(), DeliveryError> {
    let document = WebhookBody {
        version: VERSION,
        key: message.key,
        sent: message.now,
        composed: message.composed,
        headline: alert::headline(message.notes),
        lost_before: message.lost_before,
        notes: message
            .notes
            .iter()
            .map(|note| RenderedNote { note, text: alert::line(note), command: alert::command(note) })
            .collect(),
    };
    let body = json(&document)?;
    let timestamp = message.now.secs().to_string();
    let mut headers = vec![("x-doctor-key", message.key), ("x-doctor-timestamp", &timestamp)];
    let signed = secret.map(|secret| Ok::<_, DeliveryError>(signature(read(secret)?.as_bytes(), &timestamp, &body)));
    let signed = signed.transpose()?;
    if let Some(signed) = &signed {
        headers.push(("x-doctor-signature", signed));
    }
    client.post(&url.read()?, &headers, &body)
}

/// Returns the value of `x-doctor-signature`.
pub fn signature(secret: &[u8], timestamp: &str, body: &[u8]) -> String {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret).expect("HMAC takes keys of any length");
    mac.update(timestamp.as_bytes());
    mac.update(b".");
    mac.update(body);
    let digits: String = mac.finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256={digits}")
}

pub(super) fn json(value: &impl Serialize) -> Result<Vec<u8>, DeliveryError> {
    let failed = |error: serde_json::Error| DeliveryError {
        text: format!("cannot encode as JSON: {error}"),
        retry: Retry::Never,
    };
    serde_json::to_vec(value).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_signature_matches_openssl() {
        // echo -n '1700000000.{}' | openssl dgst -sha256 -hmac secret
        let expected = "sha256=b8569b78799ff9e3cbff0fc2d63a33a2b57f3282abd07c37ae5e8e7d79a5f163";
        assert_eq!(signature(b"secret", "1700000000", b"{}"), expected);
        assert_ne!(signature(b"secret", "1700000001", b"{}"), expected, "the timestamp is signed too");
    }
}
