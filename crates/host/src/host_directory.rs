//! The path of a machine's own state below a folder that several machines may share, because home directories are often
//! on NFS. The path contains host name and machine id: machines from one image may share an id, and machines of two
//! sites a name.

use std::{fs, path::PathBuf};

/// The number of characters of the machine id in the path.
const MACHINE_ID_CHARS: usize = 8;

/// Returns the path for this machine.
pub fn this_host() -> PathBuf {
    let name = rustix::system::uname();
    // Without a machine id, the host name alone has to do.
    let id = fs::read_to_string("/etc/machine-id").unwrap_or_default();
    host_path(&name.nodename().to_string_lossy(), &id)
}

/// Returns the path for a host name and the text of `/etc/machine-id`: `hosts/gpu01-4c4c4544`. Users' scripts build the
/// same path, so its form must not change.
pub fn host_path(name: &str, machine_id: &str) -> PathBuf {
    let plain = |text: &str| -> String {
        text.chars().map(|c| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' }).collect()
    };
    let id: String = machine_id.trim().chars().take(MACHINE_ID_CHARS).collect();
    PathBuf::from("hosts").join(format!("{}-{}", plain(name), plain(&id)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_paths_are_unique_and_stay_inside_the_folder() {
        assert_eq!(host_path("gpu01", "4c4c454400000000aaaaaaaaaaaaaaaa\n"), PathBuf::from("hosts/gpu01-4c4c4544"));
        assert_ne!(host_path("gpu01", "4c4c4544\n"), host_path("gpu02", "4c4c4544\n"));
        assert_ne!(host_path("gpu01", "4c4c4544\n"), host_path("gpu01", "5c4c4544\n"));
        assert_eq!(host_path("gpu01", ""), PathBuf::from("hosts/gpu01-"));
        assert_eq!(host_path("../../etc", "/x"), PathBuf::from("hosts/.._.._etc-_x"));
        assert_eq!(this_host().components().count(), 2);
    }
}
