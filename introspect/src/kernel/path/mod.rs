//! The path of an open file, a mapped file or a directory, from its dentry and mount.
//!
//! The caller passes a `struct path` (mount and dentry) and the root of the path, usually that of
//! the process with pid 1. The text is the one that the kernel prints in `/proc/PID/maps`,
//! `/proc/PID/fd` and elsewhere (`d_path`, fs/d_path.c). A mapped file of overlayfs has the path in
//! the overlay, though its pages are those of a file in a layer below.

mod link;
mod lookup;
mod pseudo;
#[cfg(test)]
pub(crate) mod test_paths;
#[cfg(test)]
mod tests;

use super::backing_file::BackingLayout;
use super::btf::Btf;
use super::layout::{LayoutError, offset};
use super::structure::{Structure, StructureError};
use crate::{Gva, MemoryView};
pub use link::{LinkLayout, LinkTarget};
pub use lookup::LookupError;

use lookup::LookupLayout;
use pseudo::PseudoLayout;

/// The maximum length of a path in bytes (`PATH_MAX`).
const MAX_PATH: usize = 4096;
/// The maximum length of a component in bytes (`NAME_MAX`).
const MAX_NAME: u32 = 255;
/// The maximum number of mounts crossed on the way up.
const MAX_MOUNTS: usize = 256;
/// The kernel's suffix for a file whose name was removed.
const DELETED: &[u8] = b" (deleted)";
/// The lowest pointer that is an error number (`IS_ERR`).
const FIRST_ERROR_POINTER: u64 = u64::MAX - 4094;

/// An error in reading a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    /// A structure on the way is broken.
    #[error("no path: {0}")]
    Structure(#[from] StructureError),
    /// A dentry's name is too long.
    #[error(
        "no path: invalid dentry at {dentry}: expected a name of at most {MAX_NAME} bytes, found {length}"
    )]
    LongName {
        /// The address of the dentry.
        dentry: Gva,
        /// The length found, in bytes.
        length: u32,
    },
    /// The path does not end.
    #[error(
        "no path: more than {MAX_PATH} bytes long at the dentry at {dentry}; the dentries above are broken"
    )]
    TooLong {
        /// The address of the dentry at the limit.
        dentry: Gva,
    },
    /// The mounts do not end.
    #[error(
        "no path: more than {MAX_MOUNTS} mounts above each other at the mount at {mount}; they are broken"
    )]
    TooManyMounts {
        /// The address of the mount at the limit.
        mount: Gva,
    },
}

/// A place in the file system: the kernel's `struct path`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PathRef {
    /// The address of the `vfsmount`.
    pub mount: Gva,
    /// The address of the `dentry`.
    pub dentry: Gva,
}

/// The end of the way up from a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reach {
    /// The root that was passed.
    Root,
    /// The root of all mounts of a namespace. The file is outside the root that was passed, or in
    /// another namespace. getcwd(2) prefixes such a path, and those of the next two kinds, with
    /// `(unreachable)`; /proc does not.
    NamespaceRoot,
    /// A mount outside any namespace: it has been unmounted, or is the kernel's own.
    Detached,
    /// A directory without a parent that is not the root of a mount: it was moved away behind a
    /// bind mount.
    Escaped,
    /// No place in a directory: a file such as a pipe.
    Pseudo,
}

/// A path.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct GuestPath {
    /// The text, of any bytes but NUL: `/usr/bin/env`, `pipe:[4711]`.
    pub text: Vec<u8>,
    /// Whether the file's name was removed from its directory. The text is then the former name.
    pub deleted: bool,
    /// The end of the way up.
    pub reach: Reach,
}

impl GuestPath {
    /// Returns the text as the kernel prints it, with ` (deleted)` after a removed name.
    #[must_use]
    pub fn printed(&self) -> Vec<u8> {
        let mut text = self.text.clone();
        if self.deleted {
            text.extend(DELETED);
        }
        text
    }
}

