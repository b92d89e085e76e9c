//! Skipping a test with a printed reason where the machine lacks what the test needs.

use std::fmt::Display;

/// Reports that these tests could not run, and why. `lacking`: the machine lacks a prerequisite.
///
/// # Panics
/// Panics if nothing is lacking and the setup failed all the same, and in CI, where a skipped test is a failure.
pub(crate) fn skip_tests(what: &str, why: &dyn Display, lacking: bool) {
    let excused = lacking && std::env::var("CI").as_deref() != Ok("true");
    assert!(excused, "{why}");
    println!("NOT RUN: {what}: {why}");
}

/// Reports that these tests could not run because this machine lacks a program.
///
/// # Panics
/// Panics in CI, where a skipped test is a failure.
pub fn skip_without_program(what: &str, why: &str) {
    skip_tests(what, &why, true);
}
