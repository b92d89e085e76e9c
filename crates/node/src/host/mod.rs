//! Serves a controller that reaches this machine over SSH: one request, one reply ([`doctor_host::protocol`]).
//!
//! All persistent state is in files below one directory, as in the local backend: the connection may break at any
//! instant, and another controller may connect next. Each machine uses its own subdirectory, because the directory may
//! be shared.

mod foreign_processes;
mod repairs;
mod start;
mod state_files;
mod status;
mod systemd_scope;

use std::{
    ffi::OsString,
    fs,
    io::{self, BufRead as _, Read as _, Write as _},
    path::Path,
    process::Command,
};

use doctor_core::{ids::RunId, node::OurMark};
use doctor_host::{
    host_directory,
    marks::MarkFiles,
    protocol::{HELLO, HostRequest, HostResponse, MAX_REQUEST_BYTES, MarkRequest, RequestFrame, ResponseFrame},
    vendor_reports,
};

use crate::clock::now;

/// Answers one request from standard input.
///
/// # Errors
/// If the request is invalid or the connection breaks.
pub fn serve_request(state: &Path) -> io::Result<()> {
    let mut output = io::stdout().lock();
    writeln!(output, "{HELLO}")?;
    output.flush()?;
    let mut line = Vec::new();
    io::stdin().lock().take(MAX_REQUEST_BYTES).read_until(b'\n', &mut line)?;
    if line.last() != Some(&b'\n') {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the request is incomplete"));
    }
    let request: RequestFrame = serde_json::from_slice(&line).map_err(io::Error::other)?;
    let response = handle_request(state, &request.request)
        .unwrap_or_else(|error| HostResponse::Failed { text: error.to_string() });
    serde_json::to_writer(&mut output, &ResponseFrame { number: request.number, response })
        .map_err(io::Error::other)?;
    writeln!(output)?;
    output.flush()
}

fn handle_request(state: &Path, ask: &HostRequest) -> io::Result<HostResponse> {
    let state = state.join(host_directory::this_host());
    fs::create_dir_all(&state)?;
    // Jobs change their directory, so they need absolute paths.
    let state = &state.canonicalize()?;
    let jobs = state_files::runs(state)?;
    match ask {
        HostRequest::Status(query) => {
            status::collect_status(state, &jobs, query).map(|host_status| HostResponse::Status(Box::new(host_status)))
        }
        HostRequest::Start(request) => start::start(state, &jobs, request),
        HostRequest::Cancel { run, grace } => {
            jobs.cancel(*run, *grace, now())?;
            systemd_scope::stop(*run);
            Ok(HostResponse::Done)
        }
        HostRequest::Mark(mark) => {
            let marks = MarkFiles::new(state).apply(mark.op, &mark.change)?;
            update_notices(state, mark, &marks).map(|()| HostResponse::Done)
        }
        HostRequest::Repair(request) => repairs::repair(state, &jobs, request).map(HostResponse::Repair),
        HostRequest::Report { op } => {
            vendor_reports::report(&state_files::reports(state)?, *op, now(), reporter).map(HostResponse::Report)
        }
    }
}

/// Builds a command that runs this program as a reporter that outlives the connection.
fn reporter(args: &[OsString], id: RunId) -> io::Result<Command> {
    let all: Vec<OsString> = std::iter::once(std::env::current_exe()?.into()).chain(args.iter().cloned()).collect();
    let mut command = systemd_scope::command(&all, id);
    command.current_dir("/");
    Ok(command)
}

/// Prefix of all notices that we write for people.
const NOTICE_PREFIX: &str = "Cluster Doctor: ";

/// Whether we may write and remove a file: it is absent, empty, or starts with our prefix.
fn is_our_notice(path: &Path) -> io::Result<bool> {
    let mut start = Vec::new();
    match fs::File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
        opened => opened?.take(NOTICE_PREFIX.len() as u64).read_to_end(&mut start)?,
    };
    Ok(start.is_empty() || start == NOTICE_PREFIX.as_bytes())
}

/// Writes a notice for people and site scripts while this machine is marked, and removes it afterwards.
fn update_notices(state: &Path, mark: &MarkRequest, marks: &[OurMark]) -> io::Result<()> {
    let kinds: Vec<String> = marks.iter().map(|mark| mark.kind.to_string()).collect();
    let text = format!("{NOTICE_PREFIX}{}. Please start no new work on this machine.\n", kinds.join(", "));
    for path in [Some(&state.join("lock")), mark.motd.as_ref()].into_iter().flatten() {
        if !is_our_notice(path)? {
            // Keep the site's text; fail only if we would have to overwrite it.
            if kinds.is_empty() {
                continue;
            }
            let text = format!("{} has content of another program; configure a separate file", path.display());
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, text));
        }
        if kinds.is_empty() {
            match fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        } else {
            fs::write(path, &text)?;
        }
    }
    Ok(())
}
