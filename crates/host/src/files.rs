//! Small JSON state files that are read and replaced as a whole, or created exactly once.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

use serde::{Serialize, de::DeserializeOwned};

/// Reads a file. Returns `None` if it does not exist. A file that does not parse is an error and is left unchanged.
pub fn read<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    match fs::read(path) {
        Ok(bytes) => parse(&bytes)
            .map(Some)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, format!("{}: {error}", path.display()))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

pub fn parse<T: DeserializeOwned>(bytes: &[u8]) -> serde_json::Result<T> {
    serde_json::from_slice(bytes)
}

/// Replaces the file atomically and durably.
pub fn write<T: Serialize>(path: &Path, value: &T) -> io::Result<()> {
    let aside = write_temporary(path, value)?;
    fs::rename(&aside, path)?;
    sync_parent(path)
}

/// Creates the file unless it exists. Returns whether it was created.
pub fn create<T: Serialize>(path: &Path, value: &T) -> io::Result<bool> {
    let aside = write_temporary(path, value)?;
    let linked = fs::hard_link(&aside, path);
    fs::remove_file(&aside)?;
    match linked {
        Ok(()) => sync_parent(path).map(|()| true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(error),
    }
}

fn write_temporary<T: Serialize>(path: &Path, value: &T) -> io::Result<PathBuf> {
    // A random name, so that two threads or processes never write the same temporary file.
    let mut random = [0; 8];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
    let aside = path.with_extension(format!("{:016x}.tmp", u64::from_ne_bytes(random)));
    let mut file = File::create_new(&aside)?;
    let written = serde_json::to_vec(value).map_err(io::Error::other).and_then(|bytes| file.write_all(&bytes));
    if let Err(error) = written.and_then(|()| file.sync_all()) {
        let _tidied = fs::remove_file(&aside);
        return Err(error);
    }
    Ok(aside)
}

fn sync_parent(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), |parent| File::open(parent)?.sync_all())
}
