//! The tree of control groups of the unified hierarchy (cgroup v2): its groups by number and by
//! path.
//!
//! Each group is a directory of kernfs. The children of a directory are a red-black tree.

use super::btf::Btf;
use super::layout::{LayoutError, offset};
use super::structure::{Structure, StructureError};
use super::symbols::Symbols;
use crate::{Gva, MemoryView};

/// The bit of a directory among a node's flags (`KERNFS_DIR`, include/linux/kernfs.h).
const DIRECTORY: u16 = 1;
/// The maximum length of a name in bytes (`NAME_MAX`).
const MAX_NAME: usize = 255;
/// The maximum number of nodes that are looked at: a group has about forty.
const MAX_NODES: usize = 1 << 17;
/// The maximum length of a path in bytes (`PATH_MAX`).
const MAX_PATH: usize = 4096;

/// An error in reading the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CgroupTreeError {
    /// A structure is broken.
    #[error("the control groups cannot be read: {0}")]
    Structure(#[from] StructureError),
    /// There are too many nodes, or groups in one another.
    #[error(
        "the control groups cannot be read: more than {MAX_NODES} nodes, or a path of more than {MAX_PATH} bytes"
    )]
    Endless,
}

/// A control group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cgroup {
    /// Its number, which `ls -id` shows of its directory.
    pub id: u64,
    /// Its path: `/` for the root, `/system.slice`.
    pub path: Vec<u8>,
}

/// The location of the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CgroupTreeLayout {
    /// The address of the root, a `cgroup_root`.
    root: Gva,
    /// Offset in `cgroup_root` of its first group's `kernfs_node`.
    node: u64,
    /// Offsets in `kernfs_node`.
    id: u64,
    name: u64,
    flags: u64,
    children: u64,
    link: u64,
    /// Offsets in `rb_node`.
    left: u64,
    right: u64,
}

impl CgroupTreeLayout {
    /// Looks up the places. `symbols` must have the slide of the running kernel.
    ///
    /// # Errors
    /// If the kernel's types or symbols do not describe them: it may have no control groups.
    pub fn new(btf: &Btf, symbols: &Symbols) -> Result<Self, LayoutError> {
        let name = "cgrp_dfl_root";
        let used_for = "lists its control groups";
        let nameless = LayoutError::Symbol { name, used_for };
        Ok(Self {
            root: symbols.address_of(name).map(Gva).ok_or(nameless)?,
            node: offset(btf, "cgroup_root.cgrp.kn", 8)?,
            id: offset(btf, "kernfs_node.id", 8)?,
            name: offset(btf, "kernfs_node.name", 8)?,
            flags: offset(btf, "kernfs_node.flags", 2)?,
            children: offset(btf, "kernfs_node.dir.children.rb_node", 8)?,
            link: btf.member("kernfs_node.rb")?.byte_offset,
            left: offset(btf, "rb_node.rb_left", 8)?,
            right: offset(btf, "rb_node.rb_right", 8)?,
        })
    }

    /// Returns the first group for which `is_it` holds; the root is the first of all.
    ///
    /// # Errors
    /// If a structure is broken before it is found.
    pub fn find(
        &self,
        view: MemoryView<'_>,
        mut is_it: impl FnMut(&Cgroup) -> bool,
    ) -> Result<Option<Cgroup>, CgroupTreeError> {
        let root = Structure::at(view, "cgroup_root", self.root)?;
        let Some(node) = root.follow(self.node, "kernfs_node")? else {
            return Ok(None);
        };
        let mut room = MAX_NODES;
        let mut waiting = vec![(node, Vec::new())];
        while let Some((node, path)) = waiting.pop() {
            let shown = match path.is_empty() {
                true => b"/".to_vec(),
                false => path.clone(),
            };
            let group = Cgroup {
                id: node.u64(self.id)?,
                path: shown,
            };
            if is_it(&group) {
                return Ok(Some(group));
            }
            self.directories(view, &node, &path, &mut room, &mut waiting)?;
        }
        Ok(None)
    }

