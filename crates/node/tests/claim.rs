//! The claim on a run (`--job-file`) on a share where another node plants links, pipes and directories.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use doctor_checks::job_file::{JobFile, exit};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_doctor-node");
const RUN: &str = "r0000000000007";
/// The directory of the run, as the backend of Slurm makes it.
const FOLDER: &str = "share/metadata/slurm/r0000000000007";
const CLAIM: &str = "share/metadata/slurm/r0000000000007/n1.json";

/// A share, and beside it a directory that must stay untouched.
struct Site(TempDir);

impl Site {
    fn new() -> Self {
        let site = Self(tempfile::tempdir().unwrap());
        fs::create_dir_all(site.at(FOLDER)).unwrap();
        fs::create_dir_all(site.at("outside")).unwrap();
        fs::write(site.at("outside/secret"), "untouched").unwrap();
        site
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Runs a job that claims the run in this file. It notes that it ran, and then does this.
    fn job(&self, claim: &Path, work: &str) -> Output {
        self.job_after("true", claim, work)
    }

    /// Before it, another node plants something. `$$` is the process of the job.
    fn job_after(&self, plant: &str, claim: &Path, work: &str) -> Output {
        let mut command = Command::new("sh");
        command.args(["-ec", &format!("{plant}\nexec \"$@\""), "sh"]);
        command.args([PROGRAM, "repair", "reboot", "--limit", "5m", "--run", RUN, "--job-file"]);
        command.arg(claim).args(["--", "sh", "-c", &format!("echo ran >>ran; {work}")]);
        command.current_dir(self.0.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().unwrap();
        let pid = Pid::from_child(&child);
        let (send, ended) = mpsc::channel();
        thread::spawn(move || send.send(child.wait_with_output()));
        // What waits for a pipe would wait for ever.
        ended.recv_timeout(Duration::from_secs(300)).map(Result::unwrap).unwrap_or_else(|_| {
            let _ended = kill_process(pid, Signal::KILL);
            panic!("it does not end")
        })
    }

    fn has_run(&self) -> bool {
        self.at("ran").exists()
    }

    fn is_untouched(&self) -> bool {
        fs::read_dir(self.at("outside")).unwrap().count() == 1
            && fs::read_to_string(self.at("outside/secret")).unwrap() == "untouched"
    }
}

fn claim_in(path: &Path) -> JobFile {
    assert!(fs::symlink_metadata(path).unwrap().is_file(), "{}", path.display());
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn error_text(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn a_run_is_claimed_once_and_its_end_recorded() {
    let site = Site::new();
    let output = site.job(&site.at(CLAIM), &format!("cp {CLAIM} meanwhile"));
    assert!(output.status.success(), "{output:?}");
    let (meanwhile, claim) = (claim_in(&site.at("meanwhile")), claim_in(&site.at(CLAIM)));
    assert!(meanwhile.process.is_some() && meanwhile.ended.is_none());
    assert_eq!((claim.run.to_string().as_str(), &claim.process), (RUN, &meanwhile.process));
    assert_eq!(claim.ended.unwrap().exit, Some(0));
    let second = site.job(&site.at(CLAIM), "true");
    assert_eq!(second.status.code(), Some(i32::from(exit::NOT_WANTED)));
    assert_eq!(fs::read_to_string(site.at("ran")).unwrap(), "ran\n");
    assert_eq!(fs::read_dir(site.at(FOLDER)).unwrap().count(), 1, "nothing else is left");
}

#[test]
fn what_is_planted_in_place_of_the_claim_is_named_and_nothing_runs() {
    for (plant, expected) in [
        (format!("ln -s $PWD/outside/secret {CLAIM}"), "is a symbolic link"),
        (format!("ln -s $PWD/outside/new {CLAIM}"), "is a symbolic link"),
        (format!("mkfifo {CLAIM}"), "is a named pipe"),
        (format!("mkdir {CLAIM}"), "is a directory"),
    ] {
        let site = Site::new();
        let output = site.job_after(&plant, &site.at(CLAIM), "true");
        let text = error_text(&output);
        assert!(text.contains(expected) && text.contains("and a file belongs there"), "{plant}: {output:?}");
        assert_eq!(output.status.code(), Some(1), "{plant}");
        assert!(!site.has_run() && site.is_untouched(), "{plant}");
    }
}

#[test]
fn a_link_on_the_way_to_the_claim_is_an_error() {
    for link in ["share/metadata", "share/metadata/slurm", FOLDER] {
        let site = Site::new();
        fs::rename(site.at(link), site.at("moved")).unwrap();
        // What the path leads to exists.
        let below = Path::new(FOLDER).strip_prefix(link).unwrap();
        fs::create_dir_all(site.at("elsewhere").join(below)).unwrap();
        symlink(site.at("elsewhere"), site.at(link)).unwrap();
        let output = site.job(&site.at(CLAIM), "true");
        assert_eq!(output.status.code(), Some(1), "{link}: {output:?}");
        let text = error_text(&output);
        assert!(text.contains("is a symbolic link, and a directory belongs there"), "{text}");
        assert!(!site.has_run(), "{link}");
        assert_eq!(fs::read_dir(site.at("elsewhere").join(below)).unwrap().count(), 0, "{link}");
    }
}

#[test]
fn no_temporary_name_can_be_predicted() {
    for plant in ["ln -s $PWD/outside/secret", "mkfifo", "mkdir -p"] {
        let site = Site::new();
        let names = ["n1.$$.claim", ".n1.$$.claim.$$.tmp", ".n1.json.$$.tmp", "n1.json.$$.tmp", "n1.tmp"];
        let plants: Vec<String> = names.iter().map(|name| format!("{plant} {FOLDER}/{name}")).collect();
        let output = site.job_after(&plants.join("\n"), &site.at(CLAIM), "true");
        assert!(output.status.success() && site.has_run(), "{plant}: {output:?}");
        assert_eq!(claim_in(&site.at(CLAIM)).ended.unwrap().exit, Some(0));
        assert!(site.is_untouched(), "{plant}");
        assert_eq!(
            fs::read_dir(site.at(FOLDER)).unwrap().count(),
            1 + names.len(),
            "{plant}: what is not ours is left"
        );
    }
}

#[test]
fn the_end_replaces_what_was_planted_meanwhile_and_follows_no_link() {
    for plant in [
        format!("rm {CLAIM}; ln -s $PWD/outside/secret {CLAIM}"),
        format!("rm {CLAIM}; mkfifo {CLAIM}"),
        format!("rm {CLAIM}; mkdir {CLAIM}"),
        format!("rm -r {FOLDER}"),
    ] {
        let site = Site::new();
        let output = site.job(&site.at(CLAIM), &plant);
        assert!(output.status.success(), "{plant}: {output:?}");
        assert_eq!(claim_in(&site.at(CLAIM)).ended.unwrap().exit, Some(0), "{plant}");
        assert!(site.is_untouched(), "{plant}");
    }
    let site = Site::new();
    let output = site.job(&site.at(CLAIM), &format!("mv {FOLDER} moved; ln -s $PWD/outside {FOLDER}"));
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(error_text(&output).contains("is a symbolic link"), "{output:?}");
    assert!(site.has_run() && site.is_untouched());
}

#[test]
fn links_of_this_machine_above_its_state_are_followed() {
    let site = Site::new();
    fs::create_dir(site.at("disk")).unwrap();
    symlink(site.at("disk"), site.at("state")).unwrap();
    for path in [format!("state/runs/{RUN}/job.json"), "state/by-hand.json".to_owned(), "here.json".to_owned()] {
        let output = site.job(Path::new(&path), "true");
        assert!(output.status.success(), "{path}: {output:?}");
        assert_eq!(claim_in(&site.at(&path)).ended.unwrap().exit, Some(0), "{path}");
    }
    symlink(site.at("share"), site.at("mount")).unwrap();
    let output = site.job(&site.at(&CLAIM.replacen("share", "mount", 1)), "true");
    assert!(output.status.success(), "{output:?}");
    assert_eq!(claim_in(&site.at(CLAIM)).ended.unwrap().exit, Some(0));
}
