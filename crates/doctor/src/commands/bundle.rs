//! `doctor bundle`: what a vendor or a cloud asks for about a case, as one archive.

use std::{fs, io::Read, path::PathBuf};

use doctor_control::handoff::{self, Part};
use doctor_core::ids::CaseId;
use serde::Serialize;

use crate::{
    context::Context,
    exit::Exit,
    failure::{Failure, Result},
};

/// Pack a case for whoever repairs the machine: one .tar.gz with everything that is known.
///
/// In it: a summary with serials, UUIDs and the physical host, the case and its steps, findings with their evidence lines, the
/// machine as it described itself, results, audit trail, evidence documents and logs of the newest runs, and the fields that
/// Azure (guest-health category), AWS and Google ask for. What looks like a token, a password or a key is removed. The
/// controller keeps such an archive by itself, below handoff/ in the shared directory, before a step that destroys evidence.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A case, as `doctor cases` names it.
    #[arg(value_name = "CASE")]
    case: CaseId,
    /// Where to write it. Without: case-CASE.tar.gz here.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Add this file as it is, such as nvidia-bug-report.log.gz from the node. At most 64 MiB.
    #[arg(long = "with", value_name = "FILE")]
    more: Vec<PathBuf>,
}

/// Of one file that is added.
const MOST: u64 = 64 << 20;

#[derive(Debug, Serialize)]
struct Packed {
    case: CaseId,
    path: PathBuf,
    bytes: usize,
}

pub(crate) fn run(context: &Context, args: &Args) -> Result<Exit> {
    let store = context.store()?;
    if store.case(args.case)?.is_none() {
        let known = "those that `doctor cases --all` lists".to_owned();
        return Err(Failure::Unknown { what: "case", name: args.case.to_string(), known });
    }
    let more: Result<Vec<Part>> = args.more.iter().map(read).collect();
    // Without the shared directory there are no logs; the rest is worth having.
    let share = context.share().ok();
    let bytes = handoff::archive(&store, share.as_ref(), args.case, more?)?;
    let path = args.out.clone().unwrap_or_else(|| PathBuf::from(format!("case-{}.tar.gz", args.case)));
    fs::write(&path, &bytes).map_err(|source| Failure::File { operation: "writing", path: path.clone(), source })?;
    let packed = Packed { case: args.case, path, bytes: bytes.len() };
    context.out.show(&packed, |page| {
        page.line(format!("Wrote {} ({} KiB).", packed.path.display(), packed.bytes.div_ceil(1024)));
        if share.is_none() {
            page.line("The shared directory could not be read: there are no logs in it.");
        }
        page.line("Look through it before you give it away: what has no form of a secret cannot be known for one.");
    })?;
    Ok(Exit::Ok)
}

fn read(path: &PathBuf) -> Result<Part> {
    let failed = |source| Failure::File { operation: "reading", path: path.clone(), source };
    let mut bytes = Vec::new();
    fs::File::open(path).and_then(|file| file.take(MOST + 1).read_to_end(&mut bytes)).map_err(failed)?;
    if bytes.len() as u64 > MOST {
        return Err(Failure::Usage(format!("{} is larger than 64 MiB", path.display())));
    }
    let name = path.file_name().map_or_else(|| "file".to_owned(), |name| name.to_string_lossy().into_owned());
    Ok(Part { name, bytes })
}
