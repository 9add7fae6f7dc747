//! The files on the disks of a machine's guest, for what its memory lacks. Each disk is looked at
//! for the first such file, while the guest is paused.

use std::cell::OnceCell;
use std::fmt;
use std::io;

use image::{ReadAt, StoredInode, StoredVolumes};
use introspect::kernel;
use introspect::system::StoredFiles;
use introspect::user::file_bytes::{FileBytes, Missing, MissingCause};
use vmm::machine::{DiskReader, Machine};

/// The disks of a guest, during a pause.
pub(super) struct GuestDisks<'m> {
    machine: &'m Machine,
    volumes: OnceCell<Vec<StoredVolumes>>,
}

impl fmt::Debug for GuestDisks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GuestDisks")
            .field("volumes", &self.volumes)
            .finish_non_exhaustive()
    }
}

impl<'m> GuestDisks<'m> {
    pub(super) fn new(machine: &'m Machine) -> Self {
        Self {
            machine,
            volumes: OnceCell::new(),
        }
    }

    fn volumes(&self) -> &[StoredVolumes] {
        self.volumes.get_or_init(|| {
            let disks = self.machine.disks().into_iter();
            let open = |disk| match StoredVolumes::open(Box::new(Disk(disk))) {
                Ok(volumes) => Some(volumes),
                Err(error) => {
                    log::debug!("the guest's disk: {error}");
                    None
                }
            };
            disks.filter_map(open).collect()
        })
    }
}

impl StoredFiles for GuestDisks<'_> {
    fn open(&self, inode: &kernel::stored_inode::StoredInode) -> Option<Box<dyn FileBytes + '_>> {
        let wanted = StoredInode {
            file_system: inode.file_system,
            number: inode.number,
            generation: inode.generation,
            size: inode.size,
            sectors: inode.sectors,
            changed: inode.changed,
        };
        let volumes = self.volumes().iter();
        let mut files = volumes.flat_map(|volumes| volumes.files(&wanted));
        let file = files.next()?;
        // Two copies of a file system cannot be told apart.
        files.next().is_none().then(|| Box::new(File(file)) as _)
    }
}

struct Disk(DiskReader);

impl ReadAt for Disk {
    fn length(&self) -> u64 {
        self.0.length()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.0.read_at(buffer, offset)
    }
}

struct File(image::File);

impl FileBytes for File {
    fn size(&self) -> u64 {
        self.0.length()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Missing> {
        self.0.read_at(buf, offset).map_err(|error| Missing {
            offset,
            length: buf.len() as u64,
            cause: match error.kind() {
                io::ErrorKind::UnexpectedEof => MissingCause::PastEnd { size: self.size() },
                kind => MissingCause::Host(kind),
            },
        })
    }
}
