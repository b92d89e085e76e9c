//! `doctor fleet gather`: a file of every host, labelled by host.

use std::{
    fs,
    path::{Path, PathBuf},
};

use doctor_control::{
    backend::ssh::{Answer, How, Order, quoted},
    fleet::hostfiles::write_whole,
};
use doctor_core::{ids::NodeName, time::Span};
use serde::Serialize;

use super::{Reach, trouble};
use crate::{
    context::Context,
    exit::Exit,
    failure::{Failure, Result},
    output::{harmless, plural},
};

/// Collect a file from every host.
///
/// Into a file: each line with the name of its host before it, in the order of the hosts; who has nothing to bring stands at the
/// end as a comment. Into a directory (one that exists, or a path that ends in `/`): DIR/HOST/NAME, byte by byte. Both appear
/// at once when all hosts have had their time.
///
/// Exit codes: 0 every host has brought it; 1 on some it is missing, cannot be read or is too large; 3 none of that, and some
/// hosts were not reached.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Args {
    /// The file on the hosts.
    #[arg(value_name = "PATH")]
    path: String,
    /// Where to: a file, or a directory.
    #[arg(long, value_name = "FILE|DIR")]
    out: PathBuf,
    /// Only its last lines.
    #[arg(long, value_name = "N")]
    last: Option<u32>,
    /// A file with more is not brought.
    #[arg(long, value_name = "MIB", default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..=1024))]
    most: u64,
    /// For each host, from its connection on.
    #[arg(long, value_name = "TIME", default_value = "60s")]
    deadline: Span,
    /// As root, by the words of `as_root` under [backend.ssh].
    #[arg(long)]
    root: bool,
    #[command(flatten)]
    reach: Reach,
}

const EXAMPLES: &str = "\
Examples:
  doctor fleet gather /var/log/node-health.log.status --last 1 --out cluster-health.status
  doctor fleet gather /var/log/dcgmi-diag.log --out diags/";

/// What a host's shell ends with when there is nothing to bring.
const NO_FILE: i32 = 81;
const NOT_A_FILE: i32 = 82;
const UNREADABLE: i32 = 83;

/// What became of one host's file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Brought {
    There,
    Missing,
    NotAFile,
    Unreadable,
    TooLarge,
    NotReached,
    Failed,
}

#[derive(Debug, Serialize)]
struct View {
    host: NodeName,
    brought: Brought,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
    bytes: usize,
}

pub(super) fn run(context: &Context, args: &Args) -> Result<Exit> {
    let name = Path::new(&args.path).file_name().filter(|_| !args.path.ends_with('/'));
    let Some(name) = name else {
        return Err(Failure::Usage(format!("`{}` is no path of a file", args.path)));
    };
    let fleet = args.reach.open(context)?;
    let most = usize::try_from(args.most * 1024 * 1024).unwrap_or(usize::MAX);
    let script = script(&args.path, args.last, most);
    let limit = args.deadline.to_std();
    // One more than allowed tells that it is too large.
    let order = Order { script: &script, input: b"", limit, most: most.saturating_add(1), as_root: args.root };
    let answers = fleet.on_each("gathered", |host| fleet.run(host, &order));
    let views: Vec<View> =
        fleet.hosts.iter().zip(&answers).map(|(host, answer)| view(&host.name, answer, most)).collect();
    let files: Vec<(&View, &[u8])> = views.iter().zip(&answers).map(|(view, answer)| (view, &*answer.stdout)).collect();
    let into_folder = args.out.is_dir() || args.out.as_os_str().to_string_lossy().ends_with('/');
    if into_folder {
        for (view, bytes) in files.iter().filter(|(view, _)| view.brought == Brought::There) {
            let folder = args.out.join(view.host.as_str());
            write(&folder.join(name), bytes, Some(&folder))?;
        }
    } else {
        write(&args.out, &aggregate(&files), None)?;
    }
    context.out.show(&views, |page| {
        let there = views.iter().filter(|view| view.brought == Brought::There).count();
        page.line(format!(
            "{} of {} brought {}, in {}",
            there,
            plural(views.len(), "host"),
            args.path,
            args.out.display()
        ));
        for view in views.iter().filter(|view| view.brought != Brought::There) {
            page.line(format!("{}: {}", view.host, view.why.as_deref().unwrap_or_default()));
        }
    })?;
    Ok(exit(&views))
}

fn script(path: &str, last: Option<u32>, most: usize) -> String {
    let path = quoted(path);
    // A path that begins with a dash is none of the words of these programs.
    let read = match last {
        Some(lines) => format!("tail -n {lines} -- \"$F\" | head -c {}", most.saturating_add(1)),
        None => format!("head -c {} -- \"$F\"", most.saturating_add(1)),
    };
    format!(
        "F={path}; [ -e \"$F\" ] || exit {NO_FILE}; [ -f \"$F\" ] || exit {NOT_A_FILE}; [ -r \"$F\" ] || exit {UNREADABLE}; {read}"
    )
}

