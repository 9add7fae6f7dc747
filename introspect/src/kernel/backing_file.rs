//! A file that stands for another one: overlayfs opens the file of a layer below for a mapping, and
//! users see the path and inode of the overlay.
//!
//! Since Linux 6.8 the `struct file` of such a mapping has the path of the layer's file, and is
//! embedded in a `struct backing_file` that has the user's path too. Before, the `struct file`
//! itself had the user's path. In all kernels the pages are those of the layer's file, in its page
//! cache.

use super::btf::Btf;
use super::layout::offset;
use super::structure::{Structure, StructureError};
use crate::Gva;

/// The bit `FMODE_BACKING` of `file.f_mode` since Linux 6.14, and before. Types do not tell it.
const BACKING: u32 = 1 << 24;
const OLD_BACKING: u32 = 1 << 25;
/// A member of the same release as the first.
const SINCE: &str = "dentry.d_shortname";

/// The location of the user's path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BackingLayout {
    /// Offset in `struct file`.
    mode: u64,
    /// The bit that marks a file in a `struct backing_file`.
    backing: u32,
    /// Distance from the `struct file` to the user's `struct path`.
    user_path: u64,
    /// Offset in `struct path`.
    dentry: u64,
    /// Offset in `struct dentry`.
    inode: u64,
}

impl BackingLayout {
    /// Looks up the offsets; `None` in a kernel whose files all have the user's path.
    pub(super) fn new(btf: &Btf) -> Option<Self> {
        let file = btf.member("backing_file.file").ok()?.byte_offset;
        let path = btf.member("backing_file.user_path").ok()?.byte_offset;
        Some(Self {
            mode: offset(btf, "file.f_mode", 4).ok()?,
            backing: match btf.member(SINCE) {
                Ok(_) => BACKING,
                Err(_) => OLD_BACKING,
            },
            user_path: path.wrapping_sub(file),
            dentry: offset(btf, "path.dentry", 8).ok()?,
            inode: offset(btf, "dentry.d_inode", 8).ok()?,
        })
    }

