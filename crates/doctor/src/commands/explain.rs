//! `doctor explain`: describes a check, a rule, a reason code or an error number, with the settings in force.

mod error_number;

use std::collections::BTreeMap;

use doctor_checks::{Catalogue, Check, Params, Suite};
use doctor_core::{
    access::{Access, Place},
    ids::{CheckId, TestId},
    near,
    policy::{Policy, Rule, TestPolicy},
    time::Span,
};
use doctor_engine::settings::Settings;
use serde::Serialize;

use crate::{
    context::Context,
    exit::Exit,
    failure::{Failure, Result},
    output::{Page, comma_separated},
    reference_pages::{Reason, place_sentence, reasons, rule_condition},
};

const EXAMPLES: &str = "\
Examples:
  doctor explain disk-space
  doctor explain xid 79
  doctor explain XID79
  doctor explain isolate
  doctor explain suspect";

/// Explain a check, a rule, a reason code, a severity, a node state or an error number: its meaning, the settings in
/// force, and what to do.
///
/// Case does not count, and a number may follow its family without a space. A number alone is an Xid, or else an SXid.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Args {
    /// Name, such as `disk-space`, `isolate` or `suspect`, or `xid`, `sxid` or `dcgm` before a number. Default: list
    /// what can be explained.
    #[arg(value_name = "CHECK|RULE|REASON|SEVERITY|STATE|xid|sxid|dcgm")]
    name: Option<String>,
    /// Number of an Xid, an SXid or a DCGM error, such as 79.
    number: Option<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
enum Explained<'a> {
    Check {
        name: &'a str,
        title: &'a str,
        page: String,
        place: Place,
        access: Vec<Access>,
        settings: Option<&'a TestPolicy>,
        params: serde_json::Value,
        rules: Vec<&'a Rule>,
    },
    Rule {
        rule: &'a Rule,
    },
    Reason {
        code: &'a str,
        meanings: Vec<Reason>,
        rules: Vec<&'a Rule>,
    },
    Number(error_number::ErrorNumber<'a>),
    Suites {
        suites: Vec<SuiteView<'a>>,
    },
    Contents {
        suites: Vec<&'a str>,
        checks: Vec<&'a str>,
        rules: Vec<&'a str>,
        reasons: Vec<&'a str>,
    },
}

/// A suite: its tests, and how often it runs.
#[derive(Debug, Serialize)]
struct SuiteView<'a> {
    name: &'a str,
    tests: Vec<TestId>,
    every: Option<Span>,
    /// Whether agents run it, instead of the controller.
    by_agents: bool,
}

pub(crate) fn run(context: &Context, args: &Args) -> Result<Exit> {
    // `doctor demo` leaves a store without a configuration, so the simulated cluster's tests are always known here.
    let settings = &context.loaded()?.settings;
    let simulated = simulated(&settings.policy)?;
    let name = args.name.as_deref().map(str::to_lowercase);
    let split = name.as_deref().and_then(error_number::split);
    let explained = match (name.as_deref(), args.number.as_deref(), split) {
        (None, ..) => contents(settings),
        (Some(family), Some(number), _) if error_number::FAMILIES.contains(&family) => {
            Explained::Number(error_number::explain(family, number, &settings.rules)?)
        }
        (Some(word), None, Some((family, number))) => {
            match error_number::explain(family, number, &settings.rules) {
                Ok(found) => Explained::Number(found),
                // A reason code may have the same form, such as that of a variant.
                Err(error) => explain(settings, word).ok_or(error)?,
            }
        }
        // `dcgm` without a number is the test of that name.
        (Some(family), None, None)
            if error_number::FAMILIES.contains(&family) && explain(settings, family).is_none() =>
        {
            return Err(Failure::Usage(format!("the number is missing, such as `doctor explain {family} 79`")));
        }
        (Some(name), Some(_), _) => {
            return Err(Failure::Usage(format!("only xid, sxid and dcgm take a number, not `{name}`")));
        }
        (Some(name), None, None) => explain(settings, name)
            .or_else(|| explain(&simulated, name))
            .ok_or_else(|| unknown(settings, &simulated, name))?,
    };
    context.out.show(&explained, |page| text(page, &explained))?;
    Ok(Exit::Ok)
}

