//! Arguments of a static probe: the strings of `.note.stapsdt`, each with the location of a value
//! in assembler syntax.
//!
//! The caller provides the string and a way to look up symbols of the same file. At the hit it
//! provides the registers, the load bias and a way to read the process's memory. The syntax is AT&T
//! for x86-64:
//!
//! ```text
//! args    = [ arg { " " arg } ] ;
//! arg     = [ size "@" ] operand ;
//! size    = [ "-" ] ( "1" | "2" | "4" | "8" ) [ "f" ] ;
//! operand = "$" sum | "%" register | sum | [ sum ] "(" [ "%" base ] [ "," "%" index [ "," scale ] ] ")" ;
//! sum     = [ "-" ] term { ( "+" | "-" ) term } ;            (* at most one symbol *)
//! term    = integer | symbol ;
//! ```
//!
//! Not supported: registers other than the general ones (`%xmm0`, `%st`) and segments (`%fs:…`),
//! whose values are not available. Symbols by way of the global offset table (`x@GOTPCREL(%rip)`)
//! are not supported either. An argument that is not understood is kept with the reason, for the
//! sake of the others.

mod parse;

use std::fmt;

use super::register::Register;
use crate::x86_64::GeneralRegisters;
pub(super) use parse::symbols_in;

/// The maximum number of arguments of a probe, that of SystemTap's macros (sys/sdt.h).
pub const MAX_ARGUMENTS: usize = 12;
/// The maximum length of an argument's text in bytes. Mangled names of symbols may be long.
const MAX_TEXT: usize = 1024;

/// The reason why an argument's text is not understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ArgumentError {
    /// The size is not one of a register's value.
    #[error("invalid size {0:?}: expected 1, 2, 4 or 8 bytes")]
    Size(String),
    /// The register is not available at a hit.
    #[error("invalid register %{0}: expected a general register")]
    Register(String),
    /// The symbol is not in the file's tables, or is there several times.
    #[error("invalid symbol {0:?}: expected one that the file's symbol tables name once")]
    Symbol(String),
    /// The syntax is not supported.
    #[error("invalid operand {0:?}: expected a supported form of x86 AT&T syntax")]
    Syntax(String),
    /// The text is too long.
    #[error("invalid text: expected at most {MAX_TEXT} bytes, found {found}")]
    Long {
        /// The length in bytes.
        found: usize,
    },
}

/// The size and the type of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ValueKind {
    /// The size in bytes: 1, 2, 4 or 8.
    pub size: u8,
    /// True if it is a signed number, sign-extended to 64 bits.
    pub signed: bool,
    /// True if it is a floating-point number, represented by its bits.
    pub floating: bool,
}

impl ValueKind {
    /// Returns the C type of such a value: `int32_t`, `uint8_t`, `double`.
    #[must_use]
    pub fn type_name(self) -> &'static str {
        match (self.floating, self.signed, self.size) {
            (true, _, 4) => "float",
            (true, _, 8) => "double",
            (_, true, 1) => "int8_t",
            (_, true, 2) => "int16_t",
            (_, true, 4) => "int32_t",
            (_, true, _) => "int64_t",
            (_, false, 1) => "uint8_t",
            (_, false, 2) => "uint16_t",
            (_, false, 4) => "uint32_t",
            (_, false, _) => "uint64_t",
        }
    }

    /// Returns the low bytes of `bits`, sign-extended to 64 bits if it is signed, else
    /// zero-extended.
    fn of(self, bits: u64) -> u64 {
        let above = 64 - 8 * u32::from(self.size.clamp(1, 8));
        match self.signed && !self.floating {
            true => ((bits << above) as i64 >> above) as u64,
            false => bits << above >> above,
        }
    }
}

/// A number, or the address of a symbol and a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Sum {
    /// The number, modulo 2^64.
    number: u64,
    /// True if it is a link-time address, to which the load bias is added in a process.
    is_address: bool,
}

impl Sum {
    fn value(self, bias: u64) -> u64 {
        match self.is_address {
            true => self.number.wrapping_add(bias),
            false => self.number,
        }
    }
}

/// An address in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    displacement: Sum,
    base: Option<Register>,
    /// The index register and its scale.
    index: Option<(Register, u8)>,
}

