//! The structures of `<dev/dt/dtvar.h>` on OpenBSD amd64, byte for byte, in both layouts that were in use.
//!
//! The layout up to 2024 ([`Abi::Old`]: filters and rates) and today's ([`Abi::Current`]: user stacks and periods) share
//! most structures; those are here, with each member's offset. Where they differ is in `layout.rs`. Numbers are
//! little endian. What is read of a client is checked by the caller; bytes behind a structure's end are not looked at.
//!
//! Source: dtvar.h 1.14 to 1.24 (types and their order; offsets follow from amd64's alignment), dt(4).

mod layout;

use std::time::Duration;

pub use layout::Abi;

/// Bytes of a name, the NUL included (`DTNAMESIZE`).
pub const NAME_SIZE: usize = 16;
/// Bytes of a program's name, the NUL included (`DTMAXCOMLEN`).
pub const COMM_SIZE: usize = 24;
/// Numbers of a stack (`STACKTRACE_MAX`).
pub const MAX_FRAMES: usize = 19;
/// Arguments of an event (`DTMAXFUNCARGS`).
pub const MAX_EVENT_ARGUMENTS: usize = 10;
/// Arguments whose types are told (`DTMAXARGTYPES`).
pub const MAX_ARGUMENT_TYPES: usize = 5;

/// `dtev_comm` is filled.
pub const FLAG_EXECNAME: u64 = 1 << 0;
/// `dtev_ustack` is filled.
pub const FLAG_USTACK: u64 = 1 << 1;
/// `dtev_kstack` is filled.
pub const FLAG_KSTACK: u64 = 1 << 2;
/// `dtev_args` is filled.
pub const FLAG_FUNCARGS: u64 = 1 << 3;

/// Bytes of `struct dtioc_probe`.
pub const LIST_SIZE: usize = 16;
/// Bytes of `struct dtioc_probe_info`.
pub const PROBE_INFO_SIZE: usize = 56;
/// Bytes of the `int` of `DTIOCRECORD`.
pub const RECORD_SIZE: usize = 4;
/// Bytes of `struct dtioc_arg`.
pub const ARGUMENTS_SIZE: usize = 24;
/// Bytes of `struct dtioc_arg_info`.
pub const ARGUMENT_INFO_SIZE: usize = 24;
/// Bytes of `struct dtioc_rdvn`.
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

/// What the fields behind the stacks hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Values {
    /// `dtev_args`.
    Arguments([i64; MAX_EVENT_ARGUMENTS]),
    /// `dtev_retval` and `dtev_error`, which stand in the same place.
    Return {
        /// The value, and a second one that Linux has not.
        values: [i64; 2],
        /// 0, or the number of the error.
        error: i32,
    },
}

/// An event without its layout. What was not asked for is empty and reads as zeros.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventFields {
    /// Number of the probe.
    pub probe: u32,
    /// Number of the CPU.
    pub cpu: u32,
    /// Number of the process.
    pub pid: u32,
    /// Number of the thread.
    pub tid: u32,
    /// Time since 1970, UTC.
    pub time: Duration,
    /// Program counters in the kernel, innermost first; the first [`MAX_FRAMES`] are taken.
    pub kernel_stack: Vec<u64>,
    /// The same in the program.
    pub user_stack: Vec<u64>,
    /// Name of the program, without its NUL; the first 23 bytes are taken.
    pub comm: Vec<u8>,
    /// Arguments, or what was returned.
    pub values: Values,
}

/// Counts of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Events that the client has read.
    pub read: u64,
    /// Events lost to a full ring.
    pub dropped: u64,
    /// Ticks of a timer that came too late to be events of their own.
    pub skipped: u64,
    /// Hits while the same CPU was recording one.
    pub recursive: u64,
}

/// A filter of the older layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Filter {
    /// `enum dt_operand`: 0 none, 1 equal, 2 not equal.
    pub operand: u32,
    /// `enum dt_filtervar`: 0 none, 1 process, 2 thread.
    pub variable: u32,
    /// What it is compared with.
    pub value: u32,
}

/// How often a timer ticks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TimerRate {
    /// Times a second (`dtrq_rate`).
    Rate(u32),
    /// Nanoseconds between two ticks (`dtrq_nsecs`).
    Period(u64),
}

/// `struct dtioc_req`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProbeRequest {
    /// Number of the probe.
    pub probe: u32,
    /// Whose hits; empty in the current layout.
    pub filter: Filter,
    /// For `profile` and `interval`.
    pub pace: TimerRate,
    /// What is kept: `FLAG_...`.
    pub flags: u64,
}

