//! Whether the store can be written, for the readiness of a controller.
//!
//! Only a write tells: a database on a full disk, or one that its server made read-only, answers every read.

use std::time::{SystemTime, UNIX_EPOCH};

use super::{Store, db::Access, error::Result, operator_commands::set_meta, schema};

/// Key in `meta`. Its value is the time of the last probe, so that each probe changes the page.
const KEY: &str = "write-probe";

impl Store {
    /// Commits one small row, as durably as everything else. A store of an older schema is probed, too: a controller that
    /// waits for the lease to migrate it is ready.
    ///
    /// # Errors
    /// If a newer program has migrated the store, or it cannot be written; [`StoreError::write_obstacle`](crate::StoreError::write_obstacle) says why.
    pub fn probe_write(&self) -> Result<()> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        self.transaction(Access::Write, &mut |tx| {
            let found = schema::version_beside_migrations(tx)?;
            if found > self.shared.schema.latest() {
                return Err(schema::newer(tx, self.shared.schema, found));
            }
            set_meta(tx, KEY, &now.to_string())
        })
    }
}
