//! Writes a tree as YAML, with Helm's placeholders for settings that are not filled in.

use serde_json::Value;

use super::template::{Line, NAMESPACE, SettingName, Template, TemplateCondition, TextPart};

/// Words that some version of YAML does not read as a string.
const RESERVED_WORDS: [&str; 10] = ["true", "false", "null", "yes", "no", "on", "off", "y", "n", "~"];

/// Returns several objects as one file.
pub(super) fn documents<'a>(objects: impl IntoIterator<Item = &'a Template>) -> String {
    objects.into_iter().flat_map(document).map(|line| fill_in_indent(&line) + "\n").collect()
}

/// Writes an object with its separator. Both are inside the object's condition.
fn document(object: &Template) -> Vec<String> {
    match object {
        Template::Conditional(test, object) => in_condition(*test, document(object)),
        other => prepend("---".to_owned(), block(other)),
    }
}

/// A block of lines with the indentation of this line, which is known only when the line is complete.
const INDENTED_BLOCK: &str = "{{- . | nindent HERE }}";

fn fill_in_indent(line: &str) -> String {
    match line.strip_suffix(INDENTED_BLOCK) {
        Some(before) => line.replace("HERE", &before.len().to_string()),
        None => line.to_owned(),
    }
}

/// Returns a single map as a file without a separator.
pub(super) fn file(tree: &Template) -> String {
    block(tree).into_iter().map(|line| line + "\n").collect()
}

/// Returns the lines of a map or a list.
fn block(tree: &Template) -> Vec<String> {
    match tree {
        Template::Map(entries) if !entries.is_empty() => {
            entries.iter().flat_map(|(key, tree)| entry(key, tree)).collect()
        }
        Template::List(items) if !items.is_empty() => items.iter().flat_map(item).collect(),
        other => vec![inline(other)],
    }
}

fn entry(key: &str, tree: &Template) -> Vec<String> {
    let key = scalar(&Value::String(key.to_owned()));
    match tree {
        Template::Conditional(test, tree) => in_condition(*test, entry(&key, tree)),
        Template::Map(entries) if !entries.is_empty() => prepend(format!("{key}:"), indented(block(tree))),
        Template::List(items) if !items.is_empty() => prepend(format!("{key}:"), block(tree)),
        Template::Lines(lines) => prepend(format!("{key}: |"), indented(text_lines(lines))),
        Template::Literal(Value::String(text)) if is_literal(text) => {
            prepend(format!("{key}: |"), indented(text.lines().map(str::to_owned).collect()))
        }
        other => vec![format!("{key}: {}", inline(other))],
    }
}

