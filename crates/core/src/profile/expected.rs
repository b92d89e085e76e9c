//! An expected value and where it comes from.
//!
//! In a profile's file, plain numbers under `[expect]` are the site's own word. Figures with another source are in the
//! tables `[expect.measured]`, `[expect.published]` and `[expect.derived]`.

use std::{collections::BTreeMap, fmt};

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{self, MapAccess, Visitor},
    ser::SerializeMap,
};

use crate::reason::coded;

coded! {
    /// Where an expected value comes from.
    pub enum Basis {
        /// Stated by the site, as reliable as a measurement.
        Stated => "stated",
        /// Measured on healthy machines, by us or by a cited source, or learnt.
        Measured => "measured",
        /// Published by the vendor.
        Published => "published",
        /// Calculated from other figures. A finding from it has at most severity `monitor`.
        Derived => "derived",
    }
}

/// The value that a healthy machine reaches, and where it comes from.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Expected {
    pub value: f64,
    pub basis: Basis,
}

impl Expected {
    pub const fn new(value: f64, basis: Basis) -> Self {
        Self { value, basis }
    }

    pub const fn measured(value: f64) -> Self {
        Self::new(value, Basis::Measured)
    }
}

impl From<f64> for Expected {
    /// A plain number is stated.
    fn from(value: f64) -> Self {
        Self::new(value, Basis::Stated)
    }
}

/// The tables in the order in which they are written. Stated values have none: they are plain numbers.
const TABLES: [Basis; 3] = [Basis::Measured, Basis::Published, Basis::Derived];

/// Writes the form of a profile's file: plain numbers first, then the tables.
pub(super) fn serialize<S: Serializer>(expect: &BTreeMap<String, Expected>, serializer: S) -> Result<S::Ok, S::Error> {
    let of = |basis: Basis| expect.iter().filter(move |(_, expected)| expected.basis == basis);
    let mut map = serializer.serialize_map(None)?;
    for (metric, expected) in of(Basis::Stated) {
        map.serialize_entry(metric, &expected.value)?;
    }
    for basis in TABLES {
        let table: BTreeMap<&str, f64> =
            of(basis).map(|(metric, expected)| (metric.as_str(), expected.value)).collect();
        if !table.is_empty() {
            map.serialize_entry(basis.code(), &table)?;
        }
    }
    map.end()
}

/// Parses the form of a profile's file.
pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, Expected>, D::Error> {
    deserializer.deserialize_map(Expectations)
}

struct Expectations;

impl<'de> Visitor<'de> for Expectations {
    type Value = BTreeMap<String, Expected>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("numbers by the name of their metric")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut expect = BTreeMap::new();
        while let Some(key) = map.next_key::<String>()? {
            match TABLES.into_iter().find(|basis| basis.code() == key) {
                None => {
                    let Figure(value) = map.next_value()?;
                    add(&mut expect, &key, value.into())?;
                }
                Some(basis) => {
                    for (metric, Figure(value)) in map.next_value::<BTreeMap<String, Figure>>()? {
                        add(&mut expect, &metric, Expected::new(value, basis))?;
                    }
                }
            }
        }
        Ok(expect)
    }
}

fn add<E: de::Error>(expect: &mut BTreeMap<String, Expected>, metric: &str, expected: Expected) -> Result<(), E> {
    if TABLES.iter().any(|basis| basis.code() == metric) {
        return Err(E::custom(format!("`{metric}` is the name of a table of figures, not of a metric")));
    }
    match expect.insert(metric.to_owned(), expected) {
        None => Ok(()),
        Some(other) => Err(E::custom(format!(
            "`{metric}` is expected twice, once as {} and once as {}; keep one",
            other.basis, expected.basis
        ))),
    }
}

/// A number, 0 or more.
struct Figure(f64);

impl<'de> Deserialize<'de> for Figure {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(FigureVisitor)
    }
}

struct FigureVisitor;

impl Visitor<'_> for FigureVisitor {
    type Value = Figure;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number, 0 or more, or one of the tables `measured`, `published` and `derived`")
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Figure, E> {
        if value.is_finite() && value >= 0.0 {
            Ok(Figure(value))
        } else {
            Err(E::invalid_value(de::Unexpected::Float(value), &"a number, 0 or more"))
        }
    }

    #[expect(clippy::cast_precision_loss, reason = "a size in bytes is far below 2^53")]
    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Figure, E> {
        self.visit_f64(value as f64)
    }

    #[expect(clippy::cast_precision_loss, reason = "a size in bytes is far below 2^53")]
    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Figure, E> {
        self.visit_f64(value as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct File {
        #[serde(with = "super")]
        expect: BTreeMap<String, Expected>,
    }

    fn read(text: &str) -> Result<BTreeMap<String, Expected>, String> {
        toml::from_str::<File>(text).map(|file| file.expect).map_err(|error| error.to_string())
    }

    #[test]
    fn a_plain_number_is_stated_and_a_table_names_its_source() {
        let expect = read("[expect]\na = 8\n[expect.measured]\nb = 0.5\n[expect.derived]\nc = 1e12\n").unwrap();
        let all: Vec<_> = expect.iter().map(|(name, of)| (name.as_str(), of.value, of.basis)).collect();
        let expected = [("a", 8.0, Basis::Stated), ("b", 0.5, Basis::Measured), ("c", 1e12, Basis::Derived)];
        assert_eq!(all, expected);
        let written = toml::to_string(&File { expect: expect.clone() }).unwrap();
        assert_eq!(read(&written).unwrap(), expect, "{written}");
        for basis in Basis::ALL {
            assert_eq!(Basis::from_code(basis.code()), Some(*basis));
        }
    }

    #[test]
    fn a_wrong_expectation_is_rejected_with_its_place_and_the_accepted_form() {
        for (text, line, says) in [
            ("[expect]\na = -8\n", "line 2", "0 or more"),
            ("[expect]\na = nan\n", "line 2", "0 or more"),
            ("[expect]\na = \"8\"\n", "line 2", "a number, 0 or more"),
            ("[expect.guessed]\na = 8\n", "line 1", "tables `measured`"),
            ("[expect]\nmeasured = 8\n", "line 2", "expected a map"),
            ("[expect]\na = 8\n[expect.published]\na = 8\n", "", "once as stated and once as published"),
            ("[expect.published]\nderived = 8\n", "", "name of a table"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(line) && error.contains(says), "{text}{error}");
        }
    }
}
