//! A POSIX shell script that reports a host's facts before anything is installed there, and the parser of its output. Pure.

use doctor_backend::ssh::remote_program::folder;

/// Delimit the script's output; text before is the login's.
const BEGIN: &str = "doctor-node facts 1";
const END: &str = "doctor-node facts end";
/// Far more than the script and any login print.
const MAX_LINES: usize = 400;

/// The facts of one host. What it does not report counts as absent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Facts {
    /// The user id that `as_root` gives.
    pub(super) root: Option<u32>,
    /// Seconds since 1970.
    pub(super) clock: Option<i64>,
    /// As `uname -m` prints it.
    pub(super) machine: String,
    /// Whether this version of `doctor-node` is installed.
    pub(super) program: bool,
    /// Whether an installed program can be verified.
    pub(super) sha256sum: bool,
    pub(super) writable: bool,
    /// Free space in the folder, in KiB.
    pub(super) space: Option<u64>,
    pub(super) systemd: bool,
    /// How many `/dev/nvidia0`, `/dev/nvidia1` and so on there are.
    pub(super) gpu_files: Option<usize>,
    /// Those of the requested programs that are installed.
    pub(super) has: Vec<String>,
}

/// Returns whether a shell takes this word literally.
pub(super) fn is_plain(word: &str) -> bool {
    !word.is_empty() && !word.starts_with('-') && word.chars().all(|c| c.is_ascii_alphanumeric() || "._-+/".contains(c))
}

/// Builds the script. `programs` must be plain words.
pub(super) fn script(remote: &str, as_root: &str, hash: &str, programs: &[&str]) -> String {
    let folder = folder(remote);
    let checks: String = programs
        .iter()
        .filter(|program| is_plain(program))
        .map(|program| format!("{as_root} sh -c \"command -v {program}\" >/dev/null 2>&1 && echo \"has {program}\"; "))
        .collect();
    format!(
        "{folder}; echo {BEGIN}; echo \"root $({as_root} id -u 2>/dev/null)\"; echo \"clock $(date +%s)\"; \
         echo \"machine $(uname -m)\"; [ -x \"$D/bin/doctor-node-{hash}\" ] && echo program; \
         command -v sha256sum >/dev/null && echo sha256sum; F=\"$D\"; \
         while [ ! -d \"$F\" ] && [ \"$F\" != / ]; do F=$(dirname \"$F\"); done; [ -w \"$F\" ] && echo writable; \
         echo \"space $(df -Pk \"$F\" 2>/dev/null | tail -n 1 | tr -s \" \" | cut -d \" \" -f 4)\"; \
         [ -d /run/systemd/system ] && echo systemd; \
         echo \"gpus $(ls -d /dev/nvidia[0-9]* 2>/dev/null | wc -l)\"; {checks}echo {END}"
    )
}

/// Reads lines until the end marker.
///
/// # Errors
/// The reader's error, or if the end marker does not come.
pub(super) fn read_facts(mut read_line: impl FnMut() -> Result<Vec<u8>, String>) -> Result<Facts, String> {
    let mut facts = None;
    for _ in 0..MAX_LINES {
        let bytes = read_line()?;
        let line = String::from_utf8_lossy(&bytes);
        match (line.trim(), &mut facts) {
            (BEGIN, None) => facts = Some(Facts::default()),
            (END, Some(facts)) => return Ok(std::mem::take(facts)),
            (text, Some(facts)) => facts.take(text),
            (_, None) => {}
        }
    }
    Err("too much output before the answer".to_owned())
}

impl Facts {
    fn take(&mut self, line: &str) {
        match line.split_once(' ') {
            Some(("root", id)) => self.root = id.trim().parse().ok(),
            Some(("clock", seconds)) => self.clock = seconds.trim().parse().ok(),
            Some(("machine", machine)) => self.machine = machine.trim().chars().take(64).collect(),
            Some(("space", kibibytes)) => self.space = kibibytes.trim().parse().ok(),
            Some(("gpus", count)) => self.gpu_files = count.trim().parse().ok(),
            Some(("has", program)) => self.has.push(program.trim().to_owned()),
            _ => match line {
                "program" => self.program = true,
                "sha256sum" => self.sha256sum = true,
                "writable" => self.writable = true,
                "systemd" => self.systemd = true,
                _ => {}
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse_output(text: &str) -> Result<Facts, String> {
        let mut lines = text.lines().map(|line| line.as_bytes().to_vec());
        read_facts(|| lines.next().ok_or_else(|| "cut".to_owned()))
    }

    #[test]
    fn only_output_between_the_markers_is_read() {
        let text = format!(
            "Welcome\nprogram\n{BEGIN}\nroot 0\nclock 1794700800\nmachine x86_64\nsha256sum\nwritable\nspace 1234\n\
             has nvidia-smi\nsomething else\n{END}\n"
        );
        let facts = parse_output(&text).unwrap();
        assert!(!facts.program && facts.sha256sum && facts.writable && !facts.systemd);
        assert_eq!((facts.root, facts.clock, facts.space), (Some(0), Some(1_794_700_800), Some(1234)));
        assert_eq!((facts.machine.as_str(), &*facts.has), ("x86_64", &["nvidia-smi".to_owned()][..]));
        assert_eq!(parse_output(&format!("{BEGIN}\nroot 0\n")).unwrap_err(), "cut");
        assert_eq!(parse_output(&"x\n".repeat(MAX_LINES + 1)).unwrap_err(), "too much output before the answer");
        assert_eq!(parse_output(&format!("{BEGIN}\nroot \nclock x\n{END}\n")).unwrap(), Facts::default());
    }

    #[test]
    fn the_script_runs_in_a_posix_shell() {
        let text = script(".cluster-doctor", "", "00ff", &["sh", "no-such-program", "x; rm"]);
        assert!(!text.contains('\''), "it is in single quotes");
        let output = std::process::Command::new("sh").args(["-c", &text]).env("HOME", "/").output().unwrap();
        let facts = parse_output(&String::from_utf8(output.stdout).unwrap()).unwrap();
        assert!(facts.clock.is_some() && facts.root.is_some() && facts.space.is_some(), "{facts:?}");
        assert!(facts.gpu_files.is_some(), "{facts:?}");
        assert_eq!(facts.has, ["sh"]);
    }

    proptest! {
        #[test]
        fn any_output_is_parsed_without_panic(text in "(root|clock|space|has|program| |[0-9-]{1,20}|\n|.){0,80}") {
            let _facts = parse_output(&text);
            let _facts = parse_output(&format!("{BEGIN}\n{text}\n{END}\n"));
        }
    }
}
