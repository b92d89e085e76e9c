//! Generates the pages of `docs/reference`.

use clap::{Arg, Command};
use doctor_api::metrics::FAMILIES;
use doctor_checks::{
    Catalogue, Depth, Params,
    coverage_of_other_tools::{COVERAGE, Coverage},
};
use doctor_core::{
    access::{Access, Place},
    finding::Severity,
    policy::{Policy, Rule, When},
    view::AttentionKind,
};

use super::reasons::reasons;
use crate::{
    config::default_text,
    deploy::settings_page,
    exit::{Exit, NagiosExit},
};

/// A page: its file name and its text.
#[derive(Debug)]
pub(crate) struct ReferencePage {
    pub name: &'static str,
    pub text: String,
}

const GENERATED_NOTICE: &str = "<!-- Generated from the code by `make docs`; changes here are overwritten. -->\n";

/// Returns every reference page.
pub(crate) fn generate_all() -> Vec<ReferencePage> {
    vec![
        ReferencePage { name: "checks.md", text: checks() },
        ReferencePage { name: "cli.md", text: command_line() },
        ReferencePage { name: "config.md", text: config() },
        ReferencePage { name: "coverage.md", text: coverage() },
        ReferencePage { name: "deployment.md", text: deployment() },
        ReferencePage { name: "openapi.json", text: doctor_api::operator_api::openapi_text() },
        ReferencePage { name: "exit-codes.md", text: exit_codes() },
        ReferencePage { name: "metrics.md", text: metrics() },
        ReferencePage { name: "reasons.md", text: reason_codes() },
    ]
}

fn page(title: &str, intro: &str) -> String {
    format!("{GENERATED_NOTICE}\n# {title}\n\n{intro}\n\n")
}

fn escape_pipes(text: &str) -> String {
    text.replace('|', "\\|")
}

/// Returns the condition of a rule in words.
pub(crate) fn rule_condition(rule: &Rule) -> String {
    condition(&rule.when)
}

/// Returns where a check runs and which access it needs there, in words.
pub(crate) fn place_sentence(place: Place, access: &[Access]) -> String {
    let place = match place {
        Place::Agent => "by the agent where one is deployed, otherwise in a validation job",
        Place::Job => "in a validation job",
    };
    let needs: Vec<String> = access.iter().map(|access| format!("{} (`{access}`)", access.label())).collect();
    match &needs[..] {
        [] => format!("{place}; it needs no access that a container does not have."),
        needs => format!("{place}; it needs {}.", needs.join(", ")),
    }
}

fn condition(when: &When) -> String {
    match when {
        When::Above { metric, limit } => format!("{metric} above {limit}"),
        When::Below { metric, limit } => format!("{metric} below {limit}"),
        When::BelowProfile { metric, percent, of: None } => {
            format!("{metric} below {percent} % of the machine type's profile")
        }
        When::BelowProfile { metric, percent, of: Some(of) } => {
            format!("{metric} below {percent} % of {of} in the machine type's profile")
        }
        When::NotProfile { metric } => format!("{metric} different from the machine type's profile"),
        When::BelowPeers { metric, percent, at_least } => {
            format!("{metric} below {percent} % of the median of at least {at_least} other nodes of the type")
        }
        When::BelowOwn { metric, percent, at_least } => {
            format!("{metric} below {percent} % of the median of at least {at_least} earlier results")
        }
        When::NOfLastM { when, times, last } => format!("{}, in {times} of the last {last} results", condition(when)),
        When::Event(code) => format!("event {code}"),
        When::EventsWithin { code, times, within } => format!("event {code} {times} times within {within}"),
    }
}

fn deployment() -> String {
    let intro = "Settings of a deployment in a Kubernetes cluster: the values of the Helm chart `deploy/helm/cluster-doctor`, which \
        `doctor deploy kubernetes --set` accepts too. The chart takes the namespace from `helm --namespace`, the command \
        from the configuration or from `--namespace`.";
    page("Settings of a deployment", intro) + &settings_page()
}

/// Lists the health checks of other systems and the check here that covers each.
fn coverage() -> String {
    let mut text = page(
        "Coverage",
        "What the health checks of other systems cover, and which check covers it here, or why none does.",
    );
    let mut area = "";
    for row in COVERAGE {
        if row.area != area {
            area = row.area;
            text.push_str(&format!(
                "{}## {area}\n\n| what | here |\n|---|---|\n",
                if text.ends_with("|\n") { "\n" } else { "" }
            ));
        }
        let here = match row.coverage {
            Coverage::Checked(checks) => {
                checks.iter().map(|id| format!("[{id}](checks.md#{id})")).collect::<Vec<_>>().join(", ")
            }
            Coverage::NotChecked(why) => format!("none: {why}"),
        };
        text.push_str(&format!("| {} | {} |\n", escape_pipes(row.what), escape_pipes(&here)));
    }
    text
}

