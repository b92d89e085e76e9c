//! Files and directories of every kind of owner and mode, and what is opened.

use std::{
    fs::Permissions,
    os::unix::fs::{PermissionsExt, chown, symlink},
    process::Command,
};

use super::*;

/// A user that is neither root nor the one who runs the tests.
const OTHER: u32 = 12_345;
/// Set in the process that runs a test in its own mount namespace.
const IN_NAMESPACE: &str = "DOCTOR_TEST_IN_NAMESPACE";

struct Site(tempfile::TempDir);

impl Site {
    /// A directory with a file that only we can change.
    fn new() -> Self {
        let site = Self(tempfile::tempdir().unwrap());
        site.mode("", 0o755);
        site.write("etc/doctor.toml");
        site
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str) {
        fs::create_dir_all(self.at(name).parent().unwrap()).unwrap();
        fs::write(self.at(name), "text").unwrap();
        self.mode(name, 0o644);
        for parent in Path::new(name).ancestors().skip(1) {
            self.mode(parent.to_str().unwrap(), 0o755);
        }
    }

    fn mode(&self, name: &str, mode: u32) {
        fs::set_permissions(self.at(name), Permissions::from_mode(mode)).unwrap();
    }

    fn read(&self, name: &str) -> Result<String, ChangeableByOthers> {
        read_to_string(&self.at(name)).map_err(|error| refusal(&error).expect("a refusal").clone())
    }

    /// Returns the component that is refused, below this directory, and the command that is recommended, without this directory.
    #[track_caller]
    fn refused(&self, name: &str) -> (String, String) {
        let error = self.read(name).unwrap_err();
        let root = format!("{}/", self.0.path().canonicalize().unwrap().display());
        let component = error.component.display().to_string().replace(&root, "");
        (component, error.remedy().replace(&root, ""))
    }
}

fn expected(component: &str, remedy: &str) -> (String, String) {
    (component.to_owned(), remedy.to_owned())
}

fn is_root(test: &str) -> bool {
    let is_root = geteuid().is_root();
    if !is_root {
        assert!(env::var("CI").as_deref() != Ok("true"), "only root can give files away");
        println!("NOT RUN: {test}: only root can give files away");
    }
    is_root
}

#[test]
fn a_file_that_only_we_can_change_is_read() {
    let site = Site::new();
    assert_eq!(site.read("etc/doctor.toml").as_deref(), Ok("text"));
    assert_eq!(site.read("etc/../etc/./doctor.toml").as_deref(), Ok("text"));
    site.mode("etc/doctor.toml", 0o600);
    site.mode("etc", 0o700);
    assert_eq!(site.read("etc/doctor.toml").as_deref(), Ok("text"));
    let missing = read(&site.at("etc/none")).unwrap_err();
    assert!(missing.kind() == io::ErrorKind::NotFound && refusal(&missing).is_none());
    assert_eq!(read(Path::new("/dev/null")).unwrap(), b"");
    assert!(read(&site.at("etc")).is_err() && read(&site.at("etc/doctor.toml/x")).is_err());
}

#[test]
fn a_file_or_a_directory_of_its_path_that_others_may_write_to_is_refused_with_the_command_that_mends_it() {
    let site = Site::new();
    for (name, mode, remedy) in [
        ("etc/doctor.toml", 0o664, "chmod g-w etc/doctor.toml"),
        ("etc/doctor.toml", 0o646, "chmod o-w etc/doctor.toml"),
        ("etc/doctor.toml", 0o666, "chmod go-w etc/doctor.toml"),
        ("etc", 0o775, "chmod g-w etc"),
        ("etc", 0o777, "chmod go-w etc"),
        // The sticky bit protects what is in a directory, not a file.
        ("etc/doctor.toml", 0o1666, "chmod go-w etc/doctor.toml"),
    ] {
        site.mode(name, mode);
        assert_eq!(site.refused("etc/doctor.toml"), expected(name, remedy), "{mode:o}");
        let accepted = if name == "etc" { 0o755 } else { 0o644 };
        site.mode(name, accepted);
        assert_eq!(site.read("etc/doctor.toml").as_deref(), Ok("text"));
    }
    site.mode("etc", 0o770);
    let text = read(&site.at("etc/doctor.toml")).unwrap_err().to_string();
    let (directory, user) = (site.at("etc"), geteuid().as_raw());
    let begins =
        format!("the directory {} is writable by its group (owner: user {user}, mode 0770)", directory.display());
    assert!(text.starts_with(&begins), "{text}");
    assert!(text.ends_with(&format!("doctor.toml: chmod g-w {}", directory.display())), "{text}");
}

