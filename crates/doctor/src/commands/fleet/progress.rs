//! How far it is, for a person who waits at a terminal. Nobody else sees it.

use std::io::{self, IsTerminal, Write as _};

/// A line that changes, and is gone at the end.
#[derive(Debug)]
pub(super) struct Progress {
    what: &'static str,
    all: usize,
    terminal: bool,
}

impl Progress {
    pub(super) fn new(what: &'static str, all: usize) -> Self {
        Self { what, all, terminal: io::stderr().is_terminal() }
    }

    pub(super) fn show(&self, done: usize) {
        self.write(&format!("\r\x1b[K{}: {done} of {} hosts", self.what, self.all));
    }

    /// One line that stays.
    pub(super) fn say(&self, line: &str) {
        self.write(&format!("\r\x1b[K{line}\n"));
    }

    fn write(&self, text: &str) {
        if self.terminal {
            // Who cannot be shown how far it is waits without.
            let _shown = io::stderr().lock().write_all(text.as_bytes());
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.write("\r\x1b[K");
    }
}
