//! Finds the users of this machine from its processes in /proc. It does not query drivers: such a call may never
//! return.

use std::{fs, io, os::unix::ffi::OsStrExt as _, time::Duration};

use doctor_checks::proc_stat::ProcStat;
use doctor_host::protocol::Process;

/// Most processes that are listed.
const MAX_LISTED: usize = 16;

/// Observation time of CPU use: at the kernel's 100 ticks a second, one tick is a tenth of it.
const CPU_SAMPLE_TIME: Duration = Duration::from_millis(100);

/// Ticks in that time that count as computing: a fifth of a core. On a loaded machine even a tight loop gets no more.
const MIN_BUSY_TICKS: u64 = 2;

struct SeenProcess {
    stat: ProcStat,
    name: String,
    /// The controlling terminal; 0 means none.
    terminal: i64,
    /// CPU time in clock ticks.
    ticks: u64,
}

/// Returns all processes except the sessions of our jobs. Requires root: with `hidepid` on `/proc`, other users see
/// only their own processes.
fn list_foreign(own_pids: &[u32]) -> io::Result<Vec<SeenProcess>> {
    if !rustix::process::geteuid().is_root() {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "only root can see the processes of all users"));
    }
    let mut seen = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let Some(_) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        // It may have ended since the listing.
        let Ok(line) = fs::read_to_string(entry.path().join("stat")) else { continue };
        seen.extend(
            parse(&line).filter(|seen| !own_pids.contains(&seen.stat.session) && !own_pids.contains(&seen.stat.pid)),
        );
    }
    Ok(seen)
}

/// Parses fields 7, 14 and 15 of proc(5), counted from behind the name.
fn parse(line: &str) -> Option<SeenProcess> {
    let stat = ProcStat::parse(line).filter(|stat| !stat.has_exited())?;
    let name = ProcStat::name(line)?.to_owned();
    let fields: Vec<&str> = line.rsplit_once(") ")?.1.split_ascii_whitespace().collect();
    let number = |field: usize| fields.get(field - 3)?.parse::<i64>().ok();
    let ticks = u64::try_from(number(14)?.saturating_add(number(15)?)).ok()?;
    Some(SeenProcess { stat, name, terminal: number(7)?, ticks })
}

fn to_processes(seen: Vec<SeenProcess>) -> Vec<Process> {
    seen.into_iter().take(MAX_LISTED).map(|seen| Process { pid: seen.stat.pid, name: seen.name }).collect()
}

/// Returns processes that have a GPU open, except for those known to do so without using it.
pub(super) fn gpu_users(own_pids: &[u32], bystanders: &[String]) -> Result<Vec<Process>, String> {
    let mut holders = Vec::new();
    for process in list_foreign(own_pids).map_err(|error| format!("/proc: {error}"))? {
        if bystanders.contains(&process.name) {
            continue;
        }
        match holds_gpu(process.stat.pid) {
            Ok(true) => holders.push(process),
            Ok(false) => {}
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                return Err(format!(
                    "only root can see the open files of process {} ({})",
                    process.stat.pid, process.name
                ));
            }
            // It has ended meanwhile.
            Err(_) => {}
        }
    }
    Ok(to_processes(holders))
}

fn holds_gpu(pid: u32) -> io::Result<bool> {
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let Ok(target) = fs::read_link(entry?.path()) else { continue };
        if is_gpu(target.as_os_str().as_bytes()) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Matches `/dev/nvidia0` and so on, and AMD's compute device. Programs that only query open `/dev/nvidiactl`.
fn is_gpu(path: &[u8]) -> bool {
    let number = path.strip_prefix(b"/dev/nvidia");
    number.is_some_and(|rest| !rest.is_empty() && rest.iter().all(u8::is_ascii_digit)) || path == b"/dev/kfd"
}

/// Returns processes with a terminal that are computing. An idle shell is not work.
pub(super) fn terminal_users(own_pids: &[u32]) -> Result<Vec<Process>, String> {
    let list = || -> Result<Vec<SeenProcess>, String> {
        let all = list_foreign(own_pids).map_err(|error| format!("/proc: {error}"))?;
        Ok(all.into_iter().filter(|process| process.terminal != 0).collect())
    };
    let before = list()?;
    if before.is_empty() {
        return Ok(Vec::new());
    }
    std::thread::sleep(CPU_SAMPLE_TIME);
    let mut after = list()?;
    after.retain(|now| {
        let same = |then: &&SeenProcess| (then.stat.pid, then.stat.start_ticks) == (now.stat.pid, now.stat.start_ticks);
        // New processes are judged by the next query.
        before.iter().find(same).is_some_and(|then| now.ticks.saturating_sub(then.ticks) >= MIN_BUSY_TICKS)
    });
    Ok(to_processes(after))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_devices_themselves_are_gpus() {
        for path in ["/dev/nvidia0", "/dev/nvidia15", "/dev/kfd"] {
            assert!(is_gpu(path.as_bytes()), "{path}");
        }
        for path in ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia", "/dev/null", "/root/dev/nvidia0"] {
            assert!(!is_gpu(path.as_bytes()), "{path}");
        }
    }

    #[test]
    fn terminal_and_time_are_parsed_after_a_name_with_spaces() {
        let line = "4 (a ) b (c) R 1 4 4 34816 4 0 0 0 0 0 70 5 0 0 20 0 1 0 900 1 1";
        let seen = parse(line).unwrap();
        assert_eq!((seen.terminal, seen.ticks, seen.name.as_str()), (34816, 75, "a ) b (c"));
        assert!(parse("4 (x) Z 1 4 4 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 900 1 1").is_none());
        assert!(parse("4 (x) R 1").is_none());
    }

    #[test]
    fn this_process_is_listed_unless_it_is_our_own() {
        let me = std::process::id();
        let session = parse(&fs::read_to_string("/proc/self/stat").unwrap()).unwrap().stat.session;
        let is_listed = |own_pids: &[u32]| list_foreign(own_pids).unwrap().iter().any(|seen| seen.stat.pid == me);
        assert!(is_listed(&[]));
        assert!(!is_listed(&[me]) && !is_listed(&[session]));
    }
}
