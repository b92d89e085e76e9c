//! Decides from one status whether a host is in use. Evidence of use outranks missing data: a host with a known user is
//! busy even if other values could not be read. Without such evidence, a host with an unreadable value is unknown, never free.
//!
//! The controller plans with this result. The host evaluates it again before it starts a run, a reset or a reboot.

use doctor_core::node::Occupancy;

use crate::protocol::{HostStatus, Process};

/// Returns why no work may start on a host: it is in use, its use is unknown, or an operator's mark blocks it.
pub fn blocked_reason(status: &HostStatus, max_load_per_core: f64) -> Option<String> {
    if let Some(mark) = status.marks.foreign.iter().find(|mark| mark.blocks) {
        return Some(format!("{} blocks new work: {}", mark.by, mark.text));
    }
    match occupancy(status, max_load_per_core) {
        Occupancy::Free => None,
        Occupancy::Busy { by } => Some(by.to_string()),
        Occupancy::Unknown { why } => Some(why.to_string()),
    }
}

pub fn occupancy(status: &HostStatus, max_load_per_core: f64) -> Occupancy {
    let busy = busy_reason(status, max_load_per_core).map(|by| Occupancy::Busy { by: by.into() });
    let unknown = || unknown_reason(status).map(|why| Occupancy::Unknown { why: why.into() });
    busy.or_else(unknown).unwrap_or(Occupancy::Free)
}

fn busy_reason(status: &HostStatus, max_load_per_core: f64) -> Option<String> {
    if let Some(lock) = status.locks.first() {
        return Some(format!("{} exists", lock.display()));
    }
    let some = |found: &Result<Vec<Process>, String>| found.as_deref().ok().and_then(<[_]>::first).cloned();
    if let Some(process) = some(&status.gpu_users) {
        return Some(format!("process {} ({}) holds a GPU", process.pid, process.name));
    }
    if let Some(process) = some(&status.terminal_users) {
        return Some(format!("process {} ({}) uses the CPU at a terminal", process.pid, process.name));
    }
    // The load of our own run cannot be separated from that of other processes. Terminals and GPUs can.
    let load = status.load.as_ref().ok().filter(|_| status.active_runs.is_empty())?;
    #[expect(clippy::cast_precision_loss, reason = "a count of cores")]
    let per_core = load / status.cores.max(1) as f64;
    (per_core > max_load_per_core).then(|| format!("load {per_core:.2} per core, limit {max_load_per_core}"))
}

fn unknown_reason(status: &HostStatus) -> Option<String> {
    if let Some(pid) = status.unkillable_pid {
        return Some(format!("process {pid} of an earlier job hangs and cannot be killed"));
    }
    let errors = [status.gpu_users.as_ref().err(), status.terminal_users.as_ref().err(), status.load.as_ref().err()];
    errors.into_iter().flatten().next().cloned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use doctor_core::{
        ids::RunId,
        node::{ForeignMark, Marks},
        time::Timestamp,
    };

    fn quiet() -> HostStatus {
        HostStatus {
            at: Timestamp::from_secs(0),
            boot_id: "b".to_owned(),
            cores: 4,
            load: Ok(0.4),
            gpu_users: Ok(Vec::new()),
            terminal_users: Ok(Vec::new()),
            locks: Vec::new(),
            unkillable_pid: None,
            marks: Marks::default(),
            active_runs: Vec::new(),
            runs: Vec::new(),
        }
    }

    fn describe(status: &HostStatus) -> String {
        match occupancy(status, 0.7) {
            Occupancy::Free => "free".to_owned(),
            Occupancy::Busy { by } => format!("busy: {by}"),
            Occupancy::Unknown { why } => format!("unknown: {why}"),
        }
    }

    #[test]
    fn a_host_is_free_only_if_every_source_reports_it_free() {
        let train = || Ok(vec![Process { pid: 7, name: "train".to_owned() }]);
        let no = || Err("denied".to_owned());
        for (status, expected) in [
            (quiet(), "free"),
            (HostStatus { gpu_users: train(), ..quiet() }, "busy: process 7 (train) holds a GPU"),
            (
                HostStatus { terminal_users: train(), gpu_users: no(), ..quiet() },
                "busy: process 7 (train) uses the CPU at a terminal",
            ),
            (HostStatus { locks: vec!["/run/site".into()], ..quiet() }, "busy: /run/site exists"),
            (HostStatus { load: Ok(4.0), ..quiet() }, "busy: load 1.00 per core, limit 0.7"),
            (HostStatus { load: Ok(4.0), active_runs: vec![RunId::from_number(1)], ..quiet() }, "free"),
            (HostStatus { load: Err("no load".to_owned()), ..quiet() }, "unknown: no load"),
            (HostStatus { gpu_users: Err("denied".to_owned()), ..quiet() }, "unknown: denied"),
            (
                HostStatus { unkillable_pid: Some(9), ..quiet() },
                "unknown: process 9 of an earlier job hangs and cannot be killed",
            ),
        ] {
            assert_eq!(describe(&status), expected);
        }
    }

    #[test]
    fn an_operators_mark_blocks_a_free_host() {
        let mark = |blocks| ForeignMark { by: "ann".to_owned(), text: "mine today".to_owned(), blocks };
        let status = |mark| HostStatus { marks: Marks { foreign: vec![mark], ..Marks::default() }, ..quiet() };
        assert_eq!(blocked_reason(&status(mark(true)), 0.7).as_deref(), Some("ann blocks new work: mine today"));
        assert_eq!(blocked_reason(&status(mark(false)), 0.7), None);
        let unsure = HostStatus { gpu_users: Err("denied".to_owned()), ..quiet() };
        assert_eq!(blocked_reason(&unsure, 0.7).as_deref(), Some("denied"));
    }
}
