//! Reasons: a stable code for programs and a separate text for people.

use std::{
    cmp::Ordering,
    fmt,
    hash::{Hash, Hasher},
    sync::Arc,
};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Declares an enum whose variants have stable written names, with `ALL`, `code`, `from_code`, `Display` and serde by
/// that name. The written name is a contract: databases, JSON and scripts contain it.
macro_rules! coded {
    ($(#[$doc:meta])* $vis:vis enum $type:ident { $($(#[$vdoc:meta])* $variant:ident => $code:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Copy, Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        $vis enum $type { $($(#[$vdoc])* $variant,)+ }

        impl $type {
            $vis const ALL: &'static [Self] = &[$(Self::$variant,)+];

            $vis const fn code(self) -> &'static str {
                match self { $(Self::$variant => $code,)+ }
            }

            $vis fn from_code(code: &str) -> Option<Self> {
                match code { $($code => Some(Self::$variant),)+ _ => None }
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.code())
            }
        }

        impl std::str::FromStr for $type {
            type Err = $crate::reason::UnknownCode;
            fn from_str(text: &str) -> Result<Self, Self::Err> {
                Self::from_code(text).ok_or_else(|| $crate::reason::UnknownCode {
                    text: text.chars().take(64).collect(),
                    accepted: [$($code,)+].join(", "),
                })
            }
        }

        impl serde::Serialize for $type {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.code())
            }
        }

        impl<'de> serde::Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}
pub(crate) use coded;

/// Text that is none of the accepted codes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not one of: {accepted}")]
pub struct UnknownCode {
    pub text: String,
    pub accepted: String,
}

/// Why a verdict is what it is. Rules define their own codes (a site may add some), so this is a validated word and not
/// an enum: lower-case letters, digits and hyphens.
#[derive(Clone)]
pub struct ReasonCode(Code);

/// Cloning copies no text in either variant: every row of a fleet's history has a code.
#[derive(Clone)]
enum Code {
    Fixed(&'static str),
    Shared(Arc<str>),
}

impl ReasonCode {
    /// Creates a code from a literal. A malformed code in a constant does not compile.
    pub const fn fixed(code: &'static str) -> Self {
        assert!(is_code(code.as_bytes()), "a reason code is lower-case letters, digits and hyphens");
        Self(Code::Fixed(code))
    }

    pub fn new(text: &str) -> Result<Self, UnknownCode> {
        if is_code(text.as_bytes()) {
            Ok(Self(Code::Shared(text.into())))
        } else {
            Err(UnknownCode {
                text: text.chars().take(64).collect(),
                accepted: "1 to 64 lower-case letters, digits and hyphens".to_owned(),
            })
        }
    }

    pub fn as_str(&self) -> &str {
        match &self.0 {
            Code::Fixed(code) => code,
            Code::Shared(code) => code,
        }
    }
}

impl PartialEq for ReasonCode {
    fn eq(&self, other: &Self) -> bool {
        self.as_str() == other.as_str()
    }
}

impl Eq for ReasonCode {}

impl PartialOrd for ReasonCode {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for ReasonCode {
    fn cmp(&self, other: &Self) -> Ordering {
        self.as_str().cmp(other.as_str())
    }
}

impl Hash for ReasonCode {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.as_str().hash(state);
    }
}

const fn is_code(bytes: &[u8]) -> bool {
    if bytes.is_empty() || bytes.len() > 64 {
        return false;
    }
    let mut i = 0;
    while i < bytes.len() {
        if !(bytes[i].is_ascii_lowercase() || bytes[i].is_ascii_digit() || bytes[i] == b'-') {
            return false;
        }
        i += 1;
    }
    true
}

impl fmt::Display for ReasonCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl fmt::Debug for ReasonCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Serialize for ReasonCode {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl<'de> Deserialize<'de> for ReasonCode {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
        Self::new(&text).map_err(de::Error::custom)
    }
}

/// A value and the reason for it. Every decision carries one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WithReason<T> {
    pub value: T,
    pub code: ReasonCode,
    pub text: String,
}

impl<T> WithReason<T> {
    pub fn new(what: T, code: &'static str, text: impl Into<String>) -> Self {
        Self { value: what, code: ReasonCode::fixed(code), text: text.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_code_is_one_word() {
        for text in ["", "Disk Full", "disk_full", "x".repeat(65).as_str(), "ä"] {
            assert!(ReasonCode::new(text).is_err(), "{text}");
        }
        assert_eq!(ReasonCode::new("disk-full").unwrap(), ReasonCode::fixed("disk-full"));
    }
}
