//! Databases of the system that we replace, as `doctor import` finds them: any file called `validation.db`.
//!
//! The run number of an imported row contains its time, so that no two rows of different times count as the same one.

#![no_main]

use std::{collections::BTreeMap, fs, path::PathBuf, sync::LazyLock};

use doctor_store::fuzz_targets::legacy_rows;

use doctor_fuzz::scratch;
use libfuzzer_sys::fuzz_target;

static FILE: LazyLock<PathBuf> = LazyLock::new(|| scratch().keep().join("validation.db"));

fuzz_target!(|data: &[u8]| {
    fs::write(&*FILE, data).expect("memory can be written");
    match legacy_rows(&FILE) {
        Ok((rows, skipped)) => {
            // A row has at least one byte; SQLite does not make any up.
            assert!(rows.len() as u64 + skipped <= data.len() as u64);
            let mut moments = BTreeMap::new();
            for (node, at, run) in rows {
                assert_eq!(run.born(), at);
                assert!(*moments.entry((node, run)).or_insert(at) == at);
            }
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});
