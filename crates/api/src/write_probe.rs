//! Asks whether the store can be written, for the readiness of a controller. Any client may ask, and each probe waits for
//! the disk, so there is one at a time, and requests within a second share it.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use doctor_store::Store;
use tokio::sync::Mutex;

/// How long a result counts.
const LIFETIME: Duration = Duration::from_secs(1);

/// The last probe: when it ended, and why it failed. Locked while one runs, however long the store does not respond.
#[derive(Debug, Default)]
pub(super) struct WriteProbe(Arc<Mutex<Option<LastProbe>>>);

type LastProbe = (Instant, Result<(), String>);

impl WriteProbe {
    /// Returns why the store cannot be written, in words that say nothing of its content.
    pub(super) async fn run(&self, store: &Store) -> Result<(), String> {
        let mut last = Arc::clone(&self.0).lock_owned().await;
        if let Some((at, result)) = &*last
            && at.elapsed() < LIFETIME
        {
            return result.clone();
        }
        let store = store.clone();
        let attempt = move || {
            let result = store.probe_write().map_err(|error| {
                tracing::debug!(%error, "not ready");
                format!("the store cannot be written: {}", error.write_obstacle())
            });
            *last = Some((Instant::now(), result.clone()));
            result
        };
        let joined = tokio::task::spawn_blocking(attempt).await;
        joined.unwrap_or_else(|_| Err("the store does not respond".to_owned()))
    }
}
