//! Output that is kept in memory, for a command that the controller runs for a client of its API.

use std::{
    io::{self, Write},
    sync::{Mutex, MutexGuard, PoisonError},
};

/// The most bytes that one command may print for a client.
const MAX_BYTES: usize = 16 << 20;

/// What a command has printed.
#[derive(Debug, Default)]
pub(crate) struct CapturedOutput {
    stdout: Mutex<Vec<u8>>,
    stderr: Mutex<String>,
}

impl CapturedOutput {
    pub(super) fn note(&self, text: &str) {
        lock(&self.stderr).push_str(text);
    }

    /// Returns the text on standard output and on standard error, and leaves none.
    pub(crate) fn take(&self) -> (String, String) {
        let stdout = std::mem::take(&mut *lock(&self.stdout));
        (String::from_utf8_lossy(&stdout).into_owned(), std::mem::take(&mut *lock(&self.stderr)))
    }
}

impl Write for &CapturedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut stdout = lock(&self.stdout);
        if stdout.len() + bytes.len() > MAX_BYTES {
            let text = format!("it exceeds {} MiB: select fewer nodes or rows", MAX_BYTES >> 20);
            return Err(io::Error::other(text));
        }
        stdout.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::output::Output;

    #[test]
    fn output_is_kept_up_to_a_limit_and_an_excess_is_an_error() {
        let captured = Arc::new(CapturedOutput::default());
        let out = Output::captured(true, false, None, Arc::clone(&captured));
        out.json(&["a"]).unwrap();
        out.note("wrote it");
        assert_eq!(captured.take(), ("[\n  \"a\"\n]\n".to_owned(), "doctor: wrote it\n".to_owned()));
        let error = out.json(&"x".repeat(MAX_BYTES)).unwrap_err();
        assert!(error.to_string().contains("select fewer"), "{error}");
        assert!(out.print(&"x".repeat(MAX_BYTES + 1)).is_err());
    }
}
