//! Authenticated messages between the nodes of a job. Without the shared secret they cannot be forged, changed,
//! replayed or dropped. They are not encrypted: they contain addresses and measurements, and NCCL's own traffic is not
//! encrypted either.
//!
//! The listener sends a nonce of 32 random bytes, and the connecting node sends another; both and the secret give the
//! key of the connection. A message is its length, its bytes, and a MAC over the direction, its sequence number and its
//! bytes.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
};

use hmac::{Hmac, KeyInit as _, Mac as _};
use serde::{Serialize, de::DeserializeOwned};
use sha2::Sha256;

/// Far above the size of reports of a thousand GPUs.
const MAX_BYTES: u32 = 16 << 20;
/// Limit until the peer has proved that it knows the secret.
const MAX_UNAUTHENTICATED_BYTES: u32 = 4 << 10;
const MAC_BYTES: usize = 32;
pub(super) const NONCE_BYTES: usize = 32;

/// Both directions of a connection between two nodes.
pub(super) type ReadChannel = Channel<TcpStream>;
pub(super) type WriteChannel = Channel<TcpStream>;

pub(super) type Nonce = [u8; NONCE_BYTES];

#[derive(Debug, thiserror::Error)]
pub(super) enum FrameError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("message authentication failed: the peer has another secret, or is not doctor-node")]
    BadMac,
    #[error("a message of {0} bytes is too long")]
    TooLong(u32),
    #[error("cannot parse a message: {0}")]
    Malformed(#[from] serde_json::Error),
}

/// Which end of the connection sends. Messages of one end are never accepted as the other's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Listener,
    Connector,
}

impl Side {
    const fn mark(self) -> u8 {
        match self {
            Self::Listener => b'L',
            Self::Connector => b'C',
        }
    }

    const fn other(self) -> Self {
        match self {
            Self::Listener => Self::Connector,
            Self::Connector => Self::Listener,
        }
    }
}

fn mac(key: &[u8], parts: &[&[u8]]) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes a key of any length");
    for part in parts {
        // With its length, so that no two lists of parts give the same input.
        mac.update(&(part.len() as u64).to_le_bytes());
        mac.update(part);
    }
    mac
}

/// One direction of a connection.
pub(super) struct Channel<S> {
    stream: S,
    key: Vec<u8>,
    /// The end that writes.
    writer: Side,
    count: u64,
    max_bytes: u32,
}

impl<S> std::fmt::Debug for Channel<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Channel").field("writer", &self.writer).field("count", &self.count).finish_non_exhaustive()
    }
}

/// Returns both directions of a connection, seen from this end. Before the first valid message only short ones are
/// read.
pub(super) fn channels<R, W>(
    (read, write): (R, W),
    secret: &[u8],
    listener: &Nonce,
    joiner: &Nonce,
    side: Side,
) -> (Channel<R>, Channel<W>) {
    let key = mac(secret, &[b"doctor collective 1", listener, joiner]).finalize().into_bytes().to_vec();
    let max_bytes = MAX_UNAUTHENTICATED_BYTES;
    (
        Channel { stream: read, key: key.clone(), writer: side.other(), count: 0, max_bytes },
        Channel { stream: write, key, writer: side, count: 0, max_bytes },
    )
}

impl<S> Channel<S> {
    fn frame_mac(&self, bytes: &[u8]) -> Hmac<Sha256> {
        mac(&self.key, &[&[self.writer.mark()], &self.count.to_le_bytes(), bytes])
    }

    pub(super) const fn stream(&self) -> &S {
        &self.stream
    }
}

impl<R: Read> Channel<R> {
    pub(super) fn read<T: DeserializeOwned>(&mut self) -> Result<T, FrameError> {
        let mut length = [0; 4];
        self.stream.read_exact(&mut length)?;
        let length = u32::from_le_bytes(length);
        if length > self.max_bytes {
            return Err(FrameError::TooLong(length));
        }
        let mut bytes = vec![0; length as usize + MAC_BYTES];
        self.stream.read_exact(&mut bytes)?;
        let (body, seal) = bytes.split_at(length as usize);
        self.frame_mac(body).verify_slice(seal).map_err(|_| FrameError::BadMac)?;
        self.count += 1;
        // A valid MAC proves that the peer knows the secret.
        self.max_bytes = MAX_BYTES;
        Ok(serde_json::from_slice(body)?)
    }
}

impl<W: Write> Channel<W> {
    pub(super) fn write<T: Serialize>(&mut self, message: &T) -> Result<(), FrameError> {
        let body = serde_json::to_vec(message)?;
        let length = u32::try_from(body.len()).unwrap_or(u32::MAX);
        if length > MAX_BYTES {
            return Err(FrameError::TooLong(length));
        }
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend_from_slice(&body);
        bytes.extend_from_slice(&self.frame_mac(&body).finalize().into_bytes());
        self.stream.write_all(&bytes)?;
        self.stream.flush()?;
        self.count += 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &[u8] = b"0123456789abcdef";
    const NONCES: (Nonce, Nonce) = ([1; 32], [2; 32]);

    fn written(secret: &[u8], from: Side, messages: &[&str]) -> Vec<u8> {
        let mut bytes = Vec::new();
        let (_, mut channel) = channels((io::empty(), &mut bytes), secret, &NONCES.0, &NONCES.1, from);
        messages.iter().for_each(|message| channel.write(message).unwrap());
        bytes
    }

    fn read(bytes: &[u8], count: usize) -> Vec<Result<String, FrameError>> {
        let (mut channel, _) = channels((bytes, io::sink()), SECRET, &NONCES.0, &NONCES.1, Side::Listener);
        (0..count).map(|_| channel.read::<String>()).collect()
    }

    fn is_refused(bytes: &[u8]) -> bool {
        matches!(read(bytes, 1)[0], Err(FrameError::BadMac))
    }

    #[test]
    fn authenticated_frames_are_read_in_order() {
        let bytes = written(SECRET, Side::Connector, &["one", "two"]);
        let messages: Vec<_> = read(&bytes, 2).into_iter().map(Result::unwrap).collect();
        assert_eq!(messages, ["one", "two"]);
    }

    #[test]
    fn a_forged_changed_repeated_dropped_or_reflected_frame_is_rejected() {
        assert!(is_refused(&written(b"another secret..", Side::Connector, &["one"])));
        assert!(is_refused(&written(SECRET, Side::Listener, &["one"])), "its own message sent back");
        let bytes = written(SECRET, Side::Connector, &["one", "two"]);
        for position in 4..bytes.len() / 2 {
            let mut changed = bytes.clone();
            changed[position] ^= 1;
            assert!(is_refused(&changed), "byte {position}");
        }
        let half = bytes.len() / 2;
        assert!(is_refused(&bytes[half..]), "the first was left out");
        let twice = [&bytes[..half], &bytes[..half]].concat();
        assert!(matches!(read(&twice, 2)[1], Err(FrameError::BadMac)), "the first came twice");
    }

    #[test]
    fn an_unauthenticated_peer_cannot_make_it_read_much() {
        let mut bytes = u32::MAX.to_le_bytes().to_vec();
        bytes.extend_from_slice(&[0; 100]);
        assert!(matches!(read(&bytes, 1)[0], Err(FrameError::TooLong(u32::MAX))));
        let long = written(SECRET, Side::Connector, &["x".repeat(5000).as_str()]);
        assert!(matches!(read(&long, 1)[0], Err(FrameError::TooLong(_))), "not as the first message");
    }
}
