//! Unsent reports on disk, in order and of bounded size.
//!
//! Each report is one file, named by its number and renamed into place, so that a crash leaves whole files. When the
//! spool is full, the oldest reports are dropped and counted in a separate file, which becomes a report too: no loss is
//! silent. That file is written before the dropped ones are removed, and says up to which number it counts, so that a
//! crash in between counts nothing twice.
//!
//! Files hold the report without its signature: after a change of keys, waiting reports are signed with the new key.

use std::{
    collections::{BTreeMap, VecDeque},
    fs, io,
    path::{Path, PathBuf},
};

use doctor_checks::document::{AgentReport, DroppedReports};
use doctor_core::{ids::CheckId, time::Timestamp};
use serde::{Deserialize, Serialize};

use crate::job::output::write_atomically;

/// The limits of the spool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpoolLimits {
    pub bytes: u64,
    pub reports: usize,
}

impl Default for SpoolLimits {
    fn default() -> Self {
        Self { bytes: 64 << 20, reports: 10_000 }
    }
}

/// The limits of reports that could not be written to disk. They are lost with the process.
const MEMORY_LIMITS: SpoolLimits = SpoolLimits { bytes: 4 << 20, reports: 64 };

/// Numbers are reserved on disk in blocks: no number is used twice, and a heartbeat costs no write.
const BLOCK: u64 = 1024;

/// Larger numbers come from a damaged file: no node counts that far.
const MOST_NUMBER: u64 = 1 << 62;

#[derive(Debug)]
pub struct Spool {
    directory: PathBuf,
    limits: SpoolLimits,
    queue: VecDeque<SpooledReport>,
    lost: Option<Lost>,
    next: u64,
    reserved: u64,
    /// The report being sent. The controller may have stored it already, so it must not count as lost.
    in_flight: Option<u64>,
    /// The current disk error; logged once while it lasts.
    disk_error: Option<String>,
}

#[derive(Debug)]
struct SpooledReport {
    number: u64,
    bytes: u64,
    /// Present if the disk write failed.
    body: Option<Vec<u8>>,
}

/// Counts of dropped reports, up to a number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Lost {
    through: u64,
    /// An older number that was not dropped, because it was being sent.
    #[serde(default)]
    in_flight: Option<u64>,
    dropped: DroppedReports,
}

/// The next message to send.
#[derive(Debug, Clone, PartialEq)]
pub enum NextMessage {
    Report(Box<AgentReport>),
    /// Counts of dropped reports, sent under this number.
    Lost {
        number: u64,
        dropped: DroppedReports,
    },
}

