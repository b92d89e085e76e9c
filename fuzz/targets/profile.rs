//! Machine profiles: a site's own files, and those of AWS's and Azure's health checks.
//!
//! An accepted profile can be written and parsed again; no line of an imported file is skipped silently.

#![no_main]

use std::sync::LazyLock;

use doctor_checks::profiles::built_in;
use doctor_core::{
    profile::{MachineTypes, ProfileFile, import},
    sku_detection::{MachineFacts, detect},
};
use doctor_fuzz::{pick, text};
use libfuzzer_sys::fuzz_target;

static KNOWN: LazyLock<MachineTypes> = LazyLock::new(built_in);

fn reads_back(file: &ProfileFile) {
    let written = toml::to_string(file).expect("a profile that was read can be written");
    match ProfileFile::read(&written) {
        Ok(again) => assert_eq!(again, *file),
        Err(error) => panic!("{error}\n{written}"),
    }
}

fn file(text: &str) {
    let file = match ProfileFile::read(text) {
        Ok(file) => file,
        Err(error) => {
            assert!(error.line().is_none_or(|line| (1..=text.lines().count().max(1) + 1).contains(&line)));
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    reads_back(&file);
    let facts = MachineFacts {
        instance_type: file.detect.instance_types.first().cloned(),
        product: file.detect.products.first().cloned(),
        gpu_ids: file.detect.gpu_ids.clone(),
        gpu_names: file.detect.gpu_names.clone(),
        ..MachineFacts::default()
    };
    let mut types = KNOWN.clone();
    if types.merge(file).is_ok() {
        assert!(!detect(&types, &facts).steps.is_empty(), "a machine that is not recognised is told why");
    }
}

fn imported(text: &str) {
    let (name, text) = text.split_once('\n').unwrap_or(("", text));
    let imported = import(name, text);
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')).count();
    let told = imported.used + imported.covered + imported.skipped.len();
    // One more if the file's own name is not that of a machine type.
    assert!(told == lines || told == lines + 1, "{told} of {lines} lines are accounted for");
    assert!(imported.files.len() <= lines);
    imported.files.iter().for_each(reads_back);
}

fuzz_target!(|data: &[u8]| {
    if let Some((read, rest)) = pick(&[file, imported], data) {
        read(&text(rest));
    }
});
