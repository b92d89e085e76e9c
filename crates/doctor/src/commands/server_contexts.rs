//! `doctor context`: the controllers that a person works with, and the one that commands ask without an option.

use clap::Subcommand;
use serde::Serialize;

use crate::{
    connection::{ContextsFile, contexts_path},
    context::Context,
    exit::Exit,
    failure::Result,
    output::{Table, cell},
};

/// List and choose the controllers that commands ask over their API.
///
/// They are named in ~/.config/cluster-doctor/contexts.toml ($XDG_CONFIG_HOME), for example:
///
///   [contexts.prod]
///   server = "https://doctor.example.com:7480"
///   token_file = "prod.token"
///
/// The context in use applies to every command without --server, --context, --store and --config.
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: ContextCommand,
}

#[derive(Debug, Subcommand)]
enum ContextCommand {
    /// List contexts; `*` marks the one in use.
    List,
    /// Use a context from now on. Without a name, commands use the store of this machine again.
    Use {
        #[arg(value_name = "NAME")]
        name: Option<String>,
    },
    /// Show the settings of a context. Default: the one in use.
    Show {
        #[arg(value_name = "NAME")]
        name: Option<String>,
    },
}

/// The settings of a context. The token is not among them.
#[derive(Debug, Serialize)]
struct ContextView {
    name: String,
    in_use: bool,
    server: String,
    token_file: Option<String>,
    ca_file: Option<String>,
    plain: bool,
}

pub(crate) fn run(context: &Context, args: &Args) -> Result<Exit> {
    let path = contexts_path(|name| std::env::var(name).ok())?;
    match &args.command {
        ContextCommand::List => {
            let file = ContextsFile::load(&path)?.unwrap_or_default();
            let names = file.contexts.keys();
            let views = names.map(|name| view(&file, &path, name)).collect::<Result<Vec<ContextView>>>()?;
            context.out.show(&views, |page| {
                if views.is_empty() {
                    page.line(format!(
                        "No contexts: {} names none. `doctor context --help` shows an example.",
                        path.display()
                    ));
                    return;
                }
                let mut table = Table::new(["", "NAME", "SERVER"]);
                for view in &views {
                    let mark = if view.in_use { "*" } else { "" };
                    table.row([cell(mark), cell(view.name.as_str()), cell(view.server.as_str())]);
                }
                page.table(&table);
            })?;
        }
        ContextCommand::Use { name } => {
            ContextsFile::set_current(&path, name.as_deref())?;
            context.out.show(&serde_json::json!({ "current": name }), |page| {
                page.line(match name {
                    Some(name) => format!("Commands ask the controller of the context {name}."),
                    None => "Commands use the store of this machine.".to_owned(),
                });
            })?;
        }
        ContextCommand::Show { name } => {
            let file = ContextsFile::load(&path)?.unwrap_or_default();
            let Some(name) = name.as_ref().or(file.current.as_ref()) else {
                context.out.show(&serde_json::Value::Null, |page| {
                    page.line("No context is in use: commands use the store of this machine.");
                })?;
                return Ok(Exit::Ok);
            };
            let view = view(&file, &path, name)?;
            context.out.show(&view, |page| {
                page.field("context", view.name.as_str());
                page.field("in use", if view.in_use { "yes" } else { "no" });
                page.field("server", view.server.as_str());
                page.field("token file", view.token_file.as_deref().unwrap_or("-"));
                page.field("CA file", view.ca_file.as_deref().unwrap_or("the system's certificates"));
            })?;
        }
    }
    Ok(Exit::Ok)
}

fn view(file: &ContextsFile, path: &std::path::Path, name: &str) -> Result<ContextView> {
    let settings = file.settings(path, name)?;
    let text = |path: Option<std::path::PathBuf>| path.map(|path| path.display().to_string());
    Ok(ContextView {
        name: name.to_owned(),
        in_use: file.current.as_deref() == Some(name),
        server: settings.url,
        token_file: text(settings.token_file),
        ca_file: text(settings.ca_file),
        plain: settings.plain,
    })
}
