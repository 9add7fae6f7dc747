//! The contents of the hosts' root disk: a shell and tools of this machine, exotrace, guests, test
//! programs.
//!
//! A [`Tree`] lists files and their origins. Its [`Tree::key`] changes with any of them, so that a
//! disk image is made anew exactly if something has changed.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use guest::build::{CommandError, command};
use guest::{CacheError, failed, short};
use sha2::{Digest, Sha256};

/// Directories that exist and are empty.
const DIRECTORIES: [&str; 14] = [
    "bin", "cache", "dev", "etc", "job", "mnt", "out", "proc", "root", "run", "sbin", "sys", "tmp",
    "var/tmp",
];
/// The programs of this machine that the hosts have unchanged; the rest is busybox's.
const PROGRAMS: [&str; 48] = [
    "awk",
    "basename",
    "bash",
    "cat",
    "chmod",
    "cp",
    "cut",
    "date",
    "dd",
    "dirname",
    "du",
    "env",
    "find",
    "free",
    "grep",
    "head",
    "kill",
    "ln",
    "ls",
    "mkdir",
    "mktemp",
    "mount",
    "mv",
    "nproc",
    "od",
    "passt",
    "ps",
    "rm",
    "script",
    "sed",
    "seq",
    "setsid",
    "sha256sum",
    "sleep",
    "sort",
    "ssh",
    "stat",
    "tail",
    "tar",
    "tee",
    "timeout",
    "touch",
    "tr",
    "umount",
    "uname",
    "uniq",
    "wc",
    "xargs",
];
/// The program interpreter of all of them.
const INTERPRETER: &str = "/lib64/ld-linux-x86-64.so.2";
const BUSYBOX: &str = "/bin/busybox";
const INIT: &str = include_str!("../l1/init.sh");

/// The root disk's contents cannot be collected.
#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    /// A file operation failed.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A program that was run failed: ldd, strip, cp.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// A program of this machine is missing.
    #[error("this machine has no {0}, which the emulated hosts need; install it")]
    NoProgram(&'static str),
}

/// The origin of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Origin {
    /// A file or folder, copied.
    Copy(PathBuf),
    /// A program, copied without its debug information.
    Stripped(PathBuf),
    Text(String),
    Link(String),
}

/// Files by their paths from the root, without a slash at the start.
#[derive(Debug, Default)]
pub struct Tree {
    files: BTreeMap<String, Origin>,
}

impl Tree {
    /// Returns the common files of every host: init, a shell, tools with their libraries.
    ///
    /// # Errors
    /// If this machine lacks one of them.
    pub fn base(log: &Path) -> Result<Self, TreeError> {
        let mut tree = Self::default();
        tree.add("init", Origin::Text(INIT.to_owned()));
        tree.add(
            "etc/passwd",
            Origin::Text(
                "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/:/bin/false\n"
                    .to_owned(),
            ),
        );
        tree.add(
            "etc/group",
            Origin::Text("root:x:0:\nnogroup:x:65534:\n".to_owned()),
        );
        tree.add("usr/bin", Origin::Link("../bin".to_owned()));
        tree.add("usr/sbin", Origin::Link("../sbin".to_owned()));
        tree.add(
            "lib/x86_64-linux-gnu/libgcc_s.so.1",
            library("libgcc_s.so.1"),
        );
        tree.add("bin/busybox", Origin::Copy(BUSYBOX.into()));
        tree.add("bin/sh", Origin::Link("bash".to_owned()));
        tree.add(
            INTERPRETER.trim_start_matches('/'),
            Origin::Copy(INTERPRETER.into()),
        );
        for name in PROGRAMS {
            let path = find_program(name).ok_or(TreeError::NoProgram(name))?;
            tree.add_program(&format!("bin/{name}"), &path, log)?;
        }
        let applets = Command::new(BUSYBOX).arg("--list").output();
        let applets = applets.map_err(failed("run", Path::new(BUSYBOX)))?;
        for applet in String::from_utf8_lossy(&applets.stdout).lines() {
            let path = format!("bin/{applet}");
            if !tree.files.contains_key(&path) {
                tree.add(&path, Origin::Link("busybox".to_owned()));
            }
        }
        Ok(tree)
    }

    /// Adds a copy of a file, or of a folder with its contents.
    pub fn copy(&mut self, path: &str, from: &Path) {
        self.add(path, Origin::Copy(from.to_owned()));
    }

    /// Adds a program that this project has built, without debug information, with its libraries.
    ///
    /// # Errors
    /// If ldd fails.
    pub fn built(&mut self, path: &str, from: &Path, log: &Path) -> Result<(), TreeError> {
        self.add_program(path, from, log)?;
        self.add(path, Origin::Stripped(from.to_owned()));
        Ok(())
    }

    fn add(&mut self, path: &str, origin: Origin) {
        self.files.insert(path.to_owned(), origin);
    }