impl Spool {
    /// Opens the spool and recovers its state after a crash.
    ///
    /// # Errors
    /// If the directory cannot be created or read.
    pub fn open(directory: &Path, limits: SpoolLimits) -> io::Result<Self> {
        fs::create_dir_all(directory)?;
        let mut numbers = Vec::new();
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.ends_with(".tmp") {
                // A crash interrupted the write.
                let _removed = fs::remove_file(entry.path());
            }
            // Only canonical names: a file with another spelling would be counted as lost but never removed.
            let number = name.strip_suffix(".report").and_then(to_number).filter(|number| file_name(*number) == name);
            numbers.extend(number.map(|number| (number, entry.metadata().map_or(0, |file| file.len()))));
        }
        numbers.sort_unstable();
        let lost: Option<Lost> =
            fs::read(directory.join(LOST)).ok().and_then(|text| serde_json::from_slice(&text).ok());
        let lost = lost.filter(|lost| lost.through <= MOST_NUMBER);
        let counted = lost.as_ref().map_or(0, |lost| lost.through);
        let spared = lost.as_ref().and_then(|lost| lost.in_flight);
        let mut spool = Self { directory: directory.to_owned(), limits, lost, ..Self::empty() };
        for (number, bytes) in numbers {
            if number <= counted && Some(number) != spared {
                let _removed = fs::remove_file(spool.path(number));
            } else {
                spool.queue.push_back(SpooledReport { number, bytes, body: None });
            }
        }
        let known = fs::read_to_string(directory.join(NUMBER)).ok().and_then(|text| to_number(text.trim()));
        let newest = spool.queue.back().map_or(0, |waiting| waiting.number).max(counted);
        spool.next = known.unwrap_or(0).max(newest + 1);
        spool.reserved = spool.next;
        spool.make_room();
        Ok(spool)
    }

    fn empty() -> Self {
        Self {
            directory: PathBuf::new(),
            limits: SpoolLimits::default(),
            queue: VecDeque::new(),
            lost: None,
            next: 1,
            reserved: 1,
            in_flight: None,
            disk_error: None,
        }
    }

    /// Returns a number that no report of this node has used.
    pub fn number(&mut self) -> u64 {
        if self.next >= self.reserved {
            let reserved = self.next + BLOCK;
            let written = write_atomically(&self.directory.join(NUMBER), reserved.to_string().as_bytes());
            self.note(written);
            self.reserved = reserved;
        }
        self.next += 1;
        self.next - 1
    }

    /// Stores a report until the controller accepts it.
    pub fn add(&mut self, report: &AgentReport) {
        let Ok(body) = serde_json::to_vec(report) else {
            self.count_lost(report.sequence, &counts(report));
            return;
        };
        let bytes = body.len() as u64;
        let written = write_atomically(&self.path(report.sequence), &body);
        let body = written.is_err().then_some(body);
        self.note(written);
        self.queue.push_back(SpooledReport { number: report.sequence, bytes, body });
        self.make_room();
    }

    /// Returns the first message. It counts as being sent until [`Self::mark_accepted`], [`Self::mark_retry`] or
    /// [`Self::mark_rejected`].
    pub fn next_message(&mut self) -> Option<NextMessage> {
        loop {
            let front = self.queue.front().map(|waiting| waiting.number);
            if let Some(lost) = self.lost.as_ref().filter(|lost| front.is_none_or(|front| lost.through < front)) {
                return Some(NextMessage::Lost { number: lost.through, dropped: lost.dropped.clone() });
            }
            let number = front?;
            match self.read(number) {
                Some(report) => {
                    self.in_flight = Some(number);
                    return Some(NextMessage::Report(Box::new(report)));
                }
                // Truncated or of another version: it can never be sent.
                None => self.drop_at(0),
            }
        }
    }

    /// Removes a message that the controller has accepted.
    pub fn mark_accepted(&mut self, next: &NextMessage) {
        self.in_flight = None;
        match next {
            NextMessage::Report(report) => self.remove(report.sequence),
            NextMessage::Lost { dropped, .. } => self.subtract_reported(dropped),
        }
    }

    /// Keeps the message for another attempt.
    pub fn mark_retry(&mut self) {
        self.in_flight = None;
    }

    /// Counts a message as lost that the controller will never accept.
    pub fn mark_rejected(&mut self, next: &NextMessage) {
        self.in_flight = None;
        match next {
            NextMessage::Report(report) => {
                self.count_lost(report.sequence, &counts(report));
                self.remove(report.sequence);
            }
            NextMessage::Lost { dropped, .. } => self.subtract_reported(dropped),
        }
    }

    pub fn len(&self) -> usize {
        self.queue.len()
    }

    pub fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.lost.is_none()
    }

    /// Returns the number of dropped reports that have not been reported yet.
    pub fn lost_count(&self) -> u64 {
        self.lost.as_ref().map_or(0, |lost| lost.dropped.reports)
    }

    /// Returns the current disk error.
    pub fn disk_error(&self) -> Option<&str> {
        self.disk_error.as_deref()
    }

    fn path(&self, number: u64) -> PathBuf {
        self.directory.join(file_name(number))
    }

    fn read(&self, number: u64) -> Option<AgentReport> {
        let spooled = self.queue.iter().find(|waiting| waiting.number == number)?;
        let report: AgentReport = match &spooled.body {
            Some(body) => serde_json::from_slice(body).ok()?,
            None => serde_json::from_slice(&fs::read(self.path(number)).ok()?).ok()?,
        };
        (report.sequence == number).then_some(report)
    }

    fn make_room(&mut self) {
        while self.queue.len() > 1 && (over(&self.queue, self.limits, |_| true) || self.memory_is_full()) {
            let front_in_flight = self.queue.front().map(|waiting| waiting.number) == self.in_flight;
            self.drop_at(usize::from(front_in_flight));
        }
    }

    fn memory_is_full(&self) -> bool {
        over(&self.queue, MEMORY_LIMITS, |waiting| waiting.body.is_some())
    }

    fn drop_at(&mut self, index: usize) {
        let Some(waiting) = self.queue.get(index) else { return };
        let number = waiting.number;
        let dropped = match self.read(number) {
            Some(report) => counts(&report),
            // Its content and time are unknown.
            None => {
                let at = self.lost.as_ref().map_or_else(crate::clock::now, |lost| lost.dropped.to);
                DroppedReports { reports: 1, checks: BTreeMap::new(), from: at, to: at }
            }
        };
        self.count_lost(number, &dropped);
        self.remove(number);
    }

    fn count_lost(&mut self, number: u64, dropped: &DroppedReports) {
        let lost = match self.lost.take() {
            Some(mut lost) => {
                lost.through = lost.through.max(number);
                lost.dropped.add(dropped);
                lost.in_flight = self.in_flight.or(lost.in_flight);
                lost
            }
            None => Lost { through: number, in_flight: self.in_flight, dropped: dropped.clone() },
        };
        self.lost = Some(lost);
        self.write_lost();
    }

    /// Subtracts counts that the controller has accepted; more may have been added meanwhile.
    fn subtract_reported(&mut self, reported: &DroppedReports) {
        let Some(mut lost) = self.lost.take() else { return };
        lost.dropped.reports = lost.dropped.reports.saturating_sub(reported.reports);
        for (check, times) in &reported.checks {
            if let Some(remaining) = lost.dropped.checks.get_mut(check) {
                *remaining = remaining.saturating_sub(*times);
            }
        }
        lost.dropped.checks.retain(|_, times| *times > 0);
        self.lost = (lost.dropped.reports > 0).then_some(lost);
        self.write_lost();
    }

    fn write_lost(&mut self) {
        let path = self.directory.join(LOST);
        let written = match &self.lost {
            Some(lost) => {
                serde_json::to_vec(lost).map_err(io::Error::from).and_then(|text| write_atomically(&path, &text))
            }
            None => fs::remove_file(&path).or_else(|error| match error.kind() {
                io::ErrorKind::NotFound => Ok(()),
                _ => Err(error),
            }),
        };
        self.note(written);
    }

    fn remove(&mut self, number: u64) {
        self.queue.retain(|waiting| waiting.number != number);
        // Absent if it was only in memory.
        let _absent = fs::remove_file(self.path(number));
    }

    fn note(&mut self, done: io::Result<()>) {
        self.disk_error = done.err().map(|error| format!("{}: {error}", self.directory.display()));
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

fn over(waiting: &VecDeque<SpooledReport>, limits: SpoolLimits, which: impl Fn(&&SpooledReport) -> bool) -> bool {
    let (mut reports, mut bytes) = (0, 0);
    for waiting in waiting.iter().filter(which) {
        reports += 1;
        bytes += waiting.bytes;
    }
    reports > limits.reports || bytes > limits.bytes
}

fn counts(report: &AgentReport) -> DroppedReports {
    let mut checks: BTreeMap<CheckId, u64> = BTreeMap::new();
    for evidence in &report.checks {
        *checks.entry(evidence.test.clone()).or_default() += 1;
    }
    let at: Timestamp = report.at;
    DroppedReports { reports: 1, checks, from: at, to: at }
}

#[cfg(test)]
mod tests;
