//! What the controller reads beside results: where its store is, the state files of the local backend, the holder of a
//! lease.
//!
//! A password never shows in what is printed of a store's URL.

#![no_main]

use doctor_control::{
    backend::local::fuzzed::{load, taken_as},
    store::{StoreUrl, fuzzed::holder},
};
use doctor_fuzz::{pick, text};
use libfuzzer_sys::fuzz_target;

const PARSERS: &[fn(&[u8])] = &[url, secret, state_file, load_average, lease];

fn url(bytes: &[u8]) {
    let written = text(bytes);
    match written.parse::<StoreUrl>() {
        Ok(url) => assert!(!url.to_string().is_empty()),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// User, password, host and query, each on its line; with the password where it belongs, and again as a parameter.
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
        // A password that stands elsewhere too proves nothing.
        let elsewhere = form(user, "…", host, query).contains(password);
        assert!(elsewhere || !shown.contains(password), "{shown}");
    };
    let parts = |text: &str| text.contains(['@', ':', '/', '?', '&']);
    // Nor does one with the sign that stands for what is hidden.
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
    // A file that could be two things would be believed to be either.
    let kinds = taken_as(bytes);
    assert!(kinds.len() <= 1, "{kinds:?}");
}

fn load_average(bytes: &[u8]) {
    assert!(load(&text(bytes)).is_none_or(|load| load.is_finite() && load >= 0.0));
}

fn lease(bytes: &[u8]) {
    let written = text(bytes);
    if let Some((host, pid, start)) = holder(&written) {
        assert_eq!(holder(&format!("{host}:{pid}:{start}")), Some((host, pid, start)));
    }
}

fuzz_target!(|data: &[u8]| {
    if let Some((read, rest)) = pick(PARSERS, data) {
        read(rest);
    }
});
