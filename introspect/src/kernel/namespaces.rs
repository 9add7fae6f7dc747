//! The namespaces of a task by which a container is known: its innermost pid namespace, with its
//! number in that, and the host name that it sees.
//!
//! The initial pid namespace has level 0, and those within each other count from there. A task
//! that has ended has neither a number nor namespaces.

use super::btf::Btf;
use super::layout::{LayoutError, offset};
use super::structure::{Structure, StructureError};
use super::symbols::Symbols;
use crate::{Gva, MemoryView};

/// The size in bytes of `new_utsname.nodename` with its NUL (`__NEW_UTS_LEN`).
const HOST_NAME: usize = 65;
/// The maximum level of a pid namespace (`MAX_PID_NS_LEVEL`).
const MAX_LEVEL: u32 = 32;

/// An error in reading a task's namespaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NamespaceError {
    /// A structure is broken.
    #[error("no namespaces: {0}")]
    Structure(#[from] StructureError),
    /// The level is impossible.
    #[error(
        "no namespaces: invalid struct pid at {pid}: expected a level of at most {MAX_LEVEL}, found {found}"
    )]
    Level {
        /// The address of the `struct pid`.
        pid: Gva,
        /// The level.
        found: u32,
    },
}

/// A task's number in its innermost pid namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NamespacePid {
    /// The number of the thread there.
    pub number: i32,
    /// The number of namespaces around the innermost; 0 in the initial one.
    pub level: u32,
    /// The number of the namespace, as in `/proc/PID/ns/pid`. Unknown if it cannot be read.
    pub namespace: Option<u32>,
}

/// The location of a task's namespaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NamespaceLayout {
    /// Offset in `task_struct` of the `struct pid` of the thread.
    thread_pid: u64,
    /// Offsets in `struct pid`.
    level: u64,
    numbers: u64,
    /// The size of `struct upid`, and the offsets in it.
    upid: u64,
    number: u64,
    namespace: u64,
    /// Offset in `pid_namespace`.
    identity: Option<u64>,
    hosts: Option<HostLayout>,
}

/// The location of a task's host name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct HostLayout {
    /// The address of the first task, whose namespaces are the initial ones.
    first: Gva,
    /// Offset in `task_struct`.
    proxy: u64,
    /// Offset in `nsproxy`.
    namespace: u64,
    /// Offset in `uts_namespace`.
    name: u64,
}

impl NamespaceLayout {
    /// Looks up the offsets. `symbols` must have the slide of the running kernel.
    ///
    /// # Errors
    /// If the kernel's types do not describe a task's numbers.
    pub fn new(btf: &Btf, symbols: &Symbols) -> Result<Self, LayoutError> {
        let numbers = btf.member("pid.numbers")?.byte_offset;
        let (number, namespace) = (offset(btf, "upid.nr", 4)?, offset(btf, "upid.ns", 8)?);
        let size = btf.size_of("upid").unwrap_or_default();
        Ok(Self {
            thread_pid: offset(btf, "task_struct.thread_pid", 8)?,
            level: offset(btf, "pid.level", 4)?,
            numbers,
            upid: size,
            number,
            namespace,
            identity: offset(btf, "pid_namespace.ns.inum", 4).ok(),
            hosts: HostLayout::new(btf, symbols),
        })
    }

    /// Returns the number of a thread in its innermost pid namespace; `None` once it has ended.
    ///
    /// # Errors
    /// If a structure on the way cannot be read.
    pub fn pid(
        &self,
        view: MemoryView<'_>,
        task: Gva,
    ) -> Result<Option<NamespacePid>, NamespaceError> {
        let task = Structure::at(view, "task_struct", task)?;
        let Some(pid) = task.follow(self.thread_pid, "pid")? else {
            return Ok(None);
        };
        let level = pid.u32(self.level)?;
        if level > MAX_LEVEL {
            let (pid, found) = (pid.address(), level);
            return Err(NamespaceError::Level { pid, found });
        }
        let inner = self
            .upid
            .wrapping_mul(level.into())
            .wrapping_add(self.numbers);
        let number = pid.i32(inner.wrapping_add(self.number))?;
        let namespace = pid.follow(inner.wrapping_add(self.namespace), "pid_namespace")?;
        let identity = namespace.zip(self.identity);
        Ok(Some(NamespacePid {
            number,
            level,
            namespace: identity
                .map(|(namespace, place)| namespace.u32(place))
                .transpose()?,
        }))
    }

    /// Returns the host name that a task sees, if it is not in the initial UTS namespace.
    ///
    /// # Errors
    /// If a structure on the way cannot be read.
    pub fn own_host_name(
        &self,
        view: MemoryView<'_>,
        task: Gva,
    ) -> Result<Option<Vec<u8>>, NamespaceError> {
        let Some(hosts) = &self.hosts else {
            return Ok(None);
        };
        let own = hosts.of_task(view, task)?;
        let initial = hosts.of_task(view, hosts.first)?;
        match own.filter(|own| initial.is_some_and(|first| first.address() != own.address())) {
            Some(own) => Ok(Some(own.text(hosts.name, HOST_NAME)?)),
            None => Ok(None),
        }
    }
}

impl HostLayout {
    fn new(btf: &Btf, symbols: &Symbols) -> Option<Self> {
        Some(Self {
            first: Gva(symbols.address_of("init_task")?),
            proxy: offset(btf, "task_struct.nsproxy", 8).ok()?,
            namespace: offset(btf, "nsproxy.uts_ns", 8).ok()?,
            name: offset(btf, "uts_namespace.name.nodename", HOST_NAME as u64).ok()?,
        })
    }

