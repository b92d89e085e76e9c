//! The kernel's log, followed live: a new record of the kernel's own makes the checks that read the log due at once.
//!
//! This is a wait in poll(2) that costs nothing while nothing happens. In a recorded tree the log is a plain file, and
//! the kernel says when its directory changes.

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

/// Records come in bursts; what comes within this time is looked at together.
const GATHER: Duration = Duration::from_millis(200);
/// A kernel that does not stop complaining is looked at this often.
const APART: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub struct KernelLog {
    source: Source,
    /// Since when something new is there.
    news: Option<Instant>,
    looked: Option<Instant>,
}

#[derive(Debug)]
enum Source {
    Device(File),
    Plain {
        path: PathBuf,
        length: u64,
        /// Readable when something in its directory has changed: the file may be replaced.
        changes: OwnedFd,
    },
    /// Nobody lets us read it; the checks say so.
    None,
}

impl KernelLog {
    /// Follows the log from its present end on.
    ///
    /// # Errors
    /// If it is there and cannot be followed.
    pub fn follow(root: &Path) -> io::Result<Self> {
        let path = root.join("dev/kmsg");
        let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or(0);
        let file = File::options().read(true).custom_flags(flags).open(&path)?;
        let metadata = file.metadata()?;
        let source = if metadata.file_type().is_char_device() {
            rustix::fs::seek(&file, SeekFrom::End(0))?;
            Source::Device(file)
        } else {
            // Watched first and measured then: what comes in between is seen.
            let changes = watch(&root.join("dev"))?;
            let length = path.metadata()?.len();
            Source::Plain { path, length, changes }
        };
        Ok(Self { source, news: None, looked: None })
    }

    /// Nothing will be heard.
    pub const fn deaf() -> Self {
        Self { source: Source::None, news: None, looked: None }
    }

    /// Readable when there is something new.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match &self.source {
            Source::Device(file) => Some(file.as_fd()),
            Source::Plain { changes, .. } => Some(changes.as_fd()),
            Source::None => None,
        }
    }

    /// Takes note of what is new. Called when the descriptor is readable and whenever else the agent is awake.
    /// A log that cannot be read any more is not followed any more: it would be readable without end.
    ///
    /// # Errors
    /// Once, when that happens.
    pub fn notice(&mut self, now: Instant) -> io::Result<()> {
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
                // Gone or shorter: it was replaced, and what is in it now is new.
                let found = path.metadata().map_or(0, |found| found.len());
                std::mem::replace(length, found) != found
            }
            Source::None => false,
        };
        if new && self.news.is_none() {
            self.news = Some(now);
        }
        Ok(())
    }

    /// When the agent has to look again at the latest.
    pub fn next(&self) -> Option<Instant> {
        self.due()
    }

    /// Whether the checks that read the log are due; they count as done then.
    pub fn take_due(&mut self, now: Instant) -> bool {
        let due = self.due().is_some_and(|due| due <= now);
        if due {
            (self.news, self.looked) = (None, Some(now));
        }
        due
    }

    fn due(&self) -> Option<Instant> {
        let gathered = self.news? + GATHER;
        Some(self.looked.map_or(gathered, |looked| gathered.max(looked + APART)))
    }
}

fn watch(folder: &Path) -> io::Result<OwnedFd> {
    let changes = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?;
    let which = WatchFlags::MODIFY | WatchFlags::CREATE | WatchFlags::MOVED_TO | WatchFlags::DELETE;
    inotify::add_watch(&changes, folder, which)?;
    Ok(changes)
}

/// What has changed is found out by looking; only the word that something has is taken away here.
fn quiet(changes: &OwnedFd) {
    let mut buffer = [0; 4 << 10];
    while rustix::io::read(changes, &mut buffer).is_ok_and(|count| count > 0) {}
}

/// Reads what is there, so that the descriptor is quiet again. True if the kernel itself wrote any of it: programs write
/// there too, and they are nothing to wake up for.
fn drain(file: &mut File) -> io::Result<bool> {
    let mut buffer = [0; 8 << 10];
    let mut new = false;
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(new),
            Ok(count) => new |= is_kernels(&buffer[..count]),
            // Records were overwritten before anybody read them; what is there now may be anything.
            Err(error) if error.raw_os_error() == Some(Errno::PIPE.raw_os_error()) => new = true,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(new),
            Err(error) => return Err(error),
        }
    }
}

/// `PRIORITY,…`: the low three bits are the level, the rest says who wrote it, and 0 is the kernel.
pub fn is_kernels(record: &[u8]) -> bool {
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
    fn a_grown_file_is_news_once_and_bursts_are_gathered() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("dev")).unwrap();
        let path = root.path().join("dev/kmsg");
        std::fs::write(&path, "6,1,0,-;old\n").unwrap();
        let mut log = KernelLog::follow(root.path()).unwrap();
        let mut file = File::options().append(true).open(&path).unwrap();
        let start = Instant::now();
        log.notice(start).unwrap();
        assert!(!log.take_due(start + Duration::from_secs(60)), "what was there before is no news");

        assert!(!is_readable(&log), "nothing to wake up for");
        writeln!(file, "4,2,0,-;new").unwrap();
        assert!(is_readable(&log));
        log.notice(start).unwrap();
        assert!(!is_readable(&log), "it was noticed");
        writeln!(file, "4,3,0,-;newer").unwrap();
        log.notice(start + GATHER / 2).unwrap();
        assert!(!log.take_due(start + GATHER / 2));
        assert!(log.take_due(start + GATHER));
        assert!(!log.take_due(start + GATHER), "once");

        writeln!(file, "4,4,0,-;again").unwrap();
        log.notice(start + GATHER).unwrap();
        assert_eq!(log.next(), Some(start + GATHER + APART), "not more often than that");
    }

    #[test]
    fn only_the_kernels_own_records_wake_the_agent() {
        assert!(is_kernels(b"4,812,1,-;NVRM: Xid"));
        assert!(!is_kernels(b"30,813,1,-;systemd[1]: Started"));
        assert!(is_kernels(b"what is this"), "in doubt, look");
    }
}
