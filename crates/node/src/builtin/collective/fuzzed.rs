//! Ways in for the fuzzer to what comes over the network in a test over several nodes: from strangers, and from nodes that
//! know the secret and are sick.

use std::io;

use doctor_checks::{collective_order::Mode, collective_report::measurements};

use super::{
    seal::{self, End, NONCE_BYTES},
    steps::{Steps, Tell},
    told::{Down, Hello, Up},
};

/// Whether somebody is let in who sends this without knowing the secret.
pub fn lets_in(bytes: &[u8]) -> bool {
    let Some((nonce, rest)) = bytes.split_first_chunk::<NONCE_BYTES>() else { return false };
    let (mut reading, _) =
        seal::channels((rest, io::sink()), b"what nobody knows", &[7; NONCE_BYTES], nonce, End::Listens);
    reading.read::<Hello>().is_ok()
}

/// What follows when the second of two nodes says this; how many findings the first one has in the end. That all hung together
/// is none of its own: it accuses nobody until pairs have told who it was.
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
