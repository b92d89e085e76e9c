//! Ways in for the fuzzer to what people and hosts write: host files, and the lines of a connection.

use doctor_backend::ssh::parse_hosts;
use doctor_core::node::Occupancy;
use doctor_host::{
    occupancy::occupancy,
    protocol::{Said, read_answer},
};

/// How many hosts such a file names, or what is wrong with it.
pub fn hosts_in(text: &str) -> Result<usize, String> {
    parse_hosts(text).map(|hosts| hosts.len()).map_err(|error| error.to_string())
}

/// Whether this line is an answer to the question of this number, and if it is a look, whether it calls the host free although
/// something in it could not be learnt.
pub fn answered(line: &[u8], number: u64) -> Result<bool, String> {
    Ok(match read_answer(line, number)? {
        Said::Looked(look) => {
            let doubt = look.load.is_err() || look.gpus.is_err() || look.terminals.is_err() || look.abandoned.is_some();
            doubt && occupancy(&look, 0.7) == Occupancy::Free
        }
        Said::Started(_)
        | Said::InUse { .. }
        | Said::Done
        | Said::Repair(_)
        | Said::Report(_)
        | Said::Failed { .. } => false,
    })
}
