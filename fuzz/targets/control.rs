//! What the controller reads besides results: its store URL, the state files of the local backend, the holder of a
//! lease, host files, replies of hosts, the output of commands on hosts, and status files of hosts.
//!
//! A password never appears in the printed form of a store URL. No output can fake the exit code of its command, and no
//! host is healthy unless its files say so.

#![no_main]

use doctor_backend::{
    local::fuzz_targets::{load, parsed_kinds},
    process::OutputListener as _,
    ssh::FramedOutput,
};
use doctor_backend_ssh::fuzz_targets::{hosts_in, parse_answer};
use doctor_core::time::Span;
use doctor_fleet::status::{self, Health, Source};
use doctor_fuzz::{pick, text};
use doctor_store::{StoreUrl, fuzz_targets::parse_holder};
use libfuzzer_sys::fuzz_target;

const PARSERS: &[fn(&[u8])] = &[url, secret, state_file, load_average, lease, host_file, host_answer, command, health];

fn host_file(bytes: &[u8]) {
    match hosts_in(&text(bytes)) {
        Ok(count) => assert!(count > 0),
        Err(error) => assert!(!error.is_empty()),
    }
}

/// A host whose status could not be read is never free, and a reply to another request is rejected.
fn host_answer(bytes: &[u8]) {
    match parse_answer(bytes, 7) {
        Ok(free_in_doubt) => {
            assert!(!free_in_doubt);
            assert!(parse_answer(bytes, 8).is_err());
        }
        Err(error) => assert!(!error.is_empty()),
    }
}

/// The result does not depend on the chunk size, and its length is bounded.
fn command(bytes: &[u8]) {
    let heard = |size: usize| {
        let mut between = FramedOutput::new("word", 64);
        bytes.chunks(size).for_each(|part| between.on_output(part));
        between.into_parsed()
    };
    let whole = heard(bytes.len().max(1));
    assert_eq!(heard(3), whole);
    assert!(whole.text.len() <= 64 && (whole.code.is_none() || whole.started));
    let mut between = FramedOutput::new("another", 64);
    between.on_output(bytes);
    assert!(text(bytes).contains("another") || between.into_parsed().code.is_none());
}

fn health(bytes: &[u8]) {
    let input = text(bytes);
    let all = status::read("word", &input, &Source::ALL, Span::days(7));
    assert_eq!(all.len(), Source::ALL.len());
    let good = input.contains("passed") || input.contains("healthy");
    assert!(good || status::worst(&all) != Health::Healthy);
    assert!(good || all.iter().all(|status| status.health != Health::Healthy));
}

fn url(bytes: &[u8]) {
    let written = text(bytes);
    match written.parse::<StoreUrl>() {
        Ok(url) => assert!(!url.to_string().is_empty()),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// User, password, host and query, one per line; with the password in its place, and again as a parameter.
fn secret(bytes: &[u8]) {
    let written = text(bytes);
    let mut lines = written.lines();
    let mut part = || lines.next().unwrap_or_default();
    let (user, password, host, query) = (part(), part(), part(), part());
    let [first, second] = [
        |user: &str, password: &str, host: &str, query: &str| format!("postgres://{user}:{password}@{host}/x?{query}"),
        |_: &str, password: &str, host: &str, query: &str| format!("postgres://{host}/x?{query}&password={password}"),
    ];
    let hidden = |form: fn(&str, &str, &str, &str) -> String| {
        let shown = match form(user, password, host, query).parse::<StoreUrl>() {
            Ok(url) => format!("{url}\n{url:?}"),
            Err(error) => error.to_string(),
        };
        // A password that also occurs elsewhere proves nothing.
        let elsewhere = form(user, "…", host, query).contains(password);
        assert!(elsewhere || !shown.contains(password), "{shown}");
    };
    let parts = |text: &str| text.contains(['@', ':', '/', '?', '&']);
    // Nor does one that contains the placeholder for hidden text.
    if password.len() < 6
        || password.contains('…')
        || parts(user)
        || host.contains(['@', '?'])
        || query.contains(['@', '?', '&'])
    {
        return;
    }
    hidden(first);
    if !password.contains('&') {
        hidden(second);
    }
}

fn state_file(bytes: &[u8]) {
    // A file that could be of two kinds would be accepted as either.
    let kinds = parsed_kinds(bytes);
    assert!(kinds.len() <= 1, "{kinds:?}");
}

fn load_average(bytes: &[u8]) {
    assert!(load(&text(bytes)).is_none_or(|load| load.is_finite() && load >= 0.0));
}

fn lease(bytes: &[u8]) {
    let written = text(bytes);
    if let Some((host, pid, start)) = parse_holder(&written) {
        assert_eq!(parse_holder(&format!("{host}:{pid}:{start}")), Some((host, pid, start)));
    }
}

fuzz_target!(|data: &[u8]| {
    if let Some((read, rest)) = pick(PARSERS, data) {
        read(rest);
    }
});
