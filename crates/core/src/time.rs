//! Points in time and durations, in whole milliseconds.
//!
//! A planning pass compares a million of these and the store keeps them as one integer column, so they are plain
//! `i64`s; jiff parses and prints their human-readable forms. Nothing here reads a clock.

use std::{fmt, str::FromStr};

use jiff::fmt::friendly::{Designator, SpanParser, SpanPrinter};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// A point in time: milliseconds since 1970-01-01T00:00:00Z.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(i64);

/// A duration in milliseconds. Written `5m`, `1h 30m`, `7d`.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Span(i64);

/// Text that is not a point in time or a duration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not {expected}")]
pub struct InvalidTime {
    text: String,
    expected: &'static str,
}

const DURATION_FORM: &str = "a duration such as \"90s\", \"5m\", \"1h 30m\" or \"7d\"";

impl Timestamp {
    /// Before every other timestamp; written `never`.
    pub const MIN: Self = Self(i64::MIN);
    /// After every other timestamp; written `forever`.
    pub const MAX: Self = Self(i64::MAX);

    pub const fn from_millis(millis: i64) -> Self {
        Self(millis)
    }

    pub const fn from_secs(secs: i64) -> Self {
        Self(secs.saturating_mul(1000))
    }

    pub const fn millis(self) -> i64 {
        self.0
    }

    pub const fn secs(self) -> i64 {
        self.0.div_euclid(1000)
    }

    /// Returns how long ago `earlier` was; zero if it is later than `self`.
    pub fn since(self, earlier: Self) -> Span {
        Span(self.0.saturating_sub(earlier.0).max(0))
    }

    pub const fn plus(self, span: Span) -> Self {
        Self(self.0.saturating_add(span.0))
    }

    pub const fn minus(self, span: Span) -> Self {
        Self(self.0.saturating_sub(span.0))
    }

    /// Returns the absolute difference to `other`.
    pub fn distance(self, other: Self) -> Span {
        Span(self.0.saturating_sub(other.0).saturating_abs())
    }
}

impl Span {
    pub const ZERO: Self = Self(0);

    pub const fn from_millis(millis: i64) -> Self {
        Self(millis)
    }

    pub const fn from_secs(secs: i64) -> Self {
        Self(secs.saturating_mul(1000))
    }

    pub const fn minutes(minutes: i64) -> Self {
        Self::from_secs(minutes.saturating_mul(60))
    }

    pub const fn hours(hours: i64) -> Self {
        Self::minutes(hours.saturating_mul(60))
    }

    pub const fn days(days: i64) -> Self {
        Self::hours(days.saturating_mul(24))
    }

    pub const fn millis(self) -> i64 {
        self.0
    }

    pub const fn secs(self) -> i64 {
        self.0 / 1000
    }

    #[expect(clippy::cast_precision_loss, reason = "hours are shown, not compared")]
    pub fn as_hours(self) -> f64 {
        self.0 as f64 / 3_600_000.0
    }

    pub const fn times(self, factor: i64) -> Self {
        Self(self.0.saturating_mul(factor))
    }

    /// Returns `self` doubled `times` times, at most `cap`: an exponential back-off.
    pub fn doubled(self, times: u32, cap: Self) -> Self {
        let factor = 1_i64.checked_shl(times.min(40)).unwrap_or(i64::MAX);
        self.times(factor).min(cap)
    }

    pub const fn is_zero(self) -> bool {
        self.0 == 0
    }

    pub fn to_std(self) -> std::time::Duration {
        std::time::Duration::from_millis(u64::try_from(self.0).unwrap_or(0))
    }
}

impl std::ops::Add for Span {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl std::iter::Sum for Span {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        iter.fold(Self::ZERO, std::ops::Add::add)
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match jiff::Timestamp::from_millisecond(self.0) {
            Ok(moment) => f.pad(&moment.to_string()),
            Err(_) if self.0 < 0 => f.pad("never"),
            Err(_) => f.pad("forever"),
        }
    }
}

impl fmt::Debug for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Timestamp {
    type Err = InvalidTime;
    fn from_str(text: &str) -> Result<Self, InvalidTime> {
        text.parse::<jiff::Timestamp>()
            .map(|moment| Self(moment.as_millisecond()))
            .map_err(|_| InvalidTime { text: text.to_owned(), expected: "a time such as \"2026-11-15T08:00:00Z\"" })
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const DAY: i64 = 86_400_000;
        // A day is exactly 24 hours here; jiff's printer would print it as hours.
        let (days, rest) = (self.0 / DAY, self.0 % DAY);
        let printer = SpanPrinter::new().designator(Designator::Compact);
        let rest_text = printer.duration_to_string(&jiff::SignedDuration::from_millis(rest));
        let text = match (days, rest) {
            (0, _) => rest_text,
            (_, 0) => format!("{days}d"),
            _ => format!("{days}d {rest_text}"),
        };
        f.pad(&text)
    }
}