fn simulated(policy: &Policy) -> Result<Settings> {
    let mut minimal = Policy { tests: BTreeMap::new(), suites: BTreeMap::new(), rules: Vec::new(), ..policy.clone() };
    minimal.repair.requalification.clear();
    minimal.repair.examine.clear();
    let catalogue: Catalogue = doctor_sim::simulated_tests::catalogue();
    Settings::new(minimal, catalogue, doctor_sim::simulated_tests::profiles())
        .map_err(|error| Failure::Other(error.to_string()))
}

fn explain<'a>(settings: &'a Settings, name: &'a str) -> Option<Explained<'a>> {
    if let Some(check) = settings.catalogue.iter().find(|check| check.spec.id == name) {
        return Some(explain_check(settings, check));
    }
    if let Some(suites) = explain_suites(settings, name) {
        return Some(suites);
    }
    if let Some(rule) = settings.rules.iter().find(|rule| rule.id.as_str() == name) {
        return Some(Explained::Rule { rule });
    }
    let meanings: Vec<Reason> = reasons().into_iter().filter(|reason| reason.code == name).collect();
    let rules: Vec<&Rule> = settings.rules.iter().filter(|rule| rule.reason.as_str() == name).collect();
    (!meanings.is_empty() || !rules.is_empty()).then_some(Explained::Reason { code: name, meanings, rules })
}

/// Explains one suite by name, or all suites for the name `suites`.
/// The suite of all checks that only read.
const QUICK: &str = "quick";

fn explain_suites<'a>(settings: &'a Settings, name: &str) -> Option<Explained<'a>> {
    let suites = settings.catalogue.suites().iter().filter(|(suite, _)| name == "suites" || suite.as_str() == name);
    let view = |(name, suite): (&'a TestId, &'a Suite)| SuiteView {
        name: name.as_str(),
        tests: suite.tests.clone(),
        every: suite.every,
        by_agents: false,
    };
    let mut suites: Vec<_> = suites.map(view).collect();
    let quick = TestId::new(QUICK).ok().filter(|_| name == "suites" || name == QUICK);
    suites.extend(quick.map(|quick| SuiteView {
        name: QUICK,
        tests: settings.catalogue.expand(&[quick]),
        every: Some(settings.policy.agents.check_every),
        by_agents: true,
    }));
    (!suites.is_empty()).then_some(Explained::Suites { suites })
}

fn explain_check<'a>(settings: &'a Settings, check: &'a Check) -> Explained<'a> {
    let in_force = settings.tests.iter().find(|test| test.id.as_str() == check.spec.id);
    let params =
        CheckId::new(check.spec.id).ok().map(|id| settings.catalogue.params(&settings.policy, &id).into_owned());
    Explained::Check {
        name: check.spec.id,
        title: check.spec.title,
        page: check.page_text(),
        place: check.spec.place(),
        access: check.access(params.as_ref().unwrap_or(&Params::new())),
        settings: in_force,
        params: params.and_then(|params| serde_json::to_value(params).ok()).unwrap_or_default(),
        rules: settings.rules.iter().filter(|rule| rule.check.as_str() == check.spec.id).collect(),
    }
}

fn contents(settings: &Settings) -> Explained<'_> {
    let mut codes: Vec<&str> = reasons().iter().map(|reason| reason.code).collect();
    codes.sort_unstable();
    codes.dedup();
    Explained::Contents {
        suites: settings.catalogue.suites().keys().map(TestId::as_str).collect(),
        checks: settings.catalogue.iter().map(|check| check.spec.id).collect(),
        rules: settings.rules.iter().map(|rule| rule.id.as_str()).collect(),
        reasons: codes,
    }
}

/// Names what resembles the word, of all that can be explained, or else the checks.
fn unknown(settings: &Settings, simulated: &Settings, name: &str) -> Failure {
    let mut all: Vec<&str> = error_number::FAMILIES.to_vec();
    all.extend(reasons().iter().map(|reason| reason.code));
    for settings in [settings, simulated] {
        all.extend(settings.catalogue.iter().map(|check| check.spec.id));
        all.extend(settings.catalogue.suites().keys().map(TestId::as_str));
        all.extend(settings.rules.iter().flat_map(|rule| [rule.id.as_str(), rule.reason.as_str()]));
    }
    let similar = near::near(name, all);
    let known = match similar.is_empty() {
        true => format!(
            "{}; `doctor explain` lists rules and reasons too",
            comma_separated(settings.catalogue.iter().map(|check| check.spec.id))
        ),
        false => comma_separated(similar),
    };
    Failure::Unknown { what: "check, rule or reason", name: name.to_owned(), known }
}

