//! Policy files, which operators write by hand.
//!
//! The text is parsed as a site's file over the defaults. An error points to a line that exists in the text. An
//! accepted policy must survive being written and parsed again, because verdicts are replayed from stored policies, and
//! its windows must be decidable for any time.

#![no_main]

use doctor_core::{policy::Policy, time::Timestamp};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let policy = match Policy::with_site_settings(text) {
        Ok(policy) => policy,
        Err(error) => {
            assert!(error.line().is_none_or(|line| (1..=text.lines().count().max(1) + 1).contains(&line)));
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    for window in &policy.windows {
        for moment in [Timestamp::MIN, Timestamp::from_secs(0), Timestamp::MAX] {
            let _ = window.contains(moment);
        }
    }
    let written = toml::to_string(&policy).expect("a policy that was read can be written");
    let again = Policy::with_site_settings(&written).unwrap_or_else(|error| panic!("{error}\n{written}"));
    // Compared as text: a rule's limit may be NaN, which is not equal to itself.
    assert_eq!(toml::to_string(&again).expect("as before"), written);
});
