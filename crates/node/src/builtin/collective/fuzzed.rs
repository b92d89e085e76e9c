//! Fuzzing entry points for the network input of a multi-node test: from unauthenticated peers, and from faulty nodes
//! that know the secret.

use std::io;

use doctor_checks::{collective_order::Mode, collective_report::measurements};

use super::{
    seal::{self, End, NONCE_BYTES},
    steps::{Steps, Tell},
    told::{Down, Hello, Up},
};

/// Whether a peer that sends this without knowing the secret is accepted.
pub fn lets_in(bytes: &[u8]) -> bool {
    let Some((nonce, rest)) = bytes.split_first_chunk::<NONCE_BYTES>() else { return false };
    let (mut reading, _) =
        seal::channels((rest, io::sink()), b"an unknown secret", &[7; NONCE_BYTES], nonce, End::Listens);
    reading.read::<Hello>().is_ok()
}

/// Processes a message of the second of two nodes, and returns how many findings the first node has at the end. A
/// common hang does not count: it accuses no node until tests of pairs have located it.
pub fn said_by_the_other(bytes: &[u8]) -> Option<usize> {
    let up = serde_json::from_slice::<Up>(bytes).ok()?;
    let mut steps = Steps::new(2);
    steps.came(0, "first");
    steps.came(1, "other");
    steps.hear(1, up);
    let mut told = steps.gone(0, "the end").into_iter().chain(steps.gone(1, "the end"));
    let reports = told.find_map(|tell| match tell {
        Tell::All(Down::All { reports, .. }) => Some(reports),
        Tell::One(..) | Tell::All(_) => None,
    })?;
    let said = measurements(Mode::Nodes, &reports, 0, None, 0);
    Some(said.events.iter().filter(|event| event.code.as_str() != "collective-hung").count())
}
