//! Finds the process of this program that listens on a port of this machine.

use std::{collections::BTreeSet, fs, os::unix::fs::MetadataExt};

/// The name of this program as the kernel shows it.
const PROGRAM: &str = "doctor";
/// The state of a listening socket in `/proc/net/tcp`.
const LISTENING: &str = "0A";

/// Returns the process id of another process of this program that listens on this port. The open files of a process of another
/// user are not visible: it is taken for the holder if that user holds the port.
pub(super) fn running_doctor(port: u16) -> Option<u32> {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(|path| fs::read_to_string(path).unwrap_or_default());
    let listening: Vec<Listening> = tables.iter().flat_map(|table| listening_sockets(table, port)).collect();
    let names: BTreeSet<String> = listening.iter().map(|socket| format!("socket:[{}]", socket.inode)).collect();
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let mut ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    ids.find(|id| {
        let is_other = *id != std::process::id() && is_doctor(*id);
        is_other && holds_one(*id, &names).unwrap_or_else(|| listening.iter().any(|socket| is_of(*id, socket.user)))
    })
}

/// A listening socket.
#[derive(Debug, PartialEq, Eq)]
struct Listening {
    user: u32,
    inode: u64,
}

/// Returns the sockets that listen on this port, from the text of `/proc/net/tcp`.
fn listening_sockets(table: &str, port: u16) -> Vec<Listening> {
    let parse = |line: &str| -> Option<Listening> {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let (_, local) = columns.get(1)?.rsplit_once(':')?;
        let is_it = u16::from_str_radix(local, 16) == Ok(port) && columns.get(3) == Some(&LISTENING);
        let socket = || Some(Listening { user: columns.get(7)?.parse().ok()?, inode: columns.get(9)?.parse().ok()? });
        if is_it { socket() } else { None }
    };
    table.lines().filter_map(parse).collect()
}

fn is_of(process: u32, user: u32) -> bool {
    fs::metadata(format!("/proc/{process}")).is_ok_and(|found| found.uid() == user)
}

fn is_doctor(process: u32) -> bool {
    fs::read_to_string(format!("/proc/{process}/comm")).is_ok_and(|name| name.trim() == PROGRAM)
}

/// `None`: this user may not know.
fn holds_one(process: u32, sockets: &BTreeSet<String>) -> Option<bool> {
    let files = fs::read_dir(format!("/proc/{process}/fd")).ok()?;
    let mut links = files.flatten().filter_map(|file| fs::read_link(file.path()).ok());
    Some(links.any(|link| sockets.contains(&*link.to_string_lossy())))
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
        assert_eq!(listening_sockets(table, 8080), [Listening { user: 1000, inode: 4711 }]);
        assert_eq!(listening_sockets(table, 22), [Listening { user: 0, inode: 4713 }]);
        assert!(listening_sockets(table, 23).is_empty());
    }

    #[test]
    fn a_port_that_this_test_holds_is_not_held_by_a_doctor() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let table = fs::read_to_string("/proc/net/tcp").unwrap();
        assert_eq!(listening_sockets(&table, port).len(), 1);
        assert_eq!(running_doctor(port), None);
    }
}
