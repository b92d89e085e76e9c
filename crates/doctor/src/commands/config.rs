//! `doctor config`: writes, checks and shows the configuration.

mod agent_check;
mod capacity_check;
mod live;
mod node_trial;

use std::{
    fs::OpenOptions,
    io::Write,
    path::{Path, PathBuf},
};

use clap::Subcommand;
use doctor_backend::inspection::{InspectionItem, InspectionStatus};
use doctor_core::policy::{Mode, Policy};
use doctor_store::StoreProbe;
use serde::Serialize;

use self::capacity_check::CapacityCheck;
use crate::{
    config::{Config, default_text},
    context::Context,
    exit::Exit,
    failure::{Failure, Result},
    output::{comma_separated, plural},
    startup::{self, StartupReport},
};

/// Write, check or show the configuration.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: ConfigCommand,
}

#[derive(Debug, Subcommand)]
enum ConfigCommand {
    /// Write doctor.toml and policy.toml with every setting, its default and its meaning.
    Init {
        /// Directory to write to.
        #[arg(default_value = ".")]
        dir: PathBuf,
        /// Begin with a period in which nothing in the cluster is changed: the policy gets `mode = "observe"`. Change it
        /// to `recommend` or `act` when the findings convince you.
        #[arg(long)]
        observe_first: bool,
    },
    /// Judge whether the service would start with this configuration, and change nothing.
    ///
    /// Reads all files and reports errors with line and column. Then tries what `doctor serve` needs on this machine: the
    /// store, the shared directory, programs, certificate, and addresses to listen on. `serve` refuses the same settings
    /// in the same words, with the same exit code.
    ///
    /// Also computes whether the limits can hold the periods of the tests: with the nodes that were last observed and
    /// the measured durations where there is a store, else with the declared durations.
    Check {
        /// Only read the files: for a machine on which the service does not run.
        #[arg(long, conflicts_with = "live")]
        files_only: bool,
        /// Also check that the configured services exist and respond: the store, the shared directory, and the cluster
        /// with the permissions, volume, priority class, image, GPU nodes and agents that the service needs. Failures
        /// are printed with a remedy; what could not be checked is unknown, never good.
        #[arg(long)]
        live: bool,
    },
    /// Show the configuration in force: the defaults overlaid with your files.
    Show,
}

impl Args {
    /// Whether this shows the configuration in force.
    pub(crate) const fn shows(&self) -> bool {
        matches!(self.command, ConfigCommand::Show)
    }

    /// Whether this needs no configuration.
    pub(crate) const fn initialises(&self) -> bool {
        matches!(self.command, ConfigCommand::Init { .. })
    }
}

pub(crate) fn run(context: &Context, args: &Args) -> Result<Exit> {
    match &args.command {
        ConfigCommand::Init { dir, observe_first } => init(context, dir, *observe_first),
        ConfigCommand::Check { files_only, live } => check(context, *files_only, *live),
        ConfigCommand::Show => show(context),
    }
}

/// Returns the text of the policy file: the defaults, or the defaults in mode `observe`.
fn policy_text(observe_first: bool) -> String {
    let mode = |mode: Mode| format!("\nmode = \"{mode}\"\n");
    match observe_first {
        true => Policy::DEFAULT_TEXT.replacen(&mode(Policy::built_in().mode), &mode(Mode::Observe), 1),
        false => Policy::DEFAULT_TEXT.to_owned(),
    }
}

fn init(context: &Context, dir: &Path, observe_first: bool) -> Result<Exit> {
    let service = default_text().replacen("# policy = \"policy.toml\"", "policy = \"policy.toml\"", 1);
    let policy = policy_text(observe_first);
    let files = [(dir.join("doctor.toml"), service.as_str()), (dir.join("policy.toml"), policy.as_str())];
    std::fs::create_dir_all(dir).map_err(|source| Failure::File {
        operation: "creating",
        path: dir.to_owned(),
        source,
    })?;
    if let Some((path, _)) = files.iter().find(|(path, _)| path.exists()) {
        return Err(Failure::Usage(format!(
            "{} exists and is not overwritten: choose another directory",
            path.display()
        )));
    }
    for (path, text) in &files {
        write_new(path, text).map_err(|source| Failure::File { operation: "writing", path: path.clone(), source })?;
    }
    let paths: Vec<&PathBuf> = files.iter().map(|(path, _)| path).collect();
    context.out.show(&serde_json::json!({ "written": paths }), |page| {
        page.line(format!("Wrote {}.", comma_separated(paths.iter().map(|path| path.display()))));
        page.line("They hold every setting with its default; keep only what you change.");
        page.line(match observe_first {
            true => "The policy begins in mode `observe`: faults are recorded, nothing in the cluster is changed.",
            false => "The policy's mode is `recommend`: bad nodes are marked. To begin without: --observe-first.",
        });
        page.line(format!("Then: doctor config check --config {}", files[0].0.display()));
    })?;
    Ok(Exit::Ok)
}

