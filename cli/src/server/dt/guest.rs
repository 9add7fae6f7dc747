//! The guest as the device sees it: its tracepoints, and the files behind addresses of its
//! processes.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, Weak};

use introspect::kernel::page_cache::CachedPage;
use introspect::kernel::vma::VmaFlags;
use introspect::memory_budget::{Held, Purpose};
use introspect::system::PausedSystem;
use introspect::user::file_bytes::{FileBytes, LayeredBytes, PagedBytes};
use introspect::user::object_file::ObjectFile;
use introspect::user::symfs::Symfs;
use introspect::{Gpa, PhysicalMemory, PhysicalReadError};
use probes::kernel_view::KernelView;
use probes::name::ProbePattern;
use probes::probe::Probe;
use probes::provider::{self, tracepoint};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use trace_devices::dt::{Errno, Guest, Mapped, Refused};
use vmm::machine::Handle;

use crate::vm::Vm;

const ENDED: &str = "the machine has ended";
/// The size of a page of the guest's page cache, in bytes.
const PAGE: u64 = 4096;
/// The largest file in bytes that is returned to a client: it takes as much of the host's memory.
const MOST_BYTES: u64 = 512 << 20;

/// The guest of a VM.
pub(super) struct VmGuest {
    /// Weak, because the VM keeps the device's engine.
    vm: Weak<Vm>,
    symfs: Option<Symfs>,
}

impl VmGuest {
    /// Returns the guest of `vm`; `symfs` is a folder with copies of its files.
    pub(super) fn new(vm: &Arc<Vm>, symfs: Option<PathBuf>) -> Self {
        Self {
            vm: Arc::downgrade(vm),
            symfs: symfs.map(Symfs::new),
        }
    }
}

impl Guest for VmGuest {
    fn tracepoints(&self, view: &KernelView) -> Result<Vec<Probe>, String> {
        let vm = self.vm.upgrade().ok_or(ENDED)?;
        let pattern = format!("{}::*:*", tracepoint::PROVIDER);
        let pattern = ProbePattern::parse(&pattern).map_err(|error| error.to_string())?;
        provider::find_tracepoints(&vm.traceable(view), &pattern)
    }

    fn resolve(&self, pid: i32, address: u64) -> Result<Mapped, Refused> {
        let ended = || Refused::new(Errno::Enxio, ENDED);
        let vm = self.vm.upgrade().ok_or_else(ended)?;
        let memory = Unpatched(vm.machine.handle());
        let found = vm
            .inspection()
            .look(|look| mapped(&look, &memory, pid, address, self.symfs.as_ref()));
        found.map_err(unread)?
    }
}

/// The guest's memory without any traps.
struct Unpatched(Handle);

impl PhysicalMemory for Unpatched {
    fn read_physical(&self, address: Gpa, buf: &mut [u8]) -> Result<(), PhysicalReadError> {
        self.0.traps().read_unpatched(address, buf)
    }

    fn ram(&self) -> Vec<Range<u64>> {
        self.0.ram().ram()
    }
}

fn unread(error: impl std::fmt::Display) -> Refused {
    Refused::new(Errno::Eio, error.to_string())
}

