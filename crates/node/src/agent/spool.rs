//! Reports that nobody has taken yet, on disk, in order, and no more than there is room for.
//!
//! One file for each report, put in place by a rename and named by its number, so that a crash leaves whole files. What
//! does not fit any more is thrown away from the old end, and what was thrown away is counted in a file of its own,
//! which becomes a report too: nothing is dropped in silence. That file is written before the others are removed and says
//! how far it goes, so that a crash in between counts nothing twice.
//!
//! Files hold the report and not its signature: a node that was given a new key signs what it still has with that.

use std::{
    collections::{BTreeMap, VecDeque},
    fs, io,
    path::{Path, PathBuf},
};

use doctor_checks::document::{AgentReport, Dropped};
use doctor_core::{ids::CheckId, time::Timestamp};
use serde::{Deserialize, Serialize};

use crate::job::output::put;

/// How much may wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    pub bytes: u64,
    pub reports: usize,
}

impl Default for Room {
    fn default() -> Self {
        Self { bytes: 64 << 20, reports: 10_000 }
    }
}

/// Of what could not be written to disk. It is lost with the process, and so is what the disk does not take.
const MEMORY_ROOM: Room = Room { bytes: 4 << 20, reports: 64 };

/// Numbers are taken from the file in blocks: a number is never given twice, and a heartbeat costs no write.
const BLOCK: u64 = 1024;

/// No node ever counts that far, and a file that says so was damaged.
const MOST_NUMBER: u64 = 1 << 62;

#[derive(Debug)]
pub struct Spool {
    directory: PathBuf,
    room: Room,
    waiting: VecDeque<Waiting>,
    lost: Option<Lost>,
    next: u64,
    reserved: u64,
    /// Being sent just now: it may have been kept by the controller already and is not to be called lost.
    in_flight: Option<u64>,
    /// Said once while it lasts.
    trouble: Option<String>,
}

#[derive(Debug)]
struct Waiting {
    number: u64,
    bytes: u64,
    /// Where the disk did not take it.
    body: Option<Vec<u8>>,
}

/// What was thrown away, and up to which number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Lost {
    through: u64,
    /// Older than that and not thrown away: it was being sent.
    #[serde(default)]
    spared: Option<u64>,
    dropped: Dropped,
}

/// What is to be sent next.
#[derive(Debug, Clone, PartialEq)]
pub enum Next {
    Report(Box<AgentReport>),
    /// These counts, under this number.
    Lost {
        number: u64,
        dropped: Dropped,
    },
}

