//! Small state files: read whole, written whole, or made by the first who comes.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

use serde::{Serialize, de::DeserializeOwned};

/// `None`: there is no such file. One that does not parse is an error and stays as it is.
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

/// Replaces the file, durably.
pub fn write<T: Serialize>(path: &Path, value: &T) -> io::Result<()> {
    let aside = written_aside(path, value)?;
    fs::rename(&aside, path)?;
    sync_parent(path)
}

/// Makes the file unless there is one; says whether it did.
pub fn create<T: Serialize>(path: &Path, value: &T) -> io::Result<bool> {
    let aside = written_aside(path, value)?;
    let linked = fs::hard_link(&aside, path);
    fs::remove_file(&aside)?;
    match linked {
        Ok(()) => sync_parent(path).map(|()| true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(error),
    }
}

fn written_aside<T: Serialize>(path: &Path, value: &T) -> io::Result<PathBuf> {
    // Two threads or processes never write the same one.
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
