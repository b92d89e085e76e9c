//! The helper's loop: reads a query, calls the driver, and writes the answer.

use std::{
    ffi::{OsStr, OsString},
    fs::{self, File},
    io,
    path::Path,
    process::ExitCode,
};

use rustix::process::{Signal, getppid, set_parent_process_death_signal};

use super::{
    super::gpus,
    DRIVER_ARGUMENT,
    frame::{self, DriverQuery, HelperMessage, MAX_QUERY_BYTES, QueriedGpu},
};
use crate::heap;

/// NVML leaks a file descriptor each time it is unloaded (an eventfd; driver 580.159.04 on an H200, 2026-11-17). A
/// helper that holds more than this exits after its answer, long before it runs out.
const MAX_DESCRIPTORS: usize = 64;

/// Serves the parent process until that closes the pipe or ends. The arguments are the parent's pid, the root of the
/// machine's file system, and NVML's library.
pub fn serve_driver_queries(mut args: impl Iterator<Item = OsString>) -> ExitCode {
    let (Some(parent), Some(root), Some(library)) = (args.next(), args.next(), args.next()) else {
        eprintln!("{DRIVER_ARGUMENT} is internal to doctor-node");
        return ExitCode::FAILURE;
    };
    // A closed pipe ends an idle helper; one that hangs in the driver needs the signal.
    let is_bound = set_parent_process_death_signal(Some(Signal::KILL)).is_ok();
    // A parent that ended earlier sends no signal any more.
    if !is_bound || getppid().map(|pid| pid.to_string()).as_deref() != parent.to_str() {
        return ExitCode::FAILURE;
    }
    heap::limit_memory();
    match serve(Path::new(&root), &library) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn serve(root: &Path, library: &OsStr) -> io::Result<()> {
    // Output of a library must not get between our messages.
    let mut out = File::from(rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdout(), 3)?);
    rustix::stdio::dup2_stdout(File::options().write(true).open("/dev/null")?)?;
    // Unbuffered, unlike the standard library's stdin.
    let mut requests = File::from(rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?);
    while let Some(DriverQuery { fields }) = frame::read(&mut requests, MAX_QUERY_BYTES)? {
        let mut write_error = None;
        let result = gpus::query_driver(root, library, &fields, &mut |index, bus| {
            let message = HelperMessage::Querying(QueriedGpu { index, bus: bus.to_owned() });
            if let Err(error) = frame::write(&mut out, &message) {
                write_error.get_or_insert(error);
            }
        });
        write_error.map_or(Ok(()), Err)?;
        // The driver session is closed and the library unloaded by now.
        frame::write(&mut out, &HelperMessage::Answer(result))?;
        heap::give_back();
        // The next query gets a new helper.
        if fs::read_dir("/proc/self/fd").is_ok_and(|open| open.count() > MAX_DESCRIPTORS) {
            return Ok(());
        }
    }
    Ok(())
}
