//! Identifiers: names and numbers, each with its own type, each validated when it is parsed.

use std::{borrow::Borrow, fmt, str::FromStr, sync::Arc};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::time::Timestamp;

/// Text that is not a valid name of the requested kind.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{}` is not a {what}: {accepted}", shorten(text))]
pub struct InvalidName {
    what: &'static str,
    text: String,
    accepted: &'static str,
}

/// Shortens text for an error message: hostile input may be megabytes long.
fn shorten(text: &str) -> String {
    let mut short: String = text.chars().take(64).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short.escape_debug().to_string()
}

const PATH_SAFE: &str = "1 to 253 letters, digits, `.`, `_` or `-`, beginning with a letter or digit and without `..`";

fn is_path_safe(text: &str) -> bool {
    (1..=253).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
        && text.as_bytes()[0].is_ascii_alphanumeric()
        && !text.contains("..")
}

/// Declares a name type. Names are shared, not copied: several tables hold a hundred thousand of them.
macro_rules! name_type {
    ($(#[$doc:meta])* $type:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $type(Arc<str>);

        impl $type {
            pub fn new(text: &str) -> Result<Self, InvalidName> {
                if is_path_safe(text) {
                    Ok(Self(text.into()))
                } else {
                    Err(InvalidName { what: $what, text: text.to_owned(), accepted: PATH_SAFE })
                }
            }

            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        /// Shares the text instead of copying it.
        impl TryFrom<Arc<str>> for $type {
            type Error = InvalidName;
            fn try_from(text: Arc<str>) -> Result<Self, InvalidName> {
                if is_path_safe(&text) { Ok(Self(text)) } else { Self::new(&text) }
            }
        }

        impl FromStr for $type {
            type Err = InvalidName;
            fn from_str(text: &str) -> Result<Self, InvalidName> {
                Self::new(text)
            }
        }

        impl Borrow<str> for $type {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }

        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(&self.0)
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
                Self::new(&text).map_err(de::Error::custom)
            }
        }
    };
}

name_type!(
    /// A node's name as its cluster knows it. Safe to use as one path component.
    NodeName,
    "node name"
);
name_type!(
    /// A group of similar nodes: a Slurm partition, a Kubernetes node pool. Limits and the breaker apply per pool.
    PoolName,
    "pool name"
);
name_type!(
    /// A check or test, named after its file: `disk-space`, `storage`.
    CheckId,
    "check name"
);
name_type!(
    /// A rule that turned a measurement into a finding.
    RuleId,
    "rule name"
);
name_type!(
    /// A machine type that a profile describes.
    Sku,
    "machine type"
);
name_type!(
    /// The physical machine, independent of its current name.
    HardwareId,
    "hardware id"
);

/// A test is a check that a run executes; both have the same name.
pub type TestId = CheckId;

/// The backend's id for the job of a run.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct JobId(pub String);

/// Declares an id type. An id begins with its creation time, so that order by id is order by time, and ends in digits
/// that differ between ids of the same millisecond. It is written as one letter and thirteen characters that are safe
/// in file, job and Kubernetes names.
macro_rules! number_type {
    ($(#[$doc:meta])* $type:ident, $prefix:literal, $what:literal) => {
        $(#[$doc])*
        #[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $type(u64);

        impl $type {
            pub const fn from_number(number: u64) -> Self {
                Self(number)
            }

            pub const fn number(self) -> u64 {
                self.0
            }

            /// Returns the lowest id of that moment.
            pub fn born_at(moment: Timestamp) -> Self {
                Self(u64::try_from(moment.millis()).unwrap_or(0).min(u64::MAX >> (SUFFIX_BITS + 1)) << SUFFIX_BITS)
            }

            /// Returns the creation time, to the millisecond.
            pub fn born(self) -> Timestamp {
                Timestamp::from_millis(i64::try_from(self.0 >> SUFFIX_BITS).unwrap_or(i64::MAX))
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&format!("{}{}", $prefix, base32(self.0)))
            }
        }

        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }

        impl FromStr for $type {
            type Err = InvalidName;
            fn from_str(text: &str) -> Result<Self, InvalidName> {
                text.strip_prefix($prefix).and_then(from_base32).map(Self).ok_or_else(|| InvalidName {
                    what: $what,
                    text: text.to_owned(),
                    accepted: concat!("`", $prefix, "` and 13 characters, as `doctor history` prints them"),
                })
            }
        }

        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
                text.parse().map_err(de::Error::custom)
            }
        }
    };
}

