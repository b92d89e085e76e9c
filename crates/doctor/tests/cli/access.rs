//! Who may change what directs the programs, and what an error shows: configuration of another user, credentials and programs that
//! others can change, secrets in the wrong place, a proxy without a secret.

use std::{
    fs::{self, Permissions},
    os::unix::fs::{PermissionsExt, chown},
    process::Command,
};

use crate::workdir::{CommandOutput, Workdir, doctor_node};

const CONFIGURATION: i32 = 4;
/// A user that is neither root nor the one who runs the tests.
const OTHER: u32 = 12_345;

fn is_root(test: &str) -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        assert!(std::env::var("CI").as_deref() != Ok("true"), "only root can give files away");
        println!("NOT RUN: {test}: only root can give files away");
    }
    is_root
}

fn give(workdir: &Workdir, name: &str, owner: u32) {
    chown(workdir.path(name), Some(owner), Some(owner)).unwrap();
}

fn mode(workdir: &Workdir, name: &str, mode: u32) {
    fs::set_permissions(workdir.path(name), Permissions::from_mode(mode)).unwrap();
}

#[test]
fn a_configuration_in_a_directory_of_another_user_is_refused() {
    if !is_root("a configuration in a directory of another user is refused") {
        return;
    }
    let workdir = Workdir::local();
    mode(&workdir, "", 0o700);
    workdir.expect(0, &["plan"]);
    give(&workdir, "", OTHER);
    for args in [&["plan"][..], &["plan", "--config", "doctor.toml"], &["config", "check"], &["serve", "--cycles", "1"]]
    {
        let refused = workdir.expect(CONFIGURATION, args);
        refused.stderr_contains("belongs to another user (owner: user 12345, mode 0700)");
        refused.stderr_contains(&format!("chown root {}", workdir.path("").canonicalize().unwrap().display()));
    }
    assert!(!workdir.path("doctor.db").exists());
    // The home directory is the same. What is missing there directs nothing, and what is there is refused.
    workdir.expect(0, &["context", "list"]);
    fs::create_dir_all(workdir.path(".config/cluster-doctor")).unwrap();
    workdir.write(".config/cluster-doctor/contexts.toml", "");
    let refused = workdir.expect(CONFIGURATION, &["plan"]);
    refused.stderr_contains("contexts.toml").stderr_contains("belongs to another user");
    give(&workdir, "", 0);
    workdir.expect(0, &["plan"]);
    give(&workdir, "doctor.toml", OTHER);
    workdir.expect(CONFIGURATION, &["plan"]).stderr_contains("the file").stderr_contains("belongs to another user");
}

/// As in /tmp, where every user may put a doctor.toml.
#[test]
fn a_configuration_that_another_user_put_into_a_sticky_directory_is_refused() {
    if !is_root("a configuration that another user put into a sticky directory is refused") {
        return;
    }
    let workdir = Workdir::local();
    mode(&workdir, "", 0o1777);
    workdir.expect(0, &["plan"]);
    give(&workdir, "doctor.toml", OTHER);
    workdir.expect(CONFIGURATION, &["plan"]).stderr_contains("belongs to another user");
}

#[test]
fn each_file_that_the_configuration_names_is_refused_if_others_can_write_to_it() {
    let workdir = Workdir::local();
    fs::create_dir(workdir.path("profiles")).unwrap();
    workdir.write("profiles/ours.toml", "sku = \"ours\"\nversion = 1\nlike = \"hgx-h100\"\n");
    let config = workdir.read("doctor.toml");
    workdir.write("doctor.toml", &format!("profiles = [\"profiles\"]\n{config}"));
    workdir.expect(0, &["config", "check", "--files-only"]);
    for (name, writable, usual, remedy) in [
        ("doctor.toml", 0o666, 0o644, "chmod go-w"),
        ("policy.toml", 0o664, 0o644, "chmod g-w"),
        ("profiles", 0o777, 0o755, "chmod go-w"),
        ("profiles/ours.toml", 0o646, 0o644, "chmod o-w"),
        ("", 0o770, 0o700, "chmod g-w"),
    ] {
        mode(&workdir, name, writable);
        let refused = workdir.expect(CONFIGURATION, &["config", "check", "--files-only"]);
        refused.stderr_contains(remedy).stderr_contains(&format!("mode {writable:04o}"));
        mode(&workdir, name, usual);
    }
    workdir.expect(0, &["config", "check", "--files-only"]);
}

