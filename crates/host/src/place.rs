//! Where a machine keeps what is its own, below a folder that several machines may share: homes are often on NFS. Its name and its id are both
//! in the path, because machines made from one image may have one id, and machines of two sites one name.

use std::{fs, path::PathBuf};

/// So much of the machine's id is in the path.
const OF_ID: usize = 8;

/// For the machine that this runs on.
pub fn here() -> PathBuf {
    let name = rustix::system::uname();
    // Where there is none, the name has to do.
    let id = fs::read_to_string("/etc/machine-id").unwrap_or_default();
    of(&name.nodename().to_string_lossy(), &id)
}

/// For a machine with this host name and this text in `/etc/machine-id`: `hosts/gpu01-4c4c4544`. People's scripts build the same path.
pub fn of(name: &str, machine_id: &str) -> PathBuf {
    let plain = |text: &str| -> String {
        text.chars().map(|c| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' }).collect()
    };
    let id: String = machine_id.trim().chars().take(OF_ID).collect();
    PathBuf::from("hosts").join(format!("{}-{}", plain(name), plain(&id)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_machines_have_one_place_and_no_name_leads_out_of_it() {
        assert_eq!(of("gpu01", "4c4c454400000000aaaaaaaaaaaaaaaa\n"), PathBuf::from("hosts/gpu01-4c4c4544"));
        assert_ne!(of("gpu01", "4c4c4544\n"), of("gpu02", "4c4c4544\n"));
        assert_ne!(of("gpu01", "4c4c4544\n"), of("gpu01", "5c4c4544\n"));
        assert_eq!(of("gpu01", ""), PathBuf::from("hosts/gpu01-"));
        assert_eq!(of("../../etc", "/x"), PathBuf::from("hosts/.._.._etc-_x"));
        assert_eq!(here().components().count(), 2);
    }
}
