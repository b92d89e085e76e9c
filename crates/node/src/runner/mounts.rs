//! Which file systems can be read without the risk of a hang: the kernel's own and those on local disks.

use std::{
    fs,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

/// File system types of the kernel or on local block devices. Any other may hang as long as a remote server does.
const LOCAL: &[&str] = &[
    "binfmt_misc",
    "bpf",
    "btrfs",
    "cgroup",
    "cgroup2",
    "configfs",
    "debugfs",
    "devpts",
    "devtmpfs",
    "efivarfs",
    "erofs",
    "ext2",
    "ext3",
    "ext4",
    "f2fs",
    "fusectl",
    "hugetlbfs",
    "mqueue",
    "overlay",
    "proc",
    "pstore",
    "ramfs",
    "securityfs",
    "squashfs",
    "sysfs",
    "tmpfs",
    "tracefs",
    "vfat",
    "xfs",
    "zfs",
];

/// The mount table, read once per pass.
#[derive(Debug)]
pub(super) struct Mounts {
    /// Mount points, and whether they are local, in mount order: the last of equal paths is on top.
    points: Vec<(PathBuf, bool)>,
}

impl Mounts {
    pub(super) fn now() -> Self {
        // The kernel answers this from memory.
        Self::parse(&fs::read_to_string("/proc/self/mounts").unwrap_or_default())
    }

    pub(super) fn parse(text: &str) -> Self {
        let point = |line: &str| {
            let mut fields = line.split(' ');
            let (_, mount_point, kind) = (fields.next()?, fields.next()?, fields.next()?);
            Some((PathBuf::from(plain(mount_point)), LOCAL.contains(&kind)))
        };
        Self { points: text.lines().filter_map(point).collect() }
    }

    /// Whether a path, taken literally, is on a local file system. Unknown counts as not local.
    pub(super) fn is_local(&self, path: &Path) -> bool {
        // Normalised once and compared as bytes: `Path::starts_with` would parse both again for each of a hundred
        // mounts.
        let path: PathBuf = path.components().collect();
        let is_below = |mount_point: &Path| {
            let (mount_point, path) = (mount_point.as_os_str().as_bytes(), path.as_os_str().as_bytes());
            path.strip_prefix(mount_point).is_some_and(|rest| rest.is_empty() || rest[0] == b'/' || mount_point == b"/")
        };
        let fits = self.points.iter().filter(|(mount_point, _)| is_below(mount_point));
        fits.max_by_key(|(mount_point, _)| mount_point.as_os_str().len()).is_some_and(|(_, local)| *local)
    }
}

/// Decodes escapes: a space is `\040`.
fn plain(text: &str) -> String {
    let mut parts = text.split('\\');
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        match part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                out.push(char::from(byte));
                out.push_str(&part[3..]);
            }
            None => {
                out.push('\\');
                out.push_str(part);
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_innermost_mount_decides_and_an_unknown_type_is_not_local() {
        let mounts = Mounts::parse(
            "/dev/vda / ext4 rw 0 0\nproc /proc proc rw 0 0\nserver:/x /data\\040set nfs4 rw 0 0\n\
             tmpfs /data\\040set/fast tmpfs rw 0 0\nweird /odd somefs rw 0 0\n",
        );
        for (path, local) in [
            ("/etc/passwd", true),
            ("/proc/meminfo", true),
            ("/data set/file", false),
            ("/data set/fast/file", true),
            ("/odd/file", false),
            ("/oddly/file", true),
            ("/data set//fast/file", true),
        ] {
            assert_eq!(mounts.is_local(Path::new(path)), local, "{path}");
        }
        assert!(!Mounts::parse("").is_local(Path::new("/")));
    }
}
