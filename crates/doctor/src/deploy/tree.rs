//! Kubernetes objects with placeholders for settings. With values filled in, a tree is a manifest; without, it is a
//! template of the Helm chart.

use serde_json::Value;

/// A setting's name from [`super::settings`], or [`NAMESPACE`].
pub(super) type Name = &'static str;

/// The namespace. Helm takes it from its command line, not from its values.
pub(super) const NAMESPACE: Name = "Release.Namespace";

/// A part of an object.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Tree {
    /// A string, a number or a boolean.
    Plain(Value),
    Map(Vec<(String, Tree)>),
    List(Vec<Tree>),
    /// The value of the setting.
    Setting(Name),
    /// Text on one line.
    Text(Vec<Part>),
    /// Text of several lines.
    Lines(Vec<Line>),
    /// A map entry, a list item or a whole object that exists only if the test holds.
    When(Test, Box<Tree>),
    /// List items: those of the setting's list.
    Each(Name),
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Part {
    Fixed(String),
    Of(Name),
    /// The value in quotation marks, as in JSON and TOML.
    Quoted(Name),
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Line {
    Of(Vec<Part>),
    When(Test, Vec<Line>),
    /// The lines of a text setting; nothing if it is empty.
    Block(Name),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Test {
    /// The setting has this value.
    Is(Name, &'static str),
    /// The setting is true or not empty.
    Has(Name),
}

/// The values of the settings: the chart's values and the namespace.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Given {
    pub namespace: String,
    pub values: Value,
}

impl Given {
    fn get(&self, name: Name) -> Value {
        if name == NAMESPACE {
            return Value::String(self.namespace.clone());
        }
        let found = self.values.pointer(&format!("/{}", name.replace('.', "/")));
        found.expect("a tree names only settings of the table; a test checks it").clone()
    }

    fn says(&self, name: Name) -> bool {
        match self.get(name) {
            Value::Null | Value::Bool(false) => false,
            Value::String(text) => !text.is_empty(),
            Value::Array(list) => !list.is_empty(),
            Value::Object(map) => !map.is_empty(),
            Value::Bool(true) | Value::Number(_) => true,
        }
    }

    fn holds(&self, test: Test) -> bool {
        match test {
            Test::Is(name, word) => self.get(name) == word,
            Test::Has(name) => self.says(name),
        }
    }

    fn text(&self, parts: &[Part]) -> String {
        parts.iter().map(|part| self.part(part)).collect()
    }

    fn part(&self, part: &Part) -> String {
        match part {
            Part::Fixed(text) => text.clone(),
            Part::Quoted(name) => self.get(name).to_string(),
            Part::Of(name) => match self.get(name) {
                Value::String(text) => text,
                other => other.to_string(),
            },
        }
    }

    fn lines(&self, lines: &[Line]) -> String {
        let line = |line: &Line| match line {
            Line::Of(parts) => self.text(parts) + "\n",
            Line::When(test, lines) if self.holds(*test) => self.lines(lines),
            Line::When(..) => String::new(),
            Line::Block(name) => match self.part(&Part::Of(name)).trim() {
                "" => String::new(),
                text => format!("{text}\n"),
            },
        };
        lines.iter().map(line).collect()
    }
}

impl Tree {
    /// Fills in the settings, which leaves maps, lists and plain values. `None`: the tree's condition does not hold.
    pub(super) fn with(&self, given: &Given) -> Option<Self> {
        Some(match self {
            Self::Plain(value) => Self::Plain(value.clone()),
            Self::Map(entries) => {
                let entry = |(key, tree): &(String, Self)| Some((key.clone(), tree.with(given)?));
                Self::Map(entries.iter().filter_map(entry).collect())
            }
            Self::List(items) => Self::List(items.iter().flat_map(|item| item.items(given)).collect()),
            Self::Setting(name) => Self::from(given.get(name)),
            Self::Text(parts) => Self::Plain(given.text(parts).into()),
            Self::Lines(lines) => Self::Plain(given.lines(lines).into()),
            Self::When(test, tree) => return given.holds(*test).then(|| tree.with(given)).flatten(),
            Self::Each(name) => Self::from(given.get(name)),
        })
    }

    fn items(&self, given: &Given) -> Vec<Self> {
        match (self, self.with(given)) {
            (Self::Each(_), Some(Self::List(items))) => items,
            (_, item) => item.into_iter().collect(),
        }
    }

    /// Returns the tree as JSON. Placeholders become null, so the caller fills in settings first.
    pub(super) fn value(&self) -> Value {
        match self {
            Self::Plain(value) => value.clone(),
            Self::Map(entries) => entries.iter().map(|(key, tree)| (key.clone(), tree.value())).collect(),
            Self::List(items) => items.iter().map(Self::value).collect(),
            Self::When(_, tree) => tree.value(),
            Self::Setting(_) | Self::Text(_) | Self::Lines(_) | Self::Each(_) => Value::Null,
        }
    }

    pub(super) fn when(self, test: Test) -> Self {
        Self::When(test, Box::new(self))
    }

    /// Returns an entry of a map.
    pub(super) fn entry(&mut self, name: &str) -> Option<&mut Self> {
        match self {
            Self::Map(entries) => entries.iter_mut().find(|(key, _)| key == name).map(|(_, tree)| tree),
            _ => None,
        }
    }

    /// Replaces every string that equals `text` with the setting.
    pub(super) fn exchange(self, text: &str, name: Name) -> Self {
        match self {
            Self::Plain(Value::String(found)) if found == text => Self::Setting(name),
            Self::Map(entries) => {
                Self::Map(entries.into_iter().map(|(key, tree)| (key, tree.exchange(text, name))).collect())
            }
            Self::List(items) => Self::List(items.into_iter().map(|item| item.exchange(text, name)).collect()),
            Self::When(test, tree) => tree.exchange(text, name).when(test),
            other => other,
        }
    }

    /// Returns the names of all settings in the tree.
    #[cfg(test)]
    pub(super) fn names(&self) -> Vec<Name> {
        let of_parts = |parts: &[Part]| -> Vec<Name> {
            let name = |part: &Part| match part {
                Part::Of(name) | Part::Quoted(name) => Some(*name),
                Part::Fixed(_) => None,
            };
            parts.iter().filter_map(name).collect()
        };
        fn of_lines(lines: &[Line], of_parts: &dyn Fn(&[Part]) -> Vec<Name>) -> Vec<Name> {
            let names = |line: &Line| match line {
                Line::Of(parts) => of_parts(parts),
                Line::When(test, lines) => [vec![test.name()], of_lines(lines, of_parts)].concat(),
                Line::Block(name) => vec![*name],
            };
            lines.iter().flat_map(names).collect()
        }
        match self {
            Self::Plain(_) => Vec::new(),
            Self::Map(entries) => entries.iter().flat_map(|(_, tree)| tree.names()).collect(),
            Self::List(items) => items.iter().flat_map(Self::names).collect(),
            Self::Setting(name) | Self::Each(name) => vec![*name],
            Self::Text(parts) => of_parts(parts),
            Self::Lines(lines) => of_lines(lines, &of_parts),
            Self::When(test, tree) => [vec![test.name()], tree.names()].concat(),
        }
    }
}

impl Test {
    #[cfg(test)]
    fn name(self) -> Name {
        match self {
            Self::Is(name, _) | Self::Has(name) => name,
        }
    }
}

impl From<Value> for Tree {
    fn from(value: Value) -> Self {
        match value {
            Value::Array(items) => Self::List(items.into_iter().map(Self::from).collect()),
            Value::Object(entries) => {
                Self::Map(entries.into_iter().map(|(key, value)| (key, Self::from(value))).collect())
            }
            plain => Self::Plain(plain),
        }
    }
}

impl From<&str> for Tree {
    fn from(text: &str) -> Self {
        Self::Plain(text.into())
    }
}

impl From<bool> for Tree {
    fn from(flag: bool) -> Self {
        Self::Plain(flag.into())
    }
}

impl From<i64> for Tree {
    fn from(number: i64) -> Self {
        Self::Plain(number.into())
    }
}

/// A map that keeps the order of its entries.
pub(super) fn map<const N: usize>(entries: [(&str, Tree); N]) -> Tree {
    Tree::Map(entries.map(|(key, tree)| (key.to_owned(), tree)).into())
}

pub(super) fn list<const N: usize>(items: [Tree; N]) -> Tree {
    Tree::List(items.into())
}

/// A list of strings.
pub(super) fn words<const N: usize>(words: [&str; N]) -> Tree {
    Tree::List(words.map(Tree::from).into())
}

/// Parses text with settings in braces: `http://cluster-doctor.{Release.Namespace}.svc:{port}`. `{"name"}` is quoted. A
/// brace followed by a space is literal.
pub(super) fn parts(text: &'static str) -> Vec<Part> {
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
            found.push(Part::Fixed(before.to_owned()));
        }
        found.push(match name.strip_prefix('"') {
            Some(name) => Part::Quoted(name.trim_end_matches('"')),
            None => Part::Of(name),
        });
        rest = after;
    }
    if !rest.is_empty() {
        found.push(Part::Fixed(rest.to_owned()));
    }
    found
}

