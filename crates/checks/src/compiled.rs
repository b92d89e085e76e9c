//! The rules and machine types that are built in, once more, in a form that is read ten times as fast.
//!
//! People read and change the rules in each check's own file and the machine types in `profiles/*.toml`. A hook that runs
//! before every job would spend a third of its time on parsing them, so `make docs` writes them down as JSON too. Each
//! stands beside a fingerprint of the text that it was made from: what has changed since is read from its text, so that
//! both never say different things, and a test asks for `make docs`. Nobody edits what is in `compiled/`.

use std::collections::BTreeMap;

use doctor_core::{policy::Rule, profile::ProfileFile};
use serde::de::DeserializeOwned;

use crate::{
    Catalogue, Check,
    profiles::{self, BUILT_IN},
    spec::rules_as_written,
};

/// For each check a line: its id, the fingerprint of its text, its rules. Separated by tabs.
const RULES: &str = include_str!("compiled/rules.txt");
/// One line: the fingerprint of all files of `profiles/`, and what they say.
const PROFILES: &str = include_str!("compiled/profiles.txt");

/// Compiled rules by check, not yet read.
#[derive(Debug)]
pub(crate) struct CompiledRules(BTreeMap<&'static str, &'static str>);

impl CompiledRules {
    pub(crate) fn new() -> Self {
        Self(RULES.lines().filter_map(|line| line.split_once('\t')).collect())
    }

    /// The rules that a check brings along. `None`: nobody has compiled this text.
    pub(crate) fn of(&self, check: &Check) -> Option<Vec<Rule>> {
        read(self.0.get(check.spec.id)?, fingerprint([check.rules]))
    }
}

/// The built-in machine types, as their files say them. `None`: nobody has compiled these texts.
pub(crate) fn profiles() -> Option<Vec<ProfileFile>> {
    read(PROFILES, fingerprint(BUILT_IN.iter().map(|(_, text)| *text)))
}

fn read<T: DeserializeOwned>(line: &str, fingerprint: u64) -> Option<T> {
    let (made_from, json) = line.split_once('\t')?;
    let is_this = u64::from_str_radix(made_from, 16) == Ok(fingerprint);
    is_this.then(|| serde_json::from_str(json).ok()).flatten()
}

/// FNV-1a: the texts are our own, and nobody makes two of the same number on purpose.
fn fingerprint<'a>(texts: impl IntoIterator<Item = &'a str>) -> u64 {
    let bytes = texts.into_iter().flat_map(str::bytes);
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// What the files of `compiled/` should hold, by name.
///
/// # Panics
/// If what is written in a check or a profile does not parse; tests read them all.
pub fn files() -> [(&'static str, String); 2] {
    let json = |rules: &[Rule]| serde_json::to_string(rules).expect("rules are plain data");
    let line = |check: &Check| {
        let own = rules_as_written(check).expect("the checks' own rules are tested");
        format!("{}\t{:016x}\t{}\n", check.spec.id, fingerprint([check.rules]), json(&own))
    };
    let rules = Catalogue::built_in().iter().map(line).collect();
    let made_from = fingerprint(BUILT_IN.iter().map(|(_, text)| *text));
    let profiles = serde_json::to_string(&profiles::as_written()).expect("profiles are plain data");
    [("rules.txt", rules), ("profiles.txt", format!("{made_from:016x}\t{profiles}\n"))]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_compiled_is_what_is_written() {
        let compiled = CompiledRules::new();
        for check in crate::CHECKS {
            let written = rules_as_written(check).unwrap();
            assert_eq!(compiled.of(check), Some(written), "{}: run `make docs`", check.spec.id);
        }
        assert_eq!(profiles(), Some(profiles::as_written()), "run `make docs`");
        for ((name, text), committed) in files().iter().zip([RULES, PROFILES]) {
            assert!(text == committed, "{name} is not what the code would write: run `make docs`");
        }
    }

    #[test]
    fn rules_that_have_changed_since_are_read_from_their_text() {
        let changed = Check { rules: "rules = []", ..crate::CHECKS[0] };
        assert_eq!(CompiledRules::new().of(&changed), None);
        assert_eq!(rules_as_written(&changed).unwrap(), []);
    }
}
