//! Attacks of a node on every name that the controller reads or writes. Beside the share is the live database, which no attack may
//! reach, and each call has to end.

use std::{
    fs,
    os::unix::{
        fs::{PermissionsExt, symlink},
        net::UnixListener,
    },
    process::Command,
    sync::mpsc,
};

use doctor_core::{
    ids::{CaseId, RunId},
    reason::WithReason,
    run::{NonEmpty, Purpose, RunState},
    time::Span,
};
use doctor_host::shared_directory::EntryKind;

use super::*;
use crate::rejection::Rejection;

const NOW: Timestamp = Timestamp::from_secs(1_794_729_600);
const LIVE: &str = "the live database";
/// Tells dead from slow.
const LONG: Duration = Duration::from_secs(120);

struct Site {
    folder: tempfile::TempDir,
}

impl Site {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("data")).unwrap();
        fs::create_dir(folder.path().join("outside")).unwrap();
        fs::write(folder.path().join("outside/doctor.db"), LIVE).unwrap();
        Self { folder }
    }

    fn data(&self, name: &str) -> PathBuf {
        self.folder.path().join("data").join(name)
    }

    fn outside(&self) -> PathBuf {
        self.folder.path().join("outside")
    }

    fn share(&self) -> Share {
        Share::open(&self.folder.path().join("data")).unwrap()
    }

    /// Puts something at a path. Returns `None` if this user cannot.
    fn plant(&self, kind: EntryKind, name: &str) -> Option<()> {
        let path = self.data(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        match kind {
            EntryKind::Link => symlink(self.outside().join("doctor.db"), path).unwrap(),
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

    #[track_caller]
    fn assert_untouched(&self, what: &str) {
        let names: Vec<_> = fs::read_dir(self.outside()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["doctor.db"], "{what}");
        assert_eq!(fs::read_to_string(self.outside().join("doctor.db")).unwrap(), LIVE, "{what}");
    }
}

const ATTACKS: [EntryKind; 5] =
    [EntryKind::Link, EntryKind::Pipe, EntryKind::Socket, EntryKind::Directory, EntryKind::Device];

fn ends<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (send, done) = mpsc::channel();
    std::thread::spawn(move || send.send(work()));
    done.recv_timeout(LONG).unwrap_or_else(|_| panic!("{what} does not end"))
}

fn run() -> Run {
    let test = |name: &str| TestId::new(name).unwrap();
    Run {
        id: RunId::born_at(NOW),
        nodes: NonEmpty::one(node()),
        tests: NonEmpty::new(vec![test("memory"), test("disk")]).unwrap(),
        state: RunState::Planned,
        purpose: WithReason::new(Purpose::Validation, "due", "x"),
        case: None,
        planned: NOW,
        limit: Span::minutes(5),
    }
}

fn node() -> NodeName {
    NodeName::new("n1").unwrap()
}

/// A write of the controller, and the file that it writes.
type Write = (&'static str, fn(&ShareFiles) -> Result<(), ShareError>);

fn writes() -> [Write; 7] {
    [
        ("metadata/free_nodes.txt", |files| files.publish("free_nodes.txt", &mut "n1\n".as_bytes()).map(drop)),
        ("metadata/validation.db", |files| files.publish("validation.db", &mut "copy".as_bytes()).map(drop)),
        ("handoff/case-reset.tar.gz", |files| files.save_bundle("case-reset.tar.gz", b"bundle").map(drop)),
        ("reports/daily-2026-11-15.html", |files| files.save_report("daily-2026-11-15.html", "report")),
        ("memory/n1/memory_n1_1794729600.log", |files| files.save_log(&run(), &node(), "line\n")),
        ("rejected/1794729600000_run.json", |files| files.reject_bytes("run", b"bytes", &Rejection::UnknownRun, NOW)),
        ("rejected/1794729600000_run.json.reason", |files| {
            files.reject_bytes("run", b"bytes", &Rejection::UnknownRun, NOW)
        }),
    ]
}

#[test]
fn each_file_replaces_what_is_planted_at_its_name_and_names_it() {
    for (name, write) in writes() {
        for kind in ATTACKS {
            let site = Site::new();
            if site.plant(kind, name).is_none() {
                println!("NOT RUN: a device at {name}: only root makes one");
                continue;
            }
            let share = site.share();
            let files = share.files().clone();
            let written = ends(name, move || write(&files));
            site.assert_untouched(&format!("{kind} at {name}"));
            written.unwrap_or_else(|error| panic!("{kind} at {name}: {error}"));
            assert!(fs::symlink_metadata(site.data(name)).unwrap().is_file(), "{kind} at {name}");
            let remark = share.take_problems(LONG).join("\n");
            assert!(remark.contains(name) && remark.contains(kind.as_str()), "{kind} at {name}: {remark}");
        }
    }
}

#[test]
fn a_directory_that_is_a_link_or_a_pipe_is_moved_aside_if_it_is_ours_and_otherwise_named() {
    for (name, write) in writes() {
        let path = Path::new(name);
        for folder in path.ancestors().skip(1).filter(|folder| !folder.as_os_str().is_empty()) {
            for kind in [EntryKind::Link, EntryKind::Pipe] {
                let site = Site::new();
                match kind {
                    EntryKind::Link => {
                        fs::create_dir_all(site.data(folder.to_str().unwrap()).parent().unwrap()).unwrap();
                        symlink(site.outside(), site.data(folder.to_str().unwrap())).unwrap();
                    }
                    _ => site.plant(kind, folder.to_str().unwrap()).unwrap(),
                }
                let share = site.share();
                let files = share.files().clone();
                let written = ends(name, move || write(&files));
                site.assert_untouched(&format!("{kind} at {}", folder.display()));
                if !name.starts_with("memory") {
                    written.unwrap_or_else(|error| panic!("{kind} at {}: {error}", folder.display()));
                    assert!(fs::symlink_metadata(site.data(name)).unwrap().is_file(), "{name}");
                    let remark = share.take_problems(LONG).join("\n");
                    let was = format!("{} was {kind} and has been moved to ", folder.display());
                    assert!(remark.contains(&was), "{remark}");
                    continue;
                }
                let error = written.unwrap_err();
                let text = error.to_string();
                assert!(text.contains(&format!("{} is {kind}", folder.display())), "{name}: {text}");
                assert!(error.is_wrong_kind() && !error.is_outage(), "a node must not make runs wait: {text}");
            }
        }
    }
}

/// Commit c2d5b30d wrote `metadata/free_nodes.txt.<pid>.tmp` through this link: a node overwrote the live database.
#[test]
fn a_link_at_a_temporary_name_that_can_be_guessed_is_not_written_through() {
    for (name, write) in writes() {
        let site = Site::new();
        let (pid, name) = (std::process::id(), Path::new(name));
        let file = name.file_name().unwrap().to_str().unwrap();
        let temporaries = [format!("{file}.{pid}.tmp"), format!(".{file}.{pid}.tmp"), format!(".{file}.{pid}")];
        for temporary in &temporaries {
            site.plant(EntryKind::Link, name.with_file_name(temporary).to_str().unwrap()).unwrap();
        }
        write(site.share().files()).unwrap();
        site.assert_untouched(name.to_str().unwrap());
    }
    let site = Site::new();
    site.plant(EntryKind::Link, &format!(".doctor-trial-{}", std::process::id())).unwrap();
    site.share().check_writable().unwrap();
    site.assert_untouched("the trial");
}

#[test]
fn what_is_no_document_is_rejected_removed_and_never_opened() {
    let path = Share::document_path(&run(), &node());
    for kind in ATTACKS {
        let site = Site::new();
        if site.plant(kind, path.to_str().unwrap()).is_none() {
            println!("NOT RUN: a device as a document: only root makes one");
            continue;
        }
        let (files, of) = (site.share().files().clone(), path.clone());
        let found = ends("reading a result", move || files.read_result(&of, None).unwrap());
        let ResultFile::Rejected { why: Rejection::NotRegularFile, entry } = found else { panic!("{kind}: {found:?}") };
        let (files, of) = (site.share().files().clone(), path.clone());
        let again = ends("reading a result", move || files.read_result(&of, Some(&entry)).unwrap());
        assert!(matches!(again, ResultFile::RejectedBefore), "{kind}: {again:?}");
        let (files, of) = (site.share().files().clone(), path.clone());
        ends("rejecting", move || files.reject_file(&of, &entry, &Rejection::NotRegularFile, NOW).unwrap());
        assert!(fs::symlink_metadata(site.data(path.to_str().unwrap())).is_err(), "{kind}: it is gone");
        let kept = fs::read_dir(site.data("rejected")).unwrap().map(|entry| entry.unwrap());
        let links = kept.filter(|entry| !["file", "directory"].contains(&kind_of(entry))).count();
        assert_eq!(links, 0, "{kind}: what waits for an operator is safe to open");
        site.assert_untouched(&format!("{kind} as a document"));
    }
}

fn kind_of(entry: &fs::DirEntry) -> &'static str {
    match entry.file_type().unwrap() {
        kind if kind.is_file() => "file",
        kind if kind.is_dir() => "directory",
        _ => "other",
    }
}

#[test]
fn a_document_that_is_too_long_keeps_only_its_beginning() {
    let site = Site::new();
    let path = Share::document_path(&run(), &node());
    let long = site.data(path.to_str().unwrap());
    fs::create_dir_all(long.parent().unwrap()).unwrap();
    fs::File::create(&long).unwrap().set_len(1 << 40).unwrap();
    let share = site.share();
    let found = share.files().read_result(&path, None).unwrap();
    let ResultFile::Rejected { why, entry } = found else { panic!("it was read") };
    assert!(why.to_string().contains("1099511627776 bytes"), "{why}");
    share.files().reject_file(&path, &entry, &why, NOW).unwrap();
    assert!(!long.exists());
    let kept = site.data("rejected").join(format!("{}_{}", NOW.millis(), path.file_name().unwrap().to_str().unwrap()));
    assert_eq!(fs::metadata(kept).unwrap().len(), rejected::KEPT_BYTES);
}

#[test]
fn a_good_document_that_has_replaced_a_rejected_one_is_read_and_stays() {
    let site = Site::new();
    let path = Share::document_path(&run(), &node());
    let file = site.data(path.to_str().unwrap());
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    fs::write(&file, "bad").unwrap();
    let share = site.share();
    let ResultFile::Document { entry, .. } = share.files().read_result(&path, None).unwrap() else { panic!("bad") };
    let again = share.files().read_result(&path, Some(&entry)).unwrap();
    assert!(matches!(again, ResultFile::RejectedBefore), "{again:?}");
    fs::write(site.data("good"), "a good one").unwrap();
    fs::rename(site.data("good"), &file).unwrap();
    share.files().reject_file(&path, &entry, &Rejection::UnknownRun, NOW).unwrap();
    assert_eq!(fs::read_to_string(&file).unwrap(), "a good one");
    let good = share.files().read_result(&path, Some(&entry)).unwrap();
    let ResultFile::Document { bytes, entry } = good else { panic!("{good:?}") };
    assert_eq!(bytes, b"a good one");
    share.files().reject_file(&path, &entry, &Rejection::UnknownRun, NOW).unwrap();
    let kept = site.data("rejected").join(format!("{}_{}", NOW.millis(), path.file_name().unwrap().to_str().unwrap()));
    assert!(!file.exists() && fs::read_to_string(kept).unwrap() == "a good one");
}

#[test]
fn a_log_that_is_no_file_is_named_and_an_absent_one_is_none() {
    for kind in ATTACKS {
        let site = Site::new();
        let path = Share::log_path(run().tests.first(), &node(), NOW);
        if site.plant(kind, path.to_str().unwrap()).is_none() {
            println!("NOT RUN: a device as a log: only root makes one");
            continue;
        }
        let share = site.share();
        let (files, of) = (share.files().clone(), path.clone());
        let error = ends("reading a log", move || files.read_log(&of, LogRange::Last(10)).unwrap_err());
        assert!(error.is_wrong_kind() && error.to_string().contains(kind.as_str()), "{error}");
        site.assert_untouched("a log");
        assert!(share.files().read_log(Path::new("memory/n1/none.log"), LogRange::Last(10)).unwrap().is_none());
    }
    let site = Site::new();
    fs::write(site.data("a.log"), "one\ntwo\n").unwrap();
    let part = |range| site.share().files().read_log(Path::new("a.log"), range).unwrap().unwrap();
    assert_eq!((part(LogRange::Last(4)).bytes, part(LogRange::Last(4)).start), (b"two\n".to_vec(), 4));
    assert_eq!(part(LogRange::From(4, 2)).bytes, b"tw");
}

#[test]
fn a_planted_bundle_does_not_keep_the_evidence_from_being_saved() {
    let site = Site::new();
    let case = CaseId::born_at(NOW);
    let name = format!("{case}-reset.tar.gz");
    for kind in ATTACKS {
        let site = Site::new();
        if site.plant(kind, &format!("handoff/{name}")).is_none() {
            println!("NOT RUN: a device as a bundle: only root makes one");
            continue;
        }
        let share = site.share();
        assert!(!share.files().has_bundle(&name).unwrap(), "{kind}");
        share.files().save_bundle(&name, b"bundle").unwrap_or_else(|error| panic!("{kind}: {error}"));
        assert!(share.files().has_bundle(&name).unwrap(), "{kind}");
        assert!(share.take_problems(LONG).concat().contains(kind.as_str()), "{kind}");
        site.assert_untouched(&format!("{kind} as a bundle"));
    }
    let in_place_of_the_folder = Site::new();
    symlink(in_place_of_the_folder.outside(), in_place_of_the_folder.data("handoff")).unwrap();
    let share = in_place_of_the_folder.share();
    assert!(!share.files().has_bundle(&name).unwrap());
    share.files().save_bundle(&name, b"bundle").unwrap();
    assert!(share.files().has_bundle(&name).unwrap());
    in_place_of_the_folder.assert_untouched("a link in place of the folder of bundles");
    let share = site.share();
    share.files().save_bundle(&name, b"bundle").unwrap();
    if rustix::process::geteuid().is_root() {
        // A file of another user is not ours.
        let other = site.data("handoff").join("other.tar.gz");
        fs::write(&other, "planted").unwrap();
        std::os::unix::fs::chown(&other, Some(65_534), None).unwrap();
        assert!(!share.files().has_bundle("other.tar.gz").unwrap());
    } else {
        println!("NOT RUN: a bundle of another user: only root makes one");
    }
    share.files().remove_bundles(|found| found == name).unwrap();
    assert!(!share.files().has_bundle(&name).unwrap());
}

#[test]
fn what_is_planted_in_place_of_one_folder_does_not_keep_the_others_from_being_cleaned() {
    for planted in ["handoff", "rejected", "metadata", "reports"] {
        let site = Site::new();
        site.plant(EntryKind::Link, planted).unwrap();
        let left: Vec<PathBuf> = ["handoff", "rejected", "metadata", "reports"]
            .iter()
            .filter(|folder| **folder != planted)
            .map(|folder| site.data(folder).join(".doctor-0.tmp"))
            .collect();
        for path in &left {
            fs::create_dir_all(path).unwrap();
        }
        let share = site.share();
        let later = Timestamp::from_secs(1 << 35);
        assert!(crate::expired_files::remove(&share, &[], Span::ZERO, later).is_empty());
        let problems = share.take_problems(LONG).concat();
        assert!(problems.contains(&format!("{planted} is a symbolic link")), "{problems}");
        assert!(left.iter().all(|path| !path.exists()), "{planted}");
        site.assert_untouched(planted);
    }
}

#[test]
fn expired_logs_are_removed_without_following_a_link() {
    let site = Site::new();
    symlink(site.outside(), site.data("memory")).unwrap();
    fs::write(site.outside().join("memory_n1_1794729600.log"), LIVE).unwrap();
    fs::create_dir(site.outside().join("n1")).unwrap();
    fs::write(site.outside().join("n1/memory_n1_1794729600.log"), LIVE).unwrap();
    let share = site.share();
    share.files().remove_log(run().tests.first(), &node(), NOW).unwrap();
    assert!(site.outside().join("n1/memory_n1_1794729600.log").exists());
    let log = site.data("disk/n1/disk_n1_1794729600.log");
    fs::create_dir_all(log.parent().unwrap()).unwrap();
    fs::write(&log, "x").unwrap();
    fs::write(log.with_extension("json"), "x").unwrap();
    share.files().remove_log(&TestId::new("disk").unwrap(), &node(), NOW).unwrap();
    assert_eq!(fs::read_dir(log.parent().unwrap()).unwrap().count(), 0);
}

#[test]
fn an_outage_is_told_from_what_a_node_did() {
    let site = Site::new();
    let share = site.share();
    fs::rename(site.data(""), site.folder.path().join("away")).unwrap();
    let mut outages = 0;
    let paths = ["memory/n1/a.json", "memory/n2/a.json"].map(|path| (PathBuf::from(path), None)).to_vec();
    share.read_results(paths, |_, result| outages += usize::from(result.unwrap_err().is_outage())).unwrap();
    assert_eq!(outages, 2, "no mount is no missing result");
    assert!(share.check().unwrap_err().to_string().contains("create the directory or set `data`"));
    fs::rename(site.folder.path().join("away"), site.data("")).unwrap();
    assert!(matches!(share.files().read_result(Path::new("memory/n1/a.json"), None).unwrap(), ResultFile::Missing));
    if !rustix::process::geteuid().is_root() {
        fs::create_dir(site.data("memory")).unwrap();
        fs::set_permissions(site.data("memory"), fs::Permissions::from_mode(0o000)).unwrap();
        let closed = share.files().read_result(Path::new("memory/n1/a.json"), None).unwrap_err();
        assert!(!closed.is_outage(), "a node that closes its directory does not make its run wait: {closed}");
        fs::set_permissions(site.data("memory"), fs::Permissions::from_mode(0o755)).unwrap();
    }
}

#[test]
fn work_waits_in_a_queue_of_limited_size_and_its_failures_are_told_once() {
    let site = Site::new();
    site.plant(EntryKind::Link, "memory/n1").unwrap();
    let share = site.share();
    assert!(share.write_later(10, |files| files.save_log(&run(), &node(), "text")));
    let problems = share.take_problems(LONG);
    assert!(problems.len() == 1 && problems[0].contains("memory/n1 is a symbolic link"), "{problems:?}");
    assert!(share.take_problems(LONG).is_empty());
    let (go_on, wait) = mpsc::channel::<()>();
    assert!(share.write_later(0, move |_| {
        let _ended = wait.recv();
        Ok(())
    }));
    let room = (0..10).filter(|_| share.write_later(MAX_WAITING_BYTES / 4, |_| Ok(()))).count();
    assert!((4..=6).contains(&room), "{room}");
    drop(go_on);
}
