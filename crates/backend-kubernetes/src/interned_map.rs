//! A compact, interned string map for labels, annotations and resource quantities: few on each object, and nearly the same on
//! all.
//!
//! A node of a GPU cluster has sixty labels, of which fewer than five differ from its neighbour's. For thousands of nodes, each
//! pair is stored once and reference-counted, and so is each list of pairs that many nodes share ([`MapInterner`]). A node then
//! has one pointer to the list and one for each pair of its own. A lookup is a binary search in two sorted lists, which at this
//! size is as fast as any map.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    hash::Hash,
    sync::Arc,
};

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{MapAccess, Visitor},
};

type KeyValue = (Box<str>, Box<str>);
type InternedEntry = Arc<KeyValue>;

/// Sorted by name; names are unique.
#[derive(Clone, Default)]
pub(super) struct InternedMap {
    own: Box<[InternedEntry]>,
    /// Pairs that describe a kind of node, as a list shared with other objects; no name is in both lists.
    common: Option<Arc<[InternedEntry]>>,
}

impl InternedMap {
    fn lists(&self) -> [&[InternedEntry]; 2] {
        [&self.own, self.common.as_deref().unwrap_or_default()]
    }

    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.lists().into_iter().find_map(|list| {
            let index = list.binary_search_by(|pair| (*pair.0).cmp(name)).ok()?;
            Some(&*list[index].1)
        })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn len(&self) -> usize {
        self.lists().iter().map(|list| list.len()).sum()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.lists().into_iter().flatten().map(|pair| (&*pair.0, &*pair.1))
    }

    /// Retains only the pairs whose key matches the predicate.
    pub(super) fn filter_keys(self, predicate: impl Fn(&str) -> bool) -> Self {
        self.lists().into_iter().flatten().filter(|pair| predicate(&pair.0)).cloned().collect()
    }
}

/// Compares the content, regardless of the representation.
impl PartialEq for InternedMap {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && self.iter().all(|(name, value)| other.get(name) == Some(value))
    }
}

impl Eq for InternedMap {}

impl FromIterator<InternedEntry> for InternedMap {
    fn from_iter<I: IntoIterator<Item = InternedEntry>>(pairs: I) -> Self {
        let mut pairs: Vec<InternedEntry> = pairs.into_iter().collect();
        // Of two pairs with one name the later wins, as in every JSON parser.
        pairs.sort_by(|a, b| a.0.cmp(&b.0));
        pairs.reverse();
        pairs.dedup_by(|a, b| a.0 == b.0);
        pairs.reverse();
        Self { own: pairs.into_boxed_slice(), common: None }
    }
}

impl<N: Into<Box<str>>, V: Into<Box<str>>> FromIterator<(N, V)> for InternedMap {
    fn from_iter<I: IntoIterator<Item = (N, V)>>(pairs: I) -> Self {
        pairs.into_iter().map(|(name, value)| Arc::new((name.into(), value.into()))).collect()
    }
}

impl fmt::Debug for InternedMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

impl Serialize for InternedMap {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.iter())
    }
}

