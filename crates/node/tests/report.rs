//! `doctor-node report` on a simulated machine, with fakes for the vendor's tool and for a cloud.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    net::TcpListener,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::OnceLock,
    thread,
};

use doctor_checks::result_transport::extract_from_log;
use doctor_host::vendor_reports::VendorReport;
use doctor_testbed::fake_machine::{FakeMachine, InstalledMachine, fake_nvidia_library};
use serde_json::Value;
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_doctor-node");

fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| fake_nvidia_library(Path::new(PROGRAM)))
}

struct Testbed {
    machine: InstalledMachine,
    folder: TempDir,
}

impl Testbed {
    /// A machine of this vendor, with this script as the vendor's tool if given.
    fn new(vendor: &str, tool: Option<&str>) -> Self {
        let machine = FakeMachine::hgx_h100().with_new("/sys/class/dmi/id/sys_vendor", &format!("{vendor}\n"));
        let testbed =
            Self { machine: machine.install(Path::new(PROGRAM), library()), folder: tempfile::tempdir().unwrap() };
        if let Some(script) = tool {
            let path = testbed.folder.path().join("nvidia-bug-report.sh");
            fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        testbed
    }

    fn report(&self, more: &[&str]) -> (Output, Value) {
        self.report_to(&self.at("out"), more)
    }

    fn report_to(&self, out: &Path, more: &[&str]) -> (Output, Value) {
        fs::create_dir_all(self.at("tmp")).unwrap();
        // A call that waits for a pipe would wait for ever.
        let mut command = Command::new("timeout");
        command.arg("300").arg(PROGRAM).args(["report", "--out"]).arg(out).args(more).arg("--nvml").arg(library());
        command.arg("--root").arg(self.machine.path("root")).env("DOCTOR_FAKE_NVIDIA", self.machine.path("nvml.toml"));
        command.env("PATH", format!("{}:/usr/bin:/bin", self.folder.path().display()));
        command.env("TMPDIR", self.at("tmp")).env("FOLDER", self.folder.path());
        let output = command.output().unwrap();
        assert_eq!(fs::read_dir(self.at("tmp")).unwrap().count(), 0, "the tool's directory is left");
        let path = out.join("machine.json");
        let is_file = fs::symlink_metadata(&path).is_ok_and(|found| found.is_file());
        let text = if is_file { fs::read(path).unwrap() } else { Vec::new() };
        (output, serde_json::from_slice(&text).unwrap_or_default())
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn left(&self, name: &str) -> Option<Vec<u8>> {
        fs::read(self.at("out").join(name)).ok()
    }
}

/// A part of AWS's metadata service, which rejects requests without a token.
fn metadata() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let lines: Vec<String> = BufReader::new(stream.try_clone().unwrap())
                .lines()
                .map_while(Result::ok)
                .take_while(|l| !l.is_empty())
                .collect();
            let path = lines.first().and_then(|line| line.split(' ').nth(1)).unwrap_or_default().to_owned();
            let allowed = lines.iter().any(|line| line == "X-aws-ec2-metadata-token: a-token-of-aws");
            let response = match path.as_str() {
                "/latest/api/token" => Some("a-token-of-aws"),
                "/latest/meta-data/instance-type" if allowed => Some("p5.48xlarge"),
                "/latest/meta-data/instance-id" if allowed => Some("i-0123456789abcdef0"),
                "/latest/meta-data/placement/group-name" if allowed => Some("train-a"),
                _ => None,
            };
            let response = match response {
                Some(text) => format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{text}", text.len()),
                None => "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n".to_owned(),
            };
            // The client may be gone.
            let _heard = stream.write_all(response.as_bytes());
        }
    });
    url
}

