//! Follows the kernel log: a new record of the kernel makes the checks that read the log due.
//!
//! It waits in poll(2), at no cost while nothing is logged. In a recorded tree the log is a plain file, followed by
//! inotify on its directory.

use std::{
    fs::File,
    io::{self, Read},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::{FileTypeExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::{
    fs::{
        OFlags, SeekFrom,
        inotify::{self, CreateFlags, WatchFlags},
    },
    io::Errno,
};

/// Records arrive in bursts; those within this time are handled together.
const DEBOUNCE: Duration = Duration::from_millis(200);
/// Minimum interval between runs while the kernel keeps logging.
const MIN_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub struct KernelLog {
    source: Source,
    /// When unhandled records were first seen.
    unhandled_since: Option<Instant>,
    last_run: Option<Instant>,
}

#[derive(Debug)]
enum Source {
    Device(File),
    Plain {
        path: PathBuf,
        length: u64,
        /// An inotify descriptor on the directory: the file may be replaced.
        changes: OwnedFd,
    },
    /// The log cannot be read; the checks report that.
    None,
}

impl KernelLog {
    /// Follows the log from its current end.
    ///
    /// # Errors
    /// If the log cannot be opened or watched.
    pub fn follow(root: &Path) -> io::Result<Self> {
        let path = root.join("dev/kmsg");
        let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or(0);
        let file = File::options().read(true).custom_flags(flags).open(&path)?;
        let metadata = file.metadata()?;
        let source = if metadata.file_type().is_char_device() {
            rustix::fs::seek(&file, SeekFrom::End(0))?;
            Source::Device(file)
        } else {
            // Watch before measuring, so that no write in between is missed.
            let changes = watch(&root.join("dev"))?;
            let length = path.metadata()?.len();
            Source::Plain { path, length, changes }
        };
        Ok(Self { source, unhandled_since: None, last_run: None })
    }

    /// A log that never reports anything.
    pub const fn disabled() -> Self {
        Self { source: Source::None, unhandled_since: None, last_run: None }
    }

    /// A descriptor that is readable when there may be new records.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match &self.source {
            Source::Device(file) => Some(file.as_fd()),
            Source::Plain { changes, .. } => Some(changes.as_fd()),
            Source::None => None,
        }
    }

    /// Detects new records. Call it when the descriptor is readable and whenever else the agent is awake. A log that
    /// fails to read is no longer followed, because its descriptor would stay readable.
    ///
    /// # Errors
    /// Once, when reading fails.
    pub fn poll_records(&mut self, now: Instant) -> io::Result<()> {
        let new = match &mut self.source {
            Source::Device(file) => match drain(file) {
                Ok(new) => new,
                Err(error) => {
                    self.source = Source::None;
                    return Err(error);
                }
            },
            Source::Plain { path, length, changes } => {
                quiet(changes);
                // Gone or shorter: the file was replaced and all of its content is new.
                let new_length = path.metadata().map_or(0, |metadata| metadata.len());
                std::mem::replace(length, new_length) != new_length
            }
            Source::None => false,
        };
        if new && self.unhandled_since.is_none() {
            self.unhandled_since = Some(now);
        }
        Ok(())
    }

    /// Returns when the log checks are due.
    pub fn next(&self) -> Option<Instant> {
        self.due()
    }

    /// Returns whether the log checks are due, and marks them as done if so.
    pub fn take_due(&mut self, now: Instant) -> bool {
        let due = self.due().is_some_and(|due| due <= now);
        if due {
            (self.unhandled_since, self.last_run) = (None, Some(now));
        }
        due
    }

    fn due(&self) -> Option<Instant> {
        let gathered = self.unhandled_since? + DEBOUNCE;
        Some(self.last_run.map_or(gathered, |last_run| gathered.max(last_run + MIN_INTERVAL)))
    }
}

fn watch(folder: &Path) -> io::Result<OwnedFd> {
    let changes = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?;
    let events = WatchFlags::MODIFY | WatchFlags::CREATE | WatchFlags::MOVED_TO | WatchFlags::DELETE;
    inotify::add_watch(&changes, folder, events)?;
    Ok(changes)
}

/// Discards the events. The caller finds out what has changed.
fn quiet(changes: &OwnedFd) {
    let mut buffer = [0; 4 << 10];
    while rustix::io::read(changes, &mut buffer).is_ok_and(|count| count > 0) {}
}

/// Reads all records, which makes the descriptor unreadable again. Returns whether the kernel wrote any of them:
/// programs write to this log too and need no reaction.
fn drain(file: &mut File) -> io::Result<bool> {
    let mut buffer = [0; 8 << 10];
    let mut new = false;
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(new),
            Ok(count) => new |= is_from_kernel(&buffer[..count]),
            // Records were overwritten unread; they may have been the kernel's.
            Err(error) if error.raw_os_error() == Some(Errno::PIPE.raw_os_error()) => new = true,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(new),
            Err(error) => return Err(error),
        }
    }
}

/// Whether the kernel wrote the record. It starts with `PRIORITY,…`: the low three bits are the level, the rest is the
/// facility, and 0 is the kernel.
pub fn is_from_kernel(record: &[u8]) -> bool {
    let digits: Vec<u8> = record.iter().copied().take_while(u8::is_ascii_digit).collect();
    std::str::from_utf8(&digits)
        .ok()
        .and_then(|text| text.parse::<u32>().ok())
        .is_none_or(|priority| priority >> 3 == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use std::io::Write;

    fn is_readable(log: &KernelLog) -> bool {
        let mut fds = [PollFd::from_borrowed_fd(log.descriptor().unwrap(), PollFlags::IN)];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0
    }

    #[test]
    fn a_grown_file_is_reported_once_and_bursts_are_merged() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("dev")).unwrap();
        let path = root.path().join("dev/kmsg");
        std::fs::write(&path, "6,1,0,-;old\n").unwrap();
        let mut log = KernelLog::follow(root.path()).unwrap();
        let mut file = File::options().append(true).open(&path).unwrap();
        let start = Instant::now();
        log.poll_records(start).unwrap();
        assert!(!log.take_due(start + Duration::from_secs(60)), "earlier messages do not count");

        assert!(!is_readable(&log), "nothing to wake up for");
        writeln!(file, "4,2,0,-;new").unwrap();
        assert!(is_readable(&log));
        log.poll_records(start).unwrap();
        assert!(!is_readable(&log), "it was noticed");
        writeln!(file, "4,3,0,-;newer").unwrap();
        log.poll_records(start + DEBOUNCE / 2).unwrap();
        assert!(!log.take_due(start + DEBOUNCE / 2));
        assert!(log.take_due(start + DEBOUNCE));
        assert!(!log.take_due(start + DEBOUNCE), "once");

        writeln!(file, "4,4,0,-;again").unwrap();
        log.poll_records(start + DEBOUNCE).unwrap();
        assert_eq!(log.next(), Some(start + DEBOUNCE + MIN_INTERVAL), "not more often than that");
    }

    #[test]
    fn only_the_kernels_own_records_wake_the_agent() {
        assert!(is_from_kernel(b"4,812,1,-;NVRM: Xid"));
        assert!(!is_from_kernel(b"30,813,1,-;systemd[1]: Started"));
        assert!(is_from_kernel(b"what is this"), "an unknown record counts");
    }
}