#[test]
fn the_node_program_refuses_a_policy_and_a_program_that_others_can_write_to() {
    let workdir = Workdir::new();
    workdir.write("quota", "#!/bin/sh\necho within the quota\n");
    mode(&workdir, "quota", 0o755);
    let program = workdir.path("quota");
    let policy = format!("[tests.quota.params]\ncommand = [{:?}]\nquick = true\n", program.display());
    workdir.write("policy.toml", &policy);
    let check = || {
        let mut command = Command::new(doctor_node());
        command.args(["check", "quota", "--policy", "policy.toml", "--all"]).current_dir(workdir.path(""));
        CommandOutput::from_output(&command.output().unwrap())
    };
    let passed = check();
    assert_eq!(passed.code, 0, "{}{}", passed.out, passed.err);
    mode(&workdir, "quota", 0o777);
    let refused = check();
    assert_ne!(refused.code, 0, "{}", refused.out);
    refused.stdout_contains("chmod go-w");
    mode(&workdir, "quota", 0o755);
    mode(&workdir, "policy.toml", 0o666);
    let refused = check();
    assert_ne!(refused.code, 0, "{}", refused.out);
    refused.stderr_contains("chmod go-w");
}

#[test]
fn a_secret_that_was_typed_into_the_configuration_is_not_repeated() {
    let workdir = Workdir::local();
    let config = workdir.read("doctor.toml");
    for section in [
        "[alerts.receivers.a]\nwebhook = { url = \"https://x\", secret = \"hunter2\" }",
        "[alerts.receivers.a.webhook]\nurl = \"https://x\"\nsecret = \"hunter2\"",
        "[alerts.receivers.a]\nalertmanager = { url = \"https://x\", token = \"hunter2\" }",
        "[alerts.receivers.a]\nemail = { server = \"x:25\", from = \"a@b\", to = [\"a@b\"], user = \"u\", password = \"hunter2\" }",
        "[alerts.receivers.a]\nslack = \"https://hooks.slack.com/services/hunter2\"",
        "[alerts.receivers.a]\nslack = { url = \"hunter2\" }",
        "[alerts.receivers.a]\nslack = { url = \"https://hooks.slack.com/services/hunter2\", channel = \"x\" }",
        "[alerts.receivers.a]\nwebhook = { url = \"https://x\", secret = \"hunter2 }",
        "[alerts.receivers.a]\nwebhook = { url = \"https://x\", secret = [\"hunter2\"] }",
        "[telemetry]\ntoken = \"hunter2\"",
        "[telemetry]\ntraces = \"hunter2\"",
        "[web]\nlisten = \"127.0.0.1:0\"\nproxy = { from = [\"10.0.0.5\"], secret = \"hunter2\" }",
    ] {
        workdir.write("doctor.toml", &config.replace("[backend.local]", &format!("{section}\n[backend.local]")));
        let refused = workdir.expect(CONFIGURATION, &["config", "check", "--files-only"]);
        assert!(!refused.err.contains("hunter2") && !refused.out.contains("hunter2"), "{section}\n{}", refused.err);
        refused.stderr_contains("doctor.toml, line ");
    }
    let password = "store = \"postgres://doctor:hunter2@db/doctor\"\nstor = 1\n";
    workdir.write("doctor.toml", &config.replace("store = \"doctor.db\"\n", password));
    let refused = workdir.expect(CONFIGURATION, &["config", "check", "--files-only"]);
    assert!(!refused.err.contains("hunter2"), "{}", refused.err);
    workdir.write(
        "doctor.toml",
        &config.replace("store = \"doctor.db\"", "store = \"postgres://doctor:hunter2@db/doctor"),
    );
    let refused = workdir.expect(CONFIGURATION, &["config", "check", "--files-only"]);
    assert!(!refused.err.contains("hunter2"), "{}", refused.err);
}

#[test]
fn a_proxy_without_a_secret_is_refused_with_the_way_to_add_one() {
    let workdir = Workdir::local();
    let config = workdir.read("doctor.toml");
    let proxy = |text: &str| {
        let section =
            format!("[web]\nlisten = \"127.0.0.1:0\"\nproxy = {{ from = [\"10.0.0.5\"]{text} }}\n[backend.local]");
        workdir.write("doctor.toml", &config.replace("[backend.local]", &section));
    };
    proxy("");
    let refused = workdir.expect(CONFIGURATION, &["config", "check"]);
    refused.stderr_contains("secret = { file = \"proxy.secret\" }").stderr_contains("X-Doctor-Proxy-Secret");
    proxy(", secret = { file = \"proxy.secret\" }");
    workdir.expect(CONFIGURATION, &["config", "check"]).stderr_contains("proxy.secret: No such file");
    workdir.write("proxy.secret", "short\n");
    workdir.expect(CONFIGURATION, &["config", "check"]).stderr_contains("fewer than 16 characters");
    workdir.write("proxy.secret", "0123456789abcdef0123456789abcdef\n");
    workdir.expect(0, &["config", "check"]);
    mode(&workdir, "proxy.secret", 0o666);
    workdir.expect(CONFIGURATION, &["config", "check"]).stderr_contains("chmod go-w");
}