/// One line of the list of probes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProbeInfo<'a> {
    /// Its number.
    pub probe: u32,
    /// How many arguments it has.
    pub arguments: u8,
    /// Its provider.
    pub provider: &'a str,
    /// Its function, or group.
    pub function: &'a str,
    /// Its name.
    pub name: &'a str,
}

/// `struct dtioc_probe_info`. Names are cut to 15 bytes.
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

/// The number of a `struct dtioc_probe_info` and its provider, function and name, cut as they are there.
#[must_use]
pub fn listed_names(bytes: &[u8]) -> Option<(u32, [&[u8]; 3])> {
    let names = [DTPI_PROV, DTPI_FUNC, DTPI_NAME].map(|at| text_at(bytes, at, NAME_SIZE));
    Some((u32_at(bytes, DTPI_PBN)?, names))
}

/// What a name or a text is cut to in a field of `size` bytes, so that a NUL stays behind it.
#[must_use]
pub fn cut(text: &[u8], size: usize) -> &[u8] {
    text.get(..size.saturating_sub(1)).unwrap_or(text)
}

/// `struct dtioc_arg_info`: argument `number`, from 0, of a probe.
#[must_use]
pub fn argument_info(probe: u32, number: u8, type_name: &str) -> [u8; ARGUMENT_INFO_SIZE] {
    let mut bytes = [0; ARGUMENT_INFO_SIZE];
    put(&mut bytes, DTAI_PBN, &probe.to_le_bytes());
    put(&mut bytes, DTAI_ARGN, &[number]);
    put_text(&mut bytes, DTAI_ARGTYPE, NAME_SIZE, type_name.as_bytes());
    bytes
}

/// `dtpr_size` of a `struct dtioc_probe`.
#[must_use]
pub fn list_size(bytes: &[u8]) -> Option<u64> {
    u64_at(bytes, DTPR_SIZE)
}

/// The same structure with another size.
pub fn set_list_size(bytes: &mut [u8], size: u64) {
    put(bytes, DTPR_SIZE, &size.to_le_bytes());
}

/// `dtar_pbn` and `dtar_size` of a `struct dtioc_arg`.
#[must_use]
pub fn arguments_request(bytes: &[u8]) -> Option<(u32, u64)> {
    Some((u32_at(bytes, DTAR_PBN)?, u64_at(bytes, DTAR_SIZE)?))
}

/// The same structure with another size.
pub fn set_arguments_size(bytes: &mut [u8], size: u64) {
    put(bytes, DTAR_SIZE, &size.to_le_bytes());
}

/// `dtrv_pid` and `dtrv_va` of a `struct dtioc_rdvn`.
#[must_use]
pub fn resolve_request(bytes: &[u8]) -> Option<(i32, u64)> {
    let pid = u32_at(bytes, DTRV_PID)?.cast_signed();
    Some((pid, u64_at(bytes, DTRV_VA)?))
}

/// Fills in what `DTIOCRDVNODE` finds; the descriptor goes beside the structure, which says -1.
pub fn set_resolved(bytes: &mut [u8], start: u64, offset: u64, length: u64) {
    put(bytes, DTRV_FD, &(-1i32).to_le_bytes());
    put(bytes, DTRV_OFFSET, &offset.to_le_bytes());
    put(bytes, DTRV_START, &start.to_le_bytes());
    put(bytes, DTRV_LEN, &length.to_le_bytes());
}

/// Writes `field` at `at`, as far as there is room.
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

/// The text of a field of `size` bytes, without the NUL behind it; empty where there is no such field.
fn text_at(bytes: &[u8], at: usize, size: usize) -> &[u8] {
    let field = bytes.get(at..at + size).unwrap_or_default();
    field.split(|byte| *byte == 0).next().unwrap_or_default()
}

/// `struct stacktrace`: a count, padding, and [`MAX_FRAMES`] words.
fn put_stack(bytes: &mut [u8], at: usize, frames: &[u64]) {
    let frames = frames.get(..MAX_FRAMES).unwrap_or(frames);
    put(bytes, at, &(frames.len() as u32).to_le_bytes());
    for (index, frame) in frames.iter().enumerate() {
        put(bytes, at + STACK_PC + 8 * index, &frame.to_le_bytes());
    }
}

/// `stacktrace.st_pc`, behind `st_count` and its padding.
const STACK_PC: usize = 8;

/// The same, read: no more than there is room for.
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
