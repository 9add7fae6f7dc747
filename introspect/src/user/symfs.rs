//! Host files in place of a guest's files whose pages are not in memory. They are in a directory
//! with a copy of the guest's file system, of a part of it, or of its debug files.
//!
//! The user names the directory. Paths come from the guest and never lead out of it. Symbolic links
//! are followed as if the directory were the root. A file is used only if its build id is the
//! guest's, provided that both have one.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};
use rustix::io::Errno;

use super::build_id::BuildId;
use super::file_bytes::{FileBytes, Missing, MissingCause, missing};
use super::object_file::{ObjectError, ObjectFile};
use crate::regular_file;

/// The maximum number of symbolic links on the way to a file, as in Linux.
const MAX_LINKS: usize = 40;
/// The maximum number of components of a path.
const MAX_COMPONENTS: usize = 256;

/// A file on the host.
#[derive(Debug)]
pub struct HostFile {
    file: File,
    size: u64,
}

impl HostFile {
    /// Opens a regular file.
    ///
    /// # Errors
    /// If it cannot be opened, or is a directory or device.
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::of(regular_file::open(path)?)
    }

    fn of(file: File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(regular_file::refused());
        }
        Ok(Self {
            file,
            size: metadata.len(),
        })
    }
}

impl FileBytes for HostFile {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Missing> {
        self.file.read_exact_at(buf, offset).map_err(|error| {
            let cause = match error.kind() {
                io::ErrorKind::UnexpectedEof => MissingCause::PastEnd { size: self.size },
                kind => MissingCause::Host(kind),
            };
            missing(offset, buf, cause)
        })
    }
}

/// The result of the comparison of a host file with the guest's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BuildCheck {
    /// Their build ids are equal.
    Same,
    /// One of them has no build id, or the guest's is not in memory.
    Unchecked,
}

/// A host file in place of a guest's.
#[derive(Debug)]
pub struct HostObject {
    /// The file's bytes.
    pub file: HostFile,
    /// The path on the host.
    pub path: PathBuf,
    /// The result of the comparison.
    pub check: BuildCheck,
}

/// The reason why no host file is used.
#[derive(Debug, thiserror::Error)]
pub enum SymfsError {
    /// The file does not exist.
    #[error("{} has no file {guest_path}: {source}", .directory.display())]
    NotFound {
        /// The directory.
        directory: PathBuf,
        /// The path in the guest.
        guest_path: String,
        /// The host's error.
        source: io::Error,
    },
    /// The file exists, but is not an ELF object.
    #[error("{}: {source}", .path.display())]
    Object {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: ObjectError,
    },
    /// The file is another build.
    #[error("{}: another version, not used: expected build id {wanted} (the guest's file), found {found}", .path.display())]
    WrongBuild {
        /// The file.
        path: PathBuf,
        /// Its build id.
        found: BuildId,
        /// The build id of the guest's file.
        wanted: BuildId,
    },
}

/// A host directory that serves as the guest's root.
#[derive(Debug, Clone)]
pub struct Symfs {
    directory: PathBuf,
}

