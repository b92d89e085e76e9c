//! The processes of this machine as far as this one sees them, and which of them belong to the test.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use doctor_checks::{
    load_counters::storage_bytes,
    proc_stat::ProcStat,
    process_owner::{ProcessOwner, uid, user_name, workload},
};

/// The parent of all kernel threads.
const KTHREADD: u32 = 2;

/// Far above any chain of parents.
const MAX_PARENTS: usize = 64;

/// Names a disturber that this process cannot see.
pub(in crate::builtin) const UNKNOWN_DISTURBER: &str = "a program that is not visible from the test";

/// The process file system of the machine below a root.
#[derive(Debug, Clone)]
pub(in crate::builtin) struct ProcessView {
    root: PathBuf,
    /// The program that runs the tests, which is the parent of this process, by its number there. None on a machine
    /// made of files.
    own: Option<u32>,
    /// Whether it has the machine's processes, and not those of a container.
    pub(super) is_machine: bool,
}

/// To whom a process belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Party {
    Test,
    Kernel,
    Other,
}

/// A process at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SeenProcess {
    start_ticks: u64,
    pub(super) party: Party,
    /// Processor time so far.
    pub(super) ticks: u64,
    /// Bytes read from and written to storage so far; zero if that cannot be read.
    pub(super) bytes: u64,
}

/// All processes at one moment.
pub(super) type Processes = BTreeMap<u32, SeenProcess>;

impl ProcessView {
    pub(in crate::builtin) fn open(root: &Path) -> Self {
        let this = fs::read_link(root.join("proc/self")).ok().and_then(|link| link.to_str()?.parse::<u32>().ok());
        let mut view = Self { root: root.to_owned(), own: None, is_machine: false };
        view.own = this.map(|this| view.parent(this).unwrap_or(this));
        view.is_machine = view.stat(KTHREADD).is_some_and(|line| ProcStat::name(&line) == Some("kthreadd"));
        view
    }

    fn file(&self, pid: u32, name: &str) -> Option<String> {
        fs::read_to_string(self.root.join(format!("proc/{pid}/{name}"))).ok()
    }

    fn stat(&self, pid: u32) -> Option<String> {
        self.file(pid, "stat")
    }

    /// Reads a file of the machine itself.
    pub(super) fn machine_file(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.root.join("proc").join(name)).ok()
    }

    /// Returns the parent of a process. None for the first one of a namespace.
    fn parent(&self, pid: u32) -> Option<u32> {
        ProcStat::parse(&self.stat(pid)?).map(|stat| stat.parent).filter(|parent| *parent > 0)
    }

    /// Whether a process belongs to this test or to another one of the same run.
    pub(super) fn is_own(&self, pid: u32) -> bool {
        let mut chain = std::iter::successors(Some(pid), |pid| self.parent(*pid)).take(MAX_PARENTS);
        self.own.is_some_and(|own| chain.any(|pid| pid == own))
    }

    /// Returns the name of a process's program. The kernel names a process that was started from `/proc/self/exe` after
    /// that link; then the name of the file is returned.
    fn program(&self, pid: u32, name: &str) -> String {
        let file = || {
            let path = fs::read_link(self.root.join(format!("proc/{pid}/exe"))).ok()?;
            Some(path.file_name()?.to_str()?.to_owned())
        };
        if name == "exe" { file().unwrap_or_else(|| name.to_owned()) } else { name.to_owned() }
    }

    /// Names a process. None if it is gone or belongs to another namespace.
    pub(in crate::builtin) fn owner(&self, pid: u32) -> Option<ProcessOwner> {
        let program = self.program(pid, ProcStat::name(&self.stat(pid)?)?);
        let uid = self.file(pid, "status").and_then(|text| uid(&text));
        let passwd = fs::read_to_string(self.root.join("etc/passwd")).unwrap_or_default();
        let user = uid.and_then(|uid| user_name(&passwd, uid));
        let workload = self.file(pid, "cgroup").and_then(|text| workload(&text));
        Some(ProcessOwner { pid, program, uid, user, workload })
    }

    /// Describes a process and returns its key, also if this one does not see it.
    pub(in crate::builtin) fn describe(&self, pid: u32) -> (String, String) {
        let owner = if self.is_machine { self.owner(pid) } else { None };
        owner.map_or_else(
            || (format!("process {pid}, which is not visible from here"), UNKNOWN_DISTURBER.to_owned()),
            |owner| (owner.describe(), owner.disturber()),
        )
    }

    /// Returns all processes. `with_storage` also reads their traffic.
    pub(super) fn processes(&self, with_storage: bool) -> Processes {
        let entries = fs::read_dir(self.root.join("proc")).into_iter().flatten().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let read: BTreeMap<u32, (ProcStat, u64)> = pids
            .filter_map(|pid| {
                let line = self.stat(pid)?;
                Some((pid, (ProcStat::parse(&line)?, ProcStat::cpu_ticks(&line)?)))
            })
            .collect();
        let parent = |pid: &u32| read.get(pid).map(|(stat, _)| stat.parent);
        let party = |pid: u32| {
            let mut chain = std::iter::successors(Some(pid), parent).take(MAX_PARENTS);
            if self.own.is_some_and(|own| chain.any(|pid| pid == own)) {
                Party::Test
            } else if self.is_machine && (pid == KTHREADD || parent(&pid) == Some(KTHREADD)) {
                Party::Kernel
            } else {
                Party::Other
            }
        };
        let bytes = |pid: u32| if with_storage { storage_bytes(&self.file(pid, "io")?) } else { None };
        let seen = |(pid, (stat, ticks)): (&u32, &(ProcStat, u64))| {
            let (party, bytes) = (party(*pid), bytes(*pid).unwrap_or(0));
            (*pid, SeenProcess { start_ticks: stat.start_ticks, party, ticks: *ticks, bytes })
        };
        read.iter().map(seen).collect()
    }
}

