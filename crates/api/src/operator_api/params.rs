//! Request parameters: path segments and query parameters of an endpoint, each parsed into its type.

use std::{collections::BTreeMap, fmt::Display, str::FromStr};

use doctor_core::{
    time::{Span, Timestamp},
    view::Facts,
};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::error::ApiError;

/// A parameter of an endpoint.
#[derive(Debug, Clone, Copy)]
pub(super) struct Param {
    pub(super) name: &'static str,
    pub(super) description: &'static str,
    pub(super) syntax: ParamSyntax,
}

/// The syntax of a parameter, for the API description.
#[derive(Debug, Clone, Copy)]
pub(super) enum ParamSyntax {
    /// A validated name of a node, pool, test, run, case or token.
    Name,
    Text,
    OneOf(&'static [&'static str]),
    Count {
        most: u32,
        usual: u32,
    },
    Offset,
    /// A duration before now, or a time.
    PastTime,
}

/// Maximum length of a value.
const MAX_VALUE_LENGTH: usize = 1024;

impl Param {
    pub(super) const fn new(name: &'static str, description: &'static str, syntax: ParamSyntax) -> Self {
        Self { name, description, syntax }
    }

    pub(super) fn schema(&self) -> Value {
        match self.syntax {
            ParamSyntax::Name => json!({ "type": "string", "minLength": 1, "maxLength": 253 }),
            ParamSyntax::Text | ParamSyntax::PastTime => {
                json!({ "type": "string", "minLength": 1, "maxLength": MAX_VALUE_LENGTH })
            }
            ParamSyntax::OneOf(accepted) => json!({ "type": "string", "enum": accepted }),
            ParamSyntax::Count { most, usual } => {
                json!({ "type": "integer", "minimum": 1, "maximum": most, "default": usual })
            }
            ParamSyntax::Offset => json!({ "type": "integer", "minimum": 0, "maximum": u32::MAX }),
        }
    }
}

/// Values of the request, by known parameter name.
#[derive(Debug, Default)]
pub(super) struct RequestParams {
    values: BTreeMap<&'static str, String>,
}

