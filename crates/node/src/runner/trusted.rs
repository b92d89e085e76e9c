//! Whether the driver answered lately.
//!
//! A driver that hangs takes its caller with it. So it is asked in a child process until it has answered, and then in
//! this one for a while: a fast check should not pay for a process every five minutes on a healthy node.

use std::{
    cell::Cell,
    fs,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

/// How long an answer vouches for the next.
const GOOD_FOR: Duration = Duration::from_secs(15 * 60);

#[derive(Debug, Default)]
pub(super) struct Trusted {
    /// A file that was touched when the driver last answered.
    mark: Option<PathBuf>,
    /// In this pass.
    answered: Cell<bool>,
}

impl Trusted {
    pub(super) fn kept_in(directory: &Path) -> Self {
        Self { mark: Some(directory.join("driver-answered")), answered: Cell::new(false) }
    }

    pub(super) fn is_trusted(&self) -> bool {
        self.answered.get() || self.mark.as_deref().is_some_and(is_fresh)
    }

    pub(super) fn note(&self, answered: bool) {
        let before = self.answered.replace(answered);
        let Some(mark) = &self.mark else { return };
        // Where this fails, the next look takes a child process more.
        let _noted = match answered {
            true if before => Ok(()),
            true => mark.parent().map_or(Ok(()), fs::create_dir_all).and_then(|()| fs::write(mark, "")),
            false => fs::remove_file(mark),
        };
    }
}

/// Of this boot, too: after a boot nothing is known.
fn is_fresh(mark: &Path) -> bool {
    let age = fs::metadata(mark)
        .and_then(|found| found.modified())
        .ok()
        .and_then(|at| SystemTime::now().duration_since(at).ok());
    let up = fs::read_to_string("/proc/uptime").ok().and_then(|text| up(&text));
    matches!((age, up), (Some(age), Some(up)) if age < GOOD_FOR && age < up)
}

/// The first number of /proc/uptime.
pub(super) fn up(text: &str) -> Option<Duration> {
    Duration::try_from_secs_f64(text.split(' ').next()?.parse().ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_uptime_that_no_machine_has_is_none() {
        assert_eq!(up("90.50 12.00\n"), Some(Duration::from_millis(90_500)));
        for text in ["", "soon", "-1 0", "inf 0", "nan 0", "1e300 0"] {
            assert_eq!(up(text), None, "{text}");
        }
    }

    #[test]
    fn an_answer_vouches_for_the_next_and_silence_ends_it() {
        let folder = tempfile::tempdir().unwrap();
        assert!(!Trusted::kept_in(folder.path()).is_trusted());
        Trusted::kept_in(folder.path()).note(true);
        assert!(Trusted::kept_in(folder.path()).is_trusted());
        Trusted::kept_in(folder.path()).note(false);
        assert!(!Trusted::kept_in(folder.path()).is_trusted());
    }
}
