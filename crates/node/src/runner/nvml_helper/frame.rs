//! The protocol between the helper and its parent: a big-endian length of four bytes, then that many bytes of JSON.

use std::io::{self, Read, Write};

use doctor_checks::gpu::GpuQueryResult;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

const HEAD: usize = 4;

/// The longest query. All fields of all checks need a tenth of it.
pub(super) const MAX_QUERY_BYTES: usize = 256 << 10;

/// The longest answer: some hundred times what eight GPUs with all their links need.
pub(super) const MAX_ANSWER_BYTES: usize = 8 << 20;

/// A message of the parent.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DriverQuery {
    pub(super) fields: Vec<String>,
}

/// A message of the helper.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum HelperMessage {
    /// The next driver call is about this GPU.
    Querying(QueriedGpu),
    /// The last message of a query.
    Answer(GpuQueryResult),
}

/// A GPU that is queried.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct QueriedGpu {
    pub(super) index: u32,
    /// Empty if the PCI bus and the driver disagree on the GPUs and the driver has not reported it.
    pub(super) bus: String,
}

/// Encodes one frame.
pub(super) fn frame(message: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; HEAD];
    serde_json::to_writer(&mut bytes, message)?;
    let length = u32::try_from(bytes.len() - HEAD).map_err(io::Error::other)?;
    bytes[..HEAD].copy_from_slice(&length.to_be_bytes());
    Ok(bytes)
}

/// Writes one frame in a single write.
pub(super) fn write(to: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    to.write_all(&frame(message)?)
}

/// Waits for the next frame. `None` if the other end is closed.
pub(super) fn read<T: DeserializeOwned>(from: &mut impl Read, max_bytes: usize) -> io::Result<Option<T>> {
    let mut head = [0; HEAD];
    match from.read_exact(&mut head) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    }
    let length = length(head).filter(|length| *length <= max_bytes).ok_or(io::ErrorKind::FileTooLarge)?;
    let mut bytes = vec![0; length];
    from.read_exact(&mut bytes)?;
    Ok(Some(serde_json::from_slice(&bytes)?))
}

fn length(head: [u8; HEAD]) -> Option<usize> {
    usize::try_from(u32::from_be_bytes(head)).ok()
}

/// Splits a byte stream into messages.
#[derive(Debug, Default)]
pub(super) struct Incoming {
    bytes: Vec<u8>,
    /// Length of the consumed prefix.
    taken: usize,
}

impl Incoming {
    pub(super) fn add(&mut self, bytes: &[u8]) {
        self.bytes.drain(..std::mem::take(&mut self.taken));
        self.bytes.extend_from_slice(bytes);
    }

    /// Returns the next complete message.
    ///
    /// # Errors
    /// `FileTooLarge` if it exceeds the limit of an answer; `InvalidData` if it is not a message.
    pub(super) fn next(&mut self) -> io::Result<Option<HelperMessage>> {
        let Some((head, rest)) = self.bytes[self.taken..].split_first_chunk::<HEAD>() else { return Ok(None) };
        let length = length(*head).filter(|length| *length <= MAX_ANSWER_BYTES).ok_or(io::ErrorKind::FileTooLarge)?;
        let Some(message) = rest.get(..length) else { return Ok(None) };
        let message = serde_json::from_slice(message)?;
        self.taken += HEAD + length;
        Ok(Some(message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use doctor_core::observation::{FailureKind, ProbeFailure};
    use proptest::prelude::*;

    fn asking(index: u32) -> HelperMessage {
        HelperMessage::Querying(QueriedGpu { index, bus: format!("0000:{index:02x}:00.0") })
    }

    #[test]
    fn messages_are_reassembled_however_the_pipe_splits_them() {
        let driver = Err(ProbeFailure::new(FailureKind::Missing, "no driver"));
        let reply = HelperMessage::Answer(GpuQueryResult { on_pci: Vec::new(), driver, gpus: Vec::new() });
        let bytes = [frame(&asking(0)).unwrap(), frame(&asking(7)).unwrap(), frame(&reply).unwrap()].concat();
        for step in [1, 3, 50, bytes.len()] {
            let (mut incoming, mut received) = (Incoming::default(), Vec::new());
            for part in bytes.chunks(step) {
                incoming.add(part);
                while let Some(message) = incoming.next().unwrap() {
                    received.push(message);
                }
            }
            assert!(
                matches!(&received[..], [HelperMessage::Querying(one), HelperMessage::Querying(other), HelperMessage::Answer(_)]
                    if (one.index, other.index) == (0, 7) && other.bus == "0000:07:00.0"),
                "{received:?}"
            );
        }
    }

    #[test]
    fn an_oversized_message_is_rejected_before_it_is_read() {
        let head = u32::try_from(MAX_ANSWER_BYTES + 1).unwrap().to_be_bytes();
        let mut incoming = Incoming::default();
        incoming.add(&head);
        assert_eq!(incoming.next().unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        let error = read::<DriverQuery>(&mut &head[..], MAX_QUERY_BYTES).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        assert!(read::<DriverQuery>(&mut &[][..], MAX_QUERY_BYTES).unwrap().is_none());
    }

    proptest! {
        #[test]
        fn no_input_makes_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut incoming = Incoming::default();
            incoming.add(&bytes);
            while let Ok(Some(_)) = incoming.next() {}
            let _read = read::<DriverQuery>(&mut &bytes[..], MAX_QUERY_BYTES);
        }
    }
}
