//! YAML as a tree with source positions, so that text which is valid YAML and invalid as a template can be reported at its
//! position.

use std::{fmt, ops::Range};

use doctor_core::toml_text::TomlError;
use serde::{
    Deserialize,
    de::{DeserializeOwned, Deserializer, MapAccess, SeqAccess, Visitor},
};
use serde_saphyr::{Location, Spanned};

/// A key or a value, with its position.
pub(super) type Located<T> = Spanned<T>;

#[derive(Debug, Clone, PartialEq)]
pub(super) enum YamlNode {
    Null,
    Text(String),
    /// A number or a boolean: no checked field has such a value.
    Other,
    List(Vec<Located<YamlNode>>),
    Map(Vec<(Located<String>, Located<YamlNode>)>),
}

impl YamlNode {
    pub(super) fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Returns the value of this key.
    pub(super) fn get(&self, name: &str) -> Option<&Located<YamlNode>> {
        self.entries().iter().find(|(key, _)| key.value == name).map(|(_, value)| value)
    }

    pub(super) fn entries(&self) -> &[(Located<String>, Located<YamlNode>)] {
        match self {
            Self::Map(entries) => entries,
            _ => &[],
        }
    }

    pub(super) fn items(&self) -> &[Located<YamlNode>] {
        match self {
            Self::List(items) => items,
            _ => &[],
        }
    }
}

/// Parses a document.
pub(super) fn parse<T: DeserializeOwned>(text: &str) -> Result<T, TomlError> {
    serde_saphyr::from_str(text).map_err(|error| {
        let (plain, at) = (error.without_snippet().to_string(), error.location());
        // The caller prints the position itself.
        let position = at.map(|at| format!(" at line {}, column {}", at.line(), at.column())).unwrap_or_default();
        let message = plain.strip_suffix(&position).unwrap_or(&plain);
        TomlError::at(text, at.map(|at| byte_range(text, at)), message)
    })
}

/// Builds an error at this position.
pub(super) fn error_at<T>(text: &str, at: &Located<T>, message: impl Into<String>) -> TomlError {
    TomlError::at(text, Some(byte_range(text, at.referenced)), message)
}

fn byte_range(text: &str, at: Location) -> Range<usize> {
    let as_index = |number: u64| usize::try_from(number).unwrap_or(text.len());
    let (line, column) = (as_index(at.line()).saturating_sub(1), as_index(at.column()).saturating_sub(1));
    let begin: usize = text.split_inclusive('\n').take(line).map(str::len).sum();
    let start = begin + text[begin..].chars().take(column).map(char::len_utf8).sum::<usize>();
    start..start + as_index(at.span().byte_len().unwrap_or(1)).max(1)
}

impl<'de> Deserialize<'de> for YamlNode {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(YamlNodeVisitor)
    }
}

struct YamlNodeVisitor;

impl<'de> Visitor<'de> for YamlNodeVisitor {
    type Value = YamlNode;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map, a list, text, a number, true, false or nothing")
    }

    fn visit_unit<E>(self) -> Result<YamlNode, E> {
        Ok(YamlNode::Null)
    }

    fn visit_none<E>(self) -> Result<YamlNode, E> {
        Ok(YamlNode::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<YamlNode, D::Error> {
        deserializer.deserialize_any(self)
    }

    fn visit_bool<E>(self, _: bool) -> Result<YamlNode, E> {
        Ok(YamlNode::Other)
    }

    fn visit_i64<E>(self, _: i64) -> Result<YamlNode, E> {
        Ok(YamlNode::Other)
    }

    fn visit_u64<E>(self, _: u64) -> Result<YamlNode, E> {
        Ok(YamlNode::Other)
    }

    fn visit_f64<E>(self, _: f64) -> Result<YamlNode, E> {
        Ok(YamlNode::Other)
    }

    fn visit_str<E>(self, text: &str) -> Result<YamlNode, E> {
        Ok(YamlNode::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<YamlNode, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = access.next_element()? {
            items.push(item);
        }
        Ok(YamlNode::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<YamlNode, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = access.next_entry()? {
            entries.push(entry);
        }
        Ok(YamlNode::Map(entries))
    }
}
