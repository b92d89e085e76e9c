//! Redacts secrets in text from nodes before it leaves the controller: values exported on a command line, embedded in a
//! URL or printed by mistake.
//!
//! It matches patterns line by line: a value after a name that indicates a secret (`token=…`, `"password": "…"`,
//! `Authorization: Bearer …`), the user part of a URL (`https://ann:pw@host`), words with the prefix of a well-known
//! credential, and the lines of a private key. A secret without such a pattern is not recognised.

use std::borrow::Cow;

use doctor_store::access::TOKEN_PREFIX;

use serde_json::Value;

/// Replaces a secret.
pub const REMOVED: &str = "[removed]";

/// A name that contains one of these, ignoring `_` and `-`, has a secret as its value.
const SECRET_NAMES: [&str; 12] = [
    "token",
    "secret",
    "password",
    "passwd",
    "passphrase",
    "apikey",
    "accesskey",
    "accountkey",
    "accesssignature",
    "credential",
    "privatekey",
    "authorization",
];
/// Names that must match as a whole: within other names they mean something else.
const EXACT_SECRET_NAMES: [&str; 2] = ["sig", "cookie"];
/// Authentication schemes, followed by a secret in a header.
const AUTH_SCHEMES: [&str; 2] = ["bearer ", "basic "];
/// Everything after it on the line is a secret.
const COOKIE: &str = "cookie:";
/// Prefixes of well-known credentials, with their minimum length.
const CREDENTIAL_PREFIXES: [(&str, usize); 10] = [
    (TOKEN_PREFIX, 40),
    ("AKIA", 16),
    ("ASIA", 16),
    ("ghp_", 20),
    ("gho_", 20),
    ("github_pat_", 30),
    ("glpat-", 20),
    ("hf_", 20),
    ("xoxb-", 20),
    ("eyJ", 40),
];

/// Separators that a name or a credential within a word may follow.
const SEPARATORS: [char; 6] = ['=', ':', '#', '/', '@', '|'];

/// Returns the text without anything that looks like a secret.
pub fn redact(text: &str) -> Cow<'_, str> {
    redact_after("", text)
}

/// Redacts text that follows other text, which may end inside a private key.
pub fn redact_after<'a>(before: &str, text: &'a str) -> Cow<'a, str> {
    let mut redacted = String::new();
    let mut changed = false;
    let mut in_key = before.lines().fold(false, |inside, line| (inside || begins_key(line)) && !ends_key(line));
    for line in text.split_inclusive('\n') {
        let (begins, ends) = (begins_key(line), ends_key(line));
        if in_key || begins {
            if begins {
                redacted.push_str(REMOVED);
                redacted.push_str(if line.ends_with('\n') { "\n" } else { "" });
            }
            changed = true;
            in_key = !ends;
            continue;
        }
        let redacted_line = redact_line(line);
        changed |= matches!(redacted_line, Cow::Owned(_));
        redacted.push_str(&redacted_line);
    }
    if changed { Cow::Owned(redacted) } else { Cow::Borrowed(text) }
}

fn begins_key(line: &str) -> bool {
    line.contains("-----BEGIN ") && line.contains("PRIVATE KEY-----")
}

fn ends_key(line: &str) -> bool {
    line.contains("-----END ") && line.contains("PRIVATE KEY-----")
}

