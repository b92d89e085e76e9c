//! Finds the process of this program that listens on a port of this machine.

use std::{collections::BTreeSet, fs};

/// The name of this program as the kernel shows it.
const PROGRAM: &str = "doctor";
/// The state of a listening socket in `/proc/net/tcp`.
const LISTENING: &str = "0A";

/// Returns the process id of another process of this program that listens on this port. A process of another user is not
/// found: its open files are not visible.
pub(super) fn running_doctor(port: u16) -> Option<u32> {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(|path| fs::read_to_string(path).unwrap_or_default());
    let sockets: BTreeSet<String> = tables
        .iter()
        .flat_map(|table| listening_inodes(table, port))
        .map(|inode| format!("socket:[{inode}]"))
        .collect();
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let mut ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    ids.find(|id| *id != std::process::id() && is_doctor(*id) && holds_one(*id, &sockets))
}

/// Returns the inodes of the sockets that listen on this port, from the text of `/proc/net/tcp`.
fn listening_inodes(table: &str, port: u16) -> Vec<u64> {
    let parse = |line: &str| -> Option<u64> {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let (_, local) = columns.get(1)?.rsplit_once(':')?;
        let is_it = u16::from_str_radix(local, 16) == Ok(port) && columns.get(3) == Some(&LISTENING);
        if is_it { columns.get(9)?.parse().ok() } else { None }
    };
    table.lines().filter_map(parse).collect()
}

fn is_doctor(process: u32) -> bool {
    fs::read_to_string(format!("/proc/{process}/comm")).is_ok_and(|name| name.trim() == PROGRAM)
}

fn holds_one(process: u32, sockets: &BTreeSet<String>) -> bool {
    let Ok(files) = fs::read_dir(format!("/proc/{process}/fd")) else { return false };
    files
        .flatten()
        .filter_map(|file| fs::read_link(file.path()).ok())
        .any(|link| sockets.contains(&*link.to_string_lossy()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_listening_sockets_of_the_port_are_read() {
        // /proc/net/tcp of Linux 6.1, by hand shortened to four sockets.
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n\
                     \x20  0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 4711 1 0 100 0 0 10 0\n\
                     \x20  1: 0100007F:1F90 0100007F:C350 01 00000000:00000000 00:00000000 00000000  1000        0 4712 1 0 20 4 30 10 -1\n\
                     \x20  2: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4713 1 0 100 0 0 10 0\n\
                     \x20  3: cut\n";
        assert_eq!(listening_inodes(table, 8080), [4711]);
        assert_eq!(listening_inodes(table, 22), [4713]);
        assert!(listening_inodes(table, 23).is_empty());
    }

    #[test]
    fn a_port_that_this_test_holds_is_not_held_by_a_doctor() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let table = fs::read_to_string("/proc/net/tcp").unwrap();
        assert_eq!(listening_inodes(&table, port).len(), 1);
        assert_eq!(running_doctor(port), None);
    }
}
