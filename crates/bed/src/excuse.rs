//! When a test may be left out: a contributor's machine lacks something, and it is said by name.

use std::fmt::Display;

/// Says that these tests could not run, and why. `lacking`: this machine lacks what they stand on.
///
/// # Panics
/// If nothing is lacking and it failed all the same; and in CI, where what could not run is a failure.
pub(crate) fn not_run(what: &str, why: &dyn Display, lacking: bool) {
    let excused = lacking && std::env::var("CI").as_deref() != Ok("true");
    assert!(excused, "{why}");
    println!("NOT RUN: {what}: {why}");
}

/// Says that these tests could not run because this machine lacks a program that they stand on.
///
/// # Panics
/// In CI, where what could not run is a failure.
pub fn lacking(what: &str, why: &str) {
    not_run(what, &why, true);
}
