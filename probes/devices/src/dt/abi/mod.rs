//! The structures of `<dev/dt/dtvar.h>` on OpenBSD amd64, byte for byte, in both layouts that were
//! in use.
//!
//! The layout until 2024 ([`Abi::Old`]: filters and rates) and the current one ([`Abi::Current`]:
//! user stacks and periods) share most structures. Those are here, with each member's offset;
//! `layout.rs` has the differences. Numbers are little endian. The caller checks the values decoded
//! from a client. Bytes behind a structure's end are ignored.
//!
//! Source: dtvar.h 1.14 to 1.24 (types and their order; offsets follow from amd64's alignment),
//! dt(4).

mod layout;

use std::time::Duration;

pub use layout::Abi;

/// The size of a name in bytes, the NUL included (`DTNAMESIZE`).
pub const NAME_SIZE: usize = 16;
/// The size of a program's name in bytes, the NUL included (`DTMAXCOMLEN`).
pub const COMM_SIZE: usize = 24;
/// The number of frames in a stack (`STACKTRACE_MAX`).
pub const MAX_FRAMES: usize = 19;
/// The number of arguments of an event (`DTMAXFUNCARGS`).
pub const MAX_EVENT_ARGUMENTS: usize = 10;
/// The number of arguments with types (`DTMAXARGTYPES`).
pub const MAX_ARGUMENT_TYPES: usize = 5;

/// `dtev_comm` is filled.
pub const FLAG_EXECNAME: u64 = 1 << 0;
/// `dtev_ustack` is filled.
pub const FLAG_USTACK: u64 = 1 << 1;
/// `dtev_kstack` is filled.
pub const FLAG_KSTACK: u64 = 1 << 2;
/// `dtev_args` is filled.
pub const FLAG_FUNCARGS: u64 = 1 << 3;

/// The size of `struct dtioc_probe` in bytes.
pub const LIST_SIZE: usize = 16;
/// The size of `struct dtioc_probe_info` in bytes.
pub const PROBE_INFO_SIZE: usize = 56;
/// The size of the `int` of `DTIOCRECORD` in bytes.
pub const RECORD_SIZE: usize = 4;
/// The size of `struct dtioc_arg` in bytes.
pub const ARGUMENTS_SIZE: usize = 24;
/// The size of `struct dtioc_arg_info` in bytes.
pub const ARGUMENT_INFO_SIZE: usize = 24;
/// The size of `struct dtioc_rdvn` in bytes.
pub const RESOLVE_SIZE: usize = 40;

/// `dtioc_probe.dtpr_size` (size_t).
const DTPR_SIZE: usize = 0;
/// `dtioc_probe_info`: u32, u8, then three names without padding between them.
const DTPI_PBN: usize = 0;
const DTPI_NARGS: usize = 4;
const DTPI_PROV: usize = 5;
const DTPI_FUNC: usize = 21;
const DTPI_NAME: usize = 37;
/// `dtioc_arg`: u32, padding, size_t, pointer.
const DTAR_PBN: usize = 0;
const DTAR_SIZE: usize = 8;
/// `dtioc_arg_info`: u32, u8, name.
const DTAI_PBN: usize = 0;
const DTAI_ARGN: usize = 4;
const DTAI_ARGTYPE: usize = 5;
/// `dtioc_rdvn`: pid_t, int, then four words.
const DTRV_PID: usize = 0;
const DTRV_FD: usize = 4;
const DTRV_VA: usize = 8;
const DTRV_OFFSET: usize = 16;
const DTRV_START: usize = 24;
const DTRV_LEN: usize = 32;

/// The fields behind the stacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Values {
    /// `dtev_args`.
    Arguments([i64; MAX_EVENT_ARGUMENTS]),
    /// `dtev_retval` and `dtev_error`, which share that place.
    Return {
        /// The value, and a second one that Linux does not have.
        values: [i64; 2],
        /// 0, or the error number.
        error: i32,
    },
}

