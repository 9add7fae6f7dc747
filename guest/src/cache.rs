//! The cache: a directory in which each thing that takes long to make is made once.
//!
//! An entry is a directory that appears whole (built aside, then renamed) and never changes. One
//! process at a time makes an entry. Others wait on a lock file, which the kernel releases when its
//! holder dies. The directory can be removed safely at any time when nothing is being built:
//! everything in it can be made again.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use sha2::{Digest, Sha256};

use crate::progress::Progress;

/// The cache directory, or something in it, cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// No environment variable names a cache directory.
    #[error(
        "no place for the cache: EXOTRACE_CACHE, XDG_CACHE_HOME and HOME are all unset; set one of them"
    )]
    NoPlace,
    /// A file operation failed.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The failed action, as a verb.
        action: &'static str,
        /// The path.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// Returns a function that turns an I/O error into a [`CacheError`], for `map_err`.
pub fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CacheError {
    let path = path.to_owned();
    move |source| CacheError::Io {
        action,
        path,
        source,
    }
}

/// Returns the start of a hash, 12 hexadecimal digits: an entry's name changes with its sources.
pub fn short(hash: Sha256) -> String {
    let bytes = hash.finalize();
    bytes.iter().take(6).map(|b| format!("{b:02x}")).collect()
}

/// The cache directory.
#[derive(Debug, Clone)]
pub struct Cache {
    root: PathBuf,
}

impl Cache {
    /// Opens the user's cache: `$EXOTRACE_CACHE`, else `$XDG_CACHE_HOME/exotrace`, else
    /// `~/.cache/exotrace`. Makes it if it is missing.
    ///
    /// # Errors
    /// If none of the variables is set, or the directory cannot be made.
    pub fn open() -> Result<Self, CacheError> {
        let root = root_from(|name| std::env::var_os(name)).ok_or(CacheError::NoPlace)?;
        Self::at(root)
    }

    /// Opens a cache at `root`, which is made if it is missing.
    ///
    /// # Errors
    /// If the directory cannot be made.
    pub fn at(root: impl Into<PathBuf>) -> Result<Self, CacheError> {
        let root = root.into();
        fs::create_dir_all(&root).map_err(failed("make the directory", &root))?;
        Ok(Self { root })
    }

    /// Returns the path of the cache directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the entry `name`, if it has been made.
    pub fn entry(&self, name: &str) -> Option<PathBuf> {
        Some(self.root.join(name)).filter(|path| path.is_dir())
    }

    /// Returns the entries whose names start with `prefix`, the one that was made last at the end.
    ///
    /// # Errors
    /// If the directory cannot be listed.
    pub fn entries(&self, prefix: &str) -> Result<Vec<PathBuf>, CacheError> {
        let entries = fs::read_dir(&self.root).map_err(failed("list", &self.root))?;
        let mut found: Vec<_> = entries
            .flatten()
            .filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix))
            .filter(|entry| entry.path().is_dir())
            .map(|entry| {
                let made = entry.metadata().and_then(|data| data.modified());
                (made.ok(), entry.path())
            })
            .collect();
        found.sort();
        Ok(found.into_iter().map(|(_, path)| path).collect())
    }

    /// Returns the entry whose name starts with `prefix` and was made last.
    pub fn newest(&self, prefix: &str) -> Option<PathBuf> {
        self.entries(prefix).ok()?.pop()
    }

    /// Returns the entry `name`, if it has been made, and keeps it from
    /// [`remove_unused`](Self::remove_unused) until the value is dropped.
    ///
    /// # Errors
    /// If it cannot be opened or locked.
    pub fn hold(&self, name: &str) -> Result<Option<Held>, CacheError> {
        let path = self.root.join(name);
        loop {
            let folder = match File::open(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                opened => opened.map_err(failed("open", &path))?,
            };
            flock(&folder, FlockOperation::LockShared)
                .map_err(io::Error::from)
                .map_err(failed("lock", &path))?;
            let lock = Locked(folder);
            // Another process may have removed it before it was locked, and made it again.
            let inode = lock.0.metadata().map_err(failed("read", &path))?.ino();
            if fs::metadata(&path).is_ok_and(|found| found.ino() == inode) {
                return Ok(Some(Held { path, _lock: lock }));
            }
        }
    }

    /// Removes the entries whose names start with `prefix`, except those that a process holds.
    ///
    /// # Errors
    /// If they cannot be listed, or one cannot be removed.
    pub fn remove_unused(&self, prefix: &str) -> Result<(), CacheError> {
        for path in self.entries(prefix)? {
            let folder = match File::open(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                opened => opened.map_err(failed("open", &path))?,
            };
            match flock(&folder, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {
                    let _lock = Locked(folder);
                    fs::remove_dir_all(&path).map_err(failed("remove", &path))?;
                }
                Err(Errno::WOULDBLOCK) => {}
                Err(errno) => return Err(failed("lock", &path)(errno.into())),
            }
        }
        Ok(())
    }

    /// Locks `topic` for this process alone, and reports to `progress` if it has to wait. Released
    /// on drop, or when the process ends.
    ///
    /// # Errors
    /// If the lock file cannot be made or locked.
    pub fn lock(&self, topic: &str, progress: &dyn Progress) -> Result<Lock, CacheError> {
        let path = self.root.join(format!("{topic}.lock"));
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(failed("open", &path))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                progress.phase(&format!("waiting: another process makes the {topic}"));
                flock(&file, FlockOperation::LockExclusive)
                    .map_err(io::Error::from)
                    .map_err(failed("lock", &path))?;
            }
            Err(errno) => return Err(failed("lock", &path)(errno.into())),
        }
        Ok(Lock {
            _file: Locked(file),
        })
    }

    /// Makes an empty directory beside the entries, to build in. Leftovers of a killed build are
    /// removed: the caller holds the lock of `topic`.
    ///
    /// # Errors
    /// If leftovers cannot be removed, or the directory cannot be made.
    pub fn scratch(&self, topic: &str, _lock: &Lock) -> Result<Scratch, CacheError> {
        let path = self.root.join(format!("{topic}.building"));
        match fs::remove_dir_all(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(failed("remove", &path)(error));
            }
            _ => {}
        }
        fs::create_dir(&path).map_err(failed("make the directory", &path))?;
        Ok(Scratch { path })
    }

    /// Renames the directory `from`, complete and on the same file system, to the entry `name`.
    ///
    /// # Errors
    /// If it cannot be renamed.
    pub fn publish(&self, from: &Path, name: &str) -> Result<PathBuf, CacheError> {
        let path = self.root.join(name);
        fs::rename(from, &path).map_err(failed("rename the finished build to", &path))?;
        Ok(path)
    }
}

