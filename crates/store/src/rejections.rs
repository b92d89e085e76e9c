//! Documents and reports that were rejected on arrival: how many, and when the last one.

use doctor_core::time::Timestamp;

use super::{
    Store,
    audit::{Counter, add_counts},
    error::Result,
    fencing::Lease,
    id_cache::parsed,
    operator_commands::{meta, set_meta},
};

/// When a document was last rejected on arrival, in milliseconds since 1970.
const LAST_REJECTION: &str = "last-rejection";

impl Store {
    /// Counts documents rejected on arrival.
    pub fn count_rejected(&self, lease: &Lease, documents: u64, at: Timestamp) -> Result<()> {
        self.write(lease, |tx| {
            set_meta(tx, LAST_REJECTION, &at.millis().to_string())?;
            add_counts(tx, &[(Counter::DocumentsRejected, documents)])
        })
    }

    /// Returns when a document was last rejected on arrival.
    pub fn last_rejection(&self) -> Result<Option<Timestamp>> {
        let millis = self.read(|tx| meta(tx, LAST_REJECTION))?;
        millis.map(|millis| parsed("time of a rejection", millis.parse()).map(Timestamp::from_millis)).transpose()
    }
}
