//! A compiled rule: operations of a small stack machine, as [`run`](crate::run) executes them.
//!
//! Operations take their operands from the stack, the last one first, and push their results. No
//! operation waits or writes to the guest. Jumps may lead back, and the number of operations of one
//! run is bounded.

use std::sync::Arc;

use crate::arrangement::Arrangement;
use crate::ast::{Aggregation, BinaryOperator, UnaryOperator};
use crate::format::Format;
use crate::registers::Register;
use crate::render::Complaint;
use crate::shape::Shape;
use crate::time::TimeFormat;
use crate::value::Value;

/// One operation. Its operands on the stack are named in the order in which they were pushed.
// The tag stands alone: one hidden in a value would have to be computed at each operation.
#[repr(u8)]
#[derive(Debug)]
pub(crate) enum Operation {
    /// Pushes a constant.
    Constant(Value),
    /// Drops a value.
    Drop,
    /// Pushes a local variable.
    Local(usize),
    /// value ->
    SetLocal(usize),
    /// Pushes the variable's value, before or after the change.
    StepLocal {
        slot: usize,
        by: i64,
        postfix: bool,
    },
    /// keys -> value
    Global {
        map: usize,
        keys: usize,
    },
    /// keys, value ->
    SetGlobal {
        map: usize,
        keys: usize,
    },
    /// keys, value ->
    UpdateGlobal {
        map: usize,
        keys: usize,
        operator: BinaryOperator,
    },
    /// keys -> value
    StepGlobal {
        map: usize,
        keys: usize,
        by: i64,
        postfix: bool,
    },
    /// keys ->
    Count {
        map: usize,
        keys: usize,
    },
    /// keys, value ->
    Aggregate {
        map: usize,
        keys: usize,
        aggregation: Aggregation,
    },
    /// keys -> 0 or 1
    Delete {
        map: usize,
        keys: usize,
    },
    /// keys -> 0 or 1
    HasKey {
        map: usize,
        keys: usize,
    },
    /// Pushes the number of keys of a map.
    MapLength(usize),
    Clear(usize),
    Zero(usize),
    /// value -> value
    Unary(UnaryOperator),
    /// left, right -> value
    Binary(BinaryOperator),
    /// left, right -> 0 or 1, both taken as unsigned words
    CompareUnsigned(BinaryOperator),
    /// value -> 0 or 1
    Truth,
    Jump(usize),
    /// value ->
    JumpIfZero(usize),
    /// value -> The rule's predicate: if it is 0, it ends the rule, and the hit does not count.
    Filter,
    /// Pushes a value of the hit.
    Known(Known),
    /// address -> number
    Load {
        bytes: u8,
        signed: bool,
    },
    /// address -> number: `width` bits from bit `shift` of the 8 bytes there.
    LoadBits {
        shift: u8,
        width: u8,
        signed: bool,
    },
    /// number -> number
    Extend {
        bytes: u8,
        signed: bool,
    },
    /// address -> text
    ReadText {
        most: usize,
    },
    /// address, length -> text
    ReadTextOf {
        most: usize,
    },
    /// text, length -> text
    CutText,
    /// address, length -> bytes
    ReadBytes {
        most: usize,
    },
    /// values -> tuple
    Tuple(usize),
    /// values -> record
    Record(Arc<[Arc<str>]>),
    /// text, pattern -> whether the whole text matches
    GlobMatch,
    /// value -> the value with its records' members in this order
    Arrange(Arc<Arrangement>),
    /// tuple or record -> value
    Item(usize),
    /// address -> array, of the numbers there.
    ReadArray {
        bytes: u8,
        signed: bool,
        elements: usize,
    },
    /// number -> array, of its bytes from the lowest on, so many to an element.
    SplitNumber {
        bytes: u8,
        signed: bool,
        elements: usize,
    },
    /// array -> number, of its elements of so many bytes, the first one lowest.
    JoinNumber {
        bytes: u8,
    },
    /// array -> array of arrays with so many elements
    Group(usize),
    /// array, index -> value, 0 behind the end
    Element,
    /// text, index -> number
    ByteOfText,
    /// stack or text -> number
    Length,
    /// Pushes frames of the stack as one value.
    KernelStack(usize),
    UserStack(usize),
    /// address -> symbol
    KernelSymbol,
    UserSymbol,
    /// address -> text, of the 4 or 16 bytes there.
    AddressText {
        bytes: u8,
    },
    /// number -> text, of an IPv4 address in network order.
    Ipv4Text,
    /// address -> text, of the 6 bytes there.
    MacText,
    /// text, text, number -> number
    CompareText,
    /// bytes, bytes, number -> number, as memcmp(3)
    CompareBytes,
    /// text, text -> 0 or 1
    Contains,
    /// text, text -> the place of the second in the first, or -1
    Find,
    /// text, text -> text
    Concatenate,
    /// number -> text
    Text(NumberText),
    /// number -> number, with its last `bytes` bytes swapped.
    SwapBytes(u8),
    /// nanoseconds since 1970 -> text
    TimeText(Arc<TimeFormat>),
    /// argv -> values emitted
    Join {
        emission: usize,
        most: usize,
    },
    /// values ->
    Emit {
        emission: usize,
        values: usize,
    },
    /// Emits a map with its current contents.
    EmitMap {
        emission: usize,
        map: usize,
    },
    /// Begins to iterate over the keys of a map.
    Iterate(usize),
    /// Puts the next key and its value into a local variable, or jumps at the end.
    Next {
        slot: usize,
        end: usize,
    },
    /// Ends the iteration over a map early.
    EndIteration,
    /// Ends the rule; the last operation of all.
    Return,
    /// status -> Ends the script.
    Exit,
    /// Ends the script with status 1, without END and without its maps.
    Abort,
    /// Keeps the machine as it is, under this name.
    Keep(Arc<str>),
    /// nanoseconds ->, if `has_ago`. Keeps the machine as it was so long ago.
    Rewind {
        name: Arc<str>,
        has_ago: bool,
    },
}

