//! What a cluster holds, kept from one control plane to the next: filling a large one takes minutes, copying its data a second.

use std::{fs, path::Path};

use super::{BedError, ControlPlane, Part, at};

/// Where etcd has its data in the folder of a control plane.
pub(super) const FOLDER: &str = "etcd";

impl ControlPlane {
    /// Ends the API server and etcd, and leaves all objects in a folder that was not there, for
    /// [`Setup::data`](super::Setup) of another control plane.
    ///
    /// # Errors
    /// If they cannot be ended, or the folder cannot be written.
    pub fn keep_data(&self, to: &Path) -> Result<(), BedError> {
        let mut inner = self.lock();
        for part in [Part::Scheduler, Part::ControllerManager, Part::ApiServer, Part::Etcd] {
            inner.daemons.kill(part)?;
        }
        copy(&self.place.folder.join(FOLDER), to)
    }
}

/// Copies a folder with all that is in it.
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