impl<'de> Deserialize<'de> for InternedMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;

        impl<'de> Visitor<'de> for Reader {
            type Value = InternedMap;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of strings")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<InternedMap, A::Error> {
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

/// Interns values that are equal in many objects.
#[derive(Debug)]
pub(super) struct Interner<T: ?Sized> {
    values: HashSet<Arc<T>>,
    /// The number of values after the last sweep.
    len_after_sweep: usize,
}

impl<T: ?Sized> Default for Interner<T> {
    fn default() -> Self {
        Self { values: HashSet::new(), len_after_sweep: 0 }
    }
}

impl<T: ?Sized + Eq + Hash> Interner<T> {
    /// Returns the interned equal of this value, after adding it if it is new.
    pub(super) fn intern(&mut self, own: Arc<T>) -> Arc<T> {
        self.get(&own).unwrap_or_else(|| self.add(own))
    }

    fn get(&self, own: &T) -> Option<Arc<T>> {
        self.values.get(own).map(Arc::clone)
    }

    fn add(&mut self, own: Arc<T>) -> Arc<T> {
        if self.needs_sweep() {
            self.sweep();
        }
        self.values.insert(Arc::clone(&own));
        own
    }

    /// Nodes come and go, and some labels contain a timestamp: up to half of the values may be unused.
    fn needs_sweep(&self) -> bool {
        self.values.len() > 2 * self.len_after_sweep.max(1 << 10)
    }

    /// Drops unused values.
    fn sweep(&mut self) {
        self.values.retain(|one| Arc::strong_count(one) > 1);
        self.len_after_sweep = self.values.len();
    }
}

impl Interner<str> {
    /// Returns the interned copy of this string.
    pub(super) fn intern_str(&mut self, text: &str) -> Arc<str> {
        self.get(text).unwrap_or_else(|| self.add(text.into()))
    }
}

/// A name with more values than this identifies nodes, such as a serial number; the others describe kinds of nodes, of which
/// there are few.
const MAX_SHARED_VALUES: u32 = 16;

/// Interns the pairs of all objects of one kind, and the lists of pairs that describe a kind of node. Only the few pairs that are
/// unique to a node remain its own.
#[derive(Debug, Default)]
pub(super) struct MapInterner {
    pairs: Interner<KeyValue>,
    lists: Interner<[InternedEntry]>,
    /// The number of values of each name.
    value_counts: HashMap<Box<str>, u32>,
}

impl MapInterner {
    /// Replaces the pairs by their interned equals.
    pub(super) fn intern(&mut self, pairs: &mut InternedMap) {
        let all: Vec<InternedEntry> = pairs.lists().into_iter().flatten().map(|pair| self.intern_entry(pair)).collect();
        let is_own =
            |pair: &InternedEntry| self.value_counts.get(&pair.0).is_none_or(|values| *values > MAX_SHARED_VALUES);
        let (own, common): (Vec<InternedEntry>, Vec<InternedEntry>) = all.into_iter().partition(is_own);
        *pairs = own.into_iter().collect();
        if !common.is_empty() {
            pairs.common = Some(self.lists.intern(common.into_iter().collect::<InternedMap>().own.into()));
        }
    }

    fn intern_entry(&mut self, pair: &InternedEntry) -> InternedEntry {
        if let Some(known) = self.pairs.get(pair) {
            return known;
        }
        if self.pairs.needs_sweep() {
            // Lists first, because they hold pairs.
            self.lists.sweep();
            self.pairs.sweep();
            self.value_counts.clear();
            self.pairs.values.iter().for_each(|pair| count(&mut self.value_counts, &pair.0));
        }
        count(&mut self.value_counts, &pair.0);
        self.pairs.add(Arc::clone(pair))
    }
}

fn count(values: &mut HashMap<Box<str>, u32>, name: &str) {
    match values.get_mut(name) {
        Some(values) => *values = values.saturating_add(1),
        None => drop(values.insert(name.into(), 1)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(text: serde_json::Value) -> InternedMap {
        serde_json::from_value(text).unwrap()
    }

    #[test]
    fn a_map_is_searched_by_key_and_serialized_unchanged() {
        let text = json!({ "b": "2", "a": "1", "c": "" });
        let pairs = read(text.clone());
        assert_eq!((pairs.get("a"), pairs.get("c"), pairs.get("d")), (Some("1"), Some(""), None));
        assert_eq!(pairs.iter().collect::<Vec<_>>(), [("a", "1"), ("b", "2"), ("c", "")]);
        assert_eq!(json!(pairs), text);
        assert_eq!(pairs.filter_keys(|name| name != "b"), read(json!({ "a": "1", "c": "" })));
        let twice: InternedMap = serde_json::from_str(r#"{"a":"1","a":"2"}"#).unwrap();
        assert_eq!(twice.get("a"), Some("2"));
        assert!(serde_json::from_str::<InternedMap>(r#"{"a":1}"#).is_err());
    }

    #[test]
    fn equal_pairs_are_stored_once_and_dropped_when_unused() {
        let mut shared = MapInterner::default();
        let mut maps: Vec<InternedMap> = Vec::new();
        for number in 0..3 {
            let mut pairs = read(json!({ "zone": "a", "name": format!("n{number}") }));
            shared.intern(&mut pairs);
            maps.push(pairs);
        }
        let zone = |pairs: &InternedMap| {
            let all = pairs.lists().into_iter().flatten();
            all.filter(|pair| &*pair.0 == "zone").map(Arc::clone).next().unwrap()
        };
        assert!(Arc::ptr_eq(&zone(&maps[0]), &zone(&maps[2])));
        assert_eq!(shared.pairs.values.len(), 4);
        for number in 0..10_000 {
            shared.intern(&mut read(json!({ "moment": number.to_string() })));
        }
        assert!(shared.pairs.values.len() < 2_200, "{}", shared.pairs.values.len());
        // Names that contain a timestamp are dropped too, with their lists.
        for number in 0..10_000 {
            shared.intern(&mut read(json!({ (format!("job-{number}")): "reserved", "zone": "a" })));
        }
        let left = (shared.pairs.values.len(), shared.lists.values.len(), shared.value_counts.len());
        assert!(left.0 < 2_200 && left.1 < 2_200 && left.2 < 2_200, "{left:?}");
        shared.intern(&mut maps[1]);
        assert_eq!(maps[1].get("name"), Some("n1"));
    }

    #[test]
    fn similar_nodes_share_one_list_and_keep_their_own_names() {
        let mut shared = MapInterner::default();
        let node = |number: usize| {
            read(
                json!({ "a.kind": format!("k{}", number % 2), "hostname": format!("n{number}"), "zone": "z", "arch": "amd64" }),
            )
        };
        let nodes: Vec<InternedMap> = (0..100)
            .map(|number| {
                let mut pairs = node(number);
                shared.intern(&mut pairs);
                assert_eq!(pairs, node(number), "whatever is shared, the pairs are the same");
                assert_eq!(json!(pairs), json!(node(number)));
                pairs
            })
            .collect();
        let (first, other, last) = (&nodes[96], &nodes[97], &nodes[98]);
        let list = |pairs: &InternedMap| pairs.common.clone().unwrap();
        assert!(Arc::ptr_eq(&list(first), &list(last)) && !Arc::ptr_eq(&list(first), &list(other)));
        assert_eq!((first.own.len(), list(first).len()), (1, 3));
        assert_eq!((first.get("hostname"), first.get("zone"), first.get("a")), (Some("n96"), Some("z"), None));
        assert_ne!(first, last);
        // Once more, as when a node is received again.
        let mut again = first.clone();
        shared.intern(&mut again);
        assert!(again == *first && Arc::ptr_eq(&list(&again), &list(first)));
        assert_eq!(again.filter_keys(|name| name == "hostname"), read(json!({ "hostname": "n96" })));
    }
}
