//! The keys of the controllers' agent endpoints. Controllers that share a store may each have a certificate of their own, and a job
//! that posts its result has to know the key of whichever it reaches.

use doctor_core::time::{Span, Timestamp};

use super::{
    Store,
    db::{Access, vals},
    error::Result,
    operator_commands::set_meta,
};

/// Begins the name of a row in `meta`; the fingerprint of the key follows. The value is when a controller last had the key, in
/// milliseconds since 1970.
const PREFIX: &str = "endpoint-key:";
const ALL: &str = "SELECT key, value FROM meta WHERE key LIKE 'endpoint-key:%'";
/// A key that no controller has had for so long serves no endpoint.
const KEPT: Span = Span::days(1);

impl Store {
    /// Records the fingerprints of a controller's keys, and returns those of the others, sorted.
    pub fn record_endpoint_keys(&self, own: &[String], now: Timestamp) -> Result<Vec<String>> {
        self.write_unfenced(Access::Write, |tx| {
            for key in own {
                set_meta(tx, &format!("{PREFIX}{key}"), &now.millis().to_string())?;
            }
            let rows = tx.all("reading the keys of controllers", ALL, &[], |row| {
                Ok((row.text(0)?.to_owned(), row.text(1)?.parse::<i64>().unwrap_or(0)))
            })?;
            let mut others = Vec::new();
            for (name, at) in rows {
                let key = name.strip_prefix(PREFIX).unwrap_or(&name);
                if now.since(Timestamp::from_millis(at)) > KEPT {
                    tx.execute("removing an old key", "DELETE FROM meta WHERE key = $1", vals![&name])?;
                } else if !own.iter().any(|own| own == key) {
                    others.push(key.to_owned());
                }
            }
            others.sort_unstable();
            Ok(others)
        })
    }
}
