//! Where a job that was started by hand writes, and who it says it is.

use std::{
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
};

use anyhow::Context;
use doctor_checks::{document::RunKey, job_file::log_path};
use doctor_core::ids::{IdSource, NodeName, RunId, TestId};

use crate::clock::now;

/// A run of nobody's: its number begins with this moment, as all do.
pub fn new_run() -> RunId {
    let mut ids = IdSource::new(u64::from(std::process::id()));
    ids.at(now());
    ids.run()
}

/// The name that this machine gives itself.
pub fn this_node() -> anyhow::Result<NodeName> {
    let name = rustix::system::uname();
    let name = name.nodename().to_string_lossy();
    NodeName::new(&name).context("the host name cannot be a node's name: give --node")
}

/// The logs and the document in the layout of the shared directory. `None` without a test.
pub fn below(data: &Path, tests: &[TestId], node: &NodeName, run: RunId) -> Option<(Vec<PathBuf>, PathBuf)> {
    let logs: Vec<PathBuf> = tests.iter().map(|test| data.join(log_path(test, node, run.born()))).collect();
    let document = logs.first()?.with_extension("json");
    Some((logs, document))
}

/// A key that is forgotten with this process.
pub fn passing_key() -> anyhow::Result<RunKey> {
    let mut bytes = [0; 32];
    let read = |bytes: &mut [u8]| -> io::Result<()> { File::open("/dev/urandom")?.read_exact(bytes) };
    read(&mut bytes).context("cannot make a key")?;
    Ok(RunKey::new(bytes))
}
