//! Strict TOML settings, merged over defaults key by key.
//!
//! An error names line, column, the line itself and what is accepted. To keep this after merging a site's file over the
//! defaults, the two are merged as parsed documents in which every value keeps its span. The defaults are known to be
//! valid, so every error has its place in the site's text.
//!
//! A line that may hold a secret is not shown: errors are logged, and pasted into tickets. That also holds for the value that the parser
//! repeats in its message. The names of keys decide, since a text that does not parse has no structure yet.

use std::{fmt, ops::Range};

use serde::de::DeserializeOwned;
use toml::{
    Spanned,
    de::{DeTable, DeValue, Deserializer},
};

/// A text that was rejected, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TomlError {
    message: String,
    location: Option<SourceLocation>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct SourceLocation {
    line: usize,
    column: usize,
    /// `None`: the line may hold a secret.
    source: Option<String>,
    width: usize,
}

/// Parts of the keys whose values may be secret, or may contain one, as the URL of a database and that of a chat do.
const SECRET_KEYS: [&str; 9] =
    ["secret", "password", "token", "url", "store", "traces", "webhook", "slack", "alertmanager"];

impl TomlError {
    /// Creates an error at this place of the text.
    pub fn at(text: &str, span: Option<Range<usize>>, message: impl Into<String>) -> Self {
        Self { message: message.into(), location: span.map(|span| SourceLocation::of(text, &span)) }
    }

    /// Returns the line, counted from one.
    pub fn line(&self) -> Option<usize> {
        self.location.as_ref().map(|location| location.line)
    }

    /// Returns the column, counted from one, in characters.
    pub fn column(&self) -> Option<usize> {
        self.location.as_ref().map(|location| location.column)
    }

    fn from_toml(text: &str, error: &toml::de::Error) -> Self {
        let mut made = Self::at(text, error.span(), plain_message(error.message()));
        if made.location.as_ref().is_none_or(|location| location.source.is_none()) {
            made.message = without_value(&made.message);
        }
        made
    }
}

impl SourceLocation {
    fn of(text: &str, span: &Range<usize>) -> Self {
        let start = text.floor_char_boundary(span.start.min(text.len()));
        let begin = text[..start].rfind('\n').map_or(0, |newline| newline + 1);
        let source = text[begin..].lines().next().unwrap_or_default();
        let end = text.floor_char_boundary(span.end.clamp(start, begin + source.len().max(start - begin)));
        Self {
            line: text[..begin].matches('\n').count() + 1,
            column: text[begin..start].chars().count() + 1,
            source: (!may_hold_secret(&text[..begin], source)).then(|| source.chars().take(200).collect()),
            width: text[start..end].chars().count().max(1),
        }
    }
}

impl fmt::Display for TomlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(location) = &self.location else { return f.write_str(&self.message) };
        let SourceLocation { line, column, source, width } = location;
        let gutter = line.to_string().len();
        let Some(source) = source else { return write!(f, "line {line}, column {column}: {}", self.message) };
        writeln!(f, "line {line}, column {column}: {}", self.message)?;
        writeln!(f, "{:gutter$} |", "")?;
        writeln!(f, "{line} | {source}")?;
        write!(f, "{:gutter$} | {:indent$}{}", "", "", "^".repeat(*width), indent = column - 1)
    }
}

impl std::error::Error for TomlError {}

/// Whether a line may hold a secret: one of its keys is named so, or it continues a text of several lines or a table of such a key.
fn may_hold_secret(before: &str, line: &str) -> bool {
    let names_secret = |line: &str| {
        let line = line.to_ascii_lowercase();
        SECRET_KEYS.iter().any(|key| line.contains(key))
    };
    let continues_text = |quotes: &str| before.matches(quotes).count() % 2 == 1;
    let table = before.lines().rev().find(|line| line.trim_start().starts_with('[')).unwrap_or_default();
    names_secret(line) || names_secret(table) || continues_text("\"\"\"") || continues_text("'''")
}

