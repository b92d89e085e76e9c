//! The lease: one row with a fencing number.
//!
//! A controller leads while the row has its fence. A take-over increments the fence, and every write of a controller
//! checks the fence in its own transaction. A controller that was suspended for an hour can therefore not write; nor
//! can it act, because it calls [`Store::holds_lease`](super::Store::holds_lease) right before each effect.

use doctor_core::time::{Span, Timestamp};

use super::{
    db::{Access, Tx},
    error::{Result, StoreError},
    schema::{self, SchemaHistory},
};

/// The right to lead, until another controller takes over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    pub holder: String,
    /// Higher than the fence of every earlier leader.
    pub fence: u64,
    pub ttl: Span,
}

/// Why the lease was not acquired.
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    #[error("{by} holds the lease until {until}: stop it, or wait until its lease expires")]
    Held { by: String, until: Timestamp },
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The lease's row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LeaseRow {
    pub(super) holder: String,
    pub(super) fence: u64,
    pub(super) expires: Timestamp,
}

/// The error for a controller whose fence is not the current one.
pub(super) fn lease_lost(held: LeaseRow) -> StoreError {
    let by = if held.holder.is_empty() { "no controller".to_owned() } else { held.holder };
    StoreError::LeaseLost { by, fence: held.fence }
}

pub(super) fn read(tx: &mut Tx<'_>) -> Result<LeaseRow> {
    let held = tx.first("reading the lease", "SELECT holder, fence, expires FROM lease WHERE id = 1", &[], |row| {
        Ok(LeaseRow { holder: row.text(0)?.to_owned(), fence: row.unsigned(1)?, expires: row.timestamp(2)? })
    })?;
    held.ok_or_else(|| StoreError::Unreadable { what: "lease", why: "its row is missing".to_owned() })
}

/// Begins a write: checks that the schema is that of this program and the fence ours, keeps it so until the transaction
/// ends, and refreshes names. On PostgreSQL the row is locked, so that a take-over waits: its key by a write, which lets the
/// lease be renewed meanwhile, or all of it by an exclusive write. A migration waits too: it locks the table, and a
/// statement that waited for a table reads what was committed meanwhile. SQLite has a single writer.
pub(super) fn begin_write(
    tx: &mut Tx<'_>,
    access: Access,
    lease: Option<&Lease>,
    history: SchemaHistory,
) -> Result<()> {
    let lock = match (tx.is_sqlite(), access) {
        // Any process may add to the ingest queue, whoever leads: a stream of messages must not delay a take-over. A migration
        // locks that table, which was locked at the begin.
        (true, _) | (false, Access::Read | Access::ReadStatement | Access::Enqueue) => "",
        (false, Access::Write | Access::EnterQueued | Access::RenewLease) => " FOR KEY SHARE OF l",
        (false, Access::WriteExclusive) => " FOR UPDATE OF l",
    };
    let sql = format!(
        "SELECT l.holder, l.fence, l.expires, (SELECT MAX(id) FROM node), (SELECT MAX(id) FROM test), \
         (SELECT MAX(id) FROM outcome), (SELECT MAX(id) FROM evidence_pack), \
         (SELECT MAX(version) FROM schema_version) FROM lease l WHERE l.id = 1{lock}"
    );
    let found = tx.first("checking the lease", &sql, &[], |row| {
        let held = LeaseRow { holder: row.text(0)?.to_owned(), fence: row.unsigned(1)?, expires: row.timestamp(2)? };
        Ok((held, [row.opt_int(3)?, row.opt_int(4)?, row.opt_int(5)?], row.opt_int(6)?, row.opt_int(7)?))
    })?;
    let (held, there, last_bundle, found) =
        found.ok_or_else(|| StoreError::Unreadable { what: "lease", why: "its row is missing".to_owned() })?;
    schema::check_writable(tx, history, found.unwrap_or(0))?;
    if lease.is_some_and(|lease| lease.fence != held.fence) {
        return Err(lease_lost(held));
    }
    tx.last_pack = last_bundle.unwrap_or(0);
    tx.load_new_ids(there)
}

/// Returns this process as lease holder: `host:pid:starttime`. The host part includes the boot id and the PID
/// namespace, so that a process that is merely invisible is not taken for a dead one.
pub fn this_process() -> String {
    let text = |path: &str| std::fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default();
    let host = text("/proc/sys/kernel/hostname");
    let boot: String = text("/proc/sys/kernel/random/boot_id").chars().take(8).collect();
    let space = std::fs::read_link("/proc/self/ns/pid").map(|link| link.to_string_lossy().into_owned());
    let space: String = space.unwrap_or_default().chars().filter(char::is_ascii_digit).collect();
    let pid = std::process::id();
    format!("{host}/{boot}/{space}:{pid}:{}", start_time(pid).unwrap_or(0))
}

/// Whether `holder` was a process on the host of `us` and has exited.
fn is_dead_local_process(holder: &str, us: &str) -> bool {
    let (Some((host, pid, start)), Some((our_host, ..))) = (split(holder), split(us)) else { return false };
    host == our_host && host == split(&this_process()).map_or("", |(host, ..)| host) && start_time(pid) != Some(start)
}

/// Whether this holder may take the lease, by the columns that it has in every schema.
pub(super) fn may_take(held: &LeaseRow, holder: &str, now: Timestamp) -> bool {
    held.holder.is_empty()
        || held.holder == holder
        || now >= held.expires
        || is_dead_local_process(&held.holder, holder)
}

pub(super) fn split(holder: &str) -> Option<(&str, u32, u64)> {
    let (rest, start) = holder.rsplit_once(':')?;
    let (host, pid) = rest.rsplit_once(':')?;
    Some((host, pid.parse().ok()?, start.parse().ok()?))
}

/// Returns a process's start time in ticks since boot. `None` if it does not exist or is a zombie.
fn start_time(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The program's name is second, in parentheses, and may contain anything.
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    let state = fields.next()?;
    if matches!(state, "Z" | "X") {
        return None;
    }
    // State is field 3, start time is field 22.
    fields.nth(18)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_with_another_start_time_is_dead() {
        let us = this_process();
        assert!(!is_dead_local_process(&us, &us));
        let (host, pid, start) = split(&us).unwrap();
        assert!(is_dead_local_process(&format!("{host}:{pid}:{}", start + 1), &us));
        assert!(is_dead_local_process(&format!("{host}:{}:{start}", u32::MAX), &us));
        assert!(!is_dead_local_process(&format!("elsewhere:{}:{start}", u32::MAX), &us), "other hosts are not visible");
        assert!(!is_dead_local_process("other", &us));
    }
}
