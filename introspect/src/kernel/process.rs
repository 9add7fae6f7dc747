//! A process: its address space, command line, environment, program and directories.
//!
//! The caller keeps the machine paused, and has a task and its `mm_struct` from
//! [`super::task_list`]. Command line and environment are the process's own memory. The process can
//! write anything there, and pages of it may be swapped out.

use super::btf::Btf;
use super::layout::{LayoutError, offset};
use super::path::{PathLayout, PathRef};
use super::structure::{Structure, StructureError};
use crate::x86_64::{AddressSpace, PAGE, ReadVirtualError, TranslateError};
use crate::{Gva, MemoryView};

/// The maximum size in bytes of an auxiliary vector that is read; it has about 400.
const MAX_AUXILIARY: u64 = 4096;

/// An error in reading a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ProcessError {
    /// A structure is broken.
    #[error(transparent)]
    Structure(#[from] StructureError),
    /// The page tables are not in memory.
    #[error("the mm_struct at {mm} has its page tables at {tables}: {source}")]
    NoPageTables {
        /// The address of the `mm_struct`.
        mm: Gva,
        /// The value of `pgd`.
        tables: Gva,
        /// The error of the page walk.
        source: TranslateError,
    },
    /// The page tables do not start at a page.
    #[error(
        "the mm_struct at {mm} has its page tables at {tables}, which is not the start of a page"
    )]
    OddPageTables {
        /// The address of the `mm_struct`.
        mm: Gva,
        /// The value of `pgd`.
        tables: Gva,
    },
}

/// Strings in a process's memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessText {
    /// The strings' bytes, each string with its NUL.
    pub bytes: Vec<u8>,
    /// The reason why the rest could not be read: usually a page that is not present.
    pub missing: Option<ReadVirtualError>,
    /// Whether there are more bytes than requested.
    pub cut: bool,
}

impl ProcessText {
    const NONE: Self = Self {
        bytes: Vec::new(),
        missing: None,
        cut: false,
    };

    /// Returns the strings, without their NULs.
    pub fn strings(&self) -> impl Iterator<Item = &[u8]> {
        let text = self.bytes.strip_suffix(b"\0").unwrap_or(&self.bytes);
        let count = if self.bytes.is_empty() { 0 } else { usize::MAX };
        text.split(|byte| *byte == 0).take(count)
    }
}

/// The offsets in `mm_struct` and `fs_struct`.
#[derive(Debug, Clone)]
pub struct ProcessLayout {
    /// Offsets in `mm_struct`.
    page_tables: u64,
    arguments: Bounds,
    environment: Bounds,
    executable: u64,
    /// The offset and the size in bytes of `saved_auxv`, if it is known.
    auxiliary: Option<(u64, u64)>,
    /// Offset in `task_struct`.
    file_system: u64,
    /// Offset in `task_struct` of the base of FS of a thread that does not run, if it is known.
    fs_base: Option<u64>,
    /// Offsets of `struct path` in `fs_struct`.
    root: u64,
    working_directory: u64,
    paths: PathLayout,
}

/// The offsets of the first address and of the end address.
type Bounds = [u64; 2];

impl ProcessLayout {
    /// Looks up the offsets.
    ///
    /// # Errors
    /// If the kernel's types do not describe them.
    pub fn new(btf: &Btf) -> Result<Self, LayoutError> {
        let range = |start, end| -> Result<Bounds, LayoutError> {
            Ok([offset(btf, start, 8)?, offset(btf, end, 8)?])
        };
        Ok(Self {
            page_tables: offset(btf, "mm_struct.pgd", 8)?,
            arguments: range("mm_struct.arg_start", "mm_struct.arg_end")?,
            environment: range("mm_struct.env_start", "mm_struct.env_end")?,
            executable: offset(btf, "mm_struct.exe_file", 8)?,
            auxiliary: btf
                .member("mm_struct.saved_auxv")
                .ok()
                .map(|member| (member.byte_offset, member.size)),
            fs_base: offset(btf, "task_struct.thread.fsbase", 8).ok(),
            file_system: offset(btf, "task_struct.fs", 8)?,
            root: btf.member("fs_struct.root")?.byte_offset,
            working_directory: btf.member("fs_struct.pwd")?.byte_offset,
            paths: PathLayout::new(btf)?,
        })
    }

    /// Returns the layout for the paths of the process's files.
    #[must_use]
    pub fn paths(&self) -> &PathLayout {
        &self.paths
    }

