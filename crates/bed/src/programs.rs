//! Programs of this workspace that tests run beside the one that they are of.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

/// The program that jobs run: `$DOCTOR_NODE`, or one that is built as this test was.
///
/// # Panics
/// If it cannot be built.
pub fn doctor_node() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| std::env::var_os("DOCTOR_NODE").map_or_else(build, PathBuf::from))
}

/// The folder of the profile that this program was built with: a test lies in `deps` below it, a program in it.
pub(crate) fn profile() -> PathBuf {
    let me = std::env::current_exe().expect("a running program has a path");
    let folder = me.ancestors().skip(1).find(|folder| !folder.ends_with("deps"));
    folder.expect("a program lies in a folder").to_owned()
}

fn build() -> PathBuf {
    let profile = profile();
    let target = profile.parent().expect("a profile lies in the target folder");
    let mut build = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    build.args(["build", "--quiet", "-p", "doctor-node", "--target-dir"]).arg(target);
    if profile.ends_with("release") {
        build.arg("--release");
    }
    assert!(build.status().is_ok_and(|status| status.success()), "cargo build -p doctor-node");
    profile.join("doctor-node")
}
