//! What is recorded of a lease beside its row: since when its holder leads, by which clock, and for how long each renewal
//! asks. Also `doctor db lease`: how an operator sees the lease and takes it from a holder that is gone.

use doctor_core::time::{Span, Timestamp};
use serde::{Deserialize, Serialize};

use super::{
    Store,
    db::{Access, Tx, vals},
    error::{Result, StoreError},
    fencing::{self, LeaseRow},
    json,
    lease_clock::{LeaseClock, clock_now},
    operator_commands::{audit_operator, meta, set_meta},
};

/// Key in `meta`. A column would be a migration, which a rolling update pays for.
const KEY: &str = "lease-term";

/// The term of one holder. It belongs to the row with the same fence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LeaseTerm {
    pub(super) fence: u64,
    pub(super) since: Timestamp,
    pub(super) ttl: Span,
    #[serde(default, rename = "virtual")]
    pub(super) is_virtual: bool,
}

/// The lease as an operator sees it, by the clock by which it counts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LeaseStatus {
    pub holder: String,
    pub fence: u64,
    /// `None`: acquired by a version that did not record it.
    pub since: Option<Timestamp>,
    pub until: Timestamp,
    /// For how long each renewal asks.
    pub ttl: Option<Span>,
    pub now: Timestamp,
    /// Whether the lease has not expired.
    pub alive: bool,
}

pub(super) fn write(tx: &mut Tx<'_>, term: &LeaseTerm) -> Result<()> {
    set_meta(tx, KEY, &json::write(term)?)
}

/// Returns the last recorded term. An unreadable one counts as none, because a lease must be takeable in any case.
pub(super) fn read(tx: &mut Tx<'_>) -> Result<Option<LeaseTerm>> {
    Ok(meta(tx, KEY)?.and_then(|text| json::read("lease term", &text).ok()))
}

/// Returns the latest end that the holder can have asked for by now: after the ttl that it recorded, or ours if that is
/// longer. It works in every schema.
pub(super) fn latest_expiry(tx: &mut Tx<'_>, held: &LeaseRow, now: Timestamp, ttl: Span) -> Result<Timestamp> {
    let recorded = read(tx)?.filter(|term| term.fence == held.fence);
    Ok(now.plus(recorded.map_or(ttl, |term| term.ttl.max(ttl))))
}

/// Cuts an end that the holder cannot have asked for ([`latest_expiry`]). A wrong clock wrote it, of a holder of an earlier
/// version or of the database's machine. It works in every schema.
pub(super) fn limit_expiry(tx: &mut Tx<'_>, held: LeaseRow, now: Timestamp, ttl: Span) -> Result<LeaseRow> {
    let limit = latest_expiry(tx, &held, now, ttl)?;
    if held.expires <= limit {
        return Ok(held);
    }
    tracing::warn!(
        holder = %held.holder,
        until = %held.expires,
        now = %now,
        limit = %limit,
        "the lease ends further ahead than its holder can have asked for: a clock was wrong; the end is cut"
    );
    let sql = "UPDATE lease SET expires = $1 WHERE id = 1 AND fence = $2";
    tx.execute("limiting the lease", sql, vals![limit, held.fence])?;
    Ok(LeaseRow { expires: limit, ..held })
}

impl Store {
    /// Returns the lease; `None` if it is free. `now` is the caller's time, by which the lease of a simulation counts.
    pub fn lease_status(&self, now: Timestamp) -> Result<Option<LeaseStatus>> {
        self.transaction(Access::Read, &mut |tx| {
            let held = fencing::read(tx)?;
            if held.holder.is_empty() {
                return Ok(None);
            }
            let term = read(tx)?.filter(|term| term.fence == held.fence);
            let is_virtual = term.as_ref().is_some_and(|term| term.is_virtual);
            let now = clock_now(tx, LeaseClock::of(is_virtual.then_some(now)))?;
            Ok(Some(LeaseStatus {
                holder: held.holder,
                fence: held.fence,
                since: term.as_ref().map(|term| term.since),
                until: held.expires,
                ttl: term.map(|term| term.ttl),
                now,
                alive: now < held.expires,
            }))
        })
    }

    /// Returns the leader and when its lease expires, expressed in the caller's time: readers compare it with that.
    pub fn leader_at(&self, now: Timestamp) -> Result<Option<(String, Timestamp)>> {
        let status = self.lease_status(now)?;
        Ok(status.map(|status| {
            let until = match status.alive {
                true => now.plus(status.until.since(status.now)),
                false => now.minus(status.now.since(status.until)),
            };
            (status.holder, until)
        }))
    }

    /// Takes the lease from the holder with this fence, for an operator: it is free afterwards, and its former holder can
    /// write nothing and starts no effect. A controller that waits takes it in its next cycle.
    ///
    /// # Errors
    /// [`StoreError::StateChanged`] if the lease has another fence by now or is free.
    pub fn take_lease(&self, fence: u64, by: &str, why: &str) -> Result<()> {
        self.write_unfenced(Access::WriteExclusive, |tx| {
            let held = fencing::read(tx)?;
            if held.fence != fence || held.holder.is_empty() {
                return Err(StoreError::StateChanged { what: "the lease".to_owned() });
            }
            let sql = "UPDATE lease SET holder = '', expires = 0, fence = fence + 1 WHERE id = 1";
            tx.execute("taking the lease", sql, &[])?;
            let at = clock_now(tx, LeaseClock::Database)?;
            let text = format!("from {} (fence {fence}): {why}", held.holder);
            audit_operator(tx, "take-lease", None, (by, &text), at)
        })
    }
}
