//! The reason that Slurm shows for a node that we drained.

use doctor_backend::ChangeReason;
use doctor_core::ids::CaseId;

use super::config::SlurmConfig;

/// Longer reasons are truncated: operators read them in a column.
const MAX_REASON_CHARS: usize = 240;

/// Formats `doctor: code text [case]`.
pub(super) fn drain_reason(case: Option<CaseId>, ground: Option<&ChangeReason>, config: &SlurmConfig) -> String {
    let words = match ground {
        Some(ChangeReason { code, text, .. }) if text.is_empty() => code.clone(),
        Some(ChangeReason { code, text, .. }) => format!("{code} {text}"),
        None => "unhealthy".to_owned(),
    };
    // Slurm prints the reason in one line, and strips quotes at its ends.
    let plain: String = words
        .chars()
        .map(|c| {
            if c.is_control() {
                ' '
            } else if c == '"' {
                '\''
            } else {
                c
            }
        })
        .collect();
    let short: String = plain.trim().chars().take(MAX_REASON_CHARS).collect();
    let case = case.or_else(|| ground.and_then(|ground| ground.case));
    let case = case.map_or_else(String::new, |case| format!(" [{case}]"));
    format!("{} {short}{case}", config.prefix)
}

/// Parses `doctor: code text [CASE]`, even if Slurm has appended text.
pub(super) fn case_in(reason: &str) -> Option<CaseId> {
    reason.rmatch_indices('[').find_map(|(at, _)| reason[at + 1..].split(']').next()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use doctor_core::ids::IdSource;

    #[test]
    fn the_reason_says_what_was_found_in_one_line() {
        let mut ids = IdSource::new(9);
        let ground =
            ChangeReason { case: Some(ids.case()), code: "xid-79".to_owned(), text: "GPU \"3\"\nfell off".to_owned() };
        let config = SlurmConfig::default();
        let words = drain_reason(None, Some(&ground), &config);
        assert_eq!(words, format!("doctor: xid-79 GPU '3' fell off [{}]", ground.case.unwrap()));
        assert_eq!(case_in(&words), ground.case);
        let long = ChangeReason { text: "x".repeat(5000), ..ground };
        assert!(drain_reason(None, Some(&long), &config).len() < 300);
    }
}
