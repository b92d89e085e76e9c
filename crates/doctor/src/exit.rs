//! Exit codes. Scripts rely on them: a code never changes its meaning.
//!
//! `doctor status` has codes of its own, those that monitoring systems expect from a plugin: there, 2 is a critical state
//! and nothing else, and whatever keeps the command from knowing the state is 3.

use std::process::ExitCode;

use doctor_core::view::OverallState;

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
    Stuck = 8,
    Superseded = 9,
}

impl Exit {
    pub(crate) const ALL: [Self; 10] = [
        Self::Ok,
        Self::ProblemsFound,
        Self::Usage,
        Self::Unreachable,
        Self::Configuration,
        Self::NotLeader,
        Self::NotConfirmed,
        Self::Damaged,
        Self::Stuck,
        Self::Superseded,
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
            Self::Stuck => {
                "the control loop made no progress, or did not end within 30 s of SIGTERM: the process ended itself"
            }
            Self::Superseded => {
                "a newer controller has migrated the store while this one ran; it stopped and changed nothing"
            }
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}

/// The exit status of `doctor status`, which is that of a Nagios plugin, so that it can be one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum NagiosExit {
    Ok = 0,
    Warning = 1,
    Critical = 2,
    Unknown = 3,
}

impl NagiosExit {
    pub(crate) const ALL: [Self; 4] = [Self::Ok, Self::Warning, Self::Critical, Self::Unknown];

    pub(crate) const fn code(self) -> u8 {
        self as u8
    }

    /// Returns the meaning, for the reference page and `doctor status --help`.
    pub(crate) const fn meaning(self) -> &'static str {
        match self {
            Self::Ok => "no open problems; there may be notices",
            Self::Warning => "an operator is needed",
            Self::Critical => "an operator is needed now",
            Self::Unknown => {
                "nothing is known: the cluster was never observed, the store or the configuration cannot be read, or \
                 the command line is invalid"
            }
        }
    }
}

impl From<OverallState> for NagiosExit {
    fn from(state: OverallState) -> Self {
        match state {
            OverallState::Ok => Self::Ok,
            OverallState::Warning => Self::Warning,
            OverallState::Critical => Self::Critical,
            OverallState::Unknown => Self::Unknown,
        }
    }
}

impl From<NagiosExit> for ExitCode {
    fn from(exit: NagiosExit) -> Self {
        Self::from(exit.code())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_codes_of_status_are_those_of_nagios() {
        let codes: Vec<u8> = OverallState::ALL.iter().map(|state| NagiosExit::from(*state).code()).collect();
        assert_eq!(codes, [0, 1, 2, 3]);
        assert_eq!(NagiosExit::ALL.map(NagiosExit::code), [0, 1, 2, 3]);
    }

    #[test]
    fn every_number_is_used_once() {
        let codes: Vec<u8> = Exit::ALL.iter().map(|exit| exit.code()).collect();
        assert_eq!(codes, (0..10).collect::<Vec<u8>>());
    }
}