/// An event, independent of the layout. Fields that were not requested are empty and decode as
/// zeros.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventFields {
    /// The number of the probe.
    pub probe: u32,
    /// The number of the CPU.
    pub cpu: u32,
    /// The number of the process.
    pub pid: u32,
    /// The number of the thread.
    pub tid: u32,
    /// The time since 1970, UTC.
    pub time: Duration,
    /// Program counters in the kernel, innermost first; only the first [`MAX_FRAMES`] are encoded.
    pub kernel_stack: Vec<u64>,
    /// Program counters in the program, in the same way.
    pub user_stack: Vec<u64>,
    /// The program's name, without its NUL; only the first 23 bytes are encoded.
    pub comm: Vec<u8>,
    /// The arguments, or the returned value.
    pub values: Values,
}

/// The counts of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Events that the client has read.
    pub read: u64,
    /// Events dropped because a ring was full.
    pub dropped: u64,
    /// Timer ticks that came too late for events of their own.
    pub skipped: u64,
    /// Hits while the same CPU was recording another.
    pub recursive: u64,
}

/// A filter of the older layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Filter {
    /// `enum dt_operand`: 0 none, 1 equal, 2 not equal.
    pub operand: u32,
    /// `enum dt_filtervar`: 0 none, 1 process, 2 thread.
    pub variable: u32,
    /// The number to compare with.
    pub value: u32,
}

/// The rate of a timer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TimerRate {
    /// Ticks a second (`dtrq_rate`).
    Rate(u32),
    /// Nanoseconds between two ticks (`dtrq_nsecs`).
    Period(u64),
}

/// `struct dtioc_req`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProbeRequest {
    /// The number of the probe.
    pub probe: u32,
    /// The filter on the hits; empty in the current layout.
    pub filter: Filter,
    /// The rate, for `profile` and `interval`.
    pub pace: TimerRate,
    /// The values to record: `FLAG_...`.
    pub flags: u64,
}

/// One entry of the list of probes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProbeInfo<'a> {
    /// The number of the probe.
    pub probe: u32,
    /// The number of arguments.
    pub arguments: u8,
    /// The provider.
    pub provider: &'a str,
    /// The function, or group.
    pub function: &'a str,
    /// The name.
    pub name: &'a str,
}

/// Encodes a `struct dtioc_probe_info`. Names are cut to 15 bytes.
#[must_use]
pub fn probe_info(info: &ProbeInfo<'_>) -> [u8; PROBE_INFO_SIZE] {
    let mut bytes = [0; PROBE_INFO_SIZE];
    put(&mut bytes, DTPI_PBN, &info.probe.to_le_bytes());
    put(&mut bytes, DTPI_NARGS, &[info.arguments]);
    for (at, text) in [
        (DTPI_PROV, info.provider),
        (DTPI_FUNC, info.function),
        (DTPI_NAME, info.name),
    ] {
        put_text(&mut bytes, at, NAME_SIZE, text.as_bytes());
    }
    bytes
}

/// Decodes the number of a `struct dtioc_probe_info` and its provider, function and name, as cut
/// there.
#[must_use]
pub fn listed_names(bytes: &[u8]) -> Option<(u32, [&[u8]; 3])> {
    let names = [DTPI_PROV, DTPI_FUNC, DTPI_NAME].map(|at| text_at(bytes, at, NAME_SIZE));
    Some((u32_at(bytes, DTPI_PBN)?, names))
}

/// Cuts a text for a field of `size` bytes, so that a NUL fits behind it.
#[must_use]
pub fn cut(text: &[u8], size: usize) -> &[u8] {
    text.get(..size.saturating_sub(1)).unwrap_or(text)
}

/// Encodes a `struct dtioc_arg_info`: argument `number`, from 0, of a probe.
#[must_use]
pub fn argument_info(probe: u32, number: u8, type_name: &str) -> [u8; ARGUMENT_INFO_SIZE] {
    let mut bytes = [0; ARGUMENT_INFO_SIZE];
    put(&mut bytes, DTAI_PBN, &probe.to_le_bytes());
    put(&mut bytes, DTAI_ARGN, &[number]);
    put_text(&mut bytes, DTAI_ARGTYPE, NAME_SIZE, type_name.as_bytes());
    bytes
}

/// Decodes `dtpr_size` of a `struct dtioc_probe`.
#[must_use]
pub fn list_size(bytes: &[u8]) -> Option<u64> {
    u64_at(bytes, DTPR_SIZE)
}

