//! API access: two roles, and tokens stored only as digests.

use std::{fmt, io, str::FromStr};

use doctor_core::{hex, time::Timestamp};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

/// Permissions of an API client. Each role includes those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Read everything.
    Viewer,
    /// Issue every command that the command line has.
    Operator,
}

impl Role {
    pub const ALL: [Self; 2] = [Self::Viewer, Self::Operator];

    pub const fn code(self) -> &'static str {
        match self {
            Self::Viewer => "viewer",
            Self::Operator => "operator",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.code())
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a role: use viewer or operator")]
pub struct BadRole(String);

impl FromStr for Role {
    type Err = BadRole;
    fn from_str(text: &str) -> Result<Self, BadRole> {
        let found = Self::ALL.into_iter().find(|role| role.code() == text);
        found.ok_or_else(|| BadRole(text.chars().take(64).collect()))
    }
}

/// A token as stored: its metadata and digest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TokenRow {
    pub name: String,
    pub role: Role,
    /// Who created it.
    pub by: String,
    pub created: Timestamp,
    pub expires: Option<Timestamp>,
    pub revoked: Option<Timestamp>,
    #[serde(skip)]
    pub digest: TokenDigest,
}

/// SHA-256 digest of a token: enough to recognise the token, useless for signing in.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct TokenDigest([u8; 32]);

/// Prefix of every token, so that people and secret scanners recognise one.
pub const TOKEN_PREFIX: &str = "doctor_token_";

/// Generates a token with 256 random bits. It is shown once and not stored.
///
/// # Errors
/// If the operating system provides no random bytes.
pub fn new_token() -> io::Result<String> {
    let mut bits = [0; 32];
    getrandom::fill(&mut bits).map_err(io::Error::other)?;
    Ok(format!("{TOKEN_PREFIX}{}", hex::encode(&bits)))
}

impl TokenDigest {
    pub fn of(token: &str) -> Self {
        Self(Sha256::digest(token.as_bytes()).into())
    }

    /// Compares in constant time.
    pub fn is(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }

    pub fn to_hex(self) -> String {
        hex::encode(&self.0)
    }

    pub fn from_hex(text: &str) -> Option<Self> {
        hex::decode(text)?.try_into().ok().map(Self)
    }
}

impl fmt::Debug for TokenDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenDigest(…)")
    }
}

impl TokenRow {
    pub fn is_valid(&self, now: Timestamp) -> bool {
        self.revoked.is_none() && self.expires.is_none_or(|expires| now < expires)
    }
}

/// Returns the valid token that matches. Compares with every token, so that timing does not reveal which one matched.
pub fn find_token<'a>(tokens: &'a [TokenRow], token: &str, now: Timestamp) -> Option<&'a TokenRow> {
    let digest = TokenDigest::of(token);
    let mut found = None;
    for row in tokens {
        if row.digest.is(&digest) && row.is_valid(now) {
            found = Some(row);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_recognised_until_it_expires_or_is_revoked() {
        let now = Timestamp::from_secs(1000);
        let secret = new_token().unwrap();
        let row = |expires: Option<i64>, revoked: Option<i64>| TokenRow {
            name: "ops".to_owned(),
            role: Role::Operator,
            by: "ann".to_owned(),
            created: now,
            expires: expires.map(Timestamp::from_secs),
            revoked: revoked.map(Timestamp::from_secs),
            digest: TokenDigest::of(&secret),
        };
        assert!(find_token(&[row(None, None)], &secret, now).is_some());
        assert!(find_token(&[row(Some(1001), None)], &secret, now).is_some());
        assert!(find_token(&[row(Some(1000), None)], &secret, now).is_none());
        assert!(find_token(&[row(None, Some(1))], &secret, now).is_none());
        assert!(find_token(&[row(None, None)], &new_token().unwrap(), now).is_none());
        assert!(find_token(&[], &secret, now).is_none());
    }

    #[test]
    fn a_stored_token_digest_reads_back_and_is_not_the_token() {
        let secret = new_token().unwrap();
        assert_eq!(secret.len(), TOKEN_PREFIX.len() + 64);
        let digest = TokenDigest::of(&secret);
        assert_eq!(TokenDigest::from_hex(&digest.to_hex()), Some(digest));
        assert!(!secret.contains(&digest.to_hex()));
        for bad in ["", "00", &"g".repeat(64), &"+1".repeat(32)] {
            assert_eq!(TokenDigest::from_hex(bad), None, "{bad}");
        }
        assert_eq!(hex::decode(&hex::encode(&[0, 9, 0xa0, 0xff])), Some(vec![0, 9, 0xa0, 0xff]));
        assert_eq!(hex::decode("0aFf"), Some(vec![0x0a, 0xff]));
        for bad in ["0", "0g", "+1", "ä", " 0"] {
            assert_eq!(hex::decode(bad), None, "{bad}");
        }
        for role in Role::ALL {
            assert_eq!(role.code().parse(), Ok(role));
        }
        assert!(Role::Viewer < Role::Operator && "root".parse::<Role>().is_err());
    }
}