impl Spool {
    /// # Errors
    /// If the directory cannot be made or read.
    pub fn open(directory: &Path, room: Room) -> io::Result<Self> {
        fs::create_dir_all(directory)?;
        let mut numbers = Vec::new();
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.ends_with(".tmp") {
                // Half written when somebody pulled the plug.
                let _gone = fs::remove_file(entry.path());
            }
            // Only as we write them: one of another spelling would be counted as lost and never removed.
            let number = name.strip_suffix(".report").and_then(to_number).filter(|number| file_name(*number) == name);
            numbers.extend(number.map(|number| (number, entry.metadata().map_or(0, |file| file.len()))));
        }
        numbers.sort_unstable();
        let lost: Option<Lost> =
            fs::read(directory.join(LOST)).ok().and_then(|text| serde_json::from_slice(&text).ok());
        let lost = lost.filter(|lost| lost.through <= MOST_NUMBER);
        let counted = lost.as_ref().map_or(0, |lost| lost.through);
        let spared = lost.as_ref().and_then(|lost| lost.spared);
        let mut spool = Self { directory: directory.to_owned(), room, lost, ..Self::empty() };
        for (number, bytes) in numbers {
            if number <= counted && Some(number) != spared {
                let _gone = fs::remove_file(spool.path(number));
            } else {
                spool.waiting.push_back(Waiting { number, bytes, body: None });
            }
        }
        let known = fs::read_to_string(directory.join(NUMBER)).ok().and_then(|text| to_number(text.trim()));
        let newest = spool.waiting.back().map_or(0, |waiting| waiting.number).max(counted);
        spool.next = known.unwrap_or(0).max(newest + 1);
        spool.reserved = spool.next;
        spool.make_room();
        Ok(spool)
    }

    fn empty() -> Self {
        Self {
            directory: PathBuf::new(),
            room: Room::default(),
            waiting: VecDeque::new(),
            lost: None,
            next: 1,
            reserved: 1,
            in_flight: None,
            trouble: None,
        }
    }

    /// A number that no report of this node had before.
    pub fn number(&mut self) -> u64 {
        if self.next >= self.reserved {
            let reserved = self.next + BLOCK;
            let kept = put(&self.directory.join(NUMBER), reserved.to_string().as_bytes());
            self.note(kept);
            self.reserved = reserved;
        }
        self.next += 1;
        self.next - 1
    }

    /// Keeps a report until it was taken.
    pub fn add(&mut self, report: &AgentReport) {
        let Ok(body) = serde_json::to_vec(report) else {
            self.lose(report.number, &counts(report));
            return;
        };
        let bytes = body.len() as u64;
        let kept = put(&self.path(report.number), &body);
        let body = kept.is_err().then_some(body);
        self.note(kept);
        self.waiting.push_back(Waiting { number: report.number, bytes, body });
        self.make_room();
    }

    /// What comes first. It counts as being sent until [`Self::taken`] or [`Self::not_taken`].
    pub fn first(&mut self) -> Option<Next> {
        loop {
            let front = self.waiting.front().map(|waiting| waiting.number);
            if let Some(lost) = self.lost.as_ref().filter(|lost| front.is_none_or(|front| lost.through < front)) {
                return Some(Next::Lost { number: lost.through, dropped: lost.dropped.clone() });
            }
            let number = front?;
            match self.read(number) {
                Some(report) => {
                    self.in_flight = Some(number);
                    return Some(Next::Report(Box::new(report)));
                }
                // Cut short, or of another version: it was there, and it will never be sent.
                None => self.drop_at(0),
            }
        }
    }

    /// The controller has it.
    pub fn taken(&mut self, next: &Next) {
        self.in_flight = None;
        match next {
            Next::Report(report) => self.remove(report.number),
            Next::Lost { dropped, .. } => self.told(dropped),
        }
    }

    /// It stays and is sent again.
    pub fn not_taken(&mut self) {
        self.in_flight = None;
    }

    /// The controller will never take it: it is counted as lost.
    pub fn refused(&mut self, next: &Next) {
        self.in_flight = None;
        match next {
            Next::Report(report) => {
                self.lose(report.number, &counts(report));
                self.remove(report.number);
            }
            Next::Lost { dropped, .. } => self.told(dropped),
        }
    }

    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.lost.is_none()
    }

    /// How many reports were thrown away and not yet told of.
    pub fn lost(&self) -> u64 {
        self.lost.as_ref().map_or(0, |lost| lost.dropped.reports)
    }

    /// What is wrong with the disk.
    pub fn trouble(&self) -> Option<&str> {
        self.trouble.as_deref()
    }

    fn path(&self, number: u64) -> PathBuf {
        self.directory.join(file_name(number))
    }

    fn read(&self, number: u64) -> Option<AgentReport> {
        let kept = self.waiting.iter().find(|waiting| waiting.number == number)?;
        let report: AgentReport = match &kept.body {
            Some(body) => serde_json::from_slice(body).ok()?,
            None => serde_json::from_slice(&fs::read(self.path(number)).ok()?).ok()?,
        };
        (report.number == number).then_some(report)
    }

    fn make_room(&mut self) {
        while self.waiting.len() > 1 && (over(&self.waiting, self.room, |_| true) || self.memory_is_full()) {
            let front_flies = self.waiting.front().map(|waiting| waiting.number) == self.in_flight;
            self.drop_at(usize::from(front_flies));
        }
    }

    fn memory_is_full(&self) -> bool {
        over(&self.waiting, MEMORY_ROOM, |waiting| waiting.body.is_some())
    }

    fn drop_at(&mut self, place: usize) {
        let Some(waiting) = self.waiting.get(place) else { return };
        let number = waiting.number;
        let dropped = match self.read(number) {
            Some(report) => counts(&report),
            // Nobody can tell any more what was in it, or when.
            None => {
                let at = self.lost.as_ref().map_or_else(crate::clock::now, |lost| lost.dropped.to);
                Dropped { reports: 1, checks: BTreeMap::new(), from: at, to: at }
            }
        };
        self.lose(number, &dropped);
        self.remove(number);
    }

    fn lose(&mut self, number: u64, dropped: &Dropped) {
        let lost = match self.lost.take() {
            Some(mut lost) => {
                lost.through = lost.through.max(number);
                lost.dropped.add(dropped);
                lost.spared = self.in_flight.or(lost.spared);
                lost
            }
            None => Lost { through: number, spared: self.in_flight, dropped: dropped.clone() },
        };
        self.lost = Some(lost);
        self.write_lost();
    }

    /// These counts were told. More may have come since.
    fn told(&mut self, told: &Dropped) {
        let Some(mut lost) = self.lost.take() else { return };
        lost.dropped.reports = lost.dropped.reports.saturating_sub(told.reports);
        for (check, times) in &told.checks {
            if let Some(left) = lost.dropped.checks.get_mut(check) {
                *left = left.saturating_sub(*times);
            }
        }
        lost.dropped.checks.retain(|_, times| *times > 0);
        self.lost = (lost.dropped.reports > 0).then_some(lost);
        self.write_lost();
    }

    fn write_lost(&mut self) {
        let path = self.directory.join(LOST);
        let written = match &self.lost {
            Some(lost) => serde_json::to_vec(lost).map_err(io::Error::from).and_then(|text| put(&path, &text)),
            None => fs::remove_file(&path).or_else(|error| match error.kind() {
                io::ErrorKind::NotFound => Ok(()),
                _ => Err(error),
            }),
        };
        self.note(written);
    }

    fn remove(&mut self, number: u64) {
        self.waiting.retain(|waiting| waiting.number != number);
        // What never came to the disk is not there.
        let _absent = fs::remove_file(self.path(number));
    }

    fn note(&mut self, done: io::Result<()>) {
        self.trouble = done.err().map(|error| format!("{}: {error}", self.directory.display()));
    }
}

const LOST: &str = "lost.json";
const NUMBER: &str = "number";

fn file_name(number: u64) -> String {
    format!("{number:020}.report")
}

fn to_number(text: &str) -> Option<u64> {
    text.parse().ok().filter(|number| *number <= MOST_NUMBER)
}

fn over(waiting: &VecDeque<Waiting>, room: Room, which: impl Fn(&&Waiting) -> bool) -> bool {
    let (mut reports, mut bytes) = (0, 0);
    for waiting in waiting.iter().filter(which) {
        reports += 1;
        bytes += waiting.bytes;
    }
    reports > room.reports || bytes > room.bytes
}

fn counts(report: &AgentReport) -> Dropped {
    let mut checks: BTreeMap<CheckId, u64> = BTreeMap::new();
    for evidence in &report.checks {
        *checks.entry(evidence.test.clone()).or_default() += 1;
    }
    let at: Timestamp = report.at;
    Dropped { reports: 1, checks, from: at, to: at }
}

#[cfg(test)]
mod tests;
