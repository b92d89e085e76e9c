//! Finds or builds the other programs of this workspace that a test runs.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

/// The environment variable with the folder of the programs already built. `scripts/suite.py` sets it: a build of a
/// single package would select other features of shared crates, compile those again, and replace a program that another test runs.
const PREBUILT_VARIABLE: &str = "DOCTOR_BUILT";

/// Returns the path of `doctor-node`: `$DOCTOR_NODE`, the one in `$DOCTOR_BUILT`, or one built with the profile of this test.
///
/// # Panics
/// Panics if it cannot be built.
pub fn doctor_node() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let named = std::env::var_os("DOCTOR_NODE").map(PathBuf::from);
        named.or_else(|| prebuilt("doctor-node")).unwrap_or_else(build)
    })
}

/// Returns a file in `$DOCTOR_BUILT`, or `None` if the variable is not set.
///
/// # Panics
/// Panics if the folder has no such file.
pub(crate) fn prebuilt(name: &str) -> Option<PathBuf> {
    let path = PathBuf::from(std::env::var_os(PREBUILT_VARIABLE)?).join(name);
    assert!(path.exists(), "{PREBUILT_VARIABLE} names a folder without {name}: {}", path.display());
    Some(path)
}

/// Returns the target folder of the profile that this program was built with. Tests are in `deps` below it, programs in it.
pub(crate) fn profile_folder() -> PathBuf {
    let program = std::env::current_exe().expect("a running program has a path");
    let folder = program.ancestors().skip(1).find(|folder| !folder.ends_with("deps"));
    folder.expect("a program lies in a folder").to_owned()
}

fn build() -> PathBuf {
    let profile = profile_folder();
    let target = profile.parent().expect("a profile lies in the target folder");
    let mut build = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    build.args(["build", "--quiet", "-p", "doctor-node", "--target-dir"]).arg(target);
    if profile.ends_with("release") {
        build.arg("--release");
    }
    assert!(build.status().is_ok_and(|status| status.success()), "cargo build -p doctor-node");
    profile.join("doctor-node")
}
