//! Attacks on every name: links, pipes, sockets, directories and, where the tests run as root, devices.

use std::{
    cell::Cell,
    fs,
    io::Cursor,
    os::unix::{
        fs::{MetadataExt, symlink},
        net::UnixListener,
    },
    process::Command,
    sync::{Arc, Barrier, mpsc},
    time::Duration,
};

use tempfile::TempDir;

use super::{resolve::open_by_component, *};

/// A shared directory, and beside it a file and a directory that must stay untouched.
struct Attack {
    folder: TempDir,
}

const SECRET: &str = "the live database";

impl Attack {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("share/metadata")).unwrap();
        fs::create_dir(folder.path().join("outside")).unwrap();
        fs::write(folder.path().join("outside/doctor.db"), SECRET).unwrap();
        Self { folder }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn share(&self) -> SharedDirectory {
        SharedDirectory::open(&self.at("share")).unwrap()
    }

    fn metadata(&self) -> SharedDirectory {
        self.share().subdirectory(Path::new("metadata")).unwrap().unwrap()
    }

    /// Puts something in place of a file. Returns `None` if this user cannot make it.
    fn plant(&self, kind: EntryKind, path: &Path) -> Option<()> {
        match kind {
            EntryKind::Link => symlink(self.at("outside/doctor.db"), path).unwrap(),
            EntryKind::Pipe => assert!(Command::new("mkfifo").arg(path).status().unwrap().success()),
            EntryKind::Socket => drop(UnixListener::bind(path).unwrap()),
            EntryKind::Directory => fs::create_dir(path).unwrap(),
            EntryKind::Device => {
                let made = Command::new("mknod").arg(path).args(["c", "1", "7"]).output().unwrap();
                made.status.success().then_some(())?;
            }
            EntryKind::File | EntryKind::Other => unreachable!("not an attack"),
        }
        Some(())
    }

    fn is_untouched(&self) -> bool {
        let names: Vec<_> = fs::read_dir(self.at("outside")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        fs::read_to_string(self.at("outside/doctor.db")).unwrap() == SECRET && names == ["doctor.db"]
    }
}

const ATTACKS: [EntryKind; 5] =
    [EntryKind::Link, EntryKind::Pipe, EntryKind::Socket, EntryKind::Directory, EntryKind::Device];

/// Fails if the work does not end: a call that waits for a pipe would wait for ever.
fn ends<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (send, done) = mpsc::channel();
    std::thread::spawn(move || send.send(work()));
    done.recv_timeout(Duration::from_secs(120)).unwrap_or_else(|_| panic!("{what} does not end"))
}

#[test]
fn what_is_no_file_is_neither_read_nor_waited_for_and_is_named() {
    for kind in ATTACKS {
        let attack = Attack::new();
        if attack.plant(kind, &attack.at("share/metadata/list.txt")).is_none() {
            println!("NOT RUN: reading a device: only root makes one");
            continue;
        }
        let share = attack.share();
        let error = ends("a read", move || share.read(Path::new("metadata/list.txt"), 100).unwrap_err().to_string());
        assert!(error.contains("metadata/list.txt is ") && error.contains(kind.as_str()), "{error}");
        assert!(error.contains("and a file belongs there"), "{error}");
        assert!(attack.is_untouched(), "{kind}");
    }
}

#[test]
fn a_write_replaces_what_was_planted_and_never_writes_through_it() {
    for kind in ATTACKS {
        let attack = Attack::new();
        let path = attack.at("share/metadata/list.txt");
        if attack.plant(kind, &path).is_none() {
            println!("NOT RUN: replacing a device: only root makes one");
            continue;
        }
        let metadata = attack.metadata();
        let written = ends("a write", move || metadata.replace("list.txt".as_ref(), &mut Cursor::new("n1\n"))).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "n1\n");
        assert!(fs::symlink_metadata(&path).unwrap().is_file(), "{kind}");
        assert!(attack.is_untouched(), "{kind}");
        let left = fs::read_dir(attack.at("share/metadata")).unwrap().count();
        if kind == EntryKind::Directory {
            let moved = written.moved_aside.unwrap();
            assert_eq!((written.replaced, moved.found, left), (None, EntryKind::Directory, 2));
            assert!(moved.path == path && moved.to.is_dir(), "{moved}");
        } else {
            assert_eq!((written.replaced, written.moved_aside), (Some(kind), None));
            assert_eq!(left, 1, "{kind}: nothing else is left");
        }
    }
}

