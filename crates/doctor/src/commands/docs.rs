//! `doctor docs`: writes the generated reference pages and the Helm chart, or checks that the committed files are up to
//! date.

use std::{fs, path::PathBuf};

use crate::{
    context::Context,
    deploy,
    exit::Exit,
    failure::{Failure, Result},
    output::plural,
    reference_pages,
};

/// Write the generated reference pages and the Helm chart (for developers).
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Directory of the reference pages.
    #[arg(default_value = "docs/reference")]
    dir: PathBuf,
    /// Directory of the Helm chart.
    #[arg(long, value_name = "DIR", default_value = "deploy/helm/cluster-doctor")]
    chart: PathBuf,
    /// Write nothing; exit code 1 if a file is out of date.
    #[arg(long)]
    check: bool,
}

pub(crate) fn run(context: &Context, args: &Args) -> Result<Exit> {
    let files = args.files();
    if args.check {
        let differs = |(path, text): &&(PathBuf, String)| fs::read_to_string(path).ok().as_ref() != Some(text);
        let old: Vec<String> = files.iter().filter(differs).map(|(path, _)| path.display().to_string()).collect();
        context.out.show(&serde_json::json!({ "differ": old }), |page| {
            match old.len() {
                0 => page.line("The generated files are up to date."),
                _ => {
                    page.line(format!("These files are out of date: {}. `make docs` regenerates them.", old.join(", ")))
                }
            };
        })?;
        return Ok(if old.is_empty() { Exit::Ok } else { Exit::ProblemsFound });
    }
    for (path, text) in &files {
        let failed = |source| Failure::File { operation: "writing", path: path.clone(), source };
        path.parent().map_or(Ok(()), fs::create_dir_all).and_then(|()| fs::write(path, text)).map_err(failed)?;
    }
    let written: Vec<String> = files.iter().map(|(path, _)| path.display().to_string()).collect();
    context.out.show(&serde_json::json!({ "written": written }), |page| {
        page.line(format!(
            "Wrote {} below {} and {}.",
            plural(files.len(), "file"),
            args.dir.display(),
            args.chart.display()
        ));
    })?;
    Ok(Exit::Ok)
}

impl Args {
    /// Returns the path and text of every generated file.
    fn files(&self) -> Vec<(PathBuf, String)> {
        let pages = reference_pages::generate_all().into_iter().map(|page| (self.dir.join(page.name), page.text));
        let chart = deploy::chart_files().into_iter().map(|(name, text)| (self.chart.join(name), text));
        pages.chain(chart).collect()
    }
}
