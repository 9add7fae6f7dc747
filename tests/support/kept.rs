//! Folders that are made once and kept in the cache.
//!
//! A folder's name is its topic and all that determines it. A new one replaces the topic's older
//! ones, except those that a process uses: it may run the tests of another checkout.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use guest::{Cache, Terminal};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::host::cache;

/// The folders that this process uses, with their locks. Those are held until the process ends.
static USED: Mutex<BTreeMap<PathBuf, File>> = Mutex::new(BTreeMap::new());

/// Returns the folder `TOPIC-NAME` in the cache. If it is missing, `make` makes it, under another
/// name until it is whole.
pub(crate) fn kept(topic: &str, name: &str, make: impl FnOnce(&Path)) -> PathBuf {
    let cache = cache();
    let name = format!("{topic}-{name}");
    if let Some(folder) = found(&cache, &name) {
        return folder;
    }
    let lock = cache.lock(topic, &Terminal::new());
    let lock = lock.unwrap_or_else(|e| panic!("{e}"));
    // Another process may have made it meanwhile.
    if let Some(folder) = found(&cache, &name) {
        return folder;
    }
    remove_unused(&cache, topic);
    let scratch = cache.scratch(topic, &lock);
    let scratch = scratch.unwrap_or_else(|e| panic!("{e}"));
    let new = scratch.path().join(&name);
    make(&new);
    let folder = cache.publish(&new, &name);
    let folder = folder.unwrap_or_else(|e| panic!("{e}"));
    found(&cache, &name).unwrap_or_else(|| panic!("{} was removed", folder.display()))
}

/// Returns a folder that is there, and keeps it from being removed until this process ends.
fn found(cache: &Cache, name: &str) -> Option<PathBuf> {
    let folder = cache.entry(name)?;
    let mut used = USED.lock().unwrap_or_else(PoisonError::into_inner);
    if used.contains_key(&folder) {
        return Some(folder);
    }
    let lock = match File::open(&folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return None,
        opened => opened.unwrap_or_else(|e| panic!("{}: {e}", folder.display())),
    };
    let locked = flock(&lock, FlockOperation::LockShared);
    locked.unwrap_or_else(|e| panic!("cannot lock {}: {e}", folder.display()));
    // Another process may have removed it before it was locked.
    let folder = cache.entry(name)?;
    used.insert(folder.clone(), lock);
    Some(folder)
}

/// Removes the topic's folders that no process uses.
fn remove_unused(cache: &Cache, topic: &str) {
    let folders = cache.entries(&format!("{topic}-"));
    for folder in folders.unwrap_or_else(|e| panic!("{e}")) {
        let removed = remove(&folder);
        removed.unwrap_or_else(|e| panic!("cannot remove {}: {e}", folder.display()));
    }
}

/// Removes a folder unless a process uses it.
fn remove(folder: &Path) -> io::Result<()> {
    let lock = File::open(folder)?;
    match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => Ok(()),
        Err(error) => Err(error.into()),
        Ok(()) => fs::remove_dir_all(folder),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_in_use_is_not_removed() {
        let root = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
        let cache = Cache::at(root.path()).unwrap_or_else(|e| panic!("{e}"));
        for name in ["guest-used", "guest-unused", "other-unused"] {
            fs::create_dir(root.path().join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        }
        assert!(found(&cache, "guest-used").is_some());
        remove_unused(&cache, "guest");
        for (name, is_left) in [
            ("guest-used", true),
            ("guest-unused", false),
            ("other-unused", true),
        ] {
            assert_eq!(cache.entry(name).is_some(), is_left, "{name}");
        }
    }
}
