//! Configuration files: `doctor.toml`, `agent.toml`, an agent's credential, a simulated world.
//!
//! An error points to a line that exists in the text, and never shows a key. Accepted values are within their limits.

#![no_main]

use std::{path::Path, sync::LazyLock};

use doctor_checks::credential::Credential;
use doctor_core::toml_text::{self, TomlError};
use doctor_fuzz::{pick, round_trip, text};
use doctor_node::agent::{config::AgentSettings, http::Address};
use doctor_sim::{ServeConfig, fuzz_targets};
use libfuzzer_sys::fuzz_target;

/// `doctor` has no library, so the same source file is compiled here.
#[expect(dead_code, reason = "only the parser is used here")]
#[path = "../../crates/doctor/src/config/file.rs"]
mod file;

#[expect(dead_code, reason = "no cluster is opened here")]
#[path = "../../crates/doctor/src/backends.rs"]
mod backends;

fn default_text() -> &'static str {
    static TEXT: LazyLock<String> =
        LazyLock::new(|| backends::default_text(include_str!("../../crates/doctor/src/config/default.toml")));
    &TEXT
}

const PARSERS: &[fn(&str)] = &[service, agent, credential, world, address];

fn placed(text: &str, error: &TomlError) {
    assert!(error.line().is_none_or(|line| (1..=text.lines().count().max(1) + 1).contains(&line)));
    assert!(!error.to_string().is_empty());
}

fn service(text: &str) {
    match file::Config::parse(text, Path::new("/etc/cluster-doctor")) {
        Ok(config) => {
            assert!(config.lease > config.cycle && (1..=256).contains(&config.workers));
            // `doctor config show` prints it.
            toml::to_string(&config).expect("a configuration that was read can be shown");
        }
        Err(error) => placed(text, &error),
    }
}

fn agent(text: &str) {
    if let Err(error) = toml_text::read::<AgentSettings>(text, &[]) {
        placed(text, &error);
    }
}

fn credential(text: &str) {
    match Credential::read(text) {
        Ok(credential) => assert_eq!(Credential::read(&credential.text()), Ok(credential)),
        // Nothing of the text is quoted, because it may be the key.
        Err(error) => assert!(error.to_string().len() < 120, "{error}"),
    }
}

fn world(text: &str) {
    match toml_text::read::<ServeConfig>(text, &[]) {
        Ok(config) => {
            if fuzz_targets::check(&config.world).is_ok() {
                let nodes: u64 = config.world.pools.iter().map(|pool| u64::from(pool.nodes)).sum();
                assert!((1..=1_000_000).contains(&nodes));
            }
        }
        Err(error) => placed(text, &error),
    }
}

fn address(text: &str) {
    if round_trip::<Address>(text).is_some() {
        assert!(!text.contains(['\r', '\n', ' ']), "it would end a line of the request");
    }
}

fuzz_target!(|data: &[u8]| {
    if let Some((read, rest)) = pick(PARSERS, data) {
        read(&text(rest));
    }
});
