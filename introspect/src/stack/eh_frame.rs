//! Unwinds one function of a program by the unwind information of its object. The format is that of
//! `.eh_frame` (System V ABI for AMD64, section 4.2.4), and of the Linux Standard Base's chapter on
//! exception frames.
//!
//! Only the parts of an object that one address needs are read. They are a few elements of the
//! search table in `.eh_frame_hdr`, the function's record and the record that it shares with
//! others. So a missing page matters only if it is needed, and large objects cost no more than
//! small ones.

use std::collections::HashMap;

use gimli::{
    BaseAddresses, CfaRule, CieOrFde, CommonInformationEntry, EhFrame, Encoding, EndianSlice,
    LittleEndian, Register, RegisterRule, UnwindContext, UnwindExpression, UnwindSection,
};

use crate::bytes::u32_at;

/// The number of registers in DWARF's numbering. The last is the return address.
pub(super) const REGISTERS: usize = 17;
/// The maximum length of a record in bytes. One of a function with very many pushes has a few
/// hundred.
const MAX_FUNCTION_RECORD: u32 = 1 << 16;
const MAX_COMMON_RECORD: u32 = 4096;
/// The maximum number of bytes of sections that are read whole for one process.
pub(super) const MAX_SECTIONS: u64 = 64 << 20;
/// The maximum number of shared records in a section that is read whole. Linkers merge equal ones,
/// which leaves a few hundred.
const MAX_SHARED: usize = 1 << 14;
/// The maximum length of an expression in bytes. Those of compilers and C libraries have some tens.
const MAX_EXPRESSION: usize = 256;
/// The only search table format that linkers write. It is version 1, with any 32-bit pointer to the
/// records and an unsigned 32-bit count. Its pairs are signed 32-bit distances from the table's
/// start (`DW_EH_PE_datarel | DW_EH_PE_sdata4`).
const TABLE: (u8, u8, u8) = (1, 0x03, 0x3b);
const TABLE_START: u64 = 12;

/// The bytes of an object by link address, as its program headers load them.
pub trait ObjectBytes {
    /// Fills `buf` from the link address `address`.
    ///
    /// # Errors
    /// If a byte is not available.
    fn read(&self, address: u64, buf: &mut [u8]) -> Result<(), MissingBytes>;
}

/// The error for bytes of an object that are not in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the object's bytes at link address {address:#x} are not in memory")]
pub struct MissingBytes {
    /// The link address of the requested bytes.
    pub address: u64,
}

/// A reason why an object's information cannot unwind a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Failure {
    /// A part of the information is not in memory.
    Missing(MissingBytes),
    /// The information is malformed, or of an unsupported kind.
    Bad,
}

impl From<MissingBytes> for Failure {
    fn from(missing: MissingBytes) -> Self {
        Self::Missing(missing)
    }
}

impl From<gimli::Error> for Failure {
    fn from(_: gimli::Error) -> Self {
        Self::Bad
    }
}

/// The stack pointer before the function was called (DWARF: canonical frame address).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Cfa {
    /// A register plus an offset.
    Register(u16, i64),
    /// The value of an expression.
    Expression(Vec<u8>),
}

/// The location of a caller's register.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Place {
    /// In the same register: the function did not change it.
    Same,
    /// Lost.
    Lost,
    /// In memory at the frame address plus an offset.
    At(i64),
    /// The value is the frame address plus an offset.
    Is(i64),
    /// In another register.
    Register(u16),
    /// In memory at the address that an expression computes.
    AtExpression(Vec<u8>),
    /// The value is that of an expression.
    IsExpression(Vec<u8>),
}

/// The steps from one instruction's frame to its caller's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rule {
    pub(super) cfa: Cfa,
    pub(super) registers: [Place; REGISTERS],
    /// Whether the "caller" was interrupted by a signal.
    pub(super) signal: bool,
    pub(super) encoding: Encoding,
}

/// Returns the rule for the instruction at a link address from the record at `record`. Returns
/// `None` if the record does not cover it.
pub(super) fn rule(
    bytes: &dyn ObjectBytes,
    record: u64,
    address: u64,
) -> Result<Option<Rule>, Failure> {
    let function = read_record(bytes, record, MAX_FUNCTION_RECORD)?;
    let back = u32_at(&function, 4).ok_or(Failure::Bad)?;
    let common_at = record.wrapping_add(4).wrapping_sub(back.into());
    let mut section = read_record(bytes, common_at, MAX_COMMON_RECORD)?;
    // A section of the two records alone, as if adjacent. Pointers in the second are relative to
    // its original address.
    let offset = section.len();
    section.extend(function);
    let back = u32::try_from(offset + 4).map_err(|_| Failure::Bad)?;
    let pointer = section
        .get_mut(offset + 4..offset + 8)
        .ok_or(Failure::Bad)?;
    pointer.copy_from_slice(&back.to_le_bytes());
    let bases = BaseAddresses::default().set_eh_frame(record.wrapping_sub(offset as u64));
    evaluate(&section, offset, &bases, address)
}

