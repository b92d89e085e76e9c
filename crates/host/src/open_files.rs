//! The number of files that this program may have open.
//!
//! systemd and shells start a program with 1,024, for the sake of old programs that use `select`. The listeners of the controller may
//! hold more connections than that together. Without descriptors, it could open neither its store nor a connection of another
//! listener.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Enough for the connections of all listeners, the store, and the programs of a backend.
const WANTED: u64 = 16 << 10;

/// Raises the limit of open files, as far as the system permits. Returns the limit.
pub fn raise_limit() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let current = limit.current.unwrap_or(u64::MAX);
    let wanted = WANTED.min(limit.maximum.unwrap_or(u64::MAX));
    if current >= wanted {
        return current;
    }
    match setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum: limit.maximum }) {
        Ok(()) => wanted,
        Err(_) => current,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_raised_as_far_as_permitted_and_never_lowered() {
        let before = getrlimit(Resource::Nofile);
        let raised = raise_limit();
        assert!(raised >= before.current.unwrap_or(u64::MAX));
        assert!(raised >= WANTED.min(before.maximum.unwrap_or(u64::MAX)));
        assert_eq!(raise_limit(), raised);
    }
}
