//! Keeps the data of a cluster from one control plane to the next: filling a large one takes minutes, copying its data a second.

use std::{fs, path::Path};

use super::{Component, ControlPlane, KubernetesTestbedError, file_error};

/// The folder of etcd's data, relative to that of the control plane.
pub(super) const FOLDER: &str = "etcd";

impl ControlPlane {
    /// Ends all components and copies the objects to a new folder, for [`Setup::data`](super::Setup) of another control plane.
    ///
    /// # Errors
    /// Fails if a component cannot be ended or the folder cannot be written.
    pub fn keep_data(&self, to: &Path) -> Result<(), KubernetesTestbedError> {
        let mut inner = self.lock();
        for part in [Component::Scheduler, Component::ControllerManager, Component::ApiServer, Component::Etcd] {
            inner.daemons.kill(part)?;
        }
        copy(&self.config.folder.join(FOLDER), to)
    }
}

/// Copies a folder recursively.
pub(super) fn copy(from: &Path, to: &Path) -> Result<(), KubernetesTestbedError> {
    fs::create_dir(to).map_err(file_error("creating", to))?;
    for entry in fs::read_dir(from).map_err(file_error("reading", from))? {
        let entry = entry.map_err(file_error("reading", from))?;
        let (path, copied) = (entry.path(), to.join(entry.file_name()));
        if entry.file_type().map_err(file_error("reading", &path))?.is_dir() {
            copy(&path, &copied)?;
        } else {
            fs::copy(&path, &copied).map_err(file_error("copying", &path))?;
        }
    }
    Ok(())
}
