//! Leader election: acquires, renews, releases and checks the lease.

use doctor_core::time::{Span, Timestamp};

use super::{
    Store,
    db::{Access, vals},
    error::{Result, StoreError},
    fencing::{Lease, LeaseError, LeaseRow, is_dead_local_process, lease_lost, read},
};

enum AcquireResult {
    Acquired(u64),
    HeldByOther(LeaseRow),
}

impl Store {
    /// Acquires leadership if the lease is free, has expired, is ours already, or was held by a process of this host
    /// that no longer exists.
    ///
    /// # Errors
    /// [`LeaseError::Held`] while another controller leads.
    pub fn acquire(&self, holder: &str, now: Timestamp, ttl: Span) -> std::result::Result<Lease, LeaseError> {
        let taken = self.write_unfenced(Access::WriteExclusive, |tx| {
            let held = read(tx)?;
            let free = held.holder.is_empty()
                || held.holder == holder
                || now >= held.expires
                || is_dead_local_process(&held.holder, holder);
            if !free {
                return Ok(AcquireResult::HeldByOther(held));
            }
            let fence = held.fence + 1;
            let sql = "UPDATE lease SET holder = $1, fence = $2, expires = $3 WHERE id = 1";
            tx.execute("taking the lease", sql, vals![holder, fence, now.plus(ttl)])?;
            Ok(AcquireResult::Acquired(fence))
        })?;
        match taken {
            AcquireResult::Acquired(fence) => Ok(Lease { holder: holder.to_owned(), fence, ttl }),
            AcquireResult::HeldByOther(held) => Err(LeaseError::Held { by: held.holder, until: held.expires }),
        }
    }

    /// Extends the lease by `ttl` from now.
    pub fn renew(&self, lease: &Lease, now: Timestamp) -> Result<()> {
        // Exclusive from the start: upgrading a shared lock on the row deadlocks with a process that waits to take
        // over.
        self.write_as(Access::WriteExclusive, lease, |tx| {
            let sql = "UPDATE lease SET expires = $1 WHERE id = 1 AND fence = $2";
            tx.execute("renewing the lease", sql, vals![now.plus(lease.ttl), lease.fence]).map(drop)
        })
    }

    /// Releases the lease immediately. Does nothing if the lease is no longer ours.
    pub fn release(&self, lease: &Lease) -> Result<()> {
        self.write_unfenced(Access::WriteExclusive, |tx| {
            let sql = "UPDATE lease SET holder = '', expires = 0 WHERE id = 1 AND fence = $1";
            tx.execute("releasing the lease", sql, vals![lease.fence]).map(drop)
        })
    }

    /// Checks in the store that we still lead. Call this right before each effect on the cluster.
    pub fn holds_lease(&self, lease: &Lease, now: Timestamp) -> Result<()> {
        self.read(|tx| {
            let held = read(tx)?;
            if held.fence != lease.fence {
                return Err(lease_lost(held));
            }
            if now >= held.expires {
                return Err(StoreError::LeaseExpired { at: held.expires });
            }
            Ok(())
        })
    }

    /// Returns the leader and when its lease expires; `None` if the lease is free.
    pub fn leader(&self) -> Result<Option<(String, Timestamp)>> {
        self.read(|tx| {
            let held = read(tx)?;
            Ok((!held.holder.is_empty()).then_some((held.holder, held.expires)))
        })
    }
}
