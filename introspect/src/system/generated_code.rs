//! The names of code that a process generates, by its file `/tmp/perf-PID.map`.
//!
//! The file is looked for from the process's root, by its pid in its own namespace, and its bytes
//! are those in the page cache. It is read anew each time that the guest is paused. perf(1) ignores
//! files of other users, and so does this: nobody names the code of somebody else.

use std::cell::OnceCell;

use super::object_symbols::Budget;
use super::user_objects::CachedBytes;
use super::{PausedSystem, known};
use crate::Gva;
use crate::kernel::task_list::TaskInfo;
use crate::memory_budget::{Held, Purpose};
use crate::user::file_bytes::FileBytes;
use crate::user::perf_map::{MAX_LINES, PerfMap};
use crate::x86_64::PAGE;

/// The maximum number of bytes of the file that are read.
const MAX_BYTES: u64 = 16 << 20;
/// The user whose files all processes trust.
const ROOT: u32 = 0;

/// The names of a process's generated code, read at the first request.
pub(super) struct GeneratedCode<'s> {
    look: PausedSystem<'s>,
    task: TaskInfo,
    budget: Budget,
    read: OnceCell<Read>,
}

#[derive(Default)]
struct Read {
    map: PerfMap,
    path: String,
    /// The reasons why names may be missing.
    lost: Vec<String>,
    _held: Option<Held>,
}

impl<'s> GeneratedCode<'s> {
    pub(super) fn new(look: PausedSystem<'s>, task: &TaskInfo, budget: &Budget) -> Self {
        Self {
            look,
            task: *task,
            budget: budget.clone(),
            read: OnceCell::new(),
        }
    }

    /// Returns the names, which the first call reads, and the file's path.
    pub(super) fn get(&self) -> (&PerfMap, &str) {
        let read = self.read.get_or_init(|| self.read());
        (&read.map, &read.path)
    }

    /// Returns one sentence for each reason why names may be missing. There is none before they are
    /// requested.
    pub(super) fn lost(&self) -> impl Iterator<Item = String> {
        let read = self.read.get().into_iter();
        read.flat_map(|read| read.lost.iter().map(|why| format!("{}: {why}", read.path)))
    }

    fn read(&self) -> Read {
        let pid = self
            .look
            .namespace_pid(&self.task)
            .ok()
            .and_then(Result::ok);
        let pid = pid.flatten().map_or(self.task.pid, |pid| pid.number);
        let name = format!("perf-{pid}.map");
        let mut read = Read {
            path: format!("/tmp/{name}"),
            ..Read::default()
        };
        match self.bytes(name.as_bytes(), &mut read.lost) {
            Ok(Some(bytes)) => self.parse(&bytes, &mut read),
            Ok(None) => {}
            Err(why) => read.lost.push(why),
        }
        read
    }

    /// Returns the file's bytes, or `None` if there is no such file.
    fn bytes(&self, name: &[u8], lost: &mut Vec<String>) -> Result<Option<Vec<u8>>, String> {
        let text = |error: &dyn std::fmt::Display| error.to_string();
        let (system, view) = (self.look.system, self.look.view);
        let processes = known(&system.processes).map_err(|lost| text(&lost))?;
        let root = processes.root(view, self.task.address);
        let Some(root) = root.map_err(|error| text(&error))? else {
            return Ok(None);
        };
        let inode = processes.paths().find(view, root, &[b"tmp", name]);
        let Some(inode) = inode.map_err(|error| text(&error))? else {
            return Ok(None);
        };
        if !self.is_trusted(inode)? {
            return Err("it belongs to another user, not used".to_owned());
        }
        let layout = known(&system.page_cache).map_err(|lost| text(&lost))?;
        let file = layout.of_inode(view, inode).map_err(|error| text(&error))?;
        let source = CachedBytes::new(self.look, layout, file);
        if file.size > MAX_BYTES {
            lost.push(format!(
                "of its {} bytes only the first {MAX_BYTES} are used",
                file.size
            ));
        }
        let size = file.size.min(MAX_BYTES);
        let mut bytes = Vec::with_capacity(usize::try_from(size).unwrap_or_default());
        let mut missing = 0;
        for start in (0..size).step_by(usize::try_from(PAGE).unwrap_or(usize::MAX)) {
            let mut page = vec![0; usize::try_from((size - start).min(PAGE)).unwrap_or_default()];
            match source.read_at(start, &mut page) {
                Ok(()) => bytes.extend(page),
                // Parts of lines at both sides must not become a line.
                Err(_) => {
                    bytes.extend(b"?\n?");
                    missing += 1;
                }
            }
        }
        if missing > 0 {
            lost.push(format!(
                "{missing} of its pages are not in the guest's memory"
            ));
        }
        Ok(Some(bytes))
    }

