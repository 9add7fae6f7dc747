//! What `<dev/dt/dtvar.h>` had until 2024 (1.14): filters in the kernel, rates in Hz, no user stacks, two counts.

use super::{
    COMM_SIZE, Counts, EventFields, Filter, Pace, ProbeRequest, put, put_event_start, put_text,
    put_values, u32_at, u64_at,
};

/// Bytes of `struct dt_evt`.
pub const EVENT_SIZE: usize = 296;
/// Bytes of `struct dtioc_req`.
pub const REQUEST_SIZE: usize = 32;
/// Bytes of `struct dtioc_stat`.
pub const STAT_SIZE: usize = 16;

/// `dt_evt.dtev_comm`, behind the kernel's stack of 160 bytes at 32.
const DTEV_COMM: usize = 192;
/// The union of `dtev_args` with `dtev_retval` and `dtev_error`.
const DTEV_ARGS: usize = 216;

/// `dtioc_req`: u32, a filter of three 32-bit words, u32, padding, u64.
const DTRQ_PBN: usize = 0;
const DTF_OPERAND: usize = 4;
const DTF_VARIABLE: usize = 8;
const DTF_VALUE: usize = 12;
const DTRQ_RATE: usize = 16;
const DTRQ_EVTFLAGS: usize = 24;

/// `dtioc_stat`: two u64.
const DTST_READEVT: usize = 0;
const DTST_DROPEVT: usize = 8;

/// `struct dt_evt`. There is no place for a user stack.
#[must_use]
pub fn event(event: &EventFields) -> [u8; EVENT_SIZE] {
    let mut bytes = [0; EVENT_SIZE];
    put_event_start(&mut bytes, event);
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
    bytes
}

/// `struct dtioc_req`.
#[must_use]
pub fn request(bytes: &[u8]) -> Option<ProbeRequest> {
    Some(ProbeRequest {
        probe: u32_at(bytes, DTRQ_PBN)?,
        filter: Filter {
            operand: u32_at(bytes, DTF_OPERAND)?,
            variable: u32_at(bytes, DTF_VARIABLE)?,
            value: u32_at(bytes, DTF_VALUE)?,
        },
        pace: Pace::Rate(u32_at(bytes, DTRQ_RATE)?),
        flags: u64_at(bytes, DTRQ_EVTFLAGS)?,
    })
}
