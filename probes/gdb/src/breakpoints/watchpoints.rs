//! Watchpoints of the client, as probes of the debugger's session.
//!
//! A client watches any number of bytes. They are divided into pieces that the CPU can watch. As
//! with breakpoints, one that was taken out stays set until the guest goes on without it.

use gdbstub::target::ext::breakpoints::WatchKind;
use introspect::Gva;
use probes::name::ProbeName;
use probes::probe::{Probe, Target};
use probes::provider::watchpoint::PROVIDER;
use vmm::machine::{Access, Watchpoint};

use super::Breakpoints;
use crate::stops::Cause;
use crate::subject::Subject;

/// The number of bytes that a CPU can watch: four pieces of eight bytes.
const MOST: u64 = 32;

/// A watchpoint that is set.
pub(super) struct Watched {
    address: u64,
    length: u64,
    kind: WatchKind,
    probes: Vec<u32>,
    /// Whether the client wants it now.
    wanted: bool,
}

impl Watched {
    fn is(&self, address: u64, length: u64, kind: WatchKind) -> bool {
        (self.address, self.length) == (address, length) && self.kind == kind
    }
}

impl Breakpoints {
    /// Adds a watchpoint. Returns whether the CPU can have it.
    pub(crate) fn watch(
        &mut self,
        subject: &dyn Subject,
        address: u64,
        length: u64,
        kind: WatchKind,
    ) -> bool {
        let known = self.watched.iter_mut();
        if let Some(known) = known
            .into_iter()
            .find(|known| known.is(address, length, kind))
        {
            known.wanted = true;
            return true;
        }
        // Those that are not wanted any more may have its registers.
        self.settle_watched();
        let access = match kind {
            WatchKind::Write => Access::Write,
            // The client leaves out writes by itself: no CPU can.
            WatchKind::Read | WatchKind::ReadWrite => Access::ReadWrite,
        };
        let mut probes = Vec::new();
        for piece in pieces(address, length, access) {
            let at = piece.address().0;
            let probe = Probe {
                name: ProbeName::new(PROVIDER, &format!("{at:#x}"), "", ""),
                signature: None,
                target: Target::Watchpoint(piece),
            };
            match self.hold_at(subject, &probe, None, Cause::Watch { address: at, kind }) {
                Ok(probe) => probes.push(probe),
                Err(error) => {
                    log::info!("{length} bytes at {address:#x} are not watched: {error}");
                    self.disable(probes);
                    return false;
                }
            }
        }
        let is_set = !probes.is_empty();
        if is_set {
            self.watched.push(Watched {
                address,
                length,
                kind,
                probes,
                wanted: true,
            });
        }
        is_set
    }

    /// Takes a watchpoint out. Returns whether there was one.
    pub(crate) fn unwatch(&mut self, address: u64, length: u64, kind: WatchKind) -> bool {
        let mut known = self.watched.iter_mut();
        let known = known.find(|known| known.is(address, length, kind));
        known.is_some_and(|known| std::mem::take(&mut known.wanted))
    }

    /// Checks whether the client wants accesses of this kind at `address`.
    pub(crate) fn wants_access(&self, address: u64, kind: WatchKind) -> bool {
        self.watched.iter().any(|known| {
            let contains = address
                .checked_sub(known.address - known.address % 8)
                .is_some_and(|offset| offset < known.length + 8);
            known.wanted && known.kind == kind && contains
        })
    }

    /// Removes all watchpoints.
    pub(super) fn leave_watched(&mut self) {
        self.watched
            .iter_mut()
            .for_each(|known| known.wanted = false);
        self.settle_watched();
    }

    /// Removes the watchpoints that were taken out.
    pub(super) fn settle_watched(&mut self) {
        let (kept, left) = std::mem::take(&mut self.watched)
            .into_iter()
            .partition(|known| known.wanted);
        self.watched = kept;
        self.disable(left.into_iter().flat_map(|known: Watched| known.probes));
    }
}

/// Returns the pieces of a range that a CPU can watch; none if they are too many.
fn pieces(address: u64, length: u64, access: Access) -> Vec<Watchpoint> {
    let mut pieces = Vec::new();
    let (mut at, mut left) = (address, length);
    if left > MOST || address.checked_add(length).is_none() {
        return pieces;
    }
    while left > 0 {
        let fits = |size: &u64| *size <= left && at.is_multiple_of(*size);
        let size = [8, 4, 2].into_iter().find(fits).unwrap_or(1);
        pieces.extend(Watchpoint::new(Gva(at), size, access));
        (at, left) = (at + size, left - size);
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_divided_into_aligned_pieces() {
        for (address, length, expected) in [
            (0x1000, 8, &[0x1000][..]),
            (0x1000, 16, &[0x1000, 0x1008]),
            (0x1004, 8, &[0x1004, 0x1008]),
            (0x1001, 4, &[0x1001, 0x1002, 0x1004]),
            (0x1000, 3, &[0x1000, 0x1002]),
            (0x1000, 0, &[]),
            (0x1000, 33, &[]),
            (u64::MAX, 2, &[]),
        ] {
            let found = pieces(address, length, Access::Write);
            let found: Vec<_> = found.iter().map(|piece| piece.address().0).collect();
            assert_eq!(found, expected, "{length} bytes at {address:#x}");
        }
    }
}