/// The directory of a job, as kernels with and without openat2 open it.
fn claims(attack: &Attack) -> [SharedDirectory; 2] {
    let path = Path::new("metadata");
    let handle = open_by_component(&attack.share().handle, path).unwrap();
    [attack.metadata(), SharedDirectory { handle, path: path.to_owned() }]
}

#[test]
fn a_file_is_created_once_and_with_its_content() {
    let attack = Attack::new();
    for (number, directory) in claims(&attack).into_iter().enumerate() {
        let (directory, name) = (Arc::new(directory), format!("{number}.json"));
        let start = Arc::new(Barrier::new(8));
        let threads: Vec<_> = (0..8)
            .map(|thread| {
                let (directory, start, name) = (Arc::clone(&directory), Arc::clone(&start), name.clone());
                std::thread::spawn(move || {
                    let content = thread.to_string().repeat(100_000);
                    start.wait();
                    let created = directory.create_exclusive(name.as_ref(), &mut Cursor::new(&content)).unwrap();
                    // Every thread reads the whole content, whether it or another thread created the file.
                    let found = directory.read(Path::new(&name), 1 << 20).unwrap().unwrap();
                    assert_eq!(found.len(), 100_000);
                    assert_eq!(found == content.into_bytes(), created);
                    created
                })
            })
            .collect();
        let created = threads.into_iter().map(|thread| usize::from(thread.join().unwrap())).sum::<usize>();
        assert_eq!(created, 1);
        assert_eq!(fs::read_dir(attack.at("share/metadata")).unwrap().count(), number + 1, "nothing else is left");
    }
}

#[test]
fn what_is_planted_in_place_of_a_new_file_is_named_and_neither_followed_nor_replaced() {
    for kind in ATTACKS {
        let attack = Attack::new();
        let path = attack.at("share/metadata/claim.json");
        if attack.plant(kind, &path).is_none() {
            println!("NOT RUN: creating in place of a device: only root makes one");
            continue;
        }
        for directory in claims(&attack) {
            let created =
                ends("creating", move || directory.create_exclusive("claim.json".as_ref(), &mut Cursor::new("x")));
            let error = created.unwrap_err().to_string();
            assert!(error.contains("claim.json is ") && error.contains(kind.as_str()), "{error}");
        }
        assert_eq!(EntryKind::of_mode(fs::symlink_metadata(&path).unwrap().mode()), kind);
        assert_eq!(fs::read_dir(attack.at("share/metadata")).unwrap().count(), 1, "{kind}: nothing else is left");
        assert!(attack.is_untouched(), "{kind}");
    }
    let attack = Attack::new();
    symlink(attack.at("outside/new"), attack.at("share/metadata/claim.json")).unwrap();
    for directory in claims(&attack) {
        assert!(directory.create_exclusive("claim.json".as_ref(), &mut Cursor::new("x")).is_err());
    }
    assert!(attack.is_untouched(), "a link to nothing");
}

#[test]
fn a_link_whose_answer_was_lost_is_our_own() {
    let attack = Attack::new();
    for (number, directory) in claims(&attack).into_iter().enumerate() {
        let (name, path) = (OsString::from(number.to_string()), PathBuf::from("x"));
        let (temporary, ours) = directory.write_temporary(&path, &mut Cursor::new("ours")).unwrap();
        let (other, theirs) = directory.write_temporary(&path, &mut Cursor::new("theirs")).unwrap();
        assert!(directory.link(&temporary, &ours, &name).unwrap());
        assert!(directory.link(&temporary, &ours, &name).unwrap(), "it is repeated");
        assert!(!directory.link(&other, &theirs, &name).unwrap());
        assert_eq!(directory.read(Path::new(&name), 10).unwrap().unwrap(), b"ours");
    }
}

