//! Limits how many rejected requests are recorded: any client can connect, and a line for each would let it fill the
//! disk.
//!
//! Authenticated callers have their own allowance, so that the noise of unknown clients does not hide their attempts.

use std::{
    net::IpAddr,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use super::error::ApiError;

/// Rejections recorded of each kind within [`WINDOW`]; the rest are counted.
const MAX_RECORDED: u32 = 120;
const WINDOW: Duration = Duration::from_secs(60);

/// The kind of a rejected request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RejectionKind {
    /// A command from an authenticated caller.
    KnownCallerCommand,
    /// A command from an unknown client.
    UnknownClientCommand,
    /// A read from an unknown client.
    UnknownClientRead,
}

#[derive(Debug)]
struct RateWindow {
    since: Instant,
    lines: u32,
    suppressed: u64,
}

impl Default for RateWindow {
    fn default() -> Self {
        Self { since: Instant::now(), lines: 0, suppressed: 0 }
    }
}

/// Recent counts by kind.
#[derive(Debug, Default)]
pub(super) struct AuditThrottle {
    known_caller_commands: Mutex<RateWindow>,
    unknown_client_commands: Mutex<RateWindow>,
    unknown_client_reads: Mutex<RateWindow>,
}

impl AuditThrottle {
    /// Returns `Some` if this rejection is recorded, with the number of those left out before it.
    pub(super) fn allow(&self, kind: RejectionKind) -> Option<u64> {
        let mutex = match kind {
            RejectionKind::KnownCallerCommand => &self.known_caller_commands,
            RejectionKind::UnknownClientCommand => &self.unknown_client_commands,
            RejectionKind::UnknownClientRead => &self.unknown_client_reads,
        };
        let mut window = mutex.lock().unwrap_or_else(PoisonError::into_inner);
        if window.since.elapsed() >= WINDOW {
            (window.since, window.lines) = (Instant::now(), 0);
        }
        if window.lines >= MAX_RECORDED {
            window.suppressed += 1;
            return None;
        }
        window.lines += 1;
        Some(std::mem::take(&mut window.suppressed))
    }

    /// Logs a read by an unknown client. The audit trail records changes only.
    pub(super) fn log_unknown_client(&self, peer: IpAddr, path: &str, error: &ApiError) {
        if error.is_unauthenticated()
            && let Some(omitted) = self.allow(RejectionKind::UnknownClientRead)
        {
            tracing::info!(%peer, path, reason = %error, not_logged = omitted, "API request rejected: unknown client");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejections_are_recorded_up_to_a_limit_and_counted_beyond() {
        let throttle = AuditThrottle::default();
        assert_eq!(
            (0..MAX_RECORDED).filter(|_| throttle.allow(RejectionKind::UnknownClientCommand) == Some(0)).count(),
            MAX_RECORDED as usize
        );
        assert_eq!(
            (throttle.allow(RejectionKind::UnknownClientCommand), throttle.allow(RejectionKind::UnknownClientCommand)),
            (None, None)
        );
        assert_eq!(
            throttle.allow(RejectionKind::KnownCallerCommand),
            Some(0),
            "unknown clients do not use up the allowance of known callers"
        );
        throttle.unknown_client_commands.lock().unwrap().since = Instant::now().checked_sub(WINDOW).unwrap();
        assert_eq!(
            (throttle.allow(RejectionKind::UnknownClientCommand), throttle.allow(RejectionKind::UnknownClientCommand)),
            (Some(2), Some(0))
        );
    }
}
