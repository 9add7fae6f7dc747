//! The two layouts: sizes and offsets of the structures in which they differ.

use std::time::Duration;

use super::{
    COMM_SIZE, Counts, EventFields, Filter, ProbeRequest, TimerRate, Values, put, put_stack,
    put_text, put_values, stack_at, text_at, u32_at, u64_at,
};

/// A layout of the structures. The client selects it when it opens the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Abi {
    /// The layout of the manual page with `struct dt_filter` (dtvar.h 1.14), until about 2024. It
    /// has filters in the kernel, rates in Hz, no user stacks, two counts.
    Old,
    /// The current layout (dtvar.h 1.24): user stacks, periods in nanoseconds, four counts.
    Current,
}

/// Sizes and offsets in bytes.
struct Layout {
    /// `struct dt_evt`.
    event_size: usize,
    dtev_ustack: Option<usize>,
    dtev_comm: usize,
    /// The union of `dtev_args` with `dtev_retval` and `dtev_error`.
    dtev_args: usize,
    /// `struct dtioc_req`.
    request_size: usize,
    dtrq_evtflags: usize,
    /// `struct dtioc_stat`: as many of the counts, in order, as fit.
    stat_size: usize,
}

const OLD: Layout = Layout {
    event_size: 296,
    dtev_ustack: None,
    dtev_comm: 192,
    dtev_args: 216,
    request_size: 32,
    dtrq_evtflags: 24,
    stat_size: 16,
};

const CURRENT: Layout = Layout {
    event_size: 456,
    dtev_ustack: Some(192),
    dtev_comm: 352,
    dtev_args: 376,
    request_size: 24,
    dtrq_evtflags: 8,
    stat_size: 32,
};

/// The start of `struct dt_evt`, common to both layouts.
const DTEV_PBN: usize = 0;
const DTEV_CPU: usize = 4;
const DTEV_PID: usize = 8;
const DTEV_TID: usize = 12;
const DTEV_SEC: usize = 16;
const DTEV_NSEC: usize = 24;
const DTEV_KSTACK: usize = 32;

/// `dtioc_req`: a u32 in both. Then the older layout has a filter of three 32-bit words, u32,
/// padding, u64; the current one has u32, u64, u64.
const DTRQ_PBN: usize = 0;
const DTF_OPERAND: usize = 4;
const DTF_VARIABLE: usize = 8;
const DTF_VALUE: usize = 12;
const DTRQ_RATE: usize = 16;
const DTRQ_NSECS: usize = 16;

