//! Parses kernel log records and combines bursts of them into single events.
//!
//! Every check that reads the log requests the same three probes ([`probes`]), so that the runner reads them once. Only
//! records that the kernel itself wrote count; programs can write there too. The key of an event is the boot id and the
//! sequence number of its newest record: reported again, it is recognised as the same event.

use std::collections::{BTreeMap, BTreeSet};

use doctor_core::{
    observation::{Entity, Event, FailureKind, Metric, Observation, ProbeFailure},
    reason::ReasonCode,
    time::Span,
};

use crate::{
    files::file_text,
    probe::{Probe, ProbeOutput},
    spec::Params,
};

/// Runs are a day or more apart; events between two of them must not be missed.
const DEFAULT_WINDOW: Span = Span::days(7);

/// The probes of the kernel log. A check puts them before its own probes.
pub fn probes() -> [Probe; 3] {
    [Probe::Kmsg, Probe::read("/proc/uptime"), Probe::read("/proc/sys/kernel/random/boot_id")]
}

/// One record of /dev/kmsg: `PRIORITY,SEQUENCE,MICROSECONDS,FLAGS;TEXT`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record<'a> {
    pub from_kernel: bool,
    /// The number of the record since the boot.
    pub sequence: u64,
    /// Microseconds since the boot.
    pub micros: u64,
    pub text: &'a str,
}

impl<'a> Record<'a> {
    /// Parses a line. Returns `None` for continuation lines, which start with a space and are not needed.
    pub fn parse(line: &'a str) -> Option<Self> {
        let (head, text) = line.split_once(';')?;
        let mut fields = head.split(',');
        let priority: u32 = fields.next()?.parse().ok()?;
        let sequence = fields.next()?.parse().ok()?;
        let micros = fields.next()?.parse().ok()?;
        // The low three bits are the level, the rest is the facility: 0 is the kernel, and the kernel allows no program
        // to write as 0.
        Some(Self { from_kernel: priority >> 3 == 0, sequence, micros, text })
    }

    /// Returns the time between two records.
    pub fn time_between(&self, other: &Self) -> Span {
        span(self.micros.abs_diff(other.micros))
    }
}

fn span(micros: u64) -> Span {
    Span::from_millis(i64::try_from(micros / 1000).unwrap_or(i64::MAX))
}

/// The log of this boot.
#[derive(Debug, Clone)]
pub struct KmsgLog<'a> {
    /// All records, oldest first.
    records: Vec<Record<'a>>,
    /// The boot id, if it could be read.
    boot: Option<&'a str>,
    /// Microseconds since the boot.
    now: u64,
    window_start: u64,
}

/// Parses the outputs of [`probes`].
///
/// # Errors
/// Returns the observation that the check should return if the log, the uptime or the parameter `within` cannot be
/// read.
pub fn parse_log<'a>(params: &Params, outputs: &'a [ProbeOutput]) -> Result<KmsgLog<'a>, Observation> {
    let could_not = |kind, text: &str| Observation::Failed(ProbeFailure::new(kind, text));
    let all = file_text(outputs.first()).map_err(Observation::Failed)?;
    let up = file_text(outputs.get(1)).map_err(Observation::Failed)?;
    let within = match params.get("within") {
        None => Some(DEFAULT_WINDOW),
        Some(value) => value.as_str().and_then(|text| text.parse().ok()),
    };
    let Some(within) = within else {
        return Err(could_not(FailureKind::Unparseable, "parameter `within` is not a duration such as \"7d\""));
    };
    let Some(now) = micros_up(up) else {
        return Err(could_not(FailureKind::Unparseable, "/proc/uptime does not begin with a number of seconds"));
    };
    if all.trim().is_empty() {
        return Err(could_not(FailureKind::Empty, "the kernel log is empty"));
    }
    let records: Vec<_> = all.lines().filter_map(Record::parse).collect();
    if records.is_empty() {
        return Err(could_not(FailureKind::Unparseable, "no line of the kernel log has the form `6,1,0,-;text`"));
    }
    let window = u64::try_from(within.millis()).unwrap_or(0).saturating_mul(1000);
    // Without the boot id an event has no key and may be reported twice, but it is still detected.
    let boot = file_text(outputs.get(2)).ok().map(str::trim).filter(|id| is_boot_id(id));
    Ok(KmsgLog { records, boot, now, window_start: now.saturating_sub(window) })
}

