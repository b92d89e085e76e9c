//! A set of tests, by their index in `Snapshot::tests`.

use crate::{policy::TestPolicy, snapshot::Snapshot};

/// Tests per word.
const BITS_PER_WORD: usize = u64::BITS as usize;
/// Words stored inline.
const INLINE_WORDS: usize = 2;

/// A set of any number of tests. The first 128 need no allocation: planning creates one set for each node.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct TestSet {
    inline: [u64; INLINE_WORDS],
    /// The remaining words. The last one is not zero, so that equal sets are equal values.
    heap: Box<[u64]>,
}

impl TestSet {
    pub(super) const fn is_empty(&self) -> bool {
        self.inline[0] | self.inline[1] == 0 && self.heap.is_empty()
    }

    pub(super) fn contains(&self, index: usize) -> bool {
        let (word, bit) = (index / BITS_PER_WORD, 1 << (index % BITS_PER_WORD));
        let word = if word < INLINE_WORDS {
            self.inline[word]
        } else {
            self.heap.get(word - INLINE_WORDS).copied().unwrap_or(0)
        };
        word & bit != 0
    }

    pub(super) fn insert(&mut self, index: usize) {
        let (word, bit) = (index / BITS_PER_WORD, 1 << (index % BITS_PER_WORD));
        if word < INLINE_WORDS {
            self.inline[word] |= bit;
            return;
        }
        let word = word - INLINE_WORDS;
        if self.heap.len() <= word {
            let mut longer = std::mem::take(&mut self.heap).into_vec();
            longer.resize(word + 1, 0);
            self.heap = longer.into();
        }
        self.heap[word] |= bit;
    }

    /// Returns the lowest index.
    pub(super) fn first(&self) -> Option<usize> {
        let mut words = self.inline.iter().chain(&self.heap).enumerate().filter(|(_, word)| **word != 0);
        words.next().map(|(number, word)| number * BITS_PER_WORD + word.trailing_zeros() as usize)
    }

    /// Returns the intersection.
    pub(super) fn intersection(&self, other: &Self) -> Self {
        let near = [self.inline[0] & other.inline[0], self.inline[1] & other.inline[1]];
        if self.heap.is_empty() || other.heap.is_empty() {
            return Self { inline: near, heap: Box::default() };
        }
        let mut far: Vec<u64> = self.heap.iter().zip(&other.heap).map(|(a, b)| a & b).collect();
        while far.last() == Some(&0) {
            far.pop();
        }
        Self { inline: near, heap: far.into() }
    }

    /// Returns the tests that are not in `other`.
    pub(super) fn difference(&self, other: &Self) -> Self {
        let mut rest = self.clone();
        for (word, minus) in rest.inline.iter_mut().zip(other.inline) {
            *word &= !minus;
        }
        if !(self.heap.is_empty() || other.heap.is_empty()) {
            for (word, minus) in rest.heap.iter_mut().zip(&other.heap) {
                *word &= !minus;
            }
            let used = rest.heap.iter().rposition(|word| *word != 0).map_or(0, |last| last + 1);
            rest.heap = rest.heap[..used].into();
        }
        rest
    }

    /// Returns the tests of either set.
    pub(super) fn union(&self, other: &Self) -> Self {
        let mut all = self.clone();
        for (word, more) in all.inline.iter_mut().zip(other.inline) {
            *word |= more;
        }
        if !other.heap.is_empty() {
            let mut heap = all.heap.into_vec();
            heap.resize(heap.len().max(other.heap.len()), 0);
            for (word, more) in heap.iter_mut().zip(&other.heap) {
                *word |= more;
            }
            all.heap = heap.into();
        }
        all
    }
}

/// Returns the tests of a set, in the order of the snapshot.
pub(super) fn tests_of<'a>(snapshot: &'a Snapshot, tests: &TestSet) -> impl Iterator<Item = &'a TestPolicy> {
    snapshot.tests.iter().enumerate().filter(|(index, _)| tests.contains(*index)).map(|(_, test)| test)
}

impl FromIterator<usize> for TestSet {
    fn from_iter<I: IntoIterator<Item = usize>>(indices: I) -> Self {
        let mut set = Self::default();
        for index in indices {
            set.insert(index);
        }
        set
    }
}

#[cfg(test)]
mod tests {
    use super::TestSet;
    use proptest::{collection::btree_set, prelude::*};

    proptest! {
        #[test]
        fn a_test_set_behaves_like_a_set_of_integers(
            a in btree_set(0_usize..400, 0..20),
            b in btree_set(0_usize..400, 0..20),
        ) {
            let [one, other]: [TestSet; 2] = [&a, &b].map(|indices| indices.iter().copied().collect());
            for index in 0..500 {
                prop_assert_eq!(one.contains(index), a.contains(&index));
            }
            prop_assert_eq!((one.is_empty(), one.first()), (a.is_empty(), a.first().copied()));
            let both: TestSet = a.intersection(&b).copied().collect();
            prop_assert_eq!(&one.intersection(&other), &both, "equal sets are equal values");
            let either: TestSet = a.union(&b).copied().collect();
            prop_assert_eq!(&one.union(&other), &either);
            let rest: TestSet = a.difference(&b).copied().collect();
            prop_assert_eq!(&one.difference(&other), &rest);
            prop_assert_eq!(one == other, a == b);
        }
    }
}
