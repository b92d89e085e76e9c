//! Finds names that resemble a mistyped one.

use strsim::damerau_levenshtein;

use crate::hostlist;

/// How many names are suggested at most: more would be a list, not a suggestion.
const MOST: usize = 5;
/// A shorter word begins or is contained in too many names.
const LEAST_PART: usize = 3;
/// What lists without a name say.
const NONE: &str = "none";
/// The longest host list that is searched.
const MAX_NAMES: usize = 10_000;

/// Returns the names that a mistyped word may mean, in alphabetical order. Case does not count.
pub fn near<'a>(word: &str, names: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let word = word.to_lowercase();
    let mut found: Vec<(usize, &str)> =
        names.into_iter().filter_map(|name| Some((difference(&word, name)?, name))).collect();
    found.sort_unstable();
    found.dedup_by_key(|(_, name)| *name);
    // What is less similar than the best is not what was meant.
    let best = found.first().map(|(rank, _)| *rank);
    found.retain(|(rank, _)| Some(*rank) == best);
    found.into_iter().take(MOST).map(|(_, name)| name).collect()
}

/// Returns how much a name differs from a word in lower case. `None`: too much to be what was meant.
fn difference(word: &str, name: &str) -> Option<usize> {
    let name = name.to_lowercase();
    let letters = word.chars().count();
    // One letter of four may be wrong, and one of a shorter word: names that end in numbers resemble each other.
    let wrong = damerau_levenshtein(word, &name);
    if wrong <= (letters / 4).max(1) && wrong < letters {
        return Some(wrong);
    }
    let is_part = letters >= LEAST_PART && name.contains(word);
    // A part ranks behind a slip of the finger, and one at the beginning before one elsewhere.
    is_part.then(|| letters + usize::from(!name.starts_with(word)))
}

/// Returns the names of a printed list that a mistyped word may mean: names separated by commas, of which some may be host
/// lists such as `node[001-024]`.
pub fn near_in_list(word: &str, list: &str) -> Vec<String> {
    let names: Vec<String> = parts(list).into_iter().flat_map(expand).collect();
    near(word, names.iter().map(String::as_str)).into_iter().map(str::to_owned).collect()
}

/// Splits at commas that are not in brackets. Prose is left out, apart from the name before "and 34 more".
fn parts(list: &str) -> Vec<&str> {
    let mut depth = 0_usize;
    let split = |c: char| {
        match c {
            '[' => depth += 1,
            ']' => depth = depth.saturating_sub(1),
            _ => {}
        }
        depth == 0 && matches!(c, ',' | ';')
    };
    let is_prose = |part: &&str| part.split_whitespace().nth(1).is_some_and(|second| second != "and");
    list.split(split)
        .filter(|part| !is_prose(part))
        .filter_map(|part| part.split_whitespace().next())
        .filter(|name| *name != NONE)
        .collect()
}

fn expand(part: &str) -> Vec<String> {
    if !part.contains('[') {
        return vec![part.trim_matches('`').to_owned()];
    }
    let names = hostlist::parse_up_to(part, MAX_NAMES).unwrap_or_default();
    names.into_iter().map(|name| name.to_string()).collect()
}

/// Returns a question such as "did you mean a, b or c?". `None` if there is nothing to suggest.
pub fn question(names: &[impl AsRef<str>]) -> Option<String> {
    let (last, others) = names.split_last()?;
    let others: Vec<&str> = others.iter().map(AsRef::as_ref).collect();
    let separator = if others.is_empty() { "" } else { " or " };
    Some(format!("did you mean {}{separator}{}?", others.join(", "), last.as_ref()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: [&str; 6] = ["disk-space", "disk-full", "memory", "gpu-xid", "nccl", "dl"];

    #[test]
    fn a_slip_of_the_finger_is_recognised() {
        for (word, expected) in [
            ("disk-spcae", "disk-space"),
            ("Disk-Space", "disk-space"),
            ("memroy", "memory"),
            ("ncl", "nccl"),
            ("gpuxid", "gpu-xid"),
            ("dk", "dl"),
        ] {
            assert_eq!(near(word, NAMES).first(), Some(&expected), "{word}");
        }
        assert_eq!(near("disk", NAMES), ["disk-full", "disk-space"], "a part of both");
        for word in ["spoon", "x", "", "zzzzzzzz"] {
            assert!(near(word, NAMES).is_empty(), "{word}: {:?}", near(word, NAMES));
        }
    }

    #[test]
    fn the_names_of_host_lists_are_searched_and_few_are_suggested() {
        assert_eq!(near_in_list("node01", "node[001-003],other[1-2]"), ["node001"]);
        assert_eq!(near_in_list("r01", "r01-n[1-9], r02-n1 and 34 more").len(), MOST);
        assert_eq!(near_in_list("nodes", "none; the controller has not observed the cluster yet"), ["none"; 0]);
        assert_eq!(near_in_list("opps", "ops, backup"), ["ops"]);
        assert!(near_in_list("many", "0 to 132; any other is classified").is_empty(), "prose has no names");
        // A list that cannot be read suggests nothing.
        assert!(near_in_list("node1", "node[1-").is_empty());
    }

    #[test]
    fn the_question_names_all_of_them() {
        assert_eq!(question(&["a"]).unwrap(), "did you mean a?");
        assert_eq!(question(&["a", "b", "c"]).unwrap(), "did you mean a, b or c?");
        assert_eq!(question(&[""; 0]), None);
    }
}
