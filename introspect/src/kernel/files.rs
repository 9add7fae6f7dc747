//! The open files of a process, and the identity of files.
//!
//! The caller keeps the machine paused. Threads usually share one table; each thread's own is read.
//! The numbers are those of `/proc/PID/fd`. A number that is reserved while a file is being opened
//! is left out.

use super::backing_file::BackingLayout;
use super::btf::Btf;
use super::layout::{LayoutError, offset};
use super::list::Partial;
use super::structure::{Structure, StructureError};
use crate::{Gva, MemoryView};

/// The maximum number of files of a table that are looked at: the default of `fs.nr_open`.
const MAX_FILES: u32 = 1 << 20;
/// The maximum number of open files that are returned.
const MAX_OPEN: usize = 1 << 16;
const WORD_BITS: u32 = 64;

/// An error in reading open files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FilesError {
    /// The table is broken.
    #[error(transparent)]
    Table(#[from] StructureError),
    /// A file is broken.
    #[error("the open file {number} is left out: {source}")]
    File {
        /// The file's number.
        number: u32,
        /// The cause.
        source: StructureError,
    },
    /// The table's size is impossible.
    #[error(
        "invalid fdtable at {table}: expected room for a multiple of 64 files up to {MAX_FILES}, found {found}"
    )]
    Size {
        /// Address of the `fdtable`.
        table: Gva,
        /// `max_fds`.
        found: u32,
    },
    /// The table has more open files than are returned.
    #[error("the fdtable at {table} has more than {MAX_OPEN} open files: the others are left out")]
    TooMany {
        /// Address of the `fdtable`.
        table: Gva,
    },
}

/// An open file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenFile {
    /// The file's number in the process.
    pub number: u32,
    /// Whether the file is closed when another program is executed (`O_CLOEXEC`).
    pub close_on_exec: bool,
    /// The `struct file`, which processes that inherited it share.
    pub file: FileInfo,
}

/// A `struct file`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileInfo {
    /// The address, from which [`PathLayout`](super::path::PathLayout) reads the path.
    pub address: Gva,
    /// Flags of open(2): `O_RDWR` and others, without `O_CLOEXEC`.
    pub flags: u32,
    /// Offset of the next read or write, in bytes.
    pub position: i64,
    /// The file's inode.
    pub inode: InodeInfo,
}

/// An inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InodeInfo {
    /// The address.
    pub address: Gva,
    /// The file's identity.
    pub identity: FileIdentity,
    /// The kind of file and its permissions, as `st_mode` of stat(2).
    pub mode: u16,
    /// Size in bytes; meaningless for many special files.
    pub size: i64,
}

/// The identity of a file within the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct FileIdentity {
    /// The major number of the device that holds the file system.
    pub major: u32,
    /// The minor number of that device.
    pub minor: u32,
    /// The number of the inode in its file system.
    pub inode: u64,
}

/// The offsets in tables of open files and in files.
#[derive(Debug, Clone)]
pub struct FilesLayout {
    /// Offset in `task_struct`.
    files: u64,
    /// Offset in `files_struct`.
    table: u64,
    /// Offsets in `fdtable`.
    size: u64,
    array: u64,
    open: u64,
    close_on_exec: u64,
    file: FileLayout,
}

/// The offsets in files and inodes.
#[derive(Debug, Clone)]
struct FileLayout {
    flags: u64,
    position: u64,
    mode: u64,
    size: u64,
    identity: IdentityLayout,
}

/// The offsets of a file's identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct IdentityLayout {
    inode: u64,
    number: u64,
    superblock: u64,
    device: u64,
    backing: Option<BackingLayout>,
}

impl FilesLayout {
    /// Looks up the offsets.
    ///
    /// # Errors
    /// If the kernel's types do not describe them.
    pub fn new(btf: &Btf) -> Result<Self, LayoutError> {
        Ok(Self {
            files: offset(btf, "task_struct.files", 8)?,
            table: offset(btf, "files_struct.fdt", 8)?,
            size: offset(btf, "fdtable.max_fds", 4)?,
            array: offset(btf, "fdtable.fd", 8)?,
            open: offset(btf, "fdtable.open_fds", 8)?,
            close_on_exec: offset(btf, "fdtable.close_on_exec", 8)?,
            file: FileLayout {
                flags: offset(btf, "file.f_flags", 4)?,
                position: offset(btf, "file.f_pos", 8)?,
                mode: offset(btf, "inode.i_mode", 2)?,
                size: offset(btf, "inode.i_size", 8)?,
                identity: IdentityLayout::new(btf)?,
            },
        })
    }

