//! A compact, interned string map for labels, annotations and resource quantities: few on each object, and nearly the same on
//! all.
//!
//! A node of a GPU cluster has sixty labels, of which fewer than five differ from its neighbour's. For thousands of nodes, each
//! pair is stored once and reference-counted, and so is each list of pairs that many nodes share ([`SharedPairs`]). A node then
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

type NameAndValue = (Box<str>, Box<str>);
type Pair = Arc<NameAndValue>;

/// Sorted by name; names are unique.
#[derive(Clone, Default)]
pub(super) struct Pairs {
    own: Box<[Pair]>,
    /// Pairs that describe a kind of node, as a list shared with other objects; no name is in both lists.
    common: Option<Arc<[Pair]>>,
}

impl Pairs {
    fn lists(&self) -> [&[Pair]; 2] {
        [&self.own, self.common.as_deref().unwrap_or_default()]
    }

    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.lists().into_iter().find_map(|list| {
            let place = list.binary_search_by(|pair| (*pair.0).cmp(name)).ok()?;
            Some(&*list[place].1)
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

    /// Keeps only the pairs whose name is wanted.
    pub(super) fn only(self, wanted: impl Fn(&str) -> bool) -> Self {
        self.lists().into_iter().flatten().filter(|pair| wanted(&pair.0)).cloned().collect()
    }
}

/// Compares the content, regardless of the representation.
impl PartialEq for Pairs {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && self.iter().all(|(name, value)| other.get(name) == Some(value))
    }
}

impl Eq for Pairs {}

impl FromIterator<Pair> for Pairs {
    fn from_iter<I: IntoIterator<Item = Pair>>(pairs: I) -> Self {
        let mut pairs: Vec<Pair> = pairs.into_iter().collect();
        // Of two pairs with one name the later wins, as in every JSON parser.
        pairs.sort_by(|a, b| a.0.cmp(&b.0));
        pairs.reverse();
        pairs.dedup_by(|a, b| a.0 == b.0);
        pairs.reverse();
        Self { own: pairs.into_boxed_slice(), common: None }
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

/// Interns values that are equal in many objects.
#[derive(Debug)]
pub(super) struct Shared<T: ?Sized> {
    all: HashSet<Arc<T>>,
    /// The number of values after the last sweep.
    swept: usize,
}

impl<T: ?Sized> Default for Shared<T> {
    fn default() -> Self {
        Self { all: HashSet::new(), swept: 0 }
    }
}

impl<T: ?Sized + Eq + Hash> Shared<T> {
    /// Returns the interned equal of this value, after adding it if it is new.
    pub(super) fn one(&mut self, own: Arc<T>) -> Arc<T> {
        self.known(&own).unwrap_or_else(|| self.add(own))
    }

    fn known(&self, own: &T) -> Option<Arc<T>> {
        self.all.get(own).map(Arc::clone)
    }

    fn add(&mut self, own: Arc<T>) -> Arc<T> {
        if self.is_to_be_swept() {
            self.sweep();
        }
        self.all.insert(Arc::clone(&own));
        own
    }

    /// Nodes come and go, and some labels contain a timestamp: up to half of the values may be unused.
    fn is_to_be_swept(&self) -> bool {
        self.all.len() > 2 * self.swept.max(1 << 10)
    }

    /// Drops unused values.
    fn sweep(&mut self) {
        self.all.retain(|one| Arc::strong_count(one) > 1);
        self.swept = self.all.len();
    }
}

impl Shared<str> {
    /// Returns the interned copy of this string.
    pub(super) fn word(&mut self, text: &str) -> Arc<str> {
        self.known(text).unwrap_or_else(|| self.add(text.into()))
    }
}

/// A name with more values than this identifies nodes, such as a serial number; the others describe kinds of nodes, of which
/// there are few.
const FEW: u32 = 16;

/// Interns the pairs of all objects of one kind, and the lists of pairs that describe a kind of node. Only the few pairs that are
/// unique to a node remain its own.
#[derive(Debug, Default)]
pub(super) struct SharedPairs {
    pairs: Shared<NameAndValue>,
    lists: Shared<[Pair]>,
    /// The number of values of each name.
    values: HashMap<Box<str>, u32>,
}

impl SharedPairs {
    /// Replaces the pairs by their interned equals.
    pub(super) fn share(&mut self, pairs: &mut Pairs) {
        let all: Vec<Pair> = pairs.lists().into_iter().flatten().map(|pair| self.one(pair)).collect();
        let is_own = |pair: &Pair| self.values.get(&pair.0).is_none_or(|values| *values > FEW);
        let (own, common): (Vec<Pair>, Vec<Pair>) = all.into_iter().partition(is_own);
        *pairs = own.into_iter().collect();
        if !common.is_empty() {
            pairs.common = Some(self.lists.one(common.into_iter().collect::<Pairs>().own.into()));
        }
    }

    fn one(&mut self, pair: &Pair) -> Pair {
        if let Some(known) = self.pairs.known(pair) {
            return known;
        }
        if self.pairs.is_to_be_swept() {
            // Lists first, because they hold pairs.
            self.lists.sweep();
            self.pairs.sweep();
            self.values.clear();
            self.pairs.all.iter().for_each(|pair| count(&mut self.values, &pair.0));
        }
        count(&mut self.values, &pair.0);
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
    fn equal_pairs_are_stored_once_and_dropped_when_unused() {
        let mut shared = SharedPairs::default();
        let mut kept: Vec<Pairs> = Vec::new();
        for number in 0..3 {
            let mut pairs = read(json!({ "zone": "a", "name": format!("n{number}") }));
            shared.share(&mut pairs);
            kept.push(pairs);
        }
        let zone = |pairs: &Pairs| {
            let all = pairs.lists().into_iter().flatten();
            all.filter(|pair| &*pair.0 == "zone").map(Arc::clone).next().unwrap()
        };
        assert!(Arc::ptr_eq(&zone(&kept[0]), &zone(&kept[2])));
        assert_eq!(shared.pairs.all.len(), 4);
        for number in 0..10_000 {
            shared.share(&mut read(json!({ "moment": number.to_string() })));
        }
        assert!(shared.pairs.all.len() < 2_200, "{}", shared.pairs.all.len());
        // Names that contain a timestamp are dropped too, with their lists.
        for number in 0..10_000 {
            shared.share(&mut read(json!({ (format!("job-{number}")): "reserved", "zone": "a" })));
        }
        let left = (shared.pairs.all.len(), shared.lists.all.len(), shared.values.len());
        assert!(left.0 < 2_200 && left.1 < 2_200 && left.2 < 2_200, "{left:?}");
        shared.share(&mut kept[1]);
        assert_eq!(kept[1].get("name"), Some("n1"));
    }

    #[test]
    fn nodes_of_one_kind_have_one_list_and_their_own_names() {
        let mut shared = SharedPairs::default();
        let node = |number: usize| {
            read(
                json!({ "a.kind": format!("k{}", number % 2), "hostname": format!("n{number}"), "zone": "z", "arch": "amd64" }),
            )
        };
        let nodes: Vec<Pairs> = (0..100)
            .map(|number| {
                let mut pairs = node(number);
                shared.share(&mut pairs);
                assert_eq!(pairs, node(number), "whatever is shared, the pairs are the same");
                assert_eq!(json!(pairs), json!(node(number)));
                pairs
            })
            .collect();
        let (first, other, last) = (&nodes[96], &nodes[97], &nodes[98]);
        let list = |pairs: &Pairs| pairs.common.clone().unwrap();
        assert!(Arc::ptr_eq(&list(first), &list(last)) && !Arc::ptr_eq(&list(first), &list(other)));
        assert_eq!((first.own.len(), list(first).len()), (1, 3));
        assert_eq!((first.get("hostname"), first.get("zone"), first.get("a")), (Some("n96"), Some("z"), None));
        assert_ne!(first, last);
        // Once more, as when a node is received again.
        let mut again = first.clone();
        shared.share(&mut again);
        assert!(again == *first && Arc::ptr_eq(&list(&again), &list(first)));
        assert_eq!(again.only(|name| name == "hostname"), read(json!({ "hostname": "n96" })));
    }
}
