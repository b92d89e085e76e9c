//! `doctor fleet gather`: collects a file from every host, labelled by host.

use std::{
    fs::{self, File},
    io::{self, BufReader, BufWriter, Read, Write},
    path::{Path, PathBuf},
};

use doctor_backend::ssh::{CommandResult, CommandStatus, Host, RemoteCommand, RootAccess, shell_quote};
use doctor_core::{ids::NodeName, time::Span};
use serde::Serialize;

use super::{HostArgs, failure_text};
use crate::{
    context::Context,
    exit::Exit,
    failure::{Failure, Result},
    output::{plural, sanitize},
};

/// Collect a file from every host.
///
/// Into a file: every line is preceded by its host's name, in the order of the hosts; hosts without a result are listed
/// at the end as comments. Into a directory (an existing one, or a path that ends in `/`): DIR/HOST/NAME, byte by byte.
/// The result appears only after all hosts have finished; until then, data is kept beside it in a temporary directory
/// that is removed at the end.
///
/// Exit codes: 0 the file came from every host; 1 on some it is missing, unreadable or too large; 3 none of these, but
/// some hosts could not be reached.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Args {
    /// Path of the file on the hosts.
    #[arg(value_name = "PATH")]
    path: String,
    /// Destination: a file or a directory.
    #[arg(long, value_name = "FILE|DIR")]
    out: PathBuf,
    /// Only the last lines of the file.
    #[arg(long, value_name = "N")]
    last: Option<u32>,
    /// Size limit in MiB. A larger file, or larger last lines, is not collected.
    #[arg(long, value_name = "MIB", default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..=1024))]
    most: u64,
    /// Time limit per host, counted from the connection.
    #[arg(long, value_name = "TIME", default_value = "60s")]
    deadline: Span,
    /// Read as root with `as_root` of [backend.ssh]; without that setting the login user must be root.
    #[arg(long)]
    root: bool,
    #[command(flatten)]
    host_args: HostArgs,
}

const EXAMPLES: &str = "\
Examples:
  doctor fleet gather /var/log/node-health.log.status --last 1 --out cluster-health.status
  doctor fleet gather /var/log/dcgmi-diag.log --out diags/";

/// Exit codes of the script on the host if there is nothing to collect.
const NO_FILE: i32 = 81;
const NOT_A_FILE: i32 = 82;
const UNREADABLE: i32 = 83;

/// The outcome for one host's file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum FileOutcome {
    There,
    Missing,
    NotAFile,
    Unreadable,
    TooLarge,
    NotReached,
    Failed,
}

#[derive(Debug, Serialize)]
struct GatherView {
    host: NodeName,
    brought: FileOutcome,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
    bytes: usize,
}

pub(super) fn run(context: &Context, args: &Args) -> Result<Exit> {
    let name = Path::new(&args.path).file_name().filter(|_| !args.path.ends_with('/'));
    let Some(name) = name else {
        return Err(Failure::Usage(format!("`{}` is not the path of a file", args.path)));
    };
    let fleet = args.host_args.open(context)?;
    let most = usize::try_from(args.most * 1024 * 1024).unwrap_or(usize::MAX);
    let script = script(&args.path, args.last, most);
    let limit = args.deadline.to_std();
    // Reading one byte more than allowed detects a file that is too large.
    let most_read = most.saturating_add(1);
    let order = RemoteCommand {
        script: &script,
        input: b"",
        limit,
        max_output: most_read,
        root: RootAccess::from_flag(args.root),
    };
    let into_folder = args.out.is_dir() || args.out.as_os_str().to_string_lossy().ends_with('/');
    let parts = TempFiles::create(&args.out, into_folder)?;
    let fetch = |host: &Host| {
        let path = parts.path(&host.name);
        let fetched = File::create(&path).and_then(|file| fleet.client.fetch(host, &order, &file));
        fetched.map_err(|source| Failure::File { operation: "writing", path, source })
    };
    let mut views = Vec::new();
    for (host, fetched) in fleet.hosts.iter().zip(fleet.for_each_host("gathered", fetch)) {
        let (result, bytes) = fetched?;
        views.push(view(&host.name, &result, bytes, most));
    }
    if into_folder {
        parts.move_to_host_directories(&views, &args.out, name)?;
    } else {
        parts.merge_into(&views, &args.out)?;
    }
    context.out.show(&views, |page| {
        let fetched_count = views.iter().filter(|view| view.brought == FileOutcome::There).count();
        page.line(format!(
            "{} of {} sent {}, written to {}",
            fetched_count,
            plural(views.len(), "host"),
            args.path,
            args.out.display()
        ));
        for view in views.iter().filter(|view| view.brought != FileOutcome::There) {
            page.line(format!("{}: {}", view.host, view.why.as_deref().unwrap_or_default()));
        }
    })?;
    Ok(exit(&views))
}

