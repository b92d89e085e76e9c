//! The default rules of a check, parsed on demand from the text in its file.
//!
//! Parsing those of all checks takes two milliseconds. A table of errors has two hundred rules about events, and
//! usually none of the events occurred; rules that cannot match are therefore not deserialised.

use doctor_core::{observation::Event, policy::Rule};
use serde::{Deserialize as _, de::Error as _};
use toml::de::{DeTable, DeValue, Error, ValueDeserializer};

use crate::spec::Check;

/// Returns every rule of the check.
pub(crate) fn all_rules(check: &Check) -> Result<Vec<Rule>, Error> {
    parse_rules(check.rules, |_| true)
}

/// Returns the rules about metrics, and those that can match these events.
pub(crate) fn rules_for_events(check: &Check, events: &[Event]) -> Result<Vec<Rule>, Error> {
    // The first rule about events is always kept: it shows that the check's events have rules even if none occurred.
    let mut any = false;
    parse_rules(check.rules, |code| {
        code.is_none_or(|code| {
            !std::mem::replace(&mut any, true) || events.iter().any(|event| event.code.as_str() == code)
        })
    })
}

/// Parses the rules for which `is_selected` returns true, given the rule's event code.
fn parse_rules(text: &str, mut is_selected: impl FnMut(Option<&str>) -> bool) -> Result<Vec<Rule>, Error> {
    let Some(rules) = DeTable::parse(text)?.into_inner().remove("rules") else { return Ok(Vec::new()) };
    let DeValue::Array(rules) = rules.into_inner() else { return Err(Error::custom("`rules` is not a list")) };
    let mut read = Vec::new();
    for rule in rules {
        let event = rule.get_ref().as_table().and_then(|rule| rule.get("event"));
        if is_selected(event.and_then(|code| code.get_ref().as_str())) {
            read.push(Rule::deserialize(ValueDeserializer::from(rule))?);
        }
    }
    Ok(read)
}

#[cfg(test)]
mod tests {
    use super::*;
    use doctor_core::{observation::Entity, policy::When};

    #[test]
    fn only_event_rules_for_present_events_are_parsed() {
        let check = crate::CHECKS.iter().find(|check| check.spec.id == "gpu-xid").unwrap();
        let all = all_rules(check).unwrap();
        let event = Event::seen("xid-79", Entity::node(), "fell off the bus");
        for events in [vec![], vec![event]] {
            let read = rules_for_events(check, &events).unwrap();
            assert!(!read.is_empty() && read.len() < all.len() / 10, "{} of {}", read.len(), all.len());
            let says = |rule: &&Rule| matches!(&rule.when, When::Event(code) if events.iter().any(|event| event.code == *code));
            let expected: Vec<&Rule> = all.iter().filter(says).collect();
            assert!(expected.iter().all(|rule| read.contains(rule)) && expected.len() == events.len());
        }
    }

    #[test]
    fn rules_are_parsed_like_those_of_a_policy_file() {
        #[derive(serde::Deserialize)]
        struct Written {
            rules: Vec<Rule>,
        }
        for check in crate::CHECKS {
            let written: Written = toml::from_str(check.rules).unwrap();
            assert_eq!(all_rules(check).unwrap(), written.rules, "{}", check.spec.id);
        }
        let with = |rules| Check { rules, ..crate::CHECKS[0] };
        assert_eq!(all_rules(&with("")).unwrap(), []);
        for bad in ["rules = 1", "rules = [1]", "rules = [{ id = \"a\" }]", "rules = ["] {
            assert!(all_rules(&with(bad)).is_err(), "{bad}");
        }
    }
}
