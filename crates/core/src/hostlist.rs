//! Node lists and selectors: `node[01-64,70],login1`, `pool=gpu-a`, `state=suspect`, `gpu-*`.

use std::{collections::BTreeSet, fmt, str::FromStr};

use crate::ids::{InvalidName, NodeName, PoolName};

/// Largest number of nodes in one list: a typing error (`n[0-999999999]`) must not exhaust memory.
pub const MAX_NODES: usize = 100_000;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HostlistError {
    #[error("`{0}` has an unmatched bracket; write it like node[01-64]")]
    Bracket(String),
    #[error("`{0}` is not a range; write it like 01-64 or 7, the smaller number first")]
    Range(String),
    #[error("the list names more than {0} nodes")]
    TooMany(usize),
    #[error("the list names no node")]
    Empty,
    #[error(transparent)]
    Name(#[from] InvalidName),
    #[error("`{0}` is not a selector; use pool=NAME, state=STATE, a name with `*`, or a host list such as node[01-64]")]
    Selector(String),
}

/// Expands a host list in the order written, each name once.
///
/// # Errors
/// With the part that is wrong and what is accepted.
pub fn parse(text: &str) -> Result<Vec<NodeName>, HostlistError> {
    parse_up_to(text, MAX_NODES)
}

/// Like [`parse`], with a smaller limit: a longer list is rejected before it is expanded.
///
/// # Errors
/// As [`parse`], and if the list names more than `most` nodes.
pub fn parse_up_to(text: &str, most: usize) -> Result<Vec<NodeName>, HostlistError> {
    let mut seen = BTreeSet::new();
    let mut names = Vec::new();
    let mut named = 0;
    for item in split(text)? {
        let expanded = expand(item, most)?;
        // Repeated names count too: expanding the same nodes repeatedly takes as long as expanding different ones.
        named += expanded.len();
        if named > most {
            return Err(HostlistError::TooMany(most));
        }
        for name in expanded {
            let name = NodeName::new(&name)?;
            if seen.insert(name.clone()) {
                names.push(name);
            }
        }
    }
    if names.is_empty() { Err(HostlistError::Empty) } else { Ok(names) }
}

/// Splits at commas and white space outside brackets.
fn split(text: &str) -> Result<Vec<&str>, HostlistError> {
    let mut items = Vec::new();
    let (mut start, mut inside) = (0, false);
    for (i, c) in text.char_indices() {
        match c {
            '[' if inside => return Err(HostlistError::Bracket(text.chars().take(64).collect())),
            ']' if !inside => return Err(HostlistError::Bracket(text.chars().take(64).collect())),
            '[' => inside = true,
            ']' => inside = false,
            _ if !inside && (c == ',' || c.is_whitespace()) => {
                items.push(&text[start..i]);
                start = i + c.len_utf8();
            }
            _ => {}
        }
    }
    if inside {
        return Err(HostlistError::Bracket(text.chars().take(64).collect()));
    }
    items.push(&text[start..]);
    items.retain(|item| !item.is_empty());
    Ok(items)
}

fn expand(item: &str, most: usize) -> Result<Vec<String>, HostlistError> {
    let mut partial = vec![String::new()];
    let mut rest = item;
    while let Some((before, after)) = rest.split_once('[') {
        let (ranges, tail) = after.split_once(']').ok_or_else(|| HostlistError::Bracket(item.to_owned()))?;
        let numbers = expand_ranges(ranges, most)?;
        if partial.len().saturating_mul(numbers.len()) > most {
            return Err(HostlistError::TooMany(most));
        }
        partial = partial
            .iter()
            .flat_map(|start| numbers.iter().map(move |number| format!("{start}{before}{number}")))
            .collect();
        rest = tail;
    }
    for name in &mut partial {
        name.push_str(rest);
    }
    Ok(partial)
}

fn expand_ranges(ranges: &str, most: usize) -> Result<Vec<String>, HostlistError> {
    let mut numbers = Vec::new();
    for range in ranges.split(',') {
        let bad = || HostlistError::Range(range.chars().take(64).collect());
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let all_digits = |text: &str| !text.is_empty() && text.len() <= 18 && text.bytes().all(|b| b.is_ascii_digit());
        if !all_digits(first) || !all_digits(last) {
            return Err(bad());
        }
        let from: u64 = first.parse().map_err(|_| bad())?;
        let to: u64 = last.parse().map_err(|_| bad())?;
        if to < from {
            return Err(bad());
        }
        if to - from >= most as u64 || numbers.len() > most {
            return Err(HostlistError::TooMany(most));
        }
        let width = first.len();
        numbers.extend((from..=to).map(|number| format!("{number:0width$}")));
    }
    Ok(numbers)
}

/// Compresses names into a sorted host list: `node[01-03,07]`.
pub fn fold(names: &[NodeName]) -> String {
    let mut sorted: Vec<&str> = names.iter().map(NodeName::as_str).collect();
    sorted.sort_unstable();
    sorted.dedup();
    let mut groups: Vec<(&str, Vec<&str>)> = Vec::new();
    for name in sorted {
        let digits = name.bytes().rev().take_while(u8::is_ascii_digit).count().min(18);
        let (stem, number) = name.split_at(name.len() - digits);
        match groups.last_mut() {
            // `a` and `a1` have the same stem, but only numbers go into a bracket.
            Some((last, numbers)) if *last == stem && !numbers[0].is_empty() => numbers.push(number),
            _ => groups.push((stem, vec![number])),
        }
    }
    let parts: Vec<String> = groups.iter().map(|(stem, numbers)| fold_group(stem, numbers)).collect();
    parts.join(",")
}

fn fold_group(stem: &str, numbers: &[&str]) -> String {
    if numbers.len() == 1 {
        return format!("{stem}{}", numbers[0]);
    }
    // A range joins neighbours of the same width; 9 and 010 stay separate.
    let mut ranges: Vec<(&str, &str)> = Vec::new();
    for &number in numbers {
        match ranges.last_mut() {
            Some((_, last)) if last.len() == number.len() && value(last) + 1 == value(number) => *last = number,
            _ => ranges.push((number, number)),
        }
    }
    let text: Vec<String> = ranges
        .iter()
        .map(|(first, last)| if first == last { (*first).to_owned() } else { format!("{first}-{last}") })
        .collect();
    format!("{stem}[{}]", text.join(","))
}

fn value(digits: &str) -> u64 {
    digits.parse().unwrap_or(0)
}

/// Selects the nodes that a command applies to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Selector {
    /// A set, because many names are matched against many nodes.
    Names(BTreeSet<NodeName>),
    Pool(PoolName),
    /// A node state by its name: `suspect`, `quarantined`.
    State(String),
    /// A name with `*` for any characters.
    Pattern(String),
}