fn text(page: &mut Page, explained: &Explained<'_>) {
    match explained {
        Explained::Check { page: text_page, place, access, settings, params, rules, .. } => {
            page.line(text_page.trim_end());
            page.heading("Where it runs");
            page.line(format!("  {}", place_sentence(*place, access)));
            page.heading("In force");
            match settings {
                Some(test) => print_test_settings(page, test, params),
                None => {
                    page.line("  disabled by the policy (`enabled = false`)");
                }
            }
            page.heading("Rules");
            for rule in rules {
                show_rule(page, rule);
            }
            page.legend(rules.iter().map(|rule| rule.severity));
        }
        Explained::Rule { rule } => {
            page.line(format!("Rule {} of check {}.", rule.id, rule.check));
            show_rule(page, rule);
            page.legend([rule.severity]);
            page.line(format!("`doctor explain {}` describes the check.", rule.check));
        }
        Explained::Reason { code, meanings, rules } => {
            for meaning in meanings {
                page.line(format!("{code} ({}): {}.", meaning.kind, meaning.means));
                if !meaning.to_do.is_empty() {
                    page.line(format!("  What to do: {}.", meaning.to_do));
                }
            }
            for rule in rules {
                page.line(format!("{code} is the reason of rule {} of check {}:", rule.id, rule.check));
                show_rule(page, rule);
            }
            page.legend(rules.iter().map(|rule| rule.severity));
        }
        Explained::Number(number) => error_number::text(page, number),
        Explained::Suites { suites } => {
            for suite in suites {
                let when = match (suite.every, suite.by_agents) {
                    (Some(every), true) => format!("run by agents every {every}, slower checks at their own period"),
                    (Some(every), false) => format!("run by the controller when the last result is older than {every}"),
                    (None, _) => "run on request".to_owned(),
                };
                page.line(format!("Suite {}: {}; {when}.", suite.name, comma_separated(&suite.tests)));
            }
            page.line(
                "A suite's name can be used for its tests in `doctor test --suite`, `doctor-node test`, `doctor-node job`",
            );
            page.line("and `repair.requalification`; `[suites.NAME]` in the policy changes or adds one.");
        }
        Explained::Contents { suites, checks, rules, reasons } => {
            page.line(format!("Suites: {}", comma_separated(suites)));
            page.line(format!("Checks: {}", comma_separated(checks)));
            page.line(format!("Rules: {}", comma_separated(rules)));
            page.line(format!("Reasons: {}", comma_separated(reasons)));
            page.line("Numbers: xid 1 to 172, sxid such as 12028, dcgm 0 to 132");
        }
    }
}

fn print_test_settings(page: &mut Page, test: &TestPolicy, params: &serde_json::Value) {
    page.line(format!(
        "  a result is valid for {}; a run over {} is cancelled; usually takes {}",
        test.cutoff, test.limit, test.typical_duration
    ));
    page.line(format!(
        "  {}",
        if test.exclusive { "needs the node to itself" } else { "runs together with other tests" }
    ));
    if !test.routine {
        page.line("  runs on request, or to requalify a repaired node");
    }
    if let Some(at_once) = test.max_concurrent {
        page.line(format!("  at most {at_once} at a time in the whole cluster"));
    }
    if !test.shares.is_empty() {
        page.line(format!("  loads shared resources: {}", comma_separated(&test.shares)));
    }
    if let Some(pools) = &test.pools {
        page.line(format!("  only in pools {}", comma_separated(pools)));
    }
    for (name, value) in params.as_object().into_iter().flatten() {
        page.line(format!("  {name} = {value}"));
    }
}

fn show_rule(page: &mut Page, rule: &Rule) {
    page.line(format!("  {}: {} -> {}, {}", rule.id, rule_condition(rule), rule.severity, rule.reason));
    let confirm =
        if rule.confirm > 1 { format!(" (after {} failing runs in a row)", rule.confirm) } else { String::new() };
    page.line(format!("    \"{}\"{confirm}", rule.text));
}