/// The offsets in dentries, mounts and files.
#[derive(Debug, Clone)]
pub struct PathLayout {
    /// Offsets in `struct path`.
    mount: u64,
    dentry: u64,
    /// Offset of `struct path` in `struct file`.
    file_path: u64,
    backing: Option<BackingLayout>,
    /// Offsets in `struct dentry`. `hash` is that of the pointer which is null once the dentry has
    /// left the cache.
    parent: u64,
    hash: u64,
    name: u64,
    name_length: u64,
    /// Offset in `struct vfsmount`.
    mount_root: u64,
    /// Offsets in `struct mount`; `embedded` is that of its `vfsmount`.
    embedded: u64,
    mount_parent: u64,
    mount_point: u64,
    namespace: u64,
    /// Offset in `struct mnt_namespace` of a number that is 0 until the namespace is complete.
    sequence: Option<u64>,
    pseudo: PseudoLayout,
    lookup: Result<LookupLayout, LayoutError>,
}

impl PathLayout {
    /// Looks up the offsets.
    ///
    /// # Errors
    /// If the kernel's types do not describe them.
    pub fn new(btf: &Btf) -> Result<Self, LayoutError> {
        Ok(Self {
            mount: offset(btf, "path.mnt", 8)?,
            dentry: offset(btf, "path.dentry", 8)?,
            file_path: btf.member("file.f_path")?.byte_offset,
            backing: BackingLayout::new(btf),
            parent: offset(btf, "dentry.d_parent", 8)?,
            hash: offset(btf, "dentry.d_hash.pprev", 8)?,
            name: offset(btf, "dentry.d_name.name", 8)?,
            name_length: offset(btf, "dentry.d_name.len", 4)?,
            mount_root: offset(btf, "vfsmount.mnt_root", 8)?,
            embedded: btf.member("mount.mnt")?.byte_offset,
            mount_parent: offset(btf, "mount.mnt_parent", 8)?,
            mount_point: offset(btf, "mount.mnt_mountpoint", 8)?,
            namespace: offset(btf, "mount.mnt_ns", 8)?,
            sequence: offset(btf, "mnt_namespace.seq", 8).ok(),
            pseudo: PseudoLayout::new(btf)?,
            lookup: LookupLayout::new(btf),
        })
    }