    /// Returns the open files of the task whose `task_struct` is at `task`, ascending by number.
    /// Kernel threads and tasks that have ended have none.
    #[must_use]
    pub fn open_files(&self, view: MemoryView<'_>, task: Gva) -> Partial<OpenFile, FilesError> {
        let mut items = Vec::new();
        let mut error = None;
        if let Err(broken) = self.collect(view, task, &mut items, &mut error) {
            error = Some(broken);
        }
        Partial { items, error }
    }

    fn collect(
        &self,
        view: MemoryView<'_>,
        task: Gva,
        items: &mut Vec<OpenFile>,
        first: &mut Option<FilesError>,
    ) -> Result<(), FilesError> {
        let task = Structure::at(view, "task_struct", task)?;
        let Some(files) = task.follow(self.files, "files_struct")? else {
            return Ok(());
        };
        let table = files.follow_always(self.table, "fdtable")?;
        let found = table.u32(self.size)?;
        if found > MAX_FILES || found % WORD_BITS != 0 {
            let table = table.address();
            return Err(FilesError::Size { table, found });
        }
        let array = table.follow_always(self.array, "fdtable.fd")?;
        let open = table.follow_always(self.open, "fdtable.open_fds")?;
        let close = table.follow_always(self.close_on_exec, "fdtable.close_on_exec")?;
        for word in 0..found / WORD_BITS {
            let place = u64::from(word) * 8;
            let mut bits = open.u64(place)?;
            if bits == 0 {
                continue;
            }
            let closing = close.u64(place)?;
            while bits != 0 {
                let bit = bits.trailing_zeros();
                bits &= bits - 1;
                let number = word * WORD_BITS + bit;
                if items.len() == MAX_OPEN {
                    let table = table.address();
                    return Err(FilesError::TooMany { table });
                }
                let file = array.follow(u64::from(number) * 8, "file");
                match file.and_then(|file| file.map(|file| self.file.read(&file)).transpose()) {
                    Ok(Some(file)) => items.push(OpenFile {
                        number,
                        close_on_exec: closing >> bit & 1 != 0,
                        file,
                    }),
                    Ok(None) => {}
                    Err(source) => *first = first.or(Some(FilesError::File { number, source })),
                }
            }
        }
        Ok(())
    }

    /// Reads the `struct file` at `address`.
    ///
    /// # Errors
    /// If the file or a structure that it points to cannot be read.
    pub fn file(&self, view: MemoryView<'_>, address: Gva) -> Result<FileInfo, StructureError> {
        self.file.read(&Structure::at(view, "file", address)?)
    }
}

impl FileLayout {
    fn read(&self, file: &Structure<'_>) -> Result<FileInfo, StructureError> {
        let (inode, identity) = self.identity.read(file)?;
        Ok(FileInfo {
            address: file.address(),
            flags: file.u32(self.flags)?,
            position: file.u64(self.position)?.cast_signed(),
            inode: InodeInfo {
                address: inode.address(),
                identity,
                mode: inode.u16(self.mode)?,
                size: inode.u64(self.size)?.cast_signed(),
            },
        })
    }
}

impl IdentityLayout {
    pub(super) fn new(btf: &Btf) -> Result<Self, LayoutError> {
        Ok(Self {
            inode: offset(btf, "file.f_inode", 8)?,
            number: offset(btf, "inode.i_ino", 8)?,
            superblock: offset(btf, "inode.i_sb", 8)?,
            device: offset(btf, "super_block.s_dev", 4)?,
            backing: BackingLayout::new(btf),
        })
    }

