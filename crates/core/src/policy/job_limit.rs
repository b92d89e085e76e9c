//! `limits.jobs`: concurrent validation jobs, as a number or as a share of the cluster.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// What the setting accepts.
const ACCEPTED: &str =
    "a whole number such as 5, a share of the nodes such as \"4%\", or the larger of both, \"5 or 4%\"";

/// Concurrent validation jobs: a number, a percentage of the nodes, or the larger of the two.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct JobLimit {
    at_least: u32,
    percent: f64,
}

impl JobLimit {
    /// Returns the limit in a cluster of this many nodes. A share of a small cluster is still one job.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share of a u32 fits in a u32")]
    pub fn for_nodes(self, nodes: usize) -> u32 {
        let nodes = u32::try_from(nodes).unwrap_or(u32::MAX);
        let share = (f64::from(nodes) * self.percent / 100.0).floor() as u32;
        let share = if self.percent > 0.0 { share.max(1) } else { 0 };
        share.max(self.at_least)
    }
}

impl From<u32> for JobLimit {
    fn from(jobs: u32) -> Self {
        Self { at_least: jobs, percent: 0.0 }
    }
}

/// Text that is no limit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a number of jobs; expected {ACCEPTED}")]
pub struct InvalidJobLimit(String);

impl FromStr for JobLimit {
    type Err = InvalidJobLimit;

    fn from_str(text: &str) -> Result<Self, InvalidJobLimit> {
        let invalid = || InvalidJobLimit(text.chars().take(64).collect());
        let (number, share) = match text.split_once(" or ") {
            Some((number, share)) => (Some(number.trim()), Some(share.trim())),
            None if text.trim_end().ends_with('%') => (None, Some(text.trim())),
            None => (Some(text.trim()), None),
        };
        let at_least = number.map_or(Ok(0), str::parse).map_err(|_| invalid())?;
        let percent = match share {
            Some(share) => {
                share.strip_suffix('%').and_then(|share| share.trim_end().parse().ok()).ok_or_else(invalid)?
            }
            None => 0.0,
        };
        if !(0.0..=100.0).contains(&percent) {
            return Err(invalid());
        }
        Ok(Self { at_least, percent })
    }
}

/// As the setting is written.
impl fmt::Display for JobLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.at_least, self.percent > 0.0) {
            (jobs, false) => write!(f, "{jobs}"),
            (0, true) => write!(f, "{}%", self.percent),
            (jobs, true) => write!(f, "{jobs} or {}%", self.percent),
        }
    }
}

impl Serialize for JobLimit {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.percent > 0.0 { serializer.collect_str(self) } else { serializer.serialize_u32(self.at_least) }
    }
}

impl<'de> Deserialize<'de> for JobLimit {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Limit;

        impl de::Visitor<'_> for Limit {
            type Value = JobLimit;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(ACCEPTED)
            }

            fn visit_u64<E: de::Error>(self, jobs: u64) -> Result<JobLimit, E> {
                let unexpected = || E::invalid_value(de::Unexpected::Unsigned(jobs), &self);
                Ok(u32::try_from(jobs).map_err(|_| unexpected())?.into())
            }

            fn visit_i64<E: de::Error>(self, jobs: i64) -> Result<JobLimit, E> {
                let unexpected = || E::invalid_value(de::Unexpected::Signed(jobs), &self);
                Ok(u32::try_from(jobs).map_err(|_| unexpected())?.into())
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<JobLimit, E> {
                text.parse().map_err(E::custom)
            }
        }

        deserializer.deserialize_any(Limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_a_number_a_share_of_the_nodes_or_the_larger_of_both() {
        for (text, nodes, jobs) in [
            ("5 or 4%", 0, 5),
            ("5 or 4%", 149, 5),
            ("5 or 4%", 150, 6),
            ("5 or 4%", 500, 20),
            ("4%", 500, 20),
            ("4 %", 500, 20),
            ("0.5%", 100, 1),
            ("12", 500, 12),
            ("0", 500, 0),
        ] {
            let limit: JobLimit = text.parse().unwrap();
            assert_eq!(limit.for_nodes(nodes), jobs, "{text} of {nodes}");
            assert_eq!(limit.to_string().parse(), Ok(limit), "{text}");
        }
    }

    #[test]
    fn other_texts_are_rejected_with_what_is_accepted() {
        for text in ["", "5 or", "or 4%", "5 or 4", "five", "-1", "5 or 101%", "5 or -4%", "4.5", "NaN%", "1e9%"] {
            let error = text.parse::<JobLimit>().unwrap_err().to_string();
            assert!(error.contains("\"5 or 4%\""), "{error}");
        }
    }

    #[test]
    fn a_limit_is_written_as_it_is_read() {
        #[derive(Debug, PartialEq, Serialize, Deserialize)]
        struct Settings {
            jobs: JobLimit,
        }

        for text in ["jobs = 7\n", "jobs = \"5 or 4%\"\n", "jobs = \"2.5%\"\n"] {
            let settings: Settings = toml::from_str(text).unwrap();
            assert_eq!(toml::to_string(&settings).unwrap(), text);
            let json = serde_json::to_string(&settings).unwrap();
            assert_eq!(serde_json::from_str::<Settings>(&json).unwrap(), settings, "{json}");
        }
        let error = toml::from_str::<Settings>("jobs = -7\n").unwrap_err().to_string();
        assert!(error.contains("-7") && error.contains("whole number such as 5"), "{error}");
    }
}
