//! Tables of NVIDIA's error numbers: Xids, SXids, NVLink 5 registers and DCGM errors.
//!
//! The files in `tables/` give the source of each fact, NVIDIA's recommended action, the practice of other systems, and
//! our severity. The checks' default rules for these numbers are generated from them (`tables/*_rules.toml`; a test
//! keeps them equal), so that a site overrides a severity with an ordinary rule.

use std::sync::LazyLock;

use doctor_core::{finding::Severity, reason::ReasonCode};
use serde::{Deserialize, Serialize};

/// Another meaning of a number, under further conditions.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Variant {
    pub code: ReasonCode,
    pub severity: Severity,
    pub description: String,
}

/// Why a number is classified as a fault or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Class {
    Fault,
    /// An error of a program: only counted.
    Application,
    /// A consequence of another error: only counted.
    Consequence,
    /// Says nothing about health.
    Notice,
    /// Xid 154: the driver's own verdict.
    Verdict,
    /// No current driver writes it.
    Unused,
}

/// A row of `tables/xid.toml`, where the fields are explained.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Xid {
    pub n: u16,
    pub name: String,
    pub description: String,
    pub arch: String,
    pub immediate_action: String,
    pub investigation_action: String,
    #[serde(default)]
    pub linked: String,
    pub class: Class,
    pub severity: Option<Severity>,
    pub peers: String,
    #[serde(default)]
    pub note: String,
}

/// A row of `tables/sxid.toml`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Sxid {
    pub n: u32,
    pub description: String,
    pub fatal: Fatal,
    pub severity: Option<Severity>,
    pub gpud: String,
    #[serde(default)]
    pub note: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fatal {
    No,
    May,
    Yes,
    Always,
}

impl Fatal {
    pub const fn word(self) -> &'static str {
        match self {
            Self::No => "not fatal",
            Self::May => "may be fatal",
            Self::Yes => "fatal",
            Self::Always => "always fatal",
        }
    }
}

/// A row of `tables/dcgm.toml`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DcgmError {
    pub n: u32,
    pub name: String,
    pub description: String,
    pub dcgm: DcgmSeverity,
    pub category: String,
    pub severity: Option<Severity>,
    pub nvsentinel: String,
    #[serde(default)]
    pub note: String,
}

/// DCGM's own scale, from 3.2 on. Before that it had three values with other numbers, and never wrote them to JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DcgmSeverity {
    None,
    Monitor,
    Isolate,
    Unknown,
    Triage,
    Config,
    Reset,
}

impl DcgmSeverity {
    /// Converts the number in the JSON of DCGM 3.2 and newer. Returns `None` for a number that DCGM did not have when
    /// this was written.
    pub const fn from_number(number: u64) -> Option<Self> {
        Some(match number {
            0 => Self::None,
            1 => Self::Monitor,
            2 => Self::Isolate,
            3 => Self::Unknown,
            4 => Self::Triage,
            5 => Self::Config,
            6 => Self::Reset,
            _ => return None,
        })
    }

    pub const fn word(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Monitor => "monitor",
            Self::Isolate => "isolate",
            Self::Unknown => "unknown",
            Self::Triage => "triage",
            Self::Config => "config",
            Self::Reset => "reset",
        }
    }
}

/// One case of Xid 144 to 150, from `tables/nvlink5.toml`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nvlink5Row {
    pub xid: u16,
    /// The names in older and in newer drivers.
    pub units: Vec<String>,
    /// Before driver R575, and from it on.
    pub patterns: [String; 2],
    /// Any of these; empty: every status.
    pub statuses: Vec<u32>,
    pub now: String,
    pub second_case: Option<([String; 2], String)>,
    pub later: String,
}

/// A table with its source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table<T> {
    pub source: String,
    pub version: String,
    pub date: String,
    pub variants: Vec<Variant>,
    pub rows: Vec<T>,
}

/// The file format of a table: the rows come last, under a name of their kind.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TableFile<T> {
    source: String,
    version: String,
    date: String,
    #[serde(default = "Vec::new")]
    variants: Vec<Variant>,
    #[serde(alias = "xids", alias = "sxids", alias = "errors")]
    rows: Vec<T>,
}