/// Redacts every string in a document, and the value of every field whose name indicates a secret.
pub fn redact_json(value: &mut Value) {
    match value {
        Value::String(text) => {
            if let Cow::Owned(redacted) = redact(text) {
                *text = redacted;
            }
        }
        Value::Array(items) => items.iter_mut().for_each(redact_json),
        Value::Object(fields) => {
            for (name, value) in fields {
                if is_secret_name(name) { redact_all(value) } else { redact_json(value) }
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Removes everything under the name of a secret.
fn redact_all(value: &mut Value) {
    match value {
        Value::String(text) if text.is_empty() => {}
        Value::String(_) | Value::Number(_) => *value = Value::String(REMOVED.to_owned()),
        Value::Array(items) => items.iter_mut().for_each(redact_all),
        Value::Object(fields) => fields.values_mut().for_each(redact_all),
        Value::Null | Value::Bool(_) => {}
    }
}

/// Unescapes `\n` and `\"` in a truncated JSON text, so that it can be redacted line by line.
pub fn unescape(truncated: &str) -> String {
    truncated.replace("\\n", "\n").replace("\\\"", "\"")
}

/// Replaces control characters, which a terminal would interpret.
pub fn replace_control_chars(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' && c != '\t' { '\u{fffd}' } else { c }).collect()
}

fn normalized_name(name: &str) -> String {
    name.chars().filter(|c| !matches!(c, '_' | '-')).map(|c| c.to_ascii_lowercase()).collect()
}

fn is_secret_name(name: &str) -> bool {
    let lower = name.to_ascii_lowercase().replace('-', "_");
    // A count of tokens, or the path of a file with one, is not a secret.
    let harmless = ["_file", "_path", "_count", "tokens"].iter().any(|end| lower.ends_with(end));
    let name = normalized_name(name);
    !harmless && (SECRET_NAMES.iter().any(|word| name.contains(word)) || EXACT_SECRET_NAMES.contains(&name.as_str()))
}

fn redact_line(line: &str) -> Cow<'_, str> {
    let lower = line.to_ascii_lowercase();
    if let Some(index) = lower.find(COOKIE) {
        let (before, after) = line.split_at(index + COOKIE.len());
        let end = if line.ends_with('\n') { "\n" } else { "" };
        let blank = after.trim().is_empty();
        return match blank {
            true => redact_words(line),
            false => Cow::Owned(format!("{} {REMOVED}{end}", redact_words(before))),
        };
    }
    let names = normalized_name(line);
    let suspicious = SECRET_NAMES.iter().chain(&EXACT_SECRET_NAMES).any(|word| names.contains(word))
        || AUTH_SCHEMES.iter().any(|word| lower.contains(word))
        || line.contains("://")
        || CREDENTIAL_PREFIXES.iter().any(|(prefix, _)| line.contains(prefix));
    if suspicious { redact_words(line) } else { Cow::Borrowed(line) }
}

fn redact_words(line: &str) -> Cow<'_, str> {
    let mut output = String::with_capacity(line.len());
    let mut rest = line;
    let mut next = Expected::Anything;
    while !rest.is_empty() {
        let gap = rest.len() - rest.trim_start_matches(is_word_separator).len();
        output.push_str(&rest[..gap]);
        rest = &rest[gap..];
        let length = rest.find(is_word_separator).unwrap_or(rest.len());
        let (word, after) = rest.split_at(length);
        let redacted = redact_word(word, &mut next);
        output.push_str(&redacted);
        rest = after;
    }
    if output == line { Cow::Borrowed(line) } else { Cow::Owned(output) }
}

const fn is_word_separator(c: char) -> bool {
    c.is_whitespace() || matches!(c, '"' | '\'' | ',' | ';' | '&' | '?' | '(' | ')' | '{' | '}')
}

/// What the next word may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Expected {
    Anything,
    /// After a name that indicates a secret: the separator before its value, or something else.
    Separator,
    Secret,
}

/// Redacts one word: `name=value`, a name or a scheme before its value, a URL, or a plain word.
fn redact_word<'a>(word: &'a str, next: &mut Expected) -> Cow<'a, str> {
    let expected = std::mem::replace(next, Expected::Anything);
    if word.is_empty() {
        *next = expected;
        return Cow::Borrowed(word);
    }
    if word.eq_ignore_ascii_case("bearer") || word.eq_ignore_ascii_case("basic") {
        *next = Expected::Secret;
        return Cow::Borrowed(word);
    }
    if matches!(word, ":" | "=") {
        *next = if expected == Expected::Anything { Expected::Anything } else { Expected::Secret };
        return Cow::Borrowed(word);
    }
    let word = without_userinfo(word);
    // `--env=HF_TOKEN=…`, `https://host/#access_token=…`: each name in the word may be that of a secret.
    let mut start = 0;
    let separators = word
        .match_indices(SEPARATORS)
        .chain([(word.len(), "")])
        .map(|(index, separator)| (index, separator.chars().next()));
    for (index, separator) in separators.collect::<Vec<_>>() {
        let part = &word[start..];
        if CREDENTIAL_PREFIXES.iter().any(|(prefix, least)| part.starts_with(prefix) && part.len() >= *least) {
            return Cow::Owned(format!("{}{REMOVED}", &word[..start]));
        }
        if matches!(separator, Some('=' | ':')) && is_secret_name(&word[start..index]) {
            if index + 1 == word.len() {
                *next = Expected::Secret;
                return word;
            }
            return Cow::Owned(format!("{}{REMOVED}", &word[..=index]));
        }
        start = index + separator.map_or(0, char::len_utf8);
    }
    if expected == Expected::Secret {
        return Cow::Borrowed(REMOVED);
    }
    *next = match is_secret_name(&word) {
        true if word.starts_with("--") => Expected::Secret,
        true => Expected::Separator,
        false => Expected::Anything,
    };
    word
}

