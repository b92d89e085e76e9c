//! Prometheus metrics, computed at each scrape.
//!
//! Every series is declared once in [`FAMILIES`], with its help text; the reference page, the scrape, and the test that
//! dashboards and rules use nothing else are derived from it. Nothing is counted here: gauges come from the cluster
//! state and counters from the store, so a restart resets none and two controllers report the same. Metrics of the
//! process itself (memory, waiting agent messages, spans) are the exception.
//!
//! The text format is written here and not by a library: libraries keep counters in memory, and there are none.

mod families;
mod gather;

use std::fmt::Write;

pub(crate) use self::gather::add_process_metrics;
pub use self::{
    families::{FAMILIES, Family, Kind},
    gather::{MetricsSettings, gather},
};

/// The series of one scrape, by the family's position in [`FAMILIES`].
#[derive(Debug, Default, PartialEq)]
pub struct Scrape {
    series: Vec<Vec<Series>>,
}

#[derive(Debug, Clone, PartialEq)]
struct Series {
    labels: Vec<String>,
    value: f64,
}

impl Scrape {
    fn new() -> Self {
        Self { series: vec![Vec::new(); FAMILIES.len()] }
    }

    /// Adds a series. An undeclared name, or other labels, is a bug: the series is left out, and the test over all
    /// families finds it.
    fn add(&mut self, name: &str, labels: &[&str], value: f64) {
        let index = FAMILIES.iter().position(|family| family.name == name && family.labels.len() == labels.len());
        debug_assert!(index.is_some(), "{name} with {} labels is not declared", labels.len());
        if let Some(index) = index {
            let labels = labels.iter().map(|label| (*label).to_owned()).collect();
            self.series[index].push(Series { labels, value });
        }
    }

    /// Formats the scrape in Prometheus' text format (version 0.0.4).
    pub fn text(&self) -> String {
        let mut text = String::new();
        for (family, series) in FAMILIES.iter().zip(&self.series).filter(|(_, series)| !series.is_empty()) {
            let (name, help, kind) = (family.name, family.help, family.kind.word());
            text.push_str(&format!("# HELP {name} {help}\n# TYPE {name} {kind}\n"));
            for one in series {
                text.push_str(name);
                let labels: Vec<String> = family
                    .labels
                    .iter()
                    .zip(&one.labels)
                    .map(|((label, _), value)| format!("{label}=\"{}\"", escaped(value)))
                    .collect();
                if !labels.is_empty() {
                    text.push_str(&format!("{{{}}}", labels.join(",")));
                }
                // Writing to a String does not fail.
                let _written = writeln!(text, " {}", one.value);
            }
        }
        text
    }
}

/// Escapes a label value.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_cannot_break_out_of_its_quotes() {
        let mut scrape = Scrape::new();
        scrape.add("doctor_alert_notes_waiting", &["a\"} 1\nevil{x=\"\\"], 2.0);
        let text = scrape.text();
        assert_eq!(text.lines().count(), 3, "{text}");
        assert!(text.ends_with("doctor_alert_notes_waiting{receiver=\"a\\\"} 1\\nevil{x=\\\"\\\\\"} 2\n"), "{text}");
    }

    /// Returns the series that a PromQL text names.
    fn named(text: &str) -> std::collections::BTreeSet<&str> {
        let tokens = text.split(|character: char| !character.is_ascii_alphanumeric() && character != '_');
        tokens.filter(|token| token.starts_with("doctor_")).collect()
    }

    #[test]
    fn the_dashboard_and_the_rules_use_series_that_exist_and_rules_are_tested() {
        let deploy = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy");
        let read = |name: &str| std::fs::read_to_string(deploy.join(name)).unwrap();
        let (rules, tests) = (read("prometheus/rules.yml"), read("prometheus/rules.test.yml"));
        let dashboard: serde_json::Value = serde_json::from_str(&read("grafana/dashboard.json")).unwrap();
        let panels = dashboard["panels"].as_array().unwrap();
        let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().unwrap());
        let expressions: Vec<&str> = targets.map(|target| target["expr"].as_str().unwrap()).collect();
        let dashboard = expressions.join(" ");
        let exists = |name: &&str| FAMILIES.iter().any(|family| family.name == *name);
        for (source, text) in [("rules", &rules), ("their tests", &tests), ("the dashboard", &dashboard)] {
            let names = named(text);
            assert!(names.len() >= 8, "{source}: {names:?}");
            assert!(names.iter().all(exists), "{source}: {names:?}");
        }
        for alert in rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")) {
            assert!(tests.contains(&format!("alertname: {alert}")), "{alert} has no test");
        }
    }

    #[test]
    fn names_follow_the_rules_of_prometheus_and_each_is_declared_once() {
        for (index, family) in FAMILIES.iter().enumerate() {
            let name = family.name;
            let plain = |text: &str| text.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
            assert!(name.starts_with("doctor_") && plain(name), "{name}");
            assert_eq!(name.ends_with("_total"), family.kind == Kind::Counter, "{name}");
            assert!(family.labels.iter().all(|(label, values)| plain(label) && !values.is_empty()), "{name}");
            assert!(!family.help.is_empty() && !family.help.contains(['\n', '\\']), "{name}");
            assert!(FAMILIES[..index].iter().all(|other| other.name != name), "{name} twice");
        }
    }
}
