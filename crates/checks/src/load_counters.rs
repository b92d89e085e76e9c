//! Parses the kernel's counters of load: processor time, and the traffic of disks, network mounts and processes.

use std::path::{Path, PathBuf};

/// Processor time of the whole machine, in ticks of all processors together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuTimes {
    /// In programs and in the kernel for them, without interrupts: the test's own transfers cause those.
    pub busy: u64,
    pub all: u64,
}

impl CpuTimes {
    /// Parses the text of `/proc/stat`.
    pub fn parse(stat: &str) -> Option<Self> {
        let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
        // user, nice, system, idle, iowait, irq, softirq, steal; guest time is part of user time.
        let ticks: Vec<u64> = line.split_ascii_whitespace().take(8).map_while(|field| field.parse().ok()).collect();
        let busy = ticks.get(..3)?.iter().sum();
        (ticks.len() >= 4).then(|| Self { busy, all: ticks.iter().sum() })
    }

    /// Returns the share of all processors since `before` that others used, in percent. `own` is the time of the test
    /// itself and of the kernel's own threads.
    pub fn percent_of_others(self, before: Self, own: u64) -> Option<f64> {
        let all = self.all.checked_sub(before.all).filter(|all| *all > 0)?;
        let busy = self.busy.saturating_sub(before.busy).saturating_sub(own);
        Some(busy as f64 * 100.0 / all as f64)
    }
}

/// Bytes moved so far, and the time in which a disk was busy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IoCounters {
    pub bytes: u64,
    /// Unknown for network mounts.
    pub busy_millis: Option<u64>,
}

const SECTOR: u64 = 512;

impl IoCounters {
    /// Returns the counters of one device, by its numbers, from the text of `/proc/diskstats`.
    pub fn of_disk(diskstats: &str, device: (u32, u32)) -> Option<Self> {
        let of_line = |line: &str| {
            let mut fields = line.split_ascii_whitespace();
            let numbers: (u32, u32) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
            // name, reads, merged, sectors read, milliseconds, writes, merged, sectors written, milliseconds, in
            // flight, milliseconds busy.
            let counters: Vec<u64> = fields.skip(1).map_while(|field| field.parse().ok()).collect();
            let (read, written, busy) = (counters.get(2)?, counters.get(6)?, counters.get(9)?);
            (numbers == device).then(|| Self { bytes: (read + written) * SECTOR, busy_millis: Some(*busy) })
        };
        diskstats.lines().find_map(of_line)
    }

    /// Returns what an NFS mount exchanged with its server, from the text of `/proc/self/mountstats`.
    pub fn of_network_mount(mountstats: &str, point: &Path) -> Option<Self> {
        let start = format!(" mounted on {} with fstype nfs", point.display());
        let mut lines = mountstats.lines().skip_while(|line| !(line.starts_with("device ") && line.contains(&start)));
        lines.next()?;
        let of_mount = lines.take_while(|line| !line.starts_with("device "));
        let bytes = of_mount.filter_map(|line| line.trim().strip_prefix("bytes:")).next()?;
        // Read and written by programs, directly, and then from and to the server.
        let mut fields = bytes.split_ascii_whitespace().skip(4).map_while(|field| field.parse::<u64>().ok());
        Some(Self { bytes: fields.next()? + fields.next()?, busy_millis: None })
    }
}

/// Returns the bytes that a process and its ended children read from and wrote to storage, from the text of
/// `/proc/PID/io`.
pub fn storage_bytes(io: &str) -> Option<u64> {
    let of = |name: &str| io.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
    Some(of("read_bytes:")? + of("write_bytes:")?)
}

/// A line of `/proc/self/mountinfo`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountInfo {
    pub device: (u32, u32),
    pub point: PathBuf,
    pub file_system: String,
}

impl MountInfo {
    /// Returns the mount that a path is on: the one with the longest path, and of those the newest.
    pub fn containing(mountinfo: &str, path: &Path) -> Option<Self> {
        let mounts = mountinfo.lines().filter_map(Self::parse).filter(|mount| path.starts_with(&mount.point));
        mounts.max_by_key(|mount| mount.point.components().count())
    }

    fn parse(line: &str) -> Option<Self> {
        let (before, after) = line.split_once(" - ")?;
        let mut fields = before.split(' ').skip(2);
        let (major, minor) = fields.next()?.split_once(':')?;
        let point = unescape(fields.nth(1)?);
        let file_system = after.split(' ').next()?.to_owned();
        Some(Self { device: (major.parse().ok()?, minor.parse().ok()?), point, file_system })
    }
}

