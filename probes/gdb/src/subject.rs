//! The thing that is debugged: a process of the guest, or its kernel. Each question pauses the
//! guest, which the debugger usually has done already.

use introspect::kernel::vma::Vma;
use introspect::stack::frames::SavedRegisters;
use introspect::system::Unavailable;
use introspect::x86_64::PAGE;
use introspect::x86_64::paging::{self, Translation};
use introspect::{Gpa, Gva, MemoryView};
use probes::engine::Filter;
use probes::probe::Probe;
use probes::provider::Traceable;

use crate::registers::ThreadRegisters;

/// The maximum number of threads listed.
pub(crate) const MAX_THREADS: usize = 1 << 16;

/// A question about the process or the kernel that has no answer.
#[derive(Debug, Clone, thiserror::Error)]
pub enum DebugError {
    /// The guest's kernel is not known, or cannot be paused.
    #[error("the guest cannot be read: {0}")]
    Guest(String),
    /// The kernel's structures do not tell.
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
    /// There is no such process.
    #[error("the guest has no process {pid}; see ps")]
    NoProcess {
        /// The number that was asked for.
        pid: i32,
    },
    /// The process is a thread of the kernel.
    #[error("{pid} is a thread of the kernel, which has no program to debug; see --kernel")]
    KernelThread {
        /// The number that was asked for.
        pid: i32,
    },
    /// The probes of the debugger cannot be enabled.
    #[error("the guest cannot be stopped at a probe of the debugger: {0}")]
    Session(String),
}

/// A thread as a debugger lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Thread {
    pub(crate) number: i32,
    /// The name and the state, as ps(1) shows them.
    pub(crate) description: String,
    /// Whether it has begun to exit.
    pub(crate) is_exiting: bool,
    /// Whether a CPU runs it now.
    pub(crate) is_running: bool,
}

/// A file for the client.
#[derive(Debug, Clone)]
pub(crate) enum File {
    /// A file in the page cache, by its path, with its size in bytes.
    Cached(Vec<u8>, u64),
    /// A text that was made when the file was opened.
    Text(Vec<u8>),
}

/// A process of the guest, or its kernel.
pub(crate) trait Subject {
    /// Returns the guest.
    fn guest(&self) -> &dyn Traceable;

    /// Forgets the facts that hold only while the guest is paused.
    fn goes_on(&self);

    /// Returns the filter for hits of it, or of one thread of it.
    fn filter(&self, thread: Option<i32>) -> Filter;

    /// Returns the number of the thread that a hit is of: the kernel's number, on a vCPU.
    fn number_of_hit(&self) -> NumberOfHit;

    /// Returns the threads. The first one is that of a client without a choice.
    fn threads(&self) -> Result<Vec<Thread>, DebugError>;

    /// Returns the number of the process whose first thread has the `task_struct` at `address`;
    /// `None` if it is another thread, or the subject has no children.
    fn child_at(&self, address: u64) -> Result<Option<i32>, DebugError>;

    /// Returns the registers of a thread, as far as they are known.
    fn registers(&self, thread: i32) -> Result<ThreadRegisters, DebugError>;

    /// Replaces the general registers of a thread. Returns whether it did: not if they are unknown.
    fn change_registers(&self, thread: i32, wanted: &SavedRegisters) -> Result<bool, DebugError>;

    /// Reads memory, as `thread` sees it, without any traps. Returns the number of bytes up to the
    /// first page that is not there.
    fn read(&self, thread: i32, address: u64, buf: &mut [u8]) -> Result<usize, DebugError>;

    /// Replaces memory, as `thread` sees it. Returns whether it did.
    fn change_memory(&self, thread: i32, address: u64, bytes: &[u8]) -> Result<bool, DebugError>;

    /// Returns the probe of the instruction at `address`; `None` if there can be none.
    fn probe_at(&self, address: u64) -> Result<Option<Probe>, DebugError>;

    /// Returns the path of the program, for [`open`](Self::open).
    fn executable(&self) -> Result<Option<Vec<u8>>, DebugError>;

    /// Returns the auxiliary vector.
    fn auxiliary_vector(&self) -> Result<Vec<u8>, DebugError>;

    /// Makes or finds the file at a path; `None` if there is none in the guest's memory.
    fn open(&self, path: &[u8]) -> Result<Option<File>, DebugError>;