impl fmt::Debug for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Span {
    /// Ten thousand years. Twice that could not be parsed back from its written form.
    const LONGEST_WRITTEN: i64 = 3_652_500 * 86_400_000;
}

impl FromStr for Span {
    type Err = InvalidTime;
    fn from_str(text: &str) -> Result<Self, InvalidTime> {
        let bad = || InvalidTime { text: text.to_owned(), expected: DURATION_FORM };
        let parsed = SpanParser::new().parse_span(text.trim()).map_err(|_| bad())?;
        if parsed.get_years() != 0 || parsed.get_months() != 0 {
            return Err(bad());
        }
        let millis = i64::from(parsed.get_weeks()) * 7 * 86_400_000
            + i64::from(parsed.get_days()) * 86_400_000
            + i64::from(parsed.get_hours()) * 3_600_000
            + parsed.get_minutes().saturating_mul(60_000)
            + parsed.get_seconds().saturating_mul(1000)
            + parsed.get_milliseconds();
        if (0..=Self::LONGEST_WRITTEN).contains(&millis) { Ok(Self(millis)) } else { Err(bad()) }
    }
}

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Timestamp {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
        // Stored values are read back as they are written. Users write neither of these.
        match &*text {
            "never" => Ok(Self::MIN),
            "forever" => Ok(Self::MAX),
            moment => moment.parse().map_err(de::Error::custom),
        }
    }
}

impl Serialize for Span {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl de::Visitor<'_> for Text {
            type Value = Span;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(DURATION_FORM)
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Span, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_str(Text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_parse_in_the_usual_notation() {
        for (text, span) in [
            ("5m", Span::minutes(5)),
            ("90s", Span::from_secs(90)),
            ("1h 30m", Span::minutes(90)),
            ("1h30m", Span::minutes(90)),
            ("7d", Span::days(7)),
            ("2w", Span::days(14)),
            ("250ms", Span::from_millis(250)),
        ] {
            assert_eq!(text.parse::<Span>().unwrap(), span, "{text}");
        }
    }

    #[test]
    fn a_duration_without_unit_or_below_zero_is_rejected_with_the_accepted_form() {
        for text in ["5", "-5m", "5 parsecs", "", "1 month"] {
            let error = text.parse::<Span>().unwrap_err().to_string();
            assert!(error.contains("such as \"90s\""), "{text}: {error}");
        }
    }

    #[test]
    fn printed_durations_and_timestamps_read_back() {
        for span in [Span::ZERO, Span::minutes(5), Span::days(7), Span::hours(36), Span::from_millis(1500)] {
            assert_eq!(span.to_string().parse::<Span>().unwrap(), span, "{span}");
        }
        for moment in [Timestamp::MIN, Timestamp::from_secs(0), Timestamp::from_secs(1_795_000_000), Timestamp::MAX] {
            let text = serde_json::to_string(&moment).unwrap();
            assert_eq!(serde_json::from_str::<Timestamp>(&text).unwrap(), moment, "{text}");
        }
        let moment = Timestamp::from_millis(1_794_700_800_123);
        assert_eq!(moment.to_string().parse::<Timestamp>().unwrap(), moment);
        assert_eq!(Span::days(8).to_string(), "8d");
        assert_eq!(Span::hours(36).to_string(), "1d 12h");
    }

    #[test]
    fn a_duration_that_cannot_be_printed_is_rejected() {
        let longest: Span = "3652500d".parse().unwrap();
        assert_eq!(longest.to_string().parse::<Span>().unwrap(), longest);
        for text in ["3652500d 1ms", "2:30:0001611494565230", "7304484d 7304484d"] {
            assert!(text.parse::<Span>().is_err(), "{text}");
        }
    }

    #[test]
    fn backoff_doubles_up_to_its_cap() {
        let steps: Vec<_> = (0..5).map(|n| Span::minutes(30).doubled(n, Span::hours(3))).collect();
        let minutes = [30, 60, 120, 180, 180].map(Span::minutes);
        assert_eq!(steps, minutes);
        assert_eq!(Span::minutes(30).doubled(4_000_000, Span::days(1)), Span::days(1));
    }
}
