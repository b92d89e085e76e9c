//! `doctor completions` and `doctor man`: shell completions and manual pages, generated from the command line.

use std::path::PathBuf;

use crate::{
    context::Context,
    exit::Exit,
    failure::{Failure, Result},
    output::plural,
};

/// Print completions for a shell.
#[derive(Debug, clap::Args)]
pub(crate) struct CompletionsArgs {
    shell: clap_complete::Shell,
}

/// Write manual pages, one per command.
#[derive(Debug, clap::Args)]
pub(crate) struct ManArgs {
    /// Directory to write to.
    dir: PathBuf,
}

pub(crate) fn completions(context: &Context, args: &CompletionsArgs) -> Result<Exit> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut crate::command_line(), "doctor", &mut text);
    context.out.print(&String::from_utf8_lossy(&text))?;
    Ok(Exit::Ok)
}

pub(crate) fn man(context: &Context, args: &ManArgs) -> Result<Exit> {
    let failed = |source| Failure::File { operation: "writing manual pages to", path: args.dir.clone(), source };
    std::fs::create_dir_all(&args.dir).map_err(failed)?;
    clap_mangen::generate_to(crate::command_line(), &args.dir).map_err(failed)?;
    let pages = std::fs::read_dir(&args.dir).map_err(failed)?.count();
    context.out.show(&serde_json::json!({ "dir": args.dir, "pages": pages }), |page| {
        page.line(format!("Wrote {} to {}.", plural(pages, "manual page"), args.dir.display()));
        page.line(format!("Read one: man {}", args.dir.join("doctor.1").display()));
    })?;
    Ok(Exit::Ok)
}