pub static XIDS: LazyLock<Table<Xid>> = LazyLock::new(|| parse_table(include_str!("tables/xid.toml")));
pub static SXIDS: LazyLock<Table<Sxid>> = LazyLock::new(|| parse_table(include_str!("tables/sxid.toml")));
pub static DCGM: LazyLock<Table<DcgmError>> = LazyLock::new(|| parse_table(include_str!("tables/dcgm.toml")));
pub static NVLINK5: LazyLock<Table<Nvlink5Row>> = LazyLock::new(|| {
    let written: Table<[String; 11]> = parse_table(include_str!("tables/nvlink5.toml"));
    let Table { source, version, date, variants, rows } = written;
    let rows = rows.into_iter().filter_map(nvlink5_row).collect();
    Table { source, version, date, variants, rows }
});

pub fn xid(n: u16) -> Option<&'static Xid> {
    XIDS.rows.iter().find(|row| row.n == n)
}

pub fn sxid(n: u32) -> Option<&'static Sxid> {
    SXIDS.rows.iter().find(|row| row.n == n)
}

pub fn dcgm_error(n: u32) -> Option<&'static DcgmError> {
    DCGM.rows.iter().find(|row| row.n == n)
}

fn parse_table<T: for<'de> Deserialize<'de>>(text: &str) -> Table<T> {
    let written: TableFile<T> = toml::from_str(text).expect("the compiled-in tables parse");
    let TableFile { source, version, date, variants, rows } = written;
    Table { source, version, date, variants, rows }
}

fn nvlink5_row(cells: [String; 11]) -> Option<Nvlink5Row> {
    let [xid, units, before, after, status, now, second_before, second_after, second, later, _] = cells;
    let hex = |text: &str| u32::from_str_radix(text.trim_start_matches("0x"), 16).ok();
    Some(Nvlink5Row {
        xid: xid.parse().ok()?,
        units: units.split('/').map(str::to_owned).collect(),
        patterns: [before, after],
        statuses: status.split('/').filter(|part| !part.is_empty()).map(hex).collect::<Option<_>>()?,
        now,
        second_case: (!second.is_empty()).then_some(([second_before, second_after], second)),
        later,
    })
}

impl Nvlink5Row {
    /// Returns NVIDIA's immediate action if this row matches the record. `text` is the text before the registers.
    pub fn action(&self, xid: u16, text: &str, info: u32, status: u32) -> Option<&str> {
        let named = self.xid == xid && self.units.iter().any(|unit| contains_words(text, unit));
        if !named || !(self.statuses.is_empty() || self.statuses.contains(&status)) {
            return None;
        }
        let second = self
            .second_case
            .as_ref()
            .filter(|(patterns, _)| patterns.iter().any(|pattern| matches_pattern(pattern, info)));
        match second {
            Some((_, action)) => Some(action),
            None => self.patterns.iter().any(|pattern| matches_pattern(pattern, info)).then_some(self.now.as_str()),
        }
    }
}

/// Returns whether the text contains `phrase` between spaces or its ends.
fn contains_words(text: &str, phrase: &str) -> bool {
    text.match_indices(phrase).any(|(at, _)| {
        let (before, after) = (&text[..at], &text[at + phrase.len()..]);
        (before.is_empty() || before.ends_with(' ')) && (after.is_empty() || after.starts_with(' '))
    })
}