impl Place {
    fn address(&self, registers: &GeneralRegisters, bias: u64) -> u64 {
        let mut address = self.displacement.value(bias);
        // `symbol(%rip)` is the symbol's own address.
        let is_symbol = self.displacement.is_address;
        let is_added = |base: &Register| !(is_symbol && base.is_instruction_pointer());
        let base = self.base.filter(is_added);
        if let Some(base) = base {
            address = address.wrapping_add(base.value(registers));
        }
        if let Some((index, scale)) = self.index {
            let scaled = index.value(registers).wrapping_mul(u64::from(scale));
            address = address.wrapping_add(scaled);
        }
        let index = self.index.map(|(index, _)| index);
        // Addresses are computed in 32 bits (Intel SDM volume 1, section 3.3.7.1).
        if base.into_iter().chain(index).any(|part| part.size() == 4) {
            address &= 0xffff_ffff;
        }
        address
    }
}

/// The location of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operand {
    Constant(Sum),
    Register(Register),
    Memory(Place),
}

/// One argument of a probe at one of its sites.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SiteArgument {
    text: String,
    kind: Option<ValueKind>,
    operand: Result<Operand, ArgumentError>,
}

impl SiteArgument {
    /// Parses the text of one argument. `address_of` returns the link-time address of a symbol of
    /// the same file.
    #[must_use]
    pub fn parse(text: &str, address_of: &dyn Fn(&str) -> Option<u64>) -> Self {
        if text.len() > MAX_TEXT {
            let found = text.len();
            return Self {
                text: text.chars().take(MAX_TEXT / 4).collect(),
                kind: None,
                operand: Err(ArgumentError::Long { found }),
            };
        }
        // A symbol may contain an @, too, but none has a size in front of it.
        let sized = text
            .split_once('@')
            .filter(|(size, _)| size.starts_with(|c: char| c == '-' || c.is_ascii_digit()));
        let (size, operand) = match sized {
            Some((size, operand)) => (Some(size), operand),
            None => (None, text),
        };
        let operand = parse::operand(operand, address_of);
        let kind = size.map(parse::size);
        let (kind, operand) = match (kind, operand) {
            (Some(Err(error)), _) => (None, Err(error)),
            (Some(Ok(kind)), operand) => (Some(kind), operand),
            // Notes of the first version have no sizes, so the operand determines it.
            (None, operand) => {
                let size = match &operand {
                    Ok(Operand::Register(register)) => register.size(),
                    _ => 8,
                };
                let kind = ValueKind {
                    size,
                    signed: false,
                    floating: false,
                };
                (operand.is_ok().then_some(kind), operand)
            }
        };
        Self {
            text: text.to_owned(),
            kind,
            operand,
        }
    }

    /// Parses the arguments of a site, at most [`MAX_ARGUMENTS`].
    #[must_use]
    pub fn parse_all(text: &str, address_of: &dyn Fn(&str) -> Option<u64>) -> Vec<Self> {
        parse::texts(text)
            .map(|text| Self::parse(text, address_of))
            .collect()
    }

    /// Returns the text of the note.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns the kind of its value, or `None` if its size is not understood.
    #[must_use]
    pub fn kind(&self) -> Option<ValueKind> {
        self.kind
    }

    /// Returns the reason why its value is never known, if so.
    #[must_use]
    pub fn error(&self) -> Option<&ArgumentError> {
        self.operand.as_ref().err()
    }

    /// Returns its value at a hit of its site, extended to 64 bits. Returns `None` if the text is
    /// not understood or its memory cannot be read. `bias` is added to link-time addresses, and
    /// `read` fills a buffer from the process's memory.
    #[must_use]
    pub fn value(
        &self,
        registers: &GeneralRegisters,
        bias: u64,
        read: &dyn Fn(u64, &mut [u8]) -> bool,
    ) -> Option<u64> {
        let kind = self.kind?;
        let bits = match self.operand.as_ref().ok()? {
            Operand::Constant(sum) => sum.value(bias),
            Operand::Register(register) => register.bits_from_lowest(registers),
            Operand::Memory(place) => {
                let mut bytes = [0; 8];
                let wanted = bytes.get_mut(..usize::from(kind.size))?;
                if !read(place.address(registers, bias), wanted) {
                    return None;
                }
                u64::from_le_bytes(bytes)
            }
        };
        Some(kind.of(bits))
    }
}

impl fmt::Display for SiteArgument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests;