impl RequestParams {
    /// Parses the path segments and the query. Rejects unknown parameters: a misspelt filter would return everything
    /// and look like a valid response.
    pub(super) fn parse<'a>(
        params: &'static [Param],
        path: impl Iterator<Item = (&'a str, &'a str)>,
        query: Option<&str>,
    ) -> Result<Self, ApiError> {
        let mut values: BTreeMap<&'static str, String> = BTreeMap::new();
        let path = path.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let query = query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty());
        let query = query.map(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            (percent_decode(name), percent_decode(value))
        });
        for (name, value) in path.chain(query) {
            let Some(param) = params.iter().find(|param| param.name == name) else {
                let known: Vec<&str> = params.iter().map(|param| param.name).collect();
                let accepted = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
                return Err(ApiError::UnknownParameter { name: name.chars().take(64).collect(), accepted });
            };
            let bad = |why: &str| ApiError::BadParameter { name: param.name, why: why.to_owned() };
            if value.is_empty() || value.chars().count() > MAX_VALUE_LENGTH {
                return Err(bad("expected 1 to 1024 characters"));
            }
            if values.insert(param.name, value).is_some() {
                return Err(bad("it occurs twice"));
            }
        }
        let parsed = Self { values };
        parsed.validate(params)?;
        Ok(parsed)
    }

    /// Checks the values against the documented syntax.
    fn validate(&self, params: &'static [Param]) -> Result<(), ApiError> {
        for param in params {
            let Some(value) = self.text(param.name) else { continue };
            let bad = |why: String| Err(ApiError::BadParameter { name: param.name, why });
            match param.syntax {
                ParamSyntax::OneOf(accepted) if !accepted.contains(&value) => {
                    return bad(format!("expected one of {}", accepted.join(", ")));
                }
                ParamSyntax::Count { most, .. }
                    if !value.parse().is_ok_and(|count: u32| (1..=most).contains(&count)) =>
                {
                    return bad(format!("expected a number from 1 to {most}"));
                }
                ParamSyntax::Offset if value.parse::<u32>().is_err() => {
                    return bad("expected a number of bytes".to_owned());
                }
                ParamSyntax::PastTime if parse_past_time(value, Timestamp::MAX).is_none() => {
                    return bad("expected a duration such as 7d, or a time such as 2026-11-15T08:00:00Z".to_owned());
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Returns a fixed-size digest that is equal for equivalent requests, however they are written.
    pub(super) fn key(&self, path: &str) -> [u8; 32] {
        let mut digest = Sha256::new();
        for part in std::iter::once(path).chain(self.values.iter().flat_map(|(name, value)| [*name, value.as_str()])) {
            digest.update((part.len() as u64).to_be_bytes());
            digest.update(part.as_bytes());
        }
        digest.finalize().into()
    }

    pub(super) fn text(&self, name: &str) -> Option<&str> {
        self.values.get(name).map(String::as_str)
    }

    pub(super) fn get<T: FromStr<Err: Display>>(&self, name: &'static str) -> Result<Option<T>, ApiError> {
        let read =
            |text: &str| text.parse().map_err(|error: T::Err| ApiError::BadParameter { name, why: error.to_string() });
        self.text(name).map(read).transpose()
    }

    /// Returns a path segment, which is present if this endpoint was matched.
    pub(super) fn path_segment<T: FromStr<Err: Display>>(&self, name: &'static str) -> Result<T, ApiError> {
        self.get(name)?.ok_or(ApiError::NotFound)
    }

    pub(super) fn page_size(&self, params: &[Param]) -> u32 {
        let usual = params.iter().find_map(|param| match param.syntax {
            ParamSyntax::Count { usual, .. } => Some(usual),
            _ => None,
        });
        let requested = self.text("limit").and_then(|text| text.parse().ok());
        requested.or(usual).unwrap_or(100)
    }

    /// Returns a time in the past.
    pub(super) fn since(&self, name: &str, facts: &Facts) -> Option<Timestamp> {
        self.text(name).and_then(|text| parse_past_time(text, facts.now))
    }
}

fn parse_past_time(text: &str, now: Timestamp) -> Option<Timestamp> {
    text.parse::<Span>().map(|span| now.minus(span)).or_else(|_| text.parse::<Timestamp>()).ok()
}

/// Decodes `%41` and `+` as browsers write them. Invalid escapes are kept, and invalid UTF-8 becomes the replacement
/// character.
fn percent_decode(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        let digit =
            |index: usize| char::from(*after.get(index)?).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
        match (byte, digit(0).zip(digit(1))) {
            (b'%', Some((high, low))) => {
                bytes.push(high << 4 | low);
                rest = &after[2..];
                continue;
            }
            (b'+', _) => bytes.push(b' '),
            (other, _) => bytes.push(other),
        }
        rest = after;
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARAMS: &[Param] = &[
        Param::new("select", "", ParamSyntax::Text),
        Param::new("limit", "", ParamSyntax::Count { most: 500, usual: 100 }),
        Param::new("since", "", ParamSyntax::PastTime),
        Param::new("state", "", ParamSyntax::OneOf(&["out", "held"])),
    ];

    fn read(query: &str) -> Result<RequestParams, ApiError> {
        RequestParams::parse(PARAMS, std::iter::empty(), Some(query))
    }

    #[test]
    fn parameters_are_decoded_and_an_unknown_name_is_rejected_with_the_accepted_ones() {
        let params = read("select=node%5B01-04%5D+x&limit=7&since=2d").unwrap();
        assert_eq!((params.text("select"), params.page_size(PARAMS)), (Some("node[01-04] x"), 7));
        assert_eq!(read("").unwrap().page_size(PARAMS), 100);
        let error = read("limt=7").unwrap_err();
        assert!(matches!(&error, ApiError::UnknownParameter { accepted, .. } if accepted.contains("limit")), "{error}");
        for bad in ["limit=0", "limit=501", "limit=x", "limit=7&limit=8", "since=yesterday", "state=well", "select="] {
            assert!(matches!(read(bad), Err(ApiError::BadParameter { .. })), "{bad}");
        }
    }

    #[test]
    fn equivalent_queries_have_the_same_key() {
        let key = |query: &str| read(query).unwrap().key("/nodes");
        assert_eq!(key("limit=7&select=a"), key("select=%61&limit=7"));
        assert_ne!(key("limit=7"), key("limit=8"));
        assert_ne!(key("select=a"), key("state=out"));
        assert_ne!(read("").unwrap().key("/nodes"), read("").unwrap().key("/runs"));
    }

    proptest::proptest! {
        #[test]
        fn any_query_is_parsed_or_rejected(query in ".{0,200}") {
            let _result = read(&query);
        }
    }
}
