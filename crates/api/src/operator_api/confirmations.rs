//! Confirmations of plans. A confirmation is valid for the plan it was issued for, for ten minutes, and once.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use doctor_core::hex;
use doctor_core::time::{Span, Timestamp};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::error::ApiError;

/// Time for an operator to read the plan.
pub(super) const CONFIRMATION_TTL: Span = Span::minutes(10);
/// Used confirmations that are remembered until they expire.
const MAX_USED: usize = 10_000;

/// Issues and checks confirmations.
#[derive(Debug)]
pub(super) struct Confirmations {
    key: [u8; 32],
    used: Mutex<BTreeMap<String, Timestamp>>,
}

impl Confirmations {
    pub(super) fn new(key: [u8; 32]) -> Self {
        Self { key, used: Mutex::default() }
    }

    fn mac(&self, message: &[u8], expires: Timestamp) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.key).expect("HMAC takes a key of any length");
        mac.update(&expires.millis().to_be_bytes());
        mac.update(message);
        mac
    }

    /// Issues a confirmation of these bytes that is valid until `expires`.
    pub(super) fn issue(&self, message: &[u8], expires: Timestamp) -> String {
        format!("{}-{}", expires.millis(), hex::encode(&self.mac(message, expires).finalize().into_bytes()))
    }

    /// Whether this was issued for these bytes and has not expired.
    pub(super) fn is_valid(&self, confirm: &str, message: &[u8], now: Timestamp) -> bool {
        let Some((expires, mac)) = confirm.split_once('-') else { return false };
        let Ok(expires) = expires.parse().map(Timestamp::from_millis) else { return false };
        let Some(mac) = hex::decode(mac) else { return false };
        now < expires && self.mac(message, expires).verify_slice(&mac).is_ok()
    }

    /// Fails if the confirmation was used before.
    pub(super) fn check_unused(&self, confirm: &str) -> Result<(), ApiError> {
        let used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        if used.contains_key(confirm) { Err(ApiError::Replayed) } else { Ok(()) }
    }

    /// Marks the confirmation as used. Fails if it was used before.
    pub(super) fn mark_used(&self, confirm: &str, now: Timestamp) -> Result<(), ApiError> {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        used.retain(|_, expires| *expires > now);
        if used.contains_key(confirm) {
            return Err(ApiError::Replayed);
        }
        if used.len() >= MAX_USED {
            return Err(ApiError::CapacityReached);
        }
        used.insert(confirm.to_owned(), now.plus(CONFIRMATION_TTL));
        Ok(())
    }

    /// Makes a confirmation valid again, because the plan was not carried out.
    pub(super) fn unmark_used(&self, confirm: &str) {
        self.used.lock().unwrap_or_else(PoisonError::into_inner).remove(confirm);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_confirmation_is_valid_once_for_one_plan_until_it_expires() {
        let confirmations = Confirmations::new([7; 32]);
        let (now, later) = (Timestamp::from_secs(1000), Timestamp::from_secs(1000).plus(CONFIRMATION_TTL));
        let confirm = confirmations.issue(b"hold a", later);
        assert!(confirmations.is_valid(&confirm, b"hold a", now));
        assert!(!confirmations.is_valid(&confirm, b"hold b", now), "another plan");
        assert!(!confirmations.is_valid(&confirm, b"hold a", later), "too old");
        assert!(!Confirmations::new([8; 32]).is_valid(&confirm, b"hold a", now), "of another process");
        let extended = confirm.replacen(&later.millis().to_string(), &(later.millis() + 1).to_string(), 1);
        for forged in ["", "-", "1-", &extended, &confirm[..confirm.len() - 1]] {
            assert!(!confirmations.is_valid(forged, b"hold a", now), "{forged}");
        }
        assert_eq!(confirmations.mark_used(&confirm, now), Ok(()));
        assert_eq!(confirmations.mark_used(&confirm, now), Err(ApiError::Replayed));
        confirmations.unmark_used(&confirm);
        assert_eq!(
            confirmations.mark_used(&confirm, now),
            Ok(()),
            "a plan that was not carried out can be confirmed again"
        );
    }
}