    /// Returns the address of the user's `struct path`; `None` for a file that stands for itself.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub(super) fn user_path(&self, file: &Structure<'_>) -> Result<Option<Gva>, StructureError> {
        let is_backing = file.u32(self.mode)? & self.backing != 0;
        Ok(is_backing.then(|| file.member(self.user_path)))
    }

    /// Returns the inode that users see; `None` for a file that stands for itself.
    ///
    /// # Errors
    /// If a structure on the way cannot be read.
    pub(super) fn user_inode<'p>(
        &self,
        file: &Structure<'p>,
    ) -> Result<Option<Structure<'p>>, StructureError> {
        if self.user_path(file)?.is_none() {
            return Ok(None);
        }
        let dentry = self.user_path.wrapping_add(self.dentry);
        match file.follow(dentry, "dentry (user_path)")? {
            Some(dentry) => dentry.follow(self.inode, "inode"),
            None => Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::PausedMemory;
    use crate::kernel::files::{FileIdentity, FilesLayout};
    use crate::kernel::path::PathLayout;
    use crate::kernel::path::test_paths::{STRUCTS, dentry, mount, place, vfsmount};
    use crate::kernel::test_kernel::{HALF, Member, TestKernel, WORD, types};

    /// The file system of a layer: its root, a program, their mount.
    const LAYER: u64 = 0;
    const LAYER_PROGRAM: u64 = 1;
    const LAYER_MOUNT: u64 = 2;
    /// The overlay's.
    const OVERLAY: u64 = 3;
    const OVERLAY_PROGRAM: u64 = 4;
    const OVERLAY_MOUNT: u64 = 5;
    const FILE: u64 = 6;
    const LAYER_INODE: u64 = 8;
    const OVERLAY_INODE: u64 = 9;
    const LAYER_DEVICE: u64 = 10;
    const OVERLAY_DEVICE: u64 = 11;
    const MODE: u64 = 0x20;

    /// The kernels that differ: whether the bit is the newer one, and the member of the other path.
    const KERNELS: [(bool, &str); 4] = [
        (true, "user_path"),
        (false, "user_path"),
        // The file itself has the user's path.
        (false, "real_path"),
        (false, ""),
    ];

    fn btf(is_new: bool, path: &'static str) -> Btf {
        let mut structs = STRUCTS.to_vec();
        let backing = [
            ("file", 0, Member::Of("file")),
            (path, 0x100, Member::Of("path")),
        ];
        let tables = [("files", 0, WORD)];
        let file = [
            ("f_mode", MODE as u32, HALF),
            ("f_inode", 0x28, WORD),
            ("f_flags", 0x30, HALF),
            ("f_path", 0x40, Member::Of("path")),
            ("f_pos", 0x70, WORD),
        ];
        let table = [
            ("max_fds", 0, HALF),
            ("fd", 8, WORD),
            ("close_on_exec", 16, WORD),
            ("open_fds", 24, WORD),
        ];
        let dentry = structs.iter_mut().find(|(name, _)| *name == "dentry");
        let (_, members) = dentry.unwrap();
        let mut named = members.to_vec();
        if is_new {
            named.push(("d_shortname", 0x38, Member::Bytes(40)));
        }
        *members = &named;
        structs.retain(|(name, _)| *name != "file");
        structs.push(("file", &file));
        if !path.is_empty() {
            structs.push(("backing_file", &backing));
        }
        structs.push(("task_struct", &tables));
        structs.push(("files_struct", &[("fdt", 0, WORD)]));
        structs.push(("fdtable", &table));
        types(&structs)
    }

    /// Makes a file of a layer that stands for one of an overlay.
    fn guest(mode: u32, is_user_path_set: bool) -> TestKernel {
        let mut kernel = TestKernel::default();
        for (root, program, at, inode, device, name) in [
            (
                LAYER,
                LAYER_PROGRAM,
                LAYER_MOUNT,
                LAYER_INODE,
                LAYER_DEVICE,
                "lower",
            ),
            (
                OVERLAY,
                OVERLAY_PROGRAM,
                OVERLAY_MOUNT,
                OVERLAY_INODE,
                OVERLAY_DEVICE,
                "nginx",
            ),
        ] {
            dentry(&mut kernel, place(root), place(root), "/");
            dentry(&mut kernel, place(program), place(root), name);
            mount(&mut kernel, place(at), place(root), place(at), place(root));
            kernel.put_all(&[
                (place(program) + 0x30, place(inode), 8),
                (place(inode) + 0x28, place(device), 8),
                (place(inode) + 0x40, inode, 8),
                (place(device) + 0x10, device, 4),
            ]);
        }
        let file = place(FILE);
        kernel.put_all(&[
            (file + MODE, mode.into(), 4),
            (file + 0x28, place(LAYER_INODE), 8),
            (file + 0x40, vfsmount(place(LAYER_MOUNT)), 8),
            (file + 0x48, place(LAYER_PROGRAM), 8),
        ]);
        if is_user_path_set {
            kernel.put_all(&[
                (file + 0x100, vfsmount(place(OVERLAY_MOUNT)), 8),
                (file + 0x108, place(OVERLAY_PROGRAM), 8),
            ]);
        }
        kernel
    }

    /// Returns the path and the identity as /proc/PID/maps has them.
    fn look(kernel: &TestKernel, btf: &Btf) -> (String, FileIdentity) {
        let paused = PausedMemory::new(&kernel.memory);
        let view = kernel.view(&paused);
        let paths = PathLayout::new(btf).unwrap();
        let opened = paths.opened_at(view, Gva(place(FILE))).unwrap().unwrap();
        let path = paths.text(view, opened, None).unwrap();
        let files = FilesLayout::new(btf).unwrap();
        let file = files.file(view, Gva(place(FILE))).unwrap();
        let path = String::from_utf8(path.printed()).unwrap();
        (path, file.inode.identity)
    }

    #[test]
    fn a_mapped_file_of_an_overlay_has_the_path_and_inode_that_users_see() {
        let layer = ("/lower", LAYER_INODE, LAYER_DEVICE);
        let overlay = ("/nginx", OVERLAY_INODE, OVERLAY_DEVICE);
        for (kernel, (is_new, path)) in KERNELS.into_iter().enumerate() {
            for (mode, is_set, expected) in [
                (0, true, layer),
                (BACKING, true, if kernel == 0 { overlay } else { layer }),
                (OLD_BACKING, true, if kernel == 1 { overlay } else { layer }),
                // Until it is complete.
                (BACKING | OLD_BACKING, false, layer),
            ] {
                let (path, identity) = look(&guest(mode, is_set), &btf(is_new, path));
                let device = u64::from(identity.minor);
                let found = (path.as_str(), identity.inode, device);
                assert_eq!(found, expected, "kernel {kernel}, mode {mode:#x}");
            }
        }
    }
}