/// The states that [`Selector::State`] accepts.
pub const NODE_STATES: [&str; 7] = ["in-service", "suspect", "quarantined", "repairing", "requalifying", "out", "held"];

impl Selector {
    /// Parses a selector; a list with more than `most` names is rejected.
    ///
    /// # Errors
    /// With what is wrong and what is accepted.
    pub fn parse_up_to(text: &str, most: usize) -> Result<Self, HostlistError> {
        if let Some(pool) = text.strip_prefix("pool=") {
            return Ok(Self::Pool(PoolName::new(pool)?));
        }
        if let Some(state) = text.strip_prefix("state=") {
            return match NODE_STATES.contains(&state) {
                true => Ok(Self::State(state.to_owned())),
                false => Err(HostlistError::Selector(format!("state={state} (known: {})", NODE_STATES.join(", ")))),
            };
        }
        if text.contains('=') {
            return Err(HostlistError::Selector(text.chars().take(64).collect()));
        }
        if text.contains('*') {
            return Ok(Self::Pattern(text.to_owned()));
        }
        parse_up_to(text, most).map(|names| Self::Names(names.into_iter().collect()))
    }

    /// Returns how many names it lists.
    pub fn name_count(&self) -> usize {
        match self {
            Self::Names(names) => names.len(),
            Self::Pool(_) | Self::State(_) | Self::Pattern(_) => 0,
        }
    }

    /// Returns whether the selector matches by name alone.
    pub fn matches_name(&self, name: &NodeName) -> bool {
        match self {
            Self::Names(names) => names.contains(name),
            Self::Pattern(pattern) => glob(pattern.as_bytes(), name.as_str().as_bytes()),
            Self::Pool(_) | Self::State(_) => false,
        }
    }

    pub fn matches(&self, name: &NodeName, pool: &PoolName, state: &str) -> bool {
        match self {
            Self::Names(_) | Self::Pattern(_) => self.matches_name(name),
            Self::Pool(expected) => expected == pool,
            Self::State(expected) => expected == state,
        }
    }
}

impl FromStr for Selector {
    type Err = HostlistError;
    fn from_str(text: &str) -> Result<Self, HostlistError> {
        Self::parse_up_to(text, MAX_NODES)
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Names(names) => f.write_str(&fold(&names.iter().cloned().collect::<Vec<_>>())),
            Self::Pool(pool) => write!(f, "pool={pool}"),
            Self::State(state) => write!(f, "state={state}"),
            Self::Pattern(pattern) => f.write_str(pattern),
        }
    }
}

