//! The rules and machine types that are built in, once more, in a form that is read ten times as fast.
//!
//! People read and change the rules in each check's own file and the machine types in `profiles/*.toml`. A hook that runs
//! before every job would spend a third of its time on parsing them, so `make docs` writes them down as JSON too. Each
//! stands beside a fingerprint of the text that it was made from: what has changed since is read from its text, so that
//! both never say different things, and a test asks for `make docs`. Nobody edits what is in `compiled/`.

use std::collections::BTreeMap;

use doctor_core::{
    ids::Sku,
    observation::Event,
    policy::{Rule, When},
    profile::ProfileFile,
};

use crate::{
    Catalogue, Check,
    profiles::{self, BUILT_IN},
    spec::rules_as_written,
};

/// For each check a line: its id, the fingerprint of its text, and its rules, each after the code of the event that it is
/// about, or nothing. Separated by tabs.
const RULES: &str = include_str!("compiled/rules.txt");
/// For each machine type a line: its name, the fingerprint of its text, what it says.
const PROFILES: &str = include_str!("compiled/profiles.txt");

/// A name, and the rest of its line.
type Lines = BTreeMap<&'static str, &'static str>;

fn lines(text: &'static str) -> Lines {
    text.lines().filter_map(|line| line.split_once('\t')).collect()
}

/// What stands after the fingerprint, where that is of this text.
fn made_from<'a>(line: &'a str, text: &str) -> Option<&'a str> {
    let (made_from, rest) = line.split_once('\t')?;
    (u64::from_str_radix(made_from, 16) == Ok(fingerprint(text))).then_some(rest)
}

/// Compiled rules by check, not yet read.
#[derive(Debug)]
pub(crate) struct CompiledRules(Lines);

impl CompiledRules {
    pub(crate) fn new() -> Self {
        Self(lines(RULES))
    }

    /// The rules that a check brings along. `None`: nobody has compiled this text.
    pub(crate) fn of(&self, check: &Check) -> Option<Vec<Rule>> {
        self.read(check, |_| true)
    }

    /// Those of them that can say anything about these events, and all about numbers. A kernel log may tell of two hundred
    /// kinds of trouble, and on a good day of none.
    pub(crate) fn about(&self, check: &Check, events: &[Event]) -> Option<Vec<Rule>> {
        // One rule about events tells that they are judged at all, also where none was seen.
        let mut any = false;
        self.read(check, |code| {
            code.is_empty()
                || !std::mem::replace(&mut any, true)
                || events.iter().any(|event| event.code.as_str() == code)
        })
    }

    fn read(&self, check: &Check, mut wanted: impl FnMut(&str) -> bool) -> Option<Vec<Rule>> {
        let written = made_from(self.0.get(check.spec.id)?, check.rules)?;
        let mut fields = written.split('\t').filter(|_| !written.is_empty());
        let mut rules = Vec::new();
        while let Some(code) = fields.next() {
            // Half a rule is no rule: then nobody has compiled this.
            let json = fields.next()?;
            if wanted(code) {
                rules.push(serde_json::from_str(json).ok()?);
            }
        }
        Some(rules)
    }
}

/// The built-in machine types, as their files say them. `None`: nobody has compiled these texts.
pub(crate) fn profiles() -> Option<Vec<ProfileFile>> {
    let lines = lines(PROFILES);
    BUILT_IN.iter().map(|built_in| profile(&lines, built_in)).collect()
}

/// This machine type and those that it builds on, these first. Empty: it is not built in. `None`: nobody has compiled it.
pub(crate) fn profiles_for(sku: &Sku) -> Option<Vec<ProfileFile>> {
    let (lines, mut found) = (lines(PROFILES), Vec::new());
    let mut wanted = Some(sku.clone());
    while let Some(sku) = wanted.take() {
        let Some(built_in) = BUILT_IN.iter().find(|(name, _)| *name == sku.as_str()) else { break };
        let file = profile(&lines, built_in)?;
        wanted.clone_from(&file.like);
        found.insert(0, file);
    }
    Some(found)
}

fn profile(lines: &Lines, (name, text): &(&str, &str)) -> Option<ProfileFile> {
    serde_json::from_str(made_from(lines.get(name)?, text)?).ok()
}

/// FNV-1a: the texts are our own, and nobody makes two of the same number on purpose.
fn fingerprint(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// What the files of `compiled/` should hold, by name.
///
/// # Panics
/// If what is written in a check or a profile does not parse; tests read them all.
pub fn files() -> [(&'static str, String); 2] {
    let line = |name: &str, text: &str, rest: String| format!("{name}\t{:016x}\t{rest}\n", fingerprint(text));
    let rule = |rule: &Rule| {
        let code = match &rule.when {
            When::Event(code) | When::EventsWithin { code, .. } => code.as_str(),
            _ => "",
        };
        format!("{code}\t{}", serde_json::to_string(rule).expect("rules are plain data"))
    };
    let rules = |check: &Check| {
        let own = rules_as_written(check).expect("the checks' own rules are tested");
        line(check.spec.id, check.rules, own.iter().map(rule).collect::<Vec<_>>().join("\t"))
    };
    let profile = |((name, text), file): (&(&str, &str), ProfileFile)| {
        line(name, text, serde_json::to_string(&file).expect("profiles are plain data"))
    };
    [
        ("rules.txt", Catalogue::built_in().iter().map(rules).collect()),
        ("profiles.txt", BUILT_IN.iter().zip(profiles::as_written()).map(profile).collect()),
    ]
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
    fn of_rules_about_events_only_those_are_read_that_can_say_something() {
        let (compiled, check) =
            (CompiledRules::new(), crate::CHECKS.iter().find(|check| check.spec.id == "gpu-xid").unwrap());
        let all = compiled.of(check).unwrap();
        let event = Event::seen("xid-79", doctor_core::observation::Entity::node(), "fell off the bus");
        for events in [vec![], vec![event]] {
            let read = compiled.about(check, &events).unwrap();
            assert!(!read.is_empty() && read.len() < all.len() / 10, "{} of {}", read.len(), all.len());
            let says = |rule: &&Rule| matches!(&rule.when, When::Event(code) if events.iter().any(|event| event.code == *code));
            let wanted: Vec<&Rule> = all.iter().filter(says).collect();
            assert!(wanted.iter().all(|rule| read.contains(rule)) && wanted.len() == events.len());
        }
    }

    #[test]
    fn a_machine_type_is_read_with_those_that_it_builds_on() {
        for file in profiles::as_written() {
            let alone = profiles::built_in_like(&file.sku);
            assert_eq!(alone.get(&file.sku), profiles::built_in().get(&file.sku), "{}", file.sku);
        }
        assert_eq!(profiles_for(&Sku::new("nobody-knows-it").unwrap()), Some(Vec::new()));
    }

    #[test]
    fn rules_that_have_changed_since_are_read_from_their_text() {
        let changed = Check { rules: "rules = []", ..crate::CHECKS[0] };
        assert_eq!(CompiledRules::new().of(&changed), None);
        assert_eq!(rules_as_written(&changed).unwrap(), []);
    }
}
