//! What the compiler makes of a rule: operations of a small stack machine, as [`run`](super::run) executes them.
//!
//! Operations take their operands from the stack, the last one first, and push what they give. There is no operation that waits or that
//! writes to the guest; jumps may lead back, and how many operations one run may take is bounded.

use std::sync::Arc;

use super::ast::{Aggregation, BinaryOperator, UnaryOperator};
use super::format::Format;
use super::registers::Register;
use super::time::TimeFormat;
use super::value::Value;

/// One operation. What it takes from the stack is named in the order it was pushed.
#[derive(Debug)]
pub(super) enum Operation {
    /// Pushes it.
    Constant(Value),
    /// Takes a value away.
    Drop,
    /// Pushes a local variable.
    Local(usize),
    /// value ->
    SetLocal(usize),
    /// Pushes the variable's value, before or after it is changed.
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
    /// Pushes how many keys a map has.
    MapLength(usize),
    Clear(usize),
    Zero(usize),
    /// value -> value
    Unary(UnaryOperator),
    /// left, right -> value
    Binary(BinaryOperator),
    /// value -> 0 or 1
    Truth,
    Jump(usize),
    /// value ->
    JumpIfZero(usize),
    /// value -> The rule's predicate: ends the rule if it is 0, and the hit is not one of those wanted.
    Filter,
    /// Pushes what is known of the hit.
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
    /// tuple -> value
    Item(usize),
    /// stack or text -> number
    Length,
    /// frames of the stack are pushed as one value.
    KernelStack(usize),
    UserStack(usize),
    /// address -> symbol
    KernelSymbol,
    UserSymbol,
    /// address -> text, of 4 or 16 bytes there.
    AddressText {
        bytes: u8,
    },
    /// number -> text, of an IPv4 address in network order.
    Ipv4Text,
    /// address -> text, of 6 bytes there.
    MacText,
    /// text, text, number -> number
    CompareText,
    /// text, text -> 0 or 1
    Contains,
    /// number -> number, the last `bytes` of it turned round.
    SwapBytes(u8),
    /// nanoseconds since 1970 -> text
    TimeText(Arc<TimeFormat>),
    /// argv -> values put out
    Join {
        emission: usize,
        most: usize,
    },
    /// values ->
    Emit {
        emission: usize,
        values: usize,
    },
    /// Puts a map out as it is now.
    EmitMap {
        emission: usize,
        map: usize,
    },
    /// Begins to go through the keys of a map.
    Iterate(usize),
    /// Puts the next key and its value into a local variable, or ends and jumps.
    Next {
        slot: usize,
        end: usize,
    },
    /// Ends going through a map early.
    EndIteration,
    /// Ends the rule; the last operation of all.
    Return,
    /// Ends the script.
    Exit,
}

/// What a hit tells.
#[derive(Debug, Clone, Copy)]
pub(super) enum Known {
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
    /// The same, but -1 for an error of a system call: what bt(5) has of one.
    ReturnedOrMinusOne,
    Task,
    Random,
    ProgramCounter,
    Register(&'static Register),
}

/// What is done with the values of an emission by whoever reads it.
#[derive(Debug)]
pub(super) enum Emission {
    /// They are formatted.
    Printf {
        format: Arc<Format>,
        to_stderr: bool,
    },
    /// The only one is printed.
    Print,
    /// They are joined.
    Join { separator: Arc<[u8]> },
    /// The time of the hit is printed.
    Time { format: Arc<TimeFormat> },
    /// A map was printed.
    Map {
        top: Option<usize>,
        divisor: Option<i64>,
    },
    /// The script fails.
    Fail { message: Arc<str> },
}

/// A rule for one kind of probe.
#[derive(Debug)]
pub(super) struct Code {
    /// What is executed, from the first on.
    pub(super) operations: Vec<Operation>,
    /// Local variables.
    pub(super) locals: usize,
}