    /// Reads the inode of a `struct file` and the file's identity. Of a file that stands for one of
    /// an overlay, it is the overlay's, which users see.
    pub(super) fn read<'p>(
        &self,
        file: &Structure<'p>,
    ) -> Result<(Structure<'p>, FileIdentity), StructureError> {
        let backing = self.backing.as_ref();
        let user = backing
            .map(|backing| backing.user_inode(file))
            .transpose()?;
        let inode = match user.flatten() {
            Some(inode) => inode,
            None => file.follow_always(self.inode, "inode")?,
        };
        let superblock = inode.follow_always(self.superblock, "super_block")?;
        let device = superblock.u32(self.device)?;
        let identity = FileIdentity {
            // MAJOR and MINOR, include/linux/kdev_t.h.
            major: device >> 20,
            minor: device & 0xf_ffff,
            inode: inode.u64(self.number)?,
        };
        Ok((inode, identity))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::PausedMemory;
    use crate::kernel::path::test_paths::{STRUCTS, place};
    use crate::kernel::test_kernel::{BASE, HALF, TestKernel, WORD, types};
    use crate::test_says::assert_says;

    const TASK: u64 = BASE + 0x100;
    const FILES: u64 = BASE + 0x200;
    const TABLE: u64 = BASE + 0x300;
    const OPEN: u64 = BASE + 0x400;
    const CLOSE: u64 = BASE + 0x500;
    const ARRAY: u64 = BASE + 0x1000;
    const END: u64 = BASE + 0x20_0000;

    fn layout() -> FilesLayout {
        let mut structs = STRUCTS.to_vec();
        structs.extend([
            ("task_struct", &[("files", 0x18, WORD)][..]),
            ("files_struct", &[("fdt", 0x20, WORD)]),
            (
                "fdtable",
                &[
                    ("max_fds", 0, HALF),
                    ("fd", 8, WORD),
                    ("close_on_exec", 16, WORD),
                    ("open_fds", 24, WORD),
                ],
            ),
        ]);
        FilesLayout::new(&types(&structs)).unwrap()
    }

    /// Makes a task with the files 0, 3 and 64 open and 1 reserved.
    fn guest() -> TestKernel {
        let mut kernel = TestKernel::default();
        kernel.put_all(&[
            (TASK + 0x18, FILES, 8),
            (FILES + 0x20, TABLE, 8),
            (TABLE, 128, 4),
            (TABLE + 8, ARRAY, 8),
            (TABLE + 16, CLOSE, 8),
            (TABLE + 24, OPEN, 8),
            (OPEN, 0b1011, 8),
            (OPEN + 8, 1, 8),
            (CLOSE, 0b1000, 8),
            (ARRAY, place(0), 8),
            (ARRAY + 3 * 8, place(1), 8),
            (ARRAY + 64 * 8, place(0), 8),
        ]);
        for (file, inode) in [(place(0), place(2)), (place(1), place(3))] {
            kernel.put_all(&[(file + 0x28, inode, 8), (inode + 0x28, place(4), 8)]);
        }
        kernel.put_all(&[
            (place(1) + 0x30, 0o102002, 4),
            (place(1) + 0x70, 77, 8),
            (place(3), 0o100644, 2),
            (place(3) + 0x40, 1234, 8),
            (place(3) + 0x50, 4096, 8),
            (place(4) + 0x10, 8 << 20 | 17, 4),
        ]);
        kernel
    }

    fn read(kernel: &TestKernel, task: u64) -> (Vec<OpenFile>, Option<String>) {
        let paused = PausedMemory::new(&kernel.memory);
        let walk = layout().open_files(kernel.view(&paused), Gva(task));
        (walk.items, walk.error.map(|error| error.to_string()))
    }

    #[test]
    fn open_files_are_those_of_proc() {
        let kernel = guest();
        let (files, error) = read(&kernel, TASK);
        let numbers: Vec<u32> = files.iter().map(|file| file.number).collect();
        assert_eq!((numbers, error), (vec![0, 3, 64], None));
        let expected = OpenFile {
            number: 3,
            close_on_exec: true,
            file: FileInfo {
                address: Gva(place(1)),
                flags: 0o102002,
                position: 77,
                inode: InodeInfo {
                    address: Gva(place(3)),
                    identity: FileIdentity {
                        major: 8,
                        minor: 17,
                        inode: 1234,
                    },
                    mode: 0o100644,
                    size: 4096,
                },
            },
        };
        assert_eq!(files.get(1), Some(&expected));
        assert_eq!(
            files.first().map(|file| file.file),
            files.get(2).map(|f| f.file)
        );
        assert_eq!(
            read(&kernel, TASK + 0x40),
            (vec![], None),
            "no files_struct"
        );
    }

    #[test]
    fn broken_tables_and_files_are_told() {
        for (broken, numbers, part) in [
            (
                (TABLE, 65, 4),
                &[][..],
                "fdtable at 0xffff888001000300: expected room for a multiple of 64 files up to 1048576, found 65",
            ),
            ((TABLE, 1 << 21, 4), &[], "found 2097152"),
            (
                (TABLE + 24, 0, 8),
                &[],
                "fdtable.open_fds: its pointer is 0x0",
            ),
            ((FILES + 0x20, 0, 8), &[], "fdtable: its pointer is 0x0"),
            (
                (TABLE + 24, END - 8, 8),
                &[3],
                "fdtable.open_fds at 0xffff8880011ffff8 cannot be read",
            ),
            (
                (ARRAY + 24, 0x1000, 8),
                &[0, 64],
                "the open file 3 is left out: file: its pointer is 0x1000",
            ),
            (
                (place(3) + 0x28, 0, 8),
                &[0, 64],
                "the open file 3 is left out: super_block",
            ),
        ] {
            let mut kernel = guest();
            kernel.put_all(&[(END - 8, 0b1000, 8), broken]);
            let (files, error) = read(&kernel, TASK);
            let found: Vec<u32> = files.iter().map(|file| file.number).collect();
            let error = error.unwrap();
            assert_says(&error, part);
            assert_eq!(found, numbers, "{part}");
        }
    }
}
