//! Exit codes. Scripts rely on them: a code never changes its meaning.

use std::process::ExitCode;

/// The exit status of the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Exit {
    Ok = 0,
    ProblemsFound = 1,
    Usage = 2,
    Unreachable = 3,
    Configuration = 4,
    NotLeader = 5,
    NotConfirmed = 6,
    Damaged = 7,
}

impl Exit {
    pub(crate) const ALL: [Self; 8] = [
        Self::Ok,
        Self::ProblemsFound,
        Self::Usage,
        Self::Unreachable,
        Self::Configuration,
        Self::NotLeader,
        Self::NotConfirmed,
        Self::Damaged,
    ];

    pub(crate) const fn code(self) -> u8 {
        self as u8
    }

    /// Returns the meaning, for the reference page and `doctor --help`.
    pub(crate) const fn meaning(self) -> &'static str {
        match self {
            Self::Ok => "success, no open problems",
            Self::ProblemsFound => "there are open problems, or the operation failed",
            Self::Usage => "invalid command line, or an unknown name in it",
            Self::Unreachable => "the store, the cluster or a file could not be reached",
            Self::Configuration => "invalid configuration, policy or profile file",
            Self::NotLeader => "another controller leads",
            Self::NotConfirmed => "not confirmed (`--yes`); nothing was changed",
            Self::Damaged => "the store is damaged or has another schema; it was not changed",
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_used_once() {
        let codes: Vec<u8> = Exit::ALL.iter().map(|exit| exit.code()).collect();
        assert_eq!(codes, (0..8).collect::<Vec<u8>>());
    }
}