    /// Returns the `uts_namespace` of a task; `None` once it has ended.
    fn of_task<'p>(
        &self,
        view: MemoryView<'p>,
        task: Gva,
    ) -> Result<Option<Structure<'p>>, StructureError> {
        let task = Structure::at(view, "task_struct", task)?;
        match task.follow(self.proxy, "nsproxy")? {
            Some(proxy) => proxy.follow(self.namespace, "uts_namespace"),
            None => Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::PausedMemory;
    use crate::kernel::test_kernel::{
        BASE, HALF, Member, Struct, TestKernel, WILD, WORD, symbols, types,
    };
    use crate::test_says::assert_says;

    const FIRST: u64 = BASE;
    const TASK: u64 = BASE + 0x100;
    const PID: u64 = BASE + 0x200;
    const PID_NAMESPACES: [u64; 2] = [BASE + 0x300, BASE + 0x400];
    const FIRST_PROXY: u64 = BASE + 0x500;
    const PROXY: u64 = BASE + 0x600;
    const FIRST_UTS: u64 = BASE + 0x700;
    const UTS: u64 = BASE + 0x800;

    const STRUCTS: &[Struct<'static>] = &[
        (
            "task_struct",
            &[("thread_pid", 0x20, WORD), ("nsproxy", 0x28, WORD)],
        ),
        ("upid", &[("nr", 0, HALF), ("ns", 8, WORD)]),
        (
            "pid",
            &[("level", 4, HALF), ("numbers", 0x60, Member::Of("upid"))],
        ),
        ("ns_common", &[("inum", 0x10, HALF)]),
        ("pid_namespace", &[("ns", 0x78, Member::Of("ns_common"))]),
        ("nsproxy", &[("uts_ns", 8, WORD)]),
        (
            "new_utsname",
            &[
                ("sysname", 0, Member::Bytes(65)),
                ("nodename", 65, Member::Bytes(65)),
            ],
        ),
        ("uts_namespace", &[("name", 0, Member::Of("new_utsname"))]),
    ];

    /// Makes a task with number 70 that is the second of a container.
    fn put_container(kernel: &mut TestKernel) {
        kernel.put_all(&[
            (FIRST + 0x28, FIRST_PROXY, 8),
            (TASK + 0x20, PID, 8),
            (TASK + 0x28, PROXY, 8),
            (PID + 4, 1, 4),
            (PID + 0x60, 70, 4),
            (PID + 0x68, PID_NAMESPACES[0], 8),
            (PID + 0x70, 2, 4),
            (PID + 0x78, PID_NAMESPACES[1], 8),
            (PID_NAMESPACES[0] + 0x88, 0xf000_0000, 4),
            (PID_NAMESPACES[1] + 0x88, 0xf000_0321, 4),
            (FIRST_PROXY + 8, FIRST_UTS, 8),
            (PROXY + 8, UTS, 8),
        ]);
        kernel.put(FIRST_UTS + 65, "host\0");
        kernel.put(UTS + 65, "web-1\0");
    }

    type Found = (Option<NamespacePid>, Option<Vec<u8>>);

    fn read(changes: &[(u64, u64, usize)]) -> Result<Found, NamespaceError> {
        let mut kernel = TestKernel::default();
        put_container(&mut kernel);
        kernel.put_all(changes);
        let layout = NamespaceLayout::new(&types(STRUCTS), &symbols(&[("init_task", FIRST)]));
        let layout = layout.unwrap();
        let paused = PausedMemory::new(&kernel.memory);
        let view = kernel.view(&paused);
        Ok((
            layout.pid(view, Gva(TASK))?,
            layout.own_host_name(view, Gva(TASK))?,
        ))
    }

    #[test]
    fn numbers_and_host_names_are_those_that_the_task_sees() {
        let pid = |number, level, namespace| {
            Some(NamespacePid {
                number,
                level,
                namespace: Some(namespace),
            })
        };
        let name = Some(b"web-1".to_vec());
        for (changes, expected) in [
            (&[][..], (pid(2, 1, 0xf000_0321), name.clone())),
            (&[(PID + 4, 0, 4)], (pid(70, 0, 0xf000_0000), name.clone())),
            // In the initial UTS namespace.
            (&[(PROXY + 8, FIRST_UTS, 8)], (pid(2, 1, 0xf000_0321), None)),
            // A task that is being removed.
            (&[(TASK + 0x20, 0, 8), (TASK + 0x28, 0, 8)], (None, None)),
        ] {
            assert_eq!(read(changes), Ok(expected), "{changes:x?}");
        }
    }

    #[test]
    fn broken_structures_end_in_an_error_that_names_them() {
        for (broken, part) in [
            ((PID + 4, 33, 4), "expected a level of at most 32, found 33"),
            ((TASK + 0x20, 8, 8), "pid: its pointer is 0x8"),
            ((PID + 0x78, 9, 8), "pid_namespace: its pointer is 0x9"),
            ((PROXY + 8, WILD, 8), "uts_namespace at 0xffff888001200000"),
            ((TASK + 0x28, WILD, 8), "nsproxy at 0xffff888001200000"),
        ] {
            assert_says(read(&[broken]).unwrap_err(), part);
        }
    }
}