#[test]
fn the_report_has_serials_firmware_cloud_instance_and_the_vendors_file() {
    let testbed = Testbed::new("Amazon EC2", Some("echo working; printf 'all of it' >nvidia-bug-report.log.gz"));
    let url = metadata();
    let (output, machine) = testbed.report(&["--metadata", &url]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(testbed.left("nvidia-bug-report.log.gz").unwrap(), b"all of it");
    assert_eq!(machine["vendor_report"]["file"], "nvidia-bug-report.log.gz", "{machine:#}");
    let gpus = machine["gpus"].as_array().unwrap();
    assert_eq!((gpus.len(), &machine["driver"]["version"]), (8, &"570.124.06".into()), "{machine:#}");
    for field in ["bus", "uuid", "serial", "vbios_version", "inforom.image"] {
        assert!(
            gpus.iter().all(|gpu| gpu[field].as_str().is_some_and(|text| !text.is_empty())),
            "{field}: {machine:#}"
        );
    }
    let adapters = machine["adapters"].as_object().unwrap();
    assert!(adapters.len() == 8 && adapters.values().all(|one| one["firmware"].is_string()), "{machine:#}");
    let cloud = &machine["cloud"];
    assert_eq!((&cloud["name"], &cloud["instance_type"]), (&"aws".into(), &"p5.48xlarge".into()), "{cloud:#}");
    assert_eq!((&cloud["instance_id"], &cloud["placement_group"]), (&"i-0123456789abcdef0".into(), &"train-a".into()));
    assert!(!machine.to_string().contains("a-token-of-aws"), "the token must not be stored");
    // A job whose log is all that the controller can read prints the report, too.
    let (output, machine) = testbed.report(&["--metadata", &url, "--carry"]);
    let carried = extract_from_log(&String::from_utf8(output.stdout).unwrap()).unwrap();
    let carried: VendorReport = serde_json::from_slice(&carried).unwrap();
    assert_eq!((&carried.machine, carried.file.unwrap().bytes), (&machine, b"all of it".to_vec()));

    // Disabled: no query.
    let (_, machine) = testbed.report(&["--metadata", "none"]);
    assert_eq!((&machine["cloud"]["name"], &machine["cloud"]["instance_id"]), (&"aws".into(), &Value::Null));
    assert!(machine["cloud"]["not_read"].is_string(), "{machine:#}");
}

#[test]
fn the_report_says_why_there_is_no_vendors_file() {
    for (tool, expected_reason) in [
        (None, "is not installed here"),
        (Some("echo 'please run it as root' >&2; exit 1"), "please run it as root"),
        (Some("exit 0"), "wrote no file"),
        (Some("head -c 13000000 /dev/zero >nvidia-bug-report.log.gz"), "the limit is 12 MiB"),
        (Some("exec sleep 600"), "did not end within"),
    ] {
        let testbed = Testbed::new("Unknown Vendor", tool);
        let limit = if expected_reason == "did not end within" { "1s" } else { "2m" };
        let (output, machine) = testbed.report(&["--limit", limit]);
        assert!(output.status.success(), "{output:?}");
        let reason = machine["vendor_report"]["why_not"].as_str().unwrap_or_default();
        assert!(reason.contains(expected_reason), "{expected_reason}: {machine:#}");
        assert_eq!(machine["cloud"], Value::Null, "its firmware names no cloud");
        assert_eq!(testbed.left("nvidia-bug-report.log.gz"), None);
    }
}

#[test]
fn the_partial_output_of_a_hung_tool_is_kept() {
    let testbed = Testbed::new("Unknown Vendor", Some("echo 'the first half' >nvidia-bug-report.log; exec sleep 600"));
    let (_, machine) = testbed.report(&["--limit", "2s"]);
    assert_eq!(testbed.left("nvidia-bug-report.log").unwrap(), b"the first half\n");
    let file_name = machine["vendor_report"]["file"].as_str().unwrap_or_default();
    assert!(file_name.contains("nvidia-bug-report.log, truncated: it did not end within 2s"), "{machine:#}");
    // A file of an earlier run is not taken for this one's.
    fs::write(testbed.folder.path().join("nvidia-bug-report.sh"), "#!/bin/sh\nexit 3\n").unwrap();
    let (_, machine) = testbed.report(&[]);
    assert!(machine["vendor_report"]["why_not"].as_str().unwrap_or_default().contains("exit status: 3"), "{machine:#}");
    assert_eq!(testbed.left("nvidia-bug-report.log"), None);
}

#[test]
fn a_file_that_is_too_long_for_a_log_is_left_out_of_it_with_the_reason() {
    let testbed = Testbed::new("Unknown Vendor", Some("head -c 5000000 /dev/zero >nvidia-bug-report.log.gz"));
    let (output, _) = testbed.report(&["--carry"]);
    let carried = extract_from_log(&String::from_utf8(output.stdout).unwrap()).unwrap();
    let carried: VendorReport = serde_json::from_slice(&carried).unwrap();
    assert_eq!((carried.file, carried.machine["gpus"].as_array().map(Vec::len)), (None, Some(8)));
    let why = carried.machine["vendor_report"]["why_not"].as_str().unwrap().to_owned();
    assert!(why.contains("more than"), "{why}");
}

/// The directory of a report on a share, and beside the share a directory that must stay untouched.
const SHARED: &str = "share/metadata/slurm/report-o0000000000007";

impl Testbed {
    fn hostile(tool: &str) -> Self {
        let testbed = Self::new("Unknown Vendor", Some(tool));
        fs::create_dir_all(testbed.at(SHARED)).unwrap();
        fs::create_dir_all(testbed.at("outside")).unwrap();
        fs::write(testbed.at("outside/secret"), "untouched").unwrap();
        testbed
    }

    fn plant(&self, kind: &str, path: &Path) {
        match kind {
            "link" => symlink(self.at("outside/secret"), path).unwrap(),
            "link to nothing" => symlink(self.at("outside/new"), path).unwrap(),
            "pipe" => assert!(Command::new("mkfifo").arg(path).status().unwrap().success()),
            "directory" => {
                fs::create_dir(path).unwrap();
                fs::write(path.join("below"), "").unwrap();
            }
            other => unreachable!("{other}"),
        }
    }

    fn is_untouched(&self) -> bool {
        fs::read_dir(self.at("outside")).unwrap().count() == 1
            && fs::read_to_string(self.at("outside/secret")).unwrap() == "untouched"
    }
}

const PLANTED: [&str; 4] = ["link", "link to nothing", "pipe", "directory"];

#[test]
fn nothing_that_another_node_planted_in_the_directory_is_followed_or_waited_for() {
    for kind in PLANTED {
        let testbed = Testbed::hostile("printf 'all of it' >nvidia-bug-report.log.gz");
        let out = testbed.at(SHARED);
        for name in ["machine.json", "machine.tmp", "nvidia-bug-report.log.gz", "nvidia-bug-report.log"] {
            testbed.plant(kind, &out.join(name));
        }
        let (output, machine) = testbed.report_to(&out, &["--carry"]);
        assert!(output.status.success(), "{kind}: {output:?}");
        assert_eq!(machine["vendor_report"]["file"], "nvidia-bug-report.log.gz", "{kind}: {machine:#}");
        assert_eq!(fs::read(out.join("nvidia-bug-report.log.gz")).unwrap(), b"all of it", "{kind}");
        let carried = extract_from_log(&String::from_utf8(output.stdout).unwrap()).unwrap();
        let carried: VendorReport = serde_json::from_slice(&carried).unwrap();
        assert_eq!((carried.machine, carried.file.unwrap().bytes), (machine, b"all of it".to_vec()), "{kind}");
        assert!(testbed.is_untouched(), "{kind}");
    }
}

#[test]
fn what_is_planted_while_the_tool_runs_is_not_written_through() {
    // Another node does this at that moment.
    let plant = format!(
        "for name in machine.json machine.tmp nvidia-bug-report.log.gz nvidia-bug-report.log; do \
         ln -s \"$FOLDER/outside/secret\" \"$FOLDER/{SHARED}/$name\"; done; "
    );
    for (tool, expected) in [
        ("printf 'all of it' >nvidia-bug-report.log.gz", Some("nvidia-bug-report.log.gz")),
        ("printf 'all of it' >nvidia-bug-report.log; exit 1", Some("nvidia-bug-report.log")),
        ("exit 1", None),
    ] {
        let testbed = Testbed::hostile(&format!("{plant}{tool}"));
        let (output, machine) = testbed.report_to(&testbed.at(SHARED), &[]);
        assert!(output.status.success(), "{output:?}");
        assert!(testbed.is_untouched(), "{tool}");
        if let Some(name) = expected {
            let path = testbed.at(SHARED).join(name);
            assert!(fs::symlink_metadata(&path).unwrap().is_file());
            assert_eq!(fs::read(path).unwrap(), b"all of it");
            assert!(machine["vendor_report"]["file"].as_str().unwrap().starts_with(name), "{machine:#}");
        } else {
            assert!(machine["vendor_report"]["why_not"].is_string(), "{machine:#}");
        }
    }
}

#[test]
fn a_link_on_the_way_to_the_directory_is_an_error_and_one_above_the_share_is_not() {
    for link in ["share/metadata", "share/metadata/slurm", SHARED] {
        let testbed = Testbed::hostile("touch \"$FOLDER/ran\"");
        fs::rename(testbed.at(link), testbed.at("moved")).unwrap();
        // What the path leads to exists.
        let below = Path::new(SHARED).strip_prefix(link).unwrap();
        fs::create_dir_all(testbed.at("elsewhere").join(below)).unwrap();
        symlink(testbed.at("elsewhere"), testbed.at(link)).unwrap();
        let (output, _) = testbed.report_to(&testbed.at(SHARED), &[]);
        assert_eq!(output.status.code(), Some(1), "{link}: {output:?}");
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.contains("is a symbolic link, and a directory belongs there"), "{text}");
        assert_eq!(fs::read_dir(testbed.at("elsewhere").join(below)).unwrap().count(), 0, "{link}");
        assert!(!testbed.at("ran").exists(), "{link}");
        let carried = doctor_node::report::carried(&testbed.at(SHARED)).unwrap_err();
        assert!(carried.to_string().contains("the report is gone"), "{carried}");
    }
    let testbed = Testbed::hostile("exit 1");
    symlink(testbed.at("share"), testbed.at("mount")).unwrap();
    symlink(testbed.at("outside"), testbed.at("by-hand")).unwrap();
    let out = testbed.at(SHARED.replacen("share", "mount", 1).as_str());
    for out in [out, testbed.at("by-hand"), testbed.at("by-hand/new/below")] {
        let (output, machine) = testbed.report_to(&out, &[]);
        assert!(output.status.success() && machine["gpus"].is_array(), "{output:?}");
    }
}

#[test]
fn the_tool_runs_in_a_private_directory() {
    let testbed = Testbed::hostile("(pwd; stat -c %a .; ls -A) >\"$FOLDER/seen\"");
    let (_, machine) = testbed.report_to(&testbed.at(SHARED), &[]);
    assert!(machine["vendor_report"]["why_not"].as_str().unwrap().contains("wrote no file"), "{machine:#}");
    let seen = fs::read_to_string(testbed.at("seen")).unwrap();
    let [directory, "700"] = seen.lines().collect::<Vec<_>>()[..] else { panic!("{seen}") };
    assert!(Path::new(directory).starts_with(testbed.at("tmp").canonicalize().unwrap()), "{seen}");
}

#[test]
fn a_link_that_the_tool_leaves_is_not_followed() {
    let testbed = Testbed::hostile("ln -s \"$FOLDER/outside/secret\" nvidia-bug-report.log.gz");
    let (_, machine) = testbed.report_to(&testbed.at(SHARED), &[]);
    let why = machine["vendor_report"]["why_not"].as_str().unwrap();
    assert!(why.contains("is a symbolic link"), "{why}");
    assert!(!testbed.at(SHARED).join("nvidia-bug-report.log.gz").exists());
}