fn checks() -> String {
    let severities = Severity::legend(Severity::ALL.iter().copied()).unwrap_or_default();
    let intro = format!(
        "Every check built into this version, with its default rules. `doctor explain NAME` shows what is in force.\n\n\
         Severities: {severities}."
    );
    let mut text = page("Checks", &intro);
    let catalogue = Catalogue::built_in();
    let rules = catalogue.rules(&Policy::built_in()).unwrap_or_default();
    for check in catalogue.iter() {
        let spec = &check.spec;
        let depth = match spec.depth {
            Depth::Quick => "quick: reads only",
            Depth::Deep => "deep: loads the node",
        };
        text.push_str(&format!("## {}\n\n{}\n\n", spec.id, check.page_text().trim()));
        text.push_str(&format!(
            "{depth}; {}{}; a result is valid for {}; cancelled after {}; usually takes {}.\n\n",
            if spec.exclusive { "needs the node to itself" } else { "runs together with other tests" },
            if spec.opt_in { "; planned only if a suite contains it or the policy sets `enabled = true`" } else { "" },
            spec.cutoff,
            spec.limit,
            spec.typical_duration
        ));
        let sentence = place_sentence(spec.place(), &check.access(&Params::new()));
        text.push_str(&format!("Runs {sentence}\n\n"));
        text.push_str("| rule | when | severity | reason | confirmed after |\n|---|---|---|---|--:|\n");
        for rule in rules.iter().filter(|rule| rule.check.as_str() == spec.id) {
            let condition = escape_pipes(&rule_condition(rule));
            text.push_str(&format!(
                "| {} | {condition} | {} | {} | {} |\n",
                rule.id, rule.severity, rule.reason, rule.confirm
            ));
        }
        text.push('\n');
    }
    text
}

fn metrics() -> String {
    let mut text = page(
        "Metrics",
        "Every series at `/metrics`, with its labels and their values. [The guide](../guide/metrics.md) describes how to use them.",
    );
    text.push_str("| series | kind | labels | meaning |\n|---|---|---|---|\n");
    for family in FAMILIES {
        let labels: Vec<String> = family.labels.iter().map(|(name, values)| format!("`{name}`: {values}")).collect();
        let (name, kind, help) = (family.name, family.kind.word(), escape_pipes(family.help));
        text.push_str(&format!("| `{name}` | {kind} | {} | {help} |\n", escape_pipes(&labels.join("; "))));
    }
    text
}

fn exit_codes() -> String {
    let mut text = page(
        "Exit codes",
        "Exit codes of `doctor`. A code never changes its meaning. `doctor status` has its own, below.",
    );
    text.push_str("| code | meaning |\n|--:|---|\n");
    for exit in Exit::ALL {
        text.push_str(&format!("| {} | {} |\n", exit.code(), exit.meaning()));
    }
    text.push_str("\n## `doctor status`\n\nThe codes of a Nagios plugin, for this command only.\n\n");
    text.push_str("| code | meaning |\n|--:|---|\n");
    for exit in NagiosExit::ALL {
        text.push_str(&format!("| {} | {} |\n", exit.code(), exit.meaning()));
    }
    text.push_str("\nWhat it lists, most urgent first:\n\n| kind | meaning |\n|---|---|\n");
    for kind in AttentionKind::ALL {
        text.push_str(&format!("| `{kind}` | {} |\n", kind.meaning()));
    }
    text
}

fn config() -> String {
    let mut text = page(
        "Configuration",
        "The two files that `doctor config init` writes: every setting, its default and what it means. Unknown keys are errors.",
    );
    text.push_str(&format!(
        "## doctor.toml\n\n```toml\n{}```\n\n## policy.toml\n\n```toml\n{}```\n",
        default_text(),
        Policy::DEFAULT_TEXT
    ));
    text
}

