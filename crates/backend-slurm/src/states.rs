//! Slurm's words for the state of a node and of a job. Pure.
//!
//! A node has one base state and any number of flags. The text of `scontrol`, the JSON of 22.05 and that of later versions use
//! the same words; some were renamed over the years, and both names are accepted. An unknown word is kept: its meaning may be
//! anything, so the state as a whole is unknown.

/// Declares an enum of Slurm's words: each variant with its names, the current one first.
macro_rules! words {
    ($(#[$doc:meta])* $type:ident { $($(#[$vdoc:meta])* $variant:ident => $first:literal $(| $other:literal)*,)+ }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(super) enum $type { $($(#[$vdoc])* $variant,)+ }

        impl $type {
            #[cfg(test)]
            pub(super) const ALL: &'static [Self] = &[$(Self::$variant,)+];

            pub(super) const fn word(self) -> &'static str {
                match self { $(Self::$variant => $first,)+ }
            }

            /// Parses a word of Slurm, ignoring case.
            pub(super) fn from_word(word: &str) -> Option<Self> {
                let is = |name: &str| word.eq_ignore_ascii_case(name);
                $(if is($first) $(|| is($other))* { return Some(Self::$variant); })+
                None
            }
        }
    };
}

words! {
    /// The base state of a node.
    Base {
        Idle => "IDLE",
        Allocated => "ALLOCATED" | "ALLOC",
        /// Partly allocated.
        Mixed => "MIXED" | "MIX",
        Down => "DOWN",
        Error => "ERROR",
        /// Defined for later; it may not exist yet.
        Future => "FUTURE",
        /// slurmctld has not heard from it since it started.
        Unregistered => "UNKNOWN",
    }
}

words! {
    /// A flag of a node, in addition to its base state.
    Flag {
        Blocked => "BLOCKED",
        Cloud => "CLOUD",
        Completing => "COMPLETING",
        Drain => "DRAIN",
        DynamicFuture => "DYNAMIC_FUTURE",
        DynamicNorm => "DYNAMIC_NORM",
        External => "EXTERNAL",
        Fail => "FAIL",
        InvalidReg => "INVALID_REG" | "INVAL",
        Maintenance => "MAINTENANCE" | "MAINT",
        NotResponding => "NOT_RESPONDING" | "NO_RESPOND",
        PerfCtrs => "PERFCTRS",
        Planned => "PLANNED",
        PowerDown => "POWER_DOWN",
        PowerDrain => "POWER_DRAIN",
        PoweredDown => "POWERED_DOWN",
        PoweringDown => "POWERING_DOWN",
        PoweringUp => "POWERING_UP",
        PowerUp => "POWER_UP",
        RebootCanceled => "REBOOT_CANCEL" | "REBOOT_CANCELED",
        RebootIssued => "REBOOT_ISSUED",
        RebootRequested => "REBOOT_REQUESTED" | "REBOOT",
        Reserved => "RESERVED" | "RES",
        Resume => "RESUME",
        Undrain => "UNDRAIN",
    }
}

words! {
    /// The state of a job.
    JobState {
        BootFail => "BOOT_FAIL",
        Cancelled => "CANCELLED",
        Completed => "COMPLETED",
        Completing => "COMPLETING",
        Configuring => "CONFIGURING",
        Deadline => "DEADLINE",
        Failed => "FAILED",
        NodeFail => "NODE_FAIL",
        OutOfMemory => "OUT_OF_MEMORY",
        Pending => "PENDING",
        Preempted => "PREEMPTED",
        Requeued => "REQUEUED",
        RequeueFed => "REQUEUE_FED",
        RequeueHold => "REQUEUE_HOLD",
        Resizing => "RESIZING",
        ResvDelHold => "RESV_DEL_HOLD",
        Revoked => "REVOKED",
        Running => "RUNNING",
        Signaling => "SIGNALING",
        SpecialExit => "SPECIAL_EXIT",
        StageOut => "STAGE_OUT",
        Stopped => "STOPPED",
        Suspended => "SUSPENDED",
        Timeout => "TIMEOUT",
    }
}

