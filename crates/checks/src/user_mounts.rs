//! Which mounts of a machine users' work uses: network file systems, and local disks outside of the system's directories.
//!
//! A storage test that names no mount measures these. Not among them: read-only mounts, file systems of the kernel and in
//! memory, the system's own disks (`/`, `/boot`, `/usr`, `/var`, …), images of containers, and object stores behind FUSE,
//! which reject the random writes of the test.

use crate::mount_table::{self, MountEntry};

/// The most mounts that one test measures: network file systems first, then local ones, each in the order of the table.
pub const MAX_USER_MOUNTS: usize = 4;

/// File systems on other machines, and those that a hypervisor shares.
const NETWORK: [&str; 22] = [
    "9p",
    "afs",
    "beegfs",
    "ceph",
    "cifs",
    "daos",
    "fuse.ceph",
    "fuse.ceph-fuse",
    "fuse.daos",
    "fuse.dfuse",
    "fuse.glusterfs",
    "fuse.juicefs",
    "fuse.mfs",
    "glusterfs",
    "gpfs",
    "lustre",
    "nfs",
    "nfs4",
    "orangefs",
    "smb3",
    "virtiofs",
    "wekafs",
];

/// File systems on local disks.
const LOCAL: [&str; 7] = ["btrfs", "ext2", "ext3", "ext4", "f2fs", "xfs", "zfs"];

/// Directories of the system: a local disk there, or below, is not for users.
const SYSTEM: [&str; 15] = [
    "/boot", "/dev", "/efi", "/etc", "/lib", "/nix", "/opt", "/proc", "/root", "/run", "/snap", "/sys", "/sysroot",
    "/usr", "/var",
];

/// A mount that users' work uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UserMount {
    pub path: String,
    pub source: String,
    pub kind: String,
    /// Whether it is a network file system, which nodes share.
    pub is_network: bool,
}

/// Returns the mounts that users' work uses, network file systems first. A file system that is mounted several times is
/// returned once, at its shortest path.
pub fn user_mounts(table: &str) -> Vec<UserMount> {
    let mut found: Vec<UserMount> = Vec::new();
    let lines: Vec<MountEntry<'_>> = mount_table::parse(table).collect();
    for (index, line) in lines.iter().enumerate() {
        let is_hidden = lines[index + 1..].iter().any(|later| later.path == line.path);
        if is_hidden || line.is_read_only() || !is_for_users(line) {
            continue;
        }
        let mount = UserMount {
            path: line.path.clone(),
            source: line.source.clone(),
            kind: line.kind.to_owned(),
            is_network: is_network(line),
        };
        match found.iter_mut().find(|known| is_same(known, &mount)) {
            Some(known) if known.path.len() > mount.path.len() => *known = mount,
            Some(_) => {}
            None => found.push(mount),
        }
    }
    found.sort_by_key(|mount| !mount.is_network);
    found
}

fn is_network(line: &MountEntry<'_>) -> bool {
    NETWORK.contains(&line.kind)
}

fn is_for_users(line: &MountEntry<'_>) -> bool {
    let is_system = line.path == "/" || SYSTEM.iter().any(|directory| is_below(&line.path, directory));
    !is_system && (is_network(line) || LOCAL.contains(&line.kind))
}

/// Returns whether a path is this directory, or below it.
pub fn is_below(path: &str, directory: &str) -> bool {
    directory == "/" || path.strip_prefix(directory).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// A source that names nothing, such as `fuse`, does not identify a file system.
fn is_same(one: &UserMount, other: &UserMount) -> bool {
    one.source == other.source && one.kind == other.kind && one.source.contains(['/', ':'])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(table: &str) -> Vec<String> {
        user_mounts(table).into_iter().map(|mount| mount.path).collect()
    }

    #[test]
    fn network_file_systems_and_scratch_disks_are_found_and_the_systems_disks_are_not() {
        // Made by hand, after tables of a p5.48xlarge, a Lustre and a Weka client.
        let table = "sysfs /sys sysfs rw 0 0\nproc /proc proc rw 0 0\n/dev/nvme0n1p1 / ext4 rw,relatime 0 0\n\
            /dev/nvme0n1p16 /boot ext4 rw 0 0\n/dev/nvme0n1p15 /boot/efi vfat rw 0 0\ntmpfs /tmp tmpfs rw 0 0\n\
            /dev/loop0 /snap/core/1 squashfs ro 0 0\n/dev/md0 /scratch xfs rw 0 0\n/dev/nvme9n1 /mnt/k8s-disks/0 xfs rw 0 0\n\
            /dev/sdb1 /var/lib/docker ext4 rw 0 0\n10.0.0.5@tcp:/fsx /fsx lustre rw,flock 0 0\n\
            nas:/home /home nfs4 rw,vers=4.2 0 0\nnas:/soft /soft nfs4 ro 0 0\nweka/default /weka wekafs rw 0 0\n\
            s3fs /bucket fuse.s3fs rw 0 0\nnfsd /proc/fs/nfsd nfsd rw 0 0\noverlay /srv overlay rw 0 0\n";
        assert_eq!(paths(table), ["/fsx", "/home", "/weka", "/scratch", "/mnt/k8s-disks/0"]);
        assert!(user_mounts(table)[..3].iter().all(|mount| mount.is_network));
    }

    #[test]
    fn a_file_system_counts_once_and_a_hidden_one_not_at_all() {
        let bind = "nas:/x /exports/x nfs4 rw 0 0\nnas:/x /x nfs4 rw 0 0\n/dev/md0 /local xfs rw 0 0\n/dev/md0 /local/a xfs rw 0 0\n";
        assert_eq!(paths(bind), ["/x", "/local"]);
        let hidden = "nas:/x /data nfs4 rw 0 0\ntmpfs /data tmpfs rw 0 0\n";
        assert!(paths(hidden).is_empty());
        let fuse = "fuse /a fuse.juicefs rw 0 0\nfuse /b fuse.juicefs rw 0 0\n";
        assert_eq!(paths(fuse), ["/a", "/b"]);
    }

    #[test]
    fn a_prefix_is_a_whole_name() {
        assert_eq!(paths("/dev/sdb /variable xfs rw 0 0\n/dev/sdc /var/x xfs rw 0 0\n"), ["/variable"]);
        assert!(is_below("/host", "/host") && is_below("/host/a", "/host") && !is_below("/hosts", "/host"));
    }
}