    /// Adds the directories in one to those that are looked at, with their paths.
    fn directories<'v>(
        &self,
        view: MemoryView<'v>,
        of: &Structure<'v>,
        path: &[u8],
        room: &mut usize,
        found: &mut Vec<(Structure<'v>, Vec<u8>)>,
    ) -> Result<(), CgroupTreeError> {
        let mut links: Vec<Gva> = of.pointer(self.children)?.into_iter().collect();
        while let Some(link) = links.pop() {
            *room = room.checked_sub(1).ok_or(CgroupTreeError::Endless)?;
            let address = Gva(link.0.wrapping_sub(self.link));
            let node = Structure::at(view, "kernfs_node", address)?;
            for side in [self.left, self.right] {
                links.extend(node.pointer(self.link.wrapping_add(side))?);
            }
            if node.u16(self.flags)? & DIRECTORY == 0 {
                continue;
            }
            let name = node.string(self.name, "kernfs_node.name", MAX_NAME)?;
            let inner = [path, b"/", &name.unwrap_or_default()].concat();
            if inner.len() >= MAX_PATH {
                return Err(CgroupTreeError::Endless);
            }
            found.push((node, inner));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::PausedMemory;
    use crate::kernel::test_kernel::{
        BASE, Member, Struct, TestKernel, WILD, WORD, symbols, types,
    };

    const ROOT: u64 = BASE;
    /// The nodes: the root, two groups, a file, and a group in a group.
    const NODES: [u64; 5] = [
        BASE + 0x200,
        BASE + 0x300,
        BASE + 0x400,
        BASE + 0x500,
        BASE + 0x600,
    ];
    const LINK: u64 = 0x18;

    const STRUCTS: &[Struct<'static>] = &[
        ("cgroup", &[("kn", 0x40, WORD)]),
        ("cgroup_root", &[("cgrp", 0x10, Member::Of("cgroup"))]),
        ("rb_node", &[("rb_right", 8, WORD), ("rb_left", 16, WORD)]),
        ("rb_root", &[("rb_node", 0, WORD)]),
        ("kernfs_elem_dir", &[("children", 8, Member::Of("rb_root"))]),
        (
            "kernfs_node",
            &[
                ("name", 0x10, WORD),
                ("rb", LINK as u32, Member::Of("rb_node")),
                ("dir", 0x40, Member::Of("kernfs_elem_dir")),
                ("id", 0x68, WORD),
                ("flags", 0x70, Member::Bytes(2)),
            ],
        ),
    ];

    fn layout() -> CgroupTreeLayout {
        let names = symbols(&[("cgrp_dfl_root", ROOT)]);
        CgroupTreeLayout::new(&types(STRUCTS), &names).unwrap()
    }

    fn put_tree(kernel: &mut TestKernel) {
        let node = |kernel: &mut TestKernel, at: u64, name: &str, id: u64, flags: u64| {
            kernel.put_all(&[
                (at + 0x10, at + 0x80, 8),
                (at + 0x68, id, 8),
                (at + 0x70, flags, 2),
            ]);
            kernel.put(at + 0x80, name);
        };
        let [root, system, user, file, inner] = NODES;
        node(kernel, root, "", 1, 0x11);
        node(kernel, system, "system.slice", 20, 0x11);
        node(kernel, user, "user.slice", 30, 0x11);
        node(kernel, file, "cgroup.procs", 40, 0x12);
        node(kernel, inner, "ssh.service", 50, 0x11);
        kernel.put_all(&[
            (ROOT + 0x10 + 0x40, root, 8),
            // The file is the root of the red-black tree, the groups are left and right.
            (root + 0x48, file + LINK, 8),
            (file + LINK + 8, system + LINK, 8),
            (file + LINK + 16, user + LINK, 8),
            (system + 0x48, inner + LINK, 8),
        ]);
    }

    fn found(
        kernel: &TestKernel,
        is_it: impl Fn(&Cgroup) -> bool,
    ) -> Result<Option<(u64, String)>, CgroupTreeError> {
        let paused = PausedMemory::new(&kernel.memory);
        let group = layout().find(kernel.view(&paused), is_it)?;
        Ok(group.map(|group| (group.id, String::from_utf8_lossy(&group.path).into_owned())))
    }

    #[test]
    fn groups_are_found_by_number_and_by_path() {
        let mut kernel = TestKernel::default();
        put_tree(&mut kernel);
        for (id, path) in [
            (1, "/"),
            (20, "/system.slice"),
            (30, "/user.slice"),
            (50, "/system.slice/ssh.service"),
        ] {
            let expected = Ok(Some((id, path.to_owned())));
            assert_eq!(found(&kernel, |group| group.id == id), expected);
            let by_path = found(&kernel, |group| group.path == path.as_bytes());
            assert_eq!(by_path, expected);
        }
        // A file is no group.
        assert_eq!(found(&kernel, |group| group.id == 40), Ok(None));
    }

    #[test]
    fn broken_trees_end_in_an_error() {
        let [root, system, _, file, _] = NODES;
        for (place, value) in [
            (root + 0x48, WILD),
            (file + LINK + 8, 7),
            // A node that is its own child.
            (file + LINK + 8, file + LINK),
            // A group in itself.
            (system + 0x48, system + LINK),
            (system + 0x10, WILD),
        ] {
            let mut kernel = TestKernel::default();
            put_tree(&mut kernel);
            kernel.put_all(&[(place, value, 8)]);
            let none = found(&kernel, |_| false);
            assert!(none.is_err(), "{place:#x} {none:?}");
        }
    }
}