/// Returns a URL without its user part.
fn without_userinfo(word: &str) -> Cow<'_, str> {
    let Some((before, after)) = word.split_once("://") else { return Cow::Borrowed(word) };
    let user = after.split(['/', '#']).next().unwrap_or_default();
    match user.rsplit_once('@') {
        Some((userinfo, _)) => Cow::Owned(format!("{before}://{REMOVED}{}", &after[userinfo.len()..])),
        None => Cow::Borrowed(word),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_removed_and_the_rest_of_the_line_is_kept() {
        let jwt = format!("eyJ{}", "a".repeat(60));
        let ours = format!("{TOKEN_PREFIX}{}", "0".repeat(64));
        for (text, expected) in [
            ("export HF_TOKEN=hunter2 && run", "export HF_TOKEN=[removed] && run"),
            ("{\"password\": \"hunter2\", \"n\": 3}", "{\"password\": \"[removed]\", \"n\": 3}"),
            ("Authorization: Bearer hunter2", "Authorization: Bearer [removed]"),
            ("curl -H 'Authorization: Basic hunter2' x", "curl -H 'Authorization: Basic [removed]' x"),
            ("tool --token hunter2 --fast", "tool --token [removed] --fast"),
            ("git clone https://ann:hunter2@host/x.git", "git clone https://[removed]@host/x.git"),
            ("https://host/x?access_token=hunter2&page=2", "https://host/x?access_token=[removed]&page=2"),
            (&format!("got {jwt} back"), "got [removed] back"),
            (&format!("{ours}\n"), "[removed]\n"),
            ("key AKIAABCDEFGHIJKLMNOP used", "key [removed] used"),
            ("api-key: hunter2", "api-key: [removed]"),
            ("password = hunter2", "password = [removed]"),
            ("docker run --env=HF_TOKEN=hunter2 x", "docker run --env=HF_TOKEN=[removed] x"),
            ("AccountName=a;AccountKey=hunter2==;x=1", "AccountName=a;AccountKey=[removed];x=1"),
            ("SharedAccessKey=hunter2", "SharedAccessKey=[removed]"),
            ("https://a.blob/x?sv=1&sig=hunter2%3D&se=2", "https://a.blob/x?sv=1&sig=[removed]&se=2"),
            ("https://host/#access_token=hunter2", "https://host/#access_token=[removed]"),
            ("Set-Cookie: a=hunter2; b=hunter2\n", "Set-Cookie: [removed]\n"),
            ("key=ghp_0123456789abcdefghij", "key=[removed]"),
        ] {
            assert_eq!(redact(text), expected, "{text}");
            assert!(!redact(text).contains("hunter2"), "{text}");
        }
    }

    #[test]
    fn a_private_key_is_removed_completely() {
        let text = "a\n-----BEGIN OPENSSH PRIVATE KEY-----\nhunter2\nhunter2\n-----END OPENSSH PRIVATE KEY-----\nb\n";
        assert_eq!(redact(text), "a\n[removed]\nb\n");
    }

    #[test]
    fn ordinary_output_is_unchanged() {
        for text in [
            "12:00:01 dl: 745.2 TFLOP/s on GPU 3, tokens 1024\n",
            "see https://example.org/a@b and the keyword\n",
            "NVRM: Xid (PCI:0000:18:00): 79, pid=1\n",
            "token_file=/etc/cluster-doctor/token\n",
            "signal: 9, design=2, sigma=3\n",
            "",
        ] {
            assert!(matches!(redact(text), Cow::Borrowed(_)), "{text}: {}", redact(text));
        }
    }

    #[test]
    fn documents_are_redacted_by_field_and_by_text() {
        let mut value = serde_json::json!({"auth_token": "x", "out": ["TOKEN=hunter2", 3], "tokens": "7", "n": null});
        redact_json(&mut value);
        let expected =
            serde_json::json!({"auth_token": REMOVED, "out": ["TOKEN=[removed]", 3], "tokens": "7", "n": null});
        assert_eq!(value, expected);
        let mut nested = serde_json::json!({"password": ["x", {"y": 3}], "authorization": "Basic x", "secret": true});
        redact_json(&mut nested);
        let expected =
            serde_json::json!({"password": [REMOVED, {"y": REMOVED}], "authorization": REMOVED, "secret": true});
        assert_eq!(nested, expected);
    }

    #[test]
    fn a_truncated_document_is_redacted_line_by_line() {
        let truncated = r#"{"out": "A=1\nHF_TOKEN=hunter2\n{\"password\": \"hunter2\"}"#;
        let redacted = redact(&unescape(truncated)).into_owned();
        assert!(!redacted.contains("hunter2") && redacted.contains("A=1\nHF_TOKEN=[removed]\n"), "{redacted}");
    }

    proptest::proptest! {
        #[test]
        fn any_text_can_be_redacted_and_redacting_again_changes_nothing(text in ".{0,400}") {
            let once = redact(&text).into_owned();
            proptest::prop_assert_eq!(redact(&once).into_owned(), once);
        }
    }
}
