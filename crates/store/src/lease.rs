//! Leadership: one row with a fencing number.
//!
//! A controller leads while the row bears its fence. Taking over raises the fence, and every write of a controller
//! reads the fence inside its own transaction: a controller that was paused for an hour and wakes up can neither
//! write nor, because it asks [`Store::still_ours`] right before each effect, act.

use doctor_core::time::{Span, Timestamp};

use super::{
    Store,
    db::{Access, Tx, vals},
    error::{Result, StoreError},
    inbox,
};

/// The right to lead, as long as nobody took over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    pub holder: String,
    /// Higher than that of anybody who led before.
    pub fence: u64,
    pub ttl: Span,
}

/// Why there is no lease to be had.
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    #[error("{by} leads until {until}: stop it, or wait until its lease runs out")]
    Held { by: String, until: Timestamp },
    #[error(transparent)]
    Store(#[from] StoreError),
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Held {
    holder: String,
    fence: u64,
    expires: Timestamp,
}

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

fn lost(held: Held) -> StoreError {
    let by = if held.holder.is_empty() { "nobody".to_owned() } else { held.holder };
    StoreError::LeaseLost { by, fence: held.fence }
}

fn read(tx: &mut Tx<'_>) -> Result<Held> {
    let held = tx.first("reading the lease", "SELECT holder, fence, expires FROM lease WHERE one = 1", &[], |row| {
        Ok(Held { holder: row.text(0)?.to_owned(), fence: row.number(1)?, expires: row.moment(2)? })
    })?;
    held.ok_or_else(|| StoreError::Unreadable { what: "lease", why: "its row is gone".to_owned() })
}

/// Begins a write: the fence must be ours and stays so until the transaction ends, and names are brought up to date.
/// On PostgreSQL the row is locked (shared, or alone) so that a take-over waits; on SQLite there is one writer anyway.
pub(super) fn begin_write(tx: &mut Tx<'_>, access: Access, lease: Option<&Lease>) -> Result<()> {
    let lock = match (tx.is_sqlite(), access) {
        (true, _) | (false, Access::Read | Access::ReadOnce) => "",
        (false, Access::Write | Access::WriteResults | Access::EnterResults) => " FOR SHARE OF l",
        (false, Access::WriteAlone) => " FOR UPDATE OF l",
    };
    let sql = format!(
        "SELECT l.holder, l.fence, l.expires, (SELECT MAX(id) FROM node), (SELECT MAX(id) FROM test), \
         (SELECT MAX(id) FROM outcome), (SELECT MAX(id) FROM bundle) FROM lease l WHERE l.one = 1{lock}"
    );
    let found = tx.first("checking the lease", &sql, &[], |row| {
        let held = Held { holder: row.text(0)?.to_owned(), fence: row.number(1)?, expires: row.moment(2)? };
        Ok((held, [row.opt_int(3)?, row.opt_int(4)?, row.opt_int(5)?], row.opt_int(6)?))
    })?;
    let (held, there, last_bundle) =
        found.ok_or_else(|| StoreError::Unreadable { what: "lease", why: "its row is gone".to_owned() })?;
    if lease.is_some_and(|lease| lease.fence != held.fence) {
        return Err(lost(held));
    }
    tx.last_bundle = last_bundle.unwrap_or(0);
    tx.learn(there)
}

/// The name under which this process holds a lease: `host:pid:starttime`. The host part also names the boot and the
/// process namespace, so that nobody mistakes a process it cannot see for a dead one.
pub fn this_process() -> String {
    let text = |path: &str| std::fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default();
    let host = text("/proc/sys/kernel/hostname");
    let boot: String = text("/proc/sys/kernel/random/boot_id").chars().take(8).collect();
    let space = std::fs::read_link("/proc/self/ns/pid").map(|link| link.to_string_lossy().into_owned());
    let space: String = space.unwrap_or_default().chars().filter(char::is_ascii_digit).collect();
    let pid = std::process::id();
    format!("{host}/{boot}/{space}:{pid}:{}", start_time(pid).unwrap_or(0))
}

/// Whether `holder` was a process of the same host as `us` and is gone.
fn is_dead_neighbour(holder: &str, us: &str) -> bool {
    let (Some((host, pid, start)), Some((our_host, ..))) = (split(holder), split(us)) else { return false };
    host == our_host && host == split(&this_process()).map_or("", |(host, ..)| host) && start_time(pid) != Some(start)
}

pub(super) fn split(holder: &str) -> Option<(&str, u32, u64)> {
    let (rest, start) = holder.rsplit_once(':')?;
    let (host, pid) = rest.rsplit_once(':')?;
    Some((host, pid.parse().ok()?, start.parse().ok()?))
}

/// A process' start in ticks since boot. `None`: there is no such process, or only what is left of a dead one.
fn start_time(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The program's name comes second, in parentheses, and may hold anything.
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    let state = fields.next()?;
    if matches!(state, "Z" | "X") {
        return None;
    }
    // The state is field 3, the start time field 22.
    fields.nth(18)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_live_process_is_not_dead_and_one_with_another_start_time_is() {
        let us = this_process();
        assert!(!is_dead_neighbour(&us, &us));
        let (host, pid, start) = split(&us).unwrap();
        assert!(is_dead_neighbour(&format!("{host}:{pid}:{}", start + 1), &us));
        assert!(is_dead_neighbour(&format!("{host}:{}:{start}", u32::MAX), &us));
        assert!(!is_dead_neighbour(&format!("elsewhere:{}:{start}", u32::MAX), &us), "other hosts cannot be seen");
        assert!(!is_dead_neighbour("somebody", &us));
    }
}
