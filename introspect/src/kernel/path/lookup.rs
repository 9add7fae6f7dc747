//! The file of a path, found from a process's root through the dentries that the kernel keeps.
//!
//! Only files that were used lately have dentries. A file that a process has open always has one.
//! Symbolic links are not followed.

use super::{PathLayout, PathRef};
use crate::kernel::btf::Btf;
use crate::kernel::layout::{LayoutError, offset};
use crate::kernel::list::{List, ListError};
use crate::kernel::structure::{Structure, StructureError};
use crate::{Gva, MemoryView};

/// The maximum number of entries of a directory that are looked at.
const MAX_ENTRIES: usize = 1 << 16;
/// The maximum number of mounts in another one (`fs.mount-max`).
const MAX_MOUNTS: usize = 100_000;
/// The maximum number of mounts on top of each other.
const MAX_STACKED: usize = 16;

/// An error in finding a file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LookupError {
    /// The kernel's directories cannot be read.
    #[error("files cannot be found by their path: {0}")]
    Layout(#[from] LayoutError),
    /// A structure on the way is broken.
    #[error("no file found: {0}")]
    Structure(#[from] StructureError),
    /// A list of mounts or of a directory's entries is broken.
    #[error("no file found: {0}")]
    List(#[from] ListError),
    /// A directory has too many entries, or its list is broken.
    #[error("no file found: the dentry at {dentry} has more than {MAX_ENTRIES} entries")]
    TooMany {
        /// The address of the directory's dentry.
        dentry: Gva,
    },
}

/// The location of a directory's entries and of a mount's mounts.
#[derive(Debug, Clone, Copy)]
pub(super) struct LookupLayout {
    entries: Entries,
    /// Offset in `dentry`.
    inode: u64,
    /// Offsets in `mount`.
    mounts: u64,
    mount_link: u64,
}

/// The offsets in a directory's dentry of the list's head, and in its entries of the links.
#[derive(Debug, Clone, Copy)]
enum Entries {
    /// Since Linux 6.8: a list that ends in a null pointer.
    Open {
        head: u64,
        link: u64,
    },
    Ring {
        head: u64,
        link: u64,
    },
}

impl LookupLayout {
    pub(super) fn new(btf: &Btf) -> Result<Self, LayoutError> {
        let entries = match offset(btf, "dentry.d_children", 8) {
            Ok(head) => Entries::Open {
                head,
                link: offset(btf, "dentry.d_sib", 16)?,
            },
            Err(_) => Entries::Ring {
                head: offset(btf, "dentry.d_subdirs", 16)?,
                link: offset(btf, "dentry.d_child", 16)?,
            },
        };
        Ok(Self {
            entries,
            inode: offset(btf, "dentry.d_inode", 8)?,
            mounts: offset(btf, "mount.mnt_mounts", 16)?,
            mount_link: offset(btf, "mount.mnt_child", 16)?,
        })
    }
}

impl PathLayout {
    /// Returns the address of the inode of the file at a path below `root`; `None` if the kernel
    /// has no dentry of it.
    ///
    /// # Errors
    /// If a structure on the way is broken, or the kernel's types do not describe directories.
    pub fn find(
        &self,
        view: MemoryView<'_>,
        root: PathRef,
        names: &[&[u8]],
    ) -> Result<Option<Gva>, LookupError> {
        let layout = self.lookup.as_ref().map_err(LayoutError::clone)?;
        let mut place = root;
        for name in names {
            let Some(dentry) = self.entry(view, layout, place.dentry, name)? else {
                return Ok(None);
            };
            place = self.covering(view, layout, PathRef { dentry, ..place })?;
        }
        let dentry = Structure::at(view, "dentry", place.dentry)?;
        Ok(dentry.pointer(layout.inode)?)
    }

    /// Returns the entry of a directory.
    fn entry(
        &self,
        view: MemoryView<'_>,
        layout: &LookupLayout,
        directory: Gva,
        name: &[u8],
    ) -> Result<Option<Gva>, LookupError> {
        let directory = Structure::at(view, "dentry", directory)?;
        match layout.entries {
            Entries::Ring { head, link } => {
                let list = List {
                    name: "dentry.d_subdirs",
                    head: directory.member(head),
                    member: link,
                    limit: MAX_ENTRIES,
                };
                let entries = list.walk(view);
                for entry in entries.items {
                    if self.is_named(view, layout, entry, name)? {
                        return Ok(Some(entry));
                    }
                }
                Ok(entries.error.map_or(Ok(None), Err)?)
            }
            Entries::Open { head, link } => {
                let mut next = directory.pointer(head)?;
                for _ in 0..MAX_ENTRIES {
                    let Some(node) = next else { return Ok(None) };
                    let entry = Gva(node.0.wrapping_sub(link));
                    if self.is_named(view, layout, entry, name)? {
                        return Ok(Some(entry));
                    }
                    next = Structure::at(view, "dentry (d_sib)", node)?.pointer(0)?;
                }
                let dentry = directory.address();
                Err(LookupError::TooMany { dentry })
            }
        }
    }

    /// Checks whether a dentry is of an existing file with this name.
    fn is_named(
        &self,
        view: MemoryView<'_>,
        layout: &LookupLayout,
        dentry: Gva,
        name: &[u8],
    ) -> Result<bool, StructureError> {
        let dentry = Structure::at(view, "dentry", dentry)?;
        if u64::from(dentry.u32(self.name_length)?) != name.len() as u64 {
            return Ok(false);
        }
        let found = dentry.string(self.name, "dentry.d_name", name.len())?;
        Ok(found.as_deref() == Some(name)
            && dentry.pointer(self.hash)?.is_some()
            && dentry.pointer(layout.inode)?.is_some())
    }

    /// Returns the root of the topmost mount on a place, or the place itself.
    fn covering(
        &self,
        view: MemoryView<'_>,
        layout: &LookupLayout,
        mut place: PathRef,
    ) -> Result<PathRef, LookupError> {
        for _ in 0..MAX_STACKED {
            let outer = Gva(place.mount.0.wrapping_sub(self.embedded));
            let list = List {
                name: "mount.mnt_mounts",
                head: Structure::at(view, "mount", outer)?.member(layout.mounts),
                member: layout.mount_link,
                limit: MAX_MOUNTS,
            };
            let mut above = None;
            for mount in list.walk(view).complete()? {
                let mount = Structure::at(view, "mount", mount)?;
                if mount.pointer(self.mount_point)? == Some(place.dentry) {
                    above = Some(mount.member(self.embedded));
                    break;
                }
            }
            let Some(mount) = above else { break };
            let root = Structure::at(view, "vfsmount", mount)?
                .follow_always(self.mount_root, "dentry (mnt_root)")?;
            place = PathRef {
                mount,
                dentry: root.address(),
            };
        }
        Ok(place)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::PausedMemory;
    use crate::kernel::path::test_paths::{STRUCTS, dentry, mount, place, vfsmount};
    use crate::kernel::test_kernel::{BASE, Member, TestKernel, WORD, types};
    use crate::test_says::assert_says;

    /// `/` with `tmp` and `var`; a tmpfs on `tmp` with `perf-7.map` and a removed `gone`.
    const ROOT: u64 = 0;
    const VAR: u64 = 1;
    const TMP: u64 = 2;
    const TMPFS: u64 = 3;
    const MAP: u64 = 4;
    const GONE: u64 = 5;
    const FIRST: u64 = 6;
    const SECOND: u64 = 7;
    /// Offsets of the head and the links of a directory's list.
    const HEAD: u64 = 0xa0;
    const LINK: u64 = 0xb0;
    const MOUNTS: u64 = 0x40;
    const MOUNT_LINK: u64 = 0x50;
    const INODE: u64 = BASE + 0x5000;

    /// Returns the layout of kernels whose directories have a ring, or a list with an end.
    fn layout(is_ring: bool) -> PathLayout {
        let mut structs = STRUCTS.to_vec();
        let of = |wanted: &str| {
            let found = STRUCTS.iter().find(|(name, _)| *name == wanted);
            found.unwrap().1.to_vec()
        };
        let (mut dentry, mut mount) = (of("dentry"), of("mount"));
        dentry.extend(match is_ring {
            true => [
                ("d_subdirs", HEAD as u32, Member::Bytes(16)),
                ("d_child", LINK as u32, Member::Bytes(16)),
            ],
            false => [
                ("d_children", HEAD as u32, WORD),
                ("d_sib", LINK as u32, Member::Bytes(16)),
            ],
        });
        mount.extend([
            ("mnt_mounts", MOUNTS as u32, Member::Bytes(16)),
            ("mnt_child", MOUNT_LINK as u32, Member::Bytes(16)),
        ]);
        for (name, members) in &mut structs {
            match *name {
                "dentry" => *members = &dentry,
                "mount" => *members = &mount,
                _ => {}
            }
        }
        PathLayout::new(&types(&structs)).unwrap()
    }

    fn guest(is_ring: bool) -> TestKernel {
        let mut kernel = TestKernel::default();
        for (number, parent, name) in [
            (ROOT, ROOT, "/"),
            (VAR, ROOT, "var"),
            (TMP, ROOT, "tmp"),
            (TMPFS, TMPFS, "/"),
            (MAP, TMPFS, "perf-7.map"),
            (GONE, TMPFS, "gone"),
        ] {
            dentry(&mut kernel, place(number), place(parent), name);
            kernel.put_all(&[(place(number) + 0x30, INODE + 0x100 * number, 8)]);
        }
        kernel.put_all(&[(place(GONE) + 0x10, 0, 8)]);
        for (directory, entries) in [
            (ROOT, &[VAR, TMP][..]),
            (VAR, &[]),
            (TMP, &[]),
            (TMPFS, &[GONE, MAP]),
        ] {
            let mut at = place(directory) + HEAD;
            for entry in entries {
                kernel.put_all(&[(at, place(*entry) + LINK, 8)]);
                at = place(*entry) + LINK;
            }
            let end = if is_ring { place(directory) + HEAD } else { 0 };
            kernel.put_all(&[(at, end, 8)]);
        }
        let (first, second) = (place(FIRST), place(SECOND));
        mount(&mut kernel, first, place(ROOT), first, place(ROOT));
        mount(&mut kernel, second, place(TMPFS), first, place(TMP));
        kernel.put_all(&[
            (first + MOUNTS, second + MOUNT_LINK, 8),
            (second + MOUNT_LINK, first + MOUNTS, 8),
            (second + MOUNTS, second + MOUNTS, 8),
        ]);
        kernel
    }

    fn find(kernel: &TestKernel, is_ring: bool, path: &str) -> Result<Option<u64>, LookupError> {
        let paused = PausedMemory::new(&kernel.memory);
        let root = PathRef {
            mount: Gva(vfsmount(place(FIRST))),
            dentry: Gva(place(ROOT)),
        };
        let names: Vec<&[u8]> = path.split('/').map(str::as_bytes).collect();
        let found = layout(is_ring).find(kernel.view(&paused), root, &names)?;
        Ok(found.map(|inode| (inode.0 - INODE) / 0x100))
    }

    #[test]
    fn files_are_found_through_directories_and_mounts() {
        for is_ring in [true, false] {
            let kernel = guest(is_ring);
            for (path, expected) in [
                ("var", Some(VAR)),
                ("tmp", Some(TMPFS)),
                ("tmp/perf-7.map", Some(MAP)),
                ("tmp/perf-8.map", None),
                ("tmp/gone", None),
                ("va", None),
                ("var/perf-7.map", None),
                ("none/perf-7.map", None),
            ] {
                assert_eq!(find(&kernel, is_ring, path), Ok(expected), "{path}");
            }
        }
    }

    #[test]
    fn broken_lists_end_in_an_error() {
        let (var, link) = (place(VAR) + LINK, place(TMP) + LINK);
        for (is_ring, broken, part) in [
            (false, (link, var, 8), "has more than 65536 entries"),
            (true, (link, var, 8), "it comes back to"),
            (false, (link, 0x1000, 8), "dentry: its pointer is 0xf50"),
            (true, (link, 0x1000, 8), "leads to 0x1000"),
            (
                true,
                (place(FIRST) + MOUNTS, 8, 8),
                "the list mount.mnt_mounts is broken",
            ),
            (
                false,
                (place(VAR) + 0x28, 8, 8),
                "dentry.d_name: its pointer is 0x8",
            ),
        ] {
            let mut kernel = guest(is_ring);
            kernel.put_all(&[broken]);
            let path = if part.contains("mounts") {
                "tmp"
            } else {
                "usr"
            };
            assert_says(find(&kernel, is_ring, path).unwrap_err(), part);
        }
    }

    #[test]
    fn mounts_on_themselves_end() {
        let mut kernel = guest(true);
        let second = place(SECOND);
        // Its root is where it is mounted, and it is mounted on itself.
        kernel.put_all(&[
            (second + 0x18, place(TMPFS), 8),
            (second + MOUNTS, second + MOUNT_LINK, 8),
            (second + MOUNT_LINK, second + MOUNTS, 8),
        ]);
        find(&kernel, true, "tmp").unwrap_err();
    }
}
