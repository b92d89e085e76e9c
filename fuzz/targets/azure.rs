//! Azure clusters: the file in both formats, the output of `az`, and the output of machines through run-command.
//!
//! An accepted file gives a complete plan. No output of `az` gives a plan without its steps. An SSH host key reported
//! by a machine becomes a line of other files, so it must be one line of two words.

#![no_main]

use doctor_fleet::azure::fuzz_targets;
use doctor_fuzz::{pick, text};
use libfuzzer_sys::fuzz_target;

const PARSERS: &[fn(&str)] = &[cluster, env_file, flexible, uniform, host_key];
/// Fewer words than the shortest plan has.
const PLAN: usize = 100;

fn cluster(text: &str) {
    assert!(fuzz_targets::cluster(text, "cluster.toml").is_none_or(|words| words > PLAN));
}

fn env_file(text: &str) {
    assert!(fuzz_targets::cluster(text, "cluster.env").is_none_or(|words| words > PLAN));
}

fn flexible(text: &str) {
    assert!(fuzz_targets::az_output(text, false).is_none_or(|(words, _)| words > PLAN));
}

fn uniform(text: &str) {
    assert!(fuzz_targets::az_output(text, true).is_none_or(|(words, _)| words > PLAN));
}

fn host_key(text: &str) {
    let plain =
        |key: &str| key.split(' ').count() == 2 && key.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ');
    assert!(fuzz_targets::host_key(text).is_none_or(|key| plain(&key)));
}

fuzz_target!(|data: &[u8]| {
    if let Some((read, rest)) = pick(PARSERS, data) {
        read(&text(rest));
    }
});