/// The numbers that have names.
#[derive(Debug, Clone, Copy)]
pub(crate) enum NumberText {
    /// An error's number, as strerror(3) describes it.
    Error,
    /// A signal's number.
    Signal,
    /// A system call's number.
    SystemCall,
}

/// The values of a hit.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Known {
    /// An argument, as it stands in its register.
    Argument(usize),
    Comm,
    Cpu,
    Nsecs,
    Elapsed,
    Pid,
    Tid,
    Probe,
    Function,
    Returned,
    /// The returned value, but -1 for an error of a system call, as in bt(5).
    ReturnedOrMinusOne,
    Task,
    /// The address of the record of a tracepoint's event.
    Record,
    Random,
    ProgramCounter,
    CpuCount,
    ProbeType,
    Register(&'static Register),
}

/// The treatment of an emission's values by its reader.
#[derive(Debug)]
pub(crate) enum Emission {
    /// The values are formatted.
    Printf {
        format: Arc<Format>,
        /// The place of `errorf` and `warnf`.
        complaint: Option<Arc<Complaint>>,
        /// The shapes of the values; those that are missing are plain.
        shapes: Vec<Shape>,
    },
    /// The values are formatted to the path of a file, of which `most` bytes are printed.
    File {
        format: Arc<Format>,
        shapes: Vec<Shape>,
        most: usize,
    },
    /// The only value is printed.
    Print { shape: Shape },
    /// The values are joined.
    Join { separator: Arc<[u8]> },
    /// The time of the hit is printed.
    Time { format: Arc<TimeFormat> },
    /// A map was printed.
    Map {
        map: usize,
        top: Option<usize>,
        divisor: Option<i64>,
    },
    /// The script fails.
    Fail { message: Arc<str> },
}

/// A rule for one kind of probe.
#[derive(Debug)]
pub(crate) struct Code {
    /// The operations, executed from the first on.
    pub(crate) operations: Vec<Operation>,
    /// The number of local variables.
    pub(crate) locals: usize,
}

impl Code {
    /// Checks whether it keeps the machine as it is at a hit.
    pub(crate) fn keeps_hits(&self) -> bool {
        let keeps = |operation: &Operation| matches!(operation, Operation::Keep(_));
        self.operations.iter().any(keeps)
    }

    /// Checks whether it keeps the machine as it was before.
    pub(crate) fn rewinds(&self) -> bool {
        let rewinds = |operation: &Operation| matches!(operation, Operation::Rewind { .. });
        self.operations.iter().any(rewinds)
    }
}