impl Symfs {
    /// Makes the set for a directory, which is read when a file is requested.
    #[must_use]
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self {
            directory: directory.into(),
        }
    }

    /// Opens the file at a path of the guest.
    ///
    /// # Errors
    /// If there is none, or it does not have build id `wanted`.
    pub fn open(
        &self,
        guest_path: &[u8],
        wanted: Option<&BuildId>,
    ) -> Result<HostObject, SymfsError> {
        self.take(Path::new(OsStr::from_bytes(guest_path)), wanted)
    }

    /// Opens the separate debug file of the file at a path of the guest. It tries the build id
    /// under `usr/lib/debug/.build-id` and `.build-id`, then `usr/lib/debug/PATH.debug` and
    /// `PATH.debug`.
    ///
    /// # Errors
    /// If there is none, or none has build id `wanted`.
    pub fn open_debug(
        &self,
        guest_path: &[u8],
        wanted: Option<&BuildId>,
    ) -> Result<HostObject, SymfsError> {
        let mut candidates = Vec::new();
        if let Some(id) = wanted {
            let id = id.to_string();
            let (directory, file) = id.split_at(2.min(id.len()));
            let path = format!(".build-id/{directory}/{file}.debug");
            candidates.push(Path::new("usr/lib/debug").join(&path));
            candidates.push(PathBuf::from(path));
        }
        let mut beside = OsStr::from_bytes(guest_path).to_owned();
        beside.push(".debug");
        let relative = Path::new(&beside)
            .strip_prefix("/")
            .unwrap_or(Path::new(&beside));
        candidates.push(Path::new("usr/lib/debug").join(relative));
        candidates.push(relative.to_owned());
        let (mut wrong, mut absent) = (None, None);
        for candidate in &candidates {
            match self.take(candidate, wanted) {
                Ok(found) => return Ok(found),
                Err(error @ SymfsError::NotFound { .. }) => absent = absent.or(Some(error)),
                Err(error) => wrong = wrong.or(Some(error)),
            }
        }
        // A wrong file is more useful to the user than the place where none is.
        let told = wrong.or(absent);
        Err(told.unwrap_or_else(|| self.not_found(&beside, io::ErrorKind::NotFound.into())))
    }

    fn not_found(&self, guest_path: &OsStr, source: io::Error) -> SymfsError {
        SymfsError::NotFound {
            directory: self.directory.clone(),
            guest_path: guest_path.to_string_lossy().into_owned(),
            source,
        }
    }

    fn take(&self, guest_path: &Path, wanted: Option<&BuildId>) -> Result<HostObject, SymfsError> {
        let path = self
            .resolve(guest_path)
            .map_err(|error| self.not_found(guest_path.as_os_str(), error))?;
        let file = self
            .open_in_root(guest_path, &path)
            .map_err(|error| self.not_found(guest_path.as_os_str(), error))?;
        let found = match ObjectFile::parse(&file) {
            Ok(object) => object.build_id().ok().flatten(),
            Err(source) => return Err(SymfsError::Object { path, source }),
        };
        let check = match (wanted, found) {
            (Some(wanted), Some(found)) if *wanted != found => {
                let wanted = wanted.clone();
                return Err(SymfsError::WrongBuild {
                    path,
                    found,
                    wanted,
                });
            }
            (Some(_), Some(_)) => BuildCheck::Same,
            _ => BuildCheck::Unchecked,
        };
        Ok(HostObject { file, path, check })
    }

    /// Opens the file at a path of the guest, which [`Self::resolve`] has found at `resolved`. The
    /// kernel follows the links inside of the directory if it can (openat2(2), Linux 5.6).
    /// Concurrent changes then cannot lead out of it.
    fn open_in_root(&self, guest_path: &Path, resolved: &Path) -> io::Result<HostFile> {
        let directory = File::open(&self.directory)?;
        let path = match guest_path.as_os_str().is_empty() {
            true => Path::new("."),
            false => guest_path,
        };
        let opened = openat2(
            &directory,
            path,
            OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC,
            Mode::empty(),
            ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS,
        );
        match opened {
            Ok(file) => HostFile::of(File::from(file)),
            // openat2 does not exist or is not allowed, as in some containers.
            Err(Errno::NOSYS | Errno::PERM) => HostFile::open(resolved),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns the host's path of a path of the guest, with all links followed inside of the
    /// directory.
    fn resolve(&self, guest_path: &Path) -> io::Result<PathBuf> {
        let mut path = self.directory.clone();
        // The number of names by which `path` is below the directory.
        let mut depth = 0usize;
        let mut links = 0;
        let mut rest: VecDeque<OsString> = VecDeque::new();
        prepend(&mut rest, guest_path)?;
        while let Some(name) = rest.pop_front() {
            if name == ".." {
                if depth > 0 {
                    path.pop();
                    depth -= 1;
                }
                continue;
            }
            path.push(&name);
            depth += 1;
            if !std::fs::symlink_metadata(&path)?.is_symlink() {
                continue;
            }
            links += 1;
            if links > MAX_LINKS {
                return Err(io::Error::other("too many symbolic links"));
            }
            let target = std::fs::read_link(&path)?;
            path.pop();
            depth -= 1;
            if target.is_absolute() {
                path.clone_from(&self.directory);
                depth = 0;
            }
            prepend(&mut rest, &target)?;
        }
        Ok(path)
    }
}

/// Puts the names of `path` in front of `rest`. It keeps `..` and drops the root and `.`.
fn prepend(rest: &mut VecDeque<OsString>, path: &Path) -> io::Result<()> {
    let names = path
        .components()
        .rev()
        .filter_map(|component| match component {
            Component::Normal(name) => Some(name.to_owned()),
            Component::ParentDir => Some("..".into()),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
        });
    for name in names {
        rest.push_front(name);
        if rest.len() > MAX_COMPONENTS {
            return Err(io::Error::other("a path of too many names"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::test_says::assert_says;
    use crate::user::test_object::TestObject;

    fn library(id: u8) -> Vec<u8> {
        TestObject::library().build_id(&[id; 20]).bytes()
    }

    /// Makes a directory with the library of id 1 and links to it, and a secret beside it.
    fn directory() -> (tempfile::TempDir, Symfs) {
        let place = tempfile::tempdir().unwrap();
        let root = place.path().join("root");
        std::fs::write(place.path().join("secret.so"), library(9)).unwrap();
        std::fs::create_dir_all(root.join("usr/lib/debug/.build-id/02")).unwrap();
        std::fs::write(root.join("usr/lib/libx.so.1"), library(1)).unwrap();
        std::fs::write(root.join("usr/lib/libx.so.1.debug"), library(1)).unwrap();
        // An old file, and the right one beside the library.
        std::fs::create_dir_all(root.join("usr/lib/debug/usr/lib")).unwrap();
        std::fs::write(root.join("usr/lib/debug/usr/lib/two.so.debug"), library(1)).unwrap();
        std::fs::write(root.join("usr/lib/two.so.debug"), library(4)).unwrap();
        std::fs::write(root.join("usr/lib/none.so"), TestObject::library().bytes()).unwrap();
        std::fs::write(root.join("usr/lib/text"), b"#!/bin/sh\nexit 0\n").unwrap();
        let debug = format!("usr/lib/debug/.build-id/02/{}.debug", "02".repeat(19));
        std::fs::write(root.join(debug), library(2)).unwrap();
        for (link, target) in [
            ("lib", "usr/lib"),
            ("usr/lib/libx.so", "libx.so.1"),
            ("usr/lib/absolute.so", "/usr/lib/libx.so"),
            ("usr/lib/escape.so", "../../../secret.so"),
            ("usr/lib/loop.so", "loop.so"),
        ] {
            symlink(target, root.join(link)).unwrap();
        }
        let symfs = Symfs::new(root);
        (place, symfs)
    }

    #[test]
    fn files_are_found_by_the_guests_path_and_checked_by_build_id() {
        let (_place, symfs) = directory();
        let one = BuildId::new(&[1; 20]).unwrap();
        let two = BuildId::new(&[2; 20]).unwrap();
        for (path, wanted, expected) in [
            ("/usr/lib/libx.so.1", Some(&one), Ok(BuildCheck::Same)),
            ("/lib/libx.so", Some(&one), Ok(BuildCheck::Same)),
            ("/lib/absolute.so", Some(&one), Ok(BuildCheck::Same)),
            ("/lib/./../lib/libx.so", Some(&one), Ok(BuildCheck::Same)),
            ("/lib/libx.so", None, Ok(BuildCheck::Unchecked)),
            ("/lib/none.so", Some(&one), Ok(BuildCheck::Unchecked)),
            (
                "/lib/libx.so",
                Some(&two),
                Err("(the guest's file), found 0101010101010101010101010101010101010101"),
            ),
            (
                "/lib/text",
                Some(&one),
                Err("not an ELF file: it starts with the bytes [23, 21, 2f, 62]"),
            ),
            ("/lib/liby.so", Some(&one), Err("has no file /lib/liby.so")),
            ("/usr/lib", Some(&one), Err("not a regular file")),
            (
                "/../../secret.so",
                None,
                Err("has no file /../../secret.so"),
            ),
            ("/lib/escape.so", None, Err("has no file /lib/escape.so")),
            ("/lib/loop.so", None, Err("too many symbolic links")),
            ("", None, Err("not a regular file")),
        ] {
            let found = symfs.open(path.as_bytes(), wanted);
            match (found, expected) {
                (Ok(found), Ok(check)) => assert_eq!(found.check, check, "{path}"),
                (Err(error), Err(part)) => {
                    assert_says(&error, part);
                }
                (found, _) => panic!("{path}: {found:?}"),
            }
        }
    }

    #[test]
    fn debug_files_are_found_by_build_id_or_beside_the_file() {
        let (_place, symfs) = directory();
        for (path, id, expected) in [
            ("/lib/libx.so.1", 1, Ok("libx.so.1.debug")),
            ("/lib/libx.so.1", 2, Ok(".debug")),
            ("/lib/libx.so.1", 3, Err("found 01")),
            ("/usr/lib/two.so", 4, Ok("root/usr/lib/two.so.debug")),
            ("/usr/lib/two.so", 3, Err("found 01")),
        ] {
            let id = BuildId::new(&[id; 20]).unwrap();
            match (symfs.open_debug(path.as_bytes(), Some(&id)), expected) {
                (Ok(found), Ok(end)) => {
                    assert!(found.path.to_string_lossy().ends_with(end), "{found:?}");
                    assert_eq!(found.check, BuildCheck::Same);
                }
                (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
                (found, _) => panic!("{id}: {found:?}"),
            }
        }
        assert_says(
            symfs.open_debug(b"/lib/liby.so", None).unwrap_err(),
            "has no file",
        );
    }

    #[test]
    fn a_hosts_file_is_read_like_any_other() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("file");
        std::fs::write(&path, b"0123456789").unwrap();
        let file = HostFile::open(&path).unwrap();
        let mut buf = [0; 3];
        assert_eq!(file.size(), 10);
        file.read_at(7, &mut buf).unwrap();
        assert_eq!(&buf, b"789");
        let error = file.read_at(8, &mut buf).unwrap_err();
        assert_eq!(error.cause, MissingCause::PastEnd { size: 10 });
    }
}
