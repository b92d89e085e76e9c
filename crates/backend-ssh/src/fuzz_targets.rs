//! Entry points for the fuzzer: host files, and the lines of a connection.

use doctor_backend::ssh::parse_hosts;
use doctor_core::node::Occupancy;
use doctor_host::{
    occupancy::occupancy,
    protocol::{HostResponse, parse_response},
};

/// Counts the hosts in a host file.
pub fn hosts_in(text: &str) -> Result<usize, String> {
    parse_hosts(text).map(|hosts| hosts.len()).map_err(|error| error.to_string())
}

/// Parses an answer to the request of this number. Returns whether it reports a host as free although something could not be
/// read, which must never happen.
pub fn parse_answer(line: &[u8], number: u64) -> Result<bool, String> {
    Ok(match parse_response(line, number)? {
        HostResponse::Status(status) => {
            let incomplete = status.load.is_err()
                || status.gpu_users.is_err()
                || status.terminal_users.is_err()
                || status.unkillable_pid.is_some();
            incomplete && occupancy(&status, 0.7) == Occupancy::Free
        }
        HostResponse::Started(_)
        | HostResponse::InUse { .. }
        | HostResponse::Done
        | HostResponse::Repair(_)
        | HostResponse::Report(_)
        | HostResponse::Failed { .. } => false,
    })
}
