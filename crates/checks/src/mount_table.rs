//! Parses /proc/mounts and /etc/fstab.

/// A line: what is mounted, where, its type and its options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountEntry<'a> {
    pub source: String,
    pub path: String,
    pub kind: &'a str,
    pub options: Vec<&'a str>,
}

impl MountEntry<'_> {
    pub fn is_read_only(&self) -> bool {
        self.options.contains(&"ro")
    }
}

/// Parses the lines. The last line for a path is the visible mount.
pub fn parse(table: &str) -> impl Iterator<Item = MountEntry<'_>> {
    table.lines().filter(|line| !line.trim_start().starts_with('#')).filter_map(|line| {
        let mut fields = line.split_ascii_whitespace();
        let (source, path, kind, options) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
        Some(MountEntry { source: decoded(source), path: decoded(path), kind, options: options.split(',').collect() })
    })
}

/// Decodes space, tab, newline and backslash, written as three octal digits.
fn decoded(text: &str) -> String {
    let codes = [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")];
    codes.iter().fold(text.to_owned(), |text, (code, plain)| text.replace(code, plain))
}