    /// Checks whether the process or root owns the file.
    fn is_trusted(&self, inode: Gva) -> Result<bool, String> {
        let (system, view) = (self.look.system, self.look.view);
        let layout = known(&system.credentials).map_err(|lost| lost.to_string())?;
        let owner = layout
            .owner_of(view, inode)
            .map_err(|error| error.to_string())?;
        let user = layout.user_of(view, self.task.address);
        let user = user.map_err(|error| error.to_string())?;
        Ok(owner == ROOT || owner == user)
    }

    /// Parses the file as far as the budgets allow.
    fn parse(&self, bytes: &[u8], read: &mut Read) {
        let map = PerfMap::parse(bytes);
        if map.is_cut() {
            read.lost
                .push(format!("only its first {MAX_LINES} lines are used"));
        }
        match Held::take(Purpose::Symbols, map.size() as u64) {
            Ok(held) if self.budget.take(map.size()) => {
                read.map = map;
                read._held = Some(held);
            }
            Ok(_) => read
                .lost
                .push("its names are left out: the process's objects take too much".to_owned()),
            Err(over) => read.lost.push(format!("its names are left out: {over}")),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::PausedMemory;
    use crate::kernel::path::test_paths::{STRUCTS, dentry, mount, place, vfsmount};
    use crate::kernel::running::RunningKernel;
    use crate::kernel::task_list::TaskState;
    use crate::kernel::test_kernel::{
        BASE, HALF, Member, RAM, TestKernel, Types, VMEMMAP, WORD, add_types, symbols,
    };
    use crate::kernel::xarray::tests::xarray_types;
    use crate::system::System;
    use crate::test_says::assert_says;

    const ROOT_DENTRY: u64 = 0;
    const TMP: u64 = 1;
    const MAP: u64 = 2;
    const MOUNT: u64 = 3;
    const TASK: u64 = 4;
    const FS: u64 = 5;
    const PID: u64 = 6;
    const CRED: u64 = 7;
    const INODE: u64 = 8;
    const MAPPING: u64 = 9;
    /// The RAM's page with the file's bytes.
    const PAGE_NUMBER: u64 = 32;
    const USER: u64 = 1000;
    const TEXT: &str = "7f0000000000 40 LazyCompile:~run";

    fn btf() -> crate::kernel::btf::Btf {
        let mut t = Types::default();
        let xarray = xarray_types(&mut t, 64);
        let word = t.integer(8);
        let members = [
            ("host", 0, word),
            ("i_pages", 8, xarray),
            ("a_ops", 144, word),
        ];
        t.structure("address_space", 192, &members);
        let page = [
            ("flags", 0, word),
            ("compound_head", 8, word),
            ("mapping", 24, word),
            ("index", 32, word),
        ];
        t.structure("page", 64, &page);
        t.structure("mem_section", 24, &[("section_mem_map", 8, word)]);
        t.enumeration("pageflags", &[("PG_uptodate", 3)]);
        let of = |wanted: &str| {
            let found = STRUCTS.iter().find(|(name, _)| *name == wanted);
            found.unwrap().1.to_vec()
        };
        let (mut dentry, mut mount, mut inode, mut file) =
            (of("dentry"), of("mount"), of("inode"), of("file"));
        dentry.extend([
            ("d_children", 0xa0, WORD),
            ("d_sib", 0xb0, Member::Bytes(16)),
        ]);
        mount.extend([
            ("mnt_mounts", 0x40, Member::Bytes(16)),
            ("mnt_child", 0x50, Member::Bytes(16)),
        ]);
        inode.extend([("i_mapping", 0x70, WORD), ("i_uid", 4, HALF)]);
        file.push(("f_mapping", 0x78, WORD));
        let mut structs = STRUCTS.to_vec();
        for (name, members) in &mut structs {
            match *name {
                "dentry" => *members = &dentry,
                "mount" => *members = &mount,
                "inode" => *members = &inode,
                "file" => *members = &file,
                _ => {}
            }
        }
        structs.extend([
            (
                "mm_struct",
                &[
                    ("pgd", 0, WORD),
                    ("arg_start", 8, WORD),
                    ("arg_end", 16, WORD),
                    ("env_start", 24, WORD),
                    ("env_end", 32, WORD),
                    ("exe_file", 40, WORD),
                ][..],
            ),
            (
                "task_struct",
                &[("fs", 0, WORD), ("thread_pid", 8, WORD), ("cred", 16, WORD)],
            ),
            (
                "fs_struct",
                &[
                    ("root", 0, Member::Of("path")),
                    ("pwd", 16, Member::Of("path")),
                ],
            ),
            ("upid", &[("nr", 0, HALF), ("ns", 8, WORD)]),
            (
                "pid",
                &[("level", 4, HALF), ("numbers", 0x60, Member::Of("upid"))],
            ),
            ("cred", &[("euid", 20, HALF)]),
        ]);
        add_types(&mut t, &structs);
        t.finish()
    }

    /// Makes a process that is number 7 in its container, with its map in `/tmp`.
    fn guest() -> TestKernel {
        let mut kernel = TestKernel::default();
        for (number, parent, name) in [
            (ROOT_DENTRY, ROOT_DENTRY, "/"),
            (TMP, ROOT_DENTRY, "tmp"),
            (MAP, TMP, "perf-7.map"),
        ] {
            dentry(&mut kernel, place(number), place(parent), name);
            kernel.put_all(&[(place(number) + 0x30, place(INODE), 8)]);
        }
        let first = place(MOUNT);
        mount(
            &mut kernel,
            first,
            place(ROOT_DENTRY),
            first,
            place(ROOT_DENTRY),
        );
        let page = (RAM / PAGE + PAGE_NUMBER) * 64;
        kernel.put_all(&[
            (first + 0x40, first + 0x40, 8),
            (place(ROOT_DENTRY) + 0xa0, place(TMP) + 0xb0, 8),
            (place(TMP) + 0xa0, place(MAP) + 0xb0, 8),
            (place(TASK), place(FS), 8),
            (place(TASK) + 8, place(PID), 8),
            (place(TASK) + 16, place(CRED), 8),
            (place(FS), vfsmount(first), 8),
            (place(FS) + 8, place(ROOT_DENTRY), 8),
            (place(PID) + 4, 1, 4),
            (place(PID) + 0x70, 7, 4),
            (place(PID) + 0x60, 4711, 4),
            (place(CRED) + 20, USER, 4),
            (place(INODE) + 4, USER, 4),
            (place(INODE) + 0x50, TEXT.len() as u64, 8),
            (place(INODE) + 0x70, place(MAPPING), 8),
            (place(MAPPING), place(INODE), 8),
            (place(MAPPING) + 16, VMEMMAP + page, 8),
            (BASE + page, 1 << 3, 8),
            (BASE + page + 24, place(MAPPING), 8),
        ]);
        kernel.put(BASE + PAGE_NUMBER * PAGE, TEXT);
        kernel
    }

    /// Returns the name of an address, and the reasons why it may have none.
    fn named(changes: &[(u64, u64, usize)]) -> (Option<String>, Vec<String>) {
        let mut kernel = guest();
        kernel.put_all(changes);
        let paused = PausedMemory::new(&kernel.memory);
        let running = RunningKernel::new(symbols(&[]), Ok(btf()), kernel.space);
        let system = System::new(&running, &paused);
        let task = TaskInfo {
            address: Gva(place(TASK)),
            pid: 4711,
            tgid: 4711,
            parent: 1,
            process_group: 1,
            session: 1,
            state: TaskState::Sleeping,
            comm: [0; 16],
            start_time: 0,
            flags: 0,
            mm: None,
            threads: 1,
            priority: 20,
            nice: 0,
            cpu: 0,
            on_cpu: None,
        };
        let code = GeneratedCode::new(system.look(&paused, &[]), &task, &Budget::default());
        assert_eq!(
            code.lost().count(),
            0,
            "nothing is read before it is asked for"
        );
        let (map, path) = code.get();
        assert_eq!(path, "/tmp/perf-7.map");
        let found = map.resolve(0x7f00_0000_0008);
        (
            found.map(|(name, _)| name.into_owned()),
            code.lost().collect(),
        )
    }

    #[test]
    fn generated_code_is_named_by_the_processs_own_file() {
        let name = Some("LazyCompile:~run".to_owned());
        let owner = place(INODE) + 4;
        assert_eq!(named(&[]), (name.clone(), Vec::new()));
        assert_eq!(
            named(&[(owner, 0, 4)]),
            (name, Vec::new()),
            "written by root"
        );
        // There is no such file.
        assert_eq!(named(&[(place(MAP) + 0x10, 0, 8)]), (None, Vec::new()));
        assert_eq!(
            named(&[(place(TASK), 0, 8)]),
            (None, Vec::new()),
            "it has ended"
        );
        for (changes, part) in [
            (
                (owner, 1001, 4),
                "/tmp/perf-7.map: it belongs to another user",
            ),
            (
                (place(MAPPING) + 16, 0, 8),
                "1 of its pages are not in the guest's memory",
            ),
            (
                (place(INODE) + 0x70, 8, 8),
                "address_space: its pointer is 0x8",
            ),
            ((place(TASK) + 16, 8, 8), "cred: its pointer is 0x8"),
            ((place(TMP) + 0xa0, 8, 8), "no file found: "),
        ] {
            let (found, lost) = named(&[changes]);
            assert_eq!((found, lost.len()), (None, 1), "{part}");
            assert_says(&lost[0], part);
        }
    }

    #[test]
    fn of_a_large_file_the_start_is_read() {
        let (found, lost) = named(&[(place(INODE) + 0x50, 1 << 40, 8)]);
        assert!(found.is_some());
        assert_says(
            &lost[0],
            "of its 1099511627776 bytes only the first 16777216 are used",
        );
        assert_says(&lost[1], "4095 of its pages are not in the guest's memory");
    }
}
