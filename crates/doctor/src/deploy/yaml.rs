//! Writes a tree as YAML, with Helm's placeholders for settings that are not filled in.

use serde_json::Value;

use super::tree::{Line, NAMESPACE, Name, Part, Test, Tree};

/// Words that some version of YAML does not read as a string.
const NO_TEXT: [&str; 10] = ["true", "false", "null", "yes", "no", "on", "off", "y", "n", "~"];

/// Returns several objects as one file.
pub(super) fn documents<'a>(objects: impl IntoIterator<Item = &'a Tree>) -> String {
    objects.into_iter().flat_map(document).map(|line| helped(&line) + "\n").collect()
}

/// Writes an object with its separator. Both are inside the object's condition.
fn document(object: &Tree) -> Vec<String> {
    match object {
        Tree::When(test, object) => around(*test, document(object)),
        other => begun("---".to_owned(), block(other)),
    }
}

/// A block of lines with the indentation of this line, which is known only when the line is complete.
const BESIDE: &str = "{{- . | nindent HERE }}";

fn helped(line: &str) -> String {
    match line.strip_suffix(BESIDE) {
        Some(before) => line.replace("HERE", &before.len().to_string()),
        None => line.to_owned(),
    }
}

/// Returns a single map as a file without a separator.
pub(super) fn file(tree: &Tree) -> String {
    block(tree).into_iter().map(|line| line + "\n").collect()
}

/// Returns the lines of a map or a list.
fn block(tree: &Tree) -> Vec<String> {
    match tree {
        Tree::Map(entries) if !entries.is_empty() => entries.iter().flat_map(|(key, tree)| entry(key, tree)).collect(),
        Tree::List(items) if !items.is_empty() => items.iter().flat_map(item).collect(),
        other => vec![in_line(other)],
    }
}

fn entry(key: &str, tree: &Tree) -> Vec<String> {
    let key = scalar(&Value::String(key.to_owned()));
    match tree {
        Tree::When(test, tree) => around(*test, entry(&key, tree)),
        Tree::Map(entries) if !entries.is_empty() => begun(format!("{key}:"), indented(block(tree))),
        Tree::List(items) if !items.is_empty() => begun(format!("{key}:"), block(tree)),
        Tree::Lines(lines) => begun(format!("{key}: |"), indented(written(lines))),
        Tree::Plain(Value::String(text)) if is_literal(text) => {
            begun(format!("{key}: |"), indented(text.lines().map(str::to_owned).collect()))
        }
        other => vec![format!("{key}: {}", in_line(other))],
    }
}

fn item(tree: &Tree) -> Vec<String> {
    match tree {
        Tree::When(test, tree) => around(*test, item(tree)),
        Tree::Each(name) => {
            vec![format!("{{{{- range {} }}}}", place(name)), "- {{ . | toJson }}".to_owned(), END.to_owned()]
        }
        other => {
            let mut lines = indented(block(other));
            if let Some(first) = lines.first_mut() {
                first.replace_range(..2, "- ");
            }
            lines
        }
    }
}

const END: &str = "{{- end }}";

fn begin(test: Test) -> String {
    let condition = match test {
        Test::Is(name, word) => format!("eq {} {word:?}", place(name)),
        Test::Has(name) => place(name),
    };
    format!("{{{{- if {condition} }}}}")
}

fn around(test: Test, lines: Vec<String>) -> Vec<String> {
    begun(begin(test), lines).into_iter().chain([END.to_owned()]).collect()
}

fn begun(first: String, rest: Vec<String>) -> Vec<String> {
    std::iter::once(first).chain(rest).collect()
}

/// Indents lines, except blank ones. Indentation does not matter to Helm's directives.
fn indented(lines: Vec<String>) -> Vec<String> {
    let deeper = |line: String| if line.is_empty() { line } else { format!("  {line}") };
    lines.into_iter().map(deeper).collect()
}

/// Returns lines of text; conditional lines are wrapped in Helm's directives.
fn written(lines: &[Line]) -> Vec<String> {
    let line = |line: &Line| match line {
        Line::Of(parts) => vec![joined(parts)],
        Line::When(test, lines) => around(*test, written(lines)),
        Line::Block(name) => {
            vec![format!("{{{{- with ({} | trim) }}}}", place(name)), BESIDE.to_owned(), END.to_owned()]
        }
    };
    lines.iter().flat_map(line).collect()
}

fn joined(parts: &[Part]) -> String {
    let part = |part: &Part| match part {
        Part::Fixed(text) => text.clone(),
        Part::Of(name) => format!("{{{{ {} }}}}", place(name)),
        Part::Quoted(name) => format!("{{{{ {} | toJson }}}}", place(name)),
    };
    parts.iter().map(part).collect()
}