/// A temporary directory with one file per host, removed on drop. It is on the same file system as the destination, so
/// that files can be renamed into place.
struct TempFiles {
    folder: PathBuf,
}

impl TempFiles {
    fn create(out: &Path, into_folder: bool) -> Result<Self> {
        let directory = if into_folder { Some(out) } else { out.parent() };
        let directory = directory.filter(|directory| !directory.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let folder = directory.join(format!(".gather.{}", std::process::id()));
        let failed = |source| Failure::File { operation: "creating", path: folder.clone(), source };
        fs::create_dir_all(&folder).map_err(failed)?;
        Ok(Self { folder })
    }

    fn path(&self, host: &NodeName) -> PathBuf {
        self.folder.join(host.as_str())
    }

    /// Moves each file to its host's directory.
    fn move_to_host_directories(&self, views: &[GatherView], out: &Path, name: &std::ffi::OsStr) -> Result<()> {
        for view in views.iter().filter(|view| view.brought == FileOutcome::There) {
            let folder = out.join(view.host.as_str());
            let path = folder.join(name);
            let moved = fs::create_dir_all(&folder).and_then(|()| fs::rename(self.path(&view.host), &path));
            moved.map_err(|source| Failure::File { operation: "writing", path, source })?;
        }
        Ok(())
    }

    /// Writes all files to one, and renames it into place.
    fn merge_into(&self, views: &[GatherView], out: &Path) -> Result<()> {
        // Not a valid host name, so it cannot collide.
        let temporary = self.folder.join(".all");
        let written = File::create(&temporary).and_then(|file| {
            let mut all = BufWriter::new(file);
            self.aggregate(views, &mut all)?;
            all.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()
        });
        let moved = written.and_then(|()| fs::rename(&temporary, out));
        moved.map_err(|source| Failure::File { operation: "writing", path: out.to_owned(), source })
    }

    /// Writes the host's name before each line, as in `node01 2026-11-16T03:00:00 healthy`, then the hosts without a
    /// result.
    fn aggregate(&self, views: &[GatherView], to: &mut impl Write) -> io::Result<()> {
        for view in views.iter().filter(|view| view.brought == FileOutcome::There) {
            prefix_lines(&view.host, BufReader::new(File::open(self.path(&view.host))?), to)?;
        }
        for view in views.iter().filter(|view| view.brought != FileOutcome::There) {
            let why = view.why.as_deref().unwrap_or_default().replace('\n', " ");
            writeln!(to, "# {}: {why}", view.host)?;
        }
        Ok(())
    }
}

impl Drop for TempFiles {
    fn drop(&mut self) {
        // A leftover temporary directory is visible and harmless.
        let _removed = fs::remove_dir_all(&self.folder);
    }
}

/// Copies in chunks and writes the host's name before each line: a line may be as long as the file.
fn prefix_lines(host: &NodeName, mut from: impl Read, to: &mut impl Write) -> io::Result<()> {
    let mut piece = [0; 16 * 1024];
    let mut at_start = true;
    loop {
        let count = from.read(&mut piece)?;
        if count == 0 {
            break;
        }
        for line in piece[..count].split_inclusive(|byte| *byte == b'\n') {
            if at_start {
                write!(to, "{host} ")?;
            }
            to.write_all(line)?;
            at_start = line.ends_with(b"\n");
        }
    }
    if at_start { Ok(()) } else { to.write_all(b"\n") }
}

fn script(path: &str, last: Option<u32>, most: usize) -> String {
    let path = shell_quote(path);
    let most = most.saturating_add(1);
    // `--` protects against a path that begins with a dash. A shell reports the exit code of the last command of a
    // pipe, so that of `tail` is passed over a separate descriptor. 141 means that `head` closed the pipe.
    let read = match last {
        Some(lines) => format!(
            "exec 4>&1; E=$({{ {{ tail -n {lines} -- \"$F\"; echo $? >&3; }} | head -c {most} >&4; }} 3>&1); \
             [ \"$E\" = 141 ] || exit \"$E\""
        ),
        None => format!("head -c {most} -- \"$F\""),
    };
    format!(
        "F={path}; [ -e \"$F\" ] || exit {NO_FILE}; [ -f \"$F\" ] || exit {NOT_A_FILE}; [ -r \"$F\" ] || exit {UNREADABLE}; {read}"
    )
}

fn view(host: &NodeName, result: &CommandResult, bytes: usize, most: usize) -> GatherView {
    let (brought, why) = match &result.status {
        CommandStatus::Exited(0) if bytes > most => {
            (FileOutcome::TooLarge, Some(format!("larger than {} MiB (--most)", most / 1024 / 1024)))
        }
        CommandStatus::Exited(0) => (FileOutcome::There, None),
        CommandStatus::Exited(NO_FILE) => (FileOutcome::Missing, Some("no such file".to_owned())),
        CommandStatus::Exited(NOT_A_FILE) => (FileOutcome::NotAFile, Some("not a file".to_owned())),
        CommandStatus::Exited(UNREADABLE) => (FileOutcome::Unreadable, Some("permission denied (--root)".to_owned())),
        how @ CommandStatus::NotStarted(_) => (FileOutcome::NotReached, failure_text(how)),
        how => {
            let stderr = String::from_utf8_lossy(&result.stderr);
            let last = stderr.lines().last().map(|line| format!(": {line}")).unwrap_or_default();
            (FileOutcome::Failed, failure_text(how).map(|why| why + &last))
        }
    };
    let bytes = if brought == FileOutcome::There { bytes } else { 0 };
    GatherView { host: host.clone(), brought, why: why.map(|why| sanitize(&why)), bytes }
}

fn exit(views: &[GatherView]) -> Exit {
    let is = |brought: &FileOutcome| views.iter().any(|view| view.brought == *brought);
    if views.iter().all(|view| view.brought == FileOutcome::There) {
        return Exit::Ok;
    }
    let only_silent = views.iter().all(|view| matches!(view.brought, FileOutcome::There | FileOutcome::NotReached));
    if only_silent && is(&FileOutcome::NotReached) { Exit::Unreachable } else { Exit::ProblemsFound }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn result_with(status: CommandStatus) -> CommandResult {
        CommandResult { status, stdout: Vec::new(), stderr: Vec::new(), dropped_bytes: 0, duration: Duration::ZERO }
    }

    fn host(name: &str) -> NodeName {
        NodeName::new(name).unwrap()
    }

    #[test]
    fn each_line_has_its_host_and_hosts_without_the_file_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("all");
        let long = "x".repeat(40_000);
        let parts = TempFiles::create(&out, false).unwrap();
        let outcomes = [
            ("n1", CommandStatus::Exited(0), "2026-11-16T03:00:00 healthy\n"),
            ("n2", CommandStatus::Exited(NO_FILE), ""),
            ("n3", CommandStatus::Exited(0), "a\nb"),
            ("n4", CommandStatus::Exited(0), "too much"),
            ("n5", CommandStatus::Exited(0), long.as_str()),
            ("n6", CommandStatus::Exited(0), ""),
        ];
        let most = |name: &str| if name == "n4" { 2 } else { 1 << 20 };
        let views: Vec<GatherView> = outcomes
            .iter()
            .map(|(name, how, text)| {
                fs::write(parts.path(&host(name)), text).unwrap();
                view(&host(name), &result_with(how.clone()), text.len(), most(name))
            })
            .collect();
        parts.merge_into(&views, &out).unwrap();
        let text = fs::read_to_string(&out).unwrap();
        assert_eq!(
            text.replace(&long, "LONG"),
            "n1 2026-11-16T03:00:00 healthy\nn3 a\nn3 b\nn5 LONG\n# n2: no such file\n# n4: larger than 0 MiB (--most)\n"
        );
        drop(parts);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing else is left there");
        assert_eq!(exit(&views), Exit::ProblemsFound);
        assert_eq!(exit(&views[..1]), Exit::Ok);
        let unreachable = view(&host("n2"), &result_with(CommandStatus::NotStarted("x".into())), 0, 28);
        assert_eq!(exit(&[unreachable]), Exit::Unreachable);
    }

    #[test]
    fn a_path_reaches_the_host_unchanged() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("it's -n $x");
        fs::write(&path, "one\ntwo\n").unwrap();
        let run = |path: &str, last| {
            let output = std::process::Command::new("sh").args(["-c", &script(path, last, 5)]).output().unwrap();
            (output.status.code(), String::from_utf8(output.stdout).unwrap())
        };
        assert_eq!(run(&path.display().to_string(), None), (Some(0), "one\ntw".to_owned()));
        assert_eq!(run(&path.display().to_string(), Some(1)), (Some(0), "two\n".to_owned()));
        assert_eq!(run("/no/such/file", None).0, Some(NO_FILE));
        assert_eq!(run("/", None).0, Some(NOT_A_FILE));
        // A file over the limit ends `tail` early, which is not an error of the file. An unreadable file is an error.
        fs::write(&path, "0123456789\n".repeat(100_000)).unwrap();
        assert_eq!(run(&path.display().to_string(), Some(90_000)), (Some(0), "012345".to_owned()));
        for last in [None, Some(1)] {
            let (code, text) = run("/proc/self/mem", last);
            assert!(code.is_some_and(|code| code != 0) && text.is_empty(), "{last:?}: {code:?} {text}");
        }
    }
}