/// Reads the record at `at`, including its length.
fn read_record(bytes: &dyn ObjectBytes, at: u64, most: u32) -> Result<Vec<u8>, Failure> {
    let mut length = [0; 4];
    bytes.read(at, &mut length)?;
    // Zero ends the section. All ones announce a 64-bit length, which no linker writes there.
    let length = u32::from_le_bytes(length);
    if length < 8 || length > most {
        return Err(Failure::Bad);
    }
    let mut record = vec![0; length as usize + 4];
    bytes.read(at, &mut record)?;
    Ok(record)
}

/// Finds the last function that starts at or before `address`, by the table in `.eh_frame_hdr` at
/// `header`. Returns the link address of its record, or `None` if there is no such function.
pub(super) fn search(
    bytes: &dyn ObjectBytes,
    header: u64,
    address: u64,
) -> Result<Option<u64>, Failure> {
    let mut head = [0; TABLE_START as usize];
    bytes.read(header, &mut head)?;
    let [version, pointer, count_kind, table, ..] = head;
    let count = u32_at(&head, 8).ok_or(Failure::Bad)?;
    if (version, count_kind, table) != TABLE || !matches!(pointer & 0xf, 0x3 | 0xb) {
        return Err(Failure::Bad);
    }
    let pair = |index: u64| {
        let mut pair = [0; 8];
        bytes.read(header.wrapping_add(TABLE_START + index * 8), &mut pair)?;
        let [s0, s1, s2, s3, r0, r1, r2, r3] = pair;
        let absolute =
            |distance: [u8; 4]| header.wrapping_add_signed(i32::from_le_bytes(distance).into());
        Ok::<_, Failure>((absolute([s0, s1, s2, s3]), absolute([r0, r1, r2, r3])))
    };
    let (mut low, mut high) = (0, u64::from(count));
    let mut found = None;
    while low < high {
        let middle = low + (high - low) / 2;
        let (start, record) = pair(middle)?;
        match start <= address {
            true => (low, found) = (middle + 1, Some(record)),
            false => high = middle,
        }
    }
    Ok(found)
}

/// Returns the first address and the record of each function in the section `.eh_frame`, ascending.
/// It serves objects without `.eh_frame_hdr`, such as some statically linked programs. The caller
/// bounds the `length` of the section at `start`.
pub(super) fn index(
    bytes: &dyn ObjectBytes,
    start: u64,
    length: u64,
) -> Result<Vec<(u64, u64)>, Failure> {
    let length = usize::try_from(length).map_err(|_| Failure::Bad)?;
    let mut content = vec![0; length];
    bytes.read(start, &mut content)?;
    let mut eh_frame = EhFrame::new(&content, LittleEndian);
    eh_frame.set_address_size(8);
    let bases = BaseAddresses::default().set_eh_frame(start);
    let mut functions = Vec::new();
    // Functions share these records. Each is parsed once, however long it is.
    let mut shared = HashMap::new();
    let mut entries = eh_frame.entries(&bases);
    while let Some(entry) = entries.next()? {
        if let CieOrFde::Fde(partial) = entry {
            let function = partial.parse(|section, bases, offset| {
                if let Some(known) = shared.get(&offset.0) {
                    return Ok(CommonInformationEntry::clone(known));
                }
                let found = EhFrame::cie_from_offset(section, bases, offset)?;
                shared.insert(offset.0, found.clone());
                Ok(found)
            })?;
            if shared.len() > MAX_SHARED {
                return Err(Failure::Bad);
            }
            let record = start.wrapping_add(function.offset() as u64);
            functions.push((function.initial_address(), record));
        }
    }
    functions.sort_unstable();
    Ok(functions)
}

