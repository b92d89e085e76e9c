//! `doctor completions` and `doctor man`: shell completions and manual pages of both programs, generated from their
//! command lines.

use std::path::{Path, PathBuf};

use crate::{
    context::Context,
    exit::Exit,
    failure::{Failure, Result},
    node_command_line,
    output::plural,
};

const COMPLETIONS_EXAMPLES: &str = "\
Examples:
  doctor completions bash > /etc/bash_completion.d/doctor
  doctor completions zsh --of doctor-node";

const MAN_EXAMPLES: &str = "\
Examples:
  doctor man /usr/local/share/man/man1
  doctor man man1 --of doctor-node";

/// Print completions for a shell.
#[derive(Debug, clap::Args)]
#[command(after_long_help = COMPLETIONS_EXAMPLES)]
pub(crate) struct CompletionsArgs {
    shell: clap_complete::Shell,
    /// The program to complete.
    #[arg(long, value_enum, value_name = "PROGRAM", default_value = "doctor")]
    of: Program,
}

/// Write manual pages, one per command.
#[derive(Debug, clap::Args)]
#[command(after_long_help = MAN_EXAMPLES)]
pub(crate) struct ManArgs {
    /// Directory to write to.
    dir: PathBuf,
    /// Write only the pages of this program. Default: those of both.
    #[arg(long, value_enum, value_name = "PROGRAM")]
    of: Option<Program>,
}

/// A program of Cluster Doctor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Program {
    /// The operators' program
    Doctor,
    /// The program on the nodes
    DoctorNode,
}

impl Program {
    const ALL: [Self; 2] = [Self::Doctor, Self::DoctorNode];

    const fn name(self) -> &'static str {
        match self {
            Self::Doctor => "doctor",
            Self::DoctorNode => "doctor-node",
        }
    }

    fn command_line(self) -> clap::Command {
        match self {
            Self::Doctor => crate::command_line(),
            Self::DoctorNode => node_command_line::command_line(),
        }
    }
}

pub(crate) fn completions(context: &Context, args: &CompletionsArgs) -> Result<Exit> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut args.of.command_line(), args.of.name(), &mut text);
    context.out.print(&String::from_utf8_lossy(&text))?;
    Ok(Exit::Ok)
}

pub(crate) fn man(context: &Context, args: &ManArgs) -> Result<Exit> {
    let failed = |source| Failure::File { operation: "writing manual pages to", path: args.dir.clone(), source };
    std::fs::create_dir_all(&args.dir).map_err(failed)?;
    let programs: Vec<Program> = Program::ALL.into_iter().filter(|one| args.of.is_none_or(|of| of == *one)).collect();
    let mut pages = 0;
    for program in &programs {
        clap_mangen::generate_to(program.command_line(), &args.dir).map_err(failed)?;
        pages += count_pages(&args.dir, program.name()).map_err(failed)?;
    }
    context.out.show(&serde_json::json!({ "dir": args.dir, "pages": pages }), |page| {
        page.line(format!("Wrote {} to {}.", plural(pages, "manual page"), args.dir.display()));
        for program in &programs {
            page.line(format!("Read one: man {}", args.dir.join(format!("{}.1", program.name())).display()));
        }
    })?;
    Ok(Exit::Ok)
}

/// Counts the pages of one program. Those of `doctor-node` begin with the name of the other program, too.
fn count_pages(dir: &Path, program: &str) -> std::io::Result<usize> {
    let mut count = 0;
    for entry in std::fs::read_dir(dir)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let owner = Program::ALL
            .map(Program::name)
            .into_iter()
            .rfind(|owner| name.strip_prefix(owner).is_some_and(|rest| rest.starts_with(['-', '.'])));
        count += usize::from(owner == Some(program));
    }
    Ok(count)
}
