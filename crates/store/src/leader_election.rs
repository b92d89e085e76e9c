//! Leader election: acquires, renews, releases and checks the lease.
//!
//! The lease counts by the database's clock ([`LeaseClock`]): a controller whose own clock is wrong can neither hold the
//! lease longer than it asked for nor take it early. An end that lies further ahead than any holder could have asked for
//! comes from a clock that was wrong, and is cut to one ttl from now. See docs/design/0016-the-lease.md.

use doctor_core::time::{Span, Timestamp};

use super::{
    Store,
    db::{Access, vals},
    error::{Result, StoreError},
    fencing::{Lease, LeaseError, LeaseRow, lease_lost, may_take, read},
    lease_clock::{LeaseClock, clock_now, lock_and_read_clock, read_with_clock},
    lease_term::{self, LeaseTerm, latest_expiry, limit_expiry},
    schema,
};

enum AcquireResult {
    Acquired(u64),
    HeldByOther(LeaseRow),
}

impl Store {
    /// Acquires leadership if the lease is free, has expired, is ours already, or was held by a process of this host
    /// that no longer exists. An end beyond one ttl from now is cut to that: a holder that is alive renews it, and one that
    /// is gone holds it for one ttl and not for years. Migrates the store before that if it has an older schema and this is
    /// a controller.
    ///
    /// # Errors
    /// [`LeaseError::Held`] while another controller leads.
    pub fn acquire(
        &self,
        holder: &str,
        clock: impl Into<LeaseClock>,
        ttl: Span,
    ) -> std::result::Result<Lease, LeaseError> {
        let clock: LeaseClock = clock.into();
        // Most calls are those of a standby, which locks nothing while the leader is alive.
        if let Some(held) = self.held_by_other(holder, clock, ttl)? {
            return Err(LeaseError::Held { by: held.holder, until: held.expires });
        }
        if self.awaited_migration()?.is_some() {
            self.migrate(holder, clock, ttl)?;
        }
        let taken = self.write_unfenced(Access::WriteExclusive, |tx| {
            // After the row is locked, because waiting for the lock takes time.
            let now = clock_now(tx, clock)?;
            let held = read(tx)?;
            if !may_take(&held, holder, now) {
                return Ok(AcquireResult::HeldByOther(limit_expiry(tx, held, now, ttl)?));
            }
            let fence = held.fence + 1;
            let sql = "UPDATE lease SET holder = $1, fence = $2, expires = $3 WHERE id = 1";
            tx.execute("taking the lease", sql, vals![holder, fence, now.plus(ttl)])?;
            lease_term::write(tx, &LeaseTerm { fence, since: now, ttl, is_virtual: clock.is_virtual() })?;
            Ok(AcquireResult::Acquired(fence))
        })?;
        match taken {
            AcquireResult::Acquired(fence) => Ok(Lease { holder: holder.to_owned(), fence, ttl }),
            AcquireResult::HeldByOther(held) => Err(LeaseError::Held { by: held.holder, until: held.expires }),
        }
    }

    /// Extends the lease by its ttl from now, even if it has expired meanwhile: as long as the fence is ours, no other
    /// controller has led. Only for the start of a cycle, which observes everything again.
    pub fn renew(&self, lease: &Lease, clock: impl Into<LeaseClock>) -> Result<()> {
        self.extend(lease, clock.into(), |_| Timestamp::MIN)
    }

    /// Extends the lease by its ttl from now unless it has expired. A process that was suspended for longer than its lease
    /// must not continue a plan that it made before.
    pub fn keep(&self, lease: &Lease, clock: impl Into<LeaseClock>) -> Result<()> {
        self.extend(lease, clock.into(), |now| now)
    }

    /// Extends a lease that ends after `end_after(now)`. It does not wait for this controller's own writes: they lock the
    /// row's key, which this statement leaves alone.
    fn extend(&self, lease: &Lease, clock: LeaseClock, end_after: impl Fn(Timestamp) -> Timestamp) -> Result<()> {
        self.transaction(Access::RenewLease, &mut |tx| {
            let now = lock_and_read_clock(tx, clock)?;
            let sql = "UPDATE lease SET expires = $1 WHERE id = 1 AND fence = $2 AND holder = $3 AND expires > $4";
            let vals = vals![now.plus(lease.ttl), lease.fence, &lease.holder, end_after(now)];
            if tx.execute("renewing the lease", sql, vals)? == 1 {
                return Ok(());
            }
            // A migration takes the lease, so a newer schema is found here.
            let found = schema::version(tx)?.unwrap_or(0);
            schema::check_writable(tx, self.shared.schema, found)?;
            let held = read(tx)?;
            match held.fence == lease.fence && held.holder == lease.holder {
                true => Err(StoreError::LeaseExpired { at: held.expires }),
                false => Err(lease_lost(held)),
            }
        })
    }

    /// Releases the lease immediately. Does nothing if the lease is no longer ours.
    pub fn release(&self, lease: &Lease) -> Result<()> {
        self.write_unfenced(Access::WriteExclusive, |tx| {
            let sql = "UPDATE lease SET holder = '', expires = 0 WHERE id = 1 AND fence = $1";
            tx.execute("releasing the lease", sql, vals![lease.fence]).map(drop)
        })
    }

    /// Checks in the store that we still lead, and returns for how long. Call this right before each effect on the
    /// cluster.
    pub fn holds_lease(&self, lease: &Lease, clock: impl Into<LeaseClock>) -> Result<Span> {
        let (held, now) = self.lease_row(clock.into())?;
        if held.fence != lease.fence {
            return Err(lease_lost(held));
        }
        if now >= held.expires {
            return Err(StoreError::LeaseExpired { at: held.expires });
        }
        Ok(held.expires.since(now))
    }

    /// Returns the leader and when its lease expires by the clock of the lease; `None` if the lease is free.
    pub fn leader(&self) -> Result<Option<(String, Timestamp)>> {
        self.read(|tx| {
            let held = read(tx)?;
            Ok((!held.holder.is_empty()).then_some((held.holder, held.expires)))
        })
    }

    /// Returns the lease if another controller holds it and this one must wait, without locking anything. An end that the
    /// holder cannot have asked for is no reason to wait: it has to be cut.
    fn held_by_other(&self, holder: &str, clock: LeaseClock, ttl: Span) -> Result<Option<LeaseRow>> {
        let (held, now) = self.lease_row(clock)?;
        if may_take(&held, holder, now) {
            return Ok(None);
        }
        self.transaction(Access::Read, &mut |tx| {
            // A program that a newer one has overtaken can never lead.
            let found = schema::version(tx)?.unwrap_or(0);
            match schema::check_writable(tx, self.shared.schema, found) {
                Err(error) if error.awaits_migration() && self.shared.migrator.is_some() => {}
                checked => checked?,
            }
            Ok((held.expires <= latest_expiry(tx, &held, now, ttl)?).then(|| held.clone()))
        })
    }

    /// Returns the row and the time, in one statement outside a transaction.
    fn lease_row(&self, clock: LeaseClock) -> Result<(LeaseRow, Timestamp)> {
        self.transaction(Access::ReadStatement, &mut |tx| read_with_clock(tx, clock))
    }
}
