//! `doctor config check --live`: checks that what the configuration names exists and responds, and tries one node. It changes
//! nothing and starts no job.

use doctor_backend::inspection::{Inspection, InspectionItem, InspectionStatus};
use doctor_engine::share::Share;
use doctor_store::{Store, StoreProbe, StoreUrl};

use super::{agent_check, node_trial};
use crate::{config::LoadedConfig, context::Context, failure::Result, output::Page, startup::StartupReport};

/// Runs all live checks.
pub(super) fn inspect(
    context: &Context,
    loaded: &LoadedConfig,
    startup: &StartupReport,
) -> Result<Vec<InspectionItem>> {
    let config = &loaded.config;
    let mut found = vec![check_store(&config.store, startup), check_shared_directory(loaded)];
    let is_readable = startup.store.as_ref().is_some_and(StoreProbe::is_current);
    let store = if is_readable { Some(context.store()?) } else { None };
    let Inspection { items: findings, agents, trial } =
        config.backend.inspect(&config.service(&config.state()), &loaded.settings.policy);
    found.extend(findings);
    found.extend(agents.map(|agents| agent_check::check_agents(loaded, &agents, store.as_ref())));
    found.extend(node_trial::complete(trial, store.as_ref()));
    Ok(found)
}

/// Reports what the service would find in place of its store.
fn check_store(url: &StoreUrl, startup: &StartupReport) -> InspectionItem {
    const WHAT: &str = "store";
    let schema = match &startup.store {
        Some(probe) => probe.schema,
        None => match Store::probe(url) {
            Ok(probe) => probe.schema,
            Err(error) => {
                let failure = crate::context::store_failure(url, error);
                let remedy = failure.hint().unwrap_or_else(|| "check `store` in the configuration".to_owned());
                return InspectionItem::bad(WHAT, failure.chain(), remedy);
            }
        },
    };
    let ours = Store::SCHEMA;
    InspectionItem::good(
        WHAT,
        match schema {
            Some(found) if found == ours => format!("{url} answers, and its schema is current"),
            Some(found) => {
                format!("{url} answers; this version migrates its schema from {found} to {ours} when it leads")
            }
            None => format!("{url} does not exist yet; the first start creates it"),
        },
    )
}

fn check_shared_directory(loaded: &LoadedConfig) -> InspectionItem {
    let path = &loaded.config.data;
    let remedy = "create or mount the directory of `data`, and make it writable for the user that the service runs as";
    match Share::open_for_command(path).and_then(|share| share.check_writable()) {
        Ok(()) => InspectionItem::good("data", format!("{} can be written", path.display())),
        Err(error) => InspectionItem::bad("data", error.to_string(), remedy),
    }
}

/// Prints one line per finding, and a second line with its remedy.
pub(super) fn show(page: &mut Page, found: &[InspectionItem]) {
    page.blank();
    for item in found {
        page.line(format!("{:<8} {}: {}", item.status.as_str(), item.subject, item.text));
        if let Some(remedy) = &item.remedy {
            page.line(format!("         {remedy}"));
        }
    }
    let count = |status: InspectionStatus| found.iter().filter(|item| item.status == status).count();
    page.line(match (count(InspectionStatus::Bad), count(InspectionStatus::Unknown)) {
        (0, 0) => "All checks passed.".to_owned(),
        (0, unknown) => format!("No check failed; {unknown} unknown."),
        (bad, unknown) => format!("{bad} failed; {unknown} unknown."),
    });
}
