//! The control group of a task, as its path in the unified hierarchy (cgroup v2).
//!
//! The text is that of the line `0::` in `/proc/PID/cgroup`, as the first process sees it. Each
//! group has a node of kernfs, whose names lead up to the hierarchy's root. A kernel without
//! control groups has no such layout.

use super::btf::Btf;
use super::layout::{LayoutError, first_offset, offset};
use super::structure::{Structure, StructureError};
use crate::{Gva, MemoryView};

/// The maximum length of a path in bytes (`PATH_MAX`).
const MAX_PATH: usize = 4096;
/// The maximum length of a name in bytes (`NAME_MAX`).
const MAX_NAME: usize = 255;
/// The maximum number of groups above each other. A system has about ten.
const MAX_DEPTH: usize = 256;

/// An error in reading a task's control group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CgroupError {
    /// A structure on the way is broken.
    #[error("no control group: {0}")]
    Structure(#[from] StructureError),
    /// The path does not end.
    #[error(
        "no control group: more than {MAX_DEPTH} levels or {MAX_PATH} bytes below the kernfs_node at {node}; \
         the nodes are broken"
    )]
    Endless {
        /// The address of the node at the limit.
        node: Gva,
    },
}

/// The location of a task's control group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CgroupLayout {
    /// Offset in `task_struct`.
    set: u64,
    /// Offset in `css_set` of the group in the unified hierarchy.
    group: u64,
    /// Offset in `cgroup`.
    node: u64,
    /// Offsets in `kernfs_node`.
    parent: u64,
    name: u64,
}

impl CgroupLayout {
    /// Looks up the offsets.
    ///
    /// # Errors
    /// If the kernel's types do not describe them: it may have no control groups.
    pub fn new(btf: &Btf) -> Result<Self, LayoutError> {
        // Renamed in Linux 6.15.
        let parents = ["kernfs_node.parent", "kernfs_node.__parent"];
        Ok(Self {
            set: offset(btf, "task_struct.cgroups", 8)?,
            group: offset(btf, "css_set.dfl_cgrp", 8)?,
            node: offset(btf, "cgroup.kn", 8)?,
            parent: first_offset(btf, &parents, 8)?,
            name: offset(btf, "kernfs_node.name", 8)?,
        })
    }

    /// Returns the address of the `kernfs_node` of a task's group. Returns `None` until the kernel
    /// has set up its groups.
    ///
    /// # Errors
    /// If a structure on the way cannot be read.
    pub fn node(&self, view: MemoryView<'_>, task: Gva) -> Result<Option<Gva>, CgroupError> {
        let task = Structure::at(view, "task_struct", task)?;
        let Some(set) = task.follow(self.set, "css_set")? else {
            return Ok(None);
        };
        match set.follow(self.group, "cgroup")? {
            Some(group) => Ok(group.pointer(self.node)?),
            None => Ok(None),
        }
    }