/// Returns the path of a setting in a Helm template.
fn place(name: Name) -> String {
    if name == NAMESPACE { format!(".{name}") } else { format!(".Values.{name}") }
}

fn in_line(tree: &Tree) -> String {
    match tree {
        Tree::Plain(value) => scalar(value),
        Tree::Map(_) => "{}".to_owned(),
        Tree::List(_) => "[]".to_owned(),
        Tree::Setting(name) => format!("{{{{ {} | toJson }}}}", place(name)),
        // The schema of the values admits no character that would end the string.
        Tree::Text(parts) => format!("\"{}\"", joined(parts)),
        Tree::Lines(_) | Tree::When(..) | Tree::Each(_) => {
            unreachable!("lines, conditions and repetitions stand in a map or a list, where they are written")
        }
    }
}

/// Writes a value as JSON, which is valid YAML; quotation marks are omitted if the text reads the same without them.
pub(super) fn scalar(value: &Value) -> String {
    let Value::String(text) = value else { return value.to_string() };
    let plain = text.starts_with(|first: char| first.is_ascii_alphabetic() || first == '/')
        && text.chars().all(|letter| letter.is_ascii_alphanumeric() || "/._-".contains(letter))
        && !NO_TEXT.contains(&text.to_ascii_lowercase().as_str());
    if plain { text.clone() } else { value.to_string() }
}

/// Whether the text can be written as a literal block that YAML reads back unchanged.
fn is_literal(text: &str) -> bool {
    let lines = text.strip_suffix('\n').unwrap_or_default();
    !lines.is_empty()
        && !lines.starts_with([' ', '\n'])
        && !lines.ends_with('\n')
        && lines.chars().all(|letter| letter == '\n' || !letter.is_control())
        && lines.lines().all(|line| !line.ends_with(' '))
}

#[cfg(test)]
mod tests {
    use super::{
        super::tree::{Given, list, map, parts, text},
        *,
    };
    use serde_json::json;

    #[test]
    fn what_is_written_reads_back_as_it_was() {
        let nasty = json!({
            "plain": "a/b.c-d_e", "words": ["yes", "No", "null", "12", "1e3", "0x1", "", " a", "a: b", "#", "- x", "~", "é\u{7}"],
            "numbers": [1, -2, 1.5, true, null], "empty": [{}, []],
            "key: odd": { "12": { "deep": [[1, [2]], { "a": [{ "b": 1, "c": 2 }] }] } },
            "lines": ["one\ntwo", "one\n\n  two\n", " one\n", "one\n\n", "one \ntwo\n", "a\r\nb\n", "\n"],
            "text": "one\n\n  two: x\n", "cut": "a\tb\nc\n",
        });
        let objects = [Tree::from(nasty.clone()), Tree::from(json!({ "kind": "Second" }))];
        let written = documents(&objects);
        let read: Vec<Value> = serde_saphyr::from_multiple(&written).unwrap();
        assert_eq!(read, [nasty, json!({ "kind": "Second" })], "{written}");
        assert!(written.contains("text: |\n  one\n\n    two: x\n"), "{written}");
    }

    #[test]
    fn settings_that_were_not_put_in_are_left_to_helm() {
        let tree = map([
            ("kind", Tree::from("X")),
            ("at", text("http://{Release.Namespace}:{port}")),
            ("many", list([Tree::from("a"), Tree::Each("more"), Tree::from("b").when(Test::Is("kind", "b"))])),
            ("all", Tree::Setting("all").when(Test::Has("all"))),
            ("text", Tree::Lines(vec![Line::Of(parts("a = {\"a\"}")), Line::Block("own")])),
        ]);
        let wanted = "---\nkind: X\nat: \"http://{{ .Release.Namespace }}:{{ .Values.port }}\"\nmany:\n- a\n\
            {{- range .Values.more }}\n- {{ . | toJson }}\n{{- end }}\n{{- if eq .Values.kind \"b\" }}\n- b\n{{- end }}\n\
            {{- if .Values.all }}\nall: {{ .Values.all | toJson }}\n{{- end }}\n\
            text: |\n  a = {{ .Values.a | toJson }}\n  \
            {{- with (.Values.own | trim) }}\n  {{- . | nindent 2 }}\n  {{- end }}\n";
        assert_eq!(documents([&tree]), wanted);
        let given = Given {
            namespace: "n".into(),
            values: json!({ "port": 1, "more": [], "kind": "", "all": {}, "a": "x", "own": "" }),
        };
        let manifest = documents([&tree.with(&given).unwrap()]);
        assert_eq!(manifest, "---\nkind: X\nat: \"http://n:1\"\nmany:\n- a\ntext: |\n  a = \"x\"\n");
    }
}