pub(super) fn text(text: &'static str) -> Tree {
    Tree::Text(parts(text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn with_its_settings_a_tree_is_an_object() {
        let tree = map([
            ("name", text("x-{a.b}.{Release.Namespace}")),
            ("off", Tree::from("here").when(Test::Has("a.none"))),
            ("on", Tree::from("here").when(Test::Is("a.b", "c"))),
            ("list", list([Tree::from("first"), Tree::Each("a.list"), Tree::from("no").when(Test::Is("a.b", "d"))])),
            (
                "text",
                Tree::Lines(vec![
                    Line::Of(parts("b = {\"a.b\"}")),
                    Line::Block("a.none"),
                    Line::When(Test::Has("a.list"), vec![Line::Block("a.lines")]),
                ]),
            ),
        ]);
        let given = Given {
            namespace: "ns".to_owned(),
            values: json!({ "a": { "b": "c", "none": "", "list": [1, { "k": 2 }], "lines": "\none\n\n two\n\n" } }),
        };
        assert_eq!(
            tree.with(&given).unwrap().value(),
            json!({ "name": "x-c.ns", "on": "here", "list": ["first", 1, { "k": 2 }],
                "text": "b = \"c\"\none\n\n two\n" })
        );
        assert_eq!(tree.names().len(), 10);
        assert_eq!(tree.when(Test::Has("a.none")).with(&given), None);
    }

    #[test]
    fn a_text_gives_way_to_a_setting_wherever_it_stands() {
        let tree = Tree::from(json!({ "a": ["@", { "b": "@" }], "c": "x@" })).exchange("@", NAMESPACE);
        let given = Given { namespace: "ns".to_owned(), values: Value::Null };
        assert_eq!(tree.with(&given).unwrap().value(), json!({ "a": ["ns", { "b": "ns" }], "c": "x@" }));
    }
}
