//! What today's `<dev/dt/dtvar.h>` (1.24) has of its own: user stacks, periods in nanoseconds, four counts.

use super::{
    COMM_SIZE, Counts, EventFields, Filter, Pace, ProbeRequest, put, put_event_start, put_stack,
    put_text, put_values, u32_at, u64_at,
};

/// Bytes of `struct dt_evt`.
pub const EVENT_SIZE: usize = 456;
/// Bytes of `struct dtioc_req`.
pub const REQUEST_SIZE: usize = 24;
/// Bytes of `struct dtioc_stat`.
pub const STAT_SIZE: usize = 32;

/// `dt_evt.dtev_ustack`, behind the kernel's of 160 bytes at 32.
const DTEV_USTACK: usize = 192;
const DTEV_COMM: usize = 352;
/// The union of `dtev_args` with `dtev_retval` and `dtev_error`.
const DTEV_ARGS: usize = 376;

/// `dtioc_req`: two u32, then two u64.
const DTRQ_PBN: usize = 0;
const DTRQ_EVTFLAGS: usize = 8;
const DTRQ_NSECS: usize = 16;

/// `dtioc_stat`: four u64.
const DTST_READEVT: usize = 0;
const DTST_DROPEVT: usize = 8;
const DTST_SKIPTICK: usize = 16;
const DTST_RECUREVT: usize = 24;

/// `struct dt_evt`.
#[must_use]
pub fn event(event: &EventFields) -> [u8; EVENT_SIZE] {
    let mut bytes = [0; EVENT_SIZE];
    put_event_start(&mut bytes, event);
    put_stack(&mut bytes, DTEV_USTACK, &event.user_stack);
    put_text(&mut bytes, DTEV_COMM, COMM_SIZE, &event.comm);
    put_values(&mut bytes, DTEV_ARGS, &event.values);
    bytes
}

/// `struct dtioc_stat`.
#[must_use]
pub fn stat(counts: &Counts) -> [u8; STAT_SIZE] {
    let mut bytes = [0; STAT_SIZE];
    put(&mut bytes, DTST_READEVT, &counts.read.to_le_bytes());
    put(&mut bytes, DTST_DROPEVT, &counts.dropped.to_le_bytes());
    put(&mut bytes, DTST_SKIPTICK, &counts.skipped.to_le_bytes());
    put(&mut bytes, DTST_RECUREVT, &counts.recursive.to_le_bytes());
    bytes
}

/// `struct dtioc_req`.
#[must_use]
pub fn request(bytes: &[u8]) -> Option<ProbeRequest> {
    Some(ProbeRequest {
        probe: u32_at(bytes, DTRQ_PBN)?,
        filter: Filter::default(),
        pace: Pace::Period(u64_at(bytes, DTRQ_NSECS)?),
        flags: u64_at(bytes, DTRQ_EVTFLAGS)?,
    })
}
