//! Examples in the help of commands. A test reads all of them as commands; those that only read are run on the simulated
//! cluster.

use clap::Command;

/// Commands, with the names of their parents, and their examples.
const EXAMPLES: [(&str, &[&str]); 12] = [
    ("status", &["doctor status", "doctor status --json"]),
    ("nodes", &["doctor nodes", "doctor nodes pool=gpu", "doctor nodes 'node[001-008]'"]),
    ("why", &["doctor why node001", "doctor why node001 --audit 20"]),
    ("history", &["doctor history node001 --since 7d", "doctor history --limit 20 --json"]),
    ("cases", &["doctor cases", "doctor cases --json"]),
    ("audit", &["doctor audit", "doctor audit --json"]),
    ("report", &["doctor report --since 7d"]),
    ("test", &["doctor test node001 --why 'after a change of the driver'"]),
    ("quarantine", &["doctor quarantine node001 --drain --why 'smells of smoke'"]),
    ("release", &["doctor release node001 --why 'the vendor replaced GPU 3'"]),
    ("config check", &["doctor config check", "doctor config check --files-only", "doctor config check --live"]),
    ("serve", &["doctor serve", "doctor serve --config /etc/cluster-doctor/doctor.toml"]),
];

/// Adds the examples to the long help of their commands.
pub(crate) fn add(command: Command) -> Command {
    EXAMPLES.iter().fold(command, |command, (path, examples)| {
        let text =
            format!("Examples:\n{}", examples.iter().map(|line| format!("  {line}")).collect::<Vec<_>>().join("\n"));
        add_to(command, &path.split(' ').collect::<Vec<_>>(), &text)
    })
}

fn add_to(command: Command, path: &[&str], text: &str) -> Command {
    match path.split_first() {
        Some((name, rest)) => command.mut_subcommand(*name, |child| add_to(child, rest, text)),
        None => {
            let text =
                command.get_after_long_help().map_or_else(|| text.to_owned(), |after| format!("{text}\n\n{after}"));
            command.after_long_help(text)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the commands of a help text: lines that begin with the program, up to a pipe, a redirection or a comment.
    fn commands(text: &str) -> Vec<Vec<String>> {
        let joined = text.replace("\\\n", " ");
        let lines = joined.lines().map(str::trim).filter(|line| line.starts_with("doctor "));
        lines.map(words).collect()
    }

    /// Splits as a shell does, up to the end of the first command.
    fn words(line: &str) -> Vec<String> {
        let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
        for c in line.chars() {
            match (quote, c) {
                (Some(open), _) if c == open => quote = None,
                (Some(_), _) => word.get_or_insert_default().push(c),
                (None, '\'' | '"') => {
                    quote = Some(c);
                    word.get_or_insert_default();
                }
                (None, '|' | '>' | '&' | '#') => break,
                (None, _) if c.is_whitespace() => words.extend(word.take()),
                (None, _) => word.get_or_insert_default().push(c),
            }
        }
        words.extend(word);
        words
    }

    #[test]
    fn a_line_is_split_as_a_shell_does() {
        assert_eq!(words("doctor a 'b c' \"\" --x=y   # why"), ["doctor", "a", "b c", "", "--x=y"]);
        assert_eq!(words("doctor a > b"), ["doctor", "a"]);
        assert_eq!(commands("Examples:\n  doctor a \\\n    b | c\nso doctor\n"), [["doctor", "a", "b"]]);
    }

    #[test]
    fn every_example_of_the_help_is_a_valid_command() {
        let mut found = 0;
        let mut commands_left = vec![crate::command_line()];
        while let Some(command) = commands_left.pop() {
            let texts = [command.get_long_about(), command.get_after_long_help(), command.get_after_help()];
            for text in texts.into_iter().flatten() {
                for example in commands(&text.to_string()) {
                    let parsed = crate::command_line().try_get_matches_from(&example);
                    assert!(parsed.is_ok(), "{example:?}: {}", parsed.unwrap_err());
                    found += 1;
                }
            }
            commands_left.extend(command.get_subcommands().cloned());
        }
        let listed: usize = EXAMPLES.iter().map(|(_, examples)| examples.len()).sum();
        assert!(found >= listed + 20, "{found} examples, of which {listed} are listed here");
    }
}
