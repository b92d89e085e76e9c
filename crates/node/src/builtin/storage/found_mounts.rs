//! Where a storage test writes: the named mounts and directories, or the mounts that users' work uses.
//!
//! Only the mount table is read. Touching a mount here could hang this process.

use std::{
    fs,
    path::{Path, PathBuf},
};

use doctor_checks::{
    mount_table,
    storage_params::StorageTarget,
    user_mounts::{MAX_USER_MOUNTS, UserMount, is_below, user_mounts},
};

/// The name of the root file system where it is measured for want of anything else.
const LAST_RESORT: &str = "/ (no user mount)";

/// A directory to test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TestPath {
    /// As in the results: the path on the machine.
    pub(super) name: String,
    /// As this process sees it.
    pub(super) path: PathBuf,
    /// Whether nothing but a mount will do.
    pub(super) is_mount: bool,
}

/// The mounts as this process sees them. Below `root` are those of the machine; others are the container's own.
#[derive(Debug)]
pub(super) struct VisibleMounts {
    table: String,
    root: String,
    /// Whether `root` is a machine that runs, and not a recording.
    is_live: bool,
}

impl VisibleMounts {
    pub(super) fn now(root: &Path) -> Self {
        // The kernel answers this from memory.
        let table = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let is_live = root == Path::new("/") || root.join("proc/1/mounts").exists();
        Self { table, root: root.to_string_lossy().trim_end_matches('/').to_owned(), is_live }
    }

    /// Returns the paths to test: the named ones, or those that are found, with a line for the log about each.
    pub(super) fn test_paths(&self, targets: &[StorageTarget]) -> Vec<TestPath> {
        if targets.is_empty() {
            return self.found();
        }
        let named = |target: &StorageTarget| TestPath {
            name: target.path().to_owned(),
            path: self.resolve(target.path()),
            is_mount: matches!(target, StorageTarget::Mount(_)),
        };
        targets.iter().map(named).collect()
    }

    pub(super) fn is_mounted(&self, path: &Path) -> bool {
        mount_table::parse(&self.table).any(|line| Path::new(&line.path) == path)
    }

