//! Archives of the format of an initramfs: newc cpio
//! (Documentation/driver-api/early-userspace/buffer-format.rst).
//!
//! The caller owns contents and modes. This checks paths and adds parent directories. The archive
//! is not compressed. The same calls make the same bytes: there are no times, and
//! root owns every file.

use std::collections::BTreeMap;
use std::io::Write;

use cpio::newc::{Builder, ModeFileType, trailer};

/// The length of the longest path with its NUL: the kernel's PATH_MAX.
const PATH_MAX: usize = 4096;

/// An archive cannot hold an entry.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ArchiveError {
    /// A path that the kernel would not unpack as intended.
    #[error("{path:?} cannot be a path in an initramfs: {reason}")]
    Path {
        /// The path.
        path: String,
        /// The reason.
        reason: &'static str,
    },
    /// A path that was added twice.
    #[error("{0:?} is in the initramfs already")]
    Duplicate(String),
    /// A file too large for the format, which has 32 bits for a size.
    #[error("{path:?} has {size} bytes, and an initramfs file at most 4294967295")]
    TooLarge {
        /// The path.
        path: String,
        /// The size in bytes.
        size: usize,
    },
    /// A mode with more than permission bits.
    #[error("invalid file mode {mode:#o} for {path:?}: expected only the lower 12 bits to be set")]
    Mode {
        /// The path.
        path: String,
        /// The given mode.
        mode: u32,
    },
}

/// The kind of a device node or pipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Node {
    /// A character device.
    Character {
        /// The major number.
        major: u32,
        /// The minor number.
        minor: u32,
    },
    /// A block device.
    Block {
        /// The major number.
        major: u32,
        /// The minor number.
        minor: u32,
    },
    /// A named pipe.
    Fifo,
}

/// An archive being written. The first error is kept, and [`Archive::finish`] returns it.
#[derive(Debug, Default)]
pub struct Archive {
    bytes: Vec<u8>,
    /// The entries' paths, and whether each is a directory.
    paths: BTreeMap<String, bool>,
    error: Option<ArchiveError>,
}

impl Archive {
    /// Makes an empty archive.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a directory with mode 0755. Paths are relative to the root, without a slash at either
    /// end. Missing parents are made. An existing directory is no error.
    #[must_use]
    pub fn dir(mut self, path: &str) -> Self {
        if self.paths.get(path) != Some(&true) {
            self.add(path, ModeFileType::Directory, 0o755, (0, 0), &[]);
        }
        self
    }

    /// Adds a regular file with permissions `mode`, such as 0o755.
    #[must_use]
    pub fn file(mut self, path: &str, mode: u32, content: &[u8]) -> Self {
        if self.mode_fits(path, mode) {
            self.add(path, ModeFileType::Regular, mode, (0, 0), content);
        }
        self
    }

    /// Adds a symbolic link at `path` to `target`.
    #[must_use]
    pub fn symlink(mut self, path: &str, target: &str) -> Self {
        self.add(
            path,
            ModeFileType::Symlink,
            0o777,
            (0, 0),
            target.as_bytes(),
        );
        self
    }

    /// Adds a device node or pipe with permissions `mode`.
    #[must_use]
    pub fn node(mut self, path: &str, mode: u32, node: Node) -> Self {
        let (kind, device) = match node {
            Node::Character { major, minor } => (ModeFileType::Char, (major, minor)),
            Node::Block { major, minor } => (ModeFileType::Block, (major, minor)),
            Node::Fifo => (ModeFileType::Fifo, (0, 0)),
        };
        if self.mode_fits(path, mode) {
            self.add(path, kind, mode, device, &[]);
        }
        self
    }

    /// Returns the archive's bytes, a multiple of 4.
    ///
    /// # Errors
    /// The first error of any earlier call.
    pub fn finish(mut self) -> Result<Vec<u8>, ArchiveError> {
        if let Some(error) = self.error {
            return Err(error);
        }
        // Memory takes every write.
        let _ = trailer(&mut self.bytes);
        Ok(self.bytes)
    }

    fn fail(&mut self, error: ArchiveError) {
        self.error.get_or_insert(error);
    }

    fn mode_fits(&mut self, path: &str, mode: u32) -> bool {
        let fits = mode <= 0o7777;
        if !fits {
            let path = path.to_owned();
            self.fail(ArchiveError::Mode { path, mode });
        }
        fits
    }

    /// Checks `path`, makes its parents, and writes the entry.
    fn add(
        &mut self,
        path: &str,
        kind: ModeFileType,
        mode: u32,
        device: (u32, u32),
        content: &[u8],
    ) {
        if let Err(reason) = check_path(path) {
            let path = path.to_owned();
            return self.fail(ArchiveError::Path { path, reason });
        }
        let Ok(size) = u32::try_from(content.len()) else {
            return self.fail(ArchiveError::TooLarge {
                path: path.to_owned(),
                size: content.len(),
            });
        };
        for (slash, _) in path.match_indices('/') {
            let parent = &path[..slash];
            match self.paths.get(parent) {
                Some(true) => {}
                Some(false) => return self.fail(ArchiveError::Duplicate(parent.to_owned())),
                None => self.add(parent, ModeFileType::Directory, 0o755, (0, 0), &[]),
            }
        }
        if self.paths.contains_key(path) {
            return self.fail(ArchiveError::Duplicate(path.to_owned()));
        }
        let directory = matches!(kind, ModeFileType::Directory);
        self.paths.insert(path.to_owned(), directory);
        let mut entry = Builder::new(path)
            .ino(self.paths.len() as u32)
            .mode(mode)
            .set_mode_file_type(kind)
            .nlink(if directory { 2 } else { 1 })
            .rdev_major(device.0)
            .rdev_minor(device.1)
            .write(&mut self.bytes, size);
        // Memory takes every write.
        let _ = entry.write_all(content).and_then(|()| entry.finish());
    }
}

