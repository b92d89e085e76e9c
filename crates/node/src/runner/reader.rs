//! Executes reading probes in the calling process. They may hang; the caller must contain that.

use std::{
    collections::VecDeque,
    ffi::{OsStr, OsString},
    fs::{self, File},
    io::{self, Read},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use doctor_checks::probe::{FileSystemSpace, Probe, ProbeOutput};
use doctor_core::observation::FailureKind;
use doctor_gpu::dcgm;
use rustix::{io::Errno, process::Signal};

use super::{
    MAX_STREAM_BYTES, clock_discipline, failed,
    glob::Tree,
    gpus, kind_of, processes,
    small_file::{nonblocking, read_start, to_text},
};

/// No check expects a directory with more names.
const MAX_NAMES: usize = 100_000;
/// Entry point of the helper process: reads one probe. It is killed if its parent ends.
pub fn serve_one_probe(probe: &Probe, root: &Path, library: &OsStr) -> ProbeOutput {
    // Without a parent, no process would read the output. If this fails, the time limit applies.
    let _kept = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    Reader::new(root, library).read_probe(probe)
}

/// Executes reading probes in this process, one after the other.
#[derive(Debug)]
pub(super) struct Reader {
    root: PathBuf,
    /// NVML or DCGM, depending on the probe.
    library: OsString,
    tree: Tree,
}

impl Reader {
    pub(super) fn new(root: &Path, library: &OsStr) -> Self {
        Self { root: root.to_owned(), library: library.to_owned(), tree: Tree::below(root) }
    }

    pub(super) fn read_probe(&mut self, probe: &Probe) -> ProbeOutput {
        let (root, tree) = (self.root.as_path(), &mut self.tree);
        let (path, done) = match probe {
            Probe::Read { path } => (path.as_str(), read(path, &path_on_machine(root, path)).map(ProbeOutput::Text)),
            Probe::List { path } => (path.as_str(), list(&path_on_machine(root, path)).map(ProbeOutput::Names)),
            Probe::StatFs { path } => (path.as_str(), stat_fs(&path_on_machine(root, path)).map(ProbeOutput::StatFs)),
            Probe::Glob { pattern } => (pattern.as_str(), tree.texts(pattern).map(ProbeOutput::Files)),
            Probe::Bytes { pattern, most } => (pattern.as_str(), tree.bytes(pattern, *most).map(ProbeOutput::Files)),
            Probe::Links { pattern } => (pattern.as_str(), tree.links(pattern).map(ProbeOutput::Links)),
            Probe::Processes => ("/proc", processes::list_processes(root).map(ProbeOutput::Processes)),
            Probe::ClockDiscipline => ("the kernel's clock", clock_discipline::read(root).map(ProbeOutput::Text)),
            Probe::Gpu { fields } => {
                return ProbeOutput::Gpus(gpus::query_driver(root, &self.library, fields, &mut |_, _| {}));
            }
            Probe::Kmsg => ("/dev/kmsg", kernel_log(&path_on_machine(root, "/dev/kmsg")).map(ProbeOutput::Text)),
            Probe::DcgmHealth { address } => {
                return dcgm::health(&self.library, address).map_or_else(ProbeOutput::Failed, ProbeOutput::Text);
            }
            Probe::Exec { .. } | Probe::ExecIfExists { .. } | Probe::Builtin { .. } | Probe::Sampled { .. } => {
                return failed(FailureKind::Failed, "not a reading probe");
            }
        };
        done.unwrap_or_else(|error| match error.kind() {
            io::ErrorKind::FileTooLarge => {
                failed(FailureKind::TooLong, format!("{path} is longer than {MAX_STREAM_BYTES} bytes"))
            }
            _ => failed(kind_of(&error), format!("{path}: {error}")),
        })
    }
}

/// Resolves a path of the machine below `root`. Some files of /proc are links to the reading process's own data. In a
/// container that sees its host below `root` these would be the container's; the host's are those of its process 1.
pub(super) fn path_on_machine(root: &Path, path: &str) -> PathBuf {
    let own = path.strip_prefix("/proc/").filter(|rest| *rest == "mounts" || rest.starts_with("net/"));
    if let Some(own) = own.filter(|_| root != Path::new("/")) {
        let first = root.join("proc/1").join(own);
        if first.exists() {
            return first;
        }
    }
    root.join(path.trim_start_matches('/'))
}

fn read(path: &str, host_path: &Path) -> io::Result<String> {
    let bytes = read_start(path, host_path, MAX_STREAM_BYTES as u64 + 1).map_err(|error| match error.kind() {
        io::ErrorKind::IsADirectory => io::Error::new(io::ErrorKind::InvalidInput, "it is a directory"),
        _ => error,
    })?;
    if bytes.len() > MAX_STREAM_BYTES {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    Ok(to_text(bytes))
}

fn list(path: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(path)? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
        if names.len() > MAX_NAMES {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
    }
    names.sort();
    Ok(names)
}

fn stat_fs(path: &Path) -> io::Result<FileSystemSpace> {
    let stat = rustix::fs::statvfs(path)?;
    let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
    Ok(FileSystemSpace {
        size: bytes(stat.f_blocks),
        available: bytes(stat.f_bavail),
        free: bytes(stat.f_bfree),
        inodes: stat.f_files,
        inodes_free: stat.f_ffree,
    })
}

/// Returns all records in the kernel's buffer, oldest first, or the newest that fit.
///
/// Each read(2) of /dev/kmsg returns one whole record, EAGAIN after the last one, and EPIPE if records were overwritten
/// meanwhile; the next read then continues with the oldest remaining one.
fn kernel_log(path: &Path) -> io::Result<String> {
    let mut file = File::options().read(true).custom_flags(nonblocking()).open(path)?;
    let mut records = VecDeque::new();
    let mut length = 0;
    // The kernel's limit for a record.
    let mut buffer = [0; 8 << 10];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => {
                let record = String::from_utf8_lossy(&buffer[..count]).into_owned();
                length += record.len();
                records.push_back(record);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            Err(error) if error.raw_os_error() == Some(Errno::PIPE.raw_os_error()) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        while length > MAX_STREAM_BYTES {
            length -= records.pop_front().map_or(length, |record: String| record.len());
        }
    }
    Ok(records.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_with_the_hosts_proc_reads_the_hosts_mounts_and_sockets() {
        let host = tempfile::tempdir().unwrap();
        fs::create_dir_all(host.path().join("proc/1/net")).unwrap();
        for file in ["proc/1/mounts", "proc/1/net/tcp"] {
            fs::write(host.path().join(file), "").unwrap();
        }
        for (path, expected) in [
            ("/proc/mounts", "proc/1/mounts"),
            ("/proc/net/tcp", "proc/1/net/tcp"),
            // Absent: falls back to the link, which is right for a recorded machine.
            ("/proc/net/tcp6", "proc/net/tcp6"),
            ("/proc/uptime", "proc/uptime"),
            ("/sys/class/net", "sys/class/net"),
        ] {
            assert_eq!(path_on_machine(host.path(), path), host.path().join(expected));
            assert_eq!(path_on_machine(Path::new("/"), path), Path::new(path));
        }
    }
}
