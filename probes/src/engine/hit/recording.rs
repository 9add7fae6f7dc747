//! Recording and counting of hits.

use std::cell::OnceCell;

use introspect::Gva;

use super::super::plan::{Enabled, count};
use super::super::program::{Frames, HitOutcome, ProbeHit};
use super::super::strings;
use super::{Hit, HitPath};
use crate::event::{EventKind, Header, MAX_ARGUMENTS, MAX_FRAMES, Recorder};
use crate::ring::Visit;

impl HitPath {
    /// Records a hit of `probe` if its filter admits it.
    pub(in crate::engine) fn fire(&self, hit: &Hit<'_>, probe: &Enabled, fired: &HitData<'_>) {
        if self.admits(hit, probe) {
            self.fire_admitted(hit, probe, fired);
        }
    }

    /// Checks whether the filter of `probe` admits a hit, apart from its rates. A rejected hit is
    /// counted here.
    #[inline]
    pub(super) fn admits(&self, hit: &Hit<'_>, probe: &Enabled) -> bool {
        let admitted = hit.is_admitted_by(&probe.filter);
        if !admitted {
            count(&probe.counters.filtered);
        }
        admitted
    }

    /// Counts and records a hit that [`admits`](Self::admits) has admitted, with nothing but
    /// numbers.
    #[inline(never)]
    pub(super) fn record<const N: usize>(
        &self,
        hit: &Hit<'_>,
        probe: &Enabled,
        pc: u64,
        arguments: impl Fn(&Hit<'_>) -> [u64; N],
    ) {
        let Some(ring) = probe.session.rings.get(hit.vcpu) else {
            return count(&probe.counters.filtered);
        };
        let visit = ring.visit(|| hit.now());
        let header = Header::of(hit, probe, pc);
        let whole = match probe.capture.arguments >= N {
            true => header.push_with(&visit, &arguments(hit)),
            false => None,
        };
        let pushed = match whole {
            Some(pushed) => pushed,
            None => push_some(&visit, &header, &arguments(hit), probe.capture.arguments),
        };
        match pushed {
            true => count(&probe.counters.recorded),
            false => count(&probe.counters.dropped),
        }
        // The record can be drained once its visit has ended.
        drop(visit);
        probe.session.doorbell.ring_if_awaited();
    }

    /// Counts and records a hit that [`admits`](Self::admits) has admitted, if the rates allow it.
    #[inline(never)]
    pub(super) fn fire_admitted(&self, hit: &Hit<'_>, probe: &Enabled, fired: &HitData<'_>) {
        let admitted = probe.filter.admits_rate(|| hit.now(), self.tsc_hz);
        let ring = probe.session.rings.get(hit.vcpu).filter(|_| admitted);
        let Some(ring) = ring else {
            count(&probe.counters.filtered);
            return;
        };
        // The time comes first, since reading the rest may take a while.
        let visit = ring.visit(|| hit.now());
        if let Some(program) = &probe.program {
            let ran = program.run(&ProbeHit {
                path: self,
                hit,
                probe,
                fired,
                visit: &visit,
                record: OnceCell::new(),
            });
            count(match ran {
                HitOutcome::Accepted => &probe.counters.recorded,
                HitOutcome::Filtered => &probe.counters.filtered,
            });
            drop(visit);
            return probe.session.pushed(ring);
        }
        let header = Header::of(hit, probe, fired.pc);
        let pushed = visit.push_with(|slot| {
            let mut record = Recorder::new(slot, &header);
            let arguments = probe.capture.arguments;
            match fired.returned {
                Some(value) => record.arguments(&[value], arguments),
                None if probe.kind == EventKind::Tick => {}
                None => record.arguments(fired.arguments, arguments),
            }
            self.capture(hit, probe, fired, &mut record);
            record.finish();
        });
        match pushed {
            true => count(&probe.counters.recorded),
            false => count(&probe.counters.dropped),
        }
        drop(visit);
        probe.session.doorbell.ring_if_awaited();
    }

    /// Captures the values of a hit other than its arguments.
    fn capture(
        &self,
        hit: &Hit<'_>,
        probe: &Enabled,
        fired: &HitData<'_>,
        record: &mut Recorder<'_, '_>,
    ) {
        let capture = &probe.capture;
        if capture.comm
            && let Some(comm) = hit.current.comm()
        {
            record.comm(comm);
        }
        if capture.kernel_stack > 0 && !hit.user {
            let mut room: Frames = [0; MAX_FRAMES];
            let frames = first(&mut room, capture.kernel_stack);
            let found = self.stacks.kernel(hit, fired.pc, frames);
            record.kernel_stack(frames.get(..found).unwrap_or_default());
        }
        if capture.user_stack > 0 {
            let entered = probe.kind == EventKind::Entry;
            let mut room: Frames = [0; MAX_FRAMES];
            let frames = first(&mut room, capture.user_stack);
            let found = self.stacks.user(hit, entered, frames);
            record.user_stack(frames.get(..found).unwrap_or_default());
        }
        for wanted in &capture.strings {
            if let Some(address) = fired.arguments.get(wanted.argument) {
                let space = hit.space();
                strings::read(hit.memory, space, Gva(*address), wanted, record);
            }
        }
    }
}

impl Header {
    #[inline]
    fn of(hit: &Hit<'_>, probe: &Enabled, pc: u64) -> Self {
        let identity = hit.current.identity();
        Self {
            probe: probe.number,
            kind: probe.kind,
            vcpu: hit.vcpu,
            pid: identity.pid,
            tid: identity.tid,
            pc,
        }
    }
}

/// Adds a record of the first `most` arguments, as many as fit into a slot.
#[inline(never)]
fn push_some(visit: &Visit<'_>, header: &Header, arguments: &[u64], most: usize) -> bool {
    visit.push_with(|slot| {
        let mut record = Recorder::new(slot, header);
        record.arguments(arguments, most);
        record.finish();
    })
}

/// Returns the first `most` frames of `room`.
fn first(room: &mut Frames, most: usize) -> &mut [u64] {
    room.get_mut(..most.min(MAX_FRAMES)).unwrap_or_default()
}

/// The data of a hit for a probe.
pub(crate) struct HitData<'a> {
    pub(in crate::engine) pc: u64,
    pub(in crate::engine) arguments: &'a [u64],
    /// RAX, at a return.
    pub(in crate::engine) returned: Option<u64>,
    /// Makes the record of a tracepoint's event; `None` if that fails.
    pub(in crate::engine) record: Option<&'a dyn Fn() -> Option<Vec<u8>>>,
}

impl HitData<'_> {
    pub(in crate::engine) fn at(pc: u64) -> Self {
        Self {
            pc,
            arguments: &[0; MAX_ARGUMENTS],
            returned: None,
            record: None,
        }
    }
}