fn micros_up(text: &str) -> Option<u64> {
    let seconds: f64 = text.split_ascii_whitespace().next()?.parse().ok()?;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked to be a sane uptime")]
    let micros = (0.0..1e12).contains(&seconds).then_some((seconds * 1e6) as u64);
    micros
}

fn is_boot_id(text: &str) -> bool {
    text.len() == 36 && text.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-')
}

impl<'a> KmsgLog<'a> {
    /// Returns the kernel's records within the window, oldest first.
    pub fn recent(&self) -> impl Iterator<Item = &Record<'a>> {
        self.records.iter().filter(|record| record.from_kernel && record.micros >= self.window_start)
    }

    /// Returns the age of a record.
    pub fn age(&self, record: &Record<'_>) -> Span {
        span(self.now.saturating_sub(record.micros))
    }

    /// Returns the number of records, as evidence that the log was read.
    pub fn record_count(&self) -> Metric {
        Metric::count("records", Entity::node(), self.records.len() as f64)
    }
}

/// Records of one kind about one entity.
#[derive(Debug, Clone)]
struct RecordGroup<'a> {
    times: u64,
    newest: Record<'a>,
    notes: BTreeSet<String>,
}

/// Combines records into one event per kind and entity.
#[derive(Debug, Clone, Default)]
pub struct RecordGroups<'a>(BTreeMap<(ReasonCode, Entity), RecordGroup<'a>>);

impl<'a> RecordGroups<'a> {
    pub fn add(&mut self, code: ReasonCode, entity: Entity, record: &Record<'a>) {
        self.add_with_note(code, entity, record, None);
    }

    /// Adds a record with a note. Notes precede the record's text, each once.
    pub fn add_with_note(&mut self, code: ReasonCode, entity: Entity, record: &Record<'a>, note: Option<String>) {
        let new = || RecordGroup { times: 0, newest: *record, notes: BTreeSet::new() };
        let burst = self.0.entry((code, entity)).or_insert_with(new);
        burst.times += 1;
        if record.micros >= burst.newest.micros {
            burst.newest = *record;
        }
        burst.notes.extend(note);
    }

    /// Removes the records of one kind about one entity that precede `record`.
    pub fn remove_before(&mut self, code: &ReasonCode, entity: &Entity, record: &Record<'_>) {
        let key = (code.clone(), entity.clone());
        if self.0.get(&key).is_some_and(|burst| burst.newest.micros <= record.micros) {
            self.0.remove(&key);
        }
    }

    pub fn events(self, log: &KmsgLog<'_>) -> Vec<Event> {
        let event = |((code, entity), burst): ((ReasonCode, Entity), RecordGroup<'_>)| Event {
            code,
            entity,
            // The log's clock counts from the boot and stops while the machine sleeps, so it gives no wall-clock time.
            at: None,
            text: burst.describe(log.now),
            key: log.boot.map(|boot| format!("{boot}:{}", burst.newest.sequence)),
        };
        self.0.into_iter().map(event).collect()
    }
}

