//! Node name, run id, paths and key of a job that was started manually or covers several nodes.

use std::{
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
};

use anyhow::{Context, bail, ensure};
use doctor_checks::{document::RunKey, job_file::log_path};
use doctor_core::ids::{IdSource, NodeName, RunId, TestId};

use crate::clock::now;

/// Returns a run id that no controller assigned. Like all run ids it starts with the current time.
pub fn new_run() -> RunId {
    let mut ids = IdSource::new(u64::from(std::process::id()));
    ids.set_time(now());
    ids.run()
}

/// Returns this machine's host name.
pub fn this_node() -> anyhow::Result<NodeName> {
    let name = rustix::system::uname();
    let name = name.nodename().to_string_lossy();
    NodeName::new(&name).context("the host name is not a valid node name: set --node")
}

/// Returns the logs and the document in the layout of the shared directory. `None` without tests.
pub fn shared_paths(data: &Path, tests: &[TestId], node: &NodeName, run: RunId) -> Option<(Vec<PathBuf>, PathBuf)> {
    let logs: Vec<PathBuf> = tests.iter().map(|test| data.join(log_path(test, node, run.born()))).collect();
    let document = logs.first()?.with_extension("json");
    Some((logs, document))
}

/// Returns the index of this node in a run's nodes.
pub fn node_index(nodes: &[NodeName], own_name: Option<&str>) -> anyhow::Result<usize> {
    match (nodes, own_name) {
        ([_], _) => Ok(0),
        (_, Some(own_name)) => nodes
            .iter()
            .position(|node| node.as_str() == own_name)
            .with_context(|| format!("node {own_name} is not part of this run")),
        (_, None) => bail!("the run has {} nodes: set DOCTOR_NODE_NAME to the name of this one", nodes.len()),
    }
}

/// Selects this node's name, logs and document from those of all nodes, which are in the same order. `this` is required
/// if there are several nodes.
pub fn own_paths(
    nodes: &[NodeName],
    logs: &[PathBuf],
    documents: &[PathBuf],
    own_name: Option<&str>,
) -> anyhow::Result<(NodeName, Vec<PathBuf>, PathBuf)> {
    ensure!(
        nodes.len() == documents.len() && !nodes.is_empty() && logs.len().is_multiple_of(nodes.len()),
        "{} nodes, {} documents, {} logs: each node needs one document and as many logs as the others",
        nodes.len(),
        documents.len(),
        logs.len()
    );
    let index = node_index(nodes, own_name)?;
    let each = logs.len() / nodes.len();
    Ok((nodes[index].clone(), logs[index * each..][..each].to_vec(), documents[index].clone()))
}

/// Returns a random key that is not stored.
pub fn throwaway_key() -> anyhow::Result<RunKey> {
    let mut bytes = [0; 32];
    let read = |bytes: &mut [u8]| -> io::Result<()> { File::open("/dev/urandom")?.read_exact(bytes) };
    read(&mut bytes).context("cannot generate a key")?;
    Ok(RunKey::new(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_selects_its_own_paths_of_a_multi_node_run() {
        let name = |text: &str| NodeName::new(text).unwrap();
        let paths = |names: &[&str]| names.iter().map(PathBuf::from).collect::<Vec<_>>();
        let (nodes, logs, documents) =
            ([name("a"), name("b")], paths(&["a1", "a2", "b1", "b2"]), paths(&["a.json", "b.json"]));
        let among = |own_name| own_paths(&nodes, &logs, &documents, own_name);
        assert_eq!(among(Some("b")).unwrap(), (name("b"), paths(&["b1", "b2"]), PathBuf::from("b.json")));
        assert!(among(Some("c")).unwrap_err().to_string().contains("not part of this run"));
        assert!(among(None).unwrap_err().to_string().contains("DOCTOR_NODE_NAME"));
        assert!(own_paths(&nodes, &logs[..3], &documents, Some("a")).is_err());
        let single = own_paths(&nodes[..1], &logs[..2], &documents[..1], None).unwrap();
        assert_eq!(single, (name("a"), paths(&["a1", "a2"]), PathBuf::from("a.json")));
    }
}