/// Returns by how much each process of these parties has grown, by pid. A process that has started since counts in
/// full.
pub(super) fn growth(
    before: &Processes,
    after: &Processes,
    parties: &[Party],
    value: fn(&SeenProcess) -> u64,
) -> Vec<(u32, u64)> {
    let of_parties = after.iter().filter(|(_, process)| parties.contains(&process.party));
    let grown = |(pid, process): (&u32, &SeenProcess)| {
        let earlier = before.get(pid).filter(|earlier| earlier.start_ticks == process.start_ticks).map_or(0, value);
        (*pid, value(process).saturating_sub(earlier))
    };
    of_parties.map(grown).collect()
}

/// Returns the sum of a growth.
pub(super) fn total(growth: &[(u32, u64)]) -> u64 {
    growth.iter().map(|(_, value)| value).sum()
}

/// Returns the process that grew most, if any did.
pub(super) fn largest(growth: &[(u32, u64)]) -> Option<u32> {
    growth.iter().filter(|(_, value)| *value > 0).max_by_key(|(_, value)| *value).map(|(pid, _)| *pid)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Writes the files of one process.
    pub(in crate::builtin) fn process(
        root: &Path,
        pid: u32,
        name: &str,
        parent: u32,
        ticks: u64,
        more: &[(&str, &str)],
    ) {
        let folder = root.join(format!("proc/{pid}"));
        fs::create_dir_all(&folder).unwrap();
        // Written by hand after proc(5).
        let stat = format!("{pid} ({name}) S {parent} 1 1 0 -1 0 0 0 0 0 {ticks} 0 0 0 20 0 1 0 {pid} 1 1 1");
        fs::write(folder.join("stat"), stat).unwrap();
        for (file, text) in more {
            fs::write(folder.join(file), text).unwrap();
        }
    }

    #[test]
    fn a_process_started_through_its_own_link_has_the_name_of_its_program() {
        let root = tempfile::tempdir().unwrap();
        process(root.path(), 2, "kthreadd", 0, 0, &[]);
        process(root.path(), 70, "exe", 1, 0, &[]);
        process(root.path(), 71, "exe", 1, 0, &[]);
        std::os::unix::fs::symlink("/usr/bin/doctor-node", root.path().join("proc/70/exe")).unwrap();
        let view = ProcessView::open(root.path());
        let names = [70, 71].map(|pid| view.owner(pid).unwrap().program);
        assert_eq!(names, ["doctor-node", "exe"]);
    }

    #[test]
    fn a_process_is_named_with_its_user_and_workload() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("etc")).unwrap();
        fs::write(root.path().join("etc/passwd"), "ann:x:1000:1000::/:/bin/sh\n").unwrap();
        let files =
            [("status", "Uid:\t1000\t1000\t1000\t1000\n"), ("cgroup", "0::/system.slice/slurmstepd.scope/job_17\n")];
        process(root.path(), 4711, "python3", 1, 0, &files);
        let container = ProcessView::open(root.path());
        assert_eq!(container.describe(4711).1, UNKNOWN_DISTURBER, "it may be another process of that number");
        process(root.path(), 2, "kthreadd", 0, 0, &[]);
        let machine = ProcessView::open(root.path());
        assert_eq!(
            machine.describe(4711),
            ("python3 (pid 4711, user ann, Slurm job 17)".to_owned(), "python3 of uid 1000".to_owned())
        );
        assert_eq!(machine.describe(5).0, "process 5, which is not visible from here");
    }

    #[test]
    fn this_process_its_parent_and_its_children_are_the_test() {
        let view = ProcessView::open(Path::new("/"));
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let seen = view.processes(true);
        let party = |pid: u32| seen.get(&pid).map(|process| process.party);
        let own = (view.is_own(child.id()), view.is_own(std::process::id()), view.is_own(1));
        let parties = (party(child.id()), party(std::process::id()), party(1));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(own, (true, true, false));
        assert_eq!(parties, (Some(Party::Test), Some(Party::Test), Some(Party::Other)));
    }

    #[test]
    fn growth_is_by_process_and_a_reused_number_counts_in_full() {
        let seen = |start_ticks, party, ticks| SeenProcess { start_ticks, party, ticks, bytes: 0 };
        let before: Processes =
            [(1, seen(1, Party::Other, 10)), (2, seen(2, Party::Test, 5)), (3, seen(3, Party::Other, 50))].into();
        let after: Processes =
            [(1, seen(1, Party::Other, 14)), (2, seen(2, Party::Test, 95)), (3, seen(9, Party::Other, 7))].into();
        let others = growth(&before, &after, &[Party::Other], |process| process.ticks);
        assert_eq!(others, [(1, 4), (3, 7)]);
        assert_eq!((total(&others), largest(&others)), (11, Some(3)));
        assert_eq!(largest(&growth(&after, &after, &[Party::Other], |process| process.ticks)), None);
    }
}