    /// Returns the address space of an `mm_struct`. With page-table isolation, the kernel keeps two
    /// for each process. This is the kernel's, which maps the process's memory as well.
    ///
    /// # Errors
    /// If it cannot be read, or the address of the page tables is invalid.
    pub fn address_space(
        &self,
        view: MemoryView<'_>,
        mm: Gva,
    ) -> Result<AddressSpace, ProcessError> {
        let tables = Structure::at(view, "mm_struct", mm)?
            .follow_always(self.page_tables, "mm_struct.pgd")?
            .address();
        if tables.0 % PAGE != 0 {
            return Err(ProcessError::OddPageTables { mm, tables });
        }
        let (root, _) = view
            .locate(tables)
            .map_err(|source| ProcessError::NoPageTables { mm, tables, source })?;
        let levels = view.space().levels;
        Ok(AddressSpace { root, levels })
    }

    /// Reads the command line, as in `/proc/PID/cmdline`: the arguments, or the title that the
    /// process wrote over them. Reads at most `most` bytes. It is empty while the process is being
    /// created.
    ///
    /// # Errors
    /// If the `mm_struct` or its page tables cannot be read. Unreadable strings are reported in the
    /// result.
    pub fn command_line(
        &self,
        view: MemoryView<'_>,
        mm: Gva,
        most: usize,
    ) -> Result<ProcessText, ProcessError> {
        let structure = Structure::at(view, "mm_struct", mm)?;
        let (start, end) = range(&structure, self.arguments)?;
        let (next, last) = range(&structure, self.environment)?;
        if last == 0 || start >= end {
            return Ok(ProcessText::NONE);
        }
        let user = view.with_space(self.address_space(view, mm)?);
        // A longer title overwrites the last argument's NUL, and may continue into the environment.
        let is_title = user.u8(Gva(end - 1)).is_ok_and(|byte| byte != 0);
        if !is_title {
            return Ok(read_text(user, start, end, most));
        }
        let whole = if next == end && last >= next {
            last
        } else {
            end
        };
        let page = usize::try_from(PAGE).unwrap_or_default();
        let mut title = read_text(user, start, whole, most.min(page));
        if let Some(nul) = memchr::memchr(0, &title.bytes) {
            title.bytes.truncate(nul + 1);
            title.cut = false;
            title.missing = None;
        }
        Ok(title)
    }

    /// Reads the environment that the program was started with, as in `/proc/PID/environ`. Later
    /// changes are stored elsewhere. Reads at most `most` bytes.
    ///
    /// # Errors
    /// If the `mm_struct` or its page tables cannot be read. Unreadable strings are reported in the
    /// result.
    pub fn environment(
        &self,
        view: MemoryView<'_>,
        mm: Gva,
        most: usize,
    ) -> Result<ProcessText, ProcessError> {
        let structure = Structure::at(view, "mm_struct", mm)?;
        let (start, end) = range(&structure, self.environment)?;
        if start >= end {
            return Ok(ProcessText::NONE);
        }
        let user = view.with_space(self.address_space(view, mm)?);
        Ok(read_text(user, start, end, most))
    }

    /// Returns the address of the program's `struct file`; `None` if it has none.
    ///
    /// # Errors
    /// If the `mm_struct` cannot be read.
    pub fn executable(&self, view: MemoryView<'_>, mm: Gva) -> Result<Option<Gva>, StructureError> {
        Structure::at(view, "mm_struct", mm)?.pointer(self.executable)
    }

    /// Reads the auxiliary vector of a process, as in `/proc/PID/auxv`: pairs of words, the last
    /// one of which is `AT_NULL`. Returns `None` if the kernel's types do not describe it.
    ///
    /// # Errors
    /// If the `mm_struct` cannot be read.
    pub fn auxiliary_vector(
        &self,
        view: MemoryView<'_>,
        mm: Gva,
    ) -> Result<Option<Vec<u8>>, ReadVirtualError> {
        const PAIR: usize = 16;
        let Some((offset, size)) = self.auxiliary else {
            return Ok(None);
        };
        let size = usize::try_from(size.min(MAX_AUXILIARY)).unwrap_or_default();
        let mut vector = view.bytes(Gva(mm.0.wrapping_add(offset)), size)?;
        let pairs = vector.chunks_exact(PAIR);
        let last = pairs.take_while(|pair| pair.iter().take(8).any(|byte| *byte != 0));
        let used = PAIR * (last.count() + 1);
        vector.truncate(used);
        Ok(Some(vector))
    }

    /// Returns the base of FS that a task resumes with: the thread-local storage of its program.
    /// It is stale while the task runs. Returns `None` if the kernel's types do not describe it.
    ///
    /// # Errors
    /// If the task cannot be read.
    pub fn fs_base(&self, view: MemoryView<'_>, task: Gva) -> Result<Option<u64>, StructureError> {
        let base = |offset| Structure::at(view, "task_struct", task)?.u64(offset);
        self.fs_base.map(base).transpose()
    }

