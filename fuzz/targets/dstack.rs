//! Replies of a dstack server: fleets and runs, parts of which users write.
//!
//! An instance is free only if its own record says that it is idle or busy and reachable, and contains no unknown value.

#![no_main]

use doctor_backend_dstack::fuzz_targets::free;
use doctor_fuzz::{pick, text};
use libfuzzer_sys::fuzz_target;
use serde_json::{Value, json};

const PARSERS: &[fn(&[u8])] = &[fleets, runs, words, both];

fn instance(status: &str, health: &str) -> Value {
    json!([{ "id": "1", "name": "gpus", "created_at": "2026-11-15T00:00:00Z", "instances": [{
        "id": "2", "name": "gpus-0", "instance_num": 0, "hostname": "10.0.0.1", "status": status, "unreachable": false,
        "health_status": health, "created": "2026-11-15T00:00:00Z" }], "spec": { "configuration": { "ssh_config": {} } } }])
}

fn fleets(bytes: &[u8]) {
    let Some(names) = free(bytes, b"[]") else { return };
    let told: Vec<Value> = serde_json::from_slice(bytes).unwrap_or_default();
    let instances = || told.iter().filter_map(|fleet| fleet["instances"].as_array()).flatten();
    for name in names {
        let says_so = |one: &&Value| one["name"] == *name && one["status"] == "idle" && one["unreachable"] == false;
        assert!(instances().any(|one| says_so(&one)), "{name} is free");
    }
}

/// No foreign run frees a busy instance, whatever its name: ours are also recognised by their owner.
fn runs(bytes: &[u8]) {
    let busy = instance("busy", "healthy").to_string();
    let Some(names) = free(busy.as_bytes(), bytes) else { return };
    let told: Vec<Value> = serde_json::from_slice(bytes).unwrap_or_default();
    assert!(names.is_empty() || told.iter().any(|run| run["user"] == "doctor"), "{names:?}");
}

/// Unknown status words of the server never mean free.
fn words(bytes: &[u8]) {
    let written = text(bytes);
    let (status, health) = written.split_once(' ').unwrap_or((&written, "healthy"));
    let found = free(instance(status, health).to_string().as_bytes(), b"[]").unwrap_or_default();
    assert_eq!(!found.is_empty(), status == "idle" && matches!(health, "healthy" | "warning"), "{written:?}");
}

fn both(bytes: &[u8]) {
    let written = text(bytes);
    let (fleets, runs) = written.split_once("\n---\n").unwrap_or((&written, "[]"));
    let _found = free(fleets.as_bytes(), runs.as_bytes());
}

fuzz_target!(|data: &[u8]| {
    if let Some((read, rest)) = pick(PARSERS, data) {
        read(rest);
    }
});