#[test]
fn what_is_no_directory_is_moved_aside_for_a_directory_of_ours() {
    for kind in ATTACKS.into_iter().filter(|kind| *kind != EntryKind::Directory) {
        let attack = Attack::new();
        for name in ["share/handoff", "share/metadata/slurm"] {
            if attack.plant(kind, &attack.at(name)).is_none() {
                println!("NOT RUN: moving a device aside: only root makes one");
                continue;
            }
            let below = Path::new(name).strip_prefix("share").unwrap().join("run");
            let share = attack.share();
            let (directory, moved) = ends("making it", move || share.make_own_subdirectory(&below)).unwrap();
            directory.replace("x".as_ref(), &mut Cursor::new("ours")).unwrap();
            assert_eq!(fs::read_to_string(attack.at(name).join("run/x")).unwrap(), "ours");
            let [moved] = &moved[..] else { panic!("{moved:?}") };
            assert_eq!((&moved.path, moved.found), (&attack.at(name), kind));
            assert!(fs::symlink_metadata(&moved.to).is_ok() && moved.to.parent() == attack.at(name).parent());
        }
        assert!(attack.is_untouched(), "{kind}");
    }
    let attack = Attack::new();
    assert!(attack.share().make_own_subdirectory(Path::new("metadata/slurm")).unwrap().1.is_empty());
}

#[test]
fn a_directory_that_is_a_link_is_not_entered_at_any_depth() {
    let attack = Attack::new();
    symlink(attack.at("outside"), attack.at("share/memory")).unwrap();
    symlink(attack.at("outside"), attack.at("share/metadata/n1")).unwrap();
    let share = attack.share();
    for (path, link) in [("memory", "memory"), ("memory/n1", "memory"), ("metadata/n1", "metadata/n1")] {
        let error = share.make_subdirectory(Path::new(path)).unwrap_err().to_string();
        assert!(
            error.contains(&format!("{link} is a symbolic link, and a directory belongs there")),
            "{path}: {error}"
        );
        let error = share.read(&Path::new(path).join("doctor.db"), 100).unwrap_err().to_string();
        assert!(error.contains("is a symbolic link"), "{path}: {error}");
    }
    assert!(attack.is_untouched());
    // The way for kernels without openat2 refuses the same.
    for path in ["memory", "memory/n1", "metadata/n1"] {
        let refused = open_by_component(&share.handle, Path::new(path)).unwrap_err();
        assert!([Errno::LOOP, Errno::NOTDIR].contains(&refused), "{path}: {refused}");
    }
    assert!(open_by_component(&share.handle, Path::new("metadata")).is_ok());
}

#[test]
fn paths_that_lead_out_are_refused() {
    let attack = Attack::new();
    let share = attack.share();
    for path in ["", "/etc/passwd", "../outside/doctor.db", "metadata/../../outside/doctor.db", "."] {
        let error = share.read(Path::new(path), 100).unwrap_err();
        assert!(matches!(error, SharedDirectoryError::Outside { .. }), "{path}: {error}");
        assert!(share.remove(path.as_ref()).is_err(), "{path}");
        assert!(share.remove_tree(path.as_ref(), &|| true).is_err(), "{path}");
        assert!(share.rename("metadata".as_ref(), &share, path.as_ref()).is_err(), "{path}");
        assert!(share.make_subdirectory(Path::new(path)).is_err(), "{path}");
    }
    // A name is one component: a link in a longer one would be followed.
    symlink(attack.at("outside"), attack.at("share/out")).unwrap();
    assert!(share.remove("out/doctor.db".as_ref()).is_err());
    assert!(share.replace("out/doctor.db".as_ref(), &mut Cursor::new("x")).is_err());
    assert!(share.create_exclusive("out/new".as_ref(), &mut Cursor::new("x")).is_err());
    assert!(attack.is_untouched());
}

#[test]
fn removing_a_tree_removes_links_and_not_what_they_point_to() {
    let attack = Attack::new();
    let run = attack.at("share/metadata/run");
    fs::create_dir_all(run.join("below")).unwrap();
    fs::write(run.join("below/claim.json"), "{}").unwrap();
    symlink(attack.at("outside"), run.join("link")).unwrap();
    symlink(attack.at("outside/doctor.db"), run.join("below/file")).unwrap();
    assert!(attack.metadata().remove_tree("run".as_ref(), &|| true).unwrap());
    assert!(!run.exists());
    symlink(attack.at("outside"), &run).unwrap();
    assert!(attack.metadata().remove_tree("run".as_ref(), &|| true).unwrap());
    assert!(fs::symlink_metadata(&run).is_err());
    assert!(attack.is_untouched());
}

