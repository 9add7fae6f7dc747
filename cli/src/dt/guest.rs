//! What the device asks of the guest: its tracepoints, and the files behind addresses of its processes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, Weak};

use introspect::kernel::page_cache::{CachedFile, CachedPage};
use introspect::kernel::vma::VmaFlags;
use introspect::system::Look;
use introspect::user::file_bytes::{FileBytes, Missing, MissingCause};
use introspect::user::object_file::ObjectFile;
use introspect::user::symfs::{HostFile, Symfs};
use probes::dt::{Errno, Guest, Mapped, Refused};
use probes::kernel_view::KernelView;
use probes::name::ProbePattern;
use probes::probe::Probe;
use probes::provider::tracepoint;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use vmm::machine::Handle;

use crate::session::Session;

/// Bytes of a page of the guest's page cache.
const PAGE: u64 = 4096;
/// Largest file that is given to a client: it takes as much of the host's memory.
const MOST_BYTES: u64 = 512 << 20;

/// The guest of a session.
pub(super) struct SessionGuest {
    /// The session keeps the device's engine; it must not be kept by it.
    session: Weak<Session>,
    all: Result<Vec<Probe>, String>,
    symfs: Option<PathBuf>,
}

impl SessionGuest {
    /// The guest of `session`, whose kernel `view` is of.
    pub(super) fn new(session: &Arc<Session>, view: &KernelView, symfs: Option<PathBuf>) -> Self {
        Self {
            session: Arc::downgrade(session),
            all: tracepoints(session, view),
            symfs,
        }
    }
}

fn tracepoints(session: &Session, view: &KernelView) -> Result<Vec<Probe>, String> {
    let pattern = format!("{}::*:*", tracepoint::PROVIDER);
    let pattern = ProbePattern::parse(&pattern).map_err(|error| error.to_string())?;
    let handle = session.machine.handle();
    let kernel = session.kernel.as_ref();
    let found = session.inspector.look(&session.machine, kernel, |look| {
        tracepoint::find(&look, &handle, view, &pattern)
    })??;
    for sentence in &found.incomplete {
        log::warn!("not all tracepoints are known: {sentence}");
    }
    Ok(found.probes)
}

impl Guest for SessionGuest {
    fn tracepoints(&self) -> Result<Vec<Probe>, String> {
        self.all.clone()
    }

    fn resolve(&self, pid: i32, address: u64) -> Result<Mapped, Refused> {
        let ended = || Refused::new(Errno::Enxio, "the machine has ended");
        let session = self.session.upgrade().ok_or_else(ended)?;
        let handle = session.machine.handle();
        let kernel = session.kernel.as_ref();
        let found = session.inspector.look(&session.machine, kernel, |look| {
            mapped(&look, &handle, pid, address, self.symfs.as_ref())
        });
        found.map_err(unread)?
    }
}

fn unread(error: impl std::fmt::Display) -> Refused {
    Refused::new(Errno::Eio, error.to_string())
}

fn mapped(
    look: &Look<'_>,
    handle: &Handle,
    pid: i32,
    address: u64,
    symfs: Option<&PathBuf>,
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
    let page = |index: u64, bytes: &mut [u8]| match layout.page(look.kernel(), &cached, index) {
        Ok(CachedPage::Present { gpa, .. }) => handle.traps().read_unpatched(gpa, bytes).is_ok(),
        _ => false,
    };
    let copy = symfs.and_then(|folder| {
        let of_guest = CachedPages(cached.size, &page);
        let wanted = ObjectFile::parse(&of_guest).ok();
        let wanted = wanted.and_then(|object| object.build_id().ok().flatten());
        match Symfs::new(folder).open(&area.name, wanted.as_ref()) {
            // Another file of the same build has its bytes elsewhere.
            Ok(copy) => (copy.file.size() == cached.size).then_some(copy.file),
            Err(error) => {
                log::info!("dt: {error}");
                None
            }
        }
    });
    let (file, missing) = filled(&cached, page, copy.as_ref())
        .map_err(|error| Refused::new(Errno::Enomem, error.to_string()))?;
    Ok(Mapped {
        start: area.area.start,
        offset: area.area.file_offset,
        length: cached.size,
        file: file.into(),
        incomplete: (missing > 0).then(|| {
            format!(
                "{}: {missing} pages of {PAGE} bytes are not in the guest's memory, and zeros in what the client gets",
                String::from_utf8_lossy(&area.name)
            )
        }),
    })
}