    /// Reads bytes of a file of the guest's page cache. Returns their number, or `None` if it is
    /// not there any more.
    fn read_file(
        &self,
        path: &[u8],
        offset: u64,
        buf: &mut [u8],
    ) -> Result<Option<usize>, DebugError>;

    /// Returns the target of the symbolic link at a path.
    fn link(&self, path: &[u8]) -> Option<Vec<u8>>;
}

/// The way in which a hit's thread gets its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NumberOfHit {
    /// It is the kernel's.
    Kernels,
    /// It is the kernel's, but the idle task of vCPU `n` has this number plus `n`: the kernel gives
    /// all of them 0.
    WithIdle(i32),
}

impl NumberOfHit {
    /// Returns the number of the thread of a hit on a vCPU, whose number in the kernel may be
    /// unknown.
    pub(crate) fn of(self, thread: Option<u32>, vcpu: usize) -> Option<i32> {
        let number = thread.and_then(|thread| i32::try_from(thread).ok());
        match (self, number) {
            (Self::WithIdle(first), None | Some(0)) => first.checked_add(i32::try_from(vcpu).ok()?),
            (_, number) => number,
        }
    }
}

/// Replaces physical memory, piece by piece. Returns whether it did: not without [`pieces`].
pub(crate) fn change(guest: &dyn Traceable, pieces: Option<Vec<(Gpa, Vec<u8>)>>) -> bool {
    let machine = guest.machine();
    let paused = machine.pause();
    pieces.is_some_and(|pieces| {
        pieces
            .iter()
            .all(|(gpa, bytes)| machine.change_memory(&paused, *gpa, bytes))
    })
}

/// Reads physical memory as it is without any traps.
pub(crate) fn unpatched(guest: &dyn Traceable, gpa: Gpa, part: &mut [u8]) -> bool {
    let machine = guest.machine();
    machine.traps().read_unpatched(gpa, part).is_ok()
}

/// Reads memory piece by piece, none of which crosses a page, by `read`. Returns the number of
/// bytes up to the first piece that it could not read.
pub(crate) fn read_pages(
    address: u64,
    buf: &mut [u8],
    mut read: impl FnMut(u64, &mut [u8]) -> bool,
) -> usize {
    let mut done = 0;
    while let Some(rest) = buf.get_mut(done..).filter(|rest| !rest.is_empty()) {
        let at = address.wrapping_add(done as u64);
        let in_page = usize::try_from(PAGE - at % PAGE).unwrap_or(1);
        let length = in_page.min(rest.len());
        let (part, _) = rest.split_at_mut(length);
        if !read(at, part) {
            break;
        }
        done += length;
    }
    done
}

/// Returns the physical places of bytes at a virtual address, page by page. `None` if one is not
/// mapped, or not `admitted`.
pub(crate) fn pieces(
    view: &MemoryView<'_>,
    address: Gva,
    bytes: &[u8],
    admitted: impl Fn(&Translation) -> bool,
) -> Option<Vec<(Gpa, Vec<u8>)>> {
    let mut pieces = Vec::new();
    let (mut at, mut rest) = (address.0, bytes);
    while !rest.is_empty() {
        let place = paging::translate(view.physical(), view.space(), Gva(at)).ok()?;
        let in_page = usize::try_from(PAGE - at % PAGE).unwrap_or(1);
        let (piece, behind) = rest.split_at(in_page.min(rest.len()));
        if !admitted(&place) {
            return None;
        }
        pieces.push((place.gpa, piece.to_vec()));
        at = at.checked_add(piece.len() as u64)?;
        rest = behind;
    }
    Some(pieces)
}

/// Returns the offset in the file of an address in a mapping.
pub(crate) fn place_in_file(area: &Vma, address: u64) -> Option<u64> {
    area.file?;
    area.file_offset
        .checked_add(address.checked_sub(area.start)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_tasks_have_numbers_of_their_own() {
        let idle = NumberOfHit::WithIdle(1000);
        for (number, thread, vcpu, expected) in [
            (NumberOfHit::Kernels, Some(7), 1, Some(7)),
            (NumberOfHit::Kernels, None, 1, None),
            (idle, Some(7), 1, Some(7)),
            (idle, Some(0), 1, Some(1001)),
            (idle, None, 0, Some(1000)),
            (idle, Some(u32::MAX), 2, Some(1002)),
        ] {
            assert_eq!(number.of(thread, vcpu), expected, "{thread:?}");
        }
    }
}
