//! Plays every script under `scenarios/` and compares its output with the reviewed one beside it.
//!
//! `UPDATE_SCENARIOS=1 cargo test -p doctor-sim --test scenarios` rewrites the outputs; review the diff.

use std::{fs, path::Path};

#[test]
fn scenario_output_matches_the_reviewed_files() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scenarios");
    let update = std::env::var_os("UPDATE_SCENARIOS").is_some();
    let mut scripts: Vec<_> = fs::read_dir(&dir)
        .expect("the scenarios are part of the repository")
        .map(|entry| entry.expect("a readable directory").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "txt"))
        .collect();
    scripts.sort();
    let mut wrong = Vec::new();
    for script in &scripts {
        let text = fs::read_to_string(script).expect("a readable script");
        let played = match doctor_sim::harness::scenario::play(&text) {
            Ok(played) => played,
            Err(error) => {
                wrong.push(format!("{}: {error}", script.display()));
                continue;
            }
        };
        let reviewed_path = script.with_extension("out");
        let reviewed = fs::read_to_string(&reviewed_path).unwrap_or_default();
        if played != reviewed {
            if update {
                fs::write(&reviewed_path, &played).expect("a writable directory");
            } else {
                let at = played.lines().zip(reviewed.lines()).position(|(a, b)| a != b);
                let line = at.unwrap_or_else(|| played.lines().count().min(reviewed.lines().count()));
                wrong.push(format!(
                    "{}: line {}:\n  played:   {}\n  reviewed: {}",
                    script.display(),
                    line + 1,
                    played.lines().nth(line).unwrap_or("(end)"),
                    reviewed.lines().nth(line).unwrap_or("(end)"),
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(scripts.len() >= 25, "only {} scenarios were found", scripts.len());
    println!("{} scenarios played", scripts.len());
}
