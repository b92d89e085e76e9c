//! The controller's permission for a node to drain itself, sent with the reply to a report while the circuit breaker
//! allows it.
//!
//! A scheduler hook that stops a job drains its node without waiting for the controller. It may do so only with a fresh
//! permit: if the breaker is open or the controller is unreachable, users keep their nodes. A permit holds for a
//! duration and not until a point in time, because the clocks of two machines differ. It names the report that it
//! answers and is signed with the node's key, so that it can be neither forged nor replayed.

use doctor_core::{ids::NodeName, time::Span};

use crate::document::RunKey;

/// The response header of the permit.
pub const PERMIT_HEADER: &str = "x-doctor-permit";

/// Domain separation from the signatures of documents.
const SIGNATURE_DOMAIN: &str = "doctor-permit-1";

/// The longest accepted permit: the next report is a minute away.
const MAX_DURATION: Span = Span::minutes(10);

/// One node may be drained, for this long from its request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DrainPermit {
    pub duration: Span,
}

impl DrainPermit {
    /// Returns the header's value, in reply to this report of this node.
    pub fn sign(self, node: &NodeName, number: u64, key: &RunKey) -> String {
        let seconds = self.duration.millis() / 1000;
        format!("{seconds} {}", key.signature(signed_text(node, number, seconds).as_bytes()))
    }

    /// Parses the header's value. Returns `None` unless it was issued to this node in reply to this report.
    pub fn open(text: &str, node: &NodeName, number: u64, key: &RunKey) -> Option<Self> {
        let (seconds, signature) = text.trim().split_once(' ')?;
        let seconds: i64 = seconds.parse().ok()?;
        let lasts = Span::from_secs(seconds);
        let believed = lasts > Span::ZERO && lasts <= MAX_DURATION;
        let fits = key.verify(signed_text(node, number, seconds).as_bytes(), signature);
        (believed && fits).then_some(Self { duration: lasts })
    }
}

fn signed_text(node: &NodeName, number: u64, seconds: i64) -> String {
    format!("{SIGNATURE_DOMAIN} {node} {number} {seconds}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: RunKey = RunKey::new([7; 32]);

    #[test]
    fn a_permit_is_valid_only_for_its_node_and_report() {
        let node = NodeName::new("n1").unwrap();
        let text = DrainPermit { duration: Span::minutes(2) }.sign(&node, 41, &KEY);
        assert_eq!(DrainPermit::open(&text, &node, 41, &KEY), Some(DrainPermit { duration: Span::minutes(2) }));
        assert_eq!(DrainPermit::open(&text, &node, 42, &KEY), None, "replayed from an older answer");
        assert_eq!(DrainPermit::open(&text, &NodeName::new("n2").unwrap(), 41, &KEY), None);
        assert_eq!(DrainPermit::open(&text, &node, 41, &RunKey::new([8; 32])), None);
        for made in [text.replacen("120", "300", 1), text[..text.len() - 1].to_owned(), "120".into(), String::new()] {
            assert_eq!(DrainPermit::open(&made, &node, 41, &KEY), None, "{made}");
        }
    }

    #[test]
    fn a_permit_of_a_day_or_without_duration_is_rejected() {
        let node = NodeName::new("n1").unwrap();
        for lasts in [Span::days(1), Span::ZERO, Span::from_secs(-5)] {
            assert_eq!(
                DrainPermit::open(&DrainPermit { duration: lasts }.sign(&node, 1, &KEY), &node, 1, &KEY),
                None,
                "{lasts}"
            );
        }
    }
}