/// The progress of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Pending,
    /// It has its nodes.
    Active,
    Ended,
}

impl JobState {
    pub(super) const fn phase(self) -> Phase {
        match self {
            Self::Pending
            | Self::Requeued
            | Self::RequeueFed
            | Self::RequeueHold
            | Self::ResvDelHold
            | Self::SpecialExit => Phase::Pending,
            Self::Completing
            | Self::Configuring
            | Self::Resizing
            | Self::Running
            | Self::Signaling
            | Self::StageOut
            | Self::Stopped
            | Self::Suspended => Phase::Active,
            Self::BootFail
            | Self::Cancelled
            | Self::Completed
            | Self::Deadline
            | Self::Failed
            | Self::NodeFail
            | Self::OutOfMemory
            | Self::Preempted
            | Self::Revoked
            | Self::Timeout => Phase::Ended,
        }
    }
}

/// A node's state: its base, its flags, and an unknown word.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct SlurmNodeState {
    base: Option<Base>,
    flags: Vec<Flag>,
    /// The first unknown word.
    unrecognized: Option<String>,
}

/// How much of an unknown word is kept, in characters.
const MAX_WORD_CHARS: usize = 40;

impl SlurmNodeState {
    /// Parses the words of a state. The order does not matter.
    pub(super) fn from_words<'a>(words: impl Iterator<Item = &'a str>) -> Self {
        let mut state = Self::default();
        for word in words.map(str::trim).filter(|word| !word.is_empty()) {
            // Strips the suffixes that `sinfo` appends to a state.
            let word = word.trim_end_matches(['*', '~', '#', '!', '%', '$', '@', '^', '-']);
            match (Base::from_word(word), Flag::from_word(word)) {
                (Some(base), _) if state.base.is_none() => state.base = Some(base),
                (None, Some(flag)) => state.flags.push(flag),
                // A second base state makes the state unknown, like an unknown word.
                _ => {
                    state.unrecognized.get_or_insert_with(|| word.chars().take(MAX_WORD_CHARS).collect());
                }
            }
        }
        state
    }

    /// Parses `IDLE+DRAIN`, as `scontrol` writes it.
    pub(super) fn parse(text: &str) -> Self {
        Self::from_words(text.split('+'))
    }

    pub(super) const fn base(&self) -> Option<Base> {
        self.base
    }

    pub(super) fn has(&self, flag: Flag) -> bool {
        self.flags.contains(&flag)
    }

    pub(super) fn any(&self, flags: &[Flag]) -> Option<Flag> {
        flags.iter().copied().find(|flag| self.has(*flag))
    }

    pub(super) fn unrecognized(&self) -> Option<&str> {
        self.unrecognized.as_deref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_reads_back() {
        for base in Base::ALL {
            assert_eq!(Base::from_word(base.word()), Some(*base));
            assert_eq!(Base::from_word(&base.word().to_lowercase()), Some(*base));
        }
        for flag in Flag::ALL {
            assert_eq!(Flag::from_word(flag.word()), Some(*flag));
            assert_eq!(Base::from_word(flag.word()), None, "{flag:?} is told apart from a base state");
        }
        for state in JobState::ALL {
            assert_eq!(JobState::from_word(state.word()), Some(*state));
        }
    }

    #[test]
    fn an_unknown_word_is_kept_and_two_base_states_are_none() {
        let state = SlurmNodeState::parse("IDLE+DRAIN+LEVITATING");
        assert_eq!((state.base(), state.has(Flag::Drain)), (Some(Base::Idle), true));
        assert_eq!(state.unrecognized(), Some("LEVITATING"));
        assert_eq!(SlurmNodeState::parse("IDLE+DOWN").unrecognized(), Some("DOWN"));
        assert_eq!(SlurmNodeState::parse("").base(), None);
        assert_eq!(SlurmNodeState::parse("idle*").base(), Some(Base::Idle));
    }
}
