//! The Helm chart, generated from the same trees and the same table of settings as the printed manifests.

use std::fmt::Write as _;

use doctor_backend_kubernetes::KubernetesConfig;

use serde_json::{Map, Value, json};

use super::{
    objects::Group,
    settings::{self, Setting},
    yaml,
};

const GENERATED_NOTICE: &str = "# Generated from the code by `make docs`; changes here are overwritten.\n";

/// Returns every file of the chart: its path in the chart and its text.
pub(crate) fn files() -> Vec<(String, String)> {
    let config = KubernetesConfig::default();
    let template = |group: Group| {
        let objects = group.objects(&config);
        (
            format!("templates/{}.yaml", group.name()),
            format!("{{{{- /* {} */}}}}\n{}", generated_notice(), yaml::documents(&objects)),
        )
    };
    let mut files = vec![
        ("Chart.yaml".to_owned(), chart()),
        ("values.yaml".to_owned(), values()),
        ("values.schema.json".to_owned(), schema()),
        ("templates/NOTES.txt".to_owned(), NOTES.to_owned()),
    ];
    files.extend(Group::ALL.map(template));
    files
}

fn generated_notice() -> &'static str {
    GENERATED_NOTICE.trim_start_matches("# ").trim_end()
}

fn chart() -> String {
    let version = env!("CARGO_PKG_VERSION");
    format!(
        "{GENERATED_NOTICE}apiVersion: v2\nname: cluster-doctor\n\
         description: Finds the bad GPU nodes of a cluster, proves it, and takes them out of service and back.\n\
         type: application\nversion: {version}\nappVersion: {version:?}\nkubeVersion: \">=1.29.0-0\"\n"
    )
}

/// Returns values.yaml: the defaults, each with a description.
pub(crate) fn values() -> String {
    let mut text = format!("{GENERATED_NOTICE}# Every value here is the default; set only what you change.\n");
    let mut group = "";
    for setting in settings::ALL {
        let (setting_group, name) = setting.name.split_once('.').unwrap_or(("", setting.name));
        if setting_group.is_empty() || setting_group != group {
            text.push('\n');
        }
        if !setting_group.is_empty() && setting_group != group {
            text += &format!("{setting_group}:\n");
        }
        group = setting_group;
        let indent = if setting_group.is_empty() { "" } else { "  " };
        for line in [format!("# {}", setting.description), format!("{name}: {}", flow_yaml(&setting.default_value()))] {
            // Writing to a `String` cannot fail.
            let _written = writeln!(text, "{indent}{line}");
        }
    }
    text
}

fn flow_yaml(value: &Value) -> String {
    match value {
        Value::Array(items) if !items.is_empty() => {
            format!("[{}]", items.iter().map(flow_yaml).collect::<Vec<_>>().join(", "))
        }
        Value::Object(entries) if !entries.is_empty() => {
            let entry = |(key, value): (&String, &Value)| {
                format!("{}: {}", yaml::scalar(&Value::String(key.clone())), flow_yaml(value))
            };
            format!("{{{}}}", entries.iter().map(entry).collect::<Vec<_>>().join(", "))
        }
        other => yaml::scalar(other),
    }
}

/// Returns the JSON schema that Helm validates values against. Unknown names are rejected.
fn schema() -> String {
    let closed = || json!({ "type": "object", "additionalProperties": false, "properties": {} });
    let mut root = closed();
    root["$schema"] = json!("http://json-schema.org/draft-07/schema#");
    root["title"] = json!("Values of the chart cluster-doctor");
    // Helm adds `global` itself.
    root["properties"]["global"] = json!({ "type": "object" });
    for setting in settings::ALL {
        let mut properties = &mut root["properties"];
        let mut name = setting.name;
        while let Some((group, rest)) = name.split_once('.') {
            if properties[group].is_null() {
                properties[group] = closed();
            }
            properties = &mut properties[group]["properties"];
            name = rest;
        }
        properties[name] = setting_schema(setting);
    }
    let mut text = serde_json::to_string_pretty(&root).expect("a JSON value serialises to JSON");
    text.push('\n');
    text
}

fn setting_schema(setting: &Setting) -> Value {
    let mut schema = setting.value_type.schema();
    schema["description"] = json!(setting.description);
    schema
}

const NOTES: &str = "\
Cluster Doctor {{ .Chart.AppVersion }} is in the namespace {{ .Release.Namespace }}.

  kubectl -n {{ .Release.Namespace }} rollout status deployment/cluster-doctor
  kubectl -n {{ .Release.Namespace }} exec deployment/cluster-doctor -- doctor status
{{- if .Values.agent.enabled }}
  kubectl -n {{ .Release.Namespace }} get pods -l app.kubernetes.io/component=agent -o wide

Agents read their node's kernel log and GPUs and need a namespace that allows it:

  kubectl label namespace {{ .Release.Namespace }} pod-security.kubernetes.io/enforce=privileged
{{- end }}
{{- if eq .Values.store.kind \"postgres\" }}

The controller waits for the Secret {{ .Values.store.secret }} with the key `url`:

  kubectl -n {{ .Release.Namespace }} create secret generic {{ .Values.store.secret }} --from-literal=url=postgres://USER:PASSWORD@HOST/DATABASE
{{- end }}
{{- if eq .Values.tls.kind \"secret\" }}

The controller waits for the Secret {{ .Values.tls.secret }}, and agents for the ConfigMap {{ .Values.tls.authority }}. If they do not exist yet:

  doctor deploy kubernetes --what certificate --namespace {{ .Release.Namespace }} | kubectl create -f -
{{- end }}
{{- if not .Values.policy }}

It marks bad nodes and only proposes other actions. To permit more, set `policy` (policy.toml).
{{- end }}
";

/// Returns the settings as a Markdown table.
pub(crate) fn settings_table() -> String {
    let mut text = String::from("| setting | default | description |\n|---|---|---|\n");
    for setting in settings::ALL {
        let default = match setting.default_value() {
            Value::String(empty) if empty.is_empty() => "empty".to_owned(),
            value => format!("`{}`", flow_yaml(&value)),
        };
        let _written =
            writeln!(text, "| `{}` | {default} | {} |", setting.name, setting.description.replace('|', "\\|"));
    }
    text
}

/// Returns the values that differ from the defaults, for `helm --values`.
pub(crate) fn changed_values(values: &Value) -> Value {
    diff_values(&settings::defaults(), values).unwrap_or_else(|| json!({}))
}

/// Compares recursively. Helm merges maps, so a default that must go is set to null.
fn diff_values(usual: &Value, now: &Value) -> Option<Value> {
    let (Value::Object(before), Value::Object(after)) = (usual, now) else {
        return (usual != now).then(|| now.clone());
    };
    let mut changed = Map::new();
    for (key, now) in after {
        let change = before.get(key).map_or_else(|| Some(now.clone()), |usual| diff_values(usual, now));
        changed.extend(change.map(|change| (key.clone(), change)));
    }
    changed.extend(before.keys().filter(|key| !after.contains_key(*key)).map(|key| (key.clone(), Value::Null)));
    (!changed.is_empty()).then_some(Value::Object(changed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removed_map_entries_are_removed_from_the_defaults() {
        let usual = json!({ "a": { "x": "1", "y": "2" }, "b": [1], "c": "" });
        assert_eq!(diff_values(&usual, &usual), None);
        let now = json!({ "a": { "z": "3", "y": "2" }, "b": [], "c": "" });
        assert_eq!(diff_values(&usual, &now), Some(json!({ "a": { "x": null, "z": "3" }, "b": [] })));
    }
}