fn mapped(
    look: &PausedSystem<'_>,
    memory: &Unpatched,
    pid: i32,
    address: u64,
    symfs: Option<&Symfs>,
) -> Result<Mapped, Refused> {
    let no_process = || Refused::new(Errno::Esrch, format!("no process {pid}"));
    let process = look.process(pid).map_err(unread)?.map_err(unread)?;
    let process = process.ok_or_else(no_process)?;
    let maps = look.maps(&process).map_err(unread)?;
    let none = |why: &str| {
        let why = format!("process {pid} has {why} at {address:#x}");
        Refused::new(Errno::Enoent, why)
    };
    let areas = maps.map(|maps| maps.areas).unwrap_or_default();
    let area = areas.iter().find(|area| area.area.contains(address));
    let area = area.ok_or_else(|| none("nothing mapped"))?;
    let file = area.area.file.ok_or_else(|| none("no file mapped"))?;
    if !area.area.flags.has(VmaFlags::EXEC) {
        return Err(none("a mapping that it may not execute"));
    }
    let layout = look.system().page_cache().map_err(unread)?;
    let cached = layout.open_file(look.kernel(), file).map_err(unread)?;
    if cached.size > MOST_BYTES {
        let why = format!(
            "the file has {} bytes, {MOST_BYTES} are the most that is given to a client",
            cached.size
        );
        return Err(Refused::new(Errno::Enomem, why));
    }
    // Counts against all files being made at once.
    let _held = Held::take(Purpose::Objects, cached.size)
        .map_err(|over| Refused::new(Errno::Enomem, over.to_string()))?;
    let page = |index| match layout.page(look.kernel(), &cached, index) {
        Ok(CachedPage::Present { gpa, .. }) => Some(gpa),
        _ => None,
    };
    let in_memory = PagedBytes::new(memory, cached.size, page);
    let copy = symfs.and_then(|symfs| {
        let wanted = ObjectFile::parse(&in_memory).ok();
        let wanted = wanted.and_then(|object| object.build_id().ok().flatten());
        match symfs.open(&area.name, wanted.as_ref()) {
            // Another file of the same build may have other contents.
            Ok(copy) => (copy.file.size() == cached.size).then_some(copy.file),
            Err(error) => {
                log::info!("dt: {error}");
                None
            }
        }
    });
    let stored = look.stored_file(&cached);
    let mut sources: Vec<&dyn FileBytes> = vec![&in_memory, &stored];
    sources.extend(copy.as_ref().map(|copy| copy as &dyn FileBytes));
    let (file, missing) = filled(&LayeredBytes::new(sources))
        .map_err(|error| Refused::new(Errno::Enomem, error.to_string()))?;
    Ok(Mapped {
        start: area.area.start,
        offset: area.area.file_offset,
        length: cached.size,
        file: file.into(),
        incomplete: (missing > 0).then(|| {
            format!(
                "{}: {missing} pages of {PAGE} bytes are neither in the guest's memory nor on its disk, and are zeros in the client's copy",
                String::from_utf8_lossy(&area.name)
            )
        }),
    })
}

/// Returns a sealed file with the pages that `bytes` has, and the number of the others, which are
/// holes.
fn filled(bytes: &dyn FileBytes) -> io::Result<(File, u64)> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(memfd_create("dt-object", flags)?);
    file.set_len(bytes.size())?;
    let mut missing = 0;
    let mut buffer = [0; PAGE as usize];
    for index in 0..bytes.size().div_ceil(PAGE) {
        let offset = index * PAGE;
        let length = usize::try_from((bytes.size() - offset).min(PAGE)).unwrap_or(0);
        let page = buffer.get_mut(..length).unwrap_or_default();
        match bytes.read_at(offset, page) {
            Ok(()) => file.write_all_at(page, offset)?,
            Err(_) => missing += 1,
        }
    }
    let seals = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
    fcntl_add_seals(&file, seals)?;
    Ok((file, missing))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::{Read, Write};

    use introspect::user::file_bytes::{Missing, MissingCause};
    use introspect::user::symfs::HostFile;

    use super::*;

    const SIZE: u64 = 2 * PAGE + 100;

    /// A file of all but the second page, each page filled with its digit.
    struct Holed;

    impl FileBytes for Holed {
        fn size(&self) -> u64 {
            SIZE
        }

        fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Missing> {
            buf.fill(b'0' + (offset / PAGE) as u8);
            let missing = Missing {
                offset,
                length: buf.len() as u64,
                cause: MissingCause::NotInMemory,
            };
            if offset / PAGE == 1 {
                Err(missing)
            } else {
                Ok(())
            }
        }
    }

    #[test]
    fn a_client_gets_a_copy_with_holes_that_nobody_can_change() {
        let (mut file, missing) = filled(&Holed).unwrap();
        assert_eq!(missing, 1);
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).unwrap();
        assert_eq!(bytes.len() as u64, SIZE);
        let (first, rest) = bytes.split_at(PAGE as usize);
        let (second, last) = rest.split_at(PAGE as usize);
        assert!(first.iter().all(|byte| *byte == b'0'));
        assert!(second.iter().all(|byte| *byte == 0));
        assert_eq!(last, [b'2'; 100]);
        assert!(file.write_all_at(b"x", 0).is_err());
        assert!(file.set_len(0).is_err() && file.set_len(2 * SIZE).is_err());
    }

    #[test]
    fn what_the_guest_lacks_comes_from_the_copy_on_the_host() {
        let mut copy = tempfile::NamedTempFile::new().unwrap();
        copy.write_all(&[b'h'; SIZE as usize]).unwrap();
        let copy = HostFile::open(copy.path()).unwrap();
        let (file, missing) = filled(&LayeredBytes::new(vec![&Holed, &copy])).unwrap();
        assert_eq!(missing, 0);
        let mut bytes = [0; 3];
        for (at, expected) in [(PAGE - 1, b"0hh"), (2 * PAGE - 1, b"h22")] {
            file.read_exact_at(&mut bytes, at).unwrap();
            assert_eq!(&bytes, expected, "at {at:#x}");
        }
    }
}
