//! Marks on this machine: ours in `marks.json`, others' in `foreign.json`, which we never write.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
};

use doctor_core::{
    ids::OpId,
    node::{ForeignMark, MarkKind, Marks, OurMark},
};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use super::files;
use crate::backend::{Change, NodeOp};

/// Operations are asked again within minutes if at all; this many are remembered.
const REMEMBERED: usize = 4096;

#[derive(Debug)]
pub(super) struct MarkFiles {
    ours: PathBuf,
    foreign: PathBuf,
    lock: PathBuf,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Ours {
    marks: Vec<OurMark>,
    /// Operations that were done, newest last.
    done: Vec<OpId>,
}

impl MarkFiles {
    pub(super) fn new(state: &Path) -> Self {
        let file = |name| state.join(name);
        Self { ours: file("marks.json"), foreign: file("foreign.json"), lock: file("marks.lock") }
    }

    pub(super) fn read(&self) -> io::Result<Marks> {
        let ours = files::read::<Ours>(&self.ours)?.unwrap_or_default().marks;
        let foreign = files::read::<Vec<ForeignMark>>(&self.foreign)?.unwrap_or_default();
        Ok(Marks { ours, foreign })
    }

    /// Only for changes that are marks: a drain is the mark that nothing new may start.
    pub(super) fn apply(&self, change: &NodeOp) -> io::Result<()> {
        // Held until the file is closed; two controllers, or a controller and a command, take turns.
        let lock = File::options().create(true).append(true).open(&self.lock)?;
        flock(&lock, FlockOperation::LockExclusive)?;
        let mut ours = files::read::<Ours>(&self.ours)?.unwrap_or_default();
        if ours.done.contains(&change.op) {
            return Ok(());
        }
        let (kind, mark) = match &change.what {
            Change::Mark(mark) => (mark.kind, Some(mark.clone())),
            Change::Unmark(mark) => (mark.kind, None),
            Change::Drain => (MarkKind::Cordon, Some(OurMark { kind: MarkKind::Cordon, case: None })),
            Change::Undrain => (MarkKind::Cordon, None),
            Change::Reset | Change::Reboot | Change::Replace => {
                return Err(io::Error::new(io::ErrorKind::Unsupported, "this is no mark"));
            }
        };
        ours.marks.retain(|mark| mark.kind != kind);
        ours.marks.extend(mark);
        ours.done.push(change.op);
        let surplus = ours.done.len().saturating_sub(REMEMBERED);
        ours.done.drain(..surplus);
        files::write(&self.ours, &ours)
    }
}
