//! Names with values, as labels, annotations and amounts of resources are: few on each object, and nearly the same on all.
//!
//! A node of a GPU cluster has sixty labels, and of sixty not five differ from its neighbour's. Where thousands of nodes are kept,
//! each pair is kept once and counted ([`Shared`]); a node then has one word for each. Looking one up is a search in a sorted
//! list, which at this size is as quick as any map.

use std::{collections::HashSet, fmt, hash::Hash, sync::Arc};

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{MapAccess, Visitor},
};

type NameAndValue = (Box<str>, Box<str>);
type Pair = Arc<NameAndValue>;

/// By name, each once.
#[derive(Clone, Default, PartialEq, Eq)]
pub(super) struct Pairs(Box<[Pair]>);

impl Pairs {
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        let place = self.0.binary_search_by(|pair| (*pair.0).cmp(name)).ok()?;
        Some(&self.0[place].1)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|pair| (&*pair.0, &*pair.1))
    }

    /// Only those whose name is wanted.
    pub(super) fn only(self, wanted: impl Fn(&str) -> bool) -> Self {
        self.0.into_iter().filter(|pair| wanted(&pair.0)).collect()
    }
}

impl FromIterator<Pair> for Pairs {
    fn from_iter<I: IntoIterator<Item = Pair>>(pairs: I) -> Self {
        let mut pairs: Vec<Pair> = pairs.into_iter().collect();
        // Of two with one name the later counts, as in every JSON reader.
        pairs.sort_by(|a, b| a.0.cmp(&b.0));
        pairs.reverse();
        pairs.dedup_by(|a, b| a.0 == b.0);
        pairs.reverse();
        Self(pairs.into_boxed_slice())
    }
}

impl<N: Into<Box<str>>, V: Into<Box<str>>> FromIterator<(N, V)> for Pairs {
    fn from_iter<I: IntoIterator<Item = (N, V)>>(pairs: I) -> Self {
        pairs.into_iter().map(|(name, value)| Arc::new((name.into(), value.into()))).collect()
    }
}

impl fmt::Debug for Pairs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

impl Serialize for Pairs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.iter())
    }
}

impl<'de> Deserialize<'de> for Pairs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;

        impl<'de> Visitor<'de> for Reader {
            type Value = Pairs;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of strings")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Pairs, A::Error> {
                let mut pairs = Vec::new();
                while let Some((name, value)) = map.next_entry::<Box<str>, Box<str>>()? {
                    pairs.push((name, value));
                }
                Ok(pairs.into_iter().collect())
            }
        }

        deserializer.deserialize_map(Reader)
    }
}

/// What is the same in many of the objects that are kept: their pairs, or the nodes of pods.
#[derive(Debug)]
pub(super) struct Shared<T: ?Sized = NameAndValue> {
    all: HashSet<Arc<T>>,
    /// How many there were when those that nobody has any more were last let go.
    swept: usize,
}

impl<T: ?Sized> Default for Shared<T> {
    fn default() -> Self {
        Self { all: HashSet::new(), swept: 0 }
    }
}

impl<T: ?Sized + Eq + Hash> Shared<T> {
    /// The one that others have, or this.
    pub(super) fn one(&mut self, own: Arc<T>) -> Arc<T> {
        if let Some(known) = self.all.get(&own) {
            return Arc::clone(known);
        }
        // Nodes come and go, and some labels hold a moment: what nobody has any more goes when half of all may be such.
        if self.all.len() > 2 * self.swept.max(1 << 10) {
            self.all.retain(|one| Arc::strong_count(one) > 1);
            self.swept = self.all.len();
        }
        self.all.insert(Arc::clone(&own));
        own
    }
}

impl Shared {
    /// Replaces each pair by the one that others have.
    pub(super) fn share(&mut self, pairs: &mut Pairs) {
        for pair in &mut pairs.0 {
            *pair = self.one(Arc::clone(pair));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(text: serde_json::Value) -> Pairs {
        serde_json::from_value(text).unwrap()
    }

    #[test]
    fn what_was_read_is_found_by_name_and_written_as_it_was() {
        let text = json!({ "b": "2", "a": "1", "c": "" });
        let pairs = read(text.clone());
        assert_eq!((pairs.get("a"), pairs.get("c"), pairs.get("d")), (Some("1"), Some(""), None));
        assert_eq!(pairs.iter().collect::<Vec<_>>(), [("a", "1"), ("b", "2"), ("c", "")]);
        assert_eq!(json!(pairs), text);
        assert_eq!(pairs.only(|name| name != "b"), read(json!({ "a": "1", "c": "" })));
        let twice: Pairs = serde_json::from_str(r#"{"a":"1","a":"2"}"#).unwrap();
        assert_eq!(twice.get("a"), Some("2"));
        assert!(serde_json::from_str::<Pairs>(r#"{"a":1}"#).is_err());
    }

    #[test]
    fn equal_pairs_are_kept_once_and_let_go_when_nobody_has_them() {
        let mut shared = Shared::default();
        let mut kept: Vec<Pairs> = Vec::new();
        for number in 0..3 {
            let mut pairs = read(json!({ "zone": "a", "name": format!("n{number}") }));
            shared.share(&mut pairs);
            kept.push(pairs);
        }
        assert!(Arc::ptr_eq(&kept[0].0[1], &kept[2].0[1]));
        assert_eq!(shared.all.len(), 4);
        for number in 0..10_000 {
            shared.share(&mut read(json!({ "moment": number.to_string() })));
        }
        assert!(shared.all.len() < 2_200, "{}", shared.all.len());
        shared.share(&mut kept[1]);
        assert_eq!(kept[1].get("name"), Some("n1"));
    }
}
