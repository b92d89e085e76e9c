//! Reads the start of a small file, such as one of /proc or /sys, without blocking.

use std::{
    fs::File,
    io::{self, Read as _},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
};

use rustix::{fs::OFlags, io::retry_on_intr};

/// Most files of /proc and /sys are shorter, and need one read(2) of this size.
const USUAL_BYTES: usize = 4 << 10;

/// Returns the first `most` bytes of `place`. `path` is its name on the machine.
pub(super) fn read_start(path: &str, host_path: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
    // Non-blocking: a named pipe without a writer must not block.
    let file = File::options().read(true).custom_flags(nonblocking()).open(host_path)?;
    let mut page = [0; USUAL_BYTES];
    let most_now = usize::try_from(max_bytes).map_or(USUAL_BYTES, |max_bytes| max_bytes.min(USUAL_BYTES));
    let count = retry_on_intr(|| rustix::io::read(&file, &mut page[..most_now]))?;
    let mut bytes = page[..count].to_vec();
    // One read returns a whole file of /sys. Others may need several reads.
    let is_all = count == 0 || (count < most_now && path.starts_with("/sys/"));
    if !is_all {
        file.take(max_bytes - count as u64).read_to_end(&mut bytes)?;
        bytes.shrink_to_fit();
    }
    Ok(bytes)
}

/// Converts to text, replacing invalid UTF-8.
pub(super) fn to_text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}

pub(super) fn nonblocking() -> i32 {
    i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or(0)
}