#[test]
fn a_home_directory_that_its_group_may_write_to_is_refused() {
    let site = Site::new();
    site.write("home/ann/.config/cluster-doctor/doctor.toml");
    site.mode("home/ann", 0o775);
    let path = "home/ann/.config/cluster-doctor/doctor.toml";
    assert_eq!(site.refused(path), expected("home/ann", "chmod g-w home/ann"));
    site.mode("home/ann", 0o755);
    assert_eq!(site.read(path).as_deref(), Ok("text"));
}

#[test]
fn a_sticky_directory_is_accepted_as_a_place_but_not_as_a_list_of_files() {
    let site = Site::new();
    site.mode("etc", 0o1777);
    assert_eq!(site.read("etc/doctor.toml").as_deref(), Ok("text"));
    assert!(refusal(&list(&site.at("etc")).unwrap_err()).is_some(), "all users may add files to it");
    site.mode("etc", 0o755);
    assert_eq!(list(&site.at("etc")).unwrap(), [site.at("etc/doctor.toml")]);
}

#[test]
fn the_directories_of_a_links_target_are_judged_too() {
    let site = Site::new();
    site.write("open/real.toml");
    symlink("../open/real.toml", site.at("etc/link.toml")).unwrap();
    symlink(site.at("etc/link.toml"), site.at("etc/absolute.toml")).unwrap();
    assert_eq!(site.read("etc/absolute.toml").as_deref(), Ok("text"));
    site.mode("open", 0o777);
    for name in ["etc/link.toml", "etc/absolute.toml"] {
        assert_eq!(site.refused(name), expected("open", "chmod go-w open"), "{name}");
    }
    // The directory of the link itself, by a path through a directory that is well.
    site.mode("open", 0o755);
    symlink(site.at("etc/doctor.toml"), site.at("open/link.toml")).unwrap();
    site.mode("open", 0o773);
    assert_eq!(site.refused("open/link.toml"), expected("open", "chmod go-w open"));
    symlink("loop", site.at("etc/loop")).unwrap();
    assert_eq!(read(&site.at("etc/loop")).unwrap_err().raw_os_error(), Some(Errno::LOOP.raw_os_error()));
}

