//! Kubernetes objects with placeholders for settings. With values filled in, a tree is a manifest; without, it is a
//! template of the Helm chart.

use serde_json::Value;

/// A setting's name from [`super::settings`], or [`NAMESPACE`].
pub(super) type SettingName = &'static str;

/// The namespace. Helm takes it from its command line, not from its values.
pub(super) const NAMESPACE: SettingName = "Release.Namespace";

/// A part of an object.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Template {
    /// A string, a number or a boolean.
    Literal(Value),
    Map(Vec<(String, Template)>),
    List(Vec<Template>),
    /// The value of the setting.
    Setting(SettingName),
    /// Text on one line.
    Text(Vec<TextPart>),
    /// Text of several lines.
    Lines(Vec<Line>),
    /// A map entry, a list item or a whole object that exists only if the test holds.
    Conditional(TemplateCondition, Box<Template>),
    /// List items: those of the setting's list.
    ItemsOf(SettingName),
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum TextPart {
    Literal(String),
    Value(SettingName),
    /// The value in quotation marks, as in JSON and TOML.
    Quoted(SettingName),
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Line {
    Text(Vec<TextPart>),
    Conditional(TemplateCondition, Vec<Line>),
    /// The lines of a text setting; nothing if it is empty.
    Lines(SettingName),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TemplateCondition {
    /// The setting has this value.
    Equals(SettingName, &'static str),
    /// The setting is true or not empty.
    IsSet(SettingName),
}

/// The values of the settings: the chart's values and the namespace.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct SettingValues {
    pub namespace: String,
    pub values: Value,
}

impl SettingValues {
    fn get(&self, name: SettingName) -> Value {
        if name == NAMESPACE {
            return Value::String(self.namespace.clone());
        }
        let found = self.values.pointer(&format!("/{}", name.replace('.', "/")));
        found.expect("a tree names only settings of the table; a test checks it").clone()
    }

    fn is_set(&self, name: SettingName) -> bool {
        match self.get(name) {
            Value::Null | Value::Bool(false) => false,
            Value::String(text) => !text.is_empty(),
            Value::Array(list) => !list.is_empty(),
            Value::Object(map) => !map.is_empty(),
            Value::Bool(true) | Value::Number(_) => true,
        }
    }

    fn evaluate(&self, test: TemplateCondition) -> bool {
        match test {
            TemplateCondition::Equals(name, word) => self.get(name) == word,
            TemplateCondition::IsSet(name) => self.is_set(name),
        }
    }

    fn text(&self, parts: &[TextPart]) -> String {
        parts.iter().map(|part| self.part(part)).collect()
    }

    fn part(&self, part: &TextPart) -> String {
        match part {
            TextPart::Literal(text) => text.clone(),
            TextPart::Quoted(name) => self.get(name).to_string(),
            TextPart::Value(name) => match self.get(name) {
                Value::String(text) => text,
                other => other.to_string(),
            },
        }
    }

    fn lines(&self, lines: &[Line]) -> String {
        let line = |line: &Line| match line {
            Line::Text(parts) => self.text(parts) + "\n",
            Line::Conditional(test, lines) if self.evaluate(*test) => self.lines(lines),
            Line::Conditional(..) => String::new(),
            Line::Lines(name) => match self.part(&TextPart::Value(name)).trim() {
                "" => String::new(),
                text => format!("{text}\n"),
            },
        };
        lines.iter().map(line).collect()
    }
}

impl Template {
    /// Fills in the settings, which leaves maps, lists and plain values. `None`: the tree's condition does not hold.
    pub(super) fn render(&self, given: &SettingValues) -> Option<Self> {
        Some(match self {
            Self::Literal(value) => Self::Literal(value.clone()),
            Self::Map(entries) => {
                let entry = |(key, tree): &(String, Self)| Some((key.clone(), tree.render(given)?));
                Self::Map(entries.iter().filter_map(entry).collect())
            }
            Self::List(items) => Self::List(items.iter().flat_map(|item| item.items(given)).collect()),
            Self::Setting(name) => Self::from(given.get(name)),
            Self::Text(parts) => Self::Literal(given.text(parts).into()),
            Self::Lines(lines) => Self::Literal(given.lines(lines).into()),
            Self::Conditional(test, tree) => return given.evaluate(*test).then(|| tree.render(given)).flatten(),
            Self::ItemsOf(name) => Self::from(given.get(name)),
        })
    }

    fn items(&self, given: &SettingValues) -> Vec<Self> {
        match (self, self.render(given)) {
            (Self::ItemsOf(_), Some(Self::List(items))) => items,
            (_, item) => item.into_iter().collect(),
        }
    }

    /// Returns the tree as JSON. Placeholders become null, so the caller fills in settings first.
    pub(super) fn to_json(&self) -> Value {
        match self {
            Self::Literal(value) => value.clone(),
            Self::Map(entries) => entries.iter().map(|(key, tree)| (key.clone(), tree.to_json())).collect(),
            Self::List(items) => items.iter().map(Self::to_json).collect(),
            Self::Conditional(_, tree) => tree.to_json(),
            Self::Setting(_) | Self::Text(_) | Self::Lines(_) | Self::ItemsOf(_) => Value::Null,
        }
    }

    pub(super) fn only_if(self, test: TemplateCondition) -> Self {
        Self::Conditional(test, Box::new(self))
    }

    /// Returns an entry of a map.
    pub(super) fn entry(&mut self, name: &str) -> Option<&mut Self> {
        match self {
            Self::Map(entries) => entries.iter_mut().find(|(key, _)| key == name).map(|(_, tree)| tree),
            _ => None,
        }
    }

    /// Replaces every string that equals `text` with the setting.
    pub(super) fn replace_text(self, text: &str, name: SettingName) -> Self {
        match self {
            Self::Literal(Value::String(found)) if found == text => Self::Setting(name),
            Self::Map(entries) => {
                Self::Map(entries.into_iter().map(|(key, tree)| (key, tree.replace_text(text, name))).collect())
            }
            Self::List(items) => Self::List(items.into_iter().map(|item| item.replace_text(text, name)).collect()),
            Self::Conditional(test, tree) => tree.replace_text(text, name).only_if(test),
            other => other,
        }
    }

    /// Returns the names of all settings in the tree.
    #[cfg(test)]
    pub(super) fn setting_names(&self) -> Vec<SettingName> {
        let of_parts = |parts: &[TextPart]| -> Vec<SettingName> {
            let name = |part: &TextPart| match part {
                TextPart::Value(name) | TextPart::Quoted(name) => Some(*name),
                TextPart::Literal(_) => None,
            };
            parts.iter().filter_map(name).collect()
        };
        fn of_lines(lines: &[Line], of_parts: &dyn Fn(&[TextPart]) -> Vec<SettingName>) -> Vec<SettingName> {
            let names = |line: &Line| match line {
                Line::Text(parts) => of_parts(parts),
                Line::Conditional(test, lines) => [vec![test.name()], of_lines(lines, of_parts)].concat(),
                Line::Lines(name) => vec![*name],
            };
            lines.iter().flat_map(names).collect()
        }
        match self {
            Self::Literal(_) => Vec::new(),
            Self::Map(entries) => entries.iter().flat_map(|(_, tree)| tree.setting_names()).collect(),
            Self::List(items) => items.iter().flat_map(Self::setting_names).collect(),
            Self::Setting(name) | Self::ItemsOf(name) => vec![*name],
            Self::Text(parts) => of_parts(parts),
            Self::Lines(lines) => of_lines(lines, &of_parts),
            Self::Conditional(test, tree) => [vec![test.name()], tree.setting_names()].concat(),
        }
    }
}

impl TemplateCondition {
    #[cfg(test)]
    fn name(self) -> SettingName {
        match self {
            Self::Equals(name, _) | Self::IsSet(name) => name,
        }
    }
}

impl From<Value> for Template {
    fn from(value: Value) -> Self {
        match value {
            Value::Array(items) => Self::List(items.into_iter().map(Self::from).collect()),
            Value::Object(entries) => {
                Self::Map(entries.into_iter().map(|(key, value)| (key, Self::from(value))).collect())
            }
            plain => Self::Literal(plain),
        }
    }
}

impl From<&str> for Template {
    fn from(text: &str) -> Self {
        Self::Literal(text.into())
    }
}

impl From<bool> for Template {
    fn from(flag: bool) -> Self {
        Self::Literal(flag.into())
    }
}

impl From<i64> for Template {
    fn from(number: i64) -> Self {
        Self::Literal(number.into())
    }
}

/// A map that keeps the order of its entries.
pub(super) fn map<const N: usize>(entries: [(&str, Template); N]) -> Template {
    Template::Map(entries.map(|(key, tree)| (key.to_owned(), tree)).into())
}

pub(super) fn list<const N: usize>(items: [Template; N]) -> Template {
    Template::List(items.into())
}

/// A list of strings.
pub(super) fn string_list<const N: usize>(items: [&str; N]) -> Template {
    Template::List(items.map(Template::from).into())
}

/// Parses text with settings in braces: `http://cluster-doctor.{Release.Namespace}.svc:{port}`. `{"name"}` is quoted. A
/// brace followed by a space is literal.
pub(super) fn parse_parts(text: &'static str) -> Vec<TextPart> {
    let mut found = Vec::new();
    let (mut rest, mut from) = (text, 0);
    while let Some(brace) = rest[from..].find('{').map(|brace| from + brace) {
        let (before, after) = (&rest[..brace], &rest[brace + 1..]);
        if after.starts_with(' ') {
            from = brace + 1;
            continue;
        }
        from = 0;
        let (name, after) = after.split_once('}').expect("every brace in these constant texts is closed");
        if !before.is_empty() {
            found.push(TextPart::Literal(before.to_owned()));
        }
        found.push(match name.strip_prefix('"') {
            Some(name) => TextPart::Quoted(name.trim_end_matches('"')),
            None => TextPart::Value(name),
        });
        rest = after;
    }
    if !rest.is_empty() {
        found.push(TextPart::Literal(rest.to_owned()));
    }
    found
}

pub(super) fn text(text: &'static str) -> Template {
    Template::Text(parse_parts(text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_template_with_its_settings_renders_an_object() {
        let tree = map([
            ("name", text("x-{a.b}.{Release.Namespace}")),
            ("off", Template::from("here").only_if(TemplateCondition::IsSet("a.none"))),
            ("on", Template::from("here").only_if(TemplateCondition::Equals("a.b", "c"))),
            (
                "list",
                list([
                    Template::from("first"),
                    Template::ItemsOf("a.list"),
                    Template::from("no").only_if(TemplateCondition::Equals("a.b", "d")),
                ]),
            ),
            (
                "text",
                Template::Lines(vec![
                    Line::Text(parse_parts("b = {\"a.b\"}")),
                    Line::Lines("a.none"),
                    Line::Conditional(TemplateCondition::IsSet("a.list"), vec![Line::Lines("a.lines")]),
                ]),
            ),
        ]);
        let given = SettingValues {
            namespace: "ns".to_owned(),
            values: json!({ "a": { "b": "c", "none": "", "list": [1, { "k": 2 }], "lines": "\none\n\n two\n\n" } }),
        };
        assert_eq!(
            tree.render(&given).unwrap().to_json(),
            json!({ "name": "x-c.ns", "on": "here", "list": ["first", 1, { "k": 2 }],
                "text": "b = \"c\"\none\n\n two\n" })
        );
        assert_eq!(tree.setting_names().len(), 10);
        assert_eq!(tree.only_if(TemplateCondition::IsSet("a.none")).render(&given), None);
    }

    #[test]
    fn settings_are_substituted_anywhere_in_a_text() {
        let tree = Template::from(json!({ "a": ["@", { "b": "@" }], "c": "x@" })).replace_text("@", NAMESPACE);
        let given = SettingValues { namespace: "ns".to_owned(), values: Value::Null };
        assert_eq!(tree.render(&given).unwrap().to_json(), json!({ "a": ["ns", { "b": "ns" }], "c": "x@" }));
    }
}