/// Returns a message of the parser without the value that it found: `invalid type: string "x", expected y`.
fn without_value(message: &str) -> String {
    let found =
        ["invalid type: ", "invalid value: "].iter().find_map(|begin| Some((*begin, message.strip_prefix(begin)?)));
    let Some((begin, rest)) = found else { return message.to_owned() };
    match (rest.find(['"', '`']), rest.rfind(", expected ")) {
        (Some(value), Some(expected)) if value < expected => {
            format!("{begin}{}{}", rest[..value].trim_end(), &rest[expected..])
        }
        _ => message.to_owned(),
    }
}

/// Replaces the names of Rust's number types, which mean nothing to an operator.
fn plain_message(message: &str) -> String {
    const WORDS: [(&str, &str); 6] = [
        ("expected u16", "expected a whole number from 0 to 65535"),
        ("expected u32", "expected a whole number, 0 or more"),
        ("expected u64", "expected a whole number, 0 or more"),
        ("expected usize", "expected a whole number, 0 or more"),
        ("expected f64", "expected a number"),
        ("expected a boolean", "expected true or false"),
    ];
    let found =
        WORDS.iter().find_map(|(typed, plain)| message.strip_suffix(typed).map(|head| format!("{head}{plain}")));
    found.unwrap_or_else(|| message.to_owned())
}

/// The permitted range of a number, by its key.
#[derive(Debug, Clone, Copy)]
pub struct Limit {
    /// The path from the root: `["limits", "jobs"]`.
    pub key: &'static [&'static str],
    pub min: f64,
    pub max: f64,
    /// Completes "expected …".
    pub accepted: &'static str,
}

/// Parses a whole text.
///
/// # Errors
/// With the place of the first error.
pub fn read<T: DeserializeOwned>(text: &str, limits: &[Limit]) -> Result<T, TomlError> {
    deserialize(text, parse(text)?, limits)
}

/// Parses `defaults` overridden key by key by `site`. Lists replace lists.
///
/// # Errors
/// With the place of the first error in `site`; `defaults` has none.
pub fn read_merged<T: DeserializeOwned>(defaults: &str, site: &str, limits: &[Limit]) -> Result<T, TomlError> {
    let mut merged = parse(defaults)?;
    let over = parse(site)?;
    let span = over.span();
    merge(merged.get_mut(), over.into_inner());
    deserialize(site, Spanned::new(span, merged.into_inner()), limits)
}

fn parse(text: &str) -> Result<Spanned<DeTable<'_>>, TomlError> {
    DeTable::parse(text).map_err(|error| TomlError::from_toml(text, &error))
}

fn deserialize<T: DeserializeOwned>(text: &str, table: Spanned<DeTable<'_>>, limits: &[Limit]) -> Result<T, TomlError> {
    for limit in limits {
        check(text, table.get_ref(), limit)?;
    }
    T::deserialize(Deserializer::from(table)).map_err(|error| TomlError::from_toml(text, &error))
}

fn merge<'i>(base: &mut DeTable<'i>, over: DeTable<'i>) {
    for (key, value) in over {
        let span = value.span();
        match (base.get_mut(key.get_ref().as_ref()).map(Spanned::get_mut), value.into_inner()) {
            (Some(DeValue::Table(under)), DeValue::Table(over)) => merge(under, over),
            (_, value) => {
                // Removed first: an insertion alone would keep the old key, which has another span.
                base.remove(key.get_ref().as_ref());
                base.insert(key, Spanned::new(span, value));
            }
        }
    }
}

