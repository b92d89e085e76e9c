//! Requests to the API: path segments, parameters, cursors, selectors, filters, and bodies of operator commands.
//!
//! Every request is answered or rejected with a reason, never with a server error; a page's cursor points to the next
//! page; and no response is much longer than the data it describes.

#![no_main]

use std::sync::LazyLock;

use doctor_api::fuzz_targets::FuzzApi;
use doctor_fuzz::text;
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

static API: LazyLock<FuzzApi> = LazyLock::new(|| FuzzApi::new().expect("a store in memory"));
static PATHS: LazyLock<Vec<&str>> = LazyLock::new(|| FuzzApi::paths().collect());

/// Percent-encodes characters for a URL.
fn written(text: &str) -> String {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-._~&=%+".contains(byte);
    text.bytes().map(|byte| if plain(&byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }).collect()
}

/// Sends a request: the first line is the path segments, the rest the query.
fn api_request(which: usize, asked: &str) {
    let (parts, query) = asked.split_once('\n').unwrap_or(("", asked));
    let mut parts = parts.split('/');
    let place: Vec<String> = PATHS[which % PATHS.len()]
        .split('/')
        .map(|part| if part.starts_with('{') { written(parts.next().unwrap_or("n1")) } else { part.to_owned() })
        .collect();
    let (place, query) = (place.join("/"), written(query));
    let get = |query: &str| API.get(&format!("{place}?{query}")).expect("an answer comes whole");
    let Some((status, answer)) = get(&query) else { return };
    let said: Value = serde_json::from_slice(&answer).expect("what is answered is JSON");
    assert!(!status.is_server_error(), "{place}?{query}: {status} {said}");
    if !status.is_success() {
        let error = &said["error"];
        assert!(
            ["code", "text"].iter().all(|name| error[name].as_str().is_some_and(|words| !words.is_empty())),
            "{said}"
        );
        assert!(answer.len() <= 4096 + 8 * asked.len(), "{place}?{query}: {said}");
    } else if let Some(next) = said["next"].as_str() {
        let before = query.split('&').filter(|pair| !pair.starts_with("cursor="));
        let after: Vec<String> = before.map(str::to_owned).chain([format!("cursor={}", written(next))]).collect();
        let Some((status, _)) = get(&after.join("&")) else { panic!("{next:?} cannot be asked for") };
        assert!(status.is_success(), "{place}?{query}: the next page is {status}");
    }
}

fuzz_target!(|data: &[u8]| {
    let Some((first, rest)) = data.split_first() else { return };
    // Counted from `A` for operator commands and from `a` for queries, so that seeds are text.
    match first {
        b'A'..=b'Z' => {
            let refused = FuzzApi::parse_command(usize::from(first - b'A'), rest);
            assert!(refused.is_none_or(|why| !why.is_empty() && why.len() <= 1024 + 8 * rest.len()));
        }
        _ => api_request(usize::from(first.wrapping_sub(b'a')), &text(rest)),
    }
});
