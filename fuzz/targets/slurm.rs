//! The output of Slurm's programs, parts of which users, operators and nodes write.
//!
//! A node is free only if its own record starts with a state that says so; no text of a user can change that.

#![no_main]

use doctor_backend_slurm::fuzz_targets::{free, marks_in};
use doctor_fuzz::{pick, text};
use libfuzzer_sys::fuzz_target;

const PARSERS: &[fn(&[u8])] = &[nodes, queue, reservations, all, rest];

const TOKEN: &str = "k7";
const IDLE: &str = "NodeName=n1 State=IDLE Gres=gpu:8 Partitions=gpu";

fn nodes(bytes: &[u8]) {
    let written = text(bytes);
    for name in free([&written, "", "", "", ""], TOKEN) {
        let idle = |line: &str| {
            line.starts_with(&format!("NodeName={name}")) && line.to_uppercase().contains("IDLE")
                || line.to_uppercase().contains("DOWN")
                || line.contains("doctor:")
        };
        assert!(written.lines().any(idle), "{name} is free");
    }
}

/// A job's name is a user's text: it frees nothing that another field says is in use.
fn queue(bytes: &[u8]) {
    let name = text(bytes);
    let used = ["12", "1000", "alice", "RUNNING", "None", "gpu", "", "", "", "n1", "", "", "1", "1", "0", "", "", ""];
    let line = [&[TOKEN], &used[..], &[&name]].concat().join("\u{1f}");
    assert_eq!(free([IDLE, &line, "", "", ""], TOKEN), [""; 0]);
}

fn reservations(bytes: &[u8]) {
    let flags = text(bytes);
    let flags = flags.lines().next().unwrap_or_default();
    let line = format!("ReservationName=monday StartTime=2026-11-15T00:00:00 Nodes=n1 State=ACTIVE Comment={flags}");
    assert_eq!(free([IDLE, "", &line, "", ""], TOKEN), [""; 0]);
}

/// Splits the input into the five outputs, separated by `---` lines.
fn all(bytes: &[u8]) {
    let written = text(bytes);
    let mut parts = written.split("\n---\n");
    let mut part = || parts.next().unwrap_or_default();
    let texts = [part(), part(), part(), part(), part()];
    let found = free(texts, TOKEN);
    assert!(found.len() <= texts[0].lines().count());
}

fn rest(bytes: &[u8]) {
    let _marks = marks_in(bytes);
}

fuzz_target!(|data: &[u8]| {
    if let Some((read, rest)) = pick(PARSERS, data) {
        read(rest);
    }
});