/// Executes the instructions of the record at `offset` up to `address`.
fn evaluate(
    section: &[u8],
    offset: usize,
    bases: &BaseAddresses,
    address: u64,
) -> Result<Option<Rule>, Failure> {
    let mut eh_frame = EhFrame::new(section, LittleEndian);
    eh_frame.set_address_size(8);
    let mut entries = eh_frame.entries(bases);
    let function = loop {
        match entries.next()?.ok_or(Failure::Bad)? {
            CieOrFde::Cie(_) => {}
            CieOrFde::Fde(partial) => break partial.parse(EhFrame::cie_from_offset)?,
        }
    };
    if function.offset() != offset {
        return Err(Failure::Bad);
    }
    if !function.contains(address) {
        return Ok(None);
    }
    let mut context = UnwindContext::new();
    let row = function.unwind_info_for_address(&eh_frame, bases, &mut context, address)?;
    let bytes = |expression: &UnwindExpression<usize>| {
        let found = expression.get(&eh_frame)?.0.slice();
        match found.len() <= MAX_EXPRESSION {
            true => Ok::<_, Failure>(found.to_vec()),
            false => Err(Failure::Bad),
        }
    };
    let cfa = match row.cfa() {
        CfaRule::RegisterAndOffset { register, offset } => Cfa::Register(register.0, *offset),
        CfaRule::Expression(expression) => Cfa::Expression(bytes(expression)?),
    };
    let mut registers = [const { Place::Lost }; REGISTERS];
    for (number, place) in (0u16..).zip(&mut registers) {
        *place = match row.register(Register(number)) {
            // By the ABI, calls preserve RBX, RBP and R12 to R15. RSP is the frame address.
            None => match number {
                3 | 6 | 12..=15 => Place::Same,
                7 => Place::Is(0),
                _ => Place::Lost,
            },
            Some(RegisterRule::Undefined) => Place::Lost,
            Some(RegisterRule::SameValue) => Place::Same,
            Some(RegisterRule::Offset(offset)) => Place::At(offset),
            Some(RegisterRule::ValOffset(offset)) => Place::Is(offset),
            Some(RegisterRule::Register(other)) => Place::Register(other.0),
            Some(RegisterRule::Expression(expression)) => Place::AtExpression(bytes(&expression)?),
            Some(RegisterRule::ValExpression(expression)) => {
                Place::IsExpression(bytes(&expression)?)
            }
            Some(_) => return Err(Failure::Bad),
        };
    }
    Ok(Some(Rule {
        cfa,
        registers,
        signal: function.is_signal_trampoline(),
        encoding: function.cie().encoding(),
    }))
}

/// The state that a DWARF expression reads.
pub(super) trait Machine {
    /// The error that ends an evaluation.
    type Error;
    /// Reads a register.
    fn register(&self, number: u16) -> Result<u64, Self::Error>;
    /// Reads the word in memory. `size` is 1, 2, 4 or 8 bytes.
    fn memory(&self, address: u64, size: u8) -> Result<u64, Self::Error>;
    /// Returns the error for a malformed expression.
    fn bad(&self) -> Self::Error;
}

/// The maximum number of operations of one expression, enough for every one that a compiler writes.
const MAX_OPERATIONS: u32 = 100;

/// Evaluates an expression with `initial` on its stack.
pub(super) fn expression<M: Machine>(
    machine: &M,
    code: &[u8],
    encoding: Encoding,
    initial: Option<u64>,
) -> Result<u64, M::Error> {
    use gimli::{Evaluation, EvaluationResult, Location, Value};
    let bad = |_: gimli::Error| machine.bad();
    let mut evaluation = Evaluation::new(EndianSlice::new(code, LittleEndian), encoding);
    evaluation.set_max_iterations(MAX_OPERATIONS);
    if let Some(initial) = initial {
        evaluation.set_initial_value(initial);
    }
    let mut result = evaluation.evaluate().map_err(bad)?;
    // Each request for a value counts as one operation.
    for _ in 0..MAX_OPERATIONS {
        result = match result {
            EvaluationResult::Complete => break,
            EvaluationResult::RequiresRegister { register, .. } => {
                let value = machine.register(register.0)?;
                evaluation
                    .resume_with_register(Value::Generic(value))
                    .map_err(bad)?
            }
            EvaluationResult::RequiresMemory { address, size, .. } => {
                let value = machine.memory(address, size)?;
                evaluation
                    .resume_with_memory(Value::Generic(value))
                    .map_err(bad)?
            }
            _ => return Err(machine.bad()),
        };
    }
    if !matches!(result, EvaluationResult::Complete) {
        return Err(machine.bad());
    }
    match evaluation.as_result().last().map(|piece| &piece.location) {
        Some(Location::Address { address }) => Ok(*address),
        _ => Err(machine.bad()),
    }
}
