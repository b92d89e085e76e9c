//! The agent's report spool, after its files were changed.
//!
//! The input is split into files: the counter of report numbers, the record of losses, and reports. Whatever they
//! contain, the spool opens, is drained in bounded steps, and gives a new report a unique number.

#![no_main]

use std::{fs, path::PathBuf, sync::LazyLock};

use doctor_fuzz::scratch;
use doctor_node::agent::spool::{Spool, SpoolLimits};
use libfuzzer_sys::fuzz_target;

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| scratch().keep());
const LIMITS: SpoolLimits = SpoolLimits { bytes: 4096, reports: 3 };

/// Writes files. The first line of each part is the file name, if it is a plain one.
fn fill(data: &[u8]) -> usize {
    let parts = data.split(|byte| *byte == 0xff).take(6);
    let mut written = 0;
    for part in parts {
        let (name, body) = part.split_at(part.iter().position(|byte| *byte == b'\n').unwrap_or(part.len()));
        let name = String::from_utf8_lossy(name);
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'+' | b'-');
        if (1..=40).contains(&name.len()) && name.bytes().all(plain) && !name.starts_with('.') {
            let body = body.strip_prefix(b"\n").unwrap_or(body);
            fs::write(FOLDER.join(&*name), body).expect("memory can be written");
            written += 1;
        }
    }
    written
}

fuzz_target!(|data: &[u8]| {
    let files = fill(data);
    let mut spool = Spool::open(&FOLDER, LIMITS).expect("a directory opens whatever is in it");
    let mut steps = 0;
    while let Some(next) = spool.next_message() {
        spool.mark_accepted(&next);
        steps += 1;
        assert!(steps <= files + 2, "more comes out than was put in");
    }
    assert!(spool.is_empty());
    let (first, second) = (spool.number(), spool.number());
    assert!(first < second);
    for entry in fs::read_dir(&*FOLDER).expect("it was just opened").flatten() {
        fs::remove_file(entry.path()).expect("only files were put there");
    }
});