fn check(text: &str, table: &DeTable<'_>, limit: &Limit) -> Result<(), TomlError> {
    let Some((last, way)) = limit.key.split_last() else { return Ok(()) };
    let mut table = table;
    for key in way {
        match table.get(*key).map(Spanned::get_ref) {
            Some(DeValue::Table(inner)) => table = inner,
            // Absent, or of the wrong type, which deserialisation reports.
            _ => return Ok(()),
        }
    }
    let Some(value) = table.get(*last) else { return Ok(()) };
    let number = match value.get_ref() {
        DeValue::Float(float) => float.as_str().parse::<f64>().ok(),
        DeValue::Integer(integer) => integer.as_str().parse::<f64>().ok(),
        _ => None,
    };
    match number {
        Some(number) if !(limit.min..=limit.max).contains(&number) => {
            let message = format!("`{last}` is {number}, expected {}", limit.accepted);
            Err(TomlError::at(text, Some(value.span()), message))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;
    use crate::time::Span;

    #[derive(Debug, PartialEq, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Shop {
        name: String,
        open: Hours,
        shelves: Vec<u32>,
    }

    #[derive(Debug, PartialEq, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Hours {
        per_day: f64,
        visit: Span,
        doors: u32,
    }

    const DEFAULTS: &str = "name = \"corner\"\nshelves = [1, 2]\n[open]\nper_day = 8.0\nvisit = \"5m\"\ndoors = 1\n";
    const LIMITS: [Limit; 1] =
        [Limit { key: &["open", "per_day"], min: 0.0, max: 24.0, accepted: "0 to 24 hours a day" }];

    fn over(site: &str) -> Result<Shop, TomlError> {
        read_merged(DEFAULTS, site, &LIMITS)
    }

    #[test]
    fn a_site_file_overrides_only_its_keys_and_lists_replace_lists() {
        let shop = over("shelves = [7]\n[open]\ndoors = 3\n").unwrap();
        assert_eq!(shop.shelves, [7]);
        assert_eq!(shop.open, Hours { per_day: 8.0, visit: Span::minutes(5), doors: 3 });
        assert_eq!(over("").unwrap().name, "corner");
    }

    #[test]
    fn an_error_has_the_location_in_the_site_file_and_the_accepted_values() {
        for (site, line, column, part) in [
            ("\n\nshop = 1\n", 3, 1, "unknown field `shop`, expected one of `name`, `open`, `shelves`"),
            ("[open]\n  door = 3\n", 2, 3, "expected one of `per_day`, `visit`, `doors`"),
            ("[open]\nvisit = \"5 parsecs\"\n", 2, 9, "such as \"90s\""),
            ("[open]\nvisit = 5\n", 2, 9, "such as \"90s\""),
            ("[open]\ndoors = -3\n", 2, 9, "expected a whole number, 0 or more"),
            ("[open]\nper_day = -8.0\n", 2, 11, "expected 0 to 24 hours a day"),
            ("[open]\nper_day = 25\n", 2, 11, "expected 0 to 24 hours a day"),
            ("open = 3\n", 1, 8, "invalid type"),
            ("[open\n", 1, 6, ""),
        ] {
            let error = over(site).unwrap_err();
            assert_eq!((error.line(), error.column()), (Some(line), Some(column)), "{site}: {error}");
            assert!(error.to_string().contains(part), "{site}: {error}");
        }
    }

    #[test]
    fn the_error_shows_the_line_with_a_pointer() {
        let error = over("name = \"ä\"\n[open]\ndoors = -3 # none\n").unwrap_err().to_string();
        let lines: Vec<&str> = error.lines().collect();
        assert_eq!(lines[2..], ["3 | doors = -3 # none", "  |         ^^"], "{error}");
    }

    #[test]
    fn a_line_that_may_hold_a_secret_is_not_shown_and_its_value_is_not_repeated() {
        for site in [
            "password = \"hunter2\"\n",
            "name = { token = \"hunter2\" }\n",
            "name = \"corner\" # password hunter2\nsecret = \"hunter2\n",
            "[open.webhook]\nkey = \"hunter2\"\n",
            "name = 'corner'\n[open]\ndoors = \"https://hunter2\" # url\n",
            "name = \"\"\"\nhunter2 \\x\n\"\"\"\n",
        ] {
            let error = over(site).unwrap_err();
            assert!(error.line().is_some(), "{site}: {error}");
            assert!(!error.to_string().contains("hunter2"), "{site}: {error}");
        }
        assert_eq!(
            without_value("invalid type: string \"a, expected b\", expected a table"),
            "invalid type: string, expected a table"
        );
        assert_eq!(
            without_value("invalid type: integer `4711`, expected a table"),
            "invalid type: integer, expected a table"
        );
        assert_eq!(without_value("unknown field `x`, expected `y`"), "unknown field `x`, expected `y`");
    }

    #[test]
    fn an_error_location_beyond_the_text_does_not_panic() {
        for text in ["", "x", "ä\nö", "a\n"] {
            for start in 0..text.len() + 3 {
                let _ = TomlError::at(text, Some(start..start + 2), "wrong").to_string();
            }
        }
    }
}