fn write_new(path: &Path, text: &str) -> std::io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).open(path)?;
    file.write_all(text.as_bytes())
}

#[derive(Debug, Serialize)]
struct CheckView {
    configuration: String,
    policy: Option<PathBuf>,
    profiles: usize,
    tests: Vec<String>,
    rules: usize,
    capacity: CapacityCheck,
    /// Valid settings that will not work yet.
    remarks: Vec<String>,
    /// What could not be tried, and why.
    notes: Vec<String>,
    /// The live checks, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    live: Option<Vec<InspectionItem>>,
}

fn check(context: &Context, files_only: bool, live: bool) -> Result<Exit> {
    let loaded = context.loaded()?;
    let config = &loaded.config;
    let mut startup = match files_only {
        true => StartupReport::default(),
        false => startup::judge(context)?,
    };
    startup.excuse_running_service();
    if !live {
        startup.refuse()?;
    }
    let has_store = startup.store.as_ref().is_some_and(StoreProbe::is_current);
    let capacity = capacity_check::check_capacity(context, loaded, has_store);
    let mut remarks = std::mem::take(&mut startup.remarks);
    remarks.extend(capacity.plan.iter().flat_map(|plan| plan.shortfalls.iter().cloned()));
    let view = CheckView {
        configuration: loaded.source.to_string(),
        policy: config.policy.clone(),
        profiles: config.profiles.len(),
        tests: loaded.settings.tests.iter().map(|test| test.id.to_string()).collect(),
        rules: loaded.settings.rules.len(),
        capacity,
        remarks,
        notes: std::mem::take(&mut startup.notes),
        live: live.then(|| live::inspect(context, loaded, &startup)).transpose()?,
    };
    context.out.show(&view, |page| {
        page.line(match startup.failures.len() {
            0 => format!("{} is valid.", view.configuration),
            _ => format!("The files are valid: {}. The service would not start with them.", view.configuration),
        });
        let policy =
            view.policy.as_ref().map_or_else(|| "the built-in policy".to_owned(), |path| path.display().to_string());
        page.line(format!(
            "It uses {policy}, {}, tests {}, {}.",
            plural(view.profiles, "profile"),
            comma_separated(&view.tests),
            plural(view.rules, "rule")
        ));
        if let Some(line) = view.capacity.line() {
            page.line(line);
        }
        for remark in &view.remarks {
            page.line(format!("  ! {remark}"));
        }
        for note in &view.notes {
            page.line(format!("  {note}"));
        }
        if let Some(found) = &view.live {
            live::show(page, found);
        }
    })?;
    startup.refuse()?;
    let is_bad = view.live.iter().flatten().any(|found| found.status == InspectionStatus::Bad);
    Ok(if view.remarks.is_empty() && !is_bad { Exit::Ok } else { Exit::ProblemsFound })
}

#[derive(Debug, Serialize)]
struct EffectiveConfig<'a> {
    #[serde(flatten)]
    service: &'a Config,
    #[serde(rename = "policy_in_force")]
    policy: &'a Policy,
}

pub(super) fn show(context: &Context) -> Result<Exit> {
    let loaded = context.loaded()?;
    if context.out.is_json() {
        context.out.json(&EffectiveConfig { service: &loaded.config, policy: &loaded.settings.policy })?;
        return Ok(Exit::Ok);
    }
    let toml =
        |text: std::result::Result<String, toml::ser::Error>| text.map_err(|error| Failure::Other(error.to_string()));
    let service = toml(toml::to_string(&loaded.config))?;
    let policy = toml(toml::to_string(&*loaded.settings.policy))?;
    context.out.print(&format!("# {}\n{service}\n# policy\n{policy}", loaded.source))?;
    Ok(Exit::Ok)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_that_begins_in_observe_is_the_default_with_another_mode() {
        assert_eq!(policy_text(false), Policy::DEFAULT_TEXT);
        let observing = Policy::with_site_settings(&policy_text(true)).unwrap();
        assert_eq!(observing, Policy { mode: Mode::Observe, ..Policy::built_in() });
    }
}
