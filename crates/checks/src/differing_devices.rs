//! Finds outliers among parts that should be identical.

use std::collections::BTreeMap;

use doctor_core::observation::Entity;

/// A part, its kind and its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    pub entity: Entity,
    pub kind: String,
    pub value: String,
}

/// A part that differs from most of its kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceOutlier<'a> {
    pub part: &'a Part,
    /// The most frequent value.
    pub majority_value: &'a str,
}

/// Returns the outliers, in order. If two values are equally frequent, the one that appears first counts as usual.
pub fn outliers<'a>(parts: &'a [Part]) -> Vec<DeviceOutlier<'a>> {
    let mut counts: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for part in parts {
        *counts.entry((&part.kind, &part.value)).or_default() += 1;
    }
    let mut usual: BTreeMap<&str, (usize, &Part)> = BTreeMap::new();
    for part in parts {
        let count = counts.get(&(part.kind.as_str(), part.value.as_str())).copied().unwrap_or_default();
        let known = usual.entry(&part.kind).or_insert((count, part));
        if count > known.0 {
            *known = (count, part);
        }
    }
    let odd = |part: &'a Part| {
        let (_, usual) = usual.get(part.kind.as_str())?;
        (part.value != usual.value).then_some(DeviceOutlier { part, majority_value: &usual.value })
    };
    parts.iter().filter_map(odd).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use doctor_core::observation::EntityKind;
    use proptest::prelude::*;

    fn parts(list: &[(&str, &str)]) -> Vec<Part> {
        let part = |(index, (kind, value)): (usize, &(&str, &str))| Part {
            entity: Entity::new(EntityKind::Gpu, index.to_string()),
            kind: (*kind).to_owned(),
            value: (*value).to_owned(),
        };
        list.iter().enumerate().map(part).collect()
    }

    #[test]
    fn the_minority_of_each_kind_is_the_outlier() {
        let all = parts(&[("h200", "a"), ("h200", "b"), ("h200", "a"), ("l4", "c")]);
        let odd = outliers(&all);
        assert_eq!(odd.len(), 1);
        assert_eq!((odd[0].part.entity.id.as_str(), odd[0].majority_value), ("1", "a"));
        let even = parts(&[("h200", "b"), ("h200", "a")]);
        assert_eq!(outliers(&even).iter().map(|odd| odd.part.entity.id.as_str()).collect::<Vec<_>>(), ["1"]);
        assert!(outliers(&[]).is_empty());
    }

    proptest! {
        #[test]
        fn a_majority_is_never_an_outlier(values in proptest::collection::vec("[ab]", 0..9)) {
            let list: Vec<(&str, &str)> = values.iter().map(|value| ("x", value.as_str())).collect();
            let all = parts(&list);
            prop_assert!(outliers(&all).len() * 2 <= all.len());
        }
    }
}
