//! The keys that jobs may meet at the agent endpoint: this controller's, and those of the others on its store, to which the same URL
//! may lead.

use std::time::{Duration, Instant};

use doctor_backend::clock::{Clock, SystemClock};
use doctor_checks::key_fingerprint::KeyFingerprint;
use doctor_store::Store;

/// How often the keys are recorded and those of the others read.
const INTERVAL: Duration = Duration::from_secs(10 * 60);

#[derive(Debug, Default)]
pub(crate) struct EndpointKeys {
    recorded: Option<(Instant, Vec<KeyFingerprint>)>,
    others: Vec<KeyFingerprint>,
}

impl EndpointKeys {
    /// Returns the keys of all controllers, this one's first.
    pub(crate) fn with_others(&mut self, own: Vec<KeyFingerprint>, store: &Store) -> Vec<KeyFingerprint> {
        let is_recorded = |(at, keys): &(Instant, Vec<KeyFingerprint>)| at.elapsed() < INTERVAL && *keys == own;
        if !self.recorded.as_ref().is_some_and(is_recorded) {
            let texts: Vec<String> = own.iter().map(ToString::to_string).collect();
            match store.record_endpoint_keys(&texts, SystemClock.now()) {
                Ok(others) => {
                    self.others = others.iter().filter_map(|key| key.parse().ok()).collect();
                    self.recorded = Some((Instant::now(), own.clone()));
                }
                // Those known stay in use until the next call: a store of another schema is not written before this
                // controller leads.
                Err(error) => tracing::debug!(%error, "cannot record the keys of the agent endpoint"),
            }
        }
        own.into_iter().chain(self.others.iter().copied()).collect()
    }
}

#[cfg(test)]
mod tests {
    use doctor_store::StoreUrl;

    use super::*;

    #[test]
    fn jobs_get_the_keys_of_all_controllers_on_the_store() {
        let store = Store::open_in_memory().unwrap();
        let [first, second, next] = ["first", "second", "next"].map(|text| KeyFingerprint::of(text.as_bytes()));
        let (mut one, mut other) = (EndpointKeys::default(), EndpointKeys::default());
        assert_eq!(one.with_others(vec![first], &store), [first]);
        assert_eq!(other.with_others(vec![second], &store), [second, first]);
        // A change of its own key is recorded at once.
        let prepared = vec![first, next];
        assert_eq!(one.with_others(prepared.clone(), &store), [prepared, vec![second]].concat());
    }

    #[test]
    fn keys_that_could_not_be_recorded_are_recorded_by_the_next_call() {
        let folder = tempfile::tempdir().unwrap();
        let url = StoreUrl::Sqlite(folder.path().join("doctor.db"));
        let store = Store::open(&url).unwrap();
        let [first, second] = ["first", "second"].map(|text| KeyFingerprint::of(text.as_bytes()));
        let (mut one, mut other) = (EndpointKeys::default(), EndpointKeys::default());
        assert_eq!(other.with_others(vec![second], &store), [second]);
        assert_eq!(one.with_others(vec![first], &Store::open_to_read(&url).unwrap()), [first], "it cannot be written");
        assert_eq!(one.with_others(vec![first], &store), [first, second]);
    }
}
