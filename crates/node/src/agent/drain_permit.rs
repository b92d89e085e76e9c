//! The controller's drain permit, stored for the scheduler's hooks, which are separate processes.
//!
//! The file is not synced: a permit lost in a crash is renewed within a minute. Its expiry is in this machine's time,
//! counted from the agent's request. An expiry further ahead than any permit lasts was written under another clock and
//! is ignored.

use std::{fs, io, path::Path};

use doctor_checks::drain_permit::DrainPermit;
use doctor_core::time::{Span, Timestamp};
use serde::{Deserialize, Serialize};

const FILE: &str = "permit.json";

/// The longest a permit may still last. A clock that was set back must not extend one.
const MAX_VALIDITY: Span = Span::minutes(10);

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredPermit {
    until: Timestamp,
}

/// Stores a permit that is valid from `sent_at`, or removes it if the reply had none.
pub fn store(state: &Path, permit: Option<DrainPermit>, sent_at: Timestamp) -> io::Result<()> {
    let path = state.join(FILE);
    let Some(permit) = permit else {
        return match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        };
    };
    let text = serde_json::to_vec(&StoredPermit { until: sent_at.plus(permit.duration) }).map_err(io::Error::from)?;
    let temporary = state.join(format!(".{FILE}.{}.tmp", std::process::id()));
    fs::write(&temporary, text).and_then(|()| fs::rename(&temporary, &path))
}

/// Whether a permit is valid now.
pub fn is_valid(state: &Path, now: Timestamp) -> bool {
    let stored = fs::read(state.join(FILE)).ok().and_then(|text| serde_json::from_slice::<StoredPermit>(&text).ok());
    stored.is_some_and(|stored| now < stored.until && stored.until.since(now) <= MAX_VALIDITY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_permit_is_valid_for_its_duration_and_not_after_it_is_revoked() {
        let (state, at) = (tempfile::tempdir().unwrap(), Timestamp::from_secs(1_794_700_800));
        let is_valid_after = |after: i64| is_valid(state.path(), at.plus(Span::from_secs(after)));
        assert!(!is_valid_after(0), "no permit was given");
        store(state.path(), None, at).unwrap();
        store(state.path(), Some(DrainPermit { duration: Span::minutes(2) }), at).unwrap();
        assert!(is_valid_after(0) && is_valid_after(119) && !is_valid_after(120));
        assert!(!is_valid_after(-3600), "the clock was set back since");
        store(state.path(), None, at).unwrap();
        assert!(!is_valid_after(1));
        fs::write(state.path().join(FILE), "{\"until\"").unwrap();
        assert!(!is_valid_after(1), "truncated");
        assert_eq!(fs::read_dir(state.path()).unwrap().count(), 1);
    }
}