    /// Returns a path of the machine as this process sees it. A volume of the container itself takes precedence over the
    /// machine's own directory of that name.
    fn resolve(&self, path: &str) -> PathBuf {
        let is_volume = |line: &mount_table::MountEntry<'_>| {
            line.path != "/" && !is_below(&line.path, &self.root) && is_below(path, &line.path)
        };
        let of_container = !self.root.is_empty() && mount_table::parse(&self.table).any(|line| is_volume(&line));
        if of_container {
            PathBuf::from(path)
        } else {
            PathBuf::from(format!("{}/{}", self.root, path.trim_start_matches('/')))
        }
    }

    fn found(&self) -> Vec<TestPath> {
        let mounts = self.user_mounts();
        let (chosen, rest) = mounts.split_at(mounts.len().min(MAX_USER_MOUNTS));
        for (_, mount) in chosen {
            eprintln!("found {} ({}, {})", mount.path, mount.kind, mount.source);
        }
        for (_, mount) in rest {
            eprintln!("not tested: {}: at most {MAX_USER_MOUNTS} mounts; name it in `mounts`", mount.path);
        }
        if chosen.is_empty() {
            eprintln!("no mount of users found; testing the root file system");
            return vec![self.last_resort()];
        }
        let to_test = |(path, mount): &(PathBuf, UserMount)| TestPath {
            name: mount.path.clone(),
            path: path.clone(),
            is_mount: true,
        };
        chosen.iter().map(to_test).collect()
    }

    /// Returns the mounts that users' work uses, and where this process sees each: the machine's, then those that are
    /// volumes of this container.
    fn user_mounts(&self) -> Vec<(PathBuf, UserMount)> {
        let on_machine = self.lines(|path| {
            let path = path.strip_prefix(&self.root)?;
            (path.is_empty() || path.starts_with('/')).then_some(path)
        });
        let seen = |mount: UserMount| (PathBuf::from(format!("{}{}", self.root, mount.path)), mount);
        let mut all: Vec<(PathBuf, UserMount)> = user_mounts(&on_machine).into_iter().map(seen).collect();
        if !self.root.is_empty() && self.is_live {
            let volumes = self.lines(|path| (!is_below(path, &self.root)).then_some(path));
            for volume in user_mounts(&volumes) {
                let is_known = |(_, known): &(PathBuf, UserMount)| {
                    (&known.source, &known.kind) == (&volume.source, &volume.kind) || known.path == volume.path
                };
                // A file, such as one that a container runtime mounts, is no file system to test.
                let is_directory = volume.is_network || Path::new(&volume.path).is_dir();
                if is_directory && !all.iter().any(is_known) {
                    all.push((PathBuf::from(&volume.path), volume));
                }
            }
            all.sort_by_key(|(_, mount)| !mount.is_network);
        }
        all
    }

    /// Returns the lines of the table whose path `rename` accepts, with the path that it returns.
    fn lines<'a>(&'a self, rename: impl Fn(&'a str) -> Option<&'a str>) -> String {
        let line = |line: &'a str| {
            let mut fields = line.splitn(3, ' ');
            let (source, path, rest) = (fields.next()?, fields.next()?, fields.next()?);
            let path = rename(path)?;
            Some(format!("{source} {} {rest}\n", if path.is_empty() { "/" } else { path }))
        };
        self.table.lines().filter_map(line).collect()
    }

    /// Returns the machine's root file system, or the container's if that of the machine is not writable here.
    fn last_resort(&self) -> TestPath {
        let root = if self.root.is_empty() { "/" } else { &self.root };
        let is_read_only = mount_table::parse(&self.table)
            .filter(|line| line.path == root)
            .last()
            .is_some_and(|line| line.is_read_only());
        let path = PathBuf::from(if is_read_only { "/" } else { root });
        TestPath { name: LAST_RESORT.to_owned(), path, is_mount: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn visible(root: &str, table: &str) -> VisibleMounts {
        VisibleMounts { table: table.to_owned(), root: root.to_owned(), is_live: true }
    }

    fn tested(mounts: &VisibleMounts, targets: &[StorageTarget]) -> Vec<(String, String)> {
        let paths = mounts.test_paths(targets).into_iter();
        paths.map(|path| (path.name, path.path.to_string_lossy().into_owned())).collect()
    }

    fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(name, path)| ((*name).to_owned(), (*path).to_owned())).collect()
    }

    #[test]
    fn on_a_machine_its_mounts_are_tested() {
        let mounts = visible("", "/dev/vda / ext4 rw 0 0\nnas:/x /data nfs4 rw 0 0\n/dev/md0 /scratch xfs rw 0 0\n");
        assert_eq!(tested(&mounts, &[]), pairs(&[("/data", "/data"), ("/scratch", "/scratch")]));
    }

    #[test]
    fn in_a_container_the_machines_mounts_and_its_own_volumes_are_tested() {
        let mounts = visible(
            "/host",
            "overlay / overlay rw 0 0\n/dev/vda /host ext4 rw 0 0\nnas:/x /host/data nfs4 rw 0 0\n\
             nas:/x /results nfs4 rw 0 0\nfs-1:/ /models nfs4 rw 0 0\n/dev/vda /etc/hosts ext4 rw 0 0\n",
        );
        assert_eq!(tested(&mounts, &[]), pairs(&[("/data", "/host/data"), ("/models", "/models")]));
    }

    #[test]
    fn a_volume_of_the_container_takes_precedence_for_a_named_path() {
        let mounts =
            visible("/host", "overlay / overlay rw 0 0\n/dev/vda /host ext4 rw 0 0\nfs-1:/ /models nfs4 rw 0 0\n");
        let named = [StorageTarget::Mount("/models".to_owned()), StorageTarget::Directory("/tmp".to_owned())];
        assert_eq!(tested(&mounts, &named), pairs(&[("/models", "/models"), ("/tmp", "/host/tmp")]));
    }

    #[test]
    fn without_user_mounts_the_root_file_system_is_tested_and_called_so() {
        let machine = visible("", "/dev/vda / ext4 rw 0 0\ntmpfs /tmp tmpfs rw 0 0\n");
        assert_eq!(tested(&machine, &[]), pairs(&[(LAST_RESORT, "/")]));
        let container = visible("/host", "overlay / overlay rw 0 0\n/dev/vda /host ext4 rw 0 0\n");
        assert_eq!(tested(&container, &[]), pairs(&[(LAST_RESORT, "/host")]));
        let read_only = visible("/host", "overlay / overlay rw 0 0\n/dev/vda /host ext4 ro 0 0\n");
        assert_eq!(tested(&read_only, &[]), pairs(&[(LAST_RESORT, "/")]));
    }

    #[test]
    fn at_most_four_mounts_are_tested_network_file_systems_first() {
        let local: String = (0..5).map(|n| format!("/dev/sd{n} /mnt/{n} xfs rw 0 0\n")).collect();
        let mounts = visible("", &format!("{local}nas:/x /data nfs4 rw 0 0\n"));
        let names: Vec<String> = tested(&mounts, &[]).into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["/data", "/mnt/0", "/mnt/1", "/mnt/2"]);
    }

    #[test]
    fn a_recorded_machine_does_not_make_the_recorders_mounts_its_own() {
        let mounts = VisibleMounts { is_live: false, ..visible("/tmp/tree", "nas:/x /data nfs4 rw 0 0\n") };
        assert_eq!(tested(&mounts, &[]), pairs(&[(LAST_RESORT, "/tmp/tree")]));
    }
}
