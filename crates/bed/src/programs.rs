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

fn build() -> PathBuf {
    let me = std::env::current_exe().expect("a running program has a path");
    // A test lies in `deps` of its profile's folder, and that in the target folder.
    let profile = me.parent().and_then(Path::parent).expect("a test lies below its profile");
    let target = profile.parent().expect("a profile lies in the target folder");
    let mut build = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    build.args(["build", "--quiet", "-p", "doctor-node", "--target-dir"]).arg(target);
    if profile.ends_with("release") {
        build.arg("--release");
    }
    assert!(build.status().is_ok_and(|status| status.success()), "cargo build -p doctor-node");
    profile.join("doctor-node")
}