/// Returns whether a register matches a pattern of `0`, `1` and `-`, from the highest bit to the lowest.
fn matches_pattern(pattern: &str, register: u32) -> bool {
    pattern.len() == 32
        && pattern.bytes().enumerate().all(|(index, bit)| match bit {
            b'0' => register >> (31 - index) & 1 == 0,
            b'1' => register >> (31 - index) & 1 == 1,
            _ => true,
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::{collections::BTreeSet, fmt::Write as _};

    /// Default rules of a check, generated from the rows with a severity and the variants.
    fn rules<'a>(
        check: &str,
        word: &str,
        rows: impl Iterator<Item = (u32, Option<Severity>)>,
        variants: impl IntoIterator<Item = &'a Variant>,
    ) -> String {
        let mut text = "# Generated from the table of the same name; a test keeps both equal.\nrules = [\n".to_owned();
        let mut rule = |id: String, code: String, severity: Severity| {
            let line = format!(
                "  {{ id = \"{id}\", check = \"{check}\", event = \"{code}\", reason = \"{code}\", \
                 severity = \"{severity}\", text = \"{{entity}}: {{value}}\" }},"
            );
            writeln!(text, "{line}").unwrap();
        };
        for (n, severity) in rows {
            severity.into_iter().for_each(|severity| rule(format!("{check}-{n}"), format!("{word}-{n}"), severity));
        }
        for variant in variants {
            let rest = variant.code.as_str().strip_prefix(&format!("{word}-")).unwrap();
            rule(format!("{check}-{rest}"), variant.code.to_string(), variant.severity);
        }
        text + "]\n"
    }

    /// The expected content of the rule files, each with its name.
    fn expected() -> [(&'static str, String, &'static str); 3] {
        let xids = XIDS.rows.iter().map(|row| (u32::from(row.n), row.severity));
        let sxids = SXIDS.rows.iter().map(|row| (row.n, row.severity));
        let errors = DCGM.rows.iter().map(|row| (row.n, row.severity));
        [
            ("xid_rules.toml", rules("gpu-xid", "xid", xids, &XIDS.variants), include_str!("tables/xid_rules.toml")),
            (
                "sxid_rules.toml",
                rules("nvswitch-sxid", "sxid", sxids, &SXIDS.variants),
                include_str!("tables/sxid_rules.toml"),
            ),
            ("dcgm_rules.toml", rules("dcgm", "dcgm", errors, &DCGM.variants), include_str!("tables/dcgm_rules.toml")),
        ]
    }

    #[test]
    fn rule_files_match_the_tables() {
        for (name, expected, written) in expected() {
            assert!(expected == written, "{name} should be:\n{expected}");
        }
    }

    #[test]
    fn every_xid_is_in_the_table_once() {
        let numbers: Vec<u16> = XIDS.rows.iter().map(|row| row.n).collect();
        assert_eq!(numbers, (1..=172).collect::<Vec<_>>());
        assert!(
            XIDS.rows.iter().all(|row| row.arch.len() == 4 && !row.description.is_empty() && !row.peers.is_empty())
        );
        assert!([&XIDS.source, &SXIDS.source, &DCGM.source, &NVLINK5.source].iter().all(|source| !source.is_empty()));
    }

    #[test]
    fn faults_have_a_severity_and_counted_xids_have_none() {
        for row in &XIDS.rows {
            let judged = matches!(row.class, Class::Fault | Class::Unused);
            assert_eq!(row.severity.is_some(), judged, "Xid {}", row.n);
        }
    }

    #[test]
    fn severities_match_nvidias_immediate_actions() {
        for row in &XIDS.rows {
            let severity = match row.immediate_action.as_str() {
                "RESET_GPU" => Some(Severity::Reset),
                "RESTART_BM" | "RESTART_VM" => Some(Severity::Reboot),
                "RESTART_APP" if row.class == Class::Application => None,
                _ => continue,
            };
            // Xid 94 ends one program; it is `monitor` because its row waits for a reset.
            if row.n != 94 {
                assert_eq!(row.severity, severity, "Xid {}", row.n);
            }
        }
    }

    #[test]
    fn every_sxid_and_every_dcgm_error_stands_once() {
        let sxids: BTreeSet<u32> = SXIDS.rows.iter().map(|row| row.n).collect();
        assert_eq!((sxids.len(), SXIDS.rows.len()), (93, 93));
        assert!(SXIDS.rows.iter().all(|row| row.fatal != Fatal::Yes || row.severity == Some(Severity::Reboot)));
        let errors: Vec<u32> = DCGM.rows.iter().map(|row| row.n).collect();
        assert_eq!(errors, (0..=132).collect::<Vec<_>>());
        for row in &DCGM.rows {
            assert_eq!(row.severity.is_none(), row.n == 0, "only 0 is no error: {}", row.n);
        }
    }

    #[test]
    fn every_nvlink5_row_parses_and_matches_its_own_pattern() {
        let written = include_str!("tables/nvlink5.toml").lines().filter(|line| line.starts_with("  [")).count();
        assert_eq!((NVLINK5.rows.len(), written), (95, 95));
        for row in &NVLINK5.rows {
            assert!(row.patterns.iter().all(|pattern| pattern.len() == 32), "{row:?}");
            let info = u32::from_str_radix(&row.patterns[0].replace('-', "0"), 2).unwrap();
            let status = row.statuses.first().copied().unwrap_or(7);
            assert_eq!(row.action(row.xid, &row.units[0], info, status), Some(row.now.as_str()), "{row:?}");
            assert_eq!(row.action(row.xid, "OTHER", info, status), None);
        }
    }

    #[test]
    fn dcgm_severities_survive_a_round_trip() {
        for number in 0..=6 {
            let severity = DcgmSeverity::from_number(number).unwrap();
            assert_eq!(serde_json::to_value(severity).unwrap(), severity.word());
        }
        assert_eq!(DcgmSeverity::from_number(7), None);
    }

    proptest! {
        #[test]
        fn no_pattern_makes_it_panic(pattern in ".{0,40}", text in ".{0,40}", register: u32) {
            matches_pattern(&pattern, register);
            contains_words(&text, &pattern);
        }
    }
}