fn reason_codes() -> String {
    let mut text = page(
        "Reason codes",
        "Stable codes that databases, JSON and scripts may rely on. The codes of rules are on the page of checks. `doctor explain CODE` shows one.",
    );
    let all = reasons();
    let mut kinds: Vec<&str> = all.iter().map(|reason| reason.kind).collect();
    kinds.dedup();
    for kind in kinds {
        let rows: Vec<_> = all.iter().filter(|reason| reason.kind == kind).collect();
        let to_do = rows.iter().any(|reason| !reason.to_do.is_empty());
        text.push_str(&format!("## {}{}\n\n", kind[..1].to_uppercase(), &kind[1..]));
        text.push_str(if to_do {
            "| code | means | what to do |\n|---|---|---|\n"
        } else {
            "| code | means |\n|---|---|\n"
        });
        for reason in rows {
            let extra = if to_do { format!(" {} |", escape_pipes(reason.to_do)) } else { String::new() };
            text.push_str(&format!("| `{}` | {} |{extra}\n", reason.code, escape_pipes(reason.means)));
        }
        text.push('\n');
    }
    text
}

fn command_line() -> String {
    let mut root = crate::command_line();
    root.build();
    let about = root.get_long_about().or_else(|| root.get_about()).map(ToString::to_string).unwrap_or_default();
    let mut text = page("Command line", &about);
    text.push_str("Options of every command:\n\n");
    options(&mut text, root.get_arguments().filter(|arg| arg.is_global_set()));
    for command in root.get_subcommands().filter(|command| command.get_name() != "help") {
        describe(&mut text, command, "doctor", 2);
    }
    text
}

fn describe(text: &mut String, command: &Command, parent: &str, level: usize) {
    let name = format!("{parent} {}", command.get_name());
    text.push_str(&format!("{} {name}\n\n", "#".repeat(level)));
    if let Some(about) = command.get_long_about().or_else(|| command.get_about()) {
        let about = about.to_string();
        let stop = if about.ends_with('.') { "" } else { "." };
        text.push_str(&format!("{about}{stop}\n\n"));
    }
    let children: Vec<&Command> = command.get_subcommands().filter(|child| child.get_name() != "help").collect();
    if children.is_empty() {
        let visible_args = || {
            command
                .get_arguments()
                .filter(|arg| !arg.is_global_set() && !matches!(arg.get_id().as_str(), "help" | "version"))
        };
        let positionals: Vec<String> = visible_args().filter(|arg| arg.is_positional()).map(positional).collect();
        let flags = if visible_args().any(|arg| !arg.is_positional()) { " [OPTIONS]" } else { "" };
        let arguments = positionals.iter().map(|word| format!(" {word}")).collect::<String>();
        text.push_str(&format!("```\n{name}{flags}{arguments}\n```\n\n"));
        options(text, visible_args());
    }
    for child in children {
        describe(text, child, &name, level + 1);
    }
}

fn positional(arg: &Arg) -> String {
    let value = arg
        .get_value_names()
        .and_then(|names| names.first())
        .map_or_else(|| arg.get_id().as_str().to_uppercase(), ToString::to_string);
    let many = if arg.get_num_args().is_some_and(|range| range.max_values() > 1) { "…" } else { "" };
    if arg.is_required_set() { format!("{value}{many}") } else { format!("[{value}{many}]") }
}

fn options<'a>(text: &mut String, args: impl Iterator<Item = &'a Arg>) {
    let mut rows = String::new();
    for arg in args {
        let value = match arg.get_action().takes_values() {
            true => arg
                .get_value_names()
                .and_then(|names| names.first())
                .map_or_else(String::new, |name| format!(" {name}")),
            false => String::new(),
        };
        let flag = match (arg.get_long(), arg.get_short()) {
            (Some(long), Some(short)) => format!("-{short}, --{long}{value}"),
            (Some(long), None) => format!("--{long}{value}"),
            (None, Some(short)) => format!("-{short}{value}"),
            (None, None) => positional(arg),
        };
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        let defaults: Vec<String> =
            arg.get_default_values().iter().map(|value| value.to_string_lossy().into_owned()).collect();
        let default = match defaults.as_slice() {
            [] => String::new(),
            _ if !arg.get_action().takes_values() => String::new(),
            some => format!(" Default: `{}`.", some.join(" ")),
        };
        let env = arg.get_env().map_or_else(String::new, |name| format!(" Also: `${}`.", name.to_string_lossy()));
        let stop = if help.ends_with('.') { "" } else { "." };
        rows.push_str(&format!("| `{}` | {}{stop}{default}{env} |\n", escape_pipes(&flag), escape_pipes(&help)));
    }
    if !rows.is_empty() {
        text.push_str(&format!("| | |\n|---|---|\n{rows}\n"));
    }
}