/// Returns what allows this number of steps.
fn steps(number: usize) -> impl Fn() -> bool {
    let left = Cell::new(number);
    move || left.replace(left.get().saturating_sub(1)) > 0
}

#[test]
fn a_tree_of_any_size_is_removed_in_parts() {
    const ENTRIES: usize = 3 * REMOVED_AT_A_TIME;
    let attack = Attack::new();
    let run = attack.at("share/metadata/run");
    fs::create_dir_all(run.join("below")).unwrap();
    for number in 0..ENTRIES {
        fs::write(run.join("below").join(number.to_string()), "").unwrap();
    }
    let left = || fs::read_dir(run.join("below")).map_or(0, Iterator::count);
    let asked = Cell::new(0);
    let go_on = || {
        asked.set(asked.get() + 1);
        asked.get() <= 1000
    };
    assert!(!attack.metadata().remove_tree("run".as_ref(), &go_on).unwrap());
    assert!(asked.get() <= 1010 && (1..ENTRIES).contains(&left()), "{} asked, {} left", asked.get(), left());
    let parts = (0..100).take_while(|_| !attack.metadata().remove_tree("run".as_ref(), &steps(1000)).unwrap()).count();
    assert!((1..100).contains(&parts) && !run.exists(), "{parts}");
    assert_eq!(attack.metadata().names(&steps(1)).unwrap().len(), 0);
}

#[test]
fn a_link_as_the_root_is_followed_because_the_operator_sets_it() {
    let attack = Attack::new();
    symlink(attack.at("share"), attack.at("data")).unwrap();
    let share = SharedDirectory::open(&attack.at("data")).unwrap();
    share.replace("x".as_ref(), &mut Cursor::new("one")).unwrap();
    assert_eq!(fs::read_to_string(attack.at("share/x")).unwrap(), "one");
    assert_eq!(share.read(Path::new("x"), 2).unwrap().unwrap().len(), 3, "one more byte than was asked for");
    assert_eq!(share.read(Path::new("none/x"), 2).unwrap(), None);
    share.check_writable().unwrap();
    assert_eq!(fs::read_dir(attack.at("share")).unwrap().count(), 2, "the trial leaves nothing behind");
}

#[test]
fn only_old_temporary_files_of_ours_are_removed() {
    let attack = Attack::new();
    let (name, _file) = attack.metadata().create_temporary().unwrap();
    assert!(is_temporary(&name));
    fs::write(attack.at("share/metadata/.doctor-notes"), "").unwrap();
    let names = || attack.metadata().names(&|| true).unwrap();
    attack.metadata().remove_left_temporaries(&names(), 0, &|| true);
    assert_eq!(names().len(), 2, "it is new");
    attack.metadata().remove_left_temporaries(&names(), i64::MAX, &|| true);
    assert_eq!(names(), [".doctor-notes"]);
    fs::create_dir_all(attack.at("share/metadata/.doctor-0.tmp/below")).unwrap();
    let (_, _file) = attack.metadata().create_temporary().unwrap();
    attack.metadata().remove_left_temporaries(&names(), i64::MAX, &|| true);
    assert_eq!(names(), [".doctor-notes"], "a directory of such a name keeps none of the others");
}

#[test]
fn a_file_that_was_exchanged_is_not_the_same_file() {
    let attack = Attack::new();
    let metadata = attack.metadata();
    let first = metadata.replace("x".as_ref(), &mut Cursor::new("one")).unwrap().entry;
    assert!(first.is_same_file(&metadata.entry(Path::new("x")).unwrap().unwrap()));
    let second = metadata.replace("x".as_ref(), &mut Cursor::new("two")).unwrap();
    assert!(!first.is_same_file(&second.entry) && second.replaced.is_none());
}

#[test]
fn each_kind_has_words_of_its_own() {
    let words: std::collections::BTreeSet<&str> = EntryKind::ALL.iter().map(|kind| kind.as_str()).collect();
    assert_eq!(words.len(), EntryKind::ALL.len());
}
