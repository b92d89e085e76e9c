//! Finds listening ports in `/proc/net/tcp` and `/proc/net/tcp6`. Connecting instead would use up the only connection
//! that some servers accept.

/// The kernel's tables of TCP sockets.
pub const TABLES: [&str; 2] = ["/proc/net/tcp", "/proc/net/tcp6"];

/// Returns whether a socket listens on this port, according to the text of one of the tables.
pub fn is_listening(table: &str, port: u16) -> bool {
    /// The state of a listening socket.
    const LISTEN: &str = "0A";
    table.lines().any(|line| {
        let mut fields = line.split_ascii_whitespace();
        let of_port = fields.nth(1).and_then(|local| local.rsplit_once(':')).map(|(_, port)| port);
        of_port.and_then(|of_port| u16::from_str_radix(of_port, 16).ok()) == Some(port) && fields.nth(1) == Some(LISTEN)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    // Linux 6.18, 2026-11-15; addresses and inodes changed by hand.
    const TABLE: &str = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:15B3 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 40021 1 0000000000000000 100 0 0 10 0
   1: 0100007F:15B4 0100007F:A2C4 01 00000000:00000000 00:00000000 00000000     0        0 40022 1 0000000000000000 20 0 0 10 -1
";

    #[test]
    fn a_listening_port_differs_from_a_connected_one() {
        assert!(is_listening(TABLE, 5555));
        assert!(!is_listening(TABLE, 5556), "a connection is no listener");
        assert!(!is_listening(TABLE, 5557) && !is_listening("", 5555));
        assert!(is_listening("  0: 00000000000000000000000000000000:B9E8 0:0 0A", 47592), "IPv6");
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "([0-9A-F: \n]|.){0,60}", port: u16) {
            is_listening(&text, port);
        }
    }
}
