//! Progress display on standard error, shown only on a terminal.

use std::io::{self, IsTerminal, Write as _};

/// A line that is rewritten, and erased on drop.
#[derive(Debug)]
pub(super) struct Progress {
    label: &'static str,
    total: usize,
    terminal: bool,
}

impl Progress {
    pub(super) fn new(what: &'static str, all: usize) -> Self {
        Self { label: what, total: all, terminal: io::stderr().is_terminal() }
    }

    pub(super) fn show(&self, done: usize) {
        self.write(&format!("\r\x1b[K{}: {done} of {} hosts", self.label, self.total));
    }

    /// Prints a permanent line.
    pub(super) fn print_line(&self, line: &str) {
        self.write(&format!("\r\x1b[K{line}\n"));
    }

    fn write(&self, text: &str) {
        if self.terminal {
            // A failure to show progress is ignored.
            let _written = io::stderr().lock().write_all(text.as_bytes());
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.write("\r\x1b[K");
    }
}