fn item(tree: &Template) -> Vec<String> {
    match tree {
        Template::Conditional(test, tree) => in_condition(*test, item(tree)),
        Template::ItemsOf(name) => {
            vec![
                format!("{{{{- range {} }}}}", value_path(name)),
                "- {{ . | toJson }}".to_owned(),
                END_DIRECTIVE.to_owned(),
            ]
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

const END_DIRECTIVE: &str = "{{- end }}";

fn if_directive(test: TemplateCondition) -> String {
    let condition = match test {
        TemplateCondition::Equals(name, word) => format!("eq {} {word:?}", value_path(name)),
        TemplateCondition::IsSet(name) => value_path(name),
    };
    format!("{{{{- if {condition} }}}}")
}

fn in_condition(test: TemplateCondition, lines: Vec<String>) -> Vec<String> {
    prepend(if_directive(test), lines).into_iter().chain([END_DIRECTIVE.to_owned()]).collect()
}

fn prepend(first: String, rest: Vec<String>) -> Vec<String> {
    std::iter::once(first).chain(rest).collect()
}

/// Indents lines, except blank ones. Indentation does not matter to Helm's directives.
fn indented(lines: Vec<String>) -> Vec<String> {
    let deeper = |line: String| if line.is_empty() { line } else { format!("  {line}") };
    lines.into_iter().map(deeper).collect()
}

/// Returns lines of text; conditional lines are wrapped in Helm's directives.
fn text_lines(lines: &[Line]) -> Vec<String> {
    let line = |line: &Line| match line {
        Line::Text(parts) => vec![join_parts(parts)],
        Line::Conditional(test, lines) => in_condition(*test, text_lines(lines)),
        Line::Lines(name) => {
            vec![
                format!("{{{{- with ({} | trim) }}}}", value_path(name)),
                INDENTED_BLOCK.to_owned(),
                END_DIRECTIVE.to_owned(),
            ]
        }
    };
    lines.iter().flat_map(line).collect()
}

fn join_parts(parts: &[TextPart]) -> String {
    let part = |part: &TextPart| match part {
        TextPart::Literal(text) => text.clone(),
        TextPart::Value(name) => format!("{{{{ {} }}}}", value_path(name)),
        TextPart::Quoted(name) => format!("{{{{ {} | toJson }}}}", value_path(name)),
    };
    parts.iter().map(part).collect()
}

/// Returns the path of a setting in a Helm template.
fn value_path(name: SettingName) -> String {
    if name == NAMESPACE { format!(".{name}") } else { format!(".Values.{name}") }
}

fn inline(tree: &Template) -> String {
    match tree {
        Template::Literal(value) => scalar(value),
        Template::Map(_) => "{}".to_owned(),
        Template::List(_) => "[]".to_owned(),
        Template::Setting(name) => format!("{{{{ {} | toJson }}}}", value_path(name)),
        // The schema of the values admits no character that would end the string.
        Template::Text(parts) => format!("\"{}\"", join_parts(parts)),
        Template::Lines(_) | Template::Conditional(..) | Template::ItemsOf(_) => {
            unreachable!("lines, conditions and repetitions stand in a map or a list, where they are written")
        }
    }
}

/// Writes a value as JSON, which is valid YAML; quotation marks are omitted if the text reads the same without them.
pub(super) fn scalar(value: &Value) -> String {
    let Value::String(text) = value else { return value.to_string() };
    let plain = text.starts_with(|first: char| first.is_ascii_alphabetic() || first == '/')
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "/._-".contains(c))
        && !RESERVED_WORDS.contains(&text.to_ascii_lowercase().as_str());
    if plain { text.clone() } else { value.to_string() }
}

/// Whether the text can be written as a literal block that YAML reads back unchanged.
fn is_literal(text: &str) -> bool {
    let lines = text.strip_suffix('\n').unwrap_or_default();
    !lines.is_empty()
        && !lines.starts_with([' ', '\n'])
        && !lines.ends_with('\n')
        && lines.chars().all(|c| c == '\n' || !c.is_control())
        && lines.lines().all(|line| !line.ends_with(' '))
}

#[cfg(test)]
mod tests {
    use super::{
        super::template::{SettingValues, list, map, parse_parts, text},
        *,
    };
    use serde_json::json;

    #[test]
    fn yaml_round_trips() {
        let nasty = json!({
            "plain": "a/b.c-d_e", "words": ["yes", "No", "null", "12", "1e3", "0x1", "", " a", "a: b", "#", "- x", "~", "é\u{7}"],
            "numbers": [1, -2, 1.5, true, null], "empty": [{}, []],
            "key: odd": { "12": { "deep": [[1, [2]], { "a": [{ "b": 1, "c": 2 }] }] } },
            "lines": ["one\ntwo", "one\n\n  two\n", " one\n", "one\n\n", "one \ntwo\n", "a\r\nb\n", "\n"],
            "text": "one\n\n  two: x\n", "cut": "a\tb\nc\n",
        });
        let objects = [Template::from(nasty.clone()), Template::from(json!({ "kind": "Second" }))];
        let written = documents(&objects);
        let read: Vec<Value> = serde_saphyr::from_multiple(&written).unwrap();
        assert_eq!(read, [nasty, json!({ "kind": "Second" })], "{written}");
        assert!(written.contains("text: |\n  one\n\n    two: x\n"), "{written}");
    }

    #[test]
    fn unset_settings_are_left_to_helm() {
        let tree = map([
            ("kind", Template::from("X")),
            ("at", text("http://{Release.Namespace}:{port}")),
            (
                "many",
                list([
                    Template::from("a"),
                    Template::ItemsOf("more"),
                    Template::from("b").only_if(TemplateCondition::Equals("kind", "b")),
                ]),
            ),
            ("all", Template::Setting("all").only_if(TemplateCondition::IsSet("all"))),
            ("text", Template::Lines(vec![Line::Text(parse_parts("a = {\"a\"}")), Line::Lines("own")])),
        ]);
        let expected = "---\nkind: X\nat: \"http://{{ .Release.Namespace }}:{{ .Values.port }}\"\nmany:\n- a\n\
            {{- range .Values.more }}\n- {{ . | toJson }}\n{{- end }}\n{{- if eq .Values.kind \"b\" }}\n- b\n{{- end }}\n\
            {{- if .Values.all }}\nall: {{ .Values.all | toJson }}\n{{- end }}\n\
            text: |\n  a = {{ .Values.a | toJson }}\n  \
            {{- with (.Values.own | trim) }}\n  {{- . | nindent 2 }}\n  {{- end }}\n";
        assert_eq!(documents([&tree]), expected);
        let given = SettingValues {
            namespace: "n".into(),
            values: json!({ "port": 1, "more": [], "kind": "", "all": {}, "a": "x", "own": "" }),
        };
        let manifest = documents([&tree.render(&given).unwrap()]);
        assert_eq!(manifest, "---\nkind: X\nat: \"http://n:1\"\nmany:\n- a\ntext: |\n  a = \"x\"\n");
    }
}
