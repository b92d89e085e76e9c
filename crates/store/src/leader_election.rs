//! Leader election: a controller takes the lease, renews it, releases it and asks whether it still holds it.

use doctor_core::time::{Span, Timestamp};

use super::{
    Store,
    db::{Access, vals},
    error::{Result, StoreError},
    inbox,
    lease::{Held, Lease, LeaseError, is_dead_neighbour, lost, read},
};

enum Taken {
    Ours(u64),
    Theirs(Held),
}

impl Store {
    /// Becomes the leader, if nobody else is: the lease is free, has run out, is ours already, or its holder is a
    /// process of this host that exists no more.
    ///
    /// # Errors
    /// [`LeaseError::Held`] while another one leads.
    pub fn acquire(&self, holder: &str, now: Timestamp, ttl: Span) -> std::result::Result<Lease, LeaseError> {
        let taken = self.write_unfenced(Access::WriteAlone, |tx| {
            let held = read(tx)?;
            let free = held.holder.is_empty()
                || held.holder == holder
                || now >= held.expires
                || is_dead_neighbour(&held.holder, holder);
            if !free {
                return Ok(Taken::Theirs(held));
            }
            let fence = held.fence + 1;
            let sql = "UPDATE lease SET holder = $1, fence = $2, expires = $3 WHERE one = 1";
            tx.run("taking the lease", sql, vals![holder, fence, now.plus(ttl)])?;
            // Whoever led before may have left results behind that somebody was told are kept.
            inbox::enter_what_is_left(tx)?;
            Ok(Taken::Ours(fence))
        })?;
        match taken {
            Taken::Ours(fence) => Ok(Lease { holder: holder.to_owned(), fence, ttl }),
            Taken::Theirs(held) => Err(LeaseError::Held { by: held.holder, until: held.expires }),
        }
    }

    /// Leads for another `ttl` from now.
    pub fn renew(&self, lease: &Lease, now: Timestamp) -> Result<()> {
        // Alone from the beginning: to go from sharing the row to writing it, against somebody who waits to take
        // over, is a deadlock.
        self.write_as(Access::WriteAlone, lease, |tx| {
            let sql = "UPDATE lease SET expires = $1 WHERE one = 1 AND fence = $2";
            tx.run("renewing the lease", sql, vals![now.plus(lease.ttl), lease.fence]).map(drop)
        })
    }

    /// Lets others lead at once. A lease that is ours no more is no error.
    pub fn release(&self, lease: &Lease) -> Result<()> {
        self.write_unfenced(Access::WriteAlone, |tx| {
            let sql = "UPDATE lease SET holder = '', expires = 0 WHERE one = 1 AND fence = $1";
            tx.run("releasing the lease", sql, vals![lease.fence]).map(drop)
        })
    }

    /// Asks the store whether we still lead. To be called right before each effect on the cluster.
    pub fn still_ours(&self, lease: &Lease, now: Timestamp) -> Result<()> {
        self.read(|tx| {
            let held = read(tx)?;
            if held.fence != lease.fence {
                return Err(lost(held));
            }
            if now >= held.expires {
                return Err(StoreError::LeaseExpired { at: held.expires });
            }
            Ok(())
        })
    }

    /// Who leads, until when; nobody if the lease is free.
    pub fn leader(&self) -> Result<Option<(String, Timestamp)>> {
        self.read(|tx| {
            let held = read(tx)?;
            Ok((!held.holder.is_empty()).then_some((held.holder, held.expires)))
        })
    }
}
