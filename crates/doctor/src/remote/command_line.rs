//! The command line of this process as the controller receives it: without the options that are for this machine.

use crate::connection::LOCAL_OPTIONS;

/// Returns the arguments of this process after the program's name, without global options and without these.
pub(super) fn without(options: &[(&str, bool)]) -> Vec<String> {
    let args = std::env::args_os().skip(1).map(|arg| arg.to_string_lossy().into_owned());
    let local: Vec<(&str, bool)> = LOCAL_OPTIONS.iter().chain(options).copied().collect();
    stripped(args, &local)
}

/// Removes options by their long names, each with its value if it takes one. The command line has been parsed before, so
/// an option that takes a value has one.
fn stripped(args: impl Iterator<Item = String>, options: &[(&str, bool)]) -> Vec<String> {
    let mut kept = Vec::new();
    let mut args = args;
    while let Some(arg) = args.next() {
        if arg == "--" {
            kept.push(arg);
            kept.extend(args);
            return kept;
        }
        let name = arg.strip_prefix("--").unwrap_or_default();
        match options.iter().find(|(option, _)| name == *option) {
            Some((_, true)) => drop(args.next()),
            Some((_, false)) => {}
            // `--follow` has the short name `-f`.
            None if arg == "-f" && options.contains(&("follow", false)) => {}
            None if options
                .iter()
                .any(|(option, _)| name.strip_prefix(option).is_some_and(|rest| rest.starts_with('='))) => {}
            None => kept.push(arg),
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_for_this_machine_are_removed_wherever_they_stand() {
        for (line, expected) in [
            ("--server https://x status", "status"),
            ("status --server=https://x --json", "status"),
            ("why --token-file t node001 --audit 3 --context prod", "why node001 --audit 3"),
            ("log 12 -f --node n1", "log 12 --node n1"),
            ("report --out x.html --format html", "report --format html"),
            ("history -- --json", "history -- --json"),
            ("report --out=x.html --outer y", "report --outer y"),
        ] {
            let options: Vec<(&str, bool)> =
                LOCAL_OPTIONS.iter().copied().chain([("out", true), ("follow", false)]).collect();
            let found = stripped(line.split(' ').map(str::to_owned), &options);
            assert_eq!(found.join(" "), expected, "{line}");
        }
    }
}
