//! Lists all processes from /proc.

use std::{fs, io, os::unix::fs::MetadataExt, path::Path};

use doctor_checks::{probe::Process, proc_stat::ProcStat};
use doctor_core::time::Span;

/// Far above the kernel's default limit.
const MAX_PROCESSES: usize = 200_000;
/// The unit of times in /proc, on every architecture that Linux supports.
const TICKS_PER_SECOND: u64 = 100;

pub(super) fn list_processes(root: &Path) -> io::Result<Vec<Process>> {
    let proc = root.join("proc");
    let up = fs::read_to_string(proc.join("uptime"))?;
    let up: f64 = up.split(' ').next().and_then(|text| text.parse().ok()).ok_or(io::ErrorKind::InvalidData)?;
    let mut all = Vec::new();
    for entry in fs::read_dir(&proc)? {
        let entry = entry?;
        // A process may end meanwhile.
        let pid = entry.file_name().to_str().and_then(|name| name.parse().ok());
        if let Some(process) = pid.and_then(|pid| one(&entry.path(), pid, up)) {
            all.push(process);
        }
        if all.len() > MAX_PROCESSES {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
    }
    all.sort_by_key(|process| process.pid);
    Ok(all)
}

fn one(folder: &Path, pid: u32, up: f64) -> Option<Process> {
    let line = fs::read_to_string(folder.join("stat")).ok()?;
    let stat = ProcStat::parse(&line)?;
    let user = fs::metadata(folder).ok()?.uid();
    let started = stat.start_ticks as f64 / TICKS_PER_SECOND as f64;
    let wait_channel = || fs::read_to_string(folder.join("wchan")).ok().map(|text| text.trim().to_owned());
    Some(Process {
        pid,
        parent: stat.parent,
        user,
        name: ProcStat::name(&line)?.to_owned(),
        state: stat.state,
        age: Span::from_secs((up - started).max(0.0) as i64),
        wchan: (stat.state == 'D').then(wait_channel).flatten().filter(|text| !text.is_empty() && text != "0"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_includes_this_process() {
        let all = list_processes(Path::new("/")).unwrap();
        let this = all.iter().find(|process| process.pid == std::process::id()).unwrap();
        assert_eq!(this.user, rustix::process::getuid().as_raw());
        assert!(this.age < Span::hours(1) && this.wchan.is_none(), "{this:?}");
        assert!(all.iter().any(|process| process.pid == 1));
    }

    #[test]
    fn a_process_blocked_in_the_kernel_has_its_wait_channel() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("proc/42");
        fs::create_dir_all(&folder).unwrap();
        fs::write(root.path().join("proc/uptime"), "1000.00 1.00\n").unwrap();
        // Written by hand after proc(5); the name contains a bracket and a space.
        let stat = "42 (nv (x) smi) D 1 42 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 90000 1 1 18446744073709551615";
        fs::write(folder.join("stat"), stat).unwrap();
        fs::write(folder.join("wchan"), "os_acquire_rwlock_write").unwrap();
        let all = list_processes(root.path()).unwrap();
        assert_eq!((all[0].name.as_str(), all[0].state, all[0].age), ("nv (x) smi", 'D', Span::from_secs(100)));
        assert_eq!(all[0].wchan.as_deref(), Some("os_acquire_rwlock_write"));
    }
}