fn view(host: &NodeName, answer: &Answer, most: usize) -> View {
    let (brought, why) = match &answer.how {
        How::Exited(0) if answer.stdout.len() > most => {
            (Brought::TooLarge, Some(format!("larger than {} MiB (--most)", most / 1024 / 1024)))
        }
        How::Exited(0) => (Brought::There, None),
        How::Exited(NO_FILE) => (Brought::Missing, Some("no such file".to_owned())),
        How::Exited(NOT_A_FILE) => (Brought::NotAFile, Some("not a file".to_owned())),
        How::Exited(UNREADABLE) => (Brought::Unreadable, Some("it may not be read (--root)".to_owned())),
        how @ How::NotReached(_) => (Brought::NotReached, trouble(how)),
        how => {
            let complaint = String::from_utf8_lossy(&answer.stderr);
            let last = complaint.lines().last().map(|line| format!(": {line}")).unwrap_or_default();
            (Brought::Failed, trouble(how).map(|why| why + &last))
        }
    };
    let bytes = if brought == Brought::There { answer.stdout.len() } else { 0 };
    View { host: host.clone(), brought, why: why.map(|why| harmless(&why)), bytes }
}

/// All in one: the host before each line, as in `node01 2026-11-16T03:00:00 healthy`.
fn aggregate(files: &[(&View, &[u8])]) -> Vec<u8> {
    let mut all = Vec::new();
    for (view, bytes) in files.iter().filter(|(view, _)| view.brought == Brought::There) {
        for line in bytes.split_inclusive(|byte| *byte == b'\n') {
            all.extend(view.host.as_str().as_bytes());
            all.push(b' ');
            all.extend(line);
        }
        if bytes.last().is_some_and(|last| *last != b'\n') {
            all.push(b'\n');
        }
    }
    for (view, _) in files.iter().filter(|(view, _)| view.brought != Brought::There) {
        let why = view.why.as_deref().unwrap_or_default().replace('\n', " ");
        all.extend(format!("# {}: {why}\n", view.host).into_bytes());
    }
    all
}

fn write(path: &Path, bytes: &[u8], folder: Option<&Path>) -> Result<()> {
    let made = folder.map_or(Ok(()), fs::create_dir_all).and_then(|()| write_whole(path, bytes));
    made.map_err(|source| Failure::File { operation: "writing", path: path.to_owned(), source })
}

fn exit(views: &[View]) -> Exit {
    let is = |brought: &Brought| views.iter().any(|view| view.brought == *brought);
    if views.iter().all(|view| view.brought == Brought::There) {
        return Exit::Ok;
    }
    let only_silent = views.iter().all(|view| matches!(view.brought, Brought::There | Brought::NotReached));
    if only_silent && is(&Brought::NotReached) { Exit::Unreachable } else { Exit::Trouble }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn said(how: How, stdout: &str) -> Answer {
        let stdout = stdout.as_bytes().to_vec();
        Answer { how, stdout, stderr: Vec::new(), left_out: 0, took: Duration::ZERO }
    }

    fn host(name: &str) -> NodeName {
        NodeName::new(name).unwrap()
    }

    #[test]
    fn each_line_has_its_host_and_who_has_nothing_is_named() {
        let answers = [
            said(How::Exited(0), "2026-11-16T03:00:00 healthy\n"),
            said(How::Exited(NO_FILE), ""),
            said(How::Exited(0), "a\nb"),
            said(How::Exited(0), &"too much ".repeat(10)),
        ];
        let most = 28;
        let views: Vec<View> = ["n1", "n2", "n3", "n4"]
            .iter()
            .zip(&answers)
            .map(|(name, answer)| view(&host(name), answer, most))
            .collect();
        let files: Vec<(&View, &[u8])> =
            views.iter().zip(&answers).map(|(view, answer)| (view, &*answer.stdout)).collect();
        let text = String::from_utf8(aggregate(&files)).unwrap();
        assert_eq!(
            text,
            "n1 2026-11-16T03:00:00 healthy\nn3 a\nn3 b\n# n2: no such file\n# n4: larger than 0 MiB (--most)\n"
        );
        assert_eq!(exit(&views), Exit::Trouble);
        assert_eq!(exit(&views[..1]), Exit::Ok);
        let silent =
            [view(&host("n1"), &answers[0], 28), view(&host("n2"), &said(How::NotReached("x".into()), ""), 28)];
        assert_eq!(exit(&silent), Exit::Unreachable);
    }

    #[test]
    fn a_path_reaches_the_host_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("it's -n $x");
        fs::write(&path, "one\ntwo\n").unwrap();
        let run = |path: &str, last| {
            let said = std::process::Command::new("sh").args(["-c", &script(path, last, 5)]).output().unwrap();
            (said.status.code(), String::from_utf8(said.stdout).unwrap())
        };
        assert_eq!(run(&path.display().to_string(), None), (Some(0), "one\ntw".to_owned()));
        assert_eq!(run(&path.display().to_string(), Some(1)), (Some(0), "two\n".to_owned()));
        assert_eq!(run("/no/such/file", None).0, Some(NO_FILE));
        assert_eq!(run("/", None).0, Some(NOT_A_FILE));
    }
}