/// Sets the size in that structure.
pub fn set_list_size(bytes: &mut [u8], size: u64) {
    put(bytes, DTPR_SIZE, &size.to_le_bytes());
}

/// Decodes `dtar_pbn` and `dtar_size` of a `struct dtioc_arg`.
#[must_use]
pub fn arguments_request(bytes: &[u8]) -> Option<(u32, u64)> {
    Some((u32_at(bytes, DTAR_PBN)?, u64_at(bytes, DTAR_SIZE)?))
}

/// Sets the size in that structure.
pub fn set_arguments_size(bytes: &mut [u8], size: u64) {
    put(bytes, DTAR_SIZE, &size.to_le_bytes());
}

/// Decodes `dtrv_pid` and `dtrv_va` of a `struct dtioc_rdvn`.
#[must_use]
pub fn resolve_request(bytes: &[u8]) -> Option<(i32, u64)> {
    let pid = u32_at(bytes, DTRV_PID)?.cast_signed();
    Some((pid, u64_at(bytes, DTRV_VA)?))
}

/// Sets the results of `DTIOCRDVNODE`. The descriptor is passed beside the structure, which has -1.
pub fn set_resolved(bytes: &mut [u8], start: u64, offset: u64, length: u64) {
    put(bytes, DTRV_FD, &(-1i32).to_le_bytes());
    put(bytes, DTRV_OFFSET, &offset.to_le_bytes());
    put(bytes, DTRV_START, &start.to_le_bytes());
    put(bytes, DTRV_LEN, &length.to_le_bytes());
}

/// Writes `field` at `at`, as much of it as fits.
fn put(bytes: &mut [u8], at: usize, field: &[u8]) {
    let places = bytes.iter_mut().skip(at);
    for (place, byte) in places.zip(field) {
        *place = *byte;
    }
}

/// Writes `text` into a field of `size` bytes.
fn put_text(bytes: &mut [u8], at: usize, size: usize, text: &[u8]) {
    put(bytes, at, cut(text, size));
}

/// Returns the text of a field of `size` bytes, without its NUL; empty if there is no such field.
fn text_at(bytes: &[u8], at: usize, size: usize) -> &[u8] {
    let field = bytes.get(at..at + size).unwrap_or_default();
    field.split(|byte| *byte == 0).next().unwrap_or_default()
}

/// Writes a `struct stacktrace`: a count, padding, and [`MAX_FRAMES`] words.
fn put_stack(bytes: &mut [u8], at: usize, frames: &[u64]) {
    let frames = frames.get(..MAX_FRAMES).unwrap_or(frames);
    put(bytes, at, &(frames.len() as u32).to_le_bytes());
    for (index, frame) in frames.iter().enumerate() {
        put(bytes, at + STACK_PC + 8 * index, &frame.to_le_bytes());
    }
}

/// The offset of `stacktrace.st_pc`, behind `st_count` and its padding.
const STACK_PC: usize = 8;

/// Reads a `struct stacktrace`, at most [`MAX_FRAMES`] of its words.
fn stack_at(bytes: &[u8], at: usize) -> Vec<u64> {
    let count = u32_at(bytes, at).unwrap_or(0) as usize;
    let frames = (0..count.min(MAX_FRAMES)).map(|n| u64_at(bytes, at + STACK_PC + 8 * n));
    frames.map_while(|frame| frame).collect()
}

fn put_values(bytes: &mut [u8], at: usize, values: &Values) {
    match values {
        Values::Arguments(arguments) => {
            for (index, argument) in arguments.iter().enumerate() {
                put(bytes, at + 8 * index, &argument.to_le_bytes());
            }
        }
        Values::Return { values, error } => {
            for (index, value) in values.iter().enumerate() {
                put(bytes, at + 8 * index, &value.to_le_bytes());
            }
            put(bytes, at + 16, &error.to_le_bytes());
        }
    }
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let field = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(field.try_into().ok()?))
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    let field = bytes.get(at..at.checked_add(8)?)?;
    Some(u64::from_le_bytes(field.try_into().ok()?))
}

#[cfg(test)]
mod tests;
