//! Formats durations, times, counts and lists for people.

use doctor_core::time::{Span, Timestamp};
pub(crate) use doctor_core::view::{format_hours, format_percent, format_time, plural, short_duration};

/// Formats a time relative to now. A future time is rounded up: a result valid for a week is due in 7 days.
pub(crate) fn ago(now: Timestamp, at: Timestamp) -> String {
    if at <= now {
        return format!("{} ago", short_duration(now.since(at)));
    }
    let ahead = at.since(now).secs() + 1;
    let unit = match ahead {
        0..60 => 1,
        60..3600 => 60,
        3600..172_800 => 3600,
        _ => 86_400,
    };
    format!("in {}", short_duration(Span::from_secs((ahead + unit - 1) / unit * unit)))
}

/// Wraps text at spaces, without control characters. Continuation lines are indented under the first word.
pub(super) fn wrap(text: &str, width: Option<usize>) -> Vec<String> {
    let mut lines = Vec::new();
    for paragraph in sanitize(text).split('\n') {
        let Some(width) = width.filter(|width| paragraph.chars().count() > *width) else {
            lines.push(paragraph.to_owned());
            continue;
        };
        let blanks = paragraph.chars().take_while(|c| *c == ' ').count();
        let bullet = matches!(paragraph.trim_start().as_bytes(), [b'-' | b'!', b' ', ..]);
        let hang = " ".repeat(blanks + if bullet { 2 } else { 0 });
        let mut line = " ".repeat(blanks);
        for word in paragraph.split_whitespace() {
            let used = line.chars().count();
            if !line.trim().is_empty() && used + 1 + word.chars().count() > width {
                lines.push(std::mem::replace(&mut line, hang.clone()));
            } else if !line.trim().is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
        lines.push(line);
    }
    lines
}

/// Replaces control characters (except newline and tab) and bidirectional overrides with U+FFFD. Text from nodes and
/// hosts is not trusted and must not send escape sequences to a terminal.
pub(crate) fn sanitize(text: &str) -> String {
    text.chars().map(|c| if is_harmful(c) { '\u{fffd}' } else { c }).collect()
}

fn is_harmful(c: char) -> bool {
    let backwards = matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    c.is_control() && c != '\n' && c != '\t' || backwards
}

/// As [`sanitize`], for a page that another Cluster Doctor made: its colours remain.
pub(crate) fn sanitize_page(text: &str) -> String {
    /// Longer than any colour that we print.
    const MAX_COLOUR: usize = 20;
    let (mut clean, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(at) = rest.find(is_harmful) {
        clean.push_str(&rest[..at]);
        let after = &rest[at..];
        let length = after.strip_prefix("\x1b[").and_then(|codes| {
            let length = codes.find(|c: char| !c.is_ascii_digit() && c != ';')?;
            (length <= MAX_COLOUR && codes[length..].starts_with('m')).then_some(length + 3)
        });
        let (kept, used) = length
            .map_or(("\u{fffd}", after.chars().next().map_or(1, char::len_utf8)), |length| (&after[..length], length));
        clean.push_str(kept);
        rest = &after[used..];
    }
    clean + rest
}

/// Joins items with commas; `-` if there are none.
pub(crate) fn comma_separated(items: impl IntoIterator<Item = impl ToString>) -> String {
    let items: Vec<String> = items.into_iter().map(|item| item.to_string()).collect();
    if items.is_empty() { "-".to_owned() } else { items.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_wraps_at_blanks_with_a_hanging_indent() {
        let lines = wrap("  - one two three four", Some(12));
        assert_eq!(lines, ["  - one two", "    three", "    four"]);
        assert_eq!(wrap("short\n\nlines", Some(12)), ["short", "", "lines"]);
        assert_eq!(wrap(&"x".repeat(30), Some(12)), ["x".repeat(30)]);
        assert_eq!(wrap("a very long line indeed", None).len(), 1);
        assert_eq!(wrap("a\x1b[2J", None), ["a\u{fffd}[2J"]);
    }

    #[test]
    fn control_sequences_of_a_node_do_not_reach_the_terminal() {
        assert_eq!(sanitize("ok\n\tfine\x1b[2Jgone\r\x07"), "ok\n\tfine\u{fffd}[2Jgone\u{fffd}\u{fffd}");
        assert_eq!(sanitize("a\u{9b}2J\u{202e}b é"), "a\u{fffd}2J\u{fffd}b é");
    }

    #[test]
    fn a_page_of_a_controller_keeps_its_colours_and_nothing_else() {
        let coloured = "\x1b[1mSTATE\x1b[0m  \x1b[38;5;9mout\x1b[39m\n";
        assert_eq!(sanitize_page(coloured), coloured);
        assert_eq!(sanitize_page("a\x1b[2Jb\x1b]0;title\x07c\x1b["), "a\u{fffd}[2Jb\u{fffd}]0;title\u{fffd}c\u{fffd}[");
        assert_eq!(sanitize_page("\u{9b}1m\u{202e}\x1b[1"), "\u{fffd}1m\u{fffd}\u{fffd}[1");
    }

    #[test]
    fn durations_and_times_are_short() {
        for (span, text) in [
            (Span::from_secs(8), "8s"),
            (Span::minutes(12), "12m"),
            (Span::hours(47), "47h"),
            (Span::days(2), "2d"),
            (Span::ZERO, "0s"),
        ] {
            assert_eq!(short_duration(span), text);
        }
        let at: Timestamp = "2026-11-15T08:00:01.250Z".parse().unwrap();
        assert_eq!(format_time(at), "2026-11-15 08:00:01");
        assert_eq!(format_time("2026-11-15T08:00:00Z".parse().unwrap()), "2026-11-15 08:00:00");
        assert_eq!(format_time(Timestamp::MIN), "never");
        assert_eq!(ago(at, at.minus(Span::hours(3))), "3h ago");
        assert_eq!(ago(at, at.plus(Span::from_millis(179_500))), "in 3m");
        assert_eq!(ago(at, at.plus(Span::from_millis(7 * 86_400_000 - 1500))), "in 7d");
        assert_eq!((plural(1, "node"), plural(0, "node")), ("1 node".to_owned(), "0 nodes".to_owned()));
    }
}
