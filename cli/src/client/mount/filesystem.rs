//! The file system's answers to the kernel.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, LockOwner, OpenAccMode, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite, ReplyXattr, Request, TimeOrNow,
    WriteFlags,
};

use crate::client::mount::Sockets;
use crate::client::mount::open::{Open, Refused};
use crate::protocol::ports::Target;
use crate::protocol::ports::{ControlName, EventName};

/// The lifetime of unchanging facts in the kernel's caches.
const FOREVER: Duration = Duration::from_secs(3600);

/// A file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Name {
    /// A file served over messages: a port, or the machine's counts.
    Port(Target),
    /// The device dt(4).
    Dt,
}

/// The files in the order of their listing. An inode is 2 plus the index, because the folder has 1.
const FILES: [Name; 6] = [
    Name::Port(Target::Control(ControlName::Tracectl)),
    Name::Port(Target::Events(EventName::Trace)),
    Name::Port(Target::Control(ControlName::Ptracectl)),
    Name::Port(Target::Events(EventName::Ptrace)),
    Name::Dt,
    Name::Port(Target::Stat),
];

impl Name {
    fn of(inode: INodeNo) -> Option<Self> {
        let place = usize::try_from(inode.0.checked_sub(2)?).ok()?;
        FILES.get(place).copied()
    }

    /// Returns the name in the listing.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Port(target) => target.as_str(),
            Self::Dt => "dt",
        }
    }

    fn mode(self) -> u16 {
        match self {
            Self::Port(Target::Control(_)) => 0o664,
            Self::Port(Target::Events(_)) => 0o440,
            Self::Port(Target::Stat) => 0o444,
            Self::Dt => 0o660,
        }
    }
}

/// The file system. The threads that answer share its content.
pub struct Tree(Arc<Shared>);

struct Shared {
    machine: Sockets,
    made: SystemTime,
    files: Mutex<Files>,
    /// The last failed operation, for `stat`.
    last_error: Mutex<Option<String>>,
}

