//! The files that Slurm starts with: its configuration, munge's key, GPU device nodes, and state folders.

use std::{
    fs,
    io::Read as _,
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
    path::Path,
};

use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};

use super::{
    error::{SlurmTestbedError, file_error},
    layout::{Layout, PathsAndPorts, Rest},
};

/// The program that a node runs to reboot.
const REBOOT: &str = include_str!("reboot.sh");

/// The numbers of /dev/null. It stands for a GPU: Slurm requires a device file and does not open it.
const NULL_DEVICE: (u32, u32) = (1, 3);

pub(super) fn write(layout: &Layout, paths_and_ports: &PathsAndPorts) -> Result<(), SlurmTestbedError> {
    let put = |name: &str, text: &str| {
        let path = paths_and_ports.folder.join(name);
        fs::write(&path, text).map_err(file_error("writing", &path))
    };
    put("slurm.conf", &layout.conf(paths_and_ports))?;
    put("gres.conf", &layout.gres(paths_and_ports))?;
    put("cgroup.conf", layout.cgroup())?;
    executable(&paths_and_ports.folder.join("reboot.sh"), REBOOT)?;
    for name in ["munge", "state", "spool"] {
        folder(&paths_and_ports.folder.join(name))?;
    }
    secret(&paths_and_ports.munge("key"))?;
    if layout.rest == Some(Rest::Token) {
        secret(&paths_and_ports.token_key())?;
    }
    if !layout.slurmds {
        return Ok(());
    }
    layout.node_names().try_for_each(|node| {
        folder(&paths_and_ports.folder.join("spool").join(&node))?;
        devices(&paths_and_ports.gpus(&node), layout.gpus)
    })
}

/// Writes an executable file.
pub(super) fn executable(path: &Path, text: &str) -> Result<(), SlurmTestbedError> {
    fs::write(path, text).map_err(file_error("writing", path))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).map_err(file_error("writing", path))
}

pub(super) fn folder(path: &Path) -> Result<(), SlurmTestbedError> {
    fs::create_dir_all(path).map_err(file_error("creating", path))
}

/// Writes a random munge key, so that daemons of two test beds never accept each other.
fn secret(path: &Path) -> Result<(), SlurmTestbedError> {
    let mut key = [0; 128];
    let random = Path::new("/dev/urandom");
    fs::File::open(random).and_then(|mut file| file.read_exact(&mut key)).map_err(file_error("reading", random))?;
    let file = fs::File::options().write(true).create_new(true).mode(0o600).open(path);
    file.and_then(|mut file| std::io::Write::write_all(&mut file, &key)).map_err(file_error("writing", path))
}

fn devices(directory: &Path, count: usize) -> Result<(), SlurmTestbedError> {
    folder(directory)?;
    (0..count).try_for_each(|number| {
        let path = directory.join(format!("nvidia{number}"));
        let (major, minor) = NULL_DEVICE;
        mknodat(CWD, &path, FileType::CharacterDevice, Mode::from_raw_mode(0o666), makedev(major, minor))
            .map_err(|errno| file_error("making the device", &path)(errno.into()))
    })
}
