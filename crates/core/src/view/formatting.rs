//! Formatting of times and counts, the same in every sentence.

use crate::time::{Span, Timestamp};

/// Formats a time to the second, in UTC.
pub fn format_time(at: Timestamp) -> String {
    let text = at.to_string();
    match text.split_once('T') {
        Some((day, time)) => format!("{day} {}", time.get(..8).unwrap_or(time).trim_end_matches('Z')),
        None => text,
    }
}

/// Formats a duration in its largest unit: `3d`, `5h`, `12m`, `8s`. `Display` of [`Span`] is exact.
pub fn short_duration(span: Span) -> String {
    let secs = span.secs();
    match secs {
        ..60 => format!("{secs}s"),
        60..3600 => format!("{}m", secs / 60),
        3600..172_800 => format!("{}h", secs / 3600),
        _ => format!("{}d", secs / 86_400),
    }
}

/// Formats node-hours to a tenth.
pub fn format_hours(hours: f64) -> String {
    format!("{hours:.1}")
}

/// Formats with one decimal place; `-` if there is no value.
pub fn format_percent(percent: Option<f64>) -> String {
    percent.map_or_else(|| "-".to_owned(), |percent| format!("{percent:.1} %"))
}

/// Formats a count with its noun: `1 node`, `2 nodes`.
pub fn plural(count: usize, noun: &str) -> String {
    if count == 1 { format!("1 {noun}") } else { format!("{count} {noun}s") }
}
