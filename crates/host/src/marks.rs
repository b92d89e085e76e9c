//! Marks of this machine: ours in `marks.json`, foreign ones in `foreign.json`, which we never write.

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

use crate::files;

/// The number of operation ids remembered for idempotence. The controller retries an operation within minutes, if at all.
const MAX_OPERATION_IDS: usize = 4096;

#[derive(Debug)]
pub struct MarkFiles {
    ours: PathBuf,
    foreign: PathBuf,
    lock: PathBuf,
}

/// A change to one of our marks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MarkChange {
    Mark(OurMark),
    Unmark(MarkKind),
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OurMarks {
    marks: Vec<OurMark>,
    /// Completed operations, newest last.
    completed_operations: Vec<OpId>,
}

impl MarkFiles {
    pub fn new(state: &Path) -> Self {
        let file = |name| state.join(name);
        Self { ours: file("marks.json"), foreign: file("foreign.json"), lock: file("marks.lock") }
    }

    pub fn read(&self) -> io::Result<Marks> {
        let ours = files::read::<OurMarks>(&self.ours)?.unwrap_or_default().marks;
        let foreign = files::read::<Vec<ForeignMark>>(&self.foreign)?.unwrap_or_default();
        Ok(Marks { ours, foreign })
    }

    /// Sets or removes a mark and returns the marks that remain. Idempotent: repeating an operation id changes nothing.
    pub fn apply(&self, op: OpId, change: &MarkChange) -> io::Result<Vec<OurMark>> {
        // Locked until the file is closed: serialises two controllers, or a controller and a command.
        let lock = File::options().create(true).append(true).open(&self.lock)?;
        flock(&lock, FlockOperation::LockExclusive)?;
        let mut ours = files::read::<OurMarks>(&self.ours)?.unwrap_or_default();
        if ours.completed_operations.contains(&op) {
            return Ok(ours.marks);
        }
        let (kind, mark) = match change {
            MarkChange::Mark(mark) => (mark.kind, Some(mark.clone())),
            MarkChange::Unmark(kind) => (*kind, None),
        };
        ours.marks.retain(|mark| mark.kind != kind);
        ours.marks.extend(mark);
        ours.completed_operations.push(op);
        let surplus = ours.completed_operations.len().saturating_sub(MAX_OPERATION_IDS);
        ours.completed_operations.drain(..surplus);
        files::write(&self.ours, &ours)?;
        Ok(ours.marks)
    }
}
