//! The last output of a job that ended without a complete result, and the line of it that a person is shown.
//!
//! The text comes from a node and is not trusted: whoever stores it has removed secrets and control characters and cut it.

use serde::{Deserialize, Serialize};

use crate::ids::NodeName;

/// The number of bytes kept of a job's output on one node, from its end.
pub const MAX_BYTES: usize = 8 * 1024;

/// The parts of a longer line that are quoted, in characters: a chain of errors begins with what failed and ends with why.
const QUOTED_START: usize = 80;
const QUOTED_END: usize = 160;

/// What is left of a job on one node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastOutput {
    pub node: NodeName,
    /// How it ended, in the cluster's words: `FAILED, exit code 127`, `OOMKilled`.
    pub ending: Option<String>,
    /// The end of what the job printed. Empty: it printed nothing, or the output is gone.
    pub text: String,
}

impl LastOutput {
    /// Returns the last line that says something, followed by how the job ended. `None`: there is neither.
    pub fn quote(&self) -> Option<String> {
        let ending = self.ending.as_deref().and_then(last_line);
        match (last_line(&self.text), ending) {
            (Some(line), Some(ending)) => Some(format!("{line} ({ending})")),
            (line, ending) => line.or(ending),
        }
    }
}

/// Returns the last line with a letter or a digit, without the blanks around it. The middle of a long one is left out.
pub fn last_line(text: &str) -> Option<String> {
    let line = text.lines().rev().map(str::trim).find(|line| line.contains(char::is_alphanumeric))?;
    let length = line.chars().count();
    if length <= QUOTED_START + QUOTED_END {
        return Some(line.to_owned());
    }
    let start = line.chars().take(QUOTED_START);
    Some(start.chain(['…']).chain(line.chars().skip(length - QUOTED_END)).collect())
}

/// Returns at most the last `most` bytes, from the start of a line if there is one.
pub fn end_of(text: &str, most: usize) -> &str {
    if text.len() <= most {
        return text;
    }
    let mut start = text.len() - most;
    while !text.is_char_boundary(start) {
        start += 1;
    }
    let end = &text[start..];
    end.find('\n').map(|newline| &end[newline + 1..]).filter(|rest| !rest.is_empty()).unwrap_or(end)
}

/// Returns the quote without the words that name one job or one node, so that equal reasons of several jobs are equal. A short
/// number stays: it may be an exit code.
pub fn without_names(quote: &str) -> String {
    let general = |word: &str| {
        let bare = word.trim_matches(|c: char| !c.is_alphanumeric());
        let short_number = bare.len() <= 3 && bare.bytes().all(|byte| byte.is_ascii_digit());
        short_number || !bare.contains(|c: char| c.is_ascii_digit())
    };
    quote.split_whitespace().map(|word| if general(word) { word } else { "#" }).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(ending: Option<&str>, text: &str) -> LastOutput {
        let node = NodeName::new("n1").unwrap();
        LastOutput { node, ending: ending.map(str::to_owned), text: text.to_owned() }
    }

    #[test]
    fn the_last_line_that_says_something_is_quoted_with_the_ending() {
        let missing = "slurm_script: 5: exec: /usr/bin/doctor-node: not found\n\n  ---\n";
        for (ending, text, expected) in [
            (None, "", None),
            (None, " \n--\n", None),
            (Some("OOMKilled"), "", Some("OOMKilled")),
            (None, "a\n b \n", Some("b")),
            (
                Some("FAILED, exit code 127"),
                missing,
                Some("slurm_script: 5: exec: /usr/bin/doctor-node: not found (FAILED, exit code 127)"),
            ),
        ] {
            assert_eq!(output(ending, text).quote().as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn the_middle_of_a_long_line_is_left_out() {
        let whole = "ü".repeat(QUOTED_START + QUOTED_END);
        assert_eq!(output(None, &whole).quote().as_deref(), Some(whole.as_str()));
        let chain = format!("failed to create the task: {}: exec: \"doctor-node\": not found", "runc: ".repeat(100));
        let quoted = output(None, &chain).quote().unwrap();
        assert!(quoted.starts_with("failed to create the task") && quoted.ends_with("\"doctor-node\": not found"));
        assert_eq!(quoted.chars().count(), QUOTED_START + QUOTED_END + 1, "{quoted}");
    }

    #[test]
    fn quotes_that_differ_in_names_alone_are_one_reason() {
        let missing = |job| format!("{job}/slurm_script: 5: exec: doctor-node: not found (exit code 127)");
        assert_eq!(without_names(&missing("job00012")), without_names(&missing("job00013")));
        assert_ne!(without_names(&missing("job00012")), without_names("out of memory"));
        assert_ne!(without_names("exit code 1"), without_names("exit code 127"), "exit codes are different reasons");
    }
}