/// The kernel writes spaces, tabs, newlines and backslashes in paths as octal numbers.
fn unescape(text: &str) -> PathBuf {
    let mut path = text.to_owned();
    for (code, character) in [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")] {
        path = path.replace(code, character);
    }
    PathBuf::from(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_of_others_is_without_our_own() {
        let before = CpuTimes::parse("cpu  1000 0 500 8000 100 10 20 0 0 0\ncpu0 1 2 3 4\n").unwrap();
        let after = CpuTimes::parse("cpu  1300 0 600 8500 150 15 35 0 0 0\n").unwrap();
        assert_eq!((before.busy, after.all - before.all), (1500, 970));
        let percent = after.percent_of_others(before, 300).unwrap();
        assert!((percent - 100.0 / 9.7).abs() < 0.01, "{percent}");
        assert_eq!(after.percent_of_others(before, 1_000_000), Some(0.0), "more than the machine's is nothing left");
        assert_eq!(before.percent_of_others(before, 0), None, "no time has passed");
        assert_eq!((CpuTimes::parse(""), CpuTimes::parse("cpu 1 2\n")), (None, None));
    }

    // /proc/diskstats of Linux 6.18, 2026-11-15; numbers shortened.
    const DISKSTATS: &str = " 259       0 nvme0n1 100 5 2000 30 200 7 4000 60 0 75 90 0 0 0 0 9 4\n\
         259       1 nvme0n1p1 10 5 200 3 20 7 400 6 0 7 9 0 0 0 0 0 0\n";

    #[test]
    fn a_disk_is_found_by_its_numbers() {
        let whole = IoCounters::of_disk(DISKSTATS, (259, 0)).unwrap();
        assert_eq!((whole.bytes, whole.busy_millis), (6000 * 512, Some(75)));
        assert_eq!(IoCounters::of_disk(DISKSTATS, (259, 1)).unwrap().bytes, 600 * 512);
        assert_eq!(IoCounters::of_disk(DISKSTATS, (8, 0)), None);
    }

    // Written by hand after the kernel's documentation of mountstats.
    const MOUNTSTATS: &str = "device proc mounted on /proc with fstype proc\n\
        device filer:/a mounted on /data with fstype nfs4 statvers=1.1\n\topts:\trw\n\tbytes:\t1 2 3 4 500 600 7 8\n\
        device filer:/b mounted on /data2 with fstype nfs statvers=1.1\n\tbytes:\t1 2 3 4 5 6 7 8\n\
        device x mounted on /none with fstype nfs4 statvers=1.1\ndevice y mounted on /z with fstype tmpfs\n";

    #[test]
    fn a_network_mount_is_found_by_its_mount_point() {
        let bytes = |point: &str| Some(IoCounters::of_network_mount(MOUNTSTATS, Path::new(point))?.bytes);
        assert_eq!(bytes("/data"), Some(1100));
        assert_eq!(bytes("/data2"), Some(11));
        assert_eq!((bytes("/none"), bytes("/z"), bytes("/dat")), (None, None, None));
    }

    #[test]
    fn a_path_is_on_the_mount_with_the_longest_path() {
        let mountinfo = "21 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw\n\
            40 21 0:50 / /data rw shared:2 - nfs4 filer:/a rw\n\
            41 40 259:9 / /data/my\\040scratch rw - xfs /dev/nvme1n1 rw\n";
        let found = |path: &str| MountInfo::containing(mountinfo, Path::new(path)).unwrap();
        assert_eq!((found("/var/tmp").device, found("/database").device), ((259, 2), (259, 2)));
        assert_eq!((found("/data/x").file_system.as_str(), found("/data").device), ("nfs4", (0, 50)));
        assert_eq!(found("/data/my scratch/x").device, (259, 9));
        assert_eq!(MountInfo::containing("", Path::new("/")), None);
    }

    #[test]
    fn storage_traffic_of_a_process_is_read_and_written() {
        let io =
            "rchar: 9\nwchar: 9\nsyscr: 9\nsyscw: 9\nread_bytes: 4096\nwrite_bytes: 8192\ncancelled_write_bytes: 0\n";
        assert_eq!(storage_bytes(io), Some(12288));
        assert_eq!(storage_bytes("rchar: 9\n"), None);
    }
}
