//! Dentries, mounts and files for tests.

use crate::kernel::test_kernel::{BASE, FREE, HALF, Member, Struct, TestKernel, WORD};

/// The structs of paths and files.
pub(crate) const STRUCTS: &[Struct<'static>] = &[
    ("path", &[("mnt", 0, WORD), ("dentry", 8, WORD)]),
    ("qstr", &[("len", 4, HALF), ("name", 8, WORD)]),
    ("hlist_bl_node", &[("next", 0, WORD), ("pprev", 8, WORD)]),
    (
        "dentry",
        &[
            ("d_hash", 8, Member::Of("hlist_bl_node")),
            ("d_parent", 0x18, WORD),
            ("d_name", 0x20, Member::Of("qstr")),
            ("d_inode", 0x30, WORD),
            ("d_op", 0x60, WORD),
            ("d_sb", 0x68, WORD),
            ("d_fsdata", 0x78, WORD),
        ],
    ),
    ("dentry_operations", &[("d_dname", 0x48, WORD)]),
    (
        "super_block",
        &[("s_dev", 0x10, HALF), ("s_magic", 0x60, WORD)],
    ),
    (
        "inode",
        &[
            ("i_mode", 0, Member::Bytes(2)),
            ("i_sb", 0x28, WORD),
            ("i_ino", 0x40, WORD),
            ("i_size", 0x50, WORD),
            ("i_private", 0x60, WORD),
        ],
    ),
    ("ns_common", &[("ops", 8, WORD)]),
    ("proc_ns_operations", &[("name", 0, WORD)]),
    ("dma_buf", &[("name", 0x30, WORD)]),
    ("vfsmount", &[("mnt_root", 0, WORD)]),
    (
        "mount",
        &[
            ("mnt_parent", 0x10, WORD),
            ("mnt_mountpoint", 0x18, WORD),
            ("mnt", 0x20, Member::Of("vfsmount")),
            ("mnt_ns", 0xe8, WORD),
        ],
    ),
    ("mnt_namespace", &[("seq", 0x48, WORD)]),
    (
        "file",
        &[
            ("f_inode", 0x28, WORD),
            ("f_flags", 0x30, HALF),
            ("f_path", 0x40, Member::Of("path")),
            ("f_pos", 0x70, WORD),
        ],
    ),
];

/// Returns the address of structure `number`. They have 256 bytes each, after the first 64 KiB.
pub(crate) fn place(number: u64) -> u64 {
    FREE + number * 0x100
}

/// Returns the address of the `vfsmount` in a `mount`.
pub(crate) fn vfsmount(mount: u64) -> u64 {
    mount + 0x20
}

/// Writes a cached dentry, with its name after it.
pub(crate) fn dentry(kernel: &mut TestKernel, at: u64, parent: u64, name: &str) {
    kernel.put_all(&[
        (at + 0x10, BASE, 8),
        (at + 0x18, parent, 8),
        (at + 0x24, name.len() as u64, 4),
        (at + 0x28, at + 0x80, 8),
    ]);
    kernel.put(at + 0x80, name);
}

/// Mounts `root` on a dentry of a parent mount. A mount that is its own parent is the first of its
/// namespace.
pub(crate) fn mount(kernel: &mut TestKernel, at: u64, root: u64, parent: u64, point: u64) {
    kernel.put_all(&[
        (at + 0x10, parent, 8),
        (at + 0x18, point, 8),
        (at + 0x20, root, 8),
    ]);
}
