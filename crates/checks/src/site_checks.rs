//! Site checks: a command in the policy file, no code.
//!
//! ```toml
//! [tests.scratch-quota.params]
//! command = ["/usr/local/bin/check-quota", "--limit", "90"]
//! timeout = "30s"                  # default: 1 minute
//! quick = true                     # read-only: an agent runs it every 6 minutes, also on a busy node
//! ```
//!
//! Without `quick` it runs in validation runs and by `doctor-node test NAME`, on a free node. An agent takes commands
//! only from its own policy file, and only if that file is writable by root alone.
//!
//! The command uses the exit codes of Nagios plugins: 0 is OK, 1 is a warning and 2 is critical, and both fail; 3 and
//! everything else, including a timeout, says nothing about the node. Its first line of output is the text of the
//! finding. A warning is `monitor`; critical is `monitor` too unless the policy has a rule `NAME-critical` with another
//! severity, because only the site knows what its command proves.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use doctor_core::{
    ids::CheckId,
    observation::{Entity, Event, FailureKind, Metric, Observation, ProbeFailure, Unit},
    policy::Policy,
    time::Span,
};

use crate::{
    measurements::exit_failure,
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

/// The parameter that makes a test of the policy a site check.
pub const COMMAND: &str = "command";

/// The parameter that allows it to run at any time.
const QUICK: &str = "quick";

const TIMEOUT: Span = Span::minutes(1);

/// Returns the site checks of a policy: its tests with a `command`.
pub fn site_checks(policy: &Policy) -> Vec<Check> {
    let own = policy.tests.iter().filter(|(_, settings)| settings.params.contains_key(COMMAND));
    own.map(|(id, settings)| site_check(id, settings.params.get(QUICK) == Some(&true.into()))).collect()
}

/// Creates a site check. Specifications are `'static`, because nearly all are compiled in. A site's are leaked once per
/// name and cached, so that reading the policy again does not leak more.
fn site_check(id: &CheckId, quick: bool) -> Check {
    static MADE: Mutex<BTreeMap<(CheckId, bool), Check>> = Mutex::new(BTreeMap::new());
    let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
    *made.entry((id.clone(), quick)).or_insert_with(|| Check {
        spec: spec(String::leak(id.to_string()), quick),
        page: page_of(include_str!("site_checks.rs")),
        rules: String::leak(rules(id)),
        probes,
        interpret,
    })
}

fn spec(id: &'static str, quick: bool) -> Spec {
    const TITLE: &str = "command of this site";
    match quick {
        // Longer than the fast checks' period: it starts a program, and scheduler hooks run only checks that do not.
        true => Spec::quick(id, TITLE).every(Span::minutes(6)),
        false => Spec::deep(id, TITLE, Span::minutes(1), Span::minutes(30)),
    }
}

fn rules(id: &CheckId) -> String {
    let rule = |level: &str| {
        format!(
            "[[rules]]\nid = \"{id}-{level}\"\ncheck = \"{id}\"\nevent = \"{level}\"\nseverity = \"monitor\"\n\
             reason = \"site-{level}\"\ntext = \"{{value}}\"\n\n"
        )
    };
    rule("warning") + &rule("critical")
}

fn probes(params: &Params) -> Vec<Probe> {
    let Some((program, args)) = command(params) else { return Vec::new() };
    let timeout = match params.get("timeout") {
        None => Some(TIMEOUT),
        Some(value) => value.as_str().and_then(|text| text.parse().ok()),
    };
    timeout.map(|timeout| Probe::Exec { program, args, timeout }).into_iter().collect()
}

fn command(params: &Params) -> Option<(String, Vec<String>)> {
    let command = params.get(COMMAND)?.as_array()?.iter().map(|arg| arg.as_str().map(str::to_owned));
    let mut command = command.collect::<Option<Vec<_>>>()?.into_iter();
    Some((command.next()?, command.collect()))
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    let (exit, stdout, stderr) = match outputs {
        [ProbeOutput::Ran { exit, stdout, stderr }] => (*exit, stdout, stderr),
        [ProbeOutput::Failed(failure)] => return Observation::Failed(failure.clone()),
        [] => {
            let text = "`command` must be a list such as [\"/usr/bin/check\", \"-v\"] and `timeout` a duration such as \"30s\"";
            return Observation::Failed(ProbeFailure::new(FailureKind::Missing, text));
        }
        _ => return Observation::Failed(ProbeFailure::new(FailureKind::Unparseable, "no command was run")),
    };
    let line = stdout.lines().next().unwrap_or("").trim();
    let output: String =
        if line.is_empty() { "the command printed nothing".to_owned() } else { line.chars().take(300).collect() };
    let event = |code| vec![Event::seen(code, Entity::node(), output.clone())];
    let events = match exit {
        Some(0) => Vec::new(),
        Some(1) => event("warning"),
        Some(2) => event("critical"),
        Some(3) => {
            return Observation::Failed(ProbeFailure::new(
                FailureKind::Failed,
                format!("the command reported unknown (exit code 3): {output}"),
            ));
        }
        other => return Observation::Failed(exit_failure(other, stderr)),
    };
    // The exit code is the measurement: a command without output has still answered.
    let value = f64::from(exit.unwrap_or(0));
    let answered = Metric { name: "exit_code".to_owned(), entity: Entity::node(), value, unit: Unit::Count };
    Observation::measured(vec![answered], events)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Catalogue, Depth};
    use doctor_core::{classify::classify, finding::Verdict};

    fn policy() -> Policy {
        let text = format!(
            "{}\n[tests.quota.params]\ncommand = [\"/bin/quota\", \"-v\"]\ntimeout = \"5s\"\n",
            Policy::DEFAULT_TEXT
        );
        toml::from_str(&text).unwrap()
    }

    #[test]
    fn nagios_exit_codes_become_verdicts() {
        let policy = policy();
        let id = CheckId::new("quota").unwrap();
        let catalogue = Catalogue::with_site_checks(&policy);
        let check = catalogue.get(&id).unwrap();
        let rules = catalogue.rules(&policy).unwrap();
        for (exit, verdict) in [
            (Some(0), Verdict::Pass),
            (Some(1), Verdict::Fail),
            (Some(2), Verdict::Fail),
            (Some(3), Verdict::Inconclusive),
            (Some(127), Verdict::Inconclusive),
            (None, Verdict::Inconclusive),
        ] {
            let output = ProbeOutput::Ran { exit, stdout: "93 % used\n".into(), stderr: String::new() };
            let judged = classify(&rules, None, &id, &(check.interpret)(&Params::new(), &[output]));
            assert_eq!(judged.verdict, verdict, "{exit:?}");
        }
    }

    #[test]
    fn only_a_command_declared_quick_runs_on_a_busy_node() {
        let spec = |more: &str| {
            let text = format!("[tests.quota.params]\ncommand = [\"/bin/quota\"]\n{more}");
            site_checks(&Policy::with_site_settings(&text).unwrap())[0].spec
        };
        for (more, quick) in [("", false), ("quick = false", false), ("quick = \"yes\"", false), ("quick = true", true)]
        {
            let spec = spec(more);
            assert_eq!((spec.depth == Depth::Quick, spec.exclusive), (quick, !quick), "{more}");
        }
    }

    #[test]
    fn the_command_and_its_timeout_come_from_the_policy() {
        let policy = policy();
        let id = CheckId::new("quota").unwrap();
        let catalogue = Catalogue::with_site_checks(&policy);
        let probes = (catalogue.get(&id).unwrap().probes)(&catalogue.params(&policy, &id));
        let expected =
            Probe::Exec { program: "/bin/quota".into(), args: vec!["-v".into()], timeout: Span::from_secs(5) };
        assert_eq!(probes, [expected]);
    }

    #[test]
    fn an_invalid_command_is_reported_with_the_expected_format() {
        for command in [toml::Value::from("one string"), toml::Value::Array(vec![]), toml::Value::from(3)] {
            let params: Params = [(COMMAND.to_owned(), command)].into();
            assert!(probes(&params).is_empty());
            assert!(matches!(interpret(&params, &[]), Observation::Failed(f) if f.text.contains("a list such as")));
        }
    }
}