    /// Reads the `struct path` at `address`; `None` if it is not set.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn read(
        &self,
        view: MemoryView<'_>,
        address: Gva,
    ) -> Result<Option<PathRef>, StructureError> {
        let path = Structure::at(view, "path", address)?;
        let mount = path.pointer(self.mount)?;
        let dentry = path.pointer(self.dentry)?;
        Ok(mount
            .zip(dentry)
            .map(|(mount, dentry)| PathRef { mount, dentry }))
    }

    /// Reads the `struct path` of the `struct file` at `file`, of an overlay's file that which
    /// users see; `None` if it is not set up.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn opened_at(
        &self,
        view: MemoryView<'_>,
        file: Gva,
    ) -> Result<Option<PathRef>, StructureError> {
        let file = Structure::at(view, "file", file)?;
        let backing = self.backing.as_ref();
        let user = backing
            .map(|backing| backing.user_path(&file))
            .transpose()?;
        if let Some(user) = user.flatten()
            && let Some(path) = self.read(view, user)?
        {
            return Ok(Some(path));
        }
        self.read(view, file.member(self.file_path))
    }

    /// Returns the text of a place relative to `root`, or without a root, to the top of its mounts.
    ///
    /// # Errors
    /// If a structure on the way cannot be read, or the way does not end.
    pub fn text(
        &self,
        view: MemoryView<'_>,
        path: PathRef,
        root: Option<PathRef>,
    ) -> Result<GuestPath, PathError> {
        let dentry = Structure::at(view, "dentry", path.dentry)?;
        let mount = Structure::at(view, "vfsmount", path.mount)?;
        let is_top = dentry.pointer(self.parent)? == Some(path.dentry);
        let is_mounted = is_top && mount.pointer(self.mount_root)? == Some(path.dentry);
        if !is_mounted && let Some(found) = self.pseudo.path(&dentry, || self.name(&dentry))? {
            return Ok(found);
        }
        let deleted = !is_top && dentry.pointer(self.hash)?.is_none();
        let (text, reach) = self.climb(view, dentry, mount, root)?;
        Ok(GuestPath {
            text,
            deleted,
            reach,
        })
    }

    /// Collects the names on the way up from a dentry.
    fn climb<'p>(
        &self,
        view: MemoryView<'p>,
        mut dentry: Structure<'p>,
        mut mount: Structure<'p>,
        root: Option<PathRef>,
    ) -> Result<(Vec<u8>, Reach), PathError> {
        let mut names: Vec<Vec<u8>> = Vec::new();
        let (mut length, mut mounts) = (0, 0);
        let reach = loop {
            let here = PathRef {
                mount: mount.address(),
                dentry: dentry.address(),
            };
            if root == Some(here) {
                break Reach::Root;
            }
            if mount.pointer(self.mount_root)? == Some(here.dentry) {
                match self.above(view, &mount)? {
                    Above::Mount(point, parent) => (dentry, mount) = (point, parent),
                    Above::Nothing(reach) => break reach,
                }
                mounts += 1;
                if mounts > MAX_MOUNTS {
                    return Err(PathError::TooManyMounts { mount: here.mount });
                }
                continue;
            }
            let parent = dentry.follow_always(self.parent, "dentry (d_parent)")?;
            if parent.address() == here.dentry {
                // The names collected belong to no path.
                names.clear();
                break Reach::Escaped;
            }
            let name = self.name(&dentry)?;
            length += name.len() + 1;
            if length >= MAX_PATH {
                let dentry = here.dentry;
                return Err(PathError::TooLong { dentry });
            }
            names.push(name);
            dentry = parent;
        };
        let mut text = Vec::with_capacity(length.max(1));
        for name in names.iter().rev() {
            text.push(b'/');
            text.extend(name);
        }
        if text.is_empty() {
            text.push(b'/');
        }
        Ok((text, reach))
    }

    /// Returns the place above the root of a mount.
    fn above<'p>(
        &self,
        view: MemoryView<'p>,
        mount: &Structure<'p>,
    ) -> Result<Above<'p>, StructureError> {
        let outer = Gva(mount.address().0.wrapping_sub(self.embedded));
        let outer = Structure::at(view, "mount", outer)?;
        let parent = outer.follow_always(self.mount_parent, "mount (mnt_parent)")?;
        if parent.address() != outer.address() {
            let point = outer.follow_always(self.mount_point, "dentry (mnt_mountpoint)")?;
            let mount = Structure::at(view, "vfsmount", parent.member(self.embedded))?;
            return Ok(Above::Mount(point, mount));
        }
        let namespace = outer.pointer(self.namespace)?;
        let Some(namespace) = namespace.filter(|address| address.0 < FIRST_ERROR_POINTER) else {
            return Ok(Above::Nothing(Reach::Detached));
        };
        let namespace = Structure::at(view, "mnt_namespace", namespace)?;
        let sequence = self
            .sequence
            .map(|place| namespace.u64(place))
            .transpose()?;
        Ok(Above::Nothing(match sequence {
            Some(0) => Reach::Detached,
            _ => Reach::NamespaceRoot,
        }))
    }

    /// Reads the name of a dentry.
    fn name(&self, dentry: &Structure<'_>) -> Result<Vec<u8>, PathError> {
        let length = dentry.u32(self.name_length)?;
        if length > MAX_NAME {
            let dentry = dentry.address();
            return Err(PathError::LongName { dentry, length });
        }
        let most = usize::try_from(length).unwrap_or_default();
        let name = dentry.string(self.name, "dentry.d_name", most)?;
        Ok(name.unwrap_or_default())
    }
}

/// The result of [`PathLayout::above`].
enum Above<'p> {
    /// The dentry mounted on, and its `vfsmount`.
    Mount(Structure<'p>, Structure<'p>),
    Nothing(Reach),
}
