//! Secrets that a configuration refers to and does not contain.
//!
//! A secret is in a file, which is refused if another user could change it ([`trusted_file`]), or in an environment variable. It is read
//! when it is needed, so that a replaced one takes effect immediately, and appears in no log, error or printed configuration. A secret
//! that was typed where the reference belongs is not repeated in the error: errors are logged, and pasted into tickets.

use std::{
    env, fmt, io,
    io::Read as _,
    path::{Path, PathBuf},
};

use doctor_host::trusted_file;
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{Error, MapAccess, Visitor},
};

/// The location of a secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SecretSource {
    /// The first line of this file.
    File(PathBuf),
    /// The value of this environment variable.
    Env(String),
}

#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    #[error("cannot read {}: {error}", path.display())]
    Read { path: PathBuf, error: io::Error },
    #[error("${0} is not set, or is not valid UTF-8")]
    NotSet(String),
    #[error("{0} is empty")]
    Empty(SecretSource),
}

/// The maximum length of a secret, which is one line.
const MAX_SECRET_BYTES: u64 = 8192;
/// What a setting that refers to a secret accepts.
const EXPECTED: &str = "{ file = \"…\" } or { env = \"…\" }: the secret itself does not belong into this file";

impl SecretSource {
    /// Resolves a path relative to the directory of the file that contains it.
    pub fn resolve(&mut self, base: &Path) {
        if let Self::File(path) = self {
            *path = base.join(&*path);
        }
    }

    /// Reads the secret.
    ///
    /// # Errors
    /// If it cannot be read, or is empty.
    pub fn read(&self) -> Result<String, SecretError> {
        let text = match self {
            Self::File(path) => {
                let failed = |error| SecretError::Read { path: path.clone(), error };
                let mut text = String::new();
                let file = trusted_file::open(path).map_err(failed)?;
                file.take(MAX_SECRET_BYTES).read_to_string(&mut text).map_err(failed)?;
                text
            }
            Self::Env(name) => env::var(name).map_err(|_| SecretError::NotSet(name.clone()))?,
        };
        let line = text.lines().next().unwrap_or_default().trim();
        if line.is_empty() { Err(SecretError::Empty(self.clone())) } else { Ok(line.to_owned()) }
    }
}

impl fmt::Display for SecretSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Env(name) => write!(f, "${name}"),
        }
    }
}

impl<'de> Deserialize<'de> for SecretSource {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ReferenceVisitor)
    }
}

fn refused<E: Error>() -> E {
    E::custom(format_args!("expected {EXPECTED}"))
}

/// Accepts a table with one key. Each other value is refused without being repeated, which serde's own errors do.
struct ReferenceVisitor;

impl<'de> Visitor<'de> for ReferenceVisitor {
    type Value = SecretSource;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(EXPECTED)
    }

    fn visit_str<E: Error>(self, _: &str) -> Result<SecretSource, E> {
        Err(refused())
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<SecretSource, E> {
        Err(refused())
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<SecretSource, E> {
        Err(refused())
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<SecretSource, E> {
        Err(refused())
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<SecretSource, E> {
        Err(refused())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<SecretSource, A::Error> {
        let key: String = map.next_key().map_err(|_| refused())?.ok_or_else(refused)?;
        let value: String = map.next_value().map_err(|_| refused())?;
        let source = match key.as_str() {
            "file" => SecretSource::File(value.into()),
            "env" => SecretSource::Env(value),
            _ => return Err(refused()),
        };
        match map.next_key::<String>() {
            Ok(None) => Ok(source),
            _ => Err(refused()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize)]
    struct Holder {
        password: SecretSource,
    }

    #[test]
    fn a_reference_is_read_and_anything_else_is_refused_without_being_repeated() {
        let read = |text: &str| toml::from_str::<Holder>(text).map(|holder| holder.password);
        assert_eq!(read("password = { file = \"a\" }"), Ok(SecretSource::File("a".into())));
        assert_eq!(read("[password]\nenv = \"A\"\n"), Ok(SecretSource::Env("A".to_owned())));
        for text in [
            "\"hunter2\"",
            "4711",
            "47.11",
            "true",
            "[\"hunter2\"]",
            "{ hunter2 = \"x\" }",
            "{ file = 4711 }",
            "{ file = \"a\", env = \"hunter2\" }",
            "{}",
        ] {
            let error = read(&format!("password = {text}")).unwrap_err();
            assert!(error.message().contains("{ file = "), "{text}: {error}");
            assert!(!error.message().contains("hunter2") && !error.message().contains("47"), "{text}: {error}");
        }
    }

    #[test]
    fn a_secret_is_the_first_line_of_its_file_and_an_empty_one_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        let source = SecretSource::File(path.clone());
        std::fs::write(&path, "abc \nnot this\n").unwrap();
        assert_eq!(source.read().unwrap(), "abc");
        let mode = |mode| std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
        mode(0o666);
        let refused = source.read().unwrap_err().to_string();
        assert!(refused.contains("chmod go-w") && !refused.contains("abc"), "{refused}");
        mode(0o600);
        std::fs::write(&path, "\n").unwrap();
        assert!(source.read().unwrap_err().to_string().ends_with("is empty"));
        std::fs::remove_file(&path).unwrap();
        assert!(source.read().unwrap_err().to_string().contains("cannot read"));
    }
}