impl Abi {
    fn layout(self) -> &'static Layout {
        match self {
            Self::Old => &OLD,
            Self::Current => &CURRENT,
        }
    }

    /// Returns the size of `struct dt_evt` in bytes.
    #[must_use]
    pub fn event_size(self) -> usize {
        self.layout().event_size
    }

    /// Returns the size of `struct dtioc_req` in bytes.
    #[must_use]
    pub fn request_size(self) -> usize {
        self.layout().request_size
    }

    /// Returns the size of `struct dtioc_stat` in bytes.
    #[must_use]
    pub fn stat_size(self) -> usize {
        self.layout().stat_size
    }

    /// Encodes an event. The older layout has no place for a user stack.
    #[must_use]
    pub fn event(self, event: &EventFields) -> Vec<u8> {
        let layout = self.layout();
        let mut bytes = vec![0; layout.event_size];
        put(&mut bytes, DTEV_PBN, &event.probe.to_le_bytes());
        put(&mut bytes, DTEV_CPU, &event.cpu.to_le_bytes());
        put(&mut bytes, DTEV_PID, &event.pid.to_le_bytes());
        put(&mut bytes, DTEV_TID, &event.tid.to_le_bytes());
        put(&mut bytes, DTEV_SEC, &event.time.as_secs().to_le_bytes());
        let nanoseconds = u64::from(event.time.subsec_nanos());
        put(&mut bytes, DTEV_NSEC, &nanoseconds.to_le_bytes());
        put_stack(&mut bytes, DTEV_KSTACK, &event.kernel_stack);
        if let Some(at) = layout.dtev_ustack {
            put_stack(&mut bytes, at, &event.user_stack);
        }
        put_text(&mut bytes, layout.dtev_comm, COMM_SIZE, &event.comm);
        put_values(&mut bytes, layout.dtev_args, &event.values);
        bytes
    }

    /// Decodes an event; `None` if `bytes` are too few. A returned value is decoded as arguments,
    /// because only the probe determines which of the two it is.
    #[must_use]
    pub fn read_event(self, bytes: &[u8]) -> Option<EventFields> {
        let layout = self.layout();
        let bytes = bytes.get(..layout.event_size)?;
        let seconds = Duration::from_secs(u64_at(bytes, DTEV_SEC)?);
        let nanoseconds = Duration::from_nanos(u64_at(bytes, DTEV_NSEC)?);
        let argument = |n| u64_at(bytes, layout.dtev_args + 8 * n).unwrap_or(0);
        let user_stack = layout.dtev_ustack.map(|at| stack_at(bytes, at));
        Some(EventFields {
            probe: u32_at(bytes, DTEV_PBN)?,
            cpu: u32_at(bytes, DTEV_CPU)?,
            pid: u32_at(bytes, DTEV_PID)?,
            tid: u32_at(bytes, DTEV_TID)?,
            time: seconds.saturating_add(nanoseconds),
            kernel_stack: stack_at(bytes, DTEV_KSTACK),
            user_stack: user_stack.unwrap_or_default(),
            comm: text_at(bytes, layout.dtev_comm, COMM_SIZE).to_vec(),
            values: Values::Arguments(std::array::from_fn(|n| argument(n).cast_signed())),
        })
    }

    /// Encodes counts.
    #[must_use]
    pub fn stat(self, counts: &Counts) -> Vec<u8> {
        let words = [
            counts.read,
            counts.dropped,
            counts.skipped,
            counts.recursive,
        ];
        let bytes = words.into_iter().flat_map(u64::to_le_bytes);
        bytes.take(self.layout().stat_size).collect()
    }

    /// Decodes counts; those that the layout lacks are 0.
    #[must_use]
    pub fn read_stat(self, bytes: &[u8]) -> Counts {
        let bytes = bytes.get(..self.layout().stat_size).unwrap_or(bytes);
        let word = |at| u64_at(bytes, at).unwrap_or(0);
        Counts {
            read: word(0),
            dropped: word(8),
            skipped: word(16),
            recursive: word(24),
        }
    }

    /// Encodes a request for all hits of a probe that is no timer.
    #[must_use]
    pub fn request(self, probe: u32, flags: u64) -> Vec<u8> {
        let layout = self.layout();
        let mut bytes = vec![0; layout.request_size];
        put(&mut bytes, DTRQ_PBN, &probe.to_le_bytes());
        put(&mut bytes, layout.dtrq_evtflags, &flags.to_le_bytes());
        bytes
    }

    /// Decodes a request for a probe; `None` if `bytes` are too few.
    #[must_use]
    pub fn probe_request(self, bytes: &[u8]) -> Option<ProbeRequest> {
        let (filter, pace) = match self {
            Self::Old => {
                let filter = Filter {
                    operand: u32_at(bytes, DTF_OPERAND)?,
                    variable: u32_at(bytes, DTF_VARIABLE)?,
                    value: u32_at(bytes, DTF_VALUE)?,
                };
                (filter, TimerRate::Rate(u32_at(bytes, DTRQ_RATE)?))
            }
            Self::Current => (
                Filter::default(),
                TimerRate::Period(u64_at(bytes, DTRQ_NSECS)?),
            ),
        };
        Some(ProbeRequest {
            probe: u32_at(bytes, DTRQ_PBN)?,
            filter,
            pace,
            flags: u64_at(bytes, self.layout().dtrq_evtflags)?,
        })
    }
}
