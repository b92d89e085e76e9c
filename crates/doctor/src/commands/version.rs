//! `doctor version`: the versions of this program, of the store's schema and of the running controller.

use doctor_backend::clock::{Clock, SystemClock};
use doctor_core::time::Timestamp;
use doctor_engine::snapshot;
use doctor_store::{Store, StoreProbe};
use serde::Serialize;

use crate::{context::Context, exit::Exit, failure::Result, output::format_time};

const EXAMPLES: &str = "\
Examples:
  doctor version
  doctor version --json";

/// Show the version of this program, the schema of the store and the version of the running controller.
///
/// Changes nothing. What cannot be learnt is printed as unknown, with the reason; the exit code is 0 in any case.
/// `doctor --version` prints the version of this program alone.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Args {}

/// The commit that this program was built from, if the build set it.
const COMMIT: Option<&str> = option_env!("DOCTOR_COMMIT");

#[derive(Debug, Serialize)]
struct VersionView {
    program: &'static str,
    commit: Option<&'static str>,
    /// The schema that this program reads and writes.
    schema: i64,
    store: StoreVersion,
    controller: ControllerVersion,
}

#[derive(Debug, Serialize)]
struct StoreVersion {
    url: Option<String>,
    schema: Option<i64>,
    /// The version of the program that created or migrated the store.
    #[serde(skip_serializing_if = "Option::is_none")]
    migrated_by: Option<String>,
    /// Why the schema is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    unknown: Option<String>,
}

#[derive(Debug, Default, Serialize)]
struct ControllerVersion {
    /// `None`: no controller leads, or that is unknown.
    leader: Option<String>,
    until: Option<Timestamp>,
    /// The version of the program that last observed the cluster.
    program: Option<String>,
    /// Why the version is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    unknown: Option<String>,
}

pub(crate) fn run(context: &Context, _args: &Args) -> Result<Exit> {
    let (store, controller) = look(context);
    let view = VersionView {
        program: env!("CARGO_PKG_VERSION"),
        commit: COMMIT.filter(|commit| !commit.is_empty()),
        schema: Store::SCHEMA,
        store,
        controller,
    };
    context.out.show(&view, |page| {
        let commit = view.commit.map_or_else(|| "commit unknown: not built in".to_owned(), |it| format!("commit {it}"));
        page.field("doctor", format!("{} ({commit})", view.program));
        page.field("schema", view.schema.to_string());
        page.field("store", store_line(&view.store));
        page.field("controller", controller_line(&view.controller));
    })?;
    Ok(Exit::Ok)
}

fn look(context: &Context) -> (StoreVersion, ControllerVersion) {
    let unknown = |url: Option<String>, why: String| {
        let controller =
            ControllerVersion { unknown: Some("the store tells, and it is unknown".to_owned()), ..Default::default() };
        (StoreVersion { url, schema: None, migrated_by: None, unknown: Some(why) }, controller)
    };
    let url = match context.config() {
        Ok(config) => &config.store,
        Err(failure) => return unknown(None, failure.chain()),
    };
    match Store::peek(url) {
        Ok(probe) => {
            let missing = probe.schema.is_none().then(|| "it is empty or does not exist".to_owned());
            let (schema, migrated_by) = (probe.schema, probe.migrated_by.clone());
            let store = StoreVersion { url: Some(url.to_string()), schema, migrated_by, unknown: missing };
            (store, controller(context, probe))
        }
        Err(error) => unknown(Some(url.to_string()), crate::context::store_failure(url, error).chain()),
    }
}

/// The leader keeps its version with what it observed.
fn controller(context: &Context, probe: StoreProbe) -> ControllerVersion {
    let is_current = probe.is_current();
    let now = SystemClock.now();
    let (leader, until) = probe.leader.filter(|(_, until)| *until > now).unzip();
    let observed = is_current.then(|| context.store().ok()).flatten();
    let observed = observed.and_then(|store| snapshot::last_observed(&store).ok().flatten());
    let program = observed.and_then(|(_, cluster)| cluster.program);
    let unknown = match (&program, is_current) {
        (Some(_), _) => None,
        (None, true) => Some("no controller has observed the cluster yet, or an older one has".to_owned()),
        (None, false) => Some("the store has no cluster yet".to_owned()),
    };
    ControllerVersion { leader, until, program, unknown }
}

fn store_line(store: &StoreVersion) -> String {
    let url = store.url.as_deref().unwrap_or("unknown");
    match (store.schema, &store.unknown) {
        (Some(schema), _) => match &store.migrated_by {
            Some(program) => format!("{url}: schema {schema}, of doctor {program}"),
            None => format!("{url}: schema {schema}"),
        },
        (None, why) => format!("{url}: schema unknown: {}", why.as_deref().unwrap_or_default()),
    }
}

fn controller_line(controller: &ControllerVersion) -> String {
    let leader = match (&controller.leader, controller.until) {
        (Some(leader), Some(until)) => format!("{leader} leads until {} UTC", format_time(until)),
        _ => "none leads".to_owned(),
    };
    let version = match (&controller.program, &controller.unknown) {
        (Some(program), _) => format!("the last cycle was run by doctor {program}"),
        (None, why) => format!("version unknown: {}", why.as_deref().unwrap_or_default()),
    };
    match (&controller.leader, &controller.unknown) {
        (None, Some(why)) => format!("unknown: {why}"),
        _ => format!("{leader}; {version}"),
    }
}
