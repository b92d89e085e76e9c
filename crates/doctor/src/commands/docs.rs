//! `doctor docs`: writes the reference pages, or checks that the committed ones are up to date.

use std::{fs, path::PathBuf};

use crate::{
    context::Context,
    exit::Exit,
    failure::{Failure, Result},
    output::{list, plural},
    pages,
};

/// Write the reference pages that are made from the code (for developers of the doctor).
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Where the pages are.
    #[arg(default_value = "docs/reference")]
    dir: PathBuf,
    /// Write nothing; exit code 1 if a page differs from what the code says.
    #[arg(long)]
    check: bool,
}

pub(crate) fn run(context: &Context, args: &Args) -> Result<Exit> {
    let pages = pages::all();
    if args.check {
        let differs =
            |page: &&pages::Written| fs::read_to_string(args.dir.join(page.name)).ok().as_ref() != Some(&page.text);
        let old: Vec<&str> = pages.iter().filter(differs).map(|page| page.name).collect();
        context.out.show(&serde_json::json!({ "differ": old }), |page| {
            match old.len() {
                0 => page.line("The reference pages say what the code says."),
                _ => page.line(format!("These pages differ from the code: {}. `doctor docs` writes them.", list(&old))),
            };
        })?;
        return Ok(if old.is_empty() { Exit::Ok } else { Exit::Trouble });
    }
    let failed = |source| Failure::File { operation: "writing pages to", path: args.dir.clone(), source };
    fs::create_dir_all(&args.dir).map_err(failed)?;
    for page in &pages {
        fs::write(args.dir.join(page.name), &page.text).map_err(failed)?;
    }
    let names: Vec<&str> = pages.iter().map(|page| page.name).collect();
    context.out.show(&serde_json::json!({ "written": names }), |page| {
        page.line(format!("Wrote {} to {}.", plural(names.len(), "page"), args.dir.display()));
    })?;
    Ok(Exit::Ok)
}
