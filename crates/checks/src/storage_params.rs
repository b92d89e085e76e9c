//! Parameters of one storage test: the mounts, sizes and durations; and its patterns, named like the results of the
//! first storage tests of this kind.
//!
//! The check writes the parameters and the test on the node reads them; the evidence records them as the probe's
//! argument.

use doctor_core::time::Span;
use serde::{Deserialize, Serialize};

/// The parameters of one test.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StorageParams {
    /// Empty: the mounts that users' work uses, as far as the test finds them (see [`crate::user_mounts`]).
    pub targets: Vec<StorageTarget>,
    /// Bytes of each of the two sets of files. The test uses less where little is free.
    pub size: u64,
    /// How long each pattern runs.
    pub pattern_time: Span,
    /// How long a pass, or any other operation on the mount, may take beyond its time before it counts as stalled.
    pub stall: Span,
    /// Whether written data is read back and compared.
    pub verify: bool,
    /// The limit of bytes per second in each direction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<u64>,
    /// The limit of operations per second in each direction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops: Option<u64>,
    /// Nothing new is started after this long.
    pub timeout: Span,
}

/// Where to test.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StorageTarget {
    /// A mount point. If nothing is mounted there, the test reports that instead of measuring another disk.
    Mount(String),
    /// Any directory.
    Directory(String),
}

impl StorageTarget {
    pub fn path(&self) -> &str {
        match self {
            Self::Mount(path) | Self::Directory(path) => path,
        }
    }
}

/// An access pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pattern {
    IodepthWrite1File,
    IodepthRead1File,
    NumjobsWriteNFiles,
    NumjobsReadNFiles,
    Randwrite,
    Randread,
    Randrw,
}

/// The fio parameters of a pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PatternSpec {
    pub rw: &'static str,
    /// Bytes.
    pub block: u64,
    pub depth: u32,
    pub jobs: u32,
    pub files: FileLayout,
    pub direction: Direction,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    Read,
    Write,
    /// 70 % of the operations are reads.
    Both,
}

/// The files that a pattern uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileLayout {
    One,
    /// One for each job.
    Many,
}

impl Pattern {
    /// In execution order: files that are read were written before, so that no time is spent on creating files.
    pub const ALL: &'static [Self] = &[
        Self::IodepthWrite1File,
        Self::IodepthRead1File,
        Self::NumjobsWriteNFiles,
        Self::NumjobsReadNFiles,
        Self::Randwrite,
        Self::Randread,
        Self::Randrw,
    ];

    pub const fn code(self) -> &'static str {
        match self {
            Self::IodepthWrite1File => "iodepth_write_1file",
            Self::IodepthRead1File => "iodepth_read_1file",
            Self::NumjobsWriteNFiles => "numjobs_write_nfiles",
            Self::NumjobsReadNFiles => "numjobs_read_nfiles",
            Self::Randwrite => "randwrite",
            Self::Randread => "randread",
            Self::Randrw => "randrw",
        }
    }

    pub const fn spec(self) -> PatternSpec {
        let (rw, direction) = match self {
            Self::IodepthWrite1File | Self::NumjobsWriteNFiles => ("write", Direction::Write),
            Self::IodepthRead1File | Self::NumjobsReadNFiles => ("read", Direction::Read),
            Self::Randwrite => ("randwrite", Direction::Write),
            Self::Randread => ("randread", Direction::Read),
            Self::Randrw => ("randrw", Direction::Both),
        };
        match self {
            Self::IodepthWrite1File | Self::IodepthRead1File => {
                PatternSpec { rw, block: 1 << 20, depth: 128, jobs: 1, files: FileLayout::One, direction }
            }
            Self::NumjobsWriteNFiles | Self::NumjobsReadNFiles => {
                PatternSpec { rw, block: 1 << 20, depth: 16, jobs: 8, files: FileLayout::Many, direction }
            }
            Self::Randwrite | Self::Randread | Self::Randrw => {
                PatternSpec { rw, block: 4 << 10, depth: 64, jobs: 1, files: FileLayout::One, direction }
            }
        }
    }
}

/// The number of files of [`FileLayout::Many`].
pub const MANY_FILES: u64 = 8;
/// The bytes that the verification pass writes and reads back, if there is room.
const VERIFY_BYTES: u64 = 64 << 20;
/// The test uses at most one part in this many of the free space.
const SHARE_OF_FREE: u64 = 10;
/// The limit for a file system that does not report its free space (ramfs): it may use memory.
const SIZE_IF_FREE_UNKNOWN: u64 = 256 << 20;
/// Below this size, measurements are meaningless.
pub const MIN_SIZE: u64 = 16 << 20;

/// The amount of data to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// The size of the one file, and of the many together.
    pub set: u64,
    pub verified: u64,
}

impl Sizes {
    /// Returns the requested sizes, reduced to the available space, or `None` if there is too little. The files of a
    /// set are multiples of a block.
    pub fn fitting(requested: u64, free: Option<u64>) -> Option<Self> {
        // Two sets, and a quarter of one to verify.
        let room = free.map_or(SIZE_IF_FREE_UNKNOWN, |free| free / SHARE_OF_FREE / 9 * 4);
        let set = requested.min(room) / (MANY_FILES << 20) * (MANY_FILES << 20);
        (set >= MIN_SIZE).then(|| Self { set, verified: VERIFY_BYTES.min(set / 4) })
    }

    pub const fn min_free() -> u64 {
        MIN_SIZE / 4 * 9 * SHARE_OF_FREE
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_small_share_of_the_free_space_is_used() {
        const GIB: u64 = 1 << 30;
        let of = |requested, free| Sizes::fitting(requested, free).map(|sizes| (sizes.set >> 20, sizes.verified >> 20));
        assert_eq!(of(GIB, Some(100 * GIB)), Some((1024, 64)));
        assert_eq!(of(GIB, Some(GIB)), Some((40, 10)));
        assert_eq!(of(GIB, Some(300 << 20)), None);
        assert_eq!(of(GIB, Some(0)), None);
        assert_eq!(of(GIB, None), Some((256, 64)));
        assert_eq!(of(16 << 20, Some(Sizes::min_free() + (1 << 20))), Some((16, 4)));
    }

    #[test]
    fn parameters_survive_a_round_trip() {
        let order = StorageParams {
            targets: vec![StorageTarget::Mount("/data".to_owned()), StorageTarget::Directory("/var/tmp".to_owned())],
            size: 1 << 30,
            pattern_time: Span::from_secs(5),
            stall: Span::from_secs(30),
            verify: true,
            rate: Some(500_000_000),
            iops: None,
            timeout: Span::minutes(3),
        };
        let text = serde_json::to_string(&order).unwrap();
        assert!(text.starts_with(r#"{"targets":[{"mount":"/data"},{"directory":"/var/tmp"}]"#), "{text}");
        assert_eq!(serde_json::from_str::<StorageParams>(&text).unwrap(), order);
    }

    proptest! {
        #[test]
        fn never_more_than_a_tenth_of_the_free_space(requested: u64, free: u64) {
            if let Some(sizes) = Sizes::fitting(requested, Some(free)) {
                prop_assert!(sizes.set <= requested && sizes.set % (MANY_FILES << 20) == 0);
                prop_assert!(2 * sizes.set + sizes.verified <= free / SHARE_OF_FREE);
            }
        }
    }
}
