//! `doctor-node profile show | learn | diff`: output and exit codes.

use std::{fmt::Write as _, fs, path::PathBuf};

use anyhow::{Context, bail};
use clap::Subcommand;
use doctor_checks::Catalogue;
use doctor_core::{
    classify::classify,
    finding::Verdict,
    ids::{CheckId, Sku},
    policy::Policy,
    profile::Profile,
    sku_detection::{MachineFacts, find_chip},
};

use crate::{
    check::{self, Suite},
    clock::now,
    profile::{self, Comparison, MachineArgs},
    runner::ProbeRunner,
};

#[derive(Debug, Subcommand)]
pub enum ProfileCommand {
    /// Print the profile that applies, why it was chosen, and what it expects. Exit code 0 if there is one, 3 if not.
    Show {
        #[arg(long)]
        json: bool,
    },
    /// Write a profile from this machine, which must be healthy: all quick checks run and none may fail.
    ///
    /// The profile contains the metrics that rules compare with a profile. Without --sku the cloud's or the firmware's
    /// name is used. Rates are measured by tests, not by checks: `--test dl` learns those of the GPUs, and the limits
    /// become tighter than a chip's published figures allow. Exit code 0 if a profile was written, 2 if a check fails.
    Learn {
        /// Also run this test, which may occupy the machine for minutes, and learn what it measures. Repeatable.
        #[arg(long = "test", value_name = "NAME")]
        tests: Vec<CheckId>,
        /// Write the profile to this file instead of standard output.
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
        /// Write the profile even if a check fails.
        #[arg(long)]
        anyway: bool,
    },
    /// Compare this machine with a profile. Exit code 0 if no measured value differs, 1 if one does, 3 if nothing could
    /// be compared.
    Diff {
        /// Name of a profile, or a file. [default: the profile of this machine]
        #[arg(value_name = "FILE|NAME")]
        with: Option<String>,
        #[arg(long)]
        json: bool,
    },
}

/// Runs a subcommand and returns its output and exit code.
///
/// # Errors
/// If a file is invalid or cannot be written, or a name is unknown.
pub fn run(
    what: &ProfileCommand,
    args: &MachineArgs,
    state: Option<&std::path::Path>,
    policy: &Policy,
    runner: &dyn ProbeRunner,
) -> anyhow::Result<(String, u8)> {
    match what {
        ProfileCommand::Show { json } => show(&profile::select_profile(args, state, runner)?, *json),
        ProfileCommand::Diff { with, json } => {
            let profile = match with {
                Some(with) => named_or_file(with, args)?,
                None => match profile::select_profile(args, state, runner)?.profile {
                    Some(profile) => profile,
                    None => bail!("no profile matches this machine: give the name of a profile, or a file"),
                },
            };
            diff(&profile, *json, policy, runner)
        }
        ProfileCommand::Learn { tests, out, anyway } => {
            let facts = profile::gather(args, state, runner).machine;
            let name = args.sku.clone().or_else(|| profile::default_name(&facts));
            let name = name.context("neither the cloud nor the firmware reports a machine type: set --sku")?;
            let chip = find_chip(&profile::known_types(args.profiles.as_deref())?, &facts).cloned();
            let (text, failing) = learn(name, chip, &facts, tests, policy, runner)?;
            if !failing.is_empty() && !anyway {
                let message =
                    format!("no profile written: checks fail on this machine (--anyway overrides this):\n{failing}");
                return Ok((message, check::exit::CRITICAL));
            }
            let Some(out) = out else { return Ok((text, check::exit::OK)) };
            fs::write(out, text).with_context(|| format!("cannot write {}", out.display()))?;
            Ok((format!("wrote {}\n", out.display()), check::exit::OK))
        }
    }
}

fn named_or_file(with: &str, args: &MachineArgs) -> anyhow::Result<Profile> {
    let mut types = profile::known_types(args.profiles.as_deref())?;
    if let Ok(name) = Sku::new(with)
        && let Ok(found) = profile::named(&types, &name)
    {
        return Ok(found);
    }
    let path = PathBuf::from(with);
    if !path.exists() {
        bail!("`{with}` is neither a file nor a profile; known profiles: {}", types.names());
    }
    let file = profile::read(&path)?;
    let sku = file.sku.clone();
    types.merge(file)?;
    Ok(profile::named(&types, &sku)?)
}

fn show(choice: &profile::ProfileChoice, json: bool) -> anyhow::Result<(String, u8)> {
    let code = if choice.profile.is_some() { check::exit::OK } else { check::exit::UNKNOWN };
    if json {
        return Ok((format!("{}\n", serde_json::to_string_pretty(choice)?), code));
    }
    let mut text = format!("profile: {}\n", choice.summary());
    for step in &choice.detection.steps {
        writeln!(text, "  {step}")?;
    }
    let Some(profile) = &choice.profile else {
        text.push_str("Run `doctor-node profile learn` on a healthy machine to write one, or select one with --sku.\n");
        return Ok((text, code));
    };
    text.push_str("expects:\n");
    for (metric, expected) in &profile.expect {
        writeln!(text, "  {metric} = {} ({})", expected.value, expected.basis)?;
    }
    Ok((text, code))
}

fn diff(profile: &Profile, json: bool, policy: &Policy, runner: &dyn ProbeRunner) -> anyhow::Result<(String, u8)> {
    let rows = profile::compare(profile, &check::observe(&[], Suite::Quick, policy, runner)?);
    let any = |kinds: &[Comparison]| rows.iter().any(|row| kinds.contains(&row.comparison));
    let code = match (any(&[Comparison::Less, Comparison::More]), any(&[Comparison::Same])) {
        (true, _) => check::exit::WARNING,
        (false, true) => check::exit::OK,
        (false, false) => check::exit::UNKNOWN,
    };
    let text = if json {
        format!("{}\n", serde_json::to_string_pretty(&rows)?)
    } else {
        format!(
            "this machine compared with profile {}, version {}:\n\n{}",
            profile.sku,
            profile.version,
            profile::differences_table(&rows)
        )
    };
    Ok((text, code))
}

/// Returns the profile's text, and one line for each check that fails on this machine.
fn learn(
    name: Sku,
    chip: Option<Sku>,
    facts: &MachineFacts,
    tests: &[CheckId],
    policy: &Policy,
    runner: &dyn ProbeRunner,
) -> anyhow::Result<(String, String)> {
    let rules =
        Catalogue::with_site_checks(policy).rules(policy).context("cannot parse the default rules of a check")?;
    let mut observations = check::observe(&[], Suite::Quick, policy, runner)?;
    if !tests.is_empty() {
        observations.extend(check::observe(tests, Suite::Quick, policy, runner)?);
    }
    let mut failing = String::new();
    for observed in &observations {
        let judgement = classify(&rules, None, &observed.check, &observed.observation);
        if judgement.verdict == Verdict::Fail {
            writeln!(failing, "  {}: {}: {}", observed.check, judgement.reason, judgement.text)?;
        }
    }
    let learned = profile::learn(name, chip, facts, &observations, &rules, now());
    Ok((learned.text()?, failing))
}
