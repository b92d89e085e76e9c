//! Parses records of Slurm's commands, one per line: `Key=value Key=value …`. Pure.
//!
//! Values may have blanks (a reason, the name of a kernel) and may look like keys, because users write them. A line is therefore
//! split only at Slurm's own keys, and of a repeated key the first counts: users' text follows the fields that slurmctld sets.
//! Lines that do not begin a record continue a text with a line break.

use doctor_core::time::{Span, Timestamp};

/// One record: keys and values in the order printed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Record<'a> {
    fields: Vec<(&'a str, &'a str)>,
}

impl<'a> Record<'a> {
    /// Splits a line at `keys`, which must be sorted.
    pub(super) fn parse(line: &'a str, keys: &[&str]) -> Self {
        let bytes = line.as_bytes();
        let mut starts: Vec<(usize, usize)> = Vec::new();
        for (sign, _) in line.match_indices('=') {
            let key_start = bytes[..sign].iter().rposition(|byte| *byte == b' ').map_or(0, |blank| blank + 1);
            if keys.binary_search(&&line[key_start..sign]).is_ok() {
                starts.push((key_start, sign));
            }
        }
        let ends = starts.iter().skip(1).map(|(key_start, _)| *key_start).chain([line.len()]);
        let fields = starts
            .iter()
            .zip(ends)
            .map(|((key_start, sign), end)| (&line[*key_start..*sign], line[sign + 1..end].trim()));
        Self { fields: fields.collect() }
    }

    /// Returns the whole value, or `None` if Slurm prints that there is none.
    pub(super) fn text(&self, key: &str) -> Option<&'a str> {
        let value = self.fields.iter().find(|(name, _)| *name == key)?.1;
        (!is_null(value)).then_some(value)
    }

    /// Returns the first word of the value: the rest may belong to a key of a later version.
    pub(super) fn word(&self, key: &str) -> Option<&'a str> {
        self.text(key)?.split(' ').next()
    }

    pub(super) fn number(&self, key: &str) -> Option<u64> {
        self.word(key)?.parse().ok()
    }

    pub(super) fn time(&self, key: &str) -> Option<Timestamp> {
        time(self.word(key)?)
    }

    pub(super) fn list(&self, key: &str) -> impl Iterator<Item = &'a str> + use<'a> {
        self.word(key).unwrap_or_default().split(',').filter(|item| !item.is_empty())
    }
}

/// Slurm has many words for an absent value.
pub(super) fn is_null(value: &str) -> bool {
    matches!(value, "" | "(null)" | "N/A" | "n/a" | "None" | "NONE" | "Unknown")
}

/// Returns the lines that begin a record of this kind.
pub(super) fn records<'a>(text: &'a str, first: &str) -> impl Iterator<Item = &'a str> {
    text.lines().filter(move |line| line.strip_prefix(first).is_some_and(|rest| rest.starts_with('=')))
}

/// Parses a time as Slurm's commands print it in UTC.
pub(super) fn time(text: &str) -> Option<Timestamp> {
    let at = text.get(..19).filter(|_| text.len() == 19)?;
    format!("{at}Z").parse().ok()
}

/// Parses a duration: `30`, `30:00`, `1:00:00`, `2-00:00:00`; a single number is minutes.
pub(super) fn parse_duration(text: &str) -> Option<Span> {
    let number = |part: &str| part.parse::<i64>().ok().filter(|number| (0..=10_000_000).contains(number));
    let (days, rest) = match text.split_once('-') {
        Some((days, rest)) => (number(days)?, rest),
        None => (0, text),
    };
    let parts = rest.split(':').map(number).collect::<Option<Vec<_>>>()?;
    let seconds = match parts[..] {
        [minutes] => minutes * 60,
        [minutes, seconds] => minutes * 60 + seconds,
        [hours, minutes, seconds] => hours * 3600 + minutes * 60 + seconds,
        _ => return None,
    };
    Some(Span::from_secs(days * 86_400 + seconds))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KEYS: [&str; 4] = ["Extra", "NodeName", "Reason", "State"];

    #[test]
    fn values_may_contain_spaces_and_user_text_cannot_forge_fields() {
        let line = "NodeName=n1 State=IDLE+DRAIN Strange=1 Reason=fan = loud, State=IDLE [alice@now] Extra={\"a\": 1}";
        let record = Record::parse(line, &KEYS);
        assert_eq!(record.word("NodeName"), Some("n1"));
        assert_eq!(record.word("State"), Some("IDLE+DRAIN"));
        assert_eq!(record.text("Reason"), Some("fan = loud,"));
        assert_eq!(record.text("Extra"), Some("{\"a\": 1}"));
        assert_eq!(Record::parse("NodeName=n Reason=(null)", &KEYS).text("Reason"), None);
    }

    #[test]
    fn a_line_break_in_a_text_does_not_begin_a_record() {
        let text = "NodeName=a State=IDLE Reason=x\ny\nNodeName=b\nNodeNames=c\n";
        assert_eq!(records(text, "NodeName").collect::<Vec<_>>(), ["NodeName=a State=IDLE Reason=x", "NodeName=b"]);
    }

    #[test]
    fn times_and_durations_are_parsed_as_slurm_writes_them() {
        assert_eq!(time("2026-11-15T00:26:50").map(Timestamp::secs), Some(1_794_702_410));
        for none in ["Unknown", "None", "", "2026-11-15", "2026-11-15T00:26:50Z", "20ü6-11-15T00:26:50"] {
            assert_eq!(time(none), None, "{none}");
        }
        for (text, seconds) in [("10", 600), ("10:30", 630), ("1:00:00", 3600), ("365-00:00:00", 31_536_000)] {
            assert_eq!(parse_duration(text), Some(Span::from_secs(seconds)), "{text}");
        }
        assert_eq!((parse_duration("UNLIMITED"), parse_duration("1:2:3:4"), parse_duration("-1")), (None, None, None));
    }

    proptest! {
        #[test]
        fn every_parsed_value_is_part_of_the_line(line in "\\PC{0,200}") {
            let record = Record::parse(&line, &KEYS);
            for key in KEYS {
                prop_assert!(record.text(key).is_none_or(|value| line.contains(value)));
            }
            let _ = (time(&line), parse_duration(&line));
        }
    }
}
