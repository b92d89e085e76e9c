//! A set of tests, by their places in `Snapshot::tests`.

/// Places in one word.
const WORD: usize = u128::BITS as usize;

/// Any number of tests. Sets of the first 128 places take no allocation: planning makes one for each node.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct TestSet {
    first: u128,
    /// The places after those, one word for each 128. The last word is not zero, so equal sets are equal values.
    rest: Vec<u128>,
}

impl TestSet {
    pub(super) const fn is_empty(&self) -> bool {
        self.first == 0 && self.rest.is_empty()
    }

    pub(super) fn contains(&self, place: usize) -> bool {
        self.word(place / WORD) & (1 << (place % WORD)) != 0
    }

    pub(super) fn insert(&mut self, place: usize) {
        let bit = 1 << (place % WORD);
        match (place / WORD).checked_sub(1) {
            None => self.first |= bit,
            Some(word) => {
                if self.rest.len() <= word {
                    self.rest.resize(word + 1, 0);
                }
                self.rest[word] |= bit;
            }
        }
    }

    /// The lowest place.
    pub(super) fn first(&self) -> Option<usize> {
        let words = std::iter::once(&self.first).chain(&self.rest).enumerate();
        words.filter(|(_, word)| **word != 0).map(|(n, word)| n * WORD + word.trailing_zeros() as usize).next()
    }

    /// The tests that are in both.
    pub(super) fn and(&self, other: &Self) -> Self {
        let mut rest: Vec<u128> = self.rest.iter().zip(&other.rest).map(|(a, b)| a & b).collect();
        while rest.last() == Some(&0) {
            rest.pop();
        }
        Self { first: self.first & other.first, rest }
    }

    fn word(&self, number: usize) -> u128 {
        match number.checked_sub(1) {
            None => self.first,
            Some(after) => self.rest.get(after).copied().unwrap_or(0),
        }
    }
}

impl FromIterator<usize> for TestSet {
    fn from_iter<I: IntoIterator<Item = usize>>(places: I) -> Self {
        let mut set = Self::default();
        for place in places {
            set.insert(place);
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
        fn a_set_of_tests_is_a_set_of_numbers_of_any_size(
            a in btree_set(0_usize..400, 0..20),
            b in btree_set(0_usize..400, 0..20),
        ) {
            let [one, other]: [TestSet; 2] = [&a, &b].map(|places| places.iter().copied().collect());
            for place in 0..500 {
                prop_assert_eq!(one.contains(place), a.contains(&place));
            }
            prop_assert_eq!((one.is_empty(), one.first()), (a.is_empty(), a.first().copied()));
            let both: TestSet = a.intersection(&b).copied().collect();
            prop_assert_eq!(&one.and(&other), &both, "equal sets are equal values");
            prop_assert_eq!(one == other, a == b);
        }
    }
}
