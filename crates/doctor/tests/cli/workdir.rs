//! Runs the program under test in a temporary directory and captures its output.

use std::{
    path::PathBuf,
    process::{Command, Output, Stdio},
    sync::OnceLock,
    time::{Duration, Instant},
};

pub(crate) use doctor_testbed::programs::doctor_node;
use tempfile::TempDir;

/// A temporary directory for commands that run without the caller's environment.
pub(crate) struct Workdir {
    dir: TempDir,
}

/// The exit code and output of a command.
pub(crate) struct CommandOutput {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Workdir {
    pub(crate) fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    /// This machine as a cluster of one node that is never too busy, with a few checks that any machine passes.
    pub(crate) fn local() -> Self {
        let workdir = Self::new();
        std::fs::create_dir(workdir.path("data")).unwrap();
        workdir.policy("");
        workdir.write(
            "doctor.toml",
            "store = \"doctor.db\"\ndata = \"data\"\npolicy = \"policy.toml\"\n[backend.local]\nnode = \"here\"\nmax_load_per_core = 1000.0\n",
        );
        workdir
    }

    /// Writes a policy that begins with this text and enables only a few checks, so that other faults of the machine
    /// that runs the tests do not matter.
    pub(crate) fn policy(&self, beginning: &str) {
        self.policy_for(&["clock-source", "disk-space", "kernel-log", "memory"], beginning);
    }

    /// Writes a policy that begins with this text and enables only these tests.
    pub(crate) fn policy_for(&self, enabled: &[&str], beginning: &str) {
        let others = doctor_checks::CHECKS.iter().map(|check| check.spec.id).filter(|id| !enabled.contains(id));
        let disabled: String = others.map(|id| format!("[tests.{id}]\nenabled = false\n")).collect();
        self.write("policy.toml", &format!("{beginning}{disabled}"));
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).unwrap();
    }

    pub(crate) fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap()
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_doctor"));
        command.args(args).current_dir(self.dir.path()).stdin(Stdio::null());
        command.env_clear().env("HOME", self.dir.path()).env("USER", "ann").env("PATH", "/usr/bin:/bin");
        command.env("DOCTOR_NODE", doctor_node());
        command
    }

    pub(crate) fn doctor(&self, args: &[&str]) -> CommandOutput {
        CommandOutput::from_output(&self.command(args).output().unwrap())
    }

    /// Runs a command and asserts its exit code.
    #[track_caller]
    pub(crate) fn expect(&self, code: i32, args: &[&str]) -> CommandOutput {
        let output = self.doctor(args);
        assert_eq!(output.code, code, "doctor {}\n{}\n{}", args.join(" "), output.out, output.err);
        output
    }

    #[track_caller]
    pub(crate) fn json(&self, args: &[&str]) -> serde_json::Value {
        let output = self.doctor(&[args, &["--json"]].concat());
        serde_json::from_str(&output.out)
            .unwrap_or_else(|error| panic!("doctor {}: {error}\n{}\n{}", args.join(" "), output.out, output.err))
    }

    /// Returns what `doctor why` tells of a node, or null while the controller has not observed it.
    #[track_caller]
    pub(crate) fn why(&self, node: &str) -> serde_json::Value {
        let is_unknown = !self.path("doctor.db").exists() || self.doctor(&["why", node]).err.contains("no node `");
        if is_unknown { serde_json::Value::Null } else { self.json(&["why", node]) }
    }
}

impl CommandOutput {
    pub(crate) fn from_output(output: &Output) -> Self {
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        Self { code: output.status.code().unwrap_or(-1), out: text(&output.stdout), err: text(&output.stderr) }
    }

    #[track_caller]
    pub(crate) fn stdout_contains(&self, part: &str) -> &Self {
        assert!(self.out.contains(part), "`{part}` is not in:\n{}", self.out);
        self
    }

    #[track_caller]
    pub(crate) fn stderr_contains(&self, part: &str) -> &Self {
        assert!(self.err.contains(part), "`{part}` is not in:\n{}", self.err);
        self
    }
}

/// Returns the store of a short demo, which is created once. Tests that change it use a copy.
pub(crate) fn demo() -> &'static Workdir {
    static DEMO: OnceLock<Workdir> = OnceLock::new();
    DEMO.get_or_init(|| {
        let workdir = Workdir::new();
        let output = workdir.expect(0, &["demo", "--nodes", "24", "--days", "3", "--seed", "7", "--dir", "demo"]);
        output.stdout_contains("Explore it");
        workdir
    })
}

/// Returns a writable copy of the demo's store.
pub(crate) fn demo_copy() -> Workdir {
    let workdir = Workdir::new();
    std::fs::copy(demo().path("demo/doctor.db"), workdir.path("doctor.db")).unwrap();
    workdir
}

/// The limit of a wait, long enough for a machine under load.
const WAIT_LIMIT: Duration = Duration::from_secs(300);

/// Waits until the condition holds. Most conditions start a program, so the pauses grow with the wait: many waiting tests
/// would otherwise keep the processors busy.
#[track_caller]
pub(crate) fn wait_until(what: &str, level: impl FnMut() -> bool) {
    wait_or_explain(what, level, String::new);
}

/// The same; a wait that fails prints the explanation.
#[track_caller]
pub(crate) fn wait_or_explain(what: &str, mut level: impl FnMut() -> bool, explain: impl Fn() -> String) {
    let began = Instant::now();
    while !level() {
        let waited = began.elapsed();
        assert!(waited < WAIT_LIMIT, "{what} did not happen\n{}", explain());
        std::thread::sleep((waited / 8).clamp(Duration::from_millis(50), Duration::from_millis(250)));
    }
}