    fn add_program(&mut self, path: &str, from: &Path, log: &Path) -> Result<(), TreeError> {
        let from = fs::canonicalize(from).map_err(failed("find", from))?;
        let libraries = command::output("ldd", Command::new("ldd").arg(&from), log);
        self.add(path, Origin::Copy(from));
        // ldd fails for a statically linked program.
        for library in libraries_in(&libraries.unwrap_or_default()) {
            let name = library.rsplit('/').next().unwrap_or_default();
            if library != INTERPRETER {
                let path = format!("lib/x86_64-linux-gnu/{name}");
                self.add(&path, Origin::Copy(library.into()));
            }
        }
        Ok(())
    }

    /// Returns a text that changes with a file of the tree: it has path, size and time of each.
    ///
    /// # Errors
    /// If a file is missing.
    pub fn key(&self) -> Result<String, TreeError> {
        let mut hash = Sha256::new();
        for (path, origin) in &self.files {
            hash.update(path);
            match origin {
                Origin::Text(text) | Origin::Link(text) => hash.update(text),
                Origin::Copy(from) | Origin::Stripped(from) => {
                    let metadata = fs::metadata(from).map_err(failed("read", from))?;
                    hash.update(from.as_os_str().as_encoded_bytes());
                    for number in [metadata.len(), metadata.ino()] {
                        hash.update(number.to_le_bytes());
                    }
                    hash.update(metadata.mtime_nsec().to_le_bytes());
                    hash.update(metadata.mtime().to_le_bytes());
                }
            }
            hash.update([0]);
        }
        Ok(short(hash))
    }

    /// Writes the tree to the empty folder `place`.
    ///
    /// # Errors
    /// If a file cannot be read or written.
    pub fn write(&self, place: &Path, log: &Path) -> Result<(), TreeError> {
        for directory in DIRECTORIES {
            let path = place.join(directory);
            fs::create_dir_all(&path).map_err(failed("make the directory", &path))?;
        }
        for (path, origin) in &self.files {
            let to = place.join(path);
            if let Some(parent) = to.parent() {
                fs::create_dir_all(parent).map_err(failed("make the directory", parent))?;
            }
            match origin {
                Origin::Text(text) => {
                    fs::write(&to, text).map_err(failed("write", &to))?;
                    let mode = fs::Permissions::from_mode(0o755);
                    fs::set_permissions(&to, mode).map_err(failed("change", &to))?;
                }
                Origin::Link(target) => {
                    symlink(target, &to).map_err(failed("link", &to))?;
                }
                Origin::Copy(from) => {
                    let mut cp = Command::new("cp");
                    cp.args(["-rL", "--preserve=mode,timestamps"])
                        .arg(from)
                        .arg(&to);
                    command::run("cp", &mut cp, log, |_| {})?;
                }
                Origin::Stripped(from) => {
                    let mut strip = Command::new("strip");
                    strip.arg("--strip-debug").arg("-o").arg(&to).arg(from);
                    command::run("strip", &mut strip, log, |_| {})?;
                }
            }
        }
        Ok(())
    }
}

/// Returns a library that programs open at run time, so that ldd does not name it.
fn library(name: &str) -> Origin {
    Origin::Copy(Path::new("/lib/x86_64-linux-gnu").join(name))
}

/// Returns the first file of that name in the folders of PATH and of the system's programs.
fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/bin", "/bin", "/usr/sbin", "/sbin"].map(PathBuf::from);
    let folders = system.into_iter().chain(std::env::split_paths(&path));
    folders
        .map(|folder| folder.join(name))
        .find(|file| file.is_file())
}

/// Returns the paths that ldd prints.
fn libraries_in(text: &str) -> impl Iterator<Item = &str> {
    let words = text.lines().flat_map(str::split_whitespace);
    words.filter(|word| word.starts_with('/'))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn libraries_are_read_from_ldd() {
        let text = "\tlinux-vdso.so.1 (0x00007ffd)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\
            \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        let found: Vec<_> = libraries_in(text).collect();
        assert_eq!(found, ["/lib/x86_64-linux-gnu/libc.so.6", INTERPRETER]);
        assert_eq!(libraries_in("\tnot a dynamic executable\n").count(), 0);
    }

    #[test]
    fn the_key_changes_with_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "one").unwrap();
        let mut tree = Tree::default();
        tree.copy("data/file", &file);
        let first = tree.key().unwrap();
        assert_eq!(tree.key().unwrap(), first);
        fs::write(&file, "three").unwrap();
        assert_ne!(tree.key().unwrap(), first);
    }

    #[test]
    fn a_tree_is_written_as_listed() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "content").unwrap();
        let mut tree = Tree::default();
        tree.copy("data/copy", &file);
        tree.add("bin/link", Origin::Link("busybox".to_owned()));
        tree.add("init", Origin::Text("#!/bin/sh\n".to_owned()));
        let place = folder.path().join("root");
        tree.write(&place, &folder.path().join("log")).unwrap();
        assert_eq!(fs::read(place.join("data/copy")).unwrap(), b"content");
        assert_eq!(
            fs::read_link(place.join("bin/link")).unwrap(),
            Path::new("busybox")
        );
        let mode = fs::metadata(place.join("init"))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o755);
        assert!(place.join("cache").is_dir());
    }
}