    /// Returns the path of the group with this `kernfs_node`: `/` for the root,
    /// `/system.slice/ssh.service`.
    ///
    /// # Errors
    /// If a node cannot be read, or the nodes above do not end.
    pub fn path(&self, view: MemoryView<'_>, node: Gva) -> Result<Vec<u8>, CgroupError> {
        let mut node = Structure::at(view, "kernfs_node", node)?;
        let (mut names, mut length) = (Vec::new(), 0);
        while let Some(parent) = node.follow(self.parent, "kernfs_node (parent)")? {
            let name = node.string(self.name, "kernfs_node.name", MAX_NAME)?;
            let name = name.unwrap_or_default();
            length += name.len() + 1;
            if names.len() == MAX_DEPTH || length >= MAX_PATH {
                let node = node.address();
                return Err(CgroupError::Endless { node });
            }
            names.push(name);
            node = parent;
        }
        if names.is_empty() {
            return Ok(b"/".to_vec());
        }
        let mut path = Vec::with_capacity(length);
        for name in names.iter().rev() {
            path.push(b'/');
            path.extend(name);
        }
        Ok(path)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;
    use crate::PausedMemory;
    use crate::kernel::test_kernel::{BASE, Struct, TestKernel, WILD, WORD, types};
    use crate::test_says::assert_says;

    const TASK: u64 = BASE;
    const SET: u64 = BASE + 0x100;
    const GROUP: u64 = BASE + 0x200;
    /// The nodes of the path's elements, the root first.
    const NODES: u64 = BASE + 0x400;

    /// Returns the structs, with the name that the parent of a node has.
    fn structs<'a>(
        node: &'a [(&'static str, u32, crate::kernel::test_kernel::Member)],
    ) -> [Struct<'a>; 4] {
        [
            ("task_struct", &[("cgroups", 0x18, WORD)]),
            ("css_set", &[("dfl_cgrp", 0x48, WORD)]),
            ("cgroup", &[("kn", 0x80, WORD)]),
            ("kernfs_node", node),
        ]
    }

    fn layout(parent: &'static str) -> CgroupLayout {
        let node = [(parent, 8, WORD), ("name", 0x10, WORD)];
        CgroupLayout::new(&types(&structs(&node))).unwrap()
    }

    /// Writes nodes below each other, and a task in the last of them.
    fn put_group(kernel: &mut TestKernel, names: &[&str]) {
        let node = |number: usize| NODES + 0x100 * number as u64;
        for (number, name) in names.iter().enumerate() {
            let parent = number.checked_sub(1).map_or(0, node);
            let at = node(number);
            kernel.put_all(&[(at + 8, parent, 8), (at + 0x10, at + 0x20, 8)]);
            kernel.put(at + 0x20, name);
        }
        kernel.put_all(&[
            (TASK + 0x18, SET, 8),
            (SET + 0x48, GROUP, 8),
            (GROUP + 0x80, node(names.len() - 1), 8),
        ]);
    }

    fn path(kernel: &TestKernel, parent: &'static str) -> Result<Option<String>, CgroupError> {
        let paused = PausedMemory::new(&kernel.memory);
        let (view, layout) = (kernel.view(&paused), layout(parent));
        let node = layout.node(view, Gva(TASK))?;
        let path = node.map(|node| layout.path(view, node)).transpose()?;
        Ok(path.map(|path| String::from_utf8_lossy(&path).into_owned()))
    }

    #[test]
    fn paths_are_those_of_proc_in_every_layout() {
        for (names, expected) in [
            (&[""][..], "/"),
            (&["", "init.scope"], "/init.scope"),
            (
                &["", "machine.slice", "libpod-0a.scope", "container"],
                "/machine.slice/libpod-0a.scope/container",
            ),
        ] {
            for parent in ["parent", "__parent"] {
                let mut kernel = TestKernel::default();
                put_group(&mut kernel, names);
                assert_eq!(path(&kernel, parent), Ok(Some(expected.to_owned())));
            }
        }
    }

    #[test]
    fn a_task_has_no_group_before_the_kernel_has_any() {
        for missing in [TASK + 0x18, SET + 0x48, GROUP + 0x80] {
            let mut kernel = TestKernel::default();
            put_group(&mut kernel, &["", "a"]);
            kernel.put_all(&[(missing, 0, 8)]);
            assert_eq!(path(&kernel, "parent"), Ok(None));
        }
    }

    #[test]
    fn broken_nodes_end_in_an_error_that_names_them() {
        let (first, second) = (NODES + 0x100, NODES + 0x200);
        for (broken, part) in [
            ((first + 8, second, 8), "more than 256 levels or 4096 bytes"),
            (
                (second + 8, second, 8),
                "more than 256 levels or 4096 bytes",
            ),
            (
                (first + 8, 0x1000, 8),
                "kernfs_node (parent): its pointer is 0x1000",
            ),
            (
                (second + 0x10, 7, 8),
                "kernfs_node.name: its pointer is 0x7",
            ),
            (
                (second + 0x10, WILD, 8),
                "kernfs_node.name at 0xffff888001200000",
            ),
            ((SET + 0x48, WILD, 8), "cgroup at 0xffff888001200000"),
            ((TASK + 0x18, 8, 8), "css_set: its pointer is 0x8"),
        ] {
            let mut kernel = TestKernel::default();
            put_group(&mut kernel, &["", "a", "b"]);
            kernel.put_all(&[broken]);
            assert_says(path(&kernel, "parent").unwrap_err(), part);
        }
    }

    #[test]
    fn a_kernel_without_groups_has_no_layout() {
        let error = CgroupLayout::new(&types(&[("task_struct", &[("pid", 0, WORD)])]));
        assert_says(error.unwrap_err(), "no member \"cgroups\"");
    }

    proptest! {
        #[test]
        fn damage_ends_in_a_bounded_path_or_an_error(damage in prop::collection::vec((0..8u64, 0..32u64, 0..11u64), 1..8)) {
            let mut kernel = TestKernel::default();
            put_group(&mut kernel, &["", "a", "b", "c"]);
            for (structure, word, value) in damage {
                let value = match value {
                    0..8 => BASE + 0x100 * value,
                    8 => 0,
                    9 => WILD,
                    _ => u64::MAX,
                };
                kernel.put_all(&[(BASE + 0x100 * structure + 8 * word, value, 8)]);
            }
            let found = path(&kernel, "parent");
            // A byte that is not text takes three here.
            prop_assert!(found.is_err() || found.is_ok_and(|path| path.is_none_or(|path| path.len() <= 3 * 4096)));
        }
    }
}