#[derive(Default)]
struct Files {
    /// The open files by the kernel's handle. Reads of one open are serialised.
    open: BTreeMap<u64, (Name, Arc<Mutex<Open>>)>,
    next: u64,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn attributes(&self, inode: INodeNo) -> Option<FileAttr> {
        let (kind, perm) = match inode {
            INodeNo::ROOT => (FileType::Directory, 0o555),
            inode => (FileType::RegularFile, Name::of(inode)?.mode()),
        };
        Some(FileAttr {
            ino: inode,
            size: 0,
            blocks: 0,
            atime: self.made,
            mtime: self.made,
            ctime: self.made,
            crtime: self.made,
            kind,
            perm,
            nlink: 1,
            uid: rustix::process::getuid().as_raw(),
            gid: rustix::process::getgid().as_raw(),
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }

    fn file(&self, handle: FileHandle) -> Option<(Name, Arc<Mutex<Open>>)> {
        locked(&self.files).open.get(&handle.0).cloned()
    }

    fn open(&self, name: Name, flags: OpenFlags) -> Result<FileHandle, Errno> {
        let writes = flags.acc_mode() != OpenAccMode::O_RDONLY;
        if writes && matches!(name, Name::Port(Target::Events(_) | Target::Stat)) {
            // Also for root, which file modes do not restrict.
            return Err(Errno::EACCES);
        }
        let open = Open::new(&self.machine, name).map_err(|refused| self.told(name, refused))?;
        let mut files = locked(&self.files);
        files.next += 1;
        let handle = files.next;
        files
            .open
            .insert(handle, (name, Arc::new(Mutex::new(open))));
        Ok(FileHandle(handle))
    }

    fn read(&self, handle: FileHandle, offset: u64, size: u32) -> Result<Vec<u8>, Errno> {
        let (name, open) = self.file(handle).ok_or(Errno::EBADF)?;
        let more = || match (name, &*locked(&self.last_error)) {
            (Name::Port(Target::Stat), Some(error)) => format!("last error: {error}\n"),
            _ => String::new(),
        };
        let read = locked(&open).read(offset, size, more);
        read.map_err(|refused| self.told(name, refused))
    }

    fn write(&self, handle: FileHandle, bytes: &[u8]) -> Result<u32, Errno> {
        let (name, open) = self.file(handle).ok_or(Errno::EBADF)?;
        let written = locked(&open).write(bytes);
        written.map_err(|refused| self.told(name, refused))?;
        u32::try_from(bytes.len()).map_err(|_| Errno::EINVAL)
    }

    /// Keeps the text of an error, because the process gets only its number.
    fn told(&self, name: Name, refused: Refused) -> Errno {
        let text = refused.text.replace('\n', " ");
        *locked(&self.last_error) = Some(format!("{}: {text}", name.as_str()));
        Errno::from_i32(refused.errno)
    }
}

impl Tree {
    /// Returns the file system of a machine.
    pub fn new(machine: Sockets) -> Self {
        Self(Arc::new(Shared {
            machine,
            made: SystemTime::now(),
            files: Mutex::default(),
            last_error: Mutex::default(),
        }))
    }

    /// Does slow work on a thread of its own. Without a thread the reply is dropped, which is an
    /// error for the process.
    fn beside(&self, work: impl FnOnce(&Shared) + Send + 'static) {
        let shared = self.0.clone();
        let thread = std::thread::Builder::new().name("mount".into());
        if let Err(error) = thread.spawn(move || work(&shared)) {
            log::warn!("mount: no thread for a request: {error}");
        }
    }
}

impl Filesystem for Tree {
    fn lookup(&self, _: &Request, _parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let mut inodes = (2..).map(INodeNo).zip(FILES);
        let found = inodes.find(|(_, file)| name == file.as_str());
        match found.and_then(|(inode, _)| self.0.attributes(inode)) {
            Some(attributes) => reply.entry(&FOREVER, &attributes, Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.0.attributes(inode) {
            Some(attributes) => reply.attr(&FOREVER, &attributes),
            None => reply.error(Errno::ENOENT),
        }
    }

    /// Accepts truncation, which a shell requests on redirection and which has no effect here. All
    /// other attributes stay.
    fn setattr(
        &self,
        _: &Request,
        inode: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _handle: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let is_cut = size.is_some() && (mode, uid, gid) == (None, None, None);
        match self.0.attributes(inode) {
            Some(attributes) if is_cut => reply.attr(&FOREVER, &attributes),
            _ => reply.error(Errno::EPERM),
        }
    }

    fn open(&self, _: &Request, inode: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let Some(name) = Name::of(inode) else {
            return reply.error(Errno::EISDIR);
        };
        self.beside(move |shared| match shared.open(name, flags) {
            // Bypasses the page cache: each read is one of the port, and the size of 0 ends none.
            Ok(handle) => reply.opened(handle, FopenFlags::FOPEN_DIRECT_IO),
            Err(errno) => reply.error(errno),
        });
    }

    fn read(
        &self,
        _: &Request,
        _inode: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.beside(move |shared| match shared.read(handle, offset, size) {
            Ok(bytes) => reply.data(&bytes),
            Err(errno) => reply.error(errno),
        });
    }

    fn write(
        &self,
        _: &Request,
        _inode: INodeNo,
        handle: FileHandle,
        _offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let data = data.to_vec();
        self.beside(move |shared| match shared.write(handle, &data) {
            Ok(written) => reply.written(written),
            Err(errno) => reply.error(errno),
        });
    }

    fn flush(
        &self,
        _: &Request,
        _inode: INodeNo,
        _handle: FileHandle,
        _owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        reply.ok();
    }

    /// Closes the connection to the machine: here, or at the end of its last read.
    fn release(
        &self,
        _: &Request,
        _inode: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        let closed = locked(&self.0.files).open.remove(&handle.0);
        drop(closed);
        reply.ok();
    }

    fn readdir(
        &self,
        _: &Request,
        inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        if inode != INodeNo::ROOT {
            return reply.error(Errno::ENOTDIR);
        }
        let folders = [".", ".."].map(|name| (INodeNo::ROOT, FileType::Directory, name));
        let files = (2..).map(INodeNo).zip(FILES);
        let files = files.map(|(inode, file)| (inode, FileType::RegularFile, file.as_str()));
        let entries = (1..).zip(folders.into_iter().chain(files));
        for (next, (inode, kind, name)) in entries.filter(|(next, _)| *next > offset) {
            if reply.add(inode, next, kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn mknod(
        &self,
        _: &Request,
        _parent: INodeNo,
        _name: &OsStr,
        _mode: u32,
        _umask: u32,
        _rdev: u32,
        reply: ReplyEntry,
    ) {
        reply.error(Errno::EPERM);
    }

    fn mkdir(
        &self,
        _: &Request,
        _parent: INodeNo,
        _name: &OsStr,
        _mode: u32,
        _umask: u32,
        reply: ReplyEntry,
    ) {
        reply.error(Errno::EPERM);
    }

    fn create(
        &self,
        _: &Request,
        _parent: INodeNo,
        _name: &OsStr,
        _mode: u32,
        _umask: u32,
        _flags: i32,
        reply: ReplyCreate,
    ) {
        reply.error(Errno::EPERM);
    }

    fn unlink(&self, _: &Request, _parent: INodeNo, _name: &OsStr, reply: ReplyEmpty) {
        reply.error(Errno::EPERM);
    }

    fn rmdir(&self, _: &Request, _parent: INodeNo, _name: &OsStr, reply: ReplyEmpty) {
        reply.error(Errno::EPERM);
    }

    fn rename(
        &self,
        _: &Request,
        _parent: INodeNo,
        _name: &OsStr,
        _new_parent: INodeNo,
        _new_name: &OsStr,
        _flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        reply.error(Errno::EPERM);
    }

    fn getxattr(&self, _: &Request, _: INodeNo, _: &OsStr, _size: u32, reply: ReplyXattr) {
        reply.error(Errno::ENOSYS);
    }

    fn listxattr(&self, _: &Request, _: INodeNo, _size: u32, reply: ReplyXattr) {
        reply.error(Errno::ENOSYS);
    }
}
