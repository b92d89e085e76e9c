//! Keeps the data of a cluster from one control plane to the next: filling a large one takes minutes, copying its data a second.

use std::{fs, path::Path};

use super::{BedError, ControlPlane, Part, at};

/// The folder of etcd's data, relative to that of the control plane.
pub(super) const FOLDER: &str = "etcd";

impl ControlPlane {
    /// Ends all components and copies the objects to a new folder, for [`Setup::data`](super::Setup) of another control plane.
    ///
    /// # Errors
    /// Fails if a component cannot be ended or the folder cannot be written.
    pub fn keep_data(&self, to: &Path) -> Result<(), BedError> {
        let mut inner = self.lock();
        for part in [Part::Scheduler, Part::ControllerManager, Part::ApiServer, Part::Etcd] {
            inner.daemons.kill(part)?;
        }
        copy(&self.place.folder.join(FOLDER), to)
    }
}

/// Copies a folder recursively.
pub(super) fn copy(from: &Path, to: &Path) -> Result<(), BedError> {
    fs::create_dir(to).map_err(at("creating", to))?;
    for entry in fs::read_dir(from).map_err(at("reading", from))? {
        let entry = entry.map_err(at("reading", from))?;
        let (path, copied) = (entry.path(), to.join(entry.file_name()));
        if entry.file_type().map_err(at("reading", &path))?.is_dir() {
            copy(&path, &copied)?;
        } else {
            fs::copy(&path, &copied).map_err(at("copying", &path))?;
        }
    }
    Ok(())
}
