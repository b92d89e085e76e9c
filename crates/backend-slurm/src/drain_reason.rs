//! The reason that Slurm shows for a node that we drained.

use doctor_backend::ChangeReason;
use doctor_core::ids::CaseId;

use super::config::SlurmConfig;

/// Longer reasons are truncated: operators read them in a column.
const MAX_REASON_CHARS: usize = 240;

/// Formats `doctor: code text [case]`.
pub(super) fn drain_reason(case: Option<CaseId>, reason: Option<&ChangeReason>, config: &SlurmConfig) -> String {
    let summary = match reason {
        Some(ChangeReason { code, text, .. }) if text.is_empty() => code.clone(),
        Some(ChangeReason { code, text, .. }) => format!("{code} {text}"),
        None => "unhealthy".to_owned(),
    };
    // Slurm prints the reason in one line, and strips quotes at its ends.
    let plain: String = summary
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
    let case = case.or_else(|| reason.and_then(|reason| reason.case));
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
    fn the_drain_reason_is_one_line_with_code_text_and_case() {
        let mut ids = IdSource::new(9);
        let reason =
            ChangeReason { case: Some(ids.case()), code: "xid-79".to_owned(), text: "GPU \"3\"\nfell off".to_owned() };
        let config = SlurmConfig::default();
        let text = drain_reason(None, Some(&reason), &config);
        assert_eq!(text, format!("doctor: xid-79 GPU '3' fell off [{}]", reason.case.unwrap()));
        assert_eq!(case_in(&text), reason.case);
        let long = ChangeReason { text: "x".repeat(5000), ..reason };
        assert!(drain_reason(None, Some(&long), &config).len() < 300);
    }
}
