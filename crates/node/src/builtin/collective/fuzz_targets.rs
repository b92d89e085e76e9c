//! Fuzzing entry points for the network input of a multi-node test: from unauthenticated peers, and from faulty nodes
//! that know the secret.

use std::io;

use doctor_checks::{collective_params::Mode, collective_report::measurements};

use super::{
    frame_auth::{self, NONCE_BYTES, Side},
    messages::{FromFirst, JoinRequest, ToFirst},
    step_barrier::{Barrier, Outgoing},
};

/// Whether a peer that sends this without knowing the secret is accepted.
pub fn accepts_peer(bytes: &[u8]) -> bool {
    let Some((nonce, rest)) = bytes.split_first_chunk::<NONCE_BYTES>() else { return false };
    let (mut reading, _) =
        frame_auth::channels((rest, io::sink()), b"an unknown secret", &[7; NONCE_BYTES], nonce, Side::Listener);
    reading.read::<JoinRequest>().is_ok()
}

/// Processes a message of the second of two nodes, and returns how many findings the first node has at the end. A
/// common hang does not count: it accuses no node until tests of pairs have located it.
pub fn handle_peer_message(bytes: &[u8]) -> Option<usize> {
    let up = serde_json::from_slice::<ToFirst>(bytes).ok()?;
    let mut steps = Barrier::new(2);
    steps.join(0, "first");
    steps.join(1, "other");
    steps.handle(1, up);
    let mut outgoing = steps.node_lost(0, "the end").into_iter().chain(steps.node_lost(1, "the end"));
    let reports = outgoing.find_map(|message| match message {
        Outgoing::All(FromFirst::Finished { reports, .. }) => Some(reports),
        Outgoing::One(..) | Outgoing::All(_) => None,
    })?;
    let result = measurements(Mode::Nodes, &reports, 0, None, 0);
    Some(result.events.iter().filter(|event| event.code.as_str() != "collective-hung").count())
}