/// Bits after the creation time: about two million ids per millisecond. The number stays positive as a database's
/// signed integer until the year 2109.
const SUFFIX_BITS: u32 = 21;

number_type!(
    /// One run of tests on one or more nodes. The backend's job, the log and the result all carry it.
    RunId, "r", "run id"
);
number_type!(
    /// One problem, from its first finding to the node's return or replacement.
    CaseId, "c", "case id"
);
number_type!(
    /// One change requested from a backend. Requesting it twice has one effect.
    OpId, "o", "operation id"
);

const DIGITS: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";

fn base32(number: u64) -> String {
    (0..13).rev().map(|digit| char::from(DIGITS[(number >> (digit * 5)) as usize & 31])).collect()
}

fn from_base32(text: &str) -> Option<u64> {
    if text.len() != 13 {
        return None;
    }
    let mut number = 0_u64;
    for byte in text.bytes() {
        let digit = DIGITS.iter().position(|d| *d == byte)? as u64;
        number = number.checked_mul(32)?.checked_add(digit)?;
    }
    Some(number)
}

/// Source of new ids. The planner draws from it and stays deterministic: the caller chooses `salt` (random bits in
/// production, the seed in a simulation).
#[derive(Debug, Clone)]
pub struct IdSource {
    now_millis: u64,
    last: u64,
    salt: u64,
}

impl IdSource {
    pub const fn new(salt: u64) -> Self {
        Self { now_millis: 0, last: 0, salt }
    }

    /// Sets the creation time of the ids drawn from now on. A clock that jumps back does not repeat ids: each id is
    /// larger than the one before.
    pub fn set_time(&mut self, now: Timestamp) {
        self.now_millis = u64::try_from(now.millis()).unwrap_or(0);
    }

    fn next(&mut self) -> u64 {
        // A linear congruential step suffices: the ids need spread, not secrecy.
        self.salt = self.salt.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let suffix = (self.salt >> 40) & ((1 << SUFFIX_BITS) - 1);
        let fresh = (self.now_millis << SUFFIX_BITS) | suffix;
        self.last = fresh.max(self.last + 1);
        self.last
    }

    pub fn run(&mut self) -> RunId {
        RunId(self.next())
    }

    pub fn case(&mut self) -> CaseId {
        CaseId(self.next())
    }

    pub fn op(&mut self) -> OpId {
        OpId(self.next())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_could_escape_its_directory_is_rejected() {
        for text in ["", "..", "a/b", "../etc", "a..b", ".hidden", "-rf", "a b", "a\0", "ä"] {
            let error = NodeName::new(text).unwrap_err().to_string();
            assert!(error.contains("is not a node name"), "{text}: {error}");
        }
        assert!(NodeName::new(&"a".repeat(254)).is_err());
        for text in ["node001", "slc01-cl02-hgx-0317", "ip-10-0-1-2.ec2.internal", "Node_001"] {
            assert_eq!(NodeName::new(text).unwrap().as_str(), text);
        }
    }

    #[test]
    fn an_error_does_not_quote_a_megabyte_of_name() {
        let error = NodeName::new(&"/".repeat(1 << 20)).unwrap_err().to_string();
        assert!(error.len() < 400, "{}", error.len());
    }

    #[test]
    fn ids_print_and_read_back_and_are_ordered_by_time() {
        let mut ids = IdSource::new(7);
        ids.set_time(Timestamp::from_secs(1_794_700_800));
        let first = ids.run();
        ids.set_time(Timestamp::from_secs(1_794_700_801));
        let second = ids.run();
        assert!(first < second && first.to_string() < second.to_string());
        assert_eq!(first.to_string().parse::<RunId>().unwrap(), first);
        assert_eq!(second.born(), Timestamp::from_secs(1_794_700_801));
        assert!(i64::try_from(second.number()).is_ok());
        assert!("r-1".parse::<RunId>().is_err());
        assert!("zzzzzzzzzzzzzz".parse::<RunId>().is_err());
    }

    #[test]
    fn a_clock_that_jumps_back_repeats_no_id() {
        let mut ids = IdSource::new(1);
        let mut seen = std::collections::BTreeSet::new();
        for secs in [100, 100, 50, 100, 99, 101] {
            ids.set_time(Timestamp::from_secs(secs));
            for _ in 0..100 {
                assert!(seen.insert(ids.run()));
            }
        }
    }
}
