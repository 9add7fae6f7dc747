//! Folders that are made once and kept in the cache.
//!
//! A folder's name is its topic and all that determines it. A new one replaces the topic's older
//! ones, except those that a process uses: it may run the tests of another checkout.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use guest::{Cache, Held, Terminal};

use crate::host::cache;

/// The folders that this process uses, by name. They are held until the process ends.
static USED: Mutex<BTreeMap<String, Held>> = Mutex::new(BTreeMap::new());

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
    let removed = cache.remove_unused(&format!("{topic}-"));
    removed.unwrap_or_else(|e| panic!("{e}"));
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
    let mut used = USED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(held) = used.get(name) {
        return Some(held.path().to_owned());
    }
    let held = cache.hold(name).unwrap_or_else(|e| panic!("{e}"))?;
    let folder = held.path().to_owned();
    used.insert(name.to_owned(), held);
    Some(folder)
}