    /// Returns the root directory of a task; `None` once it has ended.
    ///
    /// # Errors
    /// If a structure on the way cannot be read.
    pub fn root(&self, view: MemoryView<'_>, task: Gva) -> Result<Option<PathRef>, StructureError> {
        self.directory(view, task, self.root)
    }

    /// Returns the working directory of a task; `None` once it has ended.
    ///
    /// # Errors
    /// If a structure on the way cannot be read.
    pub fn working_directory(
        &self,
        view: MemoryView<'_>,
        task: Gva,
    ) -> Result<Option<PathRef>, StructureError> {
        self.directory(view, task, self.working_directory)
    }

    fn directory(
        &self,
        view: MemoryView<'_>,
        task: Gva,
        member: u64,
    ) -> Result<Option<PathRef>, StructureError> {
        let task = Structure::at(view, "task_struct", task)?;
        match task.follow(self.file_system, "fs_struct")? {
            Some(file_system) => self.paths.read(view, file_system.member(member)),
            None => Ok(None),
        }
    }
}

fn range(mm: &Structure<'_>, [start, end]: Bounds) -> Result<(u64, u64), StructureError> {
    Ok((mm.u64(start)?, mm.u64(end)?))
}

/// Reads user memory from `start` to `end`, at most `most` bytes, up to the first page that is not
/// present.
fn read_text(user: MemoryView<'_>, start: u64, end: u64, most: usize) -> ProcessText {
    let wanted = usize::try_from(end.saturating_sub(start)).unwrap_or(usize::MAX);
    let mut text = ProcessText {
        cut: wanted > most,
        ..ProcessText::NONE
    };
    let wanted = wanted.min(most);
    while text.bytes.len() < wanted {
        let at = start.wrapping_add(text.bytes.len() as u64);
        let in_page = usize::try_from(PAGE - at % PAGE).unwrap_or(1);
        match user.bytes(Gva(at), in_page.min(wanted - text.bytes.len())) {
            Ok(part) => text.bytes.extend(part),
            Err(missing) => {
                text.missing = Some(missing);
                break;
            }
        }
    }
    text
}