impl RecordGroup<'_> {
    fn describe(&self, now: u64) -> String {
        let ago = Span::from_secs(span(now.saturating_sub(self.newest.micros)).secs());
        let notes: String = self.notes.iter().map(|note| format!("{note}: ")).collect();
        let text: String = self.newest.text.chars().take(300).collect();
        match self.times {
            1 => format!("{notes}{text} ({ago} before the check)"),
            times => format!("{notes}{text} ({times} times, the newest {ago} before the check)"),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A boot id, and outputs of [`probes`] for lines a second apart that end ten seconds ago on a machine with an
    /// uptime of ten days.
    pub(crate) const BOOT: &str = "0e2b6d54-7f3a-4a56-9d43-0f4f4d5d1c11";

    pub(crate) fn logged(lines: &[&str]) -> Vec<ProbeOutput> {
        let end = 864_000_u64 - 10;
        let spaced: Vec<(u64, &str)> =
            lines.iter().enumerate().map(|(n, line)| (end - (lines.len() - 1 - n) as u64, *line)).collect();
        at_seconds(&spaced)
    }

    /// Like `logged`, with the second of each line.
    pub(crate) fn at_seconds(lines: &[(u64, &str)]) -> Vec<ProbeOutput> {
        let mut text = "6,1,0,-;Linux version 6.8.0\n".to_owned();
        for (n, (seconds, line)) in lines.iter().enumerate() {
            text.push_str(&format!("4,{},{seconds}000000,-;{line}\n", n + 100));
        }
        [text, "864000.00 9.00\n".to_owned(), format!("{BOOT}\n")].map(ProbeOutput::Text).into()
    }

    fn burst(outputs: &[ProbeOutput]) -> Vec<Event> {
        let log = parse_log(&Params::new(), outputs).unwrap();
        let mut bursts = RecordGroups::default();
        for record in log.recent().filter(|record| record.text.contains("fault")) {
            bursts.add(ReasonCode::fixed("fault"), Entity::node(), record);
        }
        bursts.events(&log)
    }

    #[test]
    fn a_burst_is_one_event_keyed_by_boot_and_newest_record() {
        let events = burst(&logged(&["fault 1", "fault 2", "other", "fault 3"]));
        assert_eq!(events.len(), 1);
        assert_eq!(events[0].text, "fault 3 (3 times, the newest 10s before the check)");
        assert_eq!(events[0].key.as_deref(), Some(&*format!("{BOOT}:103")));
        let mut unnamed = logged(&["fault"]);
        unnamed[2] = ProbeOutput::Failed(ProbeFailure::new(FailureKind::Denied, "boot_id"));
        assert_eq!(burst(&unnamed)[0].key, None);
    }

    #[test]
    fn user_space_and_old_records_are_ignored() {
        let outputs = at_seconds(&[(1, "fault of last week"), (863_000, "fault of today")]);
        assert_eq!(burst(&outputs)[0].text, "fault of today (16m 40s before the check)");
        let ProbeOutput::Text(mut text) = outputs[0].clone() else { panic!("text") };
        text = text.replace("4,10", "12,10");
        assert_eq!(burst(&[ProbeOutput::Text(text), outputs[1].clone(), outputs[2].clone()]), []);
    }

    #[test]
    fn an_unreadable_log_is_not_an_empty_one() {
        let kind = |params: &Params, outputs: &[ProbeOutput]| match parse_log(params, outputs) {
            Err(Observation::Failed(failure)) => failure.kind,
            other => panic!("{other:?}"),
        };
        let none = Params::new();
        let with = |log: &str| [log, "1 1", BOOT].map(|text| ProbeOutput::Text(text.to_owned()));
        assert_eq!(kind(&none, &with("")), FailureKind::Empty);
        assert_eq!(kind(&none, &with("[ 12.3] dmesg's own form\n")), FailureKind::Unparseable);
        let denied = ProbeOutput::Failed(ProbeFailure::new(FailureKind::Denied, "/dev/kmsg"));
        assert_eq!(kind(&none, &[denied, ProbeOutput::Text("1 1".into())]), FailureKind::Denied);
        assert_eq!(kind(&none, &[]), FailureKind::Unparseable);
        let params = [("within".to_owned(), toml::Value::Integer(7))].into();
        assert_eq!(kind(&params, &with("6,1,0,-;x")), FailureKind::Unparseable);
        let mut late = with("6,1,0,-;x");
        late[1] = ProbeOutput::Text("soon".into());
        assert_eq!(kind(&none, &late), FailureKind::Unparseable);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "([0-9,;-]|.|\n){0,200}", uptime in ".{0,20}", boot in ".{0,40}") {
            let outputs = [text, uptime, boot].map(ProbeOutput::Text);
            if let Ok(log) = parse_log(&Params::new(), &outputs) {
                let mut bursts = RecordGroups::default();
                log.recent().for_each(|record| bursts.add(ReasonCode::fixed("x"), Entity::node(), record));
                bursts.events(&log);
            }
        }
    }
}
