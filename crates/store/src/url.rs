//! The location of a store, as configured.

use std::{fmt, path::PathBuf, str::FromStr};

use super::error::StoreError;

/// `sqlite:PATH`, a bare path, or `postgres://…`.
#[derive(Clone, PartialEq, Eq)]
pub enum StoreUrl {
    Sqlite(PathBuf),
    Postgres(String),
}

impl FromStr for StoreUrl {
    type Err = StoreError;

    fn from_str(text: &str) -> Result<Self, StoreError> {
        let bad = |why: &str| StoreError::BadUrl { text: hide_password(text), why: why.to_owned() };
        if text.starts_with("postgres://") || text.starts_with("postgresql://") {
            return Ok(Self::Postgres(text.to_owned()));
        }
        let path = text.strip_prefix("sqlite:").unwrap_or(text);
        let path = path.strip_prefix("//").unwrap_or(path);
        if path.is_empty() {
            return Err(bad("the path is empty"));
        }
        if path.contains("://") {
            return Err(bad("this kind of database is not supported"));
        }
        Ok(Self::Sqlite(PathBuf::from(path)))
    }
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sqlite(path) => write!(f, "sqlite:{}", path.display()),
            Self::Postgres(url) => f.write_str(&hide_password(url)),
        }
    }
}

impl fmt::Debug for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Hides the password of a URL that is printed in errors and logs. In doubt it hides more: an unescaped password may
/// contain a delimiter, and each of the two places may look like the other.
fn hide_password(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    let user = rest.rfind('@').and_then(|at| Some(rest[..at].find(':')? + 1..at));
    let parameters = rest.match_indices("password=").map(|(index, name)| {
        let start = index + name.len();
        start..rest[start..].find('&').map_or(rest.len(), |end| start + end)
    });
    let mut secrets: Vec<_> = user.into_iter().chain(parameters).collect();
    secrets.sort_by_key(|secret| secret.start);
    let (mut output, mut copied) = (format!("{scheme}://"), 0);
    for secret in secrets {
        if secret.start >= copied {
            output.push_str(&rest[copied..secret.start]);
            output.push('…');
        }
        copied = copied.max(secret.end);
    }
    output.push_str(&rest[copied..]);
    output
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_with_or_without_prefix_is_sqlite() {
        for text in
            ["sqlite:/var/lib/doctor/doctor.db", "/var/lib/doctor/doctor.db", "sqlite:///var/lib/doctor/doctor.db"]
        {
            assert_eq!(
                text.parse::<StoreUrl>().unwrap(),
                StoreUrl::Sqlite("/var/lib/doctor/doctor.db".into()),
                "{text}"
            );
        }
        assert_eq!("doctor.db".parse::<StoreUrl>().unwrap(), StoreUrl::Sqlite("doctor.db".into()));
    }

    #[test]
    fn an_invalid_store_url_is_rejected_with_the_accepted_forms() {
        for text in ["", "sqlite:", "mysql://root@h/x"] {
            let error = text.parse::<StoreUrl>().unwrap_err().to_string();
            assert!(error.contains("postgres://USER@HOST/DATABASE"), "{text}: {error}");
        }
    }

    #[test]
    fn a_password_is_never_printed() {
        for text in [
            "postgres://doctor:secret@db.example/doctor",
            "postgres://doctor:se/secret@db.example/doctor",
            "postgres://doctor:se?x=secret@db.example/doctor",
            "postgres://db.example/doctor?user=d&password=secret&x=1",
            "postgres://db.example/doctor?password=a&password=secret",
            "postgres://db.example/doctor?password=se@secret",
            "postgres://doctor:secret&password=@db.example/doctor",
        ] {
            let url: StoreUrl = text.parse().unwrap();
            assert!(!url.to_string().contains("secret") && !format!("{url:?}").contains("secret"), "{url}");
            assert!(url.to_string().contains("db.example/doctor") || text.contains("&password=@"), "{url}");
        }
    }
}