fn check_path(path: &str) -> Result<(), &'static str> {
    if path.len() >= PATH_MAX {
        return Err("longer than 4095 bytes");
    }
    if path.contains('\0') {
        return Err("it contains a NUL byte");
    }
    if path == "TRAILER!!!" {
        return Err("the format uses this name as its end mark");
    }
    let bad = |part: &str| part.is_empty() || part == "." || part == "..";
    if path.split('/').any(bad) {
        return Err(
            "parts may not be empty, `.` or `..`, and there is no slash at the start or the end",
        );
    }
    Ok(())
}

/// A file to add: a kernel module, a program of one's own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExtraFile {
    /// Path from the root, without a slash at the start.
    pub path: String,
    /// Permissions, such as 0o755.
    pub mode: u32,
    /// The file's content.
    pub content: Vec<u8>,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::process::{Command, Stdio};

    /// Returns the listing of an archive by cpio(1).
    fn listed(archive: &[u8]) -> Vec<String> {
        let mut cpio = Command::new("cpio")
            .args(["-itv", "--quiet", "--numeric-uid-gid"])
            .env("LC_ALL", "C")
            .env("TZ", "UTC")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        cpio.stdin.take().unwrap().write_all(archive).unwrap();
        let output = cpio.wait_with_output().unwrap();
        assert!(output.status.success());
        let text = String::from_utf8(output.stdout).unwrap();
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        text.lines().map(words).collect()
    }

    #[test]
    fn cpio_lists_what_was_put_in() {
        let archive = Archive::new()
            .dir("proc")
            .file("bin/tool", 0o755, b"12345")
            .symlink("bin/sh", "tool")
            .node("dev/console", 0o600, Node::Character { major: 5, minor: 1 })
            .node(
                "dev/vda",
                0o640,
                Node::Block {
                    major: 254,
                    minor: 0,
                },
            )
            .node("run/pipe", 0o644, Node::Fifo)
            .dir("bin")
            .file("empty", 0o4755, b"")
            .finish()
            .unwrap();
        assert_eq!(archive.len() % 4, 0);
        assert_eq!(
            listed(&archive),
            [
                "drwxr-xr-x 2 0 0 0 Jan 1 1970 proc",
                "drwxr-xr-x 2 0 0 0 Jan 1 1970 bin",
                "-rwxr-xr-x 1 0 0 5 Jan 1 1970 bin/tool",
                "lrwxrwxrwx 1 0 0 4 Jan 1 1970 bin/sh -> tool",
                "drwxr-xr-x 2 0 0 0 Jan 1 1970 dev",
                "crw------- 1 0 0 5, 1 Jan 1 1970 dev/console",
                "brw-r----- 1 0 0 254, 0 Jan 1 1970 dev/vda",
                "drwxr-xr-x 2 0 0 0 Jan 1 1970 run",
                "prw-r--r-- 1 0 0 0 Jan 1 1970 run/pipe",
                "-rwsr-xr-x 1 0 0 0 Jan 1 1970 empty",
            ]
        );
    }

    #[test]
    fn contents_come_back_byte_for_byte() {
        let content: Vec<u8> = (0..=255).cycle().take(5001).collect();
        let archive = Archive::new()
            .file("a/b", 0o644, &content)
            .finish()
            .unwrap();
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("archive");
        std::fs::write(&path, archive).unwrap();
        let status = Command::new("cpio")
            .args(["-idm", "--quiet", "-F"])
            .arg(&path)
            .current_dir(directory.path())
            .status()
            .unwrap();
        assert!(status.success());
        assert_eq!(
            std::fs::read(directory.path().join("a/b")).unwrap(),
            content
        );
    }

    #[test]
    fn what_the_kernel_would_not_unpack_is_refused() {
        for path in [
            "",
            "/etc",
            "etc/",
            "a//b",
            "a/../b",
            ".",
            "TRAILER!!!",
            "a\0b",
        ] {
            let error = Archive::new().file(path, 0o644, b"").finish().unwrap_err();
            assert!(
                matches!(error, ArchiveError::Path { .. }),
                "{path:?}: {error}"
            );
        }
        let long = "x".repeat(PATH_MAX);
        Archive::new().dir(&long).finish().unwrap_err();
        let twice = Archive::new()
            .file("a", 0o644, b"")
            .symlink("a", "b")
            .finish();
        assert_eq!(twice.unwrap_err(), ArchiveError::Duplicate("a".to_owned()));
        let below = Archive::new().file("a", 0o644, b"").file("a/b", 0o644, b"");
        assert_eq!(
            below.finish().unwrap_err(),
            ArchiveError::Duplicate("a".to_owned())
        );
        let mode = Archive::new().file("a", 0o100_644, b"").finish();
        assert!(mode.unwrap_err().to_string().contains("0o100644"));
    }
}
