//! `doctor config check --live`: checks that what the configuration names exists and responds. Its only effect is a
//! temporary file in the shared directory, or in the directory of a store that does not exist yet.

use std::{fs, path::Path};

use doctor_backend::inspection::{Inspection, InspectionItem, InspectionStatus};
use doctor_engine::share::Share;
use doctor_store::{Store, StoreUrl};

use super::agent_check;
use crate::{
    config::LoadedConfig,
    context::Context,
    failure::{Failure, Result},
    output::Page,
};

/// Runs all live checks.
pub(super) fn inspect(context: &Context, loaded: &LoadedConfig) -> Result<Vec<InspectionItem>> {
    let (store, mut found) = check_store(context, loaded)?;
    found.push(check_shared_directory(&loaded.config.data));
    let config = &loaded.config;
    let Inspection { items: findings, agents } =
        config.backend.inspect(&config.service(&config.state()), &loaded.settings.policy);
    found.extend(findings);
    found.extend(agents.map(|agents| agent_check::check_agents(loaded, &agents, store.as_ref())));
    Ok(found)
}

/// Opens the store as the service would, without creating it.
fn check_store(context: &Context, loaded: &LoadedConfig) -> Result<(Option<Store>, Vec<InspectionItem>)> {
    let url = &loaded.config.store;
    Ok(match context.store_for_changes() {
        Ok(store) => {
            let good = InspectionItem::good("store", format!("{url} answers, and its schema is current"));
            (Some(store), vec![good])
        }
        Err(Failure::NoStore(_)) => (None, vec![check_missing_store(url)]),
        Err(error @ (Failure::Store(_) | Failure::StoreOpen { .. })) => {
            let remedy = error.hint().unwrap_or_else(|| "check `store` in the configuration".to_owned());
            (None, vec![InspectionItem::bad("store", error.chain(), remedy)])
        }
        Err(other) => return Err(other),
    })
}

/// Reports whether the first start can create the store.
fn check_missing_store(url: &StoreUrl) -> InspectionItem {
    let StoreUrl::Sqlite(path) = url else { return InspectionItem::unknown("store", format!("{url} does not exist")) };
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match try_to_write(directory) {
        Ok(()) => InspectionItem::good("store", format!("{url} does not exist yet; the first start creates it")),
        Err(error) => InspectionItem::bad(
            "store",
            format!("{} cannot be written: {error}", directory.display()),
            "create the directory and make it writable for the user that the service runs as",
        ),
    }
}

fn check_shared_directory(path: &Path) -> InspectionItem {
    let remedy = "create or mount the directory of `data`, and make it writable for the user that the service runs as";
    let result = Share::open(path)
        .map_err(|error| error.to_string())
        .and_then(|_| try_to_write(path).map_err(|error| format!("{} cannot be written: {error}", path.display())));
    match result {
        Ok(()) => InspectionItem::good("data", format!("{} can be written", path.display())),
        Err(error) => InspectionItem::bad("data", error, remedy),
    }
}

fn try_to_write(directory: &Path) -> std::io::Result<()> {
    let path = directory.join(format!(".doctor-config-check-{}", std::process::id()));
    fs::write(&path, b"written by doctor config check --live\n")?;
    fs::remove_file(&path)
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