#[test]
fn a_fifo_is_refused_and_not_waited_for() {
    let site = Site::new();
    let path = site.at("etc/fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &path, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
    assert!(read(&path).unwrap_err().to_string().contains("not a regular file"));
}

#[test]
fn a_file_that_is_too_long_or_no_text_is_an_error() {
    let site = Site::new();
    File::options().write(true).open(site.at("etc/doctor.toml")).unwrap().set_len(MAX_TEXT_BYTES + 1).unwrap();
    assert!(read(&site.at("etc/doctor.toml")).unwrap_err().to_string().contains("longer than"));
    fs::write(site.at("etc/doctor.toml"), b"\xff").unwrap();
    assert!(read_to_string(&site.at("etc/doctor.toml")).unwrap_err().to_string().contains("not UTF-8"));
}

#[test]
fn a_program_of_path_is_returned_with_its_whole_path_and_one_that_others_can_change_is_refused() {
    let shell = program(Path::new("sh")).unwrap();
    assert!(shell.is_absolute() && shell.ends_with("sh"), "{}", shell.display());
    assert_eq!(program(Path::new("no-such-program")).unwrap_err().kind(), io::ErrorKind::NotFound);
    let site = Site::new();
    site.write("bin/replace");
    site.mode("bin/replace", 0o711);
    assert_eq!(program(&site.at("bin/replace")).unwrap(), site.at("bin/replace"));
    site.mode("bin/replace", 0o777);
    let error = program(&site.at("bin/replace")).unwrap_err();
    assert_eq!(refusal(&error).unwrap().component, site.at("bin/replace").canonicalize().unwrap());
}

#[test]
fn what_belongs_to_another_user_is_refused_wherever_it_is_in_the_path() {
    if !is_root("what belongs to another user is refused") {
        return;
    }
    let site = Site::new();
    let give = |name: &str, owner: u32| {
        std::os::unix::fs::lchown(site.at(name), Some(owner), None).unwrap();
    };
    for name in ["etc/doctor.toml", "etc"] {
        give(name, OTHER);
        assert_eq!(site.refused("etc/doctor.toml"), expected(name, &format!("chown root {name}")));
        give(name, 0);
    }
    site.mode("etc/doctor.toml", 0o666);
    give("etc/doctor.toml", OTHER);
    let both = expected("etc/doctor.toml", "chown root etc/doctor.toml && chmod go-w etc/doctor.toml");
    assert_eq!(site.refused("etc/doctor.toml"), both);
    site.mode("etc/doctor.toml", 0o644);
    give("etc/doctor.toml", 0);
    // In a sticky directory, another user may exchange a link of their own.
    symlink("doctor.toml", site.at("etc/link.toml")).unwrap();
    give("etc/link.toml", OTHER);
    assert_eq!(site.read("etc/link.toml").as_deref(), Ok("text"), "they cannot replace it here");
    site.mode("etc", 0o1777);
    assert_eq!(site.refused("etc/link.toml"), expected("etc/link.toml", "chown -h root etc/link.toml"));
    // A sticky directory of another user: the owner may replace everything in it.
    site.mode("etc", 0o1777);
    give("etc", OTHER);
    let remedy = "chown root etc && chmod go-w etc";
    assert_eq!(site.refused("etc/doctor.toml"), expected("etc", remedy));
}

/// What the kubelet makes of a ConfigMap for a pod with an fsGroup: a directory that all users may write to, with the group's bit,
/// and files behind two links. It is mounted read-only into the container.
#[test]
fn a_mounted_config_map_is_read_and_the_same_directory_without_its_mount_is_refused() {
    let test = "a_mounted_config_map_is_read_and_the_same_directory_without_its_mount_is_refused";
    if !is_root("a mounted ConfigMap is read") {
        return;
    }
    if env::var_os(IN_NAMESPACE).is_none() {
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "--"]).arg(env::current_exe().unwrap());
        command.args(["--exact", &format!("trusted_file::tests::{test}"), "--nocapture"]).env(IN_NAMESPACE, "1");
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    let site = Site::new();
    let volume = "pods/volumes/configuration";
    site.write(&format!("{volume}/..2026_11_19/doctor.toml"));
    symlink("..2026_11_19", site.at(&format!("{volume}/..data"))).unwrap();
    symlink("..data/doctor.toml", site.at(&format!("{volume}/doctor.toml"))).unwrap();
    for (name, mode) in [("", 0o2777), ("/..2026_11_19", 0o2755), ("/..2026_11_19/doctor.toml", 0o640)] {
        chown(site.at(&format!("{volume}{name}")), Some(0), Some(OTHER)).unwrap();
        site.mode(&format!("{volume}{name}"), mode);
    }
    let (component, _) = site.refused(&format!("{volume}/doctor.toml"));
    assert_eq!(component, volume, "on the node, all users may exchange the links");
    fs::create_dir(site.at("etc/cluster-doctor")).unwrap();
    let mount = |args: &[&str]| assert!(Command::new("mount").args(args).status().unwrap().success(), "{args:?}");
    let (from, to) = (site.at(volume), site.at("etc/cluster-doctor"));
    mount(&["--bind", from.to_str().unwrap(), to.to_str().unwrap()]);
    assert_eq!(site.refused("etc/cluster-doctor/doctor.toml").0, "etc/cluster-doctor", "a writable mount");
    mount(&["-o", "remount,bind,ro", to.to_str().unwrap()]);
    assert_eq!(site.read("etc/cluster-doctor/doctor.toml").as_deref(), Ok("text"));
    // A directory of profiles is listed.
    assert!(list(&to).unwrap().contains(&to.join("doctor.toml")));
    // Also read-only, what another user owns.
    chown(site.at(&format!("{volume}/..2026_11_19/doctor.toml")), Some(OTHER), None).unwrap();
    site.mode(&format!("{volume}/..2026_11_19/doctor.toml"), 0o644);
    assert_eq!(site.read("etc/cluster-doctor/doctor.toml").as_deref(), Ok("text"));
}

#[test]
fn root_accepts_the_files_of_a_service_from_the_owner_of_its_state_directory_only() {
    if !is_root("files of a service") {
        return;
    }
    let site = Site::new();
    site.write("state/agents.key");
    let (key, state) = (site.at("state/agents.key"), site.at("state"));
    for path in [&key, &state] {
        chown(path, Some(OTHER), None).unwrap();
    }
    assert_eq!(read_of_service(&key, &state).unwrap(), b"text");
    assert!(read(&key).is_err(), "elsewhere that user is a stranger");
    site.mode("state/agents.key", 0o664);
    let error = read_of_service(&key, &state).unwrap_err();
    let refused = refusal(&error).unwrap();
    assert!(!refused.has_foreign_owner() && refused.remedy().starts_with("chmod g-w "), "{refused}");
    site.mode("state/agents.key", 0o600);
    chown(&key, Some(OTHER + 1), None).unwrap();
    assert!(refusal(&read_of_service(&key, &state).unwrap_err()).unwrap().has_foreign_owner());
}
