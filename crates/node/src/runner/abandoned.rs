//! Probes that were left behind because they could not be killed.
//!
//! They are remembered for as long as they hang: in this process always, and in a directory if there is one, because a
//! job is a process of its own and the next one must know too.

use std::{
    cell::OnceCell,
    fs,
    path::{Path, PathBuf},
    process::Child,
    sync::{Mutex, PoisonError},
};

use doctor_checks::proc_stat::ProcStat;
use serde::{Deserialize, Serialize};

/// What this process left behind.
static OF_THIS_PROCESS: Mutex<Vec<Left>> = Mutex::new(Vec::new());

struct Left {
    note: Note,
    /// Reaped when it is free at last.
    child: Child,
}

#[derive(Debug)]
pub(crate) struct AbandonedProbes {
    directory: Option<PathBuf>,
    noted: OnceCell<Vec<Note>>,
}

/// A file in the directory, named by process and start so that two never share one.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Note {
    what: String,
    pid: u32,
    start_ticks: u64,
    boot_id: String,
}

impl AbandonedProbes {
    pub(crate) const fn of_this_process() -> Self {
        Self { directory: None, noted: OnceCell::new() }
    }

    pub(crate) fn kept_in(directory: &Path) -> Self {
        Self { directory: Some(directory.join("abandoned")), noted: OnceCell::new() }
    }

    /// `pid` is what hangs: the child, or something it started.
    pub(crate) fn add(&self, what: &str, pid: u32, child: Child) {
        let Some(stat) = stat_of(pid) else { return };
        let note = Note { what: what.to_owned(), pid, start_ticks: stat.start_ticks, boot_id: boot_id() };
        // If this cannot be written, only this process will know. The probe's answer says what matters.
        if let (Some(directory), Ok(text)) = (&self.directory, serde_json::to_vec(&note)) {
            let _kept = fs::create_dir_all(directory).and_then(|()| fs::write(note.place(directory), text));
        }
        OF_THIS_PROCESS.lock().unwrap_or_else(PoisonError::into_inner).push(Left { note, child });
    }

    /// The process that still hangs on this, if one does. Those that came free meanwhile are forgotten.
    pub(crate) fn hanging(&self, what: &str) -> Option<u32> {
        let mut left = OF_THIS_PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
        left.retain_mut(|left| {
            let hangs = matches!(left.child.try_wait(), Ok(None)) || left.note.still_hangs();
            if let (false, Some(directory)) = (hangs, &self.directory) {
                let _forgotten = fs::remove_file(left.note.place(directory));
            }
            hangs
        });
        let here = left.iter().find(|left| left.note.what == what && left.note.still_hangs());
        here.map(|left| left.note.pid).or_else(|| self.noted(what))
    }

    /// What processes before this one left behind, read once: those of this one are known without a file.
    fn noted(&self, what: &str) -> Option<u32> {
        let notes = self.noted.get_or_init(|| self.directory.as_deref().map_or_else(Vec::new, read_notes));
        notes.iter().find(|note| note.what == what && note.still_hangs()).map(|note| note.pid)
    }
}

/// Notes of what still hangs. The others are removed.
fn read_notes(directory: &Path) -> Vec<Note> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let one = |entry: fs::DirEntry| {
        let note = fs::read(entry.path()).ok().and_then(|text| Note::read(&text));
        let hangs = note.filter(Note::still_hangs);
        if hangs.is_none() {
            let _forgotten = fs::remove_file(entry.path());
        }
        hangs
    };
    entries.filter_map(one).collect()
}

impl Note {
    fn place(&self, directory: &Path) -> PathBuf {
        directory.join(format!("{}-{}.json", self.pid, self.start_ticks))
    }

    pub(super) fn read(text: &[u8]) -> Option<Self> {
        serde_json::from_slice(text).ok()
    }

    fn still_hangs(&self) -> bool {
        self.boot_id == boot_id()
            && stat_of(self.pid).is_some_and(|stat| stat.start_ticks == self.start_ticks && !stat.is_over())
    }
}

/// Every process of this machine that can be seen.
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
