//! Compares the hand-written guide with the code that it quotes.

use doctor_core::{
    finding::{Severity, Verdict},
    hostlist::NODE_STATES,
    policy::{Mode, Policy},
    profile::ProfileFile,
    run::{IncompleteReason, NotStartedReason},
};

const POLICY: &str = include_str!("../../../docs/guide/policy-and-rules.md");
const LIFE: &str = include_str!("../../../docs/guide/life-of-a-node.md");
const PLANNING: &str = include_str!("../../../docs/guide/planning.md");
const PROFILES: &str = include_str!("../../../docs/guide/profiles.md");
const CONFIGURATION: &str = include_str!("../../../docs/guide/configuration.md");

/// Returns the texts between "```toml" and "```".
fn toml_blocks(page: &str) -> Vec<&str> {
    page.split("```toml\n").skip(1).map(|rest| rest.split("```").next().unwrap_or_default()).collect()
}

#[test]
fn every_policy_excerpt_in_the_guide_is_accepted() {
    let commands = toml_blocks(CONFIGURATION).into_iter().filter(|text| text.contains("[tests."));
    let all: Vec<&str> = toml_blocks(POLICY).into_iter().chain(commands).collect();
    assert!(all.len() >= 3, "the guide has examples");
    for text in all {
        if let Err(error) = Policy::with_site_settings(text) {
            panic!("{error}\nin\n{text}");
        }
    }
}

#[test]
fn every_profile_in_the_guide_is_accepted() {
    let all = [PROFILES, CONFIGURATION].into_iter().flat_map(toml_blocks).filter(|text| text.contains("[expect]"));
    let all: Vec<&str> = all.collect();
    assert!(all.len() >= 2, "the guide has examples");
    for text in all {
        if let Err(error) = ProfileFile::read(text) {
            panic!("{error}\nin\n{text}");
        }
    }
}

#[test]
fn the_guide_explains_every_state_mode_verdict_and_severity() {
    let explains = |page: &str, codes: &[&str]| {
        for code in codes {
            assert!(page.contains(&format!("`{code}`")), "`{code}` is not in the guide");
        }
    };
    explains(LIFE, &NODE_STATES);
    explains(LIFE, &Mode::ALL.iter().map(|mode| mode.code()).collect::<Vec<_>>());
    explains(POLICY, &Verdict::ALL.iter().map(|verdict| verdict.code()).collect::<Vec<_>>());
    explains(POLICY, &Severity::ALL.iter().map(|severity| severity.code()).collect::<Vec<_>>());
    explains(PLANNING, &IncompleteReason::ALL.iter().map(|why| why.code()).collect::<Vec<_>>());
    explains(PLANNING, &NotStartedReason::ALL.iter().map(|why| why.code()).collect::<Vec<_>>());
}

#[test]
fn the_limits_in_the_guide_are_the_defaults() {
    let policy = Policy::built_in();
    let row = |key: &str, value: String| {
        let line = PLANNING.lines().find(|line| line.starts_with(&format!("| `{key}` |")));
        let line = line.unwrap_or_else(|| panic!("`{key}` is not in the table"));
        assert!(line.starts_with(&format!("| `{key}` | {value} |")), "{line}");
    };
    row("limits.jobs", policy.limits.jobs.to_string());
    row("limits.renew_ahead", policy.limits.renew_ahead.to_string());
    row("limits.per_share", policy.limits.per_share.to_string());
    row("limits.node_hours_per_day", policy.limits.node_hours_per_day.map_or("none".into(), |hours| hours.to_string()));
}