/// Matches `*` as any number of characters. Linear in the text for each star: it backtracks over the last star only.
fn glob(pattern: &[u8], text: &[u8]) -> bool {
    let (mut p, mut t, mut star, mut mark) = (0, 0, None, 0);
    while t < text.len() {
        if p < pattern.len() && pattern[p] == b'*' {
            star = Some(p);
            mark = t;
            p += 1;
        } else if p < pattern.len() && pattern[p] == text[t] {
            p += 1;
            t += 1;
        } else if let Some(s) = star {
            p = s + 1;
            mark += 1;
            t = mark;
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|&b| b == b'*')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn names(text: &str) -> Vec<String> {
        parse(text).unwrap().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn lists_expand_as_slurm_expands_them() {
        assert_eq!(names("n1"), ["n1"]);
        assert_eq!(names("n[08-10]"), ["n08", "n09", "n10"]);
        assert_eq!(names("n[1,3-4]-ib, x2"), ["n1-ib", "n3-ib", "n4-ib", "x2"]);
        assert_eq!(names("r[1-2]n[1-2]"), ["r1n1", "r1n2", "r2n1", "r2n2"]);
        assert_eq!(names("a,a b"), ["a", "b"]);
        assert_eq!(parse("node[0201-0272,0281-0932]").unwrap().len(), 724);
    }

    #[test]
    fn an_invalid_list_is_rejected_with_the_accepted_form() {
        for (text, part) in [
            ("n[1-", "bracket"),
            ("n]1[", "bracket"),
            ("n[[1]]", "bracket"),
            ("n[3-1]", "smaller number first"),
            ("n[a-b]", "not a range"),
            ("n[]", "not a range"),
            ("n[0-999999999]", "more than"),
            ("n[0-9999]x[0-9999]", "more than"),
            ("n[0-59999],n[0-59999]", "more than"),
            ("", "no node"),
            ("../etc", "is not a node name"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn a_list_longer_than_the_limit_is_rejected() {
        for (text, most, fits) in [
            ("n[1-32]", 32, true),
            ("n[1-33]", 32, false),
            ("n[1-16],m[1-16]", 32, true),
            ("n[1-16],m[1-17]", 32, false),
            ("r[1-8]n[1-5]", 32, false),
            ("n[1-20,30-49]", 32, false),
        ] {
            let parsed = parse_up_to(text, most);
            assert_eq!(parsed.is_ok(), fits, "{text}: {parsed:?}");
            assert!(fits || parsed == Err(HostlistError::TooMany(most)), "{text}: {parsed:?}");
        }
    }

    #[test]
    fn many_names_match_many_nodes_and_too_many_are_rejected() {
        let many: Selector = "n[00000-99999]".parse().unwrap();
        assert_eq!(many.name_count(), 100_000);
        // Compared name by name, that would be ten thousand million comparisons.
        let there = (0..100_000).filter(|n| many.matches_name(&NodeName::new(&format!("n{n:05}")).unwrap()));
        assert_eq!(there.count(), 100_000);
        assert_eq!(Selector::parse_up_to("n[1-11]", 10), Err(HostlistError::TooMany(10)));
        assert!(Selector::parse_up_to("n*", 0).is_ok_and(|all| all.name_count() == 0));
    }

    #[test]
    fn selectors_match_the_expected_nodes() {
        let (name, pool) = (NodeName::new("gpu-017").unwrap(), PoolName::new("a").unwrap());
        for (text, matches) in [
            ("gpu-*", true),
            ("*17", true),
            ("*-0*7", true),
            ("cpu-*", false),
            ("pool=a", true),
            ("pool=b", false),
            ("state=suspect", true),
            ("state=out", false),
            ("gpu-[016-017]", true),
        ] {
            assert_eq!(text.parse::<Selector>().unwrap().matches(&name, &pool, "suspect"), matches, "{text}");
        }
        assert!("state=dead".parse::<Selector>().unwrap_err().to_string().contains("quarantined"));
        assert!("rack=3".parse::<Selector>().unwrap_err().to_string().contains("pool=NAME"));
    }

    proptest! {
        #[test]
        fn folding_and_expanding_gives_the_same_nodes(
            set in prop::collection::btree_set(("[a-c]{1,2}", prop::option::of(0..120_u32), 1..4_usize), 1..40)
        ) {
            let mut names: Vec<NodeName> = set
                .iter()
                .map(|(stem, number, width)| {
                    let number = number.map_or_else(String::new, |number| format!("{number:0width$}"));
                    NodeName::new(&format!("{stem}{number}")).unwrap()
                })
                .collect();
            let folded = fold(&names);
            let mut expanded = parse(&folded).unwrap();
            names.sort();
            names.dedup();
            expanded.sort();
            prop_assert_eq!(names, expanded);
        }

        #[test]
        fn no_input_makes_the_parser_panic_or_hang(text in ".{0,200}") {
            let _ = parse(&text);
            let _ = text.parse::<Selector>();
        }
    }
}
