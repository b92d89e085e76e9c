//! What `doctor-node` reads besides its checks: replies of the controller and of a cloud's metadata service, tables of
//! the kernel, and its own files.

#![no_main]

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use doctor_checks::{
    document::RunKey,
    drain_permit::DrainPermit,
    probe::{FileText, Probe, ProbeOutput},
};
use doctor_core::{
    ids::NodeName,
    time::{Span, Timestamp},
};
use doctor_fuzz::{pick, scratch, text};
use doctor_node::{
    agent::{http, kernel_log},
    builtin::fuzz_targets as multi_node,
    check, hardware,
    hook::fuzz_targets as hooks,
    profile::metadata,
    runner::{FixtureRunner, fuzz_targets},
};
use libfuzzer_sys::fuzz_target;

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| scratch().keep());

const PARSERS: &[fn(&[u8])] =
    &[reply, machine_type, mounts, up, samples, machine, record, note, stranger, other_node, slurm_nodes, permit];

fn reply(answer: &[u8]) {
    let _whole = http::is_complete(answer);
    if let Some(reply) = http::Reply::read(answer) {
        assert!(reply.status <= 999 && reply.text.chars().count() <= 300 && !reply.text.contains(char::is_control));
    }
}

fn machine_type(answer: &[u8]) {
    let _complete = metadata::is_complete(answer);
    match metadata::parse_response(answer) {
        Ok(word) => {
            assert!((1..=64).contains(&word.len()) && word.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'/'));
        }
        Err(error) => assert!(error.to_string().len() < 1200, "{error}"),
    }
}

fn mounts(bytes: &[u8]) {
    let table = text(bytes);
    // A path that is not mounted is not local.
    assert!(!fuzz_targets::is_local("", Path::new("/")));
    for line in table.lines() {
        let place = line.split(' ').nth(1).unwrap_or_default();
        let _local = fuzz_targets::is_local(&table, Path::new(place));
    }
}

fn up(bytes: &[u8]) {
    let input = text(bytes);
    let runner = FixtureRunner::new([(Probe::read("/proc/uptime"), ProbeOutput::Text(input.into_owned()))]);
    assert!(check::uptime(&runner).is_none_or(|up| up >= Span::ZERO));
}

/// Whatever was stored, the last sample is the current one, and there are never more than requested.
fn samples(kept: &[u8]) {
    let now = (Timestamp::from_secs(1_800_000_000), Span::days(1));
    let file = FileText { path: "/sys/fuzzed/a".to_owned(), text: Ok("1".to_owned()) };
    let samples =
        fuzz_targets::add_sample(&FOLDER, kept, Span::hours(1), now, vec![file]).expect("memory can be written");
    let last = samples.last().expect("at least this look is there");
    assert!(last.at == now.0 && samples.len() <= 400);
    assert!(samples.is_sorted_by_key(|sample| sample.at) || samples.iter().all(|sample| sample.at <= now.0));
}

fn machine(bytes: &[u8]) {
    const GPUS: &str = "/proc/driver/nvidia/gpus";
    let input = text(bytes).into_owned();
    let files = [
        "/sys/class/dmi/id/board_serial".to_owned(),
        "/proc/sys/kernel/random/boot_id".to_owned(),
        format!("{GPUS}/0000:18:00.0/information"),
    ];
    let recorded = files.iter().map(|path| (Probe::read(path), ProbeOutput::Text(input.clone())));
    let names = ProbeOutput::Names(vec!["0000:18:00.0".to_owned()]);
    let list = (Probe::List { path: GPUS.to_owned() }, names);
    let found = hardware::collect(&FixtureRunner::new(recorded.chain([list])));
    assert!(found.gpu_uuids.iter().all(|uuid| uuid.starts_with("GPU-")));
    assert!(found.board_serial.is_none_or(|serial| !serial.is_empty()));
}

fn record(bytes: &[u8]) {
    let _wakes = kernel_log::is_from_kernel(bytes);
}

fn note(bytes: &[u8]) {
    let _left = fuzz_targets::is_hung_probe_record(bytes);
}

fn stranger(bytes: &[u8]) {
    assert!(!multi_node::accepts_peer(bytes), "a connection was accepted without the secret");
}

/// No node can make another one fail.
fn other_node(bytes: &[u8]) {
    assert!(multi_node::handle_peer_message(bytes).is_none_or(|findings| findings == 0));
}

/// Only our own reason marks a node as ours: no text of an operator does, wherever it occurs.
fn slurm_nodes(bytes: &[u8]) {
    let input = text(bytes);
    for (name, is_ours) in hooks::parse_slurm_nodes(&input).unwrap_or_default() {
        assert!(!name.is_empty() && !name.contains(' '));
        assert!(!is_ours || input.contains(" Reason=doctor:"), "{name}");
    }
}

/// No permit is valid without the node's key.
fn permit(bytes: &[u8]) {
    let node = NodeName::new("n1").expect("a name");
    assert_eq!(DrainPermit::open(&text(bytes), &node, 1, &RunKey::new([7; 32])), None);
}

fuzz_target!(|data: &[u8]| {
    if let Some((read, rest)) = pick(PARSERS, data) {
        read(rest);
    }
});
