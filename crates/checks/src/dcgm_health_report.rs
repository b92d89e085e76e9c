//! A text format for the state of DCGM's health watches, readable in the evidence:
//!
//! ```text
//! watched 0x1d3
//! gpu 0 0000:18:00.0
//! incident 1 0 0x10 20 4 Detected 1 volatile double-bit ECC error(s) in GPU 0
//! ```
//!
//! An incident has the kind and number of its entity, the watched system, the watch's severity, DCGM's error number and
//! the text. `engine none` is the only line if nothing listens at the engine's address; `cut` means that there were
//! more incidents than DCGM returns.

use std::fmt::Write as _;

/// One reading of the watches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HealthReport {
    /// Nothing listens at the host engine's address.
    NoEngine,
    Watched(WatchedHealth),
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WatchedHealth {
    /// The systems that were watched before this reading, one bit each. Zero: this reading switched the watches on.
    pub watched: u32,
    /// DCGM's number and the bus id of each GPU in the group; the bus id is empty if DCGM does not report it.
    pub gpus: Vec<(u32, String)>,
    pub incidents: Vec<Incident>,
    pub truncated: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Incident {
    /// DCGM's kind of entity: 1 is a GPU, 3 an NVSwitch.
    pub kind: u32,
    pub entity: u32,
    pub system: u32,
    /// 0 pass, 10 warn, 20 fail.
    pub health: u32,
    pub error: u32,
    pub text: String,
}

const NO_ENGINE: &str = "engine none";
const TRUNCATED: &str = "cut";

impl HealthReport {
    pub fn to_text(&self) -> String {
        let Self::Watched(WatchedHealth { watched, gpus, incidents, truncated: cut }) = self else {
            return format!("{NO_ENGINE}\n");
        };
        let mut out = format!("watched {watched:#x}\n");
        for (number, bus) in gpus {
            let _infallible = writeln!(out, "{}", format!("gpu {number} {bus}").trim_end());
        }
        for Incident { kind, entity, system, health, error, text } in incidents {
            let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
            let _infallible = writeln!(out, "incident {kind} {entity} {system:#x} {health} {error} {text}");
        }
        if *cut {
            let _infallible = writeln!(out, "{TRUNCATED}");
        }
        out
    }

    /// Parses the text format.
    ///
    /// # Errors
    /// Returns the first invalid line, or the start of the text if it has no `watched` line.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.trim() == NO_ENGINE {
            return Ok(Self::NoEngine);
        }
        let mut answer = WatchedHealth::default();
        let mut has_watches = false;
        for line in text.lines() {
            let read = match line.split_once(' ').unwrap_or((line, "")) {
                ("watched", rest) => parse_hex(rest).map(|watched| {
                    (answer.watched, has_watches) = (watched, true);
                }),
                ("gpu", rest) => parse_gpu(rest).map(|gpu| answer.gpus.push(gpu)),
                ("incident", rest) => parse_incident(rest).map(|incident| answer.incidents.push(incident)),
                (TRUNCATED, "") => {
                    answer.truncated = true;
                    Some(())
                }
                _ => None,
            };
            read.ok_or_else(|| line.chars().take(200).collect::<String>())?;
        }
        has_watches.then_some(Self::Watched(answer)).ok_or_else(|| text.chars().take(200).collect())
    }
}

fn parse_hex(text: &str) -> Option<u32> {
    u32::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

fn parse_gpu(rest: &str) -> Option<(u32, String)> {
    let (number, bus) = rest.split_once(' ').unwrap_or((rest, ""));
    Some((number.parse().ok()?, bus.to_owned()))
}

fn parse_incident(rest: &str) -> Option<Incident> {
    let mut fields = rest.splitn(6, ' ');
    Some(Incident {
        kind: fields.next()?.parse().ok()?,
        entity: fields.next()?.parse().ok()?,
        system: parse_hex(fields.next()?)?,
        health: fields.next()?.parse().ok()?,
        error: fields.next()?.parse().ok()?,
        text: fields.next().unwrap_or_default().to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_unparseable_line_is_an_error() {
        for text in ["", "gpu 0 x", "watched 0x1\nincident 1", "watched 3", "watched 0x1\nall is well", "engine some"] {
            assert!(HealthReport::parse(text).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn a_report_survives_a_round_trip(
            watched: u32,
            gpus in proptest::collection::vec((0..32_u32, "(0000:[0-9a-f]{2}:00.0)?"), 0..4),
            numbers: [u32; 5],
            words in proptest::collection::vec("[a-z():%]{1,8}", 0..6),
            cut: bool,
        ) {
            let [kind, entity, system, health, error] = numbers;
            let incident = Incident { kind, entity, system, health, error, text: words.join(" ") };
            let watch = HealthReport::Watched(WatchedHealth { watched, gpus, incidents: vec![incident], truncated: cut });
            prop_assert_eq!(HealthReport::parse(&watch.to_text()), Ok(watch));
        }

        #[test]
        fn no_text_makes_it_panic(text in "(watched |gpu |incident |0x|[0-9]| |\n|.){0,60}") {
            let _read = HealthReport::parse(&text);
        }
    }
}