/// Returns the path of the cache from the environment.
fn root_from(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let set = |name: &str| {
        variable(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    set("EXOTRACE_CACHE")
        .or_else(|| set("XDG_CACHE_HOME").map(|path| path.join("exotrace")))
        .or_else(|| set("HOME").map(|path| path.join(".cache/exotrace")))
}

/// A file or folder with a lock, which is released on drop. Closing it does not suffice: a process
/// that another thread has just forked has it open until it executes its program.
#[derive(Debug)]
struct Locked(File);

impl Drop for Locked {
    fn drop(&mut self) {
        // Closing it releases the lock as well, later at worst.
        let _ = flock(&self.0, FlockOperation::Unlock);
    }
}

/// An entry that is not removed as long as this value lives.
#[derive(Debug)]
pub struct Held {
    path: PathBuf,
    /// The entry's folder.
    _lock: Locked,
}

impl Held {
    /// Returns the path of the entry.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// The exclusive right to work on one topic of the cache.
#[derive(Debug)]
pub struct Lock {
    /// The lock file.
    _file: Locked,
}

/// A directory to build in, removed on drop.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
}

impl Scratch {
    /// Returns the path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // The next build of the topic tries again.
        let _ = fs::remove_dir_all(&self.path);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::progress::Silent;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn the_environment_decides_where_it_is() {
        for (variables, expected) in [
            (&[("HOME", "/h")][..], Some("/h/.cache/exotrace")),
            (
                &[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")],
                Some("/x/exotrace"),
            ),
            (
                &[("HOME", "/h"), ("XDG_CACHE_HOME", "")],
                Some("/h/.cache/exotrace"),
            ),
            (
                &[("XDG_CACHE_HOME", "/x"), ("EXOTRACE_CACHE", "/e")],
                Some("/e"),
            ),
            (&[], None),
        ] {
            let found = root_from(|name| {
                let pair = variables.iter().find(|(key, _)| *key == name);
                pair.map(|(_, value)| OsString::from(value))
            });
            assert_eq!(found, expected.map(PathBuf::from), "{variables:?}");
        }
    }

    #[test]
    fn an_entry_appears_whole_and_scratch_goes_away() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path().join("new/cache")).unwrap();
        let lock = cache.lock("thing", &Silent).unwrap();
        let scratch = cache.scratch("thing", &lock).unwrap();
        let out = scratch.path().join("out");
        fs::create_dir(&out).unwrap();
        fs::write(out.join("file"), "x").unwrap();
        assert_eq!(cache.entry("thing-1"), None);
        let entry = cache.publish(&out, "thing-1").unwrap();
        let place = scratch.path().to_owned();
        drop(scratch);
        assert!(!place.exists());
        assert_eq!(cache.entry("thing-1"), Some(entry.clone()));
        assert_eq!(cache.newest("thing-"), Some(entry));
        assert_eq!(cache.newest("other-"), None);
    }

    #[test]
    fn entries_in_use_are_not_removed() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path()).unwrap();
        for name in ["guest-used", "guest-unused", "other-unused"] {
            fs::create_dir(directory.path().join(name)).unwrap();
        }
        assert!(cache.hold("guest-new").unwrap().is_none());
        let held = cache.hold("guest-used").unwrap().unwrap();
        cache.remove_unused("guest-").unwrap();
        assert_eq!(cache.entry("guest-used").as_deref(), Some(held.path()));
        assert_eq!(cache.entry("guest-unused"), None);
        assert!(cache.entry("other-unused").is_some());
        // As a process has it that another thread has just forked.
        let _copy = held._lock.0.try_clone().unwrap();
        drop(held);
        cache.remove_unused("guest-").unwrap();
        assert_eq!(cache.entry("guest-used"), None);
    }

    #[test]
    fn the_second_holder_waits_for_the_first_and_says_so() {
        struct Waiting(AtomicBool);
        impl Progress for Waiting {
            fn phase(&self, message: &str) {
                assert!(
                    message.contains("another process makes the thing"),
                    "{message}"
                );
                self.0.store(true, Ordering::SeqCst);
            }
            fn fraction(&self, _done: f64) {}
        }
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path()).unwrap();
        let first = cache.lock("thing", &Silent).unwrap();
        let waiting = Waiting(AtomicBool::new(false));
        let released = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _second = cache.lock("thing", &waiting).unwrap();
                assert!(released.load(Ordering::SeqCst));
            });
            while !waiting.0.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            released.store(true, Ordering::SeqCst);
            drop(first);
        });
    }
}
