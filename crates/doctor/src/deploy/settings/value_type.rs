//! The types of a deployment's settings: as JSON schema for Helm, as code for `--set`, and in words for messages.

use serde_json::{Value, json};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum ValueType {
    Flag,
    Port,
    /// A user or group id other than root's.
    User,
    OneOf(&'static [&'static str]),
    /// An image: registry, name, tag or digest.
    Image,
    /// A Kubernetes object name.
    Name,
    /// A Kubernetes object name, or empty.
    AnyName,
    /// The type of a node condition, or empty.
    Condition,
    /// The prefix of our labels.
    Prefix,
    /// A storage quantity.
    Size,
    Path,
    /// Text of any number of lines.
    Lines,
    /// A map from file names to texts.
    Files,
    /// A map from strings to strings.
    Labels,
    /// A list of Kubernetes objects; the API server validates them.
    Objects,
    /// `requests` and `limits` of a container.
    Resources,
    AccessModes,
}

use ValueType::{
    AccessModes, AnyName, Condition, Files, Flag, Image, Labels, Lines, Name, Objects, OneOf, Path, Port, Prefix,
    Resources, Size, User,
};

impl ValueType {
    /// Returns the JSON schema.
    pub(in super::super) fn schema(self) -> Value {
        match self {
            Flag => json!({ "type": "boolean" }),
            Port => json!({ "type": "integer", "minimum": 1, "maximum": 65535 }),
            User => json!({ "type": "integer", "minimum": 1, "maximum": 4_294_967_294_u32 }),
            OneOf(choices) => json!({ "type": "string", "enum": choices }),
            Image => json!({ "type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9./_:@-]*$" }),
            Name => json!({ "type": "string", "pattern": "^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$", "maxLength": 253 }),
            AnyName => json!({ "type": "string", "pattern": "^([a-z0-9]([a-z0-9.-]*[a-z0-9])?)?$", "maxLength": 253 }),
            Condition => json!({ "type": "string", "pattern": "^[A-Za-z0-9./_-]*$", "maxLength": 253 }),
            Prefix => json!({ "type": "string", "pattern": "^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$", "maxLength": 200 }),
            Size => json!({ "type": "string", "pattern": "^[0-9]+(Mi|Gi|Ti|Pi|M|G|T|P)$" }),
            Path => json!({ "type": "string", "pattern": "^/[A-Za-z0-9._/-]*$" }),
            Lines => json!({ "type": "string" }),
            Files => json!({ "type": "object", "propertyNames": { "pattern": "^[A-Za-z0-9_-][A-Za-z0-9._-]*\\.toml$" },
                "additionalProperties": { "type": "string" } }),
            Labels => json!({ "type": "object", "additionalProperties": { "type": "string" } }),
            Objects => json!({ "type": "array", "items": { "type": "object" } }),
            Resources => json!({ "type": "object", "additionalProperties": false, "properties": {
                "requests": { "type": "object" }, "limits": { "type": "object" } } }),
            AccessModes => json!({ "type": "array", "minItems": 1, "items": { "type": "string",
                "enum": ["ReadWriteMany", "ReadWriteOnce", "ReadOnlyMany", "ReadWriteOncePod"] } }),
        }
    }

    /// Validates a value like the schema, without Helm. The API server validates the contents of objects.
    pub(super) fn accepts(self, value: &Value) -> bool {
        let text = value.as_str();
        let all = |text: &str, extra: &str| text.chars().all(|c| c.is_ascii_alphanumeric() || extra.contains(c));
        let lower = |text: &str| {
            let ends = |end: Option<char>| end.is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
            text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || ".-".contains(c))
                && ends(text.chars().next())
                && ends(text.chars().next_back())
        };
        match self {
            Flag => value.is_boolean(),
            Port => value.as_u64().is_some_and(|port| (1..=65535).contains(&port)),
            User => value.as_u64().is_some_and(|user| (1..=4_294_967_294).contains(&user)),
            OneOf(choices) => text.is_some_and(|text| choices.contains(&text)),
            Image => {
                text.is_some_and(|text| text.starts_with(|c: char| c.is_ascii_alphanumeric()) && all(text, "./_:@-"))
            }
            Name => text.is_some_and(|text| text.len() <= 253 && lower(text)),
            AnyName => text.is_some_and(|text| text.is_empty() || (text.len() <= 253 && lower(text))),
            Condition => text.is_some_and(|text| text.len() <= 253 && all(text, "./_-")),
            Prefix => text.is_some_and(|text| text.len() <= 200 && lower(text)),
            Size => text.is_some_and(|text| {
                let unit = text.trim_start_matches(|c: char| c.is_ascii_digit());
                unit.len() < text.len() && ["Mi", "Gi", "Ti", "Pi", "M", "G", "T", "P"].contains(&unit)
            }),
            Path => text.is_some_and(|text| text.starts_with('/') && all(text, "._/-")),
            Lines => text.is_some(),
            Files => value
                .as_object()
                .is_some_and(|files| files.iter().all(|(name, text)| is_file_name(name) && text.is_string())),
            Labels => value.as_object().is_some_and(|labels| labels.values().all(Value::is_string)),
            Objects => value.as_array().is_some_and(|list| list.iter().all(Value::is_object)),
            Resources => value.as_object().is_some_and(|parts| {
                parts.iter().all(|(name, part)| ["requests", "limits"].contains(&name.as_str()) && part.is_object())
            }),
            AccessModes => value.as_array().is_some_and(|modes| {
                let known = ["ReadWriteMany", "ReadWriteOnce", "ReadOnlyMany", "ReadWriteOncePod"];
                !modes.is_empty() && modes.iter().all(|mode| mode.as_str().is_some_and(|mode| known.contains(&mode)))
            }),
        }
    }

    pub(super) fn description(self) -> String {
        match self {
            Flag => "true or false".to_owned(),
            Port => "a port, 1 to 65535".to_owned(),
            User => "a user id other than root's".to_owned(),
            OneOf(choices) => format!("one of {}", choices.join(", ")),
            Image => "an image, such as registry.example.com/cluster-doctor:0.3.0".to_owned(),
            Name => "a name of lowercase letters, digits, - and .".to_owned(),
            AnyName => "a name of lowercase letters, digits, - and ., or empty".to_owned(),
            Condition => "the type of a condition, such as GpuHealthy, or empty".to_owned(),
            Prefix => "a domain, such as cluster-doctor.io".to_owned(),
            Size => "a size, such as 20Gi".to_owned(),
            Path => "an absolute path".to_owned(),
            Lines => "text".to_owned(),
            Files => "texts by file name, such as {\"ours.toml\": \"…\"}".to_owned(),
            Labels => "labels, such as {\"pool\": \"gpu\"}".to_owned(),
            Objects => "a list of objects, such as [{\"key\": \"pool\", \"operator\": \"Exists\"}]".to_owned(),
            Resources => "requests and limits, such as {\"requests\": {\"cpu\": \"1\"}}".to_owned(),
            AccessModes => "access modes, such as [\"ReadWriteMany\"]".to_owned(),
        }
    }
}

fn is_file_name(name: &str) -> bool {
    let letters = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    name.strip_suffix(".toml")
        .is_some_and(|stem| !stem.is_empty() && !stem.starts_with('.') && stem.chars().all(letters))
}
