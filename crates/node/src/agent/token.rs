//! The token file that the cluster mounts for the agent and renews before it expires. It is read for each message,
//! which costs nothing once a minute, and never stored or printed.

use std::{
    fmt,
    io::{self, Read},
    path::{Path, PathBuf},
};

use doctor_checks::document::RunKey;
use doctor_host::trusted_file;

/// A cluster's token has about 1 KiB; anything longer is not a token.
const MAX_BYTES: u64 = 16 << 10;

/// A token that was just read.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    #[error("cannot read the token {}", .path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{} is not a token: one line of letters, digits and `._-`, at most {MAX_BYTES} bytes", .0.display())]
    NotOne(PathBuf),
}

impl Token {
    /// Reads and validates a token.
    ///
    /// # Errors
    /// If the file cannot be read or does not hold a token.
    pub fn read(path: &Path) -> Result<Self, TokenError> {
        let mut text = String::new();
        let read = trusted_file::open(path).and_then(|file| file.take(MAX_BYTES + 1).read_to_string(&mut text));
        match read {
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                return Err(TokenError::NotOne(path.to_owned()));
            }
            Err(source) => return Err(TokenError::Read { path: path.to_owned(), source }),
            Ok(_) => {}
        }
        let token = text.trim_end_matches(['\n', '\r']);
        // It becomes an HTTP header: it must not contain a line break.
        let plain = token.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-~+/=".contains(&byte));
        if token.is_empty() || text.len() as u64 > MAX_BYTES || !plain {
            return Err(TokenError::NotOne(path.to_owned()));
        }
        Ok(Self(token.to_owned()))
    }

    /// The token, for the Authorization header only.
    pub fn text(&self) -> &str {
        &self.0
    }

    /// The key that signs reports.
    pub fn key(&self) -> RunKey {
        RunKey::from_token(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_one_plain_line_and_is_never_printed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let read = |text: &[u8]| {
            std::fs::write(&path, text).unwrap();
            Token::read(&path)
        };
        let token = read(b"eyJh.eyJi.c2ln-_\n").unwrap();
        assert_eq!((token.text(), format!("{token:?}").as_str()), ("eyJh.eyJi.c2ln-_", "Token(…)"));
        let long = vec![b'x'; 20_000];
        for text in [&b""[..], b"\n", b"a b", b"a\r\nX-Doctor-Node: n2", b"\xff\xfe", &long] {
            let error = read(text).unwrap_err();
            assert!(matches!(error, TokenError::NotOne(_)), "{error:?}");
            assert!(!error.to_string().contains("X-Doctor-Node"), "{error}");
        }
        assert!(matches!(Token::read(&dir.path().join("none")), Err(TokenError::Read { .. })));
    }
}