/// A file of so many bytes, page by page.
struct CachedPages<'p>(u64, &'p dyn Fn(u64, &mut [u8]) -> bool);

impl FileBytes for CachedPages<'_> {
    fn size(&self) -> u64 {
        self.0
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Missing> {
        let missing = |cause| Missing {
            offset,
            length: buf.len() as u64,
            cause,
        };
        let (not_there, past_end) = (
            missing(MissingCause::NotInMemory),
            missing(MissingCause::PastEnd { size: self.0 }),
        );
        let end = offset.checked_add(buf.len() as u64);
        if end.is_none_or(|end| end > self.0) {
            return Err(past_end);
        }
        let (mut at, mut rest) = (offset, buf);
        let mut page = [0; PAGE as usize];
        while !rest.is_empty() {
            if !(self.1)(at / PAGE, &mut page) {
                return Err(not_there);
            }
            let bytes = page.iter().skip((at % PAGE) as usize);
            let length = bytes.len().min(rest.len());
            let (part, behind) = rest.split_at_mut(length);
            for (place, byte) in part.iter_mut().zip(bytes) {
                *place = *byte;
            }
            at += length as u64;
            rest = behind;
        }
        Ok(())
    }
}

/// A sealed file with the pages that `page` can read, or `copy` has; the others are holes, and counted.
fn filled(
    cached: &CachedFile,
    page: impl Fn(u64, &mut [u8]) -> bool,
    copy: Option<&HostFile>,
) -> io::Result<(File, u64)> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(memfd_create("dt-object", flags)?);
    file.set_len(cached.size)?;
    let mut missing = 0;
    let mut buffer = [0; PAGE as usize];
    for index in 0..cached.size.div_ceil(PAGE) {
        let offset = index * PAGE;
        let length = usize::try_from((cached.size - offset).min(PAGE)).unwrap_or(0);
        let bytes = buffer.get_mut(..length).unwrap_or_default();
        let is_there =
            page(index, bytes) || copy.is_some_and(|copy| copy.read_at(offset, bytes).is_ok());
        match is_there {
            true => file.write_all_at(bytes, offset)?,
            false => missing += 1,
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

    use introspect::Gva;

    use super::*;

    const SIZE: u64 = 2 * PAGE + 100;

    fn cached() -> CachedFile {
        CachedFile {
            mapping: Gva(0),
            inode: Gva(0),
            size: SIZE,
        }
    }

    /// All but the second page.
    fn page(index: u64, bytes: &mut [u8]) -> bool {
        bytes.fill(b'0' + index as u8);
        index != 1
    }

    #[test]
    fn a_client_gets_a_copy_with_holes_that_nobody_can_change() {
        let (mut file, missing) = filled(&cached(), page, None).unwrap();
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
        let (file, missing) = filled(&cached(), page, Some(&copy)).unwrap();
        assert_eq!(missing, 0);
        let mut bytes = [0; 3];
        for (at, expected) in [(PAGE - 1, b"0hh"), (2 * PAGE - 1, b"h22")] {
            file.read_exact_at(&mut bytes, at).unwrap();
            assert_eq!(&bytes, expected, "at {at:#x}");
        }
    }

    #[test]
    fn a_cached_file_is_read_across_pages_and_not_where_one_is_missing() {
        let file = CachedPages(SIZE, &page);
        let mut bytes = [0; 200];
        assert!(file.read_at(2 * PAGE - 100, &mut bytes).is_err());
        assert!(file.read_at(SIZE - 100, &mut bytes).is_err());
        let all = |index: u64, bytes: &mut [u8]| {
            page(index, bytes);
            true
        };
        let file = CachedPages(SIZE, &all);
        file.read_at(2 * PAGE - 100, &mut bytes).unwrap();
        assert_eq!((bytes[99], bytes[100]), (b'1', b'2'));
    }
}
