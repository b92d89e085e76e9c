//! Probe processes that could not be killed.
//!
//! They are recorded as long as they hang: in this process, and in a directory if there is one, because the next job is
//! another process and must know too.

use std::{
    cell::OnceCell,
    fs,
    path::{Path, PathBuf},
    process::Child,
    sync::{Mutex, PoisonError},
};

use doctor_checks::proc_stat::ProcStat;
use doctor_core::time::Timestamp;
use serde::{Deserialize, Serialize};

use crate::clock::now;

/// The processes that this process abandoned.
static HUNG_IN_THIS_PROCESS: Mutex<Vec<HungChild>> = Mutex::new(Vec::new());

struct HungChild {
    note: HungProbeRecord,
    /// Reaped once the kernel releases it.
    child: Child,
}

#[derive(Debug)]
pub(crate) struct HungProbes {
    directory: Option<PathBuf>,
    recorded: OnceCell<Vec<HungProbeRecord>>,
}

/// One file per process, named by its pid and start time so that names are unique.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct HungProbeRecord {
    what: String,
    pid: u32,
    start_ticks: u64,
    boot_id: String,
    #[serde(default)]
    since: Option<Timestamp>,
    /// The operation it hangs in, if more is known than `what`.
    #[serde(default)]
    doing: Option<String>,
}

/// A process that survived SIGKILL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StuckProcess {
    pub(super) pid: u32,
    pub(super) since: Option<Timestamp>,
    pub(super) doing: Option<String>,
}

impl HungProbes {
    pub(crate) const fn in_memory() -> Self {
        Self { directory: None, recorded: OnceCell::new() }
    }

    pub(crate) fn in_directory(directory: &Path) -> Self {
        Self { directory: Some(directory.join("abandoned")), recorded: OnceCell::new() }
    }

    /// Records an abandoned process. `pid` is the one that hangs: the child or a descendant.
    pub(crate) fn add(&self, what: &str, pid: u32, child: Child) {
        self.add_stuck(what, StuckProcess { pid, since: Some(now()), doing: None }, child);
    }

    /// Like [`Self::add`], with details.
    pub(super) fn add_stuck(&self, what: &str, stuck: StuckProcess, child: Child) {
        let StuckProcess { pid, since, doing: operation } = stuck;
        let Some(stat) = stat_of(pid) else { return };
        let start_ticks = stat.start_ticks;
        let note =
            HungProbeRecord { what: what.to_owned(), pid, start_ticks, boot_id: boot_id(), since, doing: operation };
        // If writing fails, only this process knows. The probe's output has the essentials.
        if let (Some(directory), Ok(text)) = (&self.directory, serde_json::to_vec(&note)) {
            let _kept = fs::create_dir_all(directory).and_then(|()| fs::write(note.path(directory), text));
        }
        HUNG_IN_THIS_PROCESS.lock().unwrap_or_else(PoisonError::into_inner).push(HungChild { note, child });
    }

    /// Returns a process that still hangs on `what`, if any. Forgets those that have ended.
    pub(crate) fn hanging(&self, what: &str) -> Option<u32> {
        self.all_hanging(what).first().map(|stuck| stuck.pid)
    }

    /// Returns every process that still hangs on `what`, from this process and earlier ones.
    pub(super) fn all_hanging(&self, what: &str) -> Vec<StuckProcess> {
        let mut hung = HUNG_IN_THIS_PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
        hung.retain_mut(|hung| {
            let still_hangs = matches!(hung.child.try_wait(), Ok(None)) || hung.note.still_hangs();
            if let (false, Some(directory)) = (still_hangs, &self.directory) {
                let _forgotten = fs::remove_file(hung.note.path(directory));
            }
            still_hangs
        });
        let own_records: Vec<&HungProbeRecord> = hung.iter().map(|hung| &hung.note).collect();
        // Notes of earlier processes are read once.
        let recorded = self.recorded.get_or_init(|| self.directory.as_deref().map_or_else(Vec::new, read_records));
        let before = recorded.iter().filter(|note| !own_records.iter().any(|own| own.is_same(note)));
        let all = own_records.iter().copied().chain(before);
        all.filter(|note| note.what == what && note.still_hangs()).map(HungProbeRecord::to_stuck_process).collect()
    }
}

/// Reads the notes of processes that still hang, and removes the others.
fn read_records(directory: &Path) -> Vec<HungProbeRecord> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let one = |entry: fs::DirEntry| {
        let note = fs::read(entry.path()).ok().and_then(|text| HungProbeRecord::read(&text));
        let still_hanging = note.filter(HungProbeRecord::still_hangs);
        if still_hanging.is_none() {
            let _forgotten = fs::remove_file(entry.path());
        }
        still_hanging
    };
    entries.filter_map(one).collect()
}

impl HungProbeRecord {
    fn path(&self, directory: &Path) -> PathBuf {
        directory.join(format!("{}-{}.json", self.pid, self.start_ticks))
    }

    pub(super) fn read(text: &[u8]) -> Option<Self> {
        serde_json::from_slice(text).ok()
    }

    fn is_same(&self, other: &Self) -> bool {
        (self.pid, self.start_ticks, &self.boot_id) == (other.pid, other.start_ticks, &other.boot_id)
    }

    fn to_stuck_process(&self) -> StuckProcess {
        StuckProcess { pid: self.pid, since: self.since, doing: self.doing.clone() }
    }

    fn still_hangs(&self) -> bool {
        self.boot_id == boot_id()
            && stat_of(self.pid).is_some_and(|stat| stat.start_ticks == self.start_ticks && !stat.has_exited())
    }
}

/// Iterates over all visible processes of this machine.
pub(crate) fn processes() -> impl Iterator<Item = ProcStat> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| stat_of(entry.file_name().to_str()?.parse().ok()?))
}

pub(crate) fn stat_of(pid: u32) -> Option<ProcStat> {
    ProcStat::parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

pub(crate) fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").map(|id| id.trim().to_owned()).unwrap_or_default()
}