#[cfg(test)]
pub(crate) mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::kernel::path::test_paths;
    use crate::kernel::test_kernel::{self, BASE, Member, TestKernel, WORD};
    use crate::test_memory::Flags;
    use crate::test_says::assert_says;
    use crate::{Gpa, PausedMemory};

    const MM: u64 = BASE + 0x1000;
    const TASK: u64 = BASE + 0x2000;
    const FS: u64 = BASE + 0x3000;
    /// The address of the page with the process's strings; the page after it is not present.
    const STRINGS: u64 = 0x7ffd_1000;

    pub(crate) fn types() -> Btf {
        let mut structs = test_paths::STRUCTS.to_vec();
        structs.push((
            "mm_struct",
            &[
                ("pgd", 0x10, WORD),
                ("arg_start", 0x20, WORD),
                ("arg_end", 0x28, WORD),
                ("env_start", 0x30, WORD),
                ("env_end", 0x38, WORD),
                ("exe_file", 0x40, WORD),
            ],
        ));
        let task = [("fs", 0x18, WORD)];
        structs.push(("task_struct", &task));
        let fs = [
            ("root", 0x18, Member::Of("path")),
            ("pwd", 0x28, Member::Of("path")),
        ];
        structs.push(("fs_struct", &fs));
        test_kernel::types(&structs)
    }

    fn layout() -> ProcessLayout {
        ProcessLayout::new(&types()).unwrap()
    }

    /// Makes a process with strings, and the bounds of its arguments and environment.
    fn guest(strings: &[u8], borders: [u64; 4]) -> TestKernel {
        let mut kernel = TestKernel::default();
        // Its page tables are in memory that the kernel maps.
        let process = AddressSpace {
            root: Gpa(kernel.physical(BASE + 0x10_0000)),
            levels: 4,
        };
        let page = kernel.physical(BASE + 0x11_0000);
        let flags = Flags::default().writable().user();
        kernel.memory.map(process, STRINGS, page, 4096, flags);
        kernel.put(BASE + 0x11_0000, strings);
        kernel.put_all(&[
            (MM + 0x10, BASE + 0x10_0000, 8),
            (MM + 0x20, borders[0], 8),
            (MM + 0x28, borders[1], 8),
            (MM + 0x30, borders[2], 8),
            (MM + 0x38, borders[3], 8),
            (MM + 0x40, BASE + 0x4000, 8),
            (TASK + 0x18, FS, 8),
            (FS + 0x28, BASE + 0x5000, 8),
            (FS + 0x30, BASE + 0x6000, 8),
        ]);
        kernel
    }

    #[test]
    fn command_lines_are_read_as_proc_shows_them() {
        /// The distance from the strings to address 0.
        const NONE: u64 = STRINGS.wrapping_neg();
        for (strings, borders, most, expected, cut) in [
            ("ls\0-l\0A=1\0", [0, 6, 6, 10], 99, "ls\0-l\0", false),
            ("ls\0-l\0A=1\0", [0, 6, 6, 10], 4, "ls\0-", true),
            // A title that reaches into the environment, one that does not, and one whose
            // environment does not follow the arguments.
            ("worker: busy\0", [0, 6, 6, 20], 99, "worker: busy\0", false),
            ("abcdef\0\0\0\0", [0, 6, 6, 10], 99, "abcdef\0", false),
            ("worker: busy\0", [0, 6, 8, 20], 99, "worker", false),
            ("early\0", [0, 6, NONE, NONE], 99, "", false),
            ("none\0", [0, 0, 0, 5], 99, "", false),
            ("odd\0", [9, 0, 0, 5], 99, "", false),
        ] {
            let borders = borders.map(|border: u64| STRINGS.wrapping_add(border));
            let kernel = guest(strings.as_bytes(), borders);
            let text = kernel.look(|view| layout().command_line(view, Gva(MM), most).unwrap());
            assert_eq!(text.bytes, expected.as_bytes(), "{borders:x?}");
            assert_eq!((text.cut, text.missing), (cut, None), "{borders:x?}");
        }
    }

    #[test]
    fn strings_on_pages_that_are_not_there_are_told() {
        let page = STRINGS + 0x1000;
        let kernel = guest(b"", [page - 4, page + 8, page + 8, page + 9]);
        let paused = PausedMemory::new(&kernel.memory);
        let view = kernel.view(&paused);
        let text = layout().command_line(view, Gva(MM), 99).unwrap();
        assert_eq!(text.bytes, [0; 4]);
        let missing = text.missing.unwrap().to_string();
        assert_says(&missing, "0x7ffd2000 is not mapped");
        let environment = layout().environment(view, Gva(MM), 99).unwrap();
        assert!(environment.bytes.is_empty() && environment.missing.is_some());
    }

    #[test]
    fn strings_are_told_apart() {
        for (bytes, expected) in [
            (&b""[..], &[][..]),
            (b"\0", &[""]),
            (b"a\0b c\0", &["a", "b c"]),
            (b"a\0\0", &["a", ""]),
            (b"a\0b", &["a", "b"]),
        ] {
            let text = ProcessText {
                bytes: bytes.to_vec(),
                ..ProcessText::NONE
            };
            let found: Vec<&[u8]> = text.strings().collect();
            let expected: Vec<&[u8]> = expected.iter().map(|text: &&str| text.as_bytes()).collect();
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn environment_program_and_directories_are_found() {
        let kernel = guest(
            b"ls\0A=1\0B=2\0",
            [STRINGS, STRINGS + 3, STRINGS + 3, STRINGS + 11],
        );
        let paused = PausedMemory::new(&kernel.memory);
        let view = kernel.view(&paused);
        let layout = layout();
        let environment = layout.environment(view, Gva(MM), 99).unwrap();
        assert_eq!(environment.bytes, b"A=1\0B=2\0");
        let program = layout.executable(view, Gva(MM));
        assert_eq!(program, Ok(Some(Gva(BASE + 0x4000))));
        let here = PathRef {
            mount: Gva(BASE + 0x5000),
            dentry: Gva(BASE + 0x6000),
        };
        assert_eq!(layout.working_directory(view, Gva(TASK)), Ok(Some(here)));
        assert_eq!(layout.root(view, Gva(TASK)), Ok(None), "not set up");
        let ended = Gva(TASK + 0x100);
        assert_eq!(layout.root(view, ended), Ok(None), "no fs_struct");
    }

    #[test]
    fn page_tables_that_are_none_are_refused() {
        for (tables, part) in [
            (0, "mm_struct.pgd: its pointer is 0x0"),
            (
                BASE + 8,
                "at 0xffff888001000008, which is not the start of a page",
            ),
            (
                BASE + 0x7000_0000,
                "has its page tables at 0xffff888071000000: ",
            ),
        ] {
            let mut kernel = guest(b"ls\0", [STRINGS, STRINGS + 3, STRINGS + 3, STRINGS + 3]);
            kernel.put_all(&[(MM + 0x10, tables, 8)]);
            let paused = PausedMemory::new(&kernel.memory);
            let view = kernel.view(&paused);
            assert_says(layout().address_space(view, Gva(MM)).unwrap_err(), part);
            layout().command_line(view, Gva(MM), 9).unwrap_err();
        }
    }
}
